"""Trackers: what a run hands them, once, however often it goes on; and that none of them holds it up."""

from __future__ import annotations

import struct
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from object_store import BUCKET
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domext_ray.config.pretrain import TrackerName
from domext_ray.runs.attempts import supersede
from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.training import tracking
from domext_ray.training.metrics import MetricsLog, read_metrics
from domext_ray.training.tracking import TRACKERS, Kind, Tracked, Tracker

Found = tuple[list[tuple[int, float]], set[str], str]
"""What a tracker has: losses by step, its runs, and what it shows of the job's options."""


def write_steps(run: Path | Place, trackers: Sequence[str], step: int, *steps: int) -> list[str]:
    """Write records of a run that goes on from `step`, and return what its driver is told."""
    events = EventReader(Place(run))
    options = {"optim.lr": 1e-3, "corpus": f"{run.parent}/notes.txt"}
    log = MetricsLog(supersede(Place(run)), step, trackers, options)
    for number in steps:
        log.write({"step": number, "train/mlm_loss": number + 0.5, "eval/general_mlm_accuracy": None})
    log.publish()
    log.close()
    time.sleep(1.1 if {"tensorboard", "wandb"} & {*trackers} else 0.0)  # their files have the second in their names
    return [event.text for event in events.read()]


def read_tensorboard(run: Path) -> Found:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/mlm_loss"]
    shown = b"".join(events.PluginTagToContent("hparams").values())
    return [(point.step, point.value) for point in events.Scalars("train/mlm_loss")], {""}, shown.decode("latin-1")


