"""JSON whose values know their lines."""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import partial
from json import decoder, scanner
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError
from domext_ray.families.readers.issues import shorten
from domext_ray.text.data.json_forms import part_json_words

_KINDS = {list: "a list", dict: "an object"}
_TOO_LONG = "has a number of too many digits"


class _List(list[Any]):
    starts: list[int]


class _Object(dict[str, Any]):
    starts: list[int]


class _Decoder(json.JSONDecoder):
    """Lists and objects know where in the text each of their values begins."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_object = partial(self._parse, _Object, decoder.JSONObject)  # type: ignore[attr-defined]
        self.parse_array = partial(self._parse, _List, decoder.JSONArray)  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _parse(self, kind: type[Any], parse: Callable[..., Any], state: tuple[str, int], *_: Any) -> tuple[Any, int]:
        starts: list[int] = []

        def scan(text: str, start: int) -> Any:
            starts.append(start)
            return self.scan_once(text, start)

        try:
            value, end = parse(state, True, scan, None, None) if kind is _Object else parse(state, scan)
        except json.JSONDecodeError:
            raise
        except ValueError:
            raise json.JSONDecodeError(_TOO_LONG, state[0], starts[-1]) from None
        made = kind(value)
        made.starts = starts
        return made, end


class JsonText:
    """The content of a JSON file; a CorpusError names the line where it is none."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        text = part_json_words(text)
        self._ends = [match.start() for match in re.finditer("\n", text)]
        try:
            self.value = _Decoder().decode(text)
        except json.JSONDecodeError as error:
            fault = _TOO_LONG if error.msg == _TOO_LONG else f"is no JSON ({error.msg})"
            raise CorpusError(f"{path}:{error.lineno} {fault}; mend the file.") from None
        except (RecursionError, ValueError) as error:
            fault = "is nested too deeply" if isinstance(error, RecursionError) else _TOO_LONG
            raise CorpusError(f"{path}:1 {fault}; mend the file.") from None

    def list_values(self, value: Any, kind: Any, what: str, line: int = 1) -> Iterator[tuple[str, Any, int]]:
        """Yield (key, value, line) of a list, whose keys are empty, or of an object that begins at a line."""
        if not isinstance(value, kind):
            rule = f"{what} must be {_KINDS[kind]}, but {shorten(value, 40)} is there"
            raise CorpusError(f"{self.path}:{line} has another layout: {rule}.")
        pairs = value.items() if isinstance(value, dict) else (("", item) for item in value)
        if len(value.starts) != len(value):
            raise CorpusError(f"{self.path}:{line} has a key twice in {what}; give each its own.")
        for (key, item), start in zip(pairs, value.starts, strict=True):
            yield key, item, bisect(self._ends, start) + 1
