"""The run's written record, metrics.jsonl, which trackers are told too, and the line that a terminal shows.

One JSON object a step; a resumed run cuts the file back to its checkpoint, so that no step stands there twice. A
worker of an older attempt (a driver was killed, its worker lives on for a moment) is refused before it writes. In a
bucket metrics.jsonl grows every few seconds.

What a run's loss and accuracy are called, there, in summary.json and for people, follows from its objective. Figures
say themselves which they are: `train/infonce_loss` is that of infonce.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domext_ray.config.pretrain import TrainConfig
from domext_ray.errors import StorageError
from domext_ray.progress import StatusLine, format_seconds
from domext_ray.runs.attempts import Attempt
from domext_ray.runs.events import TAIL_BYTES, EventReader, notify_driver
from domext_ray.runtime.waiting import StallTimer
from domext_ray.storage import Log, Place, parse_json
from domext_ray.training.tracking import PUBLISH, Tracked, Tracking

TRAIN, DOMAIN = "train/", "eval/domain_"
"""What stands before `LossNames.loss` in metrics.jsonl: of a step, and of an evaluation on held-out text."""
REFRESH_SECONDS, REQUEST_SECONDS = 0.5, 10.0
"""Between two looks at a run's files on a disk, and between two requests for those in a bucket."""
SHOWN = {
    "train/lr": "lr {:.1e}",
    "train/grad_norm": "norm {:.2g}",
    "throughput/mfu": "MFU {:.0%}",
    "data/wait_seconds": "waits {share:.0%}",
}
"""What else the line of a step says of what its record has, the most important first: a narrow terminal has no more."""
CHECK_REST = 20.0
"""Times the seconds that it took to ask whether the run is still this attempt's: so long it is not asked again."""


@dataclass(frozen=True)
class LossNames:
    """How the figures of an objective are called."""

    key: str  # mlm makes mlm_loss and mlm_accuracy
    title: str  # the loss for people
    unit: str  # what the loss is a mean over
    count: str  # name of the number of these in metrics.jsonl
    loss_help: str  # what the two are, for those who do not know the objective
    accuracy_help: str
    share: str = ""  # what the accuracy is a share of, and when one counts, for people; empty: accuracy

    @property
    def loss(self) -> str:
        return f"{self.key}_loss"

    @property
    def accuracy(self) -> str:
        return f"{self.key}_accuracy"


MLM = LossNames("mlm", "loss", "token", "masked_tokens", "masked-LM loss (nats per token)", "masked tokens predicted")
_VECTORS = {
    "infonce": LossNames(
        "infonce",
        "InfoNCE loss",
        "row",
        "compared_rows",
        "loss (nats per row)",
        "rows whose vector is nearest to their other view's",
        "rows matched",
    ),
}
_ALL = (MLM, *_VECTORS.values())


def name_losses(kind: str) -> LossNames:
    """Return how the figures of an `objective.kind` are called."""
    return _VECTORS.get(kind, MLM)


def find_losses(figures: Mapping[str, Any], place: str = "") -> LossNames | None:
    """Return how a run's figures are called, given some of them; None: they have no loss.

    They are "domain" of summary.json, or a line of metrics.jsonl, with `TRAIN` or `DOMAIN` as `place`.
    """
    return next((names for names in _ALL if place + names.loss in figures), None)


def find_run_losses(records: Sequence[Mapping[str, Any]]) -> LossNames:
    """Return how a run's figures are called, given its lines of metrics.jsonl; without a loss those of masked words."""
    found = (find_losses(record, place) for record in reversed(records) for place in (TRAIN, DOMAIN))
    return next(filter(None, found), MLM)


def read_metrics(path: Place, num_bytes: int = 0) -> list[dict[str, Any]]:
    """Read metrics.jsonl, or the last bytes of it; lines that a crash cut short or damaged are left out."""
    records = list[dict[str, Any]]()
    try:
        content = path.read_end(num_bytes)[0] if num_bytes else path.read_bytes()
    except FileNotFoundError:
        content = b""
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):  # no JSON, or no UTF-8
            record = parse_json(line)
            is_whole = isinstance(record, dict) and type(record.get("step")) is int
            if is_whole and not any(isinstance(value, list | dict) for value in record.values()):
                records.append(record)
    return records


def find_last_step(path: Place, default: int = 0) -> int:
    """Return the newest step in metrics.jsonl; `default` before the first record."""
    return max((record["step"] for record in read_metrics(path, TAIL_BYTES)), default=default)


