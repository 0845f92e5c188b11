"""Runs that make vectors: terminal, page, summary and index call their loss what it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_records import SUMMARY, make_records, make_run
from transformers import BertForMaskedLM

from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import ObjectiveConfig, PrepareConfig, PretrainConfig, TrainConfig
from domext_ray.errors import RunError
from domext_ray.model.base import load_base
from domext_ray.pretraining.plan import resolve, tell_of_base
from domext_ray.report.compare import write_index
from domext_ray.report.figures import describe_result, describe_sizes, format_summary, list_rows, measure_run
from domext_ray.report.forecast import Forecast, describe_forecast
from domext_ray.report.report import write_report
from domext_ray.report.summary import read_summary
from domext_ray.storage import Place
from domext_ray.text.corpus.estimate import RowEstimate
from domext_ray.training.metrics import RunProgress

TITLE, SHARE = "InfoNCE loss", "rows matched"


def make_vector_records() -> list[dict[str, Any]]:
    """What a worker writes for such a run."""
    records = []
    for record in make_records():
        named = {name.replace("train/mlm", "train/infonce"): value for name, value in record.items()}
        named = {name.replace("domain_mlm", "domain_infonce"): value for name, value in named.items()}
        nothing = {name: None for name in named if "bits" in name or "general_mlm" in name}
        records.append({**named, **nothing, "time/step_seconds": 1.5, "eval/general_words": 0})
    return records


def summarise() -> dict[str, Any]:
    return {**measure_run(make_vector_records()), "parameters": SUMMARY["parameters"]}


def test_the_result_names_the_loss() -> None:
    summary, title, share = summarise(), TITLE, SHARE
    assert summary["domain"]["infonce_loss"] == pytest.approx({"before": 4.8, "after": 3.6})
    assert "mlm_loss" not in summary["domain"]
    assert describe_result(summary) == f"Held-out {title} fell and {share} rose."
    lines = format_summary(summary).splitlines()
    assert lines[1].split() == ["held-out", *title.split(), "4.800", "3.600", "-25.0%"]
    assert lines[2].startswith(f"held-out {share} ") and len(lines) == 4, "nothing of what was not measured"
    loss, accuracy = list_rows(summary)
    assert loss[0] == f"held-out {title}" and "[" in accuracy[1]
    assert describe_sizes(summary).startswith("Measured on 5,000 rows of held-out text, the same ones before")


def test_page_and_index_name_the_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run", make_vector_records(), summarise())
    (run / "config.yaml").write_text(dump_yaml(PretrainConfig(objective=ObjectiveConfig(kind="infonce"))))
    page, title, share = write_report(Place(run)).read_text(encoding="utf-8"), TITLE, SHARE
    assert f"held-out {title}" in page and f"Held-out {share}" in page and f"{title} (nats per" in page
    for word in ("MLM", "masked", "General accuracy", "Bits per character", "general-probe"):
        assert word not in page.partition("How it was made")[0], word
    index = write_index(Place(tmp_path / "runs")).read_text(encoding="utf-8")
    assert f"4.800 → 3.600 ({title})" in index and read_summary(Place(run / "summary.json"))["domain"]["infonce_loss"]


def test_progress_names_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(max_steps=60)):
        lines = map(json.dumps, make_vector_records()[:21])
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    shown, title, share = capsys.readouterr().err, TITLE, SHARE
    assert f"step 20/60  {title} 4." in shown
    assert f"step 20  held-out {title} 4.400, {share} 33.0%" in shown and "bits" not in shown


def test_a_summary_that_lacks_its_loss_is_damaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_vector_records(), {**SUMMARY, **summarise()})
    assert read_summary(Place(run / "summary.json"))
    broken = {**SUMMARY, **summarise()}
    broken["domain"] = {**broken["domain"], "infonce_accuracy": {"before": "x", "after": 1}}
    (run / "summary.json").write_text(json.dumps(broken))
    with pytest.raises(
        RunError, match=r"summary.json has domain.infonce_accuracy.before = \'x\', which is of the wrong type"
    ):
        read_summary(Place(run / "summary.json"))


def test_rows_of_two_texts_are_told_as_such() -> None:
    config = PretrainConfig(objective=ObjectiveConfig(kind="infonce"), prepare=PrepareConfig(pair=("title", "body")))
    forecast = Forecast((RowEstimate(900, 50_000, 200_000, 1.0),))
    said = "900 of two texts of 128 tokens at most (estimated from 100% of the text)"
    assert said in describe_forecast(forecast, config)
    assert said.replace("two texts of ", "") in describe_forecast(forecast, PretrainConfig())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["masked", "infonce"])
def test_a_fresh_head_is_told_by_the_plan_alone_and_where_it_trains(
    kind: Any, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_base_folder, tmp_path / "encoder")
    BertForMaskedLM.from_pretrained(base).bert.save_pretrained(base)
    train = TrainConfig(seq_length=16, long_seq_length=32)
    config = PretrainConfig(base=str(base), objective=ObjectiveConfig(kind=kind), train=train)
    assert not load_base(config.base).has_mlm_head
    capsys.readouterr()
    plan = resolve(replace(config, run=replace(config.run, dir=str(tmp_path))))
    assert capsys.readouterr() == ("", ""), "what is refused later is told alone"
    tell_of_base(plan.config, plan.spec.base)
    note = f"note: the base {str(base)!r} has no masked-LM head: a fresh one is made and trains.\n"
    assert capsys.readouterr() == ("" if kind == "infonce" else note, "")
