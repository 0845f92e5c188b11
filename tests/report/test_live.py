"""The page of a run that trains: written after evaluations, seldom, and never at the run's cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_records import make_records, make_run

from domext_ray.report import report as run_page
from domext_ray.report.report import LiveReport
from domext_ray.storage import Place


def test_a_page_is_written_at_an_evaluation_and_the_next_one_waits(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records()[:21])
    report = LiveReport(Place(run_dir))
    report.note_evaluation()
    assert "Running: step 20" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert 'href="clinic/report.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    make_run(run_dir, make_records()[:41])
    report.note_evaluation()
    assert "Running: step 20" in (run_dir / "report.html").read_text(encoding="utf-8"), "written a moment ago"
    report.note_stop()
    assert "Stopped at step 40" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_a_page_takes_a_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 12.0, 111.0, 113.0, 113.0, 114.0])
    monkeypatch.setattr(run_page.time, "monotonic", lambda: next(clock))
    report = LiveReport(Place(make_run(tmp_path / "clinic", make_records())))
    page = tmp_path / "clinic" / "report.html"
    report.note_evaluation()  # from 10 to 12
    page.unlink()
    report.note_evaluation()  # at 111
    assert not page.exists()
    report.note_evaluation()  # at 113
    assert page.exists()


def test_a_run_that_has_ended_is_not_said_to_run(tmp_path: Path) -> None:
    """The thread that waits for evaluations may come late."""
    run_dir = make_run(tmp_path / "clinic", make_records()[:41])
    report = LiveReport(Place(run_dir))
    with pytest.raises(KeyboardInterrupt), report:
        raise KeyboardInterrupt
    (run_dir / "report.html").unlink()
    report.note_evaluation()
    other = LiveReport(Place(run_dir))
    other.close()
    other.note_evaluation()
    assert not (run_dir / "report.html").exists()


def test_a_run_that_has_no_figure_yet_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    LiveReport(Place(tmp_path / "run")).note_stop()
    assert capsys.readouterr().err == "" and not (tmp_path / "run" / "report.html").exists()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    (run_dir / "run.json").write_text("{")
    LiveReport(Place(run_dir)).note_evaluation()
    said = capsys.readouterr().err
    assert said.startswith("warning: the report could not be written (") and "run.json is not valid JSON" in said
