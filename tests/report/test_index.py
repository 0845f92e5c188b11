"""The index of all runs: one line each, whatever state they are in."""

from __future__ import annotations

import re
from pathlib import Path

from report_records import ABOUT, make_records, make_run, write_origin

from domext_ray.report.compare import write_index
from domext_ray.report.figures import NO_BREAK
from domext_ray.storage import Place


def make_listed(folder: Path, name: str, started: str, num_steps: int = 60) -> Path:
    run_dir = make_run(folder / name, make_records()[: num_steps + 1])
    write_origin(run_dir, {**ABOUT, "started": started})
    (run_dir / "config.yaml").write_text("base: /data/bert\nmethod: {name: af}\ntrain: {max_steps: 60}\n")
    (run_dir / "report.html").touch()
    return run_dir


def read_lines(folder: Path) -> list[list[str]]:
    page = write_index(Place(folder)).read_text(encoding="utf-8")
    lines = re.findall(r'<tr>(<th scope="row">.*?)</tr>', page)
    return [[re.sub("<.*?>", "", cell) for cell in re.split("</t[hd]>", line)[:-1]] for line in lines]


def test_runs_are_listed_from_the_newest_with_what_they_reached(tmp_path: Path) -> None:
    make_listed(tmp_path, "older", "2026-05-01T10:00:00+00:00")
    make_listed(tmp_path, "a newer one", "2026-05-02T10:00:00+00:00")
    (make_listed(tmp_path, "under way", "2026-05-03T10:00:00+00:00", 45) / "summary.json").unlink()
    make_listed(tmp_path, "longer", "2026-04-01T10:00:00+00:00", 40)  # its summary is of step 60
    general, begun = (f"38.6% → {after} (unchanged, ±{NO_BREAK}2.1 points)" for after in ("36.7%", "37.3%"))
    lines = read_lines(tmp_path)
    assert lines[3][4] == "40 of 60", "a run that goes on is not taken for its old summary"
    assert lines[:3] == [
        ["under way", "2026-05-03 10:00", "af", "bert", "45 of 60", "4.800 → 4.000", begun],
        ["a newer one", "2026-05-02 10:00", "af", "bert", "60", "4.800 → 3.600", general],
        ["older", "2026-05-01 10:00", "af", "bert", "60", "4.800 → 3.600", general],
    ]
    assert '<a href="a%20newer%20one/report.html">a newer one</a>' in (tmp_path / "index.html").read_text()


def test_damaged_folders_have_a_line_and_stop_nothing(tmp_path: Path) -> None:
    make_listed(tmp_path, "good", "2026-05-01T10:00:00+00:00")
    (make_listed(tmp_path, "cut", "2026-05-01T10:00:00+00:00") / "run.json").write_text('{"format": ')
    (make_listed(tmp_path, "no options", "2026-05-01T10:00:00+00:00") / "config.yaml").unlink()
    (make_listed(tmp_path, "odd", "2026-05-01T10:00:00+00:00") / "config.yaml").write_text("method: 3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    lines = {name: cells for name, *cells in read_lines(tmp_path)}
    assert lines.keys() == {"good", "cut", "no options", "odd"}
    assert lines["good"][1] == "af"
    assert all(lines[name][-1].startswith("cannot be read (") for name in ("cut", "no options", "odd"))
    assert str(tmp_path) not in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_other_pages_are_linked_below(tmp_path: Path) -> None:
    for name, page in (("af-ner", "report.html"), ("sizes", "sweep.html")):
        (tmp_path / name).mkdir()
        (tmp_path / name / page).touch()
    text = write_index(Place(tmp_path)).read_text(encoding="utf-8")
    assert 'href="af-ner/report.html"' in text and 'href="sizes/sweep.html"' in text
    assert "0 pre-training runs" in text
