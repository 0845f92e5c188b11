"""The whole fine-tuning job: labelled files in, scores, report and export out; what is kept, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from finetuned_models import CPU, FP32, FULL, finetune_here
from job_calls import call_job
from labelled_fixtures import write, write_ner
from made_tokenizers import save_xlm_roberta
from ruinous_rates import RUINOUS, let_ruin

from domext_ray import FinetunedRun
from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig, GridConfig, LabelledConfig, PlaceConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.options.build import describe_difference, identity_of
from domext_ray.errors import ConfigError, DomextError, RunError, TrainingError
from domext_ray.families.losses import ClassTask
from domext_ray.families.registry import FAMILIES
from domext_ray.families.sets import load_labelled
from domext_ray.families.task import ONLY_STAGE
from domext_ray.finetuning.comparison import (
    check_comparable,
    compare_finetuned,
    read_finetuned,
    tabulate_finetuned,
)
from domext_ray.finetuning.finetune import run_finetuning
from domext_ray.finetuning.finetuned import make_set_task, rebuild_finetuned
from domext_ray.finetuning.output import describe_finetune_plan, get_figure, tabulate_summary
from domext_ray.finetuning.plan import list_trials, plan_finetuning
from domext_ray.finetuning.training import Point, at_stage
from domext_ray.finetuning.trainings import FinetuneWatch, list_overtaken
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.progress import StatusLine
from domext_ray.runs.run_directory import lock_run
from domext_ray.runtime.trials import Outcome, Trial, choose_arm
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def ner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ner(tmp_path_factory.mktemp("sets") / "made")


@pytest.fixture(scope="module")
def config(ner: Path, tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    return FinetuneConfig(
        task="ner",
        data=str(ner),
        model=str(tiny_base_folder),
        run=PlaceConfig(name="made", dir=str(tmp_path_factory.mktemp("runs"))),
        method=FULL,
        labelled=LabelledConfig(max_length=32, stride=8),
        grid=GridConfig(lr=(6e-3, 1e-6), batch_size=(8,), epochs=(6,), restarts=2),
        optim=FinetuneOptimConfig(dropout=0.0),
        engine=FP32,
    )


@pytest.fixture(scope="module")
def run_dir(config: FinetuneConfig, local_ray: None) -> Path:
    return Path(run_finetuning(config))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_the_best_training_by_dev_is_scored(run_dir: Path) -> None:
    summary = read_json(run_dir / "summary.json")
    assert len(summary["trainings"]) == 4
    best = max(summary["trainings"], key=lambda each: each["dev"])
    assert summary["best"]["point"]["lr"] == best["lr"] == 6e-3, "the other rate learns nothing"
    assert summary["dev"]["f1"]["micro"] == pytest.approx(best["dev"])
    for split in ("dev", "test"):
        figures = summary[split]
        assert set(figures["f1"]) == {"micro", "macro", "per_label"}
        assert set(figures["f1"]["per_label"]) == {"Disease", "Drug"}
        low, high = figures["intervals"]["f1.micro"]
        assert 0.0 <= low <= figures["f1"]["micro"] <= high <= 1.0 and figures["examples"] == 30
    assert summary["test"]["f1"]["micro"] > 0.8
    restarts = summary["restarts"]
    assert restarts["seeds"] == [0, 1] and len(restarts["test"]["values"]) == 2
    assert restarts["test"]["mean"] == pytest.approx(np.mean(restarts["test"]["values"]))
    shown = FinetunedRun(run_dir)._repr_html_()
    assert shown is not None and "f1.micro, mean of 2 restarts</th>" in shown and "best of 4 trainings by" in shown
    assert shown.endswith("/made/report.html</a></p>")


def test_a_run_directory_has_all_files_and_no_tensors_of_worse_trainings(run_dir: Path) -> None:
    names = {each.name for each in run_dir.iterdir()}
    assert {"config.yaml", "run.json", "summary.json", "report.html", "scores.png", "export"} <= names
    assert not [each for each in names if each.endswith(".tmp")]
    kept = {each.name for each in (run_dir / "trainings").iterdir() if each.is_dir()}
    assert kept == {"lr0.006-batch8-epochs6-seed0", "lr0.006-batch8-epochs6-seed1"}
    predictions = read_predictions(run_dir)
    assert [sum(each["split"] == split for each in predictions) for split in ("dev", "test")] == [30, 30]
    summary = read_json(run_dir / "summary.json")
    header = yaml.safe_load((run_dir / "export" / "README.md").read_text(encoding="utf-8").split("---")[1])
    results = {each["dataset"]["split"]: each["metrics"][0] for each in header["model-index"][0]["results"]}
    for split in ("dev", "test"):
        assert results[split]["name"] == summary["metric"]
        assert results[split]["value"] == pytest.approx(get_figure(summary[split], summary["metric"]), abs=1e-4)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert 'role="img" aria-label="Training loss of' in page
    assert "F1 on test" in page and "per_label" not in page and "wall_seconds" not in page, "words, and no keys"
    assert 'src="http' not in page and 'href="http' not in page, "the page needs no network"


def test_a_run_shows_what_its_model_got_wrong_on_dev_and_nothing_of_test(config: FinetuneConfig) -> None:
    grid = replace(config.grid, lr=(2e-3,), epochs=(1.0,), restarts=1)
    folder = finetune_here(replace(config, grid=grid, export=False, run=replace(config.run, name="poor")))
    dev, summary = load_labelled(config).dev, read_json(folder / "summary.json")
    predictions = [each["prediction"]["tags"] for each in read_predictions(folder) if each["split"] == "dev"]
    wrong = sum(list(example.tags) != tags for example, tags in zip(dev, predictions, strict=True))
    assert (summary["mistakes"]["examples"], summary["mistakes"]["wrong"]) == (len(dev), wrong) and wrong > 0
    page = (folder / "errors.html").read_text(encoding="utf-8")
    assert page.count("<article") == wrong and "what is wrong on dev" in page
    assert all(f"{example.source}</span>" not in page for example in load_labelled(config).test)
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{wrong:,} of {len(dev):,} dev examples are predicted wrongly (" in report
    assert '<a href="errors.html">' in report


def test_the_export_alone_predicts_what_the_run_did(run_dir: Path, config: FinetuneConfig) -> None:
    """With the labelled set's test split read anew, as `predict --task ner` does."""
    model = load_exported(run_dir, CPU)
    found = model.predict(load_labelled(config).test).predictions
    written = [each["prediction"] for each in read_predictions(run_dir) if each["split"] == "test"]
    assert [each["tags"] for each in found] == [each["tags"] for each in written]
    assert model.description.set_name == "made" and model.description.options.max_length == 32


