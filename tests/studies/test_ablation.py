"""Removed parts against a model that never had them, spans that are kept, tables and pictures, and sweeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHAPE, make_random_model
from finetuned_models import CPU, FP32, finetune_here
from job_calls import call_job
from labelled_fixtures import write, write_ner
from made_data import write_relations

from domext_ray.commands.job import configure
from domext_ray.commands.main import JOBS
from domext_ray.config.finetune import (
    BOTTLENECK,
    FULL,
    AblateConfig,
    FeaturesConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    GridConfig,
    LabelledConfig,
    PlaceConfig,
)
from domext_ray.config.options.build import dump_yaml
from domext_ray.errors import ConfigError, DomextError, RunError
from domext_ray.finetuning.comparison import read_finetuned
from domext_ray.finetuning.finetuned import rebuild_finetuned
from domext_ray.intervals import Estimate
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import DomextForTokenClassification
from domext_ray.model.domext.layers_domext import AdapterPlace
from domext_ray.storage import Place
from domext_ray.studies.ablation.arms import Arm, choose_reference, describe_arms, plan_arms, train_arms
from domext_ray.studies.ablation.report import draw_spans, format_spans, write_arms, write_spans
from domext_ray.studies.ablation.spans import (
    SPANS,
    SpanScore,
    SpanStudy,
    choose_adapter,
    prepare_spans,
    remove_parts,
    study_spans,
)

SIZES = (80, 40, 20)
DESCRIPTIONS = {
    "bottlenecks": {"bottleneck_size": 4},
    "parallel": {"bottleneck_size": 4, "bottleneck_parallel": True, "bottleneck_place": "output"},
    "heads and units": {"heads": 1, "ffn_units": 8},
    "upper layer": {"heads": 1, "bottleneck_size": 4, "first_layer": 1},
}


def make_model(description: dict[str, Any]) -> DomextForTokenClassification:
    """A random model with two adapters; every tensor is off its start, the shifts of LayerNorms too."""
    config = DomextConfig(
        vocab_size=60, adapters={"own": description, "other": {"bottleneck_size": 4}}, num_labels=3, **SHAPE
    )
    return make_random_model(DomextForTokenClassification, config).eval()  # type: ignore[arg-type, return-value]


@torch.no_grad()
def compute_logits(model: DomextForTokenClassification) -> torch.Tensor:
    return model(torch.arange(5, 17).view(2, 6)).logits


def test_removed_parts_are_as_if_they_were_not_there() -> None:
    for kind, description in DESCRIPTIONS.items():
        for layers in ((0,), (1,), (0, 1)):
            model, without = make_model(description), make_model(description)
            before = compute_logits(model)
            for layer in layers:
                for place in without.bert.encoder.layer[layer].modules():
                    if isinstance(place, AdapterPlace):
                        place.detach_adapter("own")
            if len(layers) == 2:
                without.bert.detach_adapter("own")
            expected = compute_logits(without)
            assert torch.equal(before, expected) == (kind == "upper layer" and layers == (0,)), (kind, layers)
            with remove_parts(model, "own", layers, norms=True):
                assert torch.equal(compute_logits(model), expected), (kind, layers)
            assert torch.equal(compute_logits(model), before), (kind, layers)


def test_shifts_of_layer_norms_stay_unless_they_are_to_go() -> None:
    model, without = make_model(DESCRIPTIONS["bottlenecks"]), make_model(DESCRIPTIONS["bottlenecks"])
    without.bert.detach_adapter("own")
    expected = compute_logits(without)
    with remove_parts(model, "own", (0, 1), norms=False):
        assert not torch.equal(compute_logits(model), expected)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if ".adapters.own.norm." in name:
                    param.zero_()
        assert torch.equal(compute_logits(model), expected)


def test_tensors_come_back_bit_for_bit_even_after_an_error() -> None:
    model = make_model(DESCRIPTIONS["bottlenecks"])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), remove_parts(model, "own", (0, 1), norms=True):
        changed = {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}
        assert changed == {name for name in before if ".adapters.own.up." in name or ".adapters.own.norm." in name}
        raise KeyboardInterrupt
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_adapter_is_chosen() -> None:
    for adapters, own, wanted, expected in (
        (("a",), "", "", "a"),
        (("a", "b"), "b", "", "b"),
        (("a", "b"), "b", "a", "a"),
        (("a", "b"), "", "", r"--adapter is ''; .*\(a, b\)"),
        (("a",), "", "c", r"--adapter is 'c'; .*\(a\)"),
        ((), "", "", "no adapter"),
        (("a", "z"), "", "z", "takes no part"),
    ):
        active = [each for each in adapters if each != "z"]
        config = DomextConfig(adapters=dict.fromkeys(adapters, {"heads": 1}), active_adapters=active, **SHAPE)
        if expected in adapters:
            assert choose_adapter(config, own, wanted) == expected
        else:
            with pytest.raises(ConfigError, match=expected):
                choose_adapter(config, own, wanted)


@pytest.fixture(scope="module")
def config(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    return FinetuneConfig(
        task="ner",
        data=str(write_ner(tmp_path_factory.mktemp("sets") / "made", SIZES)),
        model=str(tiny_base_folder),
        run=PlaceConfig(name="made", dir=str(tmp_path_factory.mktemp("runs"))),
        method=replace(BOTTLENECK, bottleneck_size=8),
        labelled=LabelledConfig(max_length=32, stride=8),
        grid=GridConfig(lr=(2e-2,), batch_size=(8,), epochs=(5,)),
        optim=FinetuneOptimConfig(dropout=0.0),
        engine=FP32,
        num_resamples=100,
        export=False,
    )


@pytest.fixture(scope="module")
def run_dir(config: FinetuneConfig) -> Path:
    return finetune_here(config)


def choose(run_dir: Path, output: Path, **options: Any) -> AblateConfig:
    return AblateConfig(finetuned=str(run_dir), output=str(output), num_resamples=100, **options)


def test_every_span_is_scored_and_the_model_is_as_before(run_dir: Path, tmp_path: Path) -> None:
    work = prepare_spans(choose(run_dir, tmp_path))
    assert work.spans == [(0, 0), (1, 1), (0, 1)] and work.adapter == "task"
    before = {name: each.clone() for name, each in work.fitted.model.state_dict().items()}
    study = study_spans(work)
    assert all(torch.equal(each, before[name]) for name, each in work.fitted.model.state_dict().items())
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert study.whole == summary["dev"]["f1"]["micro"] > 0.5
    assert study.majority == summary["baselines"]["dev"]["majority"]["f1"]["micro"]
    task, dev = work.fitted.task, work.fitted.task.data.dev
    for span in reversed(work.spans):  # the study's order is another
        with remove_parts(work.fitted.model, "task", range(span[0], span[1] + 1), norms=False):
            value = task.score(dev, work.fitted.predict(dev)).get(study.metric)
        found = study.spans[span]
        assert found.value == value and found.difference.value == pytest.approx(value - study.whole)
        assert found.difference.low <= found.difference.value <= found.difference.high
        assert study.relative_change(span) == pytest.approx(100 * (value / study.whole - 1))
    with remove_parts(work.fitted.model, "task", (), norms=True):
        assert task.score(dev, work.fitted.predict(dev)).get(study.metric) == study.whole
    assert study.spans[(0, 1)].value < 0.5 * study.whole, "a frozen random encoder alone does not help its head"


def test_all_layers_with_their_norms_are_the_model_without_its_adapter(run_dir: Path, tmp_path: Path) -> None:
    study = study_spans(prepare_spans(choose(run_dir, tmp_path, remove_norms=True)))
    fitted = rebuild_finetuned(Place(run_dir), CPU).fitted["model"]
    fitted.model.bert.detach_adapter("task")
    dev = fitted.task.data.dev
    assert study.spans[(0, 1)].value == fitted.task.score(dev, fitted.predict(dev)).get(study.metric)


def test_spans_that_were_scored_are_kept(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = prepare_spans(choose(run_dir, tmp_path))
    whole = study_spans(work)
    record = json.loads((tmp_path / "spans.json").read_text(encoding="utf-8"))
    lost = record["spans"][1]
    (tmp_path / SPANS / "1-1.json").unlink()
    kept = json.loads((tmp_path / SPANS / "0-0.json").read_text(encoding="utf-8"))
    kept["steps"][0]["value"] = 0.123  # which no second scoring would give
    (tmp_path / SPANS / "0-0.json").write_text(json.dumps(kept), encoding="utf-8")
    capsys.readouterr()
    again = study_spans(work)
    assert again.spans[(0, 0)].value == 0.123 and again.spans[(1, 1)] == whole.spans[(1, 1)]
    assert "2 of 3 spans were scored before" in capsys.readouterr().err
    assert lost in json.loads((tmp_path / "spans.json").read_text(encoding="utf-8"))["spans"]
    with pytest.raises(
        RunError, match=r"another study \(--remove_norms was false and is true now\); give another --output"
    ):
        study_spans(replace(work, remove_norms=True))
    (tmp_path / SPANS / "0-0.json").write_text("[]", encoding="utf-8")
    with pytest.raises(RunError, match=r"0-0\.json .*; delete it: the same command runs that trial again"):
        study_spans(work)


def test_the_job_writes_table_and_picture(run_dir: Path, tmp_path: Path) -> None:
    flags = ["--finetuned", str(run_dir), "--output", str(tmp_path / "out")]
    code, shown, _ = call_job("ablate", *flags, "--dry_run", "true")
    assert code == 0 and "3 spans of the layers 0 to 1" in shown and not (tmp_path / "out").exists()
    _, shown, _ = call_job("ablate", *flags)
    assert "| layer 1 |" in shown and "| all layers (0 to 1) |" in shown and "| (majority baseline) |" in shown
    assert {each.name for each in (tmp_path / "out").iterdir()} == {SPANS, "spans.json", "spans.md", "spans.png"}
    assert (tmp_path / "out" / "spans.png").read_bytes().startswith(b"\x89PNG")
    says = "error: --adapter is 'clinic'; it must be one of the model's adapters (task).\n"
    assert call_job("ablate", *flags, "--adapter", "clinic")[::2] == (2, says)


def copy_record(run_dir: Path, folder: Path, change: Callable[[FinetuneConfig], FinetuneConfig]) -> Path:
    """A run's directory without its tensors, made with other options."""
    folder.mkdir()
    for name in ("run.json", "summary.json"):
        (folder / name).write_bytes((run_dir / name).read_bytes())
    config = rebuild_finetuned(Place(run_dir), CPU).config
    (folder / "config.yaml").write_text(dump_yaml(change(config)), encoding="utf-8")
    return folder


