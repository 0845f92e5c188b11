"""What tasks made: a file each, from which the same command goes on (`runtime.tasks`); reading them needs no Ray."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from domext_ray.storage import Place

Result: TypeAlias = dict[str, Any]
"""JSON, but for bytes."""


@dataclass(frozen=True)
class Records:
    """Results of tasks, a file each."""

    place: Place  # their folder
    key: str = ""  # what decides the result of every task
    find_fault: Callable[[Result], str] = lambda result: ""  # what is wrong with the files that a result names

    def find(self, number: int) -> Place:
        return self.place / f"{number:06d}.json"

    def read(self, number: int, key: str = "") -> tuple[Result | None, str]:
        """Return the result of a task, None where it is to be made, and what is wrong with a damaged one."""
        place = self.find(number)
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            return None, ""
        digest, _, body = content.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None, f"{place} is damaged"
        record = json.loads(body, object_hook=_decode)
        if record["key"] != [self.key, key]:
            return None, ""
        fault = self.find_fault(record["result"])
        return (None if fault else record["result"]), fault

    def write(self, number: int, result: Result, key: str = "") -> None:
        """Keep the result of a task, all of whose files are there."""
        body = json.dumps({"key": [self.key, key], "result": result}, default=_encode).encode()
        self.find(number).put(hashlib.sha256(body).hexdigest().encode() + b"\n" + body, flush=False)


def _encode(value: Any) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"a task's result holds {type(value).__name__}")
    return {"base64": base64.b64encode(value).decode()}


def _decode(record: dict[str, Any]) -> Any:
    return base64.b64decode(record["base64"]) if record.keys() == {"base64"} else record