def test_the_same_command_does_nothing_again(
    run_dir: Path, config: FinetuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run_dir / "summary.json").stat().st_mtime_ns
    assert run_finetuning(config) == run_dir
    assert "nothing is left to do" in capsys.readouterr().out
    assert (run_dir / "summary.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_trainings_that_have_ended_are_kept(run_dir: Path, config: FinetuneConfig) -> None:
    """A run that was stopped: one training and all that comes after it are missing."""
    before = read_json(run_dir / "summary.json")
    kept = sorted((run_dir / "trainings").glob("*.json"))
    (run_dir / "summary.json").unlink()
    lost = run_dir / "trainings" / "lr1e-06-batch8-epochs6-seed1.json"
    lost.unlink()
    times = {path: path.stat().st_mtime_ns for path in kept if path != lost}
    run_finetuning(config)
    assert {path: path.stat().st_mtime_ns for path in times} == times and lost.exists()
    after = read_json(run_dir / "summary.json")
    for part in ("dev", "test", "restarts", "best", "baselines"):
        assert after[part] == before[part], part


def test_another_identity_is_refused(run_dir: Path, config: FinetuneConfig) -> None:
    with pytest.raises(RunError, match=r"--optim\.weight_decay was 0\.01 and is 0\.1 now"):
        run_finetuning(replace(config, optim=replace(config.optim, weight_decay=0.1)))
    with pytest.raises(RunError, match=r"--labelled\.num_examples was left out and is 20 now"):
        run_finetuning(replace(config, labelled=replace(config.labelled, num_examples=20)))


def test_trainings_that_marked_arguments_otherwise_are_refused(
    run_dir: Path, config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 0.1.0 trained with two new words as marks is not read with others."""
    monkeypatch.setattr(FAMILIES["ner"], "identity", {"marks": ["!", "?"]})
    says = r"the pair of marks around arguments was left out and is !,\? now"
    for use in (lambda: run_finetuning(config), lambda: rebuild_finetuned(Place(run_dir), CPU)):
        with pytest.raises(RunError, match=says):
            use()


def with_grid(config: FinetuneConfig, **grid: Any) -> FinetuneConfig:
    return replace(config, grid=replace(config.grid, **grid))


@pytest.mark.slow
def test_a_grid_grows_and_shrinks_and_what_fails_is_recorded(
    run_dir: Path,
    config: FinetuneConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate that diverges ends no other training; one that is left out, or comes back, is no other run.

    What remains with a useless rate is compared with the whole run in pairs: it is worse, and the interval says so.
    """
    let_ruin(monkeypatch)
    folder = Path(shutil.copytree(run_dir, tmp_path / "poor"))
    config = replace(config, run=replace(config.run, name="poor", dir=str(tmp_path)))
    kept = sorted((folder / "trainings").glob("lr0.006*.json"))
    times = {path: path.stat().st_mtime_ns for path in kept}
    grown = with_grid(config, lr="0.9,6e-3")
    assert finetune_here(grown) == folder
    shown, summary = capsys.readouterr(), read_json(folder / "summary.json")
    assert len(times) == 2 and {path: path.stat().st_mtime_ns for path in times} == times, "they are kept"
    assert [(each["lr"], each["seed"]) for each in summary["trainings"]] == [(6e-3, 0), (6e-3, 1)]
    assert [(each["lr"], each["seed"]) for each in summary["failed"]] == [(RUINOUS, 0), (RUINOUS, 1)]
    reason = "of fine-tuning (lr0.9-batch8-epochs6-seed0) has a loss of"
    assert reason in summary["failed"][0]["reason"] and "lower --grid.lr" in summary["failed"][0]["reason"]
    assert "failed: rate 0.9, batch 8, 6 epochs, seed 0: step" in shown.out and reason in shown.out
    assert reason in (folder / "report.html").read_text(encoding="utf-8")
    assert summary["best"]["point"]["lr"] == 6e-3 and summary["restarts"]["seeds"] == [0, 1]
    finetune_here(grown)
    assert "nothing is left to do" in capsys.readouterr().out, "a diverging training diverges again"
    with pytest.raises(TrainingError, match=r"^all 2 trainings failed; of the first: step .*lower --grid\.lr\.$"):
        finetune_here(with_grid(config, lr="0.9"))
    finetune_here(with_grid(config, lr="1e-6", restarts=1))
    shown = capsys.readouterr().out
    assert "1 of the chosen trainings were overtaken in an earlier grid" in shown
    assert f"warning: the figures in {folder} are of 4 trainings, of which this grid lacks 4: new figures" in shown
    summary = read_json(folder / "summary.json")
    assert summary["best"]["point"]["lr"] == 1e-6 and summary["failed"] == [] and len(summary["trainings"]) == 1
    first, second = read_finetuned(Place(run_dir)), read_finetuned(Place(folder))
    check_comparable([first, second])
    lines = compare_finetuned([first, second])
    paired = lines[1].difference
    assert paired is not None and paired.value < -0.5 and paired.high < 0.0
    assert paired.p_value is None, "one run has one restart, which says nothing about chance"
    assert read_json(run_dir / "summary.json")["warning"] == ""
    assert summary["warning"].startswith("f1.micro of 0.0") and "raise --grid.epochs (now 6)" in summary["warning"]
    table, trained = tabulate_finetuned([first, second], lines).show(), f"{first.num_trained:,}"
    assert f"| made | {trained} | 2 |" in table and f"| poor | {trained} | 1 |" in table
    assert f"{paired.value:+.3f}" in table and "difference to made" in table
    assert "poor differs from made by more than chance, by intervals over what was scored" in table


@pytest.mark.slow
def test_a_training_that_stops_early_has_ended(
    config: FinetuneConfig, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = with_grid(config, lr="6e-3", epochs="40", restarts=1, patience=1)
    patient = replace(patient, export=False, run=replace(config.run, name="patient"))
    folder = Path(run_finetuning(patient))
    summary, shown = read_json(folder / "summary.json"), capsys.readouterr().out
    (training,) = summary["trainings"]
    last, best = training["last_epoch"]["model"], training["best_epoch"]["model"]
    assert not (folder / "export").exists()
    assert best == last - 1 < 39 and training["steps"] == last * 10 and training["epochs"] == 40
    (record,) = read_json(folder / "trainings" / "lr0.006-batch8-epochs40-seed0.json")["steps"]
    assert record["dev"] == max(record["dev_by_epoch"]["model"]) and len(record["dev_by_epoch"]["model"]) == last
    said = f"40 ({last:g} trained, {best:g} best)"
    assert f"batch 8, {said} epochs, seed 0" in shown and said in (folder / "report.html").read_text(encoding="utf-8")
    run_finetuning(patient)
    assert "nothing is left to do" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"--grid\.patience was 1 and is 0 now"):
        run_finetuning(with_grid(patient, patience=0))


@pytest.mark.slow
def test_dev_chooses_the_dropout_of_words(
    run_dir: Path, config: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that has ended goes on with shares; what it has trained without is kept, under the name that it had."""
    folder = Path(shutil.copytree(run_dir, tmp_path / "made"))
    config = replace(config, run=replace(config.run, dir=str(tmp_path)), export=False)
    kept = folder / "trainings" / "lr0.006-batch8-epochs6-seed0.json"
    before = kept.stat().st_mtime_ns
    grown = with_grid(config, lr="6e-3", word_dropout="0,0.4,0.9", restarts=1)
    with pytest.raises(KeyboardInterrupt):
        finetune_here(grown, num_trainings=1)
    assert finetune_here(grown, num_trainings=1) == folder, "one was kept of before, and one of the killed start"
    summary, page = read_json(folder / "summary.json"), (folder / "report.html").read_text(encoding="utf-8")
    shares = [training.get("word_dropout", 0.0) for training in summary["trainings"]]
    assert kept.stat().st_mtime_ns == before and shares == [0.0, 0.4, 0.9]
    best = max(summary["trainings"], key=lambda each: each["dev"])
    assert summary["best"]["point"].get("word_dropout") == best.get("word_dropout")
    assert "words dropped" in page and "words dropped" not in (run_dir / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    finetune_here(grown, num_trainings=0)
    assert "nothing is left to do" in capsys.readouterr().out
    finetune_here(with_grid(grown, word_dropout="0.4"), num_trainings=0 if best.get("word_dropout") == 0.4 else 1)
    assert "6 epochs, words dropped 0.4, seed 0; " in capsys.readouterr().out
    assert rebuild_finetuned(Place(folder), CPU).summary["best"]["point"]["word_dropout"] == 0.4
    assert (folder / "trainings" / "lr0.006-batch8-epochs6-word_dropout0.4-seed0" / "test.json").is_file()
    with pytest.raises(ConfigError, match=r"word_dropout is '0\.0,0\.0'; it must be different numbers"):
        with_grid(config, word_dropout="0,0.0")


def test_a_damaged_record_is_named(run_dir: Path, config: FinetuneConfig, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run_dir, tmp_path / "made"))
    config = replace(config, run=replace(config.run, dir=str(tmp_path)))
    path = folder / "trainings" / "lr1e-06-batch8-epochs6-seed1.json"
    path.write_text(path.read_text(encoding="utf-8")[:40], encoding="utf-8")
    (folder / "report.html").unlink()
    with pytest.raises(RunError, match=r"lr1e-06-batch8-epochs6-seed1\.json .*; delete it: the same command trains"):
        run_finetuning(config)
    (folder / "report.html").touch()
    (folder / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RunError, match=r"summary\.json .*; delete it and run the job again"):
        run_finetuning(config)


def test_a_second_job_is_refused(run_dir: Path, config: FinetuneConfig) -> None:
    with lock_run(Place(run_dir)), pytest.raises(RunError, match="another job is working in"):
        run_finetuning(with_grid(config, restarts=3))


def make_outcomes(dev: dict[tuple[float, int], float], *failed: tuple[float, int]) -> list[Outcome]:
    trials = {key: Trial(str(key), asdict(Point(key[0], 8, 1.0, key[1]))) for key in (*dev, *failed)}
    return [
        Outcome(trial).fail("") if key in failed else Outcome(trial, ({"dev": dev[key]},), "complete")
        for key, trial in trials.items()
    ]


def test_the_point_with_the_best_mean_is_chosen() -> None:
    """Not the one with the luckiest seed."""
    dev = {(1e-3, 0): 0.9, (1e-3, 1): 0.1, (2e-3, 0): 0.6, (2e-3, 1): 0.7, (3e-3, 0): 0.7, (3e-3, 1): 0.6}
    chosen = choose_arm(make_outcomes(dev), "dev")
    assert [(each.trial.config["lr"], each.trial.config["seed"]) for each in chosen] == [(2e-3, 0), (2e-3, 1)]
    chosen = choose_arm(make_outcomes(dev, (2e-3, 2), (3e-3, 2)), "dev")
    assert [each.trial.config["lr"] for each in chosen] == [1e-3, 1e-3], "a point that fails for a seed is not the best"
    chosen = choose_arm(make_outcomes(dev, (2e-3, 2), (3e-3, 2), (1e-3, 2)), "dev")
    assert [each.trial.config["lr"] for each in chosen] == [2e-3, 2e-3], "unless all do"


def test_tensors_are_dropped_only_where_a_whole_point_is_better() -> None:
    points = [(lr, seed) for lr in (1e-3, 2e-3, 3e-3) for seed in (0, 1)]

    def find(dev: dict[int, float], failed: tuple[int, ...] = ()) -> list[str]:
        outcomes = make_outcomes({points[i]: value for i, value in dev.items()}, *(points[i] for i in failed))
        known = {outcome.trial.name for outcome in outcomes}
        waiting = [Outcome(each.trial) for each in make_outcomes({}, *points) if each.trial.name not in known]
        return [outcome.trial.name for outcome in list_overtaken([*outcomes, *waiting])]

    assert find({0: 0.5, 2: 0.9}) == [], "another seed may still turn it round"
    assert find({0: 0.5, 2: 0.9, 1: 0.5}) == []
    assert find({0: 0.5, 2: 0.9, 1: 0.5, 3: 0.2}) == [str(points[0]), str(points[1])]
    assert find({0: 0.5, 2: 0.9, 1: 0.5, 3: 0.2}, (4, 5)) == [str(points[0]), str(points[1])]


def test_a_restart_that_learned_nothing_is_told(run_dir: Path) -> None:
    summary = read_json(run_dir / "summary.json")
    assert not any("learned nothing" in line for line in tabulate_summary(summary).notes)
    summary["restarts"]["test"]["values"][0] = 0.0
    told = [line for line in tabulate_summary(summary).notes if "learned nothing" in line]
    assert len(told) == 1 and told[0].startswith("warning: 1 of 2 restarts have f1.micro 0 or less on test: ")


def test_a_point_given_twice_is_no_restart() -> None:
    for option, text in (("lr", "1e-4,0.0001"), ("batch_size", "8, 16,8"), ("epochs", "3,3.0")):
        with pytest.raises(ConfigError, match=rf"--{option} is '.*'; it must be different numbers"):
            GridConfig(**{option: text})


def test_an_equal_set_elsewhere_is_the_same_set(run_dir: Path, config: FinetuneConfig, tmp_path: Path) -> None:
    copy = write_ner(tmp_path / "copy" / "made")
    assert run_finetuning(replace(config, data=str(copy))) == run_dir
    other = write_ner(tmp_path / "other" / "made", seed=1)
    with pytest.raises(
        RunError, match=rf"{other}/.* more differ from .*, so that --data '{other}' is not the labelled set"
    ):
        run_finetuning(replace(config, data=str(other)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("domext_ray.finetuning.plan.require_files", lambda *_: None)  # of 0.1.0, which kept none
        with pytest.raises(RunError, match=r"belongs to another run \(--data has other examples than before\)"):
            run_finetuning(replace(config, data=str(other)))


def config_dir(config: FinetuneConfig) -> Path:
    return Path(config.run.dir, config.run.name)


def test_a_dry_run_writes_nothing(run_dir: Path, config: FinetuneConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_finetuning(replace(config, dry_run=True, run=replace(config.run, name="dry")))
    shown = capsys.readouterr().out
    assert not folder.exists()
    assert "80 / 30 / 30 examples" in shown and "trainings: 4" in shown and "parameters train" in shown
    note, amount = shown.splitlines()[:2]
    assert amount.startswith("4 of 4 trials are left (hours are told once one has ended); all take at most 0.0")
    assert note == (
        "note: a training on these 80 examples makes about 60 steps at most; below 100 some learn nothing, which "
        "widens every interval: raise --grid.epochs."
    )
    assert "\ngrid:\n" not in shown and "all options: --dry_run full" in shown
    run_finetuning(replace(config, dry_run="full", run=replace(config.run, name="dry")))
    assert "\ngrid:\n" in capsys.readouterr().out and not folder.exists()
    again = replace(config, dry_run=True, grid=replace(config.grid, restarts=3))
    run_finetuning(again)
    shown = capsys.readouterr().out
    assert re.search(r"2 of 6 trials are left \(about \d\.\d\d hours one after another\)", shown)


def test_words_that_running_text_has_not_are_told_before_and_after(
    config: FinetuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, task="code_entities", data="", run=replace(config.run, name="code"))
    run_finetuning(replace(config, dry_run=True))
    (note,) = re.findall(r"^note: (.* cut otherwise in running text.*)$", capsys.readouterr().out, re.MULTILINE)
    assert note.startswith("2 of 183 entities of dev have words") and note.endswith("devel.tsv:805.")
    task = plan_finetuning(config)[0].task
    task.evaluate(
        {ONLY_STAGE: lambda examples: [{"entities": [], "tags": ["O"] * len(each.words)} for each in examples]}
    )
    assert task.list_notes() == [note]


def test_names_of_the_hub_make_one_folder(config: FinetuneConfig, ner: Path, tmp_path: Path) -> None:
    """A description's name may be a hub's, as a model's is."""
    described = tmp_path / "set.yaml"
    described.write_text("task: ner\nname: owner/made\n", encoding="utf-8")
    root = tmp_path / "runs"
    run = replace(config, task=str(described), dry_run=True, run=PlaceConfig(dir=str(root)))
    assert run_finetuning(run).parent == root and run_finetuning(run).name == "owner-made-tiny-bert"


def test_a_users_mistake_is_one_sentence(config: FinetuneConfig) -> None:
    top = MethodConfig(name="t", trains="top_layers", top_layers=9, heads=0, ffn_units=0)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"task": "parsing"}, "parsing"),
        ({"data": ""}, "--data is empty"),
        ({"data": "no/such/folder"}, "no/such/folder"),
        ({"model": "no/such/model"}, "no/such/model"),
        ({"labelled": LabelledConfig(max_length=512)}, r"--labelled\.max_length is 512"),
        ({"labelled": LabelledConfig(max_length=32, stride=8, metric="accuracy")}, "accuracy"),
        ({"method": top}, "top_layers is 9"),
        ({"labelled": replace(config.labelled, long_texts="windows")}, "family ner, which cuts no single texts"),
    ]
    for changes, message in mistakes:
        poor = replace(config, run=replace(config.run, name="mistake"), **changes)
        with pytest.raises(DomextError, match=message):
            run_finetuning(poor)
        assert not config_dir(poor).exists()