def read_mlflow(run: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (experiment,) = [listed for listed in client.search_experiments() if listed.name == run.parent.name]
    runs = client.search_runs([experiment.experiment_id])
    losses = [metric for found in runs for metric in client.get_metric_history(found.info.run_id, "train/mlm_loss")]
    assert all(found.info.run_name == run.name and found.info.status == "FINISHED" for found in runs)
    assert all({*found.data.metrics} == {"train/mlm_loss"} for found in runs)
    shown = str([found.data.params for found in runs])
    return [(metric.step, metric.value) for metric in losses], {found.info.run_id for found in runs}, shown


def read_trackio(run: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    project, losses, shown = run.parent.name, list[tuple[int, float]](), ""
    runs = SQLiteStorage.get_run_records(project)
    for found in runs:
        logs = SQLiteStorage.get_logs(project, str(found["name"]), run_id=str(found["id"]))
        losses += [(entry["step"], entry["train/mlm_loss"]) for entry in logs]
        shown += str(SQLiteStorage.get_run_config(project, str(found["name"]), run_id=str(found["id"])))
    return losses, {str(found["name"]) for found in runs}, shown


def read_wandb(run: Path) -> Found:
    """What files for `wandb sync` have, in which neither host nor path may be."""
    from wandb.proto.wandb_internal_pb2 import Record as Written

    losses, ids, shown = list[tuple[int, float]](), set[str](), ""
    for path in sorted((run.parent / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in read_records(path):
            written, shown = Written.FromString(data), shown + data.decode("latin-1")
            ids |= {written.run.run_id} - {""}
            items = {item.key or ".".join(item.nested_key): item.value_json for item in written.history.item}
            losses += [(int(items["_step"]), float(items["train/mlm_loss"]))] if items else []
            assert not written.run.host
    return losses, ids, shown


def read_records(path: Path) -> Iterator[bytes]:
    """Records of a file for `wandb sync`: LevelDB's log format, behind seven bytes, in blocks of 32 KiB."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 2**15 - place % 2**15 < 7:  # a block's rest
            place += 2**15 - place % 2**15
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


READERS: dict[str, Callable[[Path], Found]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
}
"""Of each tracker that keeps what it is given."""


def test_every_tracker_has_its_row() -> None:
    assert typing.get_args(TrackerName) == (*TRACKERS,) == (*READERS, "prometheus")


@pytest.mark.parametrize("name", READERS)
def test_a_resumed_run_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step once, in one run, with those that were made before there was a tracker; unless it was killed."""
    run = tmp_path / f"{name}-runs" / "af"
    for variable, value in (("MLFLOW_TRACKING_URI", ""), ("TRACKIO_DIR", f"{tmp_path}/trackio"), ("WANDB_DIR", "")):
        monkeypatch.setenv(variable, value)  # trackio reads where to write once, when it is imported
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)  # MLflow makes its database
    pytest.importorskip(name, reason="an extra")

    def check(last: int, *twice: int) -> None:
        losses, runs, shown = READERS[name](run)
        assert sorted(losses) == sorted((step, step + 0.5) for step in (*range(last + 1), *twice))
        assert mark.read_text() == f"{runs.pop()}\n{last}\n" and not runs, "one run"
        assert "notes.txt" in shown and str(tmp_path) not in shown

    mark = run / "trackers" / name
    assert write_steps(run, [], 0, 0, 1) == write_steps(run, [name], 1, *range(2, 8)) == []
    assert write_steps(run, [name], 5, 6, 7, 8) == []
    check(8)
    mark.write_text(mark.read_text().splitlines()[0])  # as 0.1.0 did
    if not mark.read_text():
        mark.unlink()
    assert write_steps(run, [name], 8, 9) == []
    check(9)
    mark.write_text(mark.read_text().replace("\n9\n", "\n7\n"))  # a kill, after which it goes on from step 7
    assert write_steps(run, [name], 7, 8, 9, 10) == []
    check(10, *(() if TRACKERS[name].replaces else (8, 9)))


def test_a_run_that_begins_anew_does_so_in_tensorboard(tmp_path: Path) -> None:
    write_steps(tmp_path, ["tensorboard"], 0, *range(8))
    write_steps(tmp_path, ["tensorboard"], 0, 0, 1)
    assert read_tensorboard(tmp_path)[0] == [(0, 0.5), (1, 1.5)]


@pytest.mark.usefixtures("objects")
def test_a_bucket_has_each_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scratch = Place(f"{BUCKET}/tracked/af"), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert write_steps(run, ["tensorboard"], 0, *range(8)) == write_steps(run, ["tensorboard"], 5, 6, 7, 8) == []
    (tmp_path / "tensorboard").mkdir()
    for name in (run / "tensorboard").list_names():
        (tmp_path / "tensorboard" / name).write_bytes((run / "tensorboard" / name).read_bytes())
    assert read_tensorboard(tmp_path)[0] == [(step, step + 0.5) for step in range(9)]
    assert not [*scratch.glob("tensorboard-*")]


def refuse(run: Tracked, id: str, newest: int) -> Tracker:
    """A server that says no, with its own address."""
    raise ConnectionError("http://user:secret@127.0.0.1:9/api\nrefuses")


@pytest.mark.parametrize("name", ["refusing", "tensorboard", "mlflow", "wandb"])
def test_a_tracker_that_fails_is_told_once_and_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, a server that is away, no key; passwords are not told."""
    run, said = tmp_path / "runs" / "af", {"refusing": "ConnectionError: http://***@127.0.0.1:9/api refuses"}
    run.mkdir(parents=True)
    (run / "tensorboard").write_text("no folder")
    monkeypatch.setitem(TRACKERS, "refusing", Kind(refuse))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)
    if name != "refusing":
        pytest.importorskip(name, reason="an extra")
    said |= {"tensorboard": "FileExistsError", "mlflow": "127.0.0.1"}
    said |= {"wandb": "ConfigError: no key; set WANDB_API_KEY, or WANDB_MODE=offline"}
    (told,) = write_steps(run, [name], 0, *range(20))
    assert told.startswith(f"warning: {name} gets no more figures of af (") and said[name] in told
    assert told.endswith("); the job goes on without it.") and "\n" not in told and "secret" not in told
    assert [record["step"] for record in read_metrics(Place(run / "metrics.jsonl"))] == [*range(20)]
    assert not (run / "trackers").exists()


@pytest.mark.parametrize(("steps", "said"), [(3, "it does not answer"), (40, "30 steps wait for it")])
def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, said: str
) -> None:
    released = threading.Event()

    def hang(run: Tracked, id: str, newest: int) -> Tracker:
        """A server that does not answer."""
        released.wait()
        raise AssertionError("it was left")

    monkeypatch.setitem(TRACKERS, "hanging", Kind(hang))
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(tracking, "MAX_WAITING", 30)
    started = time.monotonic()
    try:
        (told,) = write_steps(tmp_path, ["hanging"], 0, *range(steps))
    finally:
        released.set()
    assert time.monotonic() - started < 30
    assert told == f"warning: hanging gets no more figures of {tmp_path.name} ({said}); the job goes on without it."
    assert len(read_metrics(Place(tmp_path / "metrics.jsonl"))) == steps
