"""The run's written record: metrics.jsonl, TensorBoard events, and the line that a terminal shows.

One JSON object a step; a resumed run cuts the file back to its checkpoint, so that no step stands there twice. A
worker of an older attempt (a driver was killed, its worker lives on for a moment) is refused before it writes. In a
bucket metrics.jsonl grows every few seconds, and the events are put there with each checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from domext_ray.config.pretrain import TrainConfig
from domext_ray.errors import StorageError, name_file
from domext_ray.progress import StallTimer, StatusLine, format_seconds
from domext_ray.runs.attempts import Attempt
from domext_ray.runs.events import EventReader
from domext_ray.runs.losses import DOMAIN, MLM, TRAIN, LossNames, find_losses
from domext_ray.storage import Log, Place, Where

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

REFRESH_SECONDS = 0.5
CHECK_REST = 20.0
"""Times the seconds that it took to ask whether the run is still this attempt's: so long it is not asked again."""


def read_metrics(where: Where) -> list[dict[str, Any]]:
    """Read metrics.jsonl; lines that a crash cut short or damaged are left out."""
    path = Place(where)
    return _parse_records(path.read_bytes().split(b"\n")) if path.is_file() else []


def _parse_records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # no JSON, or no UTF-8
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def find_last_step(path: Where, default: int = 0) -> int:
    """Return the newest step in metrics.jsonl, without reading all of it.

    Args:
        path: metrics.jsonl.
        default: what to return before the first record.
    """
    return max((each["step"] for each in _read_tail(Place(path))), default=default)


