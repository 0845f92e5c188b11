"""Sound content -> content as a broken disk, a careless editor or an attacker leaves it: bytes, and values of JSON.

What is drawn for one kind of file is tried on all of them: a line of JSON Lines, the header of safetensors and a YAML
file of options are documents of JSON, too, and what is in gzip is changed before it is packed again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st

_DEEP = 20_000
VALUES = (
    *("null", "true", "0", "-1", "1000000", "1.5", "1e999", "NaN", str(2**63), "9" * 5000, '""', '"x"', '"0"', '"nan"'),
    *('"two\\nlines"', '"nul\\u0000"', '"half \\ud800"', '"\\u2028"', '"../../x"', '"' + "x" * 100_000 + '"'),
    *("[]", "{}", "[null]", '[["x"]]', '{"": null}', '{"a": 1, "a": 2}', "[" * _DEEP + "]" * _DEEP),
    *('{"a":' * _DEEP + "1" + "}" * _DEEP, "[" * 930 + "]" * 930, "[1, 2", "é"),
)
"""What stands in the place of a value, as JSON has it, or as none has it."""
_BOMB = "".join(f"\n  - &a{i} [{', '.join([f'*a{i - 1}'] * 20)}]" for i in range(1, 9))
_MERGES = "".join(f"\na{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 20)}]}}" for i in range(1, 9))
YAML = (
    f"train:\n  - &a0 [x, x]{_BOMB}",
    f"a0: &a0 {{x: 1, y: 2}}{_MERGES}",
    "run: &a {dir: *a}",
    "run: &a {<<: *a}",
    *(
        f"seed: {value}"
        for value in ("!!int ''", "!!bool x", "!!float ''", "!!timestamp x", "!!binary é", "!!set {a, b}")
    ),
    *(
        f"seed: {value}"
        for value in ("1" + ":0" * 300 + ".5", "1" + ":59" * 300, "2026-99-99", "0b", "!!python/name:os.system")
    ),
    *(
        "seed: 1\nseed: 2",
        "? [a]\n: b",
        "<<: 5",
        "a: b: c",
        "--- a\n--- b",
        "%YAML 9.9\n---\na",
        "\t",
        "&a *a",
        "a: *b",
        "=: =",
    ),
)
WHOLE = tuple(
    raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass")
    for raw in (b"", b"\0", b"\n", b"\xff", "\ud800", "\ufeff", b"\xff\xfea\0", b"\x1f\x8b", b"PAR1PAR1", b"\xff" * 8)
    + (b"\0" * 100_000, b"a" * 3_000_000, b"\n" * 100_000, *VALUES, *YAML)
)
"""What stands in the place of a whole file."""
PIECES = (b"", b"\0", b"\xff", b"\xed\xa0\x80", b"\r", b"\n", b"\r\n", b'"', b"\t", b",", b"{", b"]", b"\x7f" * 9)
"""What stands in the place of a few bytes."""


@st.composite
def mutate(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """Draw what has become of a file's content; its name tells what it is."""
    if name.endswith(".gz") and draw(st.booleans()):
        return gzip.compress(draw(mutate(name[:-3], gzip.decompress(content))))
    document = draw(st.booleans()) and _find_document(draw, name, content)
    if document:
        before, value, after = document
        made = draw(_mutate_value(value)).encode("utf-8", "surrogatepass")
        if name.endswith(".safetensors"):
            before = len(made).to_bytes(8, "little")
        return before + made + after
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(WHOLE))
    first = draw(st.integers(0, max(0, len(content) - 1)))
    last = draw(st.sampled_from((first, first + 1, first + 8, len(content))))
    if draw(st.booleans()):
        return content[:first] + draw(st.sampled_from(PIECES)) + content[last:]
    flipped = bytes(byte ^ draw(st.sampled_from((1, 128, 255))) for byte in content[first : min(last, first + 8)])
    return content[:first] + flipped + content[first + len(flipped) :]


def _find_document(draw: st.DrawFn, name: str, content: bytes) -> tuple[bytes, Any, bytes] | None:
    """A part of some content that is a JSON document, with what stands before it and after it; None: there is none."""
    if name.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        return content[:8], json.loads(content[8:end]), content[end:]
    lines = content.splitlines(keepends=True)
    first = draw(st.integers(0, max(0, len(lines) - 1)))
    for before, text, after in (
        (b"", content, b""),
        (b"".join(lines[:first]), b"".join(lines[first : first + 1]), b"\n" + b"".join(lines[first + 1 :])),
    ):
        try:
            value = (yaml.safe_load if name.endswith(".yaml") else json.loads)(text)
        except (ValueError, yaml.YAMLError):
            continue
        if isinstance(value, (dict, list)):
            return before, value, after
    return None


@st.composite
def _mutate_value(draw: st.DrawFn, value: Any) -> str:
    """Draw JSON in which one of the values is another, is gone, or has another name."""
    mark = "\0 here"
    made = json.loads(json.dumps(value))
    place, key = draw(st.sampled_from([*_list_places(made)] or [([made], 0)]))
    match draw(st.integers(0, 5)):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[json.loads(draw(st.sampled_from(('""', '"two\\nlines"', '"a.b"', '"\\ud800"', '"1"'))))] = place.pop(
                key
            )
        case 2:
            place[key] = json.loads(
                json.dumps(draw(st.sampled_from([holder[name] for holder, name in _list_places(made)])))
            )
        case _:
            place[key] = mark
    return json.dumps(made, ensure_ascii=False).replace(json.dumps(mark), draw(st.sampled_from(VALUES)))


def _list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list and object within a value with each of its keys."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _list_places(item)
