"""What a run's workers tell the driver's terminal: sentences, and what they are doing now.

Ray keeps what workers print from the driver. A worker appends a line to RUN/events.jsonl instead, and the driver, which
follows that file, prints it; the file stays in the run's directory as its record.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Event:
    """What a worker said.

    Args:
        text: a sentence for the user, or what the run is doing now, such as "evaluating the start".
        is_phase: it is the latter.
        seconds: when, as `time.time()` has it.
    """

    text: str
    is_phase: bool
    seconds: float


def tell_driver(run_dir: Path, text: str) -> None:
    """Say a sentence on the driver's terminal, from any process that sees the run's directory.

    Args:
        run_dir: the run's directory.
        text: the sentence.
    """
    _append(run_dir, text, is_phase=False)


def enter_phase(run_dir: Path, text: str) -> None:
    """Note what the run is doing from now on, which the driver says if it takes long.

    Args:
        run_dir: the run's directory.
        text: such as "evaluating the start".
    """
    _append(run_dir, text, is_phase=True)


def _append(run_dir: Path, text: str, *, is_phase: bool) -> None:
    line = json.dumps({"seconds": round(time.time(), 3), "phase" if is_phase else "note": text}) + "\n"
    try:
        with (run_dir / EVENTS).open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:  # a full disk: what must be written says so; this goes to the worker's log
        print(f"{text} ({os.strerror(error.errno or 0)}: {run_dir / EVENTS})", file=sys.stderr, flush=True)


class EventReader:
    """Reads what is added to a run's events from now on.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / EVENTS
        self._place = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> list[Event]:
        """Return what was said since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                added = file.read()
        except FileNotFoundError:
            return []
        added = added[: added.rfind(b"\n") + 1]  # a line that is being written is read next time
        self._place += len(added)
        events = []
        for line in added.splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # cut short by a full disk, or by two writers on a network file system
                continue
            is_phase = "phase" in record
            events.append(Event(record["phase" if is_phase else "note"], is_phase, record["seconds"]))
        return events
