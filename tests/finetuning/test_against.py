"""Two models that are fine-tuned alike, --model and --against: what is shared, kept, refused, and said of them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPE, make_random_model, write_tokenizer
from finetuned_models import CPU, FP32, FULL, draw_set, finetune_here
from job_calls import call_job
from labelled_fixtures import write_ner
from transformers import BertConfig, BertForMaskedLM

from domext_ray.config.finetune import (
    AblateConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    GridConfig,
    LabelledConfig,
    PlaceConfig,
)
from domext_ray.errors import DomextError
from domext_ray.families.registry import FAMILIES
from domext_ray.files import read_json
from domext_ray.finetuning.comparison import (
    ScoredRun,
    check_comparable,
    compare_finetuned,
    compare_pair,
    describe_pair,
    read_finetuned,
)
from domext_ray.finetuning.finetune import run_finetuning
from domext_ray.finetuning.plan import is_finished, plan_finetuning
from domext_ray.intervals import Resampled
from domext_ray.models.exported import load_exported
from domext_ray.storage import Place


@pytest.fixture(scope="module")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of 64 positions; the session's has 128."""
    folder = tmp_path_factory.mktemp("bases") / "other-bert"
    config = BertConfig(vocab_size=write_tokenizer(folder), max_position_embeddings=64, **SHAPE)
    make_random_model(BertForMaskedLM, config, seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(tiny_base_folder: Path, other_base: Path, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    root = tmp_path_factory.mktemp("against")
    return FinetuneConfig(
        task="ner",
        data=str(write_ner(root / "made", (24, 12, 12))),
        model=str(tiny_base_folder),
        against=str(other_base),
        run=PlaceConfig(name="pair", dir=str(root / "runs")),
        method=FULL,
        labelled=LabelledConfig(max_length=32, stride=8),
        grid=GridConfig(lr=(6e-3,), batch_size=(8,), epochs=(2,), restarts=2),
        optim=FinetuneOptimConfig(dropout=0.0),
        engine=FP32,
        num_resamples=100,
    )


@pytest.fixture(scope="module")
def run_dir(config: FinetuneConfig) -> Path:
    """A pair that was stopped after the first training of --model, and went on: nothing that had ended was touched."""
    with pytest.raises(KeyboardInterrupt):
        finetune_here(config, num_trainings=3)
    folder = Path(config.run.dir, config.run.name)
    ended = [*folder.rglob("trainings/*.json"), folder / "against" / "summary.json"]
    times = {each: each.stat().st_mtime_ns for each in ended}
    assert len(times) == 4 and not (folder / "summary.json").exists()
    assert finetune_here(config, num_trainings=1) == folder, "one training was left"
    assert {each: each.stat().st_mtime_ns for each in times} == times
    return folder


def read_summary(folder: Path) -> dict[str, Any]:
    return read_json(Place(folder / "summary.json"), "")


def test_both_are_trained_alike(config: FinetuneConfig) -> None:
    """The same points and seeds, and the same rows, whose order follows from their number and the seed."""
    own, against = plan_finetuning(config)
    assert [each.config for each in own.trials] == [each.config for each in against.trials]
    assert {each.config["seed"] for each in own.trials} == {0, 1}
    first, second = (each.task.stages["model"] for each in (own, against))
    for split in ("train", "dev", "test"):
        assert getattr(own.task.data, split) is getattr(against.task.data, split)
    rows = [each.encode(each.data.train, is_training=True) for each in (first, second)]
    assert [each.input_ids.tolist() for each in rows[0]] == [each.input_ids.tolist() for each in rows[1]]
    alike = replace(against.config, model=config.model, against=config.against, export=True, run=config.run)
    assert alike == own.config, "all other options are equal"


def test_a_pair_is_one_run_with_a_page(run_dir: Path, config: FinetuneConfig) -> None:
    summary, pair = read_summary(run_dir), [read_finetuned(Place(run_dir / "against")), read_finetuned(Place(run_dir))]
    assert [each.summary["model"]["name"] for each in pair] == ["other-bert", "tiny-bert"]
    assert pair[0].summary["restarts"]["seeds"] == pair[1].summary["restarts"]["seeds"] == [0, 1]
    assert [each.name for each in pair] == ["pair/against", "pair"], "what domext compare runs calls them"
    check_comparable(pair)
    difference = compare_finetuned(pair)[1].difference
    found = summary["against"]
    assert difference is not None and found["interval"] == difference.interval
    assert (found["difference"], found["p_value"]) == (difference.value, difference.p_value)
    assert found["difference"] == pytest.approx(pair[1].mean - pair[0].mean)
    assert found["restarts"]["values"] == pair[0].sample.values.tolist()
    assert found["model"] == pair[0].summary["model"] and found["verdict"]
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "Compared with other-bert" in page and found["verdict"] in page and ">seed 1<" in page
    assert f"{found['difference']:+.3f}" in page
    assert not (run_dir / "against" / "export").exists()
    assert len(load_exported(run_dir, CPU).tokenizer) and (run_dir / "export" / "config.json").is_file()
    exported = read_json(Place(run_dir / "export" / "config.json"), "")
    assert exported["max_position_embeddings"] == 128, "--model's, not --against's"


def test_the_job_ends_with_the_line_and_says_it_again(
    run_dir: Path, config: FinetuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = read_summary(run_dir)["against"]["verdict"]
    times = {each: each.stat().st_mtime_ns for each in run_dir.rglob("*.json")}
    for again in (config, replace(config, against="")):
        assert run_finetuning(again) == run_dir
        *_, said, last = capsys.readouterr().out.splitlines()
        assert said.endswith("nothing is left to do.") and last == verdict
    assert {each: each.stat().st_mtime_ns for each in times} == times


def test_a_model_may_be_compared_later(
    run_dir: Path, config: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was trained without --against is not trained again."""
    alone = Path(shutil.copytree(run_dir, tmp_path / "pair"))
    shutil.move(alone / "against", tmp_path / "against")
    for name, part in (("summary.json", "against"), ("run.json", "identity")):
        values = read_json(Place(alone / name), "")
        kept = values[part] if part == "identity" else values
        for each in ("against", "against_sha256"):
            kept.pop(each, None)
        (alone / name).write_text(json.dumps(values), encoding="utf-8")
    own = replace(config, run=replace(config.run, dir=str(tmp_path)))
    run_finetuning(replace(own, against="", dry_run=True))
    assert "0 of 2 trials are left" in capsys.readouterr().out
    run_finetuning(replace(own, dry_run=True))
    assert "2 of 4 trials are left" in capsys.readouterr().out
    shutil.move(tmp_path / "against", alone / "against")
    run_finetuning(replace(own, dry_run=True))
    assert "0 of 4 trials are left" in capsys.readouterr().out
    assert [is_finished(each) for each in plan_finetuning(own)] == [False, True], "the difference is not there yet"


def test_a_dry_run_says_what_both_train(config: FinetuneConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_finetuning(replace(config, dry_run=True, run=replace(config.run, name="dry")))
    shown = capsys.readouterr().out
    assert not folder.exists()
    assert "model: base tiny-bert" in shown and "against: base other-bert" in shown
    assert "trainings: 2 of each model, 4 in all" in shown and "4 of 4 trials are left" in shown


def test_mistakes_are_told_before_anything_is_trained(
    run_dir: Path, config: FinetuneConfig, other_base: Path, tiny_base_folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_base_folder, tmp_path / "copy"))
    again = replace(config.run, name="pair")
    for changes, message in (
        ({"against": "no/such/model"}, "--against 'no/such/model'"),
        ({"against": str(copy)}, "--against .* has the same weights as --model"),
        ({"against": str(run_dir)}, "--against .* is a fine-tuned run; give the model that it started from"),
        ({"labelled": LabelledConfig(max_length=100)}, "max_length is 100; '.*other-bert' takes rows of at most 64"),
        ({"keep_head": True, "model": str(run_dir / "export")}, "false with --against '.*', which brings no"),
        ({"against": str(run_dir / "export"), "run": again}, "--against was other-bert and is pair now"),
    ):
        poor = replace(config, **{"run": replace(config.run, name="mistake"), **changes})
        with pytest.raises(DomextError, match=message):
            run_finetuning(poor)
        assert not Path(config.run.dir, "mistake").exists()
    for make in (lambda: replace(config, against=config.model), lambda: FinetuneConfig(against="general-mini")):
        with pytest.raises(DomextError, match="--against is .* another model than --model"):
            make()
    with pytest.raises(DomextError, match="--against is 'x'; it must be empty in these studies"):
        AblateConfig(finetuned="runs/x", against="x")
    assert replace(config, against=config.model, model_step=3).model_step == 3, "an earlier checkpoint is another model"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, config: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a set without test, whose line is about dev."""
    for name, data in (("whole", draw_set(family)), ("no_test", replace(draw_set(family), test=()))):
        known = replace(data, family=family, sha256=name)
        monkeypatch.setattr("domext_ray.finetuning.plan.load_labelled", lambda _, known=known: known)
        own = replace(config, task=family, run=PlaceConfig(name=name, dir=str(tmp_path)))
        own = replace(own, labelled=LabelledConfig(max_length=40, stride=10), grid=replace(config.grid, epochs=(1,)))
        found = read_summary(finetune_here(own))["against"]
        split = "dev, which chose both models," if name == "no_test" else "test"
        assert f" on {split} [" in found["verdict"] and found["restarts"]["seeds"] == [0, 1]
        assert found["split"] == split.partition(",")[0]


@pytest.mark.jobs
def test_the_whole_job(config: FinetuneConfig, other_base: Path, tmp_path: Path, local_ray: None) -> None:
    """On Ray the model of --against is trained exactly as it is alone."""
    options = "--labelled.max_length 32 --labelled.stride 8 --grid.lr 6e-3,1e-3 --grid.batch_size 8 --grid.epochs 2"
    options += f" --grid.restarts 2 --engine.precision fp32 --run.dir {tmp_path} --task ner --data {config.data}"
    pair = [*options.split(), "--model", config.model, "--against", config.against, "--run.name", "pair"]
    code, out, err = call_job("finetune", *pair)
    assert code == 0, err
    summary = read_summary(tmp_path / "pair")
    assert out.splitlines()[-1] == summary["against"]["verdict"]
    code, out, err = call_job("finetune", *options.split(), "--model", config.against, "--run.name", "alone")
    assert code == 0, err
    alone, against = read_summary(tmp_path / "alone"), read_summary(tmp_path / "pair" / "against")
    for part in ("dev", "test", "restarts", "best"):
        assert alone[part] == against[part], part
    tensors = [sorted((tmp_path / each).glob("trainings/*/*.safetensors")) for each in ("alone", "pair/against")]
    assert len(tensors[0]) == len(tensors[1]) == 2
    assert [each.read_bytes() for each in tensors[0]] == [each.read_bytes() for each in tensors[1]]
    runs = f"{tmp_path}/alone,{tmp_path}/pair"
    code, out, err = call_job("compare_runs", "--runs", runs, "--output", str(tmp_path / "ner.png"))
    assert code == 0 and f"| {summary['against']['difference']:+.3f} |" in out, err
    assert call_job("verify", "--path", str(tmp_path / "pair")).code == 0
    code, out, _ = call_job("finetune", *pair)
    assert code == 0 and out.splitlines()[-1] == summary["against"]["verdict"]


def make_run(
    name: str, values: list[float], drawn: np.ndarray, split: str = "test", baseline: float = 0.0, shared: int = 0
) -> ScoredRun:
    summary = {
        **{"model": {"name": name}, "metric": "f1.micro", "parameters": {}},
        **{"test": {"f1": 0} if split == "test" else {}},
        **{"set": {"examples": {split: 300}, "shared": {split: shared}}},
        "baselines": {split: {"majority": {"f1": {"micro": baseline}}, "recall": {"f1": {"micro": baseline / 2}}}},
    }
    return ScoredRun(name, summary, Resampled(np.array(values), drawn, 40))


def test_the_line_says_what_the_interval_says() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0.0, 0.02, (1, 400))

    def say(low: list[float], high: list[float], spread: float = 0.0, **more: Any) -> str:
        change = random.normal(0.0, spread, (1, 400))
        base, run = (
            make_run(name, values, np.array(values)[:, None] + noise + own, **more)
            for name, values, own in (("mini", low, 0.0), ("af", high, change))
        )
        return describe_pair(base, run, compare_pair(base, run))

    better = say([0.6, 0.61, 0.62], [0.7, 0.71, 0.72], spread=0.01)
    assert re.fullmatch(
        r"\+10\.0 points of f1\.micro on test \[\d\.\d, 1\d\.\d\]: af is better than mini on text like these 40 test "
        r"documents; of other text or labels it says nothing\.",
        better,
    )
    worse = say([0.7, 0.71, 0.72], [0.6, 0.61, 0.62], spread=0.01)
    assert worse.startswith("-10.0 points of") and "mini is better than af on text" in worse
    equal = say([0.70, 0.71, 0.72], [0.71, 0.705, 0.73], spread=0.02)
    assert re.search(
        r"no difference was found; with 40 test documents and 3 restarts a difference under \d\.\d points does not "
        r"show, with more it may\.$",
        equal,
    )
    alone = say([0.6], [0.7], spread=0.01)
    assert alone.endswith(
        "; each model was trained only once, so another seed could reverse this: give --grid.restarts 3."
    )
    assert say([0.6], [0.6]).count("both score alike") == 1 and say([0.6], [0.6]).startswith("+0.0 points")
    assert "on dev, which chose both models, [" in say([0.6], [0.7], split="dev", spread=0.01)
    reached = "; the majority baseline, which trains nothing, reaches 0.700, and "
    assert say([0.6, 0.6], [0.8, 0.8], baseline=0.7).endswith(f"{reached}mini did no better.")
    assert say([0.6, 0.6], [0.7, 0.7], baseline=0.7).endswith(f"{reached}mini and af did no better.")
    assert "baseline" not in say([0.71, 0.71], [0.8, 0.8], baseline=0.7)
    shared = "; 15 of the 300 test examples are in train, too, so figures on test are too high."
    assert say([0.6], [0.7], shared=15).endswith(shared)
    namesakes = [make_run("af", [0.5], noise), make_run("af", [0.6], noise)]
    assert [each.name for each in compare_pair(*namesakes)] == ["af (--against)", "af (--model)"]
