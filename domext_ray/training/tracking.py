"""Where figures go beside a run's own files: TensorBoard, MLflow, Trackio, W&B, Prometheus; a row of `TRACKERS` each.

Enters: records, as metrics.jsonl has them. Leaves: what each tracker makes of them, and in trackers/NAME what it calls
the run and the newest step that it has, written at checkpoints and at the end. A resumed run hands on later steps, so
after a kill MLflow, Trackio and W&B offline have the steps since the last checkpoint twice.

Training never waits for a tracker, which has a thread of its own; one that fails or hangs is told once, and left.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from domext_ray.config.options.submitted import hide_places
from domext_ray.errors import ConfigError, hide_passwords
from domext_ray.storage import Place, write_text

Record = Mapping[str, Any]
Steps = Sequence[tuple[int, dict[str, float]]]
PUBLISH, CLOSE = "publish", "close"
"""What trackers are told between records: a checkpoint is saved; nothing more comes."""
MAX_WAITING, CLOSE_SECONDS = 10_000, 30.0
"""Records that wait for a tracker, after which it hangs; how long a job that ends waits for all of them together."""


@dataclass(frozen=True)
class Tracked:
    """What trackers are given figures of."""

    folder: Place  # its own, whose name is its name
    home: Place  # of all that it is compared with, whose name they share
    options: Mapping[str, Any]  # what it was made with


@dataclass(frozen=True)
class Tracker:
    """What a thread asks of its tracker; whatever that raises ends it and nothing else."""

    id: str  # what it calls the run; empty: nothing
    write: Callable[[Steps], object]
    publish: Callable[[], object] = lambda: None  # let others see what was written: a checkpoint is saved
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Kind:
    """A kind of tracker, and what it takes to make one."""

    begin: Callable[[Tracked, str, int], Tracker]  # given its id of the run and its newest step; "" and -1 at first
    places: tuple[str, ...] = ()  # of one that is an extra: environment variables that say where it writes
    replaces: bool = False  # a step that is written again takes the place of what was there
    turn: Any = field(default_factory=threading.Lock)  # to begin: runs share such things as a database


def _begin_tensorboard(run: Tracked, id: str, newest: int) -> Tracker:
    """Event files in tensorboard/; in a bucket from each checkpoint on."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    place = run.folder / "tensorboard"
    folder = Path(place if place.is_local else tempfile.mkdtemp(prefix="tensorboard-"))
    writer: Any = SummaryWriter(str(folder), purge_step=newest + 1)
    options = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in run.options.items() if newest < 0}

    def write(steps: Steps) -> None:
        for summary in hparams(options, dict.fromkeys(steps[0][1], 0.0)) if options else ():
            writer.file_writer.add_summary(summary)
        options.clear()
        for step, figures in steps:  # an event each: with one per figure, `add_scalar` waits for the writer's thread
            values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
            writer.file_writer.add_summary(Summary(value=values), step)

    def publish() -> None:
        writer.flush()
        for path in () if place.is_local else folder.iterdir():
            (place / path.name).put(path)

    def close() -> None:
        publish()
        writer.close()
        if not place.is_local:
            shutil.rmtree(folder, ignore_errors=True)

    return Tracker(id, write, publish, close)


def _begin_mlflow(run: Tracked, id: str, newest: int) -> Tracker:
    """A run in the experiment named for all that it is compared with: on a server, or in mlflow.db beside them."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient, MlflowException
    from mlflow.entities import Metric, Param

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.home / 'mlflow.db'}")
    if id:
        client.update_run(id, status="RUNNING")
    else:
        with contextlib.suppress(MlflowException):  # it is there
            client.create_experiment(run.home.name)
        experiment = client.get_experiment_by_name(run.home.name).experiment_id
        id = client.create_run(experiment, run_name=run.folder.name).info.run_id
        params = [Param(name, str(value)) for name, value in run.options.items()]
        for start in range(0, len(params), 100):  # a request has no more
            client.log_batch(id, params=params[start : start + 100])

    def write(steps: Steps) -> None:
        now = round(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for step, figures in steps for name, value in figures.items()]
        for start in range(0, len(metrics), 1000):
            client.log_batch(id, metrics=metrics[start : start + 1000])

    return Tracker(id, write, close=lambda: client.set_terminated(id))


def _begin_trackio(run: Tracked, id: str, newest: int) -> Tracker:
    """A run in a project: in trackio/ beside the runs, on a server or a Space. A kill loses its last half second."""
    if run.home.is_local:
        os.environ.setdefault("TRACKIO_DIR", str(run.home / "trackio"))
    import trackio

    id = id or f"{run.folder.name}-{uuid.uuid4().hex[:8]}"
    own = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    begun = trackio.init(project=run.home.name, name=id, config={**run.options}, **own)
    return Tracker(id, lambda steps: [begun.log(figures, step=step) for step, figures in steps], close=begun.finish)


def _begin_wandb(run: Tracked, id: str, newest: int) -> Tracker:
    """A run in a project of Weights & Biases; with WANDB_MODE=offline in wandb/ beside the runs, for `wandb sync`."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError("no key; set WANDB_API_KEY, or WANDB_MODE=offline")
    own = {"host": "", "x_disable_meta": True, "x_disable_stats": True}  # neither the machine's name nor its paths
    own |= {"console": "off", "silent": True, "disable_git": True, "save_code": False, "finish_timeout": CLOSE_SECONDS}
    names = {"project": run.home.name, "name": run.folder.name, "id": id or uuid.uuid4().hex[:8], "resume": "allow"}
    folder = os.environ.get("WANDB_DIR") or Path(run.home)
    begun = wandb.init(**names, config={**run.options}, dir=folder, settings=own, reinit="create_new")
    return Tracker(begun.id, lambda steps: [begun.log(own, step, True) for step, own in steps], close=begun.finish)


