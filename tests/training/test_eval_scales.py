"""A run's end is evaluated with less of what was added, and nothing but these figures comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_corpus
from small_runs import attempts, make_config, make_train

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import (
    AUTO_SCALES,
    EngineConfig,
    ObjectiveConfig,
    PretrainConfig,
    RunConfig,
    VocabConfig,
    list_eval_scales,
)
from domext_ray.downstream.forgetting.forgetting import read_models
from domext_ray.downstream.forgetting.scales import ScaleCurve, find_runs, measure_curve
from domext_ray.errors import ConfigError
from domext_ray.model.build import scale_extensions
from domext_ray.pipeline import prepare_run
from domext_ray.plan import identify_run, plan_run
from domext_ray.report.figures import measure_run
from domext_ray.report.scales import read_scales
from domext_ray.runs.run_directory import write_config, write_run
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.metrics import read_metrics
from domext_ray.training.run import Run

WORDS = MethodConfig(heads=1, ffn_units=8, word_rows=10**6, word_head=True)
METHODS = {
    "AF and words": WORDS,
    "some words": MethodConfig(name="words", heads=0, ffn_units=0, word_rows=40),
    "LoRA": MethodConfig(name="lora", heads=0, ffn_units=0, lora_rank=2),
}
NAMES = ("domain_bits_per_character", "general_mlm_accuracy")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Path:
    return write_corpus(tmp_path_factory.mktemp("scales") / "corpus.txt", 400)


def measure_afterwards(run: Run) -> ScaleCurve:
    """What evaluate_forgetting measures of a run that has ended."""
    write_config(run.paths.run, run.config)
    write_run(run.paths.run, identity=identify_run(run))
    config = ForgettingConfig(models=str(run.paths.run), scales=(0.5, 0.25))
    (found,) = find_runs(config, read_models(config))
    return measure_curve(found, config.scales, torch.device("cpu"))


def prepare(base: Path, corpus: Path, **parts: Any) -> Run:
    return prepare_run(plan_run(make_config(base, corpus, **parts)))


def read_tensors(run: Path) -> dict[str, Any]:
    checkpoint = find_latest(run / "checkpoints")
    assert checkpoint is not None
    return {name: each.param for name, each in checkpoint.state.tensors.items()}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_figures_at_scales_and_nothing_else_changes(
    method: MethodConfig, tiny_base_folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOMEXT_FP32_KERNELS", "torch")
    engine = EngineConfig(precision="bf16" if method.lora_rank else "fp32")
    place = RunConfig(name=method.name, dir=str(corpus.parent / "runs"), trackers=())
    run = prepare(tiny_base_folder, corpus, method=method, train=make_train(6), run=place, engine=engine)
    with attempts() as begin:
        begin(run, tmp_path / "plain").run()
        begin(run, Path(run.paths.run)).run()
        worker = begin(run, tmp_path / "scaled", train=make_train(6, eval_scales=(0.5, 0.25)))
        worker.run()
        scale_extensions(worker.model, method, 0.0)
        base = worker._score_scale("eval/", "")
        scale_extensions(worker.model, method, 0.5)
        half = worker._score_scale("eval/scale_0.5_", "")
    first, *_, last = read_metrics(tmp_path / "scaled" / "metrics.jsonl")
    assert base == {f"eval/{name}": first[f"eval/{name}"] for name in NAMES}, "at 0 it is as it began"
    assert half.items() <= last.items()
    expected = read_metrics(tmp_path / "plain" / "metrics.jsonl")[-1]
    added = {f"eval/scale_{scale}_{name}" for scale in ("0.25", "0.5") for name in NAMES}
    assert last.keys() - expected.keys() == added
    evaluated = [name for name in expected if name.startswith(("eval/", "train/"))]
    assert all(last[name] == expected[name] for name in evaluated)
    tensors = read_tensors(tmp_path / "scaled")
    assert all(torch.equal(each, tensors[name]) for name, each in read_tensors(tmp_path / "plain").items())
    curve = read_scales(measure_run(read_metrics(tmp_path / "scaled" / "metrics.jsonl")))
    assert curve is not None and curve.scales == (0.0, 0.25, 0.5, 1.0)
    measured = measure_afterwards(run)
    assert (measured.gained, measured.lost) == (curve.gained, curve.lost) and measured.describe() == curve.describe()
    for found, name in ((curve.gained, NAMES[0]), (curve.lost, NAMES[1])):
        assert (found[0], found[-1]) == (0.0, first[f"eval/{name}"] - last[f"eval/{name}"])


def test_the_base_is_measured_where_a_run_does_not_begin_at_it(
    tiny_base_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    method = MethodConfig(name="paper", heads=1, ffn_units=0, init="paper")
    run = prepare(tiny_base_folder, corpus, method=method, train=make_train(2, eval_scales=(0.5,)))
    with attempts() as begin:
        begin(run, tmp_path / "run").run()
    first, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    key = "eval/scale_0_domain_bits_per_character"
    assert key in last and last[key] != first["eval/domain_bits_per_character"]


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        (
            {"method": MethodConfig(trains="all", name="all", heads=0, ffn_units=0)},
            "--method.trains all, which changes",
        ),
        ({"method": MethodConfig(train_heads=True)}, "--method.train_heads, which changes the base itself"),
        ({"vocab": VocabConfig(size=100)}, r"new words \(--vocab.size, --vocab.words\), which have no scale"),
        (
            {"method": MethodConfig(name="x", module_hidden_size=8, module_ffn_size=8)},
            r"gated modules \(--method.module_hidden_size\), which have no scale",
        ),
        ({"objective": ObjectiveConfig(kind="causal")}, "--objective.kind causal, for no masked word is asked for"),
    ],
)
def test_what_has_no_scale_is_refused_and_auto_leaves_it_out(parts: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"--?train.eval_scales is .*; it must be empty with {rule}"):
        PretrainConfig(train=make_train(eval_scales=(0.5,)), **parts)
    assert list_eval_scales(PretrainConfig(train=make_train(eval_scales="auto"), **parts)) == ()


def test_auto_and_ranges() -> None:
    assert list_eval_scales(PretrainConfig(train=make_train(eval_scales="auto"))) == AUTO_SCALES
    assert list_eval_scales(PretrainConfig()) == ()
    with pytest.raises(ConfigError, match="it must be empty with gated modules"):
        list_eval_scales(PretrainConfig(train=make_train(eval_scales=(0.5,))), has_modules=True)
    for scales in ((0.0,), (1.0,), (0.5, 0.5), ("half",), "all"):
        with pytest.raises(ConfigError, match="eval_scales"):
            make_train(eval_scales=scales)