def _finite(value: Any) -> Any:
    """JSON has no nan or infinity: such a figure is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Rank 0's writer of metrics.jsonl and TensorBoard events.

    Args:
        run_dir: the run's directory, as the attempt that writes has it.
        step: step of the checkpoint that the run goes on from; later lines are cut off. At step 0 the file is new.
        tensorboard: also write TensorBoard events.
    """

    def __init__(self, run_dir: Where, step: int, *, tensorboard: bool) -> None:
        self.run = Place(run_dir)
        self._due = 0.0
        self._check()
        path = self.run / "metrics.jsonl"
        kept = [each for each in read_metrics(path) if each["step"] <= step] if step else []
        self.log = Log(path, start="".join(json.dumps(each) + "\n" for each in kept))
        self.writer, self.events = None, self.run / "tensorboard"
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # 1 s of imports, on rank 0 only

            folder = self.events.local() if self.run.is_local else Path(tempfile.mkdtemp(prefix="tensorboard-"))
            self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def _check(self) -> None:
        if time.monotonic() >= self._due:
            started = time.monotonic()
            self.is_stopping = self.run.check()
            self._due = time.monotonic() + CHECK_REST * (time.monotonic() - started)

    def write(self, record: dict[str, Any]) -> None:
        """Append the record of one step; `is_stopping` then says whether the attempt is asked to save and end."""
        self._check()
        self.log.add(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")
        if self.writer is not None:
            with name_file(self.writer.log_dir):
                _add_scalars(self.writer, record)

    def confirm_end(self) -> None:
        """Tell the driver, which has asked for it, that all is saved and nothing more is going to be published."""
        if isinstance(self.run.fence, Attempt):
            self.run.fence.confirm_end()

    def publish(self) -> None:
        """Let all readers see what was written so far."""
        self.log.flush()
        if self.writer is not None:
            with name_file(self.writer.log_dir):
                self.writer.flush()
            if not self.run.is_local:
                for path in Path(self.writer.log_dir).iterdir():
                    (self.events / path.name).put(path)

    def close(self) -> None:
        """Publish all, and close both files."""
        self.publish()
        self.log.close()
        if self.writer is not None:
            with name_file(self.writer.log_dir):
                self.writer.close()
            if not self.run.is_local:
                shutil.rmtree(self.writer.log_dir, ignore_errors=True)


def _add_scalars(writer: SummaryWriter, record: dict[str, Any]) -> None:
    """Write a record's figures as one event: with one each, `add_scalar` waits for the thread that writes them."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    figures = [each for each in record.items() if each[0] != "step" and each[1] is not None]
    values = [Summary.Value(tag=name, simple_value=value) for name, value in figures]
    cast(Any, writer).file_writer.add_summary(Summary(value=values), record["step"])


class RunProgress:
    """A thread of the driver that shows the newest line of metrics.jsonl: step, loss, rate, time left.

    On a terminal one line is rewritten; elsewhere a plain line appears every ten seconds. Evaluations always get a
    line of their own, and so does what workers tell the driver (events.py). When nothing has moved for a while, a line
    says what the run is doing, and what it waits for.

    Args:
        path: the run's metrics.jsonl.
        limits: where the run ends.
        phase: what it does at first, such as "starting 4 workers".
        describe_waiting: says what Ray cannot place; empty: nothing.
        note_evaluation: called after evaluations, in the thread.
    """

    def __init__(
        self,
        path: Where,
        limits: TrainConfig,
        phase: str = "training",
        describe_waiting: Callable[[], str] = lambda: "",
        note_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.limits, self.note_evaluation = Place(path), limits, note_evaluation
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
            self._show()
        self.line.end()

    def _follow(self) -> None:
        while not self.stopped.wait(REFRESH_SECONDS):
            with contextlib.suppress(StorageError):  # whoever must write says so
                self._show()

    def _show(self) -> None:
        for event in self.events.read():
            self.stall.note_move()
            if event.is_phase:
                self.phase = event.text
            else:
                self.line.keep(event.text)
        newest = _read_tail(self.path)
        if not newest or newest[-1]["step"] == self.shown_step:
            self.stall.look(self.phase)
            return
        self.stall.note_move()
        evaluated = [each for each in newest if each["step"] > self.shown_step and find_losses(each, DOMAIN)]
        for record in evaluated:
            self.line.keep(_describe_evaluation(record))
        self.shown_step = newest[-1]["step"]
        if evaluated and not self.stopped.is_set():  # else whoever ended the run knows better what to note
            self.note_evaluation()
        names = find_losses(newest[-1], TRAIN)
        if names is not None:
            self.line.show(self._describe_steps([each for each in newest if TRAIN + names.loss in each], names))

    def _describe_steps(self, records: list[dict[str, Any]], names: LossNames) -> str:
        step = records[-1]["step"]
        losses = [value for each in records if (value := each[TRAIN + names.loss]) is not None]
        seconds = sum(each["time/step_seconds"] for each in records) / len(records)
        rate = sum(each["throughput/tokens_per_second"] for each in records) / len(records)
        loss = sum(losses) / len(losses) if losses else math.nan
        is_last_known = not (self.limits.max_tokens or self.limits.max_seconds)
        last = f"/{self.limits.max_steps:,}" if is_last_known else ""
        return (
            f"step {step:,}{last}  {names.title} {loss:.3f}  {rate:,.0f} tokens/s  "
            f"{format_seconds(self._estimate_seconds(records[-1], seconds, rate))} left"
        )

    def _estimate_seconds(self, record: dict[str, Any], seconds_per_step: float, tokens_per_second: float) -> float:
        """Seconds until the first limit."""
        left = [(self.limits.max_steps - record["step"]) * seconds_per_step]
        if self.limits.max_tokens:
            left.append((self.limits.max_tokens - record["train/tokens"]) / tokens_per_second)
        if self.limits.max_seconds:
            left.append(self.limits.max_seconds - record["time/seconds"])
        return max(0.0, min(left))


def _describe_evaluation(record: dict[str, Any]) -> str:
    names = find_losses(record, DOMAIN) or MLM
    loss = _show(record[DOMAIN + names.loss], ".3f", "nan")
    accuracy = _show(record[DOMAIN + names.accuracy], ".1%", "nan")
    said = f"step {record['step']:,}  held-out {names.title} {loss}, {names.share or 'accuracy'} {accuracy}"
    if names is not MLM:
        return said
    bits = _show(record["eval/domain_bits_per_character"], ".3f", "not measured")
    general = _show(record["eval/general_mlm_accuracy"], ".1%", "not measured")
    return f"{said}, bits per character {bits}; general accuracy {general}"


def _show(value: float | None, form: str, otherwise: str) -> str:
    """Write a figure; one that is not finite, or that there is not, is null in metrics.jsonl."""
    return otherwise if value is None else format(value, form)


def _read_tail(path: Place, num_bytes: int = 32_768) -> list[dict[str, Any]]:
    """The last records of a metrics file, without reading all of it."""
    info = path.info()
    lines = path.read_bytes(max(0, info.size - num_bytes)).split(b"\n") if info is not None else []
    return _parse_records(lines[:-1])  # the first line may be a part of one
