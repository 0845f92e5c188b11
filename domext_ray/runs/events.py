"""What a run's workers tell the driver's terminal: sentences, and what they are doing now; and where its time went.

Ray keeps what workers print from the driver. A worker appends a line to RUN/events.jsonl instead, and the driver, which
follows that file, prints it; the file stays in the run's directory as its record. What a run is doing belongs to a
stage of its job, so that the seconds of each stage follow from the file (`measure_times`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from dataclasses import dataclass

from domext_ray.errors import StorageError
from domext_ray.files import NUMBER, check_values
from domext_ray.storage import Log, Place, parse_json

EVENTS, TAIL_BYTES = "events.jsonl", 32_768
"""The file, and what is read of its end, or of another one that grows, to see what is new."""
STAGES = {
    (START_UP := "start_up"): "start-up",
    (PREPARING := "preparing"): "preparing the text",
    (WORKERS := "workers"): "starting and ending workers",
    (LOADING := "loading"): "loading the model",
    (FIRST_STEP := "first_step"): "first step",
    (TRAINING := "training"): "further steps",
    (EVALUATION := "evaluation"): "evaluations",
    (CHECKPOINTS := "checkpoints"): "checkpoints",
    (REPORT := "report"): "report",
    (EXPORT := "export"): "export",
}
"""The stages of a job, in the order in which they begin, and what reports call them."""


@dataclass(frozen=True)
class Event:
    """What a worker said."""

    text: str  # a sentence for the user, or what the run is doing now, such as "evaluating the start"
    is_phase: bool  # it is the latter
    seconds: float  # when, as `time.time()` has it
    stage: str = ""  # of the job that the phase belongs to, one of `STAGES`; empty: none, as after the last one


def notify_driver(run_dir: Place, text: str) -> None:
    """Say a sentence on the driver's terminal, from any process that sees the run's directory."""
    _append(run_dir, {"note": text})


def enter_phase(run_dir: Place, text: str, stage: str = "", seconds: float | None = None) -> None:
    """Note what the run is doing from now on, such as "evaluating the start", which the driver says if it takes long.

    `stage` is one of `STAGES`; `seconds` is when the phase began, as `time.time()` has it.
    """
    _append(run_dir, {"phase": text, **({"stage": stage} if stage else {})}, seconds)


def _append(run_dir: Place, said: dict[str, str], seconds: float | None = None) -> None:
    line = json.dumps({"seconds": round(time.time() if seconds is None else seconds, 3), **said}) + "\n"
    try:
        _open_log(run_dir / EVENTS).add(line)
    except (OSError, StorageError) as error:  # what must be written says so; this goes to the worker's log
        text = next(iter(said.values()))
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
        print(f"{text} ({reason}: {run_dir / EVENTS})", file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=8)
def _open_log(place: Place) -> Log:
    """The log of a run's events, which in a bucket remembers what is there."""
    return Log(Place(str(place)))  # without a fence: a job that has lost its run may say so


def measure_times(run_dir: Place) -> dict[str, float]:
    """Return the seconds that each stage of a run's newest job took so far, by names of `STAGES`; empty: not recorded.

    The sum is the time from the job's start to its newest event: each phase lasts until the next one.
    """
    phases = [event for event in EventReader(run_dir, from_start=True).read() if event.is_phase]
    starts = [i for i, event in enumerate(phases) if event.stage == START_UP]
    if not starts:
        return {}
    own = phases[starts[-1] :]
    found = dict.fromkeys(STAGES, 0.0)
    for phase, following in zip(own, own[1:], strict=False):
        if phase.stage in found:
            found[phase.stage] += max(0.0, following.seconds - phase.seconds)  # clocks of two nodes may differ
    return {stage: round(seconds, 3) for stage, seconds in found.items() if seconds}


class EventReader:
    """Reads what is added to a run's events from now on; `from_start`: what is there already, too."""

    def __init__(self, run_dir: Place, *, from_start: bool = False) -> None:
        self.path = run_dir / EVENTS
        info = self.path.info()
        self._place = 0 if from_start or info is None else info.size

    def read(self) -> list[Event]:
        """Return what was said since the last call."""
        try:
            end, start = self.path.read_end(TAIL_BYTES)  # of a bucket in one request, which asks what has changed
            added = end[self._place - start :] if start <= self._place else self.path.read_bytes(self._place)
        except FileNotFoundError:
            return []
        added = added[: added.rfind(b"\n") + 1]  # a line that is being written is read next time
        self._place += len(added)
        events = []
        for line in added.splitlines():
            with contextlib.suppress(ValueError):  # cut short by a full disk, or by two writers
                said = parse_json(line)
                check_values(self.path, said, "event", "", {"seconds": NUMBER})
                text, stage = said.get("phase", said.get("note")), said.get("stage", "")
                check_values(self.path, {"text": text, "stage": stage}, "event", "", {"text": str, "stage": str})
                events.append(Event(text, "phase" in said, said["seconds"], stage))
        return events