def _begin_prometheus(run: Tracked, id: str, newest: int) -> Tracker:
    """Gauges of the Ray that trains, which Prometheus reads of each node: the newest step, and when it was saved."""
    from ray.util.metrics import Gauge

    described = {
        "step": ("step", "Steps made."),
        "throughput/tokens_per_second": ("tokens_per_second", "Tokens per second of the newest step."),
        "time/step_seconds": ("step_seconds", "Seconds of the newest step."),
        "data/wait_seconds": ("data_wait_seconds", "Seconds that the newest step waited for its rows."),
        "saved": ("saved_time_seconds", "When the newest checkpoint was begun, in seconds since 1970."),
    }
    gauges = {figure: Gauge(f"domext_{name}", about, ("run",)) for figure, (name, about) in described.items()}

    def show(figures: Mapping[str, float]) -> None:
        for name in gauges.keys() & figures.keys():
            gauges[name].set(figures[name], {"run": run.folder.name})

    return Tracker(id, lambda steps: show({"step": steps[-1][0], **steps[-1][1]}), lambda: show({"saved": time.time()}))


TRACKERS = {
    "tensorboard": Kind(_begin_tensorboard, replaces=True),
    "mlflow": Kind(_begin_mlflow, ("MLFLOW_TRACKING_URI",)),
    "trackio": Kind(_begin_trackio, ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")),
    "wandb": Kind(_begin_wandb, ("WANDB_DIR",)),
    "prometheus": Kind(_begin_prometheus, replaces=True),
}
"""By their names in --run.trackers."""


class _Feed(threading.Thread):
    """A tracker's own thread."""

    def __init__(self, name: str, run: Tracked, kept: Sequence[Record]) -> None:
        super().__init__(name=name, daemon=True)
        self.tracked, self.kept, self.failure = run, kept, ""
        self.waiting: queue.SimpleQueue[Record | str] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Feed the tracker until it is closed, fails or is left."""
        try:
            self._feed()
        except Exception as error:
            reason = hide_passwords(" ".join(f"{type(error).__name__}: {error}".split()))
            self.failure = self.failure or reason[:300].removesuffix(".")

    def _feed(self) -> None:
        kind, mark = TRACKERS[self.name], self.tracked.folder / "trackers" / self.name
        id, *marked = mark.read_text().splitlines() if mark.is_file() else ("", "-1")
        last = self.kept[-1]["step"] if self.kept else -1
        newest = int(marked[0]) if marked else last  # 0.1.0 kept the id alone
        newest = min(newest, last) if kind.replaces else newest
        with kind.turn:
            tracker = kind.begin(replace(self.tracked, options=hide_places({**self.tracked.options})), id, newest)
        write_text(mark, f"{tracker.id}\n{newest}\n")
        taken, self.kept = list[Record | str](self.kept), ()
        while not self.failure:
            new = [record for record in taken if not isinstance(record, str) and record["step"] > newest]
            if new:
                figures = [{k: v for k, v in record.items() if k != "step" and v is not None} for record in new]
                tracker.write([(record["step"], own) for record, own in zip(new, figures, strict=True)])
                newest = new[-1]["step"]
            if PUBLISH in taken:
                tracker.publish()
            if CLOSE in taken or PUBLISH in taken:  # before it closes, which the job may not wait for
                write_text(mark, f"{tracker.id}\n{newest}\n")
            if CLOSE in taken:
                tracker.close()
                return
            taken = [self.waiting.get() for _ in range(max(1, self.waiting.qsize()))]


class Tracking:
    """Hands records to trackers; of each that is left, `tell` takes the name and a sentence, once."""

    def __init__(self, names: Sequence[str], run: Tracked, kept: Sequence[Record], tell: Callable[..., None]) -> None:
        self.tell, self.feeds = tell, [_Feed(name, run, kept) for name in names]

    def write(self, given: Record | str) -> None:
        """Hand on a record, `PUBLISH` or `CLOSE`, and wait for nothing."""
        for feed in [*self.feeds]:
            feed.waiting.put(given)
            self._look(feed, feed.waiting.qsize() > MAX_WAITING, f"{MAX_WAITING:,} steps wait for it")

    def close(self, until: float | None = None) -> None:
        """End, and wait for trackers that have not taken all: to a moment of `time.monotonic`; None: not for long."""
        self.write(CLOSE)
        until = time.monotonic() + CLOSE_SECONDS if until is None else until
        for feed in [*self.feeds]:
            feed.join(max(0.0, until - time.monotonic()))
            self._look(feed, feed.is_alive(), "it does not answer")

    def _look(self, feed: _Feed, hangs: bool, why: str) -> None:
        feed.failure = feed.failure or (why if hangs else "")
        if feed.failure:
            self.feeds.remove(feed)
            what = f"{feed.name} gets no more figures of {feed.tracked.folder.name}"
            self.tell(feed.name, f"warning: {what} ({feed.failure}); the job goes on without it.")
