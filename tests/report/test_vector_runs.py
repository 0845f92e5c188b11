"""Runs that make vectors: terminal, page, summary and index call their loss what it is; the decoder is counted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_records import ABOUT, SUMMARY, make_records, make_run, write_origin
from transformers import BertForMaskedLM

from domext_ray.config.pretrain import ObjectiveConfig, PrepareConfig, PretrainConfig, TrainConfig
from domext_ray.corpus.estimate import RowEstimate
from domext_ray.errors import RunError
from domext_ray.model.base import load_base
from domext_ray.options.build import dump_yaml
from domext_ray.plan import resolve
from domext_ray.report.compare import write_index
from domext_ray.report.figures import describe_result, describe_sizes, format_summary, list_rows, measure_run
from domext_ray.report.forecast import Forecast, describe_forecast, describe_plan
from domext_ray.report.report import write_report
from domext_ray.report.summary import read_summary
from domext_ray.storage import Place
from domext_ray.training.cost import estimate_memory, make_dry_run_model
from domext_ray.training.metrics import RunProgress

TITLES = {"infonce": ("InfoNCE loss", "rows matched"), "tsdae": ("TSDAE loss", "tokens written")}
each_kind = pytest.mark.parametrize("kind", TITLES)


def make_vector_records(kind: str) -> list[dict[str, Any]]:
    """What a worker writes for such a run."""
    records = []
    for each in make_records():
        named = {name.replace("train/mlm", f"train/{kind}"): value for name, value in each.items()}
        named = {name.replace("domain_mlm", f"domain_{kind}"): value for name, value in named.items()}
        nothing = {name: None for name in named if "bits" in name or "general_mlm" in name}
        records.append({**named, **nothing, "time/step_seconds": 1.5, "eval/general_words": 0})
    return records


def summarise(kind: str) -> dict[str, Any]:
    parameters = {**SUMMARY["parameters"], **({"decoder": 50_000} if kind == "tsdae" else {})}
    return {**measure_run(make_vector_records(kind)), "parameters": parameters}


@each_kind
def test_the_result_names_the_loss(kind: str) -> None:
    summary, (title, share) = summarise(kind), TITLES[kind]
    assert summary["domain"][f"{kind}_loss"] == pytest.approx({"before": 4.8, "after": 3.6})
    assert "mlm_loss" not in summary["domain"]
    assert describe_result(summary) == f"Held-out {title} fell and {share} rose."
    decoder = ", 32.1% of base and extension, and 50,000 of a decoder;"
    assert (decoder in format_summary(summary)) == (kind == "tsdae")
    lines = format_summary(summary).splitlines()
    assert lines[1].split() == ["held-out", *title.split(), "4.800", "3.600", "-25.0%"]
    assert lines[2].startswith(f"held-out {share} ") and len(lines) == 4, "nothing of what was not measured"
    loss, accuracy = list_rows(summary)
    assert loss[0] == f"held-out {title}" and "[" in accuracy[1]
    counted = {"infonce": "rows", "tsdae": "tokens"}[kind]
    assert describe_sizes(summary).startswith(f"Measured on 5,000 {counted} of held-out text, the same ones before")


@each_kind
def test_page_and_index_name_the_loss(kind: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run", make_vector_records(kind), summarise(kind))
    if kind == "tsdae":
        parameters = {**ABOUT["parameters"], "decoder": 50_000}
        write_origin(run, {**ABOUT, "parameters": parameters})
    (run / "config.yaml").write_text(dump_yaml(PretrainConfig(objective=ObjectiveConfig(kind=kind))))
    page, (title, share) = write_report(Place(run)).read_text(encoding="utf-8"), TITLES[kind]
    assert f"held-out {title}" in page and f"Held-out {share}" in page and f"{title} (nats per" in page
    for word in ("MLM", "masked", "General accuracy", "Bits per character", "general-probe"):
        assert word not in page.partition("How it was made")[0], word
    assert ("beside them a decoder of 50,000" in page) == (kind == "tsdae")
    index = write_index(Place(tmp_path / "runs")).read_text(encoding="utf-8")
    assert f"4.800 → 3.600 ({title})" in index and read_summary(Place(run / "summary.json"))["domain"][f"{kind}_loss"]


@each_kind
def test_progress_names_the_loss(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(Place(tmp_path / "metrics.jsonl"), TrainConfig(max_steps=60)):
        lines = map(json.dumps, make_vector_records(kind)[:21])
        (tmp_path / "metrics.jsonl").write_text("".join(f"{each}\n" for each in lines))
    shown, (title, share) = capsys.readouterr().err, TITLES[kind]
    assert f"step 20/60  {title} 4." in shown
    assert f"step 20  held-out {title} 4.400, {share} 33.0%" in shown and "bits" not in shown


@each_kind
def test_a_summary_that_lacks_its_loss_is_damaged(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_vector_records(kind), {**SUMMARY, **summarise(kind)})
    assert read_summary(Place(run / "summary.json"))
    broken = {**SUMMARY, **summarise(kind)}
    broken["domain"] = {**broken["domain"], f"{kind}_accuracy": {"before": "x", "after": 1}}
    (run / "summary.json").write_text(json.dumps(broken))
    with pytest.raises(
        RunError, match=rf"summary.json has domain.{kind}_accuracy.before = \'x\', which is of the wrong type"
    ):
        read_summary(Place(run / "summary.json"))


def test_rows_of_two_texts_are_told_as_such() -> None:
    config = PretrainConfig(objective=ObjectiveConfig(kind="infonce"), prepare=PrepareConfig(pair=("title", "body")))
    forecast = Forecast((RowEstimate(900, 50_000, 200_000, 1.0),))
    said = "900 of two texts of 128 tokens at most (estimated from 100% of the text)"
    assert said in describe_forecast(forecast, config)
    assert said.replace("two texts of ", "") in describe_forecast(forecast, PretrainConfig())


def test_a_dry_run_counts_the_decoder(tiny_base_folder: Path, tmp_path: Path) -> None:
    config = PretrainConfig(base=str(tiny_base_folder), objective=ObjectiveConfig(kind="tsdae", decoder_layers=2))
    config = replace(
        config, run=replace(config.run, dir=str(tmp_path)), train=TrainConfig(seq_length=16, long_seq_length=32)
    )
    run = resolve(config)
    counts = run.spec.counts
    # Positions, last norm, and two layers of two norms, 13 matrices of d x d and their biases.
    assert counts.decoder == 32 * 32 + 2 * 32 + 2 * (4 * 32 + 13 * 32**2 + 10 * 32)
    masked = resolve(replace(config, objective=ObjectiveConfig())).spec.counts
    assert replace(counts, decoder=0) == masked, "the model's own counts, hence sizes for a budget, stay"
    memory = estimate_memory(make_dry_run_model(run.config, run.spec))
    assert memory["trainable_weights"] == 4 * (masked.trainable + counts.decoder)
    said = describe_plan(run, memory, Forecast(()))
    assert f", and {counts.decoder:,} of a decoder, which no export has\n" in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["masked", "tsdae", "infonce"])
def test_a_fresh_head_is_told_by_the_plan_alone_and_where_it_trains(
    kind: Any, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_base_folder, tmp_path / "encoder")
    BertForMaskedLM.from_pretrained(base).bert.save_pretrained(base)
    train = TrainConfig(seq_length=16, long_seq_length=32)
    config = PretrainConfig(base=str(base), objective=ObjectiveConfig(kind=kind), train=train)
    assert not load_base(config.base).has_mlm_head
    capsys.readouterr()
    resolve(replace(config, run=replace(config.run, dir=str(tmp_path))))
    note = f"note: the base {str(base)!r} has no masked-LM head, so a fresh one is made and trains.\n"
    assert capsys.readouterr() == ("" if kind == "infonce" else note, "")
