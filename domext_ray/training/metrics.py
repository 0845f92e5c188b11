"""The run's written record: metrics.jsonl, TensorBoard events, and the line that a terminal shows.

One JSON object a step; a resumed run cuts the file back to its checkpoint, so that no step stands there twice. A
worker of an older attempt (a driver was killed, its worker lives on for a moment) is refused before it writes.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

from domext_ray.config import TrainConfig
from domext_ray.errors import RunError
from domext_ray.status_line import StatusLine, format_seconds

REFRESH_SECONDS = 0.5


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def check_attempt(run_dir: Path, attempt: str) -> None:
    """Refuse to write on behalf of an attempt that is no longer the run's newest.

    Raises:
        RunError: another attempt has taken the run over.
    """
    current = json.loads((run_dir / "attempt.json").read_text(encoding="utf-8"))["attempt"]
    if current != attempt:
        raise RunError(f"another job has taken over the run in {run_dir}; this one stops without writing.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a last line that was cut short by a crash is left out."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records


def _finite(value: Any) -> Any:
    """JSON has no nan or infinity: such a figure is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Rank 0's writer of metrics.jsonl and TensorBoard events.

    Args:
        run_dir: the run's directory.
        attempt: id of the attempt that writes.
        step: step of the checkpoint that the run goes on from; later lines are cut off. At step 0 the file is new.
        tensorboard: also write TensorBoard events.
    """

    def __init__(self, run_dir: Path, attempt: str, step: int, *, tensorboard: bool) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        check_attempt(run_dir, attempt)
        path = run_dir / "metrics.jsonl"
        kept = [each for each in read_metrics(path) if each["step"] <= step] if step else []
        write_text(path, "".join(json.dumps(each) + "\n" for each in kept))
        self.file: IO[str] = path.open("a", encoding="utf-8")
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # 1 s of imports, on rank 0 only

            self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        """Append the record of one step."""
        check_attempt(self.run_dir, self.attempt)
        self.file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")
        self.file.flush()
        if self.writer is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close both files."""
        self.file.close()
        if self.writer is not None:
            self.writer.close()


class RunProgress:
    """A thread of the driver that shows the newest line of metrics.jsonl: step, loss, rate, time left.

    On a terminal one line is rewritten; elsewhere a plain line appears every ten seconds. Evaluations always get a
    line of their own.
    """

    def __init__(self, path: Path, limits: TrainConfig) -> None:
        self.path, self.limits = path, limits
        self.line = StatusLine()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self.shown_step = max((each["step"] for each in read_metrics(path)), default=-1)

    def __enter__(self) -> RunProgress:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join(timeout=5)
        self._show()
        if self.line.is_terminal:
            print(file=sys.stderr)

    def _follow(self) -> None:
        while not self.stopped.wait(REFRESH_SECONDS):
            self._show()

    def _show(self) -> None:
        newest = _read_tail(self.path)
        if not newest or newest[-1]["step"] == self.shown_step:
            return
        for record in newest:
            if record["step"] > self.shown_step and "eval/domain_mlm_loss" in record:
                self.line.keep(_describe_evaluation(record))
        self.shown_step = newest[-1]["step"]
        if "train/mlm_loss" not in newest[-1]:
            return
        self.line.show(self._describe_steps([each for each in newest if "train/mlm_loss" in each]))

    def _describe_steps(self, records: list[dict[str, Any]]) -> str:
        step = records[-1]["step"]
        losses = [each["train/mlm_loss"] for each in records if each["train/mlm_loss"] is not None]
        seconds = sum(each["time/step_seconds"] for each in records) / len(records)
        rate = sum(each["throughput/tokens_per_second"] for each in records) / len(records)
        loss = sum(losses) / len(losses) if losses else math.nan
        return (
            f"step {step:,}/{self.limits.max_steps:,}  loss {loss:.3f}  {rate:,.0f} tokens/s  "
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
    bits, general = record["eval/domain_bits_per_character"], record["eval/general_mlm_accuracy"]
    return (
        f"step {record['step']:,}  held-out loss {record['eval/domain_mlm_loss']:.3f}, accuracy "
        f"{record['eval/domain_mlm_accuracy']:.1%}, bits a character "
        f"{'not measured' if bits is None else f'{bits:.3f}'}; general accuracy "
        f"{'not measured' if general is None else f'{general:.1%}'}"
    )


def _read_tail(path: Path, num_bytes: int = 32_768) -> list[dict[str, Any]]:
    """The last records of a metrics file, without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines[:-1]:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the first line may be a part of one
            continue
    return records
