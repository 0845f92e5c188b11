"""What a run's workers tell the driver's terminal: sentences, and what they are doing now; and where its time went.

Ray keeps what workers print from the driver. A worker appends a line to RUN/events.jsonl instead, and the driver, which
follows that file, prints it; the file stays in the run's directory as its record. What a run is doing belongs to a
stage of its job, so that the seconds of each stage follow from the file (`measure_times`).
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from dataclasses import dataclass

from domext_ray.errors import StorageError
from domext_ray.storage import Log, Place, Where

EVENTS = "events.jsonl"
START_UP, PREPARING, WORKERS, LOADING = "start_up", "preparing", "workers", "loading"
FIRST_STEP, TRAINING, EVALUATION, CHECKPOINTS = "first_step", "training", "evaluation", "checkpoints"
REPORT, EXPORT = "report", "export"
STAGES = {
    START_UP: "start-up",
    PREPARING: "preparing the text",
    WORKERS: "starting and ending workers",
    LOADING: "loading the model",
    FIRST_STEP: "first step",
    TRAINING: "further steps",
    EVALUATION: "evaluations",
    CHECKPOINTS: "checkpoints",
    REPORT: "report",
    EXPORT: "export",
}
"""The stages of a job, in the order in which they begin, and what reports call them."""


@dataclass(frozen=True)
class Event:
    """What a worker said.

    Args:
        text: a sentence for the user, or what the run is doing now, such as "evaluating the start".
        is_phase: it is the latter.
        seconds: when, as `time.time()` has it.
        stage: of the job that the phase belongs to, one of `STAGES`; empty: none, as after the last one.
    """

    text: str
    is_phase: bool
    seconds: float
    stage: str = ""


def notify_driver(run_dir: Where, text: str) -> None:
    """Say a sentence on the driver's terminal, from any process that sees the run's directory.

    Args:
        run_dir: the run's directory.
        text: the sentence.
    """
    _append(run_dir, {"note": text})


def enter_phase(run_dir: Where, text: str, stage: str = "", seconds: float | None = None) -> None:
    """Note what the run is doing from now on, which the driver says if it takes long.

    Args:
        run_dir: the run's directory.
        text: such as "evaluating the start".
        stage: of the job that it belongs to, one of `STAGES`; empty: none.
        seconds: when it began, as `time.time()` has it; None: now.
    """
    _append(run_dir, {"phase": text, **({"stage": stage} if stage else {})}, seconds)


def _append(run_dir: Where, said: dict[str, str], seconds: float | None = None) -> None:
    line = json.dumps({"seconds": round(time.time() if seconds is None else seconds, 3), **said}) + "\n"
    try:
        _open_log(Place(run_dir) / EVENTS).add(line)
    except (OSError, StorageError) as error:  # what must be written says so; this goes to the worker's log
        text = next(iter(said.values()))
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
        print(f"{text} ({reason}: {Place(run_dir) / EVENTS})", file=sys.stderr, flush=True)


@functools.lru_cache(maxsize=8)
def _open_log(place: Place) -> Log:
    """The log of a run's events, which in a bucket remembers what is there."""
    return Log(Place(str(place)))  # without a fence: a job that has lost its run may say so


def measure_times(run_dir: Where) -> dict[str, float]:
    """Return the seconds that each stage of a run's newest job took so far, by names of `STAGES`; empty: not recorded.

    The sum is the time from the job's start to its newest event: each phase lasts until the next one.

    Args:
        run_dir: the run's directory.
    """
    phases = [each for each in EventReader(run_dir, from_start=True).read() if each.is_phase]
    starts = [i for i, each in enumerate(phases) if each.stage == START_UP]
    if not starts:
        return {}
    own = phases[starts[-1] :]
    found = dict.fromkeys(STAGES, 0.0)
    for phase, following in zip(own, own[1:], strict=False):
        if phase.stage in found:
            found[phase.stage] += max(0.0, following.seconds - phase.seconds)  # clocks of two nodes may differ
    return {stage: round(seconds, 3) for stage, seconds in found.items() if seconds}


class EventReader:
    """Reads what is added to a run's events from now on.

    Args:
        run_dir: the run's directory.
        from_start: read what is there already, too.
    """

    def __init__(self, run_dir: Where, *, from_start: bool = False) -> None:
        self.path = Place(run_dir) / EVENTS
        info = self.path.info()
        self._place = 0 if from_start or info is None else info.size

    def read(self) -> list[Event]:
        """Return what was said since the last call."""
        info = self.path.info()
        if info is None or info.size <= self._place:
            return []
        added = self.path.read_bytes(self._place)
        added = added[: added.rfind(b"\n") + 1]  # a line that is being written is read next time
        self._place += len(added)
        events = []
        for line in added.splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # cut short by a full disk, or by two writers on a network file system
                continue
            is_phase = "phase" in record
            text = record["phase" if is_phase else "note"]
            events.append(Event(text, is_phase, record["seconds"], record.get("stage", "")))
        return events