def test_runs_that_cannot_be_studied_are_refused(
    run_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, config: FinetuneConfig
) -> None:
    with pytest.raises(RunError, match="no fine-tuning run that has ended"):
        prepare_spans(choose(tmp_path, tmp_path))
    lost = copy_record(run_dir, tmp_path / "lost", lambda each: each)
    with pytest.raises(RunError, match="lacks the best training's tensors"):
        prepare_spans(choose(lost, tmp_path))
    with pytest.raises(
        RunError, match=r"^--model 'general-mini' is not what .* was trained with: it has other weights"
    ):
        prepare_spans(choose(run_dir, tmp_path, model="general-mini"))
    other = write_ner(tmp_path / "other" / "made", SIZES)
    write(other / "devel.tsv", "cat\tB-Drug\ndog\tB-Disease\n\n")
    with pytest.raises(RunError, match=r"--data .* is not what .* was trained with"):
        prepare_spans(choose(run_dir, tmp_path, data=str(other)))
    relations = write_relations(tmp_path / "relations", "en", {"train": 12, "dev": 4, "test": 4})
    staged = replace(
        config,
        task="cmeie",
        data=str(relations),
        run=replace(config.run, name="staged"),
        labelled=LabelledConfig(max_length=96, stride=16),
        grid=GridConfig(batch_size=(4,), epochs=(0.3,)),
    )
    with pytest.raises(ConfigError, match=r"relation_extraction, which takes 2 models"):
        prepare_spans(choose(finetune_here(staged), tmp_path))