def test_a_step_may_have_a_rate_and_epochs_of_its_own(config: FinetuneConfig) -> None:
    grid = replace(config.grid, stage_lr={"entities": 1e-2}, stage_epochs={"entities": 10.0, "relations": 0.5})
    point = Point(1e-3, 8, 3.0, 0)
    found = [at_stage(point, replace(config, grid=grid), name) for name in ("entities", "relations", "model")]
    assert [(each.lr, each.epochs) for each in found] == [(1e-2, 10.0), (1e-3, 0.5), (1e-3, 3.0)]
    fewer = grid.for_labels(40, 80)
    assert (fewer.epochs, fewer.stage_epochs) == ((12.0,), {"entities": 20.0, "relations": 1.0}), "in as many steps"


def test_weights_and_smoothing_reach_the_loss_and_are_part_of_the_run(config: FinetuneConfig) -> None:
    labelled = replace(config.labelled, class_weights="balanced")
    changed = replace(config, labelled=labelled, optim=replace(config.optim, label_smoothing=0.1))
    (plan,) = plan_finetuning(replace(changed, run=replace(config.run, name="weighed")))
    task = plan.task.stages["model"]
    assert isinstance(task, ClassTask) and task.label_smoothing == 0.1
    assert task.class_weights is not None and task.class_weights[0] < 1.0 < task.class_weights[1]
    old = {**plan.identity, **{name: identity_of(config)[name] for name in ("labelled", "optim")}}
    assert describe_difference(old, plan.identity) == [
        "labelled.class_weights: 'none' -> 'balanced'",
        "optim.label_smoothing: 0.0 -> 0.1",
    ]


