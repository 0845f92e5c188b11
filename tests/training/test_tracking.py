"""Trackers: what a run hands them, once, however often it goes on; and that none of them holds it up."""

from __future__ import annotations

import struct
import sys
import threading
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domext_ray.config.pretrain import PretrainConfig, RunConfig, TrackerName
from domext_ray.errors import ConfigError
from domext_ray.runs.attempts import supersede
from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.training import tracking
from domext_ray.training.metrics import MetricsLog, read_metrics
from domext_ray.training.tracking import TRACKERS, Record, Tracked, Tracker, check_trackers, list_tracked_options


def write_steps(run: Path, trackers: Sequence[str], step: int, *steps: int) -> list[str]:
    """Write records of a run that goes on from `step`, and return what its driver is told."""
    events = EventReader(Place(run))
    log = MetricsLog(supersede(Place(run)), step, trackers, {"optim.lr": 1e-3, "base": "general-mini"})
    for each in steps:
        log.write({"step": each, "train/mlm_loss": each + 0.5, "eval/general_mlm_accuracy": None})
    log.publish()
    log.close()
    return [each.text for each in events.read()]


def read_events(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def read_mlflow(run: Path) -> dict[str, Any]:
    """What mlflow.db has of the one run there."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == run.parent.name]
    (found,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(found.info.run_id, "train/mlm_loss")
    return {
        "name": found.info.run_name,
        "status": found.info.status,
        "params": found.data.params,
        "losses": sorted((each.step, each.value) for each in losses),
        "metrics": {*found.data.metrics},
    }


def read_wandb(path: Path) -> Iterator[bytes]:
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


def test_every_tracker_has_its_row() -> None:
    assert typing.get_args(TrackerName) == (*TRACKERS,)


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    write_steps(tmp_path, ["tensorboard"], 0, *range(8))
    time.sleep(1.1)  # event files are read by the seconds in their names
    write_steps(tmp_path, ["tensorboard"], 5, 6, 7, 8)
    assert read_events(tmp_path) == {"train/mlm_loss": [(each, each + 0.5) for each in range(9)]}
    time.sleep(1.1)
    write_steps(tmp_path, ["tensorboard"], 0, 0, 1)
    assert read_events(tmp_path) == {"train/mlm_loss": [(0, 0.5), (1, 1.5)]}, "the run began anew"


def test_a_tracker_that_comes_later_has_all_steps(tmp_path: Path) -> None:
    write_steps(tmp_path, [], 0, *range(6))
    write_steps(tmp_path, ["tensorboard"], 5, 6)
    assert read_events(tmp_path) == {"train/mlm_loss": [(each, each + 0.5) for each in range(7)]}


def test_a_tracker_that_fails_is_told_once_and_left(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    (told,) = write_steps(tmp_path, ["tensorboard"], 0, *range(20))
    assert told.startswith(f"warning: tensorboard gets no more figures of {tmp_path.name} (")
    assert told.endswith("); the job goes on without it.") and "\n" not in told
    assert [each["step"] for each in read_metrics(Place(tmp_path / "metrics.jsonl"))] == [*range(20)]


class Hanging(Tracker):
    """A server that does not answer."""

    released = threading.Event()

    def __init__(self, run: Tracked) -> None:
        self.released.wait()

    def write(self, records: Sequence[Record]) -> None:
        raise AssertionError("it was left")

    def close(self) -> None:
        raise AssertionError("it was left")


class Refusing(Hanging):
    """A server that says no, with its own address."""

    def __init__(self, run: Tracked) -> None:
        raise ConnectionError("http://user:secret@127.0.0.1:9/api refuses")


def test_a_tracker_s_password_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "refusing", Refusing)
    (told,) = write_steps(tmp_path, ["refusing"], 0, 0, 1)
    assert "(ConnectionError: http://***@127.0.0.1:9/api refuses)" in told and "secret" not in told


@pytest.mark.parametrize(("steps", "said"), [(3, "it does not answer"), (40, "30 steps wait for it")])
def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, said: str
) -> None:
    monkeypatch.setitem(TRACKERS, "hanging", Hanging)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(tracking, "MAX_WAITING", 30)
    started = time.monotonic()
    try:
        (told,) = write_steps(tmp_path, ["hanging"], 0, *range(steps))
    finally:
        Hanging.released.set()
        Hanging.released = threading.Event()
    assert time.monotonic() - started < 30
    assert told == f"warning: hanging gets no more figures of {tmp_path.name} ({said}); the job goes on without it."
    assert len(read_metrics(Place(tmp_path / "metrics.jsonl"))) == steps


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_a_package_that_is_missing_is_one_sentence(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # how Python notes that there is none
    with pytest.raises(ConfigError, match=rf'^--run.trackers has {name}, .*: pip install "domext_ray\[{name}\]"\.$'):
        check_trackers(RunConfig(trackers=("tensorboard", name)))
    check_trackers(RunConfig())


def test_a_bucket_is_no_place_for_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="an extra")
    run = RunConfig(dir="s3://bucket/runs", trackers=("tensorboard", "mlflow"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"cannot write to s3://bucket/runs; set MLFLOW_TRACKING_URI\.$"):
        check_trackers(run)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(run)


def test_options_are_shown_without_paths_of_this_machine() -> None:
    shown = list_tracked_options(PretrainConfig(corpus="/home/me/notes.txt"))
    assert shown["corpus"] == "notes.txt" and shown["train.max_steps"] == 1000 and shown["prepare.packed"] is False


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="an extra")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)  # it makes its database
    run = tmp_path / "runs" / "af"
    assert write_steps(run, [], 0, 0, 1) == write_steps(run, ["mlflow"], 1, *range(2, 8)) == []
    assert write_steps(run, ["mlflow"], 5, 6, 7, 8) == []
    assert read_mlflow(run) == {
        "name": "af",
        "status": "FINISHED",
        "params": {"optim.lr": "0.001", "base": "general-mini"},
        "losses": [(each, each + 0.5) for each in range(9)],
        "metrics": {"train/mlm_loss", "step"},
    }


def test_an_mlflow_server_that_is_away_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="an extra")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)
    (told,) = write_steps(tmp_path, ["mlflow"], 0, *range(5))
    assert told.startswith("warning: mlflow gets no more figures") and "127.0.0.1" in told
    assert "secret" not in told
    assert len(read_metrics(Place(tmp_path / "metrics.jsonl"))) == 5 and not (tmp_path / "trackers").exists()


def test_trackio_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it reads where to write once, when it is imported
    pytest.importorskip("trackio", reason="an extra")
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)
    run = tmp_path / "trackio-runs" / "af"
    assert write_steps(run, [], 0, 0, 1) == write_steps(run, ["trackio"], 1, *range(2, 8)) == []
    assert write_steps(run, ["trackio"], 5, 6, 7, 8) == []
    from trackio.sqlite_storage import SQLiteStorage

    assert (tmp_path / "trackio" / "trackio-runs.db").exists()
    (found,) = SQLiteStorage.get_run_records("trackio-runs")
    logs = SQLiteStorage.get_logs("trackio-runs", str(found["name"]), run_id=str(found["id"]))
    assert str(found["name"]).startswith("af-")
    assert [(each["step"], each["train/mlm_loss"]) for each in logs] == [(each, each + 0.5) for each in range(9)]


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="an extra")
    from wandb.proto.wandb_internal_pb2 import Record as Written

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)
    run = tmp_path / "runs" / "af"
    assert write_steps(run, [], 0, 0, 1) == write_steps(run, ["wandb"], 1, *range(2, 8)) == []
    assert write_steps(run, ["wandb"], 5, 6, 7, 8) == []
    found, ids = list[tuple[int, float]](), set[str]()
    for path in sorted((tmp_path / "runs" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in read_wandb(path):
            written = Written.FromString(data)
            ids |= {written.run.run_id} - {""}
            items = {each.key or ".".join(each.nested_key): each.value_json for each in written.history.item}
            found += [(int(items["_step"]), float(items["train/mlm_loss"]))] if items else []
            assert not written.run.host and str(tmp_path).encode() not in data
    assert sorted(found) == [(each, each + 0.5) for each in range(9)], "no step twice"
    assert len(ids) == 1 and (run / "trackers" / "wandb").read_text() == f"{ids.pop()} 8"


def test_wandb_without_a_key_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="an extra")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (told,) = write_steps(tmp_path / "runs" / "af", ["wandb"], 0, *range(5))
    assert told.startswith("warning: wandb gets no more figures of af (ConfigError: no key; set WANDB_API_KEY, or WAN")
