"""Models with less of what they added: as models of their own on general text, and as a curve on a run's own text."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoint_runs import make_run
from conftest import WORDS, write_corpus
from job_calls import call_job
from small_runs import attempts, make_config, make_train

from domext_ray.config.jobs import ForgettingConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig, PretrainConfig, RunConfig
from domext_ray.errors import ConfigError
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import load_base
from domext_ray.model.build import scale_extensions
from domext_ray.model.spec import ModelSpec
from domext_ray.models.source import open_model
from domext_ray.pretraining.inputs import prepare_run
from domext_ray.pretraining.plan import resolve
from domext_ray.runs.run_directory import write_config, write_run
from domext_ray.storage import Place
from domext_ray.studies.forgetting.forgetting import Forgetting, measure_forgetting, read_models
from domext_ray.studies.forgetting.scales import find_runs, measure_curve
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.evaluate import Scores, measure_bits
from domext_ray.training.metrics import read_metrics

METHODS = {
    "af": MethodConfig(name="af", heads=1, ffn_units=8, word_rows=10**6, word_head=True),
    "lora": MethodConfig(name="lora", heads=0, ffn_units=0, lora_rank=2),
}
PRECISIONS = {"af": "fp32", "lora": "bf16"}
FIGURES = ("eval/domain_bits_per_character", "eval/general_mlm_accuracy")


@dataclass(frozen=True)
class Trained:
    """A run that has ended: its directory, and its figures at 0, 0.5 and 1 as its own worker evaluates them."""

    folder: Path
    figures: tuple[tuple[float, float], ...]


@pytest.fixture(scope="module")
def general(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """General text, and the sentences of the runs' probe: all words that the tiny base knows."""
    path = tmp_path_factory.mktemp("general") / "general.txt"
    path.write_text("\n".join(" ".join(WORDS[i : i + 12]) + " ." for i in range(0, len(WORDS) - 12, 3)) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(
    tiny_base_folder: Path, general: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None
) -> dict[str, Trained]:
    folder, found = tmp_path_factory.mktemp("scaled"), dict[str, Trained]()
    corpus = write_corpus(folder / "corpus.txt", 400)
    optim = OptimConfig(lr=0.1, decay_steps=6, warmup_steps=1)  # which moves what the tiny base predicts
    common = {"optim": optim, "train": make_train(6, general_probe=str(general))}
    with pytest.MonkeyPatch.context() as patched, attempts() as begin:
        patched.setenv("DOMEXT_FP32_KERNELS", "torch")  # of this process, which is no worker's own
        for name, method in METHODS.items():
            place = RunConfig(name=name, dir=str(folder / "runs"), trackers=())
            engine = EngineConfig(precision=cast(Any, PRECISIONS[name]))
            config = make_config(tiny_base_folder, corpus, method=method, run=place, engine=engine, **common)
            run = prepare_run(resolve(config))
            own = Path(run.paths.run)
            worker = begin(run, own)
            worker.run()
            scale_extensions(worker.model, method, 0.5)
            sets = worker.measures.sets
            characters, general = (
                Scores.add_up(worker.measures.score(each)) for each in (sets.characters, sets.general)
            )
            half = measure_bits(characters, sets.characters), general.accuracy
            write_config(Place(own), run.config)
            write_run(Place(own), identity=run.identity)
            first, *_, last = read_metrics(Place(own / "metrics.jsonl"))
            start, end = ((each[FIGURES[0]], each[FIGURES[1]]) for each in (first, last))
            found[name] = Trained(own, (start, half, end))
    return found


def ask(corpus: str | Path, output: Path, *scales: float, **models: str | Path) -> ForgettingConfig:
    named = ",".join(f"{name}={place}" for name, place in models.items())
    return ForgettingConfig(models=named, corpus=str(corpus), output=str(output), num_texts=8, scales=scales)


@pytest.mark.parametrize("name", METHODS)
def test_a_curve_is_what_the_run_itself_evaluates(
    runs: dict[str, Trained], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the digit: at 0 its start, at 1 its end, and between them what its own engine scores."""
    monkeypatch.setenv("DOMEXT_FP32_KERNELS", "torch")
    config = ForgettingConfig(models=str(runs[name].folder), scales=(0.5,))
    (found,) = find_runs(config, read_models(config))
    curve = measure_curve(found, config.scales, torch.device("cpu"))
    assert curve.scales == (0.0, 0.5, 1.0)
    assert tuple(zip(curve.bits, curve.accuracies, strict=True)) == runs[name].figures
    assert len({*curve.bits}) == 3 and any(curve.accuracies), "each scale has figures of its own"


def test_a_run_needs_no_general_text(runs: dict[str, Trained], tmp_path: Path) -> None:
    flags = ("--scales", "0.5,0.25", "--output", str(tmp_path / "out"), "--seed", "1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "forgetting.png").write_bytes(b"of other models")
    code, out, err = call_job("evaluate_forgetting", "--models", f"clinic={runs['af'].folder}", *flags)
    assert code == 0, err
    assert "### clinic" in out and "points of general accuracy are lost" in out
    assert "warning: --seed has no effect in this job." in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results.keys() == {"scales"}
    points = results["scales"]["clinic"]
    assert [each["scale"] for each in points] == [0.0, 0.25, 0.5, 1.0]
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"results.json", "forgetting.md", "scales.png"}
    assert (tmp_path / "out" / "forgetting.md").read_text() in out


def list_accuracies(found: Forgetting) -> dict[str, Any]:
    return {each.name: each.score.get("accuracy") for each in found.models}


@pytest.mark.parametrize("name", METHODS)
def test_a_scale_is_a_model_of_its_own(
    runs: dict[str, Trained], name: str, tiny_base_folder: Path, general: Path, tmp_path: Path
) -> None:
    """It is the very model that `export hf --scale` writes; a base that comes first stays as it is."""
    run, whole, half = runs[name].folder, tmp_path / "whole", tmp_path / "half"
    export_run(Place(run), Place(half), scale=0.5)
    asked = ask(general, tmp_path / "out", 0.5, base=tiny_base_folder, run=run)
    found = measure_forgetting(asked)
    assert [each.name for each in found.models] == ["base", "run", "run at 0.5"]
    assert found.models[2].differences["accuracy"].value == pytest.approx(
        found.models[0].score.get("accuracy") - found.models[2].score.get("accuracy")
    )
    assert len({each.sha256 for each in found.models}) == 3
    exported = measure_forgetting(ask(general, tmp_path / "out", base=tiny_base_folder, half=half))
    assert exported.models[1].sha256 == found.models[2].sha256
    assert exported.models[1].score.values == found.models[2].score.values
    if name == "af":  # an export of LoRA has it in the base's matrices
        export_run(Place(run), Place(whole))
        hashes = {each.name: each.sha256 for each in read_models(ask("", tmp_path, 0.5, whole=whole, half=half))}
        assert hashes["whole at 0.5"] == hashes["half"]
        assert hashes["half at 0.5"] == read_models(ask("", tmp_path, 0.25, run=run))[1].sha256


def make_untrained(folder: Path, base_folder: Path, method: MethodConfig) -> Path:
    base, config = load_base(str(base_folder)), PretrainConfig(base=str(base_folder), method=method)
    model = ModelSpec(base, method).build()
    make_run(folder, config, model, base)
    load_tokenizer(base_folder).save_pretrained(folder / "tokenizer")
    return folder


def test_what_has_no_scale_is_refused_or_what_others_are_held_against(
    runs: dict[str, Trained], tiny_base_folder: Path, general: Path, tmp_path: Path
) -> None:
    nothing = MethodConfig(trains="all", name="all", heads=0, ffn_units=0)
    modules = MethodConfig(name="exbert", heads=0, ffn_units=0, module_hidden_size=8, module_ffn_size=8)
    rules = {
        "with --method.trains all, which changes the base itself": nothing,
        "with --method.train_heads, which changes the base itself": MethodConfig(name="x", train_heads=True),
        "with gated modules (--method.module_hidden_size), which have no scale": modules,
    }
    places = {
        rule: make_untrained(tmp_path / f"run{i}", tiny_base_folder, each)
        for i, (rule, each) in enumerate(rules.items())
    }
    export_run(Place(runs["lora"].folder), Place(tmp_path / "lora"))
    places["with a model that has no adapter, such as a base or an export of LoRA"] = tmp_path / "lora"
    cure = "give it first, as what the others are held against, or leave it out"
    for rule, place in places.items():
        with pytest.raises(ConfigError) as refused:
            read_models(ask(general, tmp_path, 0.5, 0.25, base=tiny_base_folder, own=place))
        said = str(refused.value)
        assert said.startswith(f"--scales is 0.5,0.25; it must be left out {rule} (--models own=")
        assert said.endswith(f"; {cure}.")
        with pytest.raises(ConfigError, match="--scale is 0.5; it must be 1 with"):
            open_model(str(place)).load(scale=0.5)
    with pytest.raises(ConfigError, match=f"{cure}.$"):
        read_models(ask(general, tmp_path, 0.5, own=place))
    with pytest.raises(ConfigError, match="leave it out: without --corpus nothing is held against it.$"):
        read_models(ask("", tmp_path, 0.5, own=place))
    names = [each.name for each in read_models(ask(general, tmp_path, 0.5, own=place, af=runs["af"].folder))]
    assert names == ["own", "af", "af at 0.5"]


def test_text_that_has_gone_is_told(
    runs: dict[str, Trained], general: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (moved := tmp_path / "moved").symlink_to(runs["af"].folder)
    linked = ask("", tmp_path, 0.5, af=moved)
    assert find_runs(linked, read_models(linked)), "a link leads to the same text"
    exported = Path(export_run(Place(runs["af"].folder), Place(tmp_path / "exported")))
    (alone := tmp_path / "alone").mkdir()
    for each in ("checkpoints", "tokenizer", "config.yaml", "run.json"):
        (alone / each).symlink_to(runs["af"].folder / each)
    for place, says in ((alone, "has no prepared text in"), (exported, "is no run's directory")):
        asked = ask("", tmp_path, 0.5, af=place)
        models = read_models(asked)
        with pytest.raises(ConfigError, match=f"--corpus is empty, .* af of --models {says}"):
            find_runs(asked, models)
        assert find_runs(replace(asked, corpus=str(general)), models) == []
        assert f"note: af {says}" in capsys.readouterr().out


def test_scales_are_shares_and_names_are_told_apart() -> None:
    for scales in ((0.0,), (1.0,), (0.5, 0.5), ("half",), "all", (-0.1,)):
        with pytest.raises(ConfigError, match="--scales is"):
            ForgettingConfig(models="a=x", corpus="c", scales=scales)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--corpus is ''; it must be at least one file or folder of general text"):
        ForgettingConfig(models="a=x")
    with pytest.raises(ConfigError, match="--models is 'a=x,a at 0.5=y'; it must be models of which none has a name"):
        ForgettingConfig(models=("a=x", "a at 0.5=y"), scales=(0.5,))
    near = ForgettingConfig(models="a=x", scales=(0.1234567, 0.1234568))
    assert near.scales == (0.1234567, 0.1234568), "they have names of their own"