def test_options_out_of_range_are_named() -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({}, "--finetuned is ''"),
        ({"study": "size", "finetuned": "runs/af"}, "--finetuned is 'runs/af'; it must be empty"),
        ({"study": "depth"}, "--study is 'depth'"),
        ({"study": "sigma", "sigmas": "0.01,2"}, "--sigmas is 2.0; it must be at most 1"),
        ({"study": "sigma", "sigmas": "nan"}, "--sigmas is 'nan'"),
        ({"study": "size", "sizes": "8,8"}, "--sizes is '8,8'"),
        ({"study": "size", "sizes": "8,x"}, "--sizes is 'x'"),
        ({"study": "size", "top_layers": "0"}, "--top_layers is '0'"),
        ({"study": "size", "method": FULL}, r"--method\.bottleneck_size is 0"),
        ({"study": "sigma", "method": replace(BOTTLENECK, trains="all")}, r"--method\.trains is 'all'"),
        ({"study": "size", "features": FeaturesConfig(layers="1")}, r"--features\.layers is '1'"),
    ]
    for options, message in mistakes:
        with pytest.raises(DomextError, match=message):
            AblateConfig(**options)


UNREAD = {
    "--study spans --finetuned {here} --output {here} --grid.lr 1 --sizes 8": "--grid.lr, --sizes have",
    "--study spans --finetuned {here} --output {here} --data {here} --model general-mini --scale.cpus 1": "",
    "--study sigma --sizes 8 --adapter x --sigmas 1": "--sizes, --adapter have",
    "--study size --sigmas 1 --sizes 8 --grid.lr 1": "--sigmas has",
}


