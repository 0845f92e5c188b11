"""What workers tell the driver's terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from domext_ray.config.pretrain import TrainConfig
from domext_ray.runs.events import (
    EVALUATION,
    EVENTS,
    PREPARING,
    REPORT,
    START_UP,
    TRAINING,
    EventReader,
    enter_phase,
    measure_times,
    notify_driver,
)
from domext_ray.runtime import waiting
from domext_ray.storage import Place
from domext_ray.training.metrics import RunProgress


def test_the_driver_says_what_workers_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notify_driver(Place(tmp_path), "said in an earlier attempt")
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig()):
        enter_phase(Place(tmp_path), "evaluating the start")
        notify_driver(Place(tmp_path), "checkpoint step-20 is damaged; step-10 is used — ü.")
    shown = capsys.readouterr().err
    assert "checkpoint step-20 is damaged; step-10 is used — ü.\n" in shown
    assert "earlier" not in shown and "evaluating" not in shown


def test_a_line_is_read_once_and_whole(tmp_path: Path) -> None:
    reader = EventReader(Place(tmp_path))
    assert reader.read() == []
    enter_phase(Place(tmp_path), "one")
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"seconds": 1.0, "note"')
        file.flush()
        assert [event.text for event in reader.read()] == ["one"]
        file.write(': "two"}\nno JSON\n')
    assert [(event.text, event.is_phase) for event in reader.read()] == [("two", False)]
    assert reader.read() == []


def wait_for(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Wait until a text and the end of its line are on standard error; return all that is there."""
    deadline, shown = time.monotonic() + 120, ""
    while not (text in shown and shown.endswith("\n")):
        assert time.monotonic() < deadline, shown
        time.sleep(0.05)
        shown += capsys.readouterr().err
    return shown


def test_what_does_not_move_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    said = ["Ray has no room yet for 4 times 1 CPU"]
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(), "starting 4 workers", lambda: "".join(said)):
        shown = wait_for("no news", capsys)
        said.clear()
        enter_phase(Place(tmp_path), "evaluating the start")
        shown += wait_for("evaluating the start: no news", capsys)
    shown += capsys.readouterr().err
    first, last = "starting 4 workers: no news for ", "evaluating the start: no news for "
    lines = shown.splitlines()
    assert lines[0].startswith(first) and lines[0].endswith(
        " s (Ray has no room yet for 4 times 1 CPU); wait, or end the job with Ctrl-C: the same command goes on."
    )
    assert lines[-1].startswith(last) and lines[-1].endswith(
        " s; wait, or end the job with Ctrl-C: the same command goes on."
    )


def test_times_are_of_the_newest_job(tmp_path: Path) -> None:
    assert measure_times(Place(tmp_path)) == {}
    enter_phase(Place(tmp_path), "of a version without stages", seconds=1.0)
    assert measure_times(Place(tmp_path)) == {}
    phases = [(START_UP, 10.0), (TRAINING, 20.0)]  # this job was killed
    phases += [(START_UP, 1000.0), (PREPARING, 1004.5), (TRAINING, 1005.0), (EVALUATION, 1006.0)]
    phases += [(TRAINING, 1010.0), (EVALUATION, 1009.0)]  # by the clock of another node
    phases += [(REPORT, 1020.0), ("", 1021.0)]
    for stage, seconds in phases:
        enter_phase(Place(tmp_path), f"doing {stage}", stage, seconds)
        notify_driver(Place(tmp_path), "a sentence, which ends nothing")
    times = {START_UP: 4.5, PREPARING: 0.5, TRAINING: 1.0, EVALUATION: 4.0 + 11.0, REPORT: 1.0}
    assert measure_times(Place(tmp_path)) == times and list(times) == list(measure_times(Place(tmp_path)))
