"""JSON whose parts are decoded one by one, so that each knows its line.

Enters: the text of a file. Leaves: decoded parts and their lines; a part of another layout is named by FILE:LINE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from domext_ray.errors import CorpusError

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonCursor:
    """A place in a JSON text.

    Args:
        path: the file, for messages.
        text: its text.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        self._position = 0
        self._line, self._counted = 1, 0

    @property
    def line(self) -> int:
        """Line of the next part, from 1."""
        self._skip_space()
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def peek(self) -> str:
        """Return the next part's first character, "" at the end."""
        self._skip_space()
        return self._text[self._position : self._position + 1]

    def decode(self) -> Any:
        """Decode the next part and go past it."""
        self._skip_space()
        try:
            value, self._position = _DECODER.raw_decode(self._text, self._position)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{self._path}:{error.lineno} is no JSON ({error.msg}); mend the file.") from None
        except RecursionError:
            raise CorpusError(f"{self._path}:{self.line} is JSON nested too deeply; mend the file.") from None
        except ValueError:
            raise CorpusError(f"{self._path}:{self.line} has a number of too many digits; mend the file.") from None
        return value

    def iterate_list(self, what: str = "the file") -> Iterator[int]:
        """Yield the line of every element of a list; the caller decodes the element before it goes on."""
        self._expect("[", f"{what} must be a list")
        if self.peek() == "]":
            self._position += 1
            return
        while True:
            yield self.line
            if self._step("]"):
                return

    def iterate_members(self, what: str = "the file") -> Iterator[str]:
        """Yield every key of an object; the caller decodes the value before it goes on."""
        self._expect("{", f"{what} must be an object")
        if self.peek() == "}":
            self._position += 1
            return
        while True:
            key = self.decode()
            if not isinstance(key, str):
                raise CorpusError(f"{self._path}:{self.line} is no JSON (a key must be text); mend the file.")
            self._expect(":", "a colon must follow a key")
            yield key
            if self._step("}"):
                return

    def expect_end(self) -> None:
        """Raise CorpusError if anything follows."""
        if self.peek():
            raise CorpusError(f"{self._path}:{self.line} is no JSON (more follows the end); mend the file.")

    def _step(self, end: str) -> bool:
        """Go past a comma, or past the end of a list or object; return whether it was the end."""
        is_end = self.peek() == end
        if not is_end:
            self._expect(",", f"a comma or {end} must follow")
        else:
            self._position += 1
        return is_end

    def _expect(self, character: str, rule: str) -> None:
        found = self.peek()
        if found != character:
            shown = repr(found) if found else "the end"
            raise CorpusError(f"{self._path}:{self.line} has another layout: {rule}, but {shown} is there.")
        self._position += 1

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end()