@pytest.mark.parametrize("command", UNREAD)
def test_options_that_a_study_does_not_read_are_told(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(JOBS["ablate"], JOBS["ablate"].read(command.format(here=tmp_path).split()))
    said = UNREAD[command]
    assert capsys.readouterr().out == (said and f"warning: {said} no effect in this job.\n")


def make_study(num_layers: int) -> SpanStudy:
    spans = {(a, b): -0.02 * (b - a + 1) ** 2 / num_layers for a in range(num_layers) for b in range(a, num_layers)}
    changes = {span: Estimate(change, change - 0.01, change + 0.01) for span, change in spans.items()}
    scores = {span: SpanScore(0.8 + change.value, change) for span, change in changes.items()}
    return SpanStudy("made", "accuracy", "domain", False, 50, 0.8, 0.5, (0, num_layers - 1), scores)


def test_the_table_has_single_layers_halves_and_all(tmp_path: Path) -> None:
    table = format_spans(make_study(4))
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    halves = ["lower half (0 to 1)", "upper half (2 to 3)", "all layers (0 to 3)"]
    assert rows == ["removed", "nothing", *(f"layer {i}" for i in range(4)), *halves, "(majority baseline)"]
    assert "| lower half (0 to 1) | -2.5 % | 0.780 | -0.020 | -0.030 to -0.010 |" in table
    assert "-0.6 % on average" in table and "all layers by -10.0 %" in table
    assert "| layer 0 |" in write_spans(make_study(1), Place(tmp_path))
    draw_spans(make_study(24), Place(tmp_path / "24.png"))
    assert (tmp_path / "24.png").stat().st_size > (tmp_path / "spans.png").stat().st_size > 3000


@pytest.fixture(scope="module")
def size_config(config: FinetuneConfig) -> AblateConfig:
    values = {name: getattr(config, name) for name in ("task", "data", "model", "labelled", "optim", "engine")}
    return AblateConfig(
        **values,
        study="size",
        sizes="4,2",
        method=config.method,
        grid=replace(config.grid, restarts=2, epochs=(1,)),
        run=replace(config.run, name="sweep"),
        num_resamples=100,
    )


def test_a_sweep_varies_one_thing(size_config: AblateConfig) -> None:
    arms = plan_arms(size_config)
    names = [f"sweep-{name}" for name in ("size2", "size4", "top1", "top2", "layer_norms", "full")]
    assert [each.name for each in arms] == names
    methods = [each.config.method for each in arms]
    assert [each.bottleneck_size for each in methods] == [2, 4, 0, 0, 0, 0]
    assert [each.trains for each in methods] == ["extensions"] * 2 + ["top_layers"] * 2 + ["layer_norms", "all"]
    assert [each.top_layers for each in methods] == [0, 0, 1, 2, 0, 0]
    assert all(type(each.config) is FinetuneConfig and not each.config.export for each in arms)
    plan = describe_arms(size_config, arms)
    assert "sweep-size2: 2 trainings of 1,069 parameters" in plan and "6 runs into" in plan
    with pytest.raises(ConfigError, match=r"--top_layers has 3; .* has 2 layers"):
        plan_arms(replace(size_config, top_layers=(1, 3)))
    assert len(plan_arms(replace(size_config, top_layers="none"))) == 4
    sigmas = plan_arms(replace(size_config, study="sigma", sigmas=(1, 1e-7)))
    assert [each.name for each in sigmas] == ["sweep-sigma1e-07", "sweep-sigma1"]
    assert [(each.config.method.init, each.config.method.bottleneck_std) for each in sigmas] == [
        ("paper", 1e-7),
        ("paper", 1.0),
    ]
    assert {each.config.method.bottleneck_size for each in sigmas} == {8}


def test_a_sweep_becomes_table_and_picture(size_config: AblateConfig, tmp_path: Path) -> None:
    chosen = replace(size_config, sizes="4", run=replace(size_config.run, name="here", dir=str(tmp_path)))
    arms = [each for each in plan_arms(chosen) if each.name in ("here-size4", "here-full")]
    runs = [read_finetuned(Place(finetune_here(each.config))) for each in arms]
    table = write_arms("size", arms, runs, Place(tmp_path))
    assert table.index("| here-full |") < table.index("| here-size4 |") and "here-size4 0.02" in table
    record = json.loads((tmp_path / "size.json").read_text(encoding="utf-8"))
    small, full = record["runs"]
    assert record["reference"] == "here-full" and full["value"] is None and small["value"] == 4
    width, num_layers, num_labels = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], 5
    assert isinstance(width, int) and isinstance(num_layers, int)
    bottleneck = 2 * width * 4 + 4 + width + 2 * width  # two matrices and their biases, and a LayerNorm's shifts
    assert small["trained"] == 2 * num_layers * bottleneck + (width + 1) * num_labels < full["trained"]
    assert small["mean"] == pytest.approx(np.mean(small["values"])) and len(small["values"]) == 2
    assert small["sd"] == pytest.approx(np.std(small["values"], ddof=1))
    assert small["difference"]["value"] == pytest.approx(small["mean"] - full["mean"])
    assert small["interval"][0] <= small["mean"] <= small["interval"][1]
    assert (tmp_path / "size.png").stat().st_size > 5000
    sigmas = [Arm("bottlenecks", sigma, each.config) for sigma, each in zip((1e-7, 1e-2), arms, strict=True)]
    write_arms("sigma", sigmas, runs, Place(tmp_path))
    assert (tmp_path / "sigma.png").stat().st_size > 5000 and (tmp_path / "sigma.md").exists()


@pytest.mark.jobs
def test_a_sweep_goes_on_where_it_stopped(
    size_config: AblateConfig, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(size_config, top_layers="none")
    arms = plan_arms(config)
    first = train_arms(arms)
    assert choose_reference(arms).name == "sweep-full" and not math.isnan(first[0].mean)
    assert [each.name for each in first] == [each.name for each in arms]
    capsys.readouterr()
    again = train_arms(arms)
    assert capsys.readouterr().out.count("nothing is left to do") == len(arms)
    assert [each.mean for each in again] == [each.mean for each in first]
