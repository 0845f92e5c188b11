"""The report: curves from a metrics file, one page that needs no network, one picture, one table for the terminal."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from report_records import SUMMARY, make_records, make_run

from domext_ray.errors import RunError
from domext_ray.options.places import hide_places
from domext_ray.report.report import describe_result, format_summary, read_curve, smooth, write_report


class Page(HTMLParser):
    """What a browser would fetch, and the text that it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""
        self.num_figures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num_figures += tag == "svg"
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "data") and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_no_network_and_shows_everything(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "clinic", make_records()))
    assert path == tmp_path / "clinic" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.fetched == []
    assert "@import" not in page.text
    assert "url(http" not in path.read_text(encoding="utf-8")
    assert page.num_figures == 6
    assert describe_result(SUMMARY) in page.text
    assert "<notes & letters>/*.txt" in page.text, "settings must be shown as they are, and escaped"
    assert not re.search(r"\$\w", page.text), "a field of the template was not filled"
    for shown in ("4.800", "3.600", "-25.0%", "+12.8 points", "-1.9 points", "8,990.4", "0.41%"):
        assert shown in page.text


def test_the_page_names_no_place_of_this_machine(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "clinic", make_records())
    settings = {"base": f"{tmp_path}/bert", "corpus": "/home/ann/a b/*.txt, ~/c.jsonl,hf://org/set@1", "n": 3}
    (run_dir / "config.yaml").write_text(yaml.safe_dump({**settings, "name": "org/model"}))
    page = Page(write_report(run_dir).read_text(encoding="utf-8")).text
    assert "base: bert\ncorpus: '*.txt, c.jsonl,hf://org/set@1'\nn: 3\nname: org/model" in page
    assert str(tmp_path) not in page and "ann" not in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("base=/x/bert,af=~/runs/af/", "base=bert,af=af"),
        ("s3://bucket/key/part.parquet", "part.parquet"),
        ("data/notes.txt", "data/notes.txt"),
        ("1/2 of the text", "1/2 of the text"),
        ({"a": ["/b/c", 4, None]}, {"a": ["c", 4, None]}),
    ],
)
def test_of_a_place_only_the_last_part_is_shown(value: object, shown: object) -> None:
    assert hide_places(value) == shown


def test_the_picture_is_a_png_wide_enough_for_a_readme(tmp_path: Path) -> None:
    write_report(make_run(tmp_path / "clinic", make_records()))
    content = (tmp_path / "clinic" / "curves.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(content[16:20], "big") >= 1600
    assert {each.name for each in (tmp_path / "clinic").iterdir()} == {
        "metrics.jsonl",
        "summary.json",
        "config.yaml",
        "report.html",
        "curves.png",
    }


def test_equal_runs_give_equal_pages(tmp_path: Path) -> None:
    first = write_report(make_run(tmp_path / "a" / "clinic", make_records()))
    second = write_report(make_run(tmp_path / "b" / "clinic", make_records()))
    assert first.read_bytes() == second.read_bytes()


def test_a_run_of_one_step_without_general_words_is_reported(tmp_path: Path) -> None:
    records = make_records(1, eval_every=1)
    for record in records:
        record["eval/general_mlm_accuracy"] = None
    records[1]["train/mlm_loss"] = None  # how the metrics file writes a loss that is not finite
    summary = {**SUMMARY, "general": {"mlm_accuracy": {"before": None, "after": None}}}
    page = Page(write_report(make_run(tmp_path / "short", records, summary)).read_text(encoding="utf-8"))
    assert page.num_figures == 6
    assert "general sentences" not in describe_result(summary)
    assert "–" in format_summary(summary)


def test_a_run_that_no_figure_was_measured_of_is_reported(tmp_path: Path) -> None:
    records = [{name: None if "eval/" in name else each for name, each in line.items()} for line in make_records()]
    nothing = {"before": None, "after": None}
    summary = {**SUMMARY, "domain": dict.fromkeys(SUMMARY["domain"], nothing), "general": {"mlm_accuracy": nothing}}
    page = Page(write_report(make_run(tmp_path / "blind", records, summary)).read_text(encoding="utf-8"))
    assert page.num_figures == 6
    assert describe_result(summary).startswith("Held-out domain loss was not measured; 2,632,704 parameters trained")
    assert format_summary(summary).count("–") == 12


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="metrics.jsonl is missing"):
        write_report(tmp_path)
    run_dir = make_run(tmp_path / "run", make_records())
    (run_dir / "summary.json").unlink()
    with pytest.raises(RunError, match="summary.json is missing"):
        write_report(run_dir)
    assert not (run_dir / "report.html").exists()


def test_a_curve_leaves_out_what_is_not_finite() -> None:
    records = [
        {"step": 0, "eval/domain_mlm_loss": 4.0},
        {"step": 1, "train/mlm_loss": 4.5},
        {"step": 2, "train/mlm_loss": None},
        {"step": 3, "train/mlm_loss": math.inf},
        {"step": 4, "train/mlm_loss": 4.0},
    ]
    steps, values = read_curve(records, "train/mlm_loss")
    assert steps.tolist() == [1.0, 4.0]
    assert values.tolist() == [4.5, 4.0]
    assert len(read_curve(records, "train/lr")[0]) == 0


def test_smoothing_is_a_centred_mean_of_what_is_there() -> None:
    values = np.array([5.0, 1.0, 3.0, 3.0, 8.0, 4.0, 2.0])
    expected = [np.mean(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
    np.testing.assert_allclose(smooth(values), expected)
    np.testing.assert_allclose(smooth(np.full(1000, 2.5)), 2.5)
    assert len(smooth(np.array([1.0, 2.0]))) == 2
    noise = np.random.default_rng(0).normal(size=4000)
    assert smooth(noise).std() < 0.2 * noise.std()


def test_the_table_for_the_terminal() -> None:
    assert format_summary(SUMMARY).splitlines() == [
        "                          before    after         change",
        "held-out domain loss       4.800    3.600         -25.0%",
        "held-out domain accuracy   29.0%    41.8%   +12.8 points",
        "bits per character         1.900    1.710         -10.0%",
        "general-probe accuracy     38.6%    36.7%    -1.9 points",
        "2,632,704 parameters trained, 32.1% of base and extension; 60 steps, 245,760 tokens in 1.5 min "
        "(8,990 tokens/s, 0.4% of the time waiting for data)",
    ]


def test_the_result_in_one_sentence() -> None:
    assert describe_result(SUMMARY) == (
        "Held-out domain loss fell from 4.800 to 3.600 (-25.0%) and domain accuracy rose from 29.0% to 41.8%, while "
        "accuracy on general sentences fell from 38.6% to 36.7% (-1.9 points); 2,632,704 parameters trained, "
        "32.1% of base and extension."
    )