def test_windows_reach_the_task_and_are_part_of_the_run(config: FinetuneConfig, tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        rows = [{"text": f"the {word} {split}", "label": word} for word in ("sun", "wind") * 4]
        write(tmp_path / "texts" / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    changed = replace(
        config,
        task="classification",
        data=str(tmp_path / "texts"),
        labelled=replace(config.labelled, long_texts="windows"),
        run=replace(config.run, name="windows"),
    )
    (plan,) = plan_finetuning(changed)
    task = plan.task.stages["model"]
    assert task.options.long_texts == "windows" and "are read in windows" in task.limits[0]
    old = {**plan.identity, "labelled": identity_of(config)["labelled"]}
    assert describe_difference(old, plan.identity) == ["labelled.long_texts: None -> 'windows'"]


def test_what_cannot_do_without_words(config: FinetuneConfig, tmp_path: Path) -> None:
    start = open_model(config.model).load()
    few = with_grid(config, new_word_dropout=(0.0, 0.5))
    loaded = load_labelled(few)
    (note,) = make_set_task(few, start, loaded).notes
    assert note == f"{start.name} has no new words, so --grid.new_word_dropout changes nothing."
    (plan,) = plan_finetuning(replace(few, run=replace(config.run, name="words")))
    assert plan.trials == list_trials(config, start), "none is trained twice"
    extended = copy.deepcopy(start.config)
    extended.extension_vocab_size = 2
    shown = describe_finetune_plan(replace(plan, start=replace(start, config=extended)), plan)
    assert "trainings: 8 of model, 4 of against, 12 in all" in shown
    assert not make_set_task(config, start, loaded).notes
    unigram = replace(start, tokenizer=load_tokenizer(save_xlm_roberta(tmp_path / "pieces")))
    message = r"--grid\.new_word_dropout is '0\.0,0\.5'; it must be 0 with a tokenizer that is a Unigram model"
    with pytest.raises(ConfigError, match=message):
        make_set_task(few, unigram, loaded)


def test_the_time_left_counts_all_steps_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial("lr0.001", {})
    watch = FinetuneWatch(Place(tmp_path), ("entities", "relations"), [Outcome(trial)], keep_all=False)
    for stage, seconds in (("entities", 500), ("relations", 599)):  # half of the work took 99 seconds
        record = {"stage": stage, "step": 1, "steps": 2, "loss": 1.0, "tokens_per_second": 10.0}
        (tmp_path / f"{trial.name}.progress.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
        watch.line = StatusLine()
        watch.line.started -= seconds
        assert watch.look([trial]) == watch.look([trial]) == [(stage, 1)]
    first, last = capsys.readouterr().err.splitlines()
    assert "entities step 1/2" in first and "left" not in first, "nothing is known before a part of the work has passed"
    assert "relations step 1/2" in last and "about 0:49 left" in last


def test_a_step_that_a_task_does_not_have_is_refused(config: FinetuneConfig) -> None:
    for option in ("stage_lr", "stage_epochs"):
        wrong = replace(config.grid, **{option: "entities=1"})
        with pytest.raises(ConfigError, match=rf"--grid\.{option} is .*; the steps of --task ner are model\."):
            run_finetuning(replace(config, grid=wrong, run=replace(config.run, name="steps")))
        for text in ("entities", "entities=0", "entities=many", "entities=1,entities=2"):
            with pytest.raises(ConfigError, match=rf"--{option}[.\w]* is"):
                replace(config.grid, **{option: text})


def test_the_job_ends_a_mistake_with_code_2(tmp_path: Path, ner: Path) -> None:
    broken = write_ner(tmp_path / "broken")
    lines = (broken / "devel.tsv").read_text(encoding="utf-8").split("\n")
    lines[4] = "word\tX-Drug"
    (broken / "devel.tsv").write_text("\n".join(lines), encoding="utf-8")
    for flags, message in (
        (["--task", "ner", "--data", str(broken)], "devel.tsv:5"),
        (["--task", "ner", "--data", str(ner), "--grid.lr", "fast"], "--grid.lr is 'fast'"),
    ):
        code, _, err = call_job("finetune", "--run.dir", str(tmp_path / "runs"), *flags)
        assert code == 2 and message in err and "Traceback" not in err, err
    assert not (tmp_path / "runs").exists()
