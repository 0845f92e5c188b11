"""The index of all runs: one line each, whatever state they are in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def test_fine_tuned_models_have_a_table_and_sweeps_are_linked(tmp_path: Path) -> None:
    summary: dict[str, Any] = {
        "task": "ner",
        "set": {"name": "bc5cdr"},
        "model": {"name": "af"},
        "metric": "f1.micro",
        "restarts": {"dev": {"mean": 0.9}, "test": {"mean": 0.81234, "interval": [0.8, 0.8251]}},
        "against": {"verdict": "+2.0 points of f1.micro on test [1.0, 3.0]: af is better."},
    }
    alone = {**summary, "restarts": {"dev": {"mean": 0.9, "interval": None}}}
    del alone["against"]
    pages = {"af-ner": summary, "alone": alone, "damaged": {**summary, "metric": 3}, "sizes": None}
    for name, values in pages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ("report.html" if values else "sweep.html")).touch()
        (tmp_path / name / "summary.json").write_text(json.dumps(values or {}))
    lines = read_lines(tmp_path)
    assert lines == [
        [
            *("af-ner", "ner", "bc5cdr", "af", f"f1.micro 0.8123 on test [0.800,{NO_BREAK}0.825]"),
            "+2.0 points of f1.micro on test [1.0, 3.0]: af is better.",
        ],
        ["alone", "ner", "bc5cdr", "af", "f1.micro 0.9000 on dev", "–"],
        ["damaged", *["–"] * 4, lines[2][5]],
        ["sizes", "sweep.html"],
    ]
    assert lines[2][5].startswith("cannot be read (") and "metric" in lines[2][5]
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="af-ner/report.html"' in text and 'href="sizes/sweep.html"' in text
    assert "0 pre-training runs" in text
