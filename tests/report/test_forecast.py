"""What a dry run expects, against what a run then takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import write_corpus

from domext_ray.config.method import MethodConfig
from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.pretrain import (
    OptimConfig,
    PrepareConfig,
    ReplayConfig,
    RunConfig,
    SettledConfig,
    TrainConfig,
    VocabConfig,
)
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.report.forecast import describe_forecast, make_forecast
from domext_ray.storage import Place
from domext_ray.text.corpus.estimate import estimate_rows
from domext_ray.text.corpus.shards import make_settings, prepare_corpus
from domext_ray.text.data.files import find_files
from domext_ray.text.data.sample import check_corpus, read_sample
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.cost import StepCost, make_dry_run_model, measure_step_cost
from domext_ray.training.objective import KEEP_LOSS
from domext_ray.training.phases import count_limited_steps, count_phase_steps
from domext_ray.training.step import SingleProcessTrainer, StepFigures


def describe_model(config: SettledConfig) -> ModelSpec:
    return ModelSpec.of(config, load_base(config.base))


def test_steps_come_from_the_first_limit() -> None:
    sizes = [(1000, 100_000)]  # 100 tokens per row
    config = SettledConfig(train=TrainConfig(max_steps=0, epochs=2, global_batch_size=16))
    assert count_limited_steps(config, sizes) == 2 * (1000 // 16)
    for changes, steps in (
        ({"max_steps": 10}, 10),
        ({"max_tokens": 16_000}, 10),
        ({"epochs": 0, "max_tokens": 160_001}, 101),
        ({"epochs": 0.001}, 1),
    ):
        changed = replace(config, train=replace(config.train, **changes))
        assert count_limited_steps(changed, sizes) == steps


def test_an_epoch_of_two_phases_is_one_pass_in_all() -> None:
    train = TrainConfig(max_steps=0, epochs=1, global_batch_size=10, seq_length=32, long_seq_length=64, long_frac=0.1)
    config = SettledConfig(train=train, optim=OptimConfig())
    steps = count_limited_steps(config, [(2000, 60_000), (1000, 60_000)])
    short, long = count_phase_steps(config, steps)
    assert short + long == steps
    assert short / 200 + long / 100 == pytest.approx(1.0, abs=0.01)


def test_rows_are_estimated_as_they_are_prepared(tiny_base_folder: Path, tmp_path: Path, local_ray: None) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 20_000))
    prepare, tokenizer = PrepareConfig(shard_bytes=64 * 1024), load_tokenizer(tiny_base_folder)
    for pairs, document in ((False, "line"), (True, "file")):
        own = replace(prepare, document=document)
        manifest = (
            prepare_corpus(corpus, prepare, tiny_base_folder, 32, Place(tmp_path / "corpora")) if not pairs else None
        )
        sample = read_sample(corpus, own, find_files(corpus)[0], to_end=True)
        estimate = estimate_rows(sample, make_settings(tokenizer, own, 32, pairs))
        assert estimate is not None and 0 < estimate.sampled_frac <= 1
        if manifest is not None:
            assert estimate.num_rows == pytest.approx(manifest.num_rows("train"), rel=0.05)
            assert estimate.num_tokens == pytest.approx(manifest.num_tokens("train"), rel=0.05)
            size = sum(Path(manifest.folder, record.path).stat().st_size for record in manifest.records("train"))
            assert estimate.num_bytes == pytest.approx(size, rel=0.2)


def test_a_forecast_says_steps_hours_and_disk(tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 2000))
    train = TrainConfig(max_steps=0, epochs=3, global_batch_size=8, seq_length=32, tokens_per_second=100)
    config = SettledConfig(base=str(tiny_base_folder), corpus=corpus, train=train, run=RunConfig(keep_checkpoints=2))
    spec, samples = describe_model(config), [check_corpus(corpus, config.prepare, to_end=True)]

    def never() -> StepCost:
        raise AssertionError("the rate is given")

    forecast = make_forecast(config, spec, samples, never)
    (text,), counts = forecast.texts, spec.counts
    assert text.num_epochs == pytest.approx(3, rel=0.02)
    assert forecast.seconds == text.num_tokens / 100
    assert (forecast.checkpoint_bytes, forecast.export_bytes) == (counts.trainable * 4 * 3 * 2, counts.total * 4)
    short = make_forecast(replace(config, train=replace(train, max_seconds=forecast.seconds / 2)), spec, samples, never)
    assert short.seconds == forecast.seconds / 2 and short.num_steps == forecast.num_steps // 2
    assert short.texts[0].num_epochs == pytest.approx(text.num_epochs * short.num_steps / forecast.num_steps)
    printed = describe_forecast(forecast, config)
    assert f"{forecast.num_steps:,}, {text.num_epochs:.2f} epochs" in printed
    assert "100 tokens/s (--train.tokens_per_second)" in printed and "rows" in printed
    assert "  unknown, domain text  nothing (in this sample)" in printed


def test_a_forecast_says_what_is_read_of_each_text(tiny_base_folder: Path, tmp_path: Path) -> None:
    texts = {name: str(write_corpus(tmp_path / f"{name}.txt", 2000)) for name in ("corpus", "general", "web")}
    config = SettledConfig(
        base=str(tiny_base_folder),
        corpus=texts["corpus"],
        replay=ReplayConfig(corpus=texts["general"], frac=0.25),
        mixture=MixtureConfig(parts={"web": {"corpus": texts["web"], "weight": {0: 0, 0.5: 2}}}),
        train=TrainConfig(max_steps=100, global_batch_size=8, seq_length=32, tokens_per_second=100),
    )
    spec = describe_model(config)
    samples = [check_corpus(path, config.prepare, to_end=True) for path in texts.values()]
    forecast = make_forecast(config, spec, samples, lambda: StepCost(0.0, 0.0))
    estimate = forecast.estimates[0]
    assert estimate is not None
    assert [(text.title, text.num_rows) for text in forecast.texts] == [
        ("domain text", 300 + 100),
        ("general text", 200),
        ("web", 200),
    ]
    assert forecast.texts[0].num_epochs == 400 / estimate.num_rows
    assert [text.num_bytes for text in forecast.texts] == 3 * [estimate.num_bytes]
    printed = describe_forecast(forecast, config)
    assert f"  web                   200 rows, {forecast.texts[2].num_tokens:,} tokens, " in printed
    half = replace(config, train=replace(config.train, max_seconds=forecast.seconds / 2))
    shorter = make_forecast(half, spec, samples, lambda: StepCost(0.0, 0.0))
    assert [text.num_rows for text in shorter.texts] == [300, 100, 0]


def test_the_rate_is_measured_without_ray(tiny_base_folder: Path) -> None:
    config = SettledConfig(base=str(tiny_base_folder), train=TrainConfig(seq_length=32, global_batch_size=8))
    rate = measure_step_cost(make_dry_run_model(config, ModelSpec.of(config, load_base(config.base), num_new_words=3)))
    assert rate.tokens_per_second > 0 and rate.flops_per_token > 0


@pytest.mark.parametrize("trains", ["extensions", "all"])  # all: beside a copy of the base
def test_steps_that_ask_the_base_are_timed_as_such(
    trains: str, tiny_base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[StepFigures](), SingleProcessTrainer.train_step

    def train_step(self: SingleProcessTrainer, *args: Any, **named: Any) -> StepFigures:
        assert args[1][KEEP_LOSS] == round(0.25 * 40)  # of 8 rows of 32 tokens, of which 40 are predicted
        made.append(real(self, *args, **named))
        return made[-1]

    monkeypatch.setattr(SingleProcessTrainer, "train_step", train_step)
    config = SettledConfig(
        base=str(tiny_base_folder),
        replay=ReplayConfig(corpus="self"),
        method=MethodConfig(trains=trains, **({} if trains == "extensions" else {"heads": 0, "ffn_units": 0})),
        train=TrainConfig(seq_length=32, global_batch_size=8),
    )
    measure_step_cost(make_dry_run_model(config, ModelSpec.of(config, load_base(config.base))))
    assert made[-1].losses[KEEP_LOSS] > 0 and made[-1].loss > 0


def test_a_rate_beside_other_work_says_so_and_rows_lack_new_words(tiny_base_folder: Path) -> None:
    config = SettledConfig(
        base=str(tiny_base_folder),
        corpus="package-docs:1",
        train=TrainConfig(max_steps=100, seq_length=32, global_batch_size=8),
        vocab=VocabConfig(size=50),
    )
    samples = [check_corpus(config.corpus, config.prepare, to_end=True)]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        forecast = make_forecast(config, describe_model(config), samples, lambda: StepCost(2e6, 7.0))
    finally:
        for other in others:
            other.kill()
            other.wait()
    printed = describe_forecast(forecast, config)
    assert re.search(r"tokens/s \(measured here, beside other work that took \d+% of the processors", printed), printed
    assert "of the text without new words, which make fewer)" in printed
