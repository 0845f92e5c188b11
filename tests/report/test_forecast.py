"""What a dry run expects, against what a run then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_corpus

from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.pretrain import (
    OptimConfig,
    PrepareConfig,
    PretrainConfig,
    ReplayConfig,
    RunConfig,
    ScaleConfig,
    TrainConfig,
)
from domext_ray.corpus.estimate import estimate_rows
from domext_ray.corpus.shards import make_settings, prepare_corpus
from domext_ray.data.sources import resolve_sources
from domext_ray.model.base import load_base
from domext_ray.model.counts import ParameterCounts
from domext_ray.report.forecast import describe_forecast, make_forecast
from domext_ray.training.cost import StepCost, make_dry_run_model, measure_step_cost
from domext_ray.training.phases import count_limited_steps, count_phase_steps
from domext_ray.vocabulary.tokenizer import load_tokenizer

COUNTS = ParameterCounts(total=1000, trainable=100, encoder=900)


def test_steps_come_from_the_first_limit() -> None:
    sizes = [(1000, 100_000)]  # 100 tokens per row
    config = PretrainConfig(train=TrainConfig(max_steps=0, epochs=2, global_batch_size=16))
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
    config = PretrainConfig(train=train, optim=OptimConfig())
    steps = count_limited_steps(config, [(2000, 60_000), (1000, 60_000)])
    short, long = count_phase_steps(config, steps)
    assert short + long == steps
    assert short / 200 + long / 100 == pytest.approx(1.0, abs=0.01)


def test_rows_are_estimated_as_they_are_prepared(tiny_base_folder: Path, tmp_path: Path, local_ray: None) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 20_000))
    prepare, tokenizer = PrepareConfig(shard_bytes=64 * 1024), load_tokenizer(tiny_base_folder)
    for pairs, document in ((False, "line"), (True, "file")):
        own = replace(prepare, document=document)
        manifest = prepare_corpus(corpus, prepare, tiny_base_folder, 32, tmp_path / "corpora") if not pairs else None
        estimate = estimate_rows(resolve_sources(corpus, own), own, make_settings(tokenizer, own, 32, pairs))
        assert estimate is not None and 0 < estimate.sampled_frac <= 1
        if manifest is not None:
            assert estimate.num_rows == pytest.approx(manifest.num_rows("train"), rel=0.05)
            assert estimate.num_tokens == pytest.approx(manifest.num_tokens("train"), rel=0.05)
            size = sum(Path(manifest.folder, each.path).stat().st_size for each in manifest.records("train"))
            assert estimate.num_bytes == pytest.approx(size, rel=0.2)


def test_a_forecast_says_steps_hours_and_disk(tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus.txt", 2000))
    train = TrainConfig(max_steps=0, epochs=3, global_batch_size=8, seq_length=32, tokens_per_second=100)
    config = PretrainConfig(base=str(tiny_base_folder), corpus=corpus, train=train, run=RunConfig(keep_checkpoints=2))
    base, sources = load_base(config.base), resolve_sources(corpus, config.prepare)

    def never() -> float:
        raise AssertionError("the rate is given")

    forecast = make_forecast(config, base, sources, COUNTS, never)
    assert forecast.num_epochs == pytest.approx(3, rel=0.02)
    assert forecast.seconds == forecast.num_tokens / 100
    assert (forecast.checkpoint_bytes, forecast.export_bytes) == (100 * 4 * 3 * 2, 1000 * 4)
    short = make_forecast(
        replace(config, train=replace(train, max_seconds=forecast.seconds / 2)), base, sources, COUNTS, never
    )
    assert short.seconds == forecast.seconds / 2 and short.num_epochs == pytest.approx(forecast.num_epochs / 2)
    printed = describe_forecast(forecast, config)
    assert f"{forecast.num_steps:,}, {forecast.num_epochs:.2f} epochs" in printed
    assert "100 tokens/s (--train.tokens_per_second)" in printed and "rows" in printed


def test_a_forecast_says_what_is_read_of_each_text(tiny_base_folder: Path, tmp_path: Path) -> None:
    texts = {name: str(write_corpus(tmp_path / f"{name}.txt", 2000)) for name in ("corpus", "general", "web")}
    config = PretrainConfig(
        base=str(tiny_base_folder),
        corpus=texts["corpus"],
        replay=ReplayConfig(corpus=texts["general"], frac=0.25),
        mixture=MixtureConfig(parts={"web": {"corpus": texts["web"], "weight": {0: 0, 0.5: 2}}}),
        train=TrainConfig(max_steps=100, global_batch_size=8, seq_length=32, tokens_per_second=100),
    )
    base, sources = load_base(config.base), [resolve_sources(each, config.prepare) for each in texts.values()]
    forecast = make_forecast(config, base, sources[0], COUNTS, lambda: StepCost(0.0, 0.0), sources[1:])
    estimate = forecast.estimates[0]
    assert estimate is not None
    assert [(each.title, each.num_rows) for each in forecast.parts] == [
        ("domain text", 300 + 100),
        ("general text", 200),
        ("web", 200),
    ]
    assert forecast.num_epochs == forecast.parts[0].num_epochs == 400 / estimate.num_rows
    assert forecast.num_tokens == sum(each.num_tokens for each in forecast.parts)
    assert forecast.corpus_bytes == 3 * estimate.num_bytes
    printed = describe_forecast(forecast, config)
    assert f"  web                   200 rows, {forecast.parts[2].num_tokens:,} tokens, " in printed
    half = replace(config, train=replace(config.train, max_seconds=forecast.seconds / 2))
    shorter = make_forecast(half, base, sources[0], COUNTS, lambda: StepCost(0.0, 0.0), sources[1:])
    assert [each.num_rows for each in shorter.parts] == [300, 100, 0]


def test_the_rate_is_measured_without_ray(tiny_base_folder: Path) -> None:
    config = PretrainConfig(base=str(tiny_base_folder), train=TrainConfig(seq_length=32, global_batch_size=8))
    rate = measure_step_cost(make_dry_run_model(config, load_base(config.base), 0, num_new_words=3))
    assert rate.tokens_per_second > 0 and rate.flops_per_token > 0


def test_operations_per_second_give_the_hours(tiny_base_folder: Path) -> None:
    config = PretrainConfig(
        base=str(tiny_base_folder),
        scale=ScaleConfig(num_workers=2),
        train=TrainConfig(max_steps=100, seq_length=32, global_batch_size=8, teraflops=0.5),
    )
    sources = resolve_sources(config.corpus, config.prepare)
    forecast = make_forecast(config, load_base(config.base), sources, COUNTS, lambda: StepCost(2e6, 7.0))
    assert forecast.tokens_per_second == pytest.approx(2 * 0.5e12 / 2e6)
    assert forecast.seconds == pytest.approx(forecast.num_tokens / 500_000)
    printed = describe_forecast(forecast, config)
    assert "2.0 MFLOP per token, forward and backward, 1,000 GFLOP/s (--train.teraflops)" in printed
    assert "at 500,000 tokens/s (--train.teraflops), 43,200 million tokens per day" in printed
