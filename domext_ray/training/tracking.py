"""Where figures go beside a run's own files: TensorBoard, MLflow, Trackio, W&B, Prometheus; a row of `TRACKERS` each.

Enters: records, as metrics.jsonl has them. Leaves: what each tracker makes of them, and in trackers/ what it calls the
run, so that a resumed run goes on under the same name.

Training never waits for a tracker, which has a thread of its own; one that fails or hangs is told once, and left. What
a tracker has it is not given again, and what it lacks of earlier starts it gets from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import queue
import shutil
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from domext_ray.config.options.kinds import list_options
from domext_ray.config.options.places import hide_places
from domext_ray.config.pretrain import RunConfig
from domext_ray.errors import ConfigError, hide_passwords
from domext_ray.storage import Place, write_text

Record = Mapping[str, Any]
NAMES = "trackers"
MAX_WAITING = 10_000
"""Records that wait for a tracker, after which it hangs."""
CLOSE_SECONDS = 30.0
"""How long a job that ends waits for its trackers, all together."""
MLFLOW_METRICS, MLFLOW_PARAMS, MLFLOW_CHARS = 1000, 100, 500
"""What MLflow takes in one request, and of one text."""


@dataclass(frozen=True)
class Tracked:
    """What trackers are given figures of."""

    folder: Place  # its own, whose name is its name
    home: Place  # of all that it is compared with, whose name they share
    options: Mapping[str, Any]  # what it was made with
    step: int  # of the checkpoint that it goes on from; 0: it begins


class Tracker(ABC):
    """A tracker, in a thread of its own; whatever it raises ends it and nothing else."""

    package: ClassVar[str] = ""  # of the extra of that name; empty: this package needs it anyway
    places: ClassVar[tuple[str, ...]] = ()  # environment variables that say where it writes, other than on the disk
    opening: ClassVar[threading.Lock]  # one run at a time makes what all of them share, such as a database
    last_step = -1  # newest step that it has already

    def __init_subclass__(cls) -> None:
        cls.opening = threading.Lock()

    @abstractmethod
    def __init__(self, run: Tracked) -> None: ...

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Take records, none of which it has."""

    def publish(self) -> None:  # noqa: B027
        """Let others see what was written, where that is not so at once."""

    @abstractmethod
    def close(self) -> None:
        """End what was begun."""


class TensorBoard(Tracker):
    """Event files in tensorboard/, and the last step that they have; in a bucket from each checkpoint on."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.events = run.folder / "tensorboard"
        self.mark = self.events / "step"
        if run.step and self.mark.is_file():
            self.last_step = min(int(self.mark.read_text()), run.step)
        self.newest = self.last_step
        plain = {
            name: each if isinstance(each, bool | int | float) else str(each) for name, each in run.options.items()
        }
        self.options = plain if self.last_step < 0 else {}
        is_local = self.events.is_local
        folder = self.events.local() if is_local else Path(tempfile.mkdtemp(prefix="tensorboard-"))
        self.writer = SummaryWriter(str(folder), purge_step=self.last_step + 1)

    def write(self, records: Sequence[Record]) -> None:
        """Write a record as one event: with one per figure, `add_scalar` waits for the thread that writes them."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import hparams

        file = cast(Any, self.writer).file_writer
        for record in records:
            figures = dict(_list_figures(record))
            if self.options:
                for each in hparams(self.options, dict.fromkeys(figures, 0.0)):
                    file.add_summary(each)
                self.options = {}
            values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
            file.add_summary(Summary(value=values), record["step"])
            self.newest = record["step"]

    def publish(self) -> None:
        self.writer.flush()
        if not self.events.is_local:
            for path in Path(self.writer.log_dir).iterdir():
                (self.events / path.name).put(path)
        write_text(self.mark, str(self.newest))

    def close(self) -> None:
        self.publish()
        self.writer.close()
        if not self.events.is_local:
            shutil.rmtree(self.writer.log_dir, ignore_errors=True)


