"""JSON whose outer parts know their lines.

Enters: the text of a file. Leaves: its `Part`s down to a depth; below it values are decoded as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from domext_ray.errors import CorpusError

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_CLOSING = {"[": "]", "{": "}"}
_KINDS = {"[": "a list", "{": "an object"}


class Part(NamedTuple):
    """A value: where it begins, with which character, and what it is, of an outer list or object (key, part)s."""

    path: Path
    line: int
    start: str
    value: Any

    def list_parts(self, start: str, what: str) -> list[tuple[str, Part]]:
        """Return the parts of a list ("[") or an object ("{"), with their keys, "" in a list."""
        if self.start != start:
            found = repr(self.start) if self.start else "the end"
            rule = f"{what} must be {_KINDS[start]}, but {found} is there"
            raise CorpusError(f"{self.path}:{self.line} has another layout: {rule}.")
        return self.value


class _Parser:
    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.position = path, text, 0
        self.line, self.counted = 1, 0

    def peek(self) -> str:
        self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        return self.text[self.position : self.position + 1]

    def decode(self) -> Any:
        value, self.position = _DECODER.raw_decode(self.text, self.position)
        return value

    def expect(self, characters: str) -> None:
        if self.peek() not in characters:
            json.loads(self.text)  # says what is wrong
        self.position += 1

    def begin(self) -> Part:
        """The next part without its value."""
        start = self.peek()
        self.line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return Part(self.path, self.line, start, None)

    def parse(self, depth: int) -> Part:
        part = self.begin()
        if not depth or part.start not in _CLOSING:
            return part._replace(value=self.decode())
        parts: list[tuple[str, Part]] = []
        self.position += 1
        while self.peek() != _CLOSING[part.start]:
            key = ""
            if parts:
                self.expect(",")
            if part.start == "{":
                self.expect('"')
                self.position -= 1
                key = self.decode()
                self.expect(":")
            parts.append((key, self.parse(depth - 1)))
        self.position += 1
        return part._replace(value=parts)


def parse_json(path: Path, text: str, depth: int, start: str, what: str) -> list[tuple[str, Part]]:
    """Decode the text of a file, a list ("[") or an object ("{"), whose inner ones have parts down to a depth."""
    parser = _Parser(path, text)
    try:
        if parser.peek() != start:
            parser.begin().list_parts(start, what)
        part = parser.parse(depth)
        if parser.peek():
            json.loads(text)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{path}:{error.lineno} is no JSON ({error.msg}); mend the file.") from None
    except RecursionError:
        raise CorpusError(f"{path}:{parser.line} is nested too deeply; mend the file.") from None
    except CorpusError:
        raise
    except ValueError:
        raise CorpusError(f"{path}:{parser.line} has a number of too many digits; mend the file.") from None
    return part.list_parts(start, what)