def as_written(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as it is written: JSON has no nan or infinity, and such a figure is null there."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class MetricsLog:
    """Rank 0's writer of metrics.jsonl, which hands its records to trackers, too.

    Lines after `step`, that of the checkpoint that the run goes on from, are cut off; at step 0 the file is new.
    Without `is_evaluated`, the step's own line goes, too, and is still to be written. Trackers are told the `options`.
    """

    def __init__(
        self,
        run_dir: Place,
        step: int,
        trackers: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        *,
        is_evaluated: bool = True,
    ) -> None:
        self.run = run_dir
        self._due = 0.0
        self._check()
        path = self.run / "metrics.jsonl"
        last = step if is_evaluated else step - 1
        kept = [record for record in read_metrics(path) if record["step"] <= last] if step else []
        self.log = Log(path, start="".join(json.dumps(record) + "\n" for record in kept))
        tracked = Tracked(self.run, self.run.parent, options or {})
        self.tracking = Tracking(trackers, tracked, kept, lambda _, sentence: notify_driver(run_dir, sentence))

    def _check(self) -> None:
        if time.monotonic() >= self._due:
            started = time.monotonic()
            self._is_asked = self.run.check()
            self._due = time.monotonic() + CHECK_REST * (time.monotonic() - started)

    def is_asked_to_end(self) -> bool:
        """Whether the attempt is asked to save and end."""
        self._check()
        return self._is_asked

    def write(self, record: dict[str, Any]) -> None:
        """Append the record of one step."""
        self._check()
        self.log.add(json.dumps(as_written(record)) + "\n")
        self.tracking.write(record)

    def confirm_end(self) -> None:
        """Tell the driver, which has asked for it, that all is saved and nothing more is going to be published."""
        if isinstance(self.run.fence, Attempt):
            self.run.fence.confirm_end()

    def publish(self) -> None:
        """Let all readers see what was written so far."""
        self.log.flush()
        self.tracking.write(PUBLISH)

    def close(self) -> None:
        """Close the file, and end the trackers."""
        self.log.close()
        self.tracking.close()


class RunProgress:
    """A thread of the driver that shows the newest lines of metrics.jsonl: step, loss, speed, time left, and more.

    On a terminal one line is rewritten; elsewhere a plain line appears every ten seconds. Of a run in a bucket, which
    has a price for each request, steps are some 20 s old. Evaluations always get a line of their own, and so does what
    workers tell the driver (events.py). When nothing has moved for a while, a line says what the run is doing, and what
    it waits for: `describe_waiting` says what Ray cannot place. `note_evaluation` is called after evaluations,
    in the thread.
    """

    def __init__(
        self,
        path: Place,
        limits: TrainConfig,
        phase: str = "training",
        describe_waiting: Callable[[], str] = lambda: "",
        note_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.limits, self.note_evaluation = path, limits, note_evaluation
        self.line = StatusLine()
        self.events = EventReader(self.path.parent)
        self.phase, self.stall = phase, StallTimer(self.line, describe_waiting)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self.shown_step = find_last_step(path, default=-1)

    def __enter__(self) -> RunProgress:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join(timeout=5)
        if not self.thread.is_alive():  # else it waits for storage that does not answer, or writes a page
            self._show_events()
            self._show_steps()
        self.line.end()

    def _follow(self) -> None:
        """Look at both files again and again; in a bucket at one of them in turn."""
        seconds = REFRESH_SECONDS / 2 if self.path.is_local else REQUEST_SECONDS
        for show in itertools.cycle((self._show_events, self._show_steps)):
            if self.stopped.wait(seconds):
                return
            with contextlib.suppress(StorageError):  # whoever must write says so
                show()

    def _show_events(self) -> None:
        for event in self.events.read():
            self.stall.note_move()
            if event.is_phase:
                self.phase = event.text
            else:
                self.line.keep(event.text)

    def _show_steps(self) -> None:
        newest = read_metrics(self.path, TAIL_BYTES)
        if not newest or newest[-1]["step"] == self.shown_step:
            self.stall.look(self.phase)
            return
        self.stall.note_move()
        evaluated = [entry for entry in newest if entry["step"] > self.shown_step and find_losses(entry, DOMAIN)]
        for record in evaluated:
            self.line.keep(_describe_evaluation(record))
        self.shown_step = newest[-1]["step"]
        if evaluated and not self.stopped.is_set():  # else whoever ended the run knows better what to note
            self.note_evaluation()
        names = find_losses(newest[-1], TRAIN)
        if names is not None:
            self.line.show(*self._describe_steps([entry for entry in newest if TRAIN + names.loss in entry], names))

    def _describe_steps(self, records: list[dict[str, Any]], names: LossNames) -> tuple[str, float]:
        """The line of the newest step, and the share of all steps' time that has passed."""
        newest = records[-1]
        loss, seconds, rate, *others = (
            _mean(records, name)
            for name in (TRAIN + names.loss, "time/step_seconds", "throughput/tokens_per_second", *SHOWN)
        )
        is_last_known = not (self.limits.max_tokens or self.limits.max_seconds)
        last = f"/{self.limits.max_steps:,}" if is_last_known else ""
        left, passed = self._estimate_seconds(newest, seconds, rate), newest["time/seconds"]
        rest = f"{format_seconds(left)} left"
        parts = [f"step {newest['step']:,}{last}", f"{names.title} {loss:.3f}", f"{rate:,.0f} tokens/s", rest]
        for (name, shown), value in zip(SHOWN.items(), others, strict=True):
            if name in newest:
                parts.append(shown.format(newest[name] if name == "train/lr" else value, share=value / seconds))
        return "  ".join(parts), passed / (passed + left)

    def _estimate_seconds(self, record: dict[str, Any], seconds_per_step: float, tokens_per_second: float) -> float:
        """Seconds until the first limit."""
        left = [(self.limits.max_steps - record["step"]) * seconds_per_step]
        if self.limits.max_tokens:
            left.append((self.limits.max_tokens - record["train/tokens"]) / tokens_per_second)
        if self.limits.max_seconds:
            left.append(self.limits.max_seconds - record["time/seconds"])
        return max(0.0, min(left))


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of the records that have it, and have it finite."""
    values = [value for record in records if (value := record.get(name)) is not None]
    return sum(values) / len(values) if values else math.nan


def _describe_evaluation(record: dict[str, Any]) -> str:
    def show(name: str, form: str, otherwise: str) -> str:
        return otherwise if record[name] is None else format(record[name], form)

    names = find_losses(record, DOMAIN) or MLM
    loss, accuracy = show(DOMAIN + names.loss, ".3f", "nan"), show(DOMAIN + names.accuracy, ".1%", "nan")
    said = f"step {record['step']:,}  held-out {names.title} {loss}, {names.share or 'accuracy'} {accuracy}"
    if names is not MLM:
        return said
    bits = show("eval/domain_bits_per_character", ".3f", "not measured")
    general = show("eval/general_mlm_accuracy", ".1%", "not measured")
    return f"{said}, bits per character {bits}; general accuracy {general}"