class MLflow(Tracker):
    """A run in the experiment named for all that it is compared with: on a server, or in mlflow.db beside them."""

    package, places = "mlflow", ("MLFLOW_TRACKING_URI",)

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(os.environ.get(self.places[0]) or f"sqlite:///{run.home / 'mlflow.db'}")
        name = run.folder / NAMES / "mlflow"
        if name.is_file():
            self.id = name.read_text()
            self.client.update_run(self.id, status="RUNNING")
            self.last_step = int(self.client.get_run(self.id).data.metrics.get("step", -1))
            return
        self.id = self.client.create_run(self._find_experiment(run.home.name), run_name=run.folder.name).info.run_id
        write_text(name, self.id)
        params = [Param(each, str(value)[:MLFLOW_CHARS]) for each, value in run.options.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.id, params=params[start : start + MLFLOW_PARAMS])

    def _find_experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if self.client.get_experiment_by_name(name) is None:
            with contextlib.suppress(MlflowException):  # another job has made it meanwhile
                self.client.create_experiment(name)
        return self.client.get_experiment_by_name(name).experiment_id

    def write(self, records: Sequence[Record]) -> None:
        """Write figures, and the step as one of them: by it `last_step` is known."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        figures = [
            Metric(name, float(value), now, record["step"])
            for record in records
            for name, value in (*_list_figures(record), ("step", record["step"]))
        ]
        for start in range(0, len(figures), MLFLOW_METRICS):
            self.client.log_batch(self.id, metrics=figures[start : start + MLFLOW_METRICS])

    def close(self) -> None:
        self.client.set_terminated(self.id)


class Trackio(Tracker):
    """A run in a project, by the interface that wandb has, too: in trackio/ beside the runs, on a server or a Space."""

    package, places = "trackio", ("TRACKIO_DIR", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID")

    def __init__(self, run: Tracked) -> None:
        if run.home.is_local:
            os.environ.setdefault("TRACKIO_DIR", str(run.home / "trackio"))
        import trackio

        name = run.folder / NAMES / "trackio"
        if not name.is_file():
            write_text(name, f"{run.folder.name}-{uuid.uuid4().hex[:8]}")
        self.run = trackio.init(
            project=run.home.name,
            name=name.read_text(),
            config=dict(run.options),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.last_step = self.run._next_step - 1

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self.run.log(dict(_list_figures(record)), step=record["step"])

    def close(self) -> None:
        self.run.finish()


class WandB(Tracker):
    """A run in a project of Weights & Biases; with WANDB_MODE=offline in wandb/ beside the runs, for `wandb sync`.

    Its server knows which step a run has reached. Offline nobody does, so the newest step is kept beside the run, at
    each checkpoint: steps between that and a kill stand in two of its files.
    """

    package, places = "wandb", ("WANDB_DIR",)

    def __init__(self, run: Tracked) -> None:
        import wandb

        self.mark = run.folder / NAMES / "wandb"
        self.id, newest = self.mark.read_text().split() if self.mark.is_file() else (uuid.uuid4().hex[:8], "-1")
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError("no key; set WANDB_API_KEY, or WANDB_MODE=offline")
        own = {"host": "", "x_disable_meta": True, "x_disable_stats": True}  # neither the machine's name nor its paths
        own |= {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        folder = str(run.home) if run.home.is_local else tempfile.mkdtemp(prefix="wandb-")
        self.run = wandb.init(
            project=run.home.name,
            id=self.id,
            name=run.folder.name,
            dir=os.environ.get(self.places[0]) or folder,
            config=dict(run.options),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**own, finish_timeout=CLOSE_SECONDS),
        )
        self.newest = self.last_step = int(newest) if self.run.offline else self.run.step - 1
        self.publish()

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self.run.log(dict(_list_figures(record)), step=record["step"], commit=True)
            self.newest = record["step"]

    def publish(self) -> None:
        write_text(self.mark, f"{self.id} {self.newest}")

    def close(self) -> None:
        self.publish()
        self.run.finish()


class Prometheus(Tracker):
    """Gauges of the Ray that trains, which Prometheus reads of each node: the newest step, and when it was saved."""

    GAUGES: ClassVar = {
        "step": ("step", "Steps made."),
        "throughput/tokens_per_second": ("tokens_per_second", "Tokens per second of the newest step."),
        "time/step_seconds": ("step_seconds", "Seconds of the newest step."),
        "data/wait_seconds": ("data_wait_seconds", "Seconds that the newest step waited for its rows."),
    }

    def __init__(self, run: Tracked) -> None:
        from ray.util.metrics import Gauge

        def make(name: str, about: str) -> Any:
            gauge = Gauge(f"domext_{name}", about, tag_keys=("run",))
            gauge.set_default_tags({"run": run.folder.name})
            return gauge

        self.gauges = {key: make(*described) for key, described in self.GAUGES.items()}
        self.saved = make("saved_time_seconds", "When the newest checkpoint was begun, in seconds since 1970.")

    def write(self, records: Sequence[Record]) -> None:
        for key in self.gauges.keys() & records[-1].keys():
            self.gauges[key].set(records[-1][key])

    def publish(self) -> None:
        self.saved.set(time.time())

    def close(self) -> None:
        pass


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
    "wandb": WandB,
    "prometheus": Prometheus,
}
"""By their names in --run.trackers."""


def _list_figures(record: Record) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in record.items() if name != "step" and value is not None)


def check_trackers(config: RunConfig) -> None:
    """Refuse trackers that are not installed, or have no place to write to.

    Raises:
        ConfigError: there is one.
    """
    for name in config.trackers:
        tracker = TRACKERS[name]
        if tracker.package and importlib.util.find_spec(tracker.package) is None:
            raise ConfigError(
                f'--run.trackers has {name}, which is not installed: pip install "domext_ray[{tracker.package}]".'
            )
        if tracker.places and not Place(config.dir).is_local and not any(map(os.environ.get, tracker.places)):
            raise ConfigError(
                f"--run.trackers has {name}, which cannot write to {config.dir}; set {' or '.join(tracker.places)}."
            )


def list_tracked_options(config: Any) -> dict[str, Any]:
    """Return the options of a configuration as trackers show them: without paths of this machine."""
    names = list_options(type(config))
    return {name: hide_places(functools.reduce(getattr, name.split("."), config)) for name in names}


class _Feed(threading.Thread):
    """A tracker's own thread."""

    PUBLISH, CLOSE = {"publish": True}, {"close": True}

    def __init__(self, name: str, run: Tracked, kept: Sequence[Record]) -> None:
        super().__init__(name=name, daemon=True)
        self.tracked, self.kept, self.failure = run, kept, ""
        self.waiting: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Make the tracker, and hand it records, until it is closed or left."""
        try:
            made = TRACKERS[self.name]
            with made.opening:
                tracker = made(self.tracked)
            last = tracker.last_step
            taken, self.kept = [*self.kept], ()
            while not self.failure:
                new = [each for each in taken if each.get("step", -1) > last]
                if new:
                    tracker.write(new)
                    last = new[-1]["step"]
                if self.CLOSE in taken:
                    return tracker.close()
                if self.PUBLISH in taken:
                    tracker.publish()
                taken = [self.waiting.get()]
                while not self.waiting.empty():
                    taken.append(self.waiting.get())
        except Exception as error:
            reason = hide_passwords(" ".join(f"{type(error).__name__}: {error}".split()))
            self.failure = self.failure or reason[:300].removesuffix(".")


class Tracking:
    """Hands records to trackers.

    Args:
        names: of `TRACKERS`.
        run: whose figures they are.
        kept: records of earlier starts.
        tell: takes the name of a tracker that is left, and the sentence about it.
    """

    def __init__(
        self, names: Sequence[str], run: Tracked, kept: Sequence[Record], tell: Callable[[str, str], None]
    ) -> None:
        self.tell, self.feeds = tell, [_Feed(name, run, kept) for name in names]

    def write(self, record: Record) -> None:
        """Take a record, with its "step"."""
        for feed in self.feeds:
            feed.waiting.put(record)
            if feed.waiting.qsize() > MAX_WAITING:
                feed.failure = feed.failure or f"{MAX_WAITING:,} steps wait for it"
        self._leave_failed()

    def publish(self) -> None:
        """Let others see what was written, soon."""
        self.write(_Feed.PUBLISH)

    def end(self) -> None:
        """Take no more, and wait for nothing."""
        self.write(_Feed.CLOSE)

    def close(self, until: float | None = None) -> None:
        """End, and wait for trackers that have not taken all: to a moment of `time.monotonic`; None: not for long."""
        self.end()
        until = time.monotonic() + CLOSE_SECONDS if until is None else until
        for feed in self.feeds:
            feed.join(max(0.0, until - time.monotonic()))
            if feed.is_alive():
                feed.failure = feed.failure or "it does not answer"
        self._leave_failed()

    def _leave_failed(self) -> None:
        for feed in [each for each in self.feeds if each.failure]:
            self.feeds.remove(feed)
            what = f"{feed.name} gets no more figures of {feed.tracked.folder.name}"
            self.tell(feed.name, f"warning: {what} ({feed.failure}); the job goes on without it.")
