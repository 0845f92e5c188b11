"""Sweeps with real Ray Tune, pre-training and fine-tuning on a tiny base; processes die and sweeps go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
import ray
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from finetuned_models import FP32, FULL, finetune_here
from given_options import parse_config
from job_processes import find_workers, kill_job, start_job
from labelled_fixtures import write_ner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig, GridConfig, LabelledConfig
from domext_ray.config.jobs import StudyConfig
from domext_ray.config.options.build import dump_yaml
from domext_ray.config.pretrain import PretrainConfig, RunConfig, ScaleConfig, TrainConfig
from domext_ray.config.sweep import BudgetConfig, SearchConfig, SweepConfig
from domext_ray.errors import ConfigError, CorpusError, RunError
from domext_ray.families.sets import load_labelled
from domext_ray.finetuning.comparison import read_finetuned
from domext_ray.models.source import open_model
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.runs.run_directory import resolve_paths, write_run
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.tasks import Pool
from domext_ray.runtime.trials import Ledger, Outcome, Rules, Trial
from domext_ray.storage import Place
from domext_ray.studies.methods import runs as study_runs
from domext_ray.studies.methods import tasks as study_tasks
from domext_ray.studies.sweep.plan import SweepPlan, choose_points, describe_sweep, plan_sweep
from domext_ray.studies.sweep.resources import estimate_trial_bytes, plan_resources
from domext_ray.studies.sweep.results import TRIALS, read_trials
from domext_ray.studies.sweep.searcher import Search
from domext_ray.studies.sweep.space import read_space
from domext_ray.studies.sweep.sweep import run_sweep
from domext_ray.studies.sweep.trial import score_base
from domext_ray.studies.sweep.watching import TUNE, SweepWatch
from domext_ray.training.metrics import read_metrics

SPACE = {
    "method.heads": {"choice": [0, 1, 2]},
    "method.ffn_units": {"choice": [0, 8]},
    "optim.lr": {"log": [1e-3, 1e-2]},
}
TOO_LARGE = 8192
"""Rows of a batch, of which the corpus has fewer; that shows when a trial begins."""


@pytest.fixture(scope="module")
def config(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SweepConfig:
    folder = tmp_path_factory.mktemp("sweep")
    return SweepConfig(
        base=str(tiny_base_folder),
        corpus=str(write_corpus(folder / "corpus.txt", 3000)),
        tasks=("ner",),
        data=str(write_ner(folder / "ner")),
        space={**SPACE, "train.global_batch_size": {"choice": [8, 12, 16, TOO_LARGE]}},
        budget=BudgetConfig(steps=18),
        search=SearchConfig(trials=6, rungs=3, reduction=3, scheduler="asha"),
        run=RunConfig(name="tiny", dir=str(folder / "runs"), trackers=(), keep_checkpoints=1),
        train=TrainConfig(
            global_batch_size=8,
            seq_length=32,
            eval_rows=40,
            evaluate_every=100,
            save_every=4,
            dropout=0.0,
            general_probe=str(FEW_SENTENCES),
        ),
        engine=FP32,
        finetune=FinetuneConfig(
            method=FULL,
            labelled=LabelledConfig(max_length=32, stride=8),
            grid=GridConfig(lr=(6e-3,), batch_size=(8,), epochs=(4,)),
            optim=FinetuneOptimConfig(dropout=0.0),
            engine=FP32,
        ),
    )


@pytest.fixture(scope="module")
def sweep(config: SweepConfig, local_ray: None) -> Path:
    return Path(run_sweep(config))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.jobs
def test_trials_are_scored_at_rungs_and_the_best_is_found(sweep: Path) -> None:
    summary = read_json(sweep / "summary.json")
    assert len(summary["trials"]) == 6
    scored = [trial for trial in summary["trials"] if trial["rungs"]]
    assert {len(trial["rungs"]) for trial in scored} <= {1, 2, 3} and any(len(trial["rungs"]) == 3 for trial in scored)
    for record in scored:
        assert [rung["step"] for rung in record["rungs"]] == [2, 6, 18][: len(record["rungs"])]
        assert record["rungs"][0]["steps"] == 18, "the schedule's horizon is the whole budget from the start"
        assert all(rung["f1"] == rung["by_task"]["ner"] and rung["figure"] == "F1" for rung in record["rungs"])
        assert all(0 <= rung["f1_interval"][0] <= rung["f1"] <= rung["f1_interval"][1] <= 1 for rung in record["rungs"])
    complete = [trial for trial in scored if trial["status"] == "complete"]
    assert summary["best"]["rungs"][-1]["f1"] == max(trial["rungs"][-1]["f1"] for trial in complete) > 0.3
    assert summary["time"]["total"] > summary["time"]["train"] > 0 and summary["base"] > 0.3
    assert (sweep / "sweep.html").exists() and (sweep / "sweep.png").exists()
    failed = [trial for trial in summary["trials"] if trial["status"] == "failed"]
    assert failed == [run for run in summary["trials"] if run["point"]["train.global_batch_size"] == TOO_LARGE] != []
    assert all("lower --train.global_batch_size" in trial["failure"] for trial in failed), "which ends nothing"


def test_points_are_valid_ones_each_once(config: SweepConfig) -> None:
    config = replace(config, space={name: SPACE[name] for name in ("method.heads", "method.ffn_units")})
    points, reasons = choose_points(config, read_space(config.space))
    assert len(points) == 5 and {"method.heads": 0, "method.ffn_units": 0} not in points
    assert len(reasons) == 1 and "all when there is no extension" in next(iter(reasons))


@pytest.mark.jobs
def test_the_best_configuration_is_a_training_jobs(sweep: Path, tmp_path: Path) -> None:
    flags = ["--config", str(sweep / "best.yaml"), "--run.dir", str(tmp_path), "--dry_run", "true"]
    best = parse_config(PretrainConfig, "", flags)
    point = read_json(sweep / "summary.json")["best"]["point"]
    found = (best.method.heads, best.method.ffn_units, best.optim.lr, best.train.global_batch_size)
    assert found == tuple(point.values())
    assert best.train.max_steps == best.optim.decay_steps == 18 and best.train.save_every == 4
    run_pretraining(best)
    trial = sweep / "trials" / read_json(sweep / "summary.json")["best"]["id"]
    start = open_model(str(trial)).load()
    assert start.kind == "run" and start.config.has_extension, "a trial is a run that jobs take as a model"
    records = read_metrics(trial / "metrics.jsonl")
    assert [line["step"] for line in records] == list(range(1, 19)), "a rung goes on where the one before it stopped"


@pytest.mark.jobs
def test_the_same_command_does_nothing_again(
    sweep: Path, config: SweepConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(config) == sweep and "nothing is left to do" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"budget\.steps"):
        run_sweep(replace(config, budget=BudgetConfig(steps=36)))


def take_few(config: SweepConfig, name: str) -> SweepConfig:
    """One trial, with 20 of the set's 80 labels."""
    own = {"labels": 20, "seed": 5, "space": {"method.heads": {"choice": [1]}}}
    return replace(config, run=replace(config.run, name=name), search=SearchConfig(trials=1), **own)


def test_few_labels_are_those_of_a_study(config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base scores the same in both, as it learns from the same examples for as many steps, and dev is the same."""
    own = take_few(config, "few")
    plan = plan_sweep(own)
    (data,) = plan.sets
    assert (len(data.train), len(data.dev), plan.num_examples) == (20, 30, (80,))
    assert "Of train 20 of 80 examples are taken" in describe_sweep(plan)
    flags = ["--tokens", "9", "--methods", "af", "--labels", "20,40", "--tasks", "ner", "--data", *own.data]
    flags += ["--run.dir", str(tmp_path), "--base", own.base, "--seed", "5"]
    study = parse_config(StudyConfig, "compare", flags)
    study = replace(study, finetune=own.finetune)
    place = study_runs.Workplace(study, resolve_paths(PretrainConfig(run=study.run)), study_tasks.check_sets(study))
    monkeypatch.setattr(study_tasks, "run_finetuning", finetune_here)
    study_tasks.finetune_seed(place, [], 0)
    trained = read_finetuned(place.locate("tasks") / "ner" / "20" / "base-seed5").summary
    assert trained["trainings"][0]["steps"] == 4 * 80 / 8 and data.notes[0] in trained["notes"]
    assert score_base(plan)["by_task"] == {"ner": trained["restarts"]["dev"]["mean"]}
    whole = plan_sweep(replace(own, labels="all"))
    assert whole.sets[0].train == load_labelled(replace(own.finetune, task="ner", data=own.data[0])).train
    assert {**whole.identity, "labels": 20} == plan.identity and whole.identity.pop("labels") is None
    write_run(whole.folder, identity=whole.identity)  # of 0.1.0, which had no such option
    assert plan_sweep(whole.config).sets == whole.sets
    with pytest.raises(RunError, match=r"--labels was left out and is 20 now"):
        plan_sweep(own)


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_a_sweep_with_few_labels_is_another_sweep(config: SweepConfig, capsys: pytest.CaptureFixture[str]) -> None:
    own = take_few(config, "twenty")
    folder = Path(run_sweep(own))
    (trial,) = read_json(folder / "summary.json")["trials"]
    assert trial["status"] == "complete" and 0 < trial["rungs"][0]["f1"] <= 1
    assert run_sweep(own) == folder and "nothing is left to do" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"--labels was 20 and is left out now"):
        run_sweep(replace(own, labels="all"))


def test_numbers_of_labels_that_are_no_question_are_refused(config: SweepConfig) -> None:
    for given in ("100,300", "0", "some", "1.5", (100, 300), True):
        with pytest.raises(ConfigError, match=r"--labels is .*; it must be one number of labels, such as 300, or all,"):
            replace(config, labels=given)
    with pytest.raises(CorpusError, match="--labels has 80, and train of ner has 80 examples; give fewer, or leave it"):
        plan_sweep(replace(take_few(config, "many"), labels=80))
    few = replace(config.finetune, labelled=replace(config.finetune.labelled, num_examples=20))
    with pytest.raises(ConfigError, match=r"finetune\.labelled\.num_examples is 20; it must be left out: the sweep"):
        replace(config, finetune=few)
    with pytest.raises(ConfigError, match=r"'finetune\.labelled\.num_examples', which the sweep decides itself"):
        read_space({"finetune.labelled.num_examples": {"choice": [20, 40]}})


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


def score_stub(point: dict[str, Any]) -> float:
    """Return a made F1: it rises with heads and falls with the distance of the rate from 10^-2.5."""
    return 0.3 + 0.1 * point["method.heads"] - 0.2 * abs(float(np.log10(point["optim.lr"])) + 2.5)


class StubTrials:
    """A made objective in the place of training."""

    def __init__(self, work: SweepPlan) -> None:
        self.work = work

    def __call__(self, item: tuple[Trial, int | None]) -> dict[str, Any]:
        """Make a rung's record up."""
        trial, rung = item
        if rung is None:
            return {}
        folder, f1 = Path(self.work.folder / TRIALS / trial.name), score_stub(trial.config)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text("{}\n")
        record = {"rung": rung, "step": 3 ** (rung + 1), "steps": 3**self.work.config.search.rungs, "by_task": {}}
        record |= {"figure": "F1", "f1": f1, "f1_interval": [f1 - 0.01, f1 + 0.01], "general_accuracy": 0.3}
        record |= {"trainable": 100 * trial.config["method.heads"], "tokens_per_second": 10.0}
        return {**record, "seconds": {"train": 0.0, "evaluate": 0.0, "finetune": 0.0}}


def make_stub(config: SweepConfig, name: str, *, trackers: tuple[str, ...] = (), **search: Any) -> SweepConfig:
    run = replace(config.run, name=name, trackers=trackers)
    return replace(config, run=run, search=SearchConfig(**search), score_base=False)


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_another_corpus_is_refused(config: SweepConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(Path(config.corpus).read_text(encoding="utf-8"), encoding="utf-8")
    config = replace(make_stub(config, "read", trials=1), corpus=str(corpus))
    (run_sweep(config, StubTrials) / "summary.json").delete()
    with corpus.open("a", encoding="utf-8") as file:
        file.write("one line more .\n")
    with pytest.raises(
        RunError,
        match=rf"{corpus} (has changed|differs from .*), so that --corpus '.*' is not the text that the sweep in ",
    ):
        run_sweep(config, StubTrials)


def test_the_general_text_keeps_its_commit(config: SweepConfig, tmp_path: Path) -> None:
    begun = replace(config, run=replace(config.run, dir=str(tmp_path)))
    plan = plan_sweep(begun)
    kept = f"hf://org/set@{'1' * 40}"
    write_run(plan.folder, identity={**plan.identity, "replay": {**plan.identity["replay"], "corpus": kept}})
    with pytest.raises(CorpusError, match=f"'{kept}' could not be fetched"):
        plan_sweep(replace(begun, replay=replace(begun.replay, corpus="hf://org/set")))


class DyingTrials(StubTrials):
    """The process dies where a point has no heads."""

    def __call__(self, item: tuple[Trial, int | None]) -> dict[str, Any]:
        """Die, or make a record up."""
        if item[0].config["method.heads"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(item)


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_a_trial_whose_process_dies_too_often_is_recorded(config: SweepConfig) -> None:
    config = replace(config, space={"method.heads": {"choice": [0, 1]}, "optim.lr": {"choice": [1e-3]}})
    config = replace(config, method=replace(config.method, ffn_units=8))
    folder = Path(run_sweep(make_stub(config, "dying", searcher="grid", max_failures=1), DyingTrials))
    status = {trial["point"]["method.heads"]: trial for trial in read_json(folder / "summary.json")["trials"]}
    assert status[1]["status"] == "complete" and status[0]["status"] == "failed"
    assert "its process died 2 times" in status[0]["failure"]
    (folder / "summary.json").unlink()
    run_sweep(make_stub(config, "dying", searcher="grid", max_failures=2), StubTrials)
    trials = read_json(folder / "summary.json")["trials"]
    assert len(trials) == 2 and all(trial["status"] == "complete" for trial in trials), "more deaths are allowed now"


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_optuna_is_told_what_trials_scored(config: SweepConfig) -> None:
    """One trial at a time, Ray Tune asks for the very points that Optuna alone would suggest."""
    folder = Path(run_sweep(make_stub(config, "tpe", searcher="optuna", trials=16, parallel=1, seed=3), StubTrials))
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=3))
    found = list(read_points(folder).values())
    for point in found:
        trial = study.ask()
        assert read_space(config.space).suggest(trial) == point
        study.tell(trial, score_stub(point))
    assert len(found) == 16, "the first ten do not depend on scores, the others do"


def make_outcome(name: str, *scores: float, status: str = "") -> Outcome:
    point = {"method.heads": 1, "method.ffn_units": 8, "optim.lr": 1e-3, "train.global_batch_size": 8}
    return Outcome(Trial(name, point), tuple({"step": 1, "f1": f1, "general_accuracy": None} for f1 in scores), status)


def test_asha_remembers_what_was_scored_before_the_driver_died(config: SweepConfig) -> None:
    """A trial that is the second of two at a rung is stopped, whether the first was scored by this driver or before."""
    space = read_space(config.space)
    for scores, is_stopped in (((0.4,), True), ((0.51,), False), ((0.51, 0.59), True), ((0.51, 0.61), False)):
        for earlier in (make_outcome("earlier", 0.5, 0.6, 0.6, status="complete"), make_outcome("earlier", 0.5, 0.6)):
            search = Search(config.search, space, [], [earlier])
            if not earlier.has_ended:
                search.begin(earlier)
            later = make_outcome("later", *scores)
            search.begin(replace(later, steps=later.steps[:-1]))
            assert search.judge(later) == is_stopped


def test_optuna_is_told_of_stopped_trials_as_pruned(config: SweepConfig) -> None:
    """With what they scored on the way, and never as if they had ended with it."""
    outcomes = [
        make_outcome("whole", 0.5, 0.6, 0.7, status="complete"),
        make_outcome("pruned", 0.4, status="pruned"),
        make_outcome("failed").fail("too large"),
    ]
    search = Search(config.search, read_space(config.space), [], outcomes)
    states = [(trial.state.name, trial.intermediate_values) for trial in search.study.trials]
    assert states == [("COMPLETE", {1: 0.5, 3: 0.6}), ("PRUNED", {1: 0.4}), ("FAIL", {})]
    assert search.study.best_value == 0.7 and search.num_ended == 3


@pytest.mark.usefixtures("local_ray")
def test_a_trial_that_ray_tune_stops_is_pruned_for_optuna(config: SweepConfig, tmp_path: Path) -> None:
    options = SearchConfig(searcher="optuna", trials=8, rungs=2, scheduler="asha")
    search = Search(options, read_space(config.space), [], [])
    ledger, work = (
        Ledger(Place(tmp_path / TRIALS)),
        SimpleNamespace(folder=tmp_path, config=replace(config, search=options)),
    )
    pool, rules = Pool(partial(StubTrials, work), 1, 0.1), Rules("searching", lambda trial, n: "it died", num_steps=2)
    run_trials(pool, search.list_trials(), ledger, SweepWatch(Place(tmp_path), search, []), rules)
    states = [trial.state.name for trial in search.study.trials]
    assert states == [{"complete": "COMPLETE", "pruned": "PRUNED"}[outcome.status] for outcome in ledger.list()]
    assert {"COMPLETE", "PRUNED"} == {*states} and search.num_ended == 0


def test_trackers_have_each_score_once(config: SweepConfig, tmp_path: Path) -> None:
    """What was scored before the driver died is told again."""
    space, folder = read_space(config.space), tmp_path
    for scores in ((0.5,), (0.5, 0.6)):
        watch = SweepWatch(Place(folder), Search(config.search, space, [], []), ["tensorboard"])
        watch.begin(make_outcome("one", *scores[:-1]))
        watch.step(make_outcome("one", *scores))
        watch.end(make_outcome("one", *scores, status="complete"))
        watch.close()
        time.sleep(1.1)  # event files are read by the seconds in their names
    events = EventAccumulator(str(tmp_path / TUNE / "one" / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["f1"]
    assert [(event.step, event.value) for event in events.Scalars("f1")] == [(1, 0.5), (3, pytest.approx(0.6))]


def read_points(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: read_json(path)["config"] for path in sorted(folder.glob("trials/*.json"))}


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_a_sweep_grows_shrinks_and_moves(
    config: SweepConfig, searcher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has been scored is kept; what was begun goes on; --search.parallel is that of now."""
    folder = Path(run_sweep(make_stub(config, f"grown-{searcher}", searcher=searcher, trials=3, seed=1), StubTrials))
    before = read_points(folder)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*.json")}
    moved = folder.rename(folder.with_name(f"moved-{searcher}"))
    begun = sorted(before)[1]
    ledger = Ledger(Place(moved / TRIALS))
    ledger.write(Outcome(Trial(begun, before[begun])))
    larger = make_stub(config, moved.name, searcher=searcher, trials=5, seed=1, parallel=1, max_failures=0)
    assert run_sweep(larger, StubTrials) == moved
    after = read_points(moved)
    assert len(after) == 5 and before.items() <= after.items()
    assert len({json.dumps(point) for point in after.values()}) == 5
    for path, time_ns in times.items():
        is_kept = (moved / path.relative_to(folder)).stat().st_mtime_ns == time_ns
        assert is_kept == (path.stem != begun), path
    summary = read_json(moved / "summary.json")
    assert {trial["id"]: trial["status"] for trial in summary["trials"]} == dict.fromkeys(after, "complete")
    run_sweep(larger, StubTrials)
    run_sweep(replace(larger, search=replace(larger.search, trials=2)), StubTrials)
    assert capsys.readouterr().out.count("nothing is left to do") == 2


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_several_objectives_make_a_front(config: SweepConfig) -> None:
    options = {"searcher": "optuna", "objectives": "f1,trainable", "trials": 12}
    folder = Path(run_sweep(make_stub(config, "front", **options), StubTrials))
    summary = read_json(folder / "summary.json")
    by_id = {trial["id"]: trial for trial in summary["trials"]}
    sizes = sorted(by_id[trial_id]["rungs"][-1]["trainable"] for trial_id in summary["front"])
    assert sizes and sizes[0] == min(trial["rungs"][-1]["trainable"] for trial in summary["trials"])


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_mlflow_has_what_trials_scored(config: SweepConfig) -> None:
    mlflow = pytest.importorskip("mlflow", reason="an extra")
    folder = Path(run_sweep(make_stub(config, "logged", trackers=("mlflow",), trials=3), StubTrials))
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'logged'")
    logged = {run.info.run_name: run.data.metrics["f1"] for run in client.search_runs([experiment.experiment_id])}
    summary = read_json(folder / "summary.json")
    assert logged == {trial["id"]: pytest.approx(trial["rungs"][-1]["f1"]) for trial in summary["trials"]}


@pytest.mark.usefixtures("local_ray")
def test_more_than_the_cluster_has_is_refused(config: SweepConfig) -> None:
    for options, says in (
        (
            {"scale": ScaleConfig(cpus_per_worker=4096.0, use_gpu=False)},
            "1 trial at once would take 4096 CPUs .* there is room for 0",
        ),
        (
            {"search": SearchConfig(parallel=3000), "scale": ScaleConfig(cpus_per_worker=1.0, use_gpu=False)},
            "3000 trials at once would take 1 CPUs .* there is room for",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            plan_resources(replace(config, **options))


@pytest.mark.usefixtures("local_ray")
def test_no_more_trials_at_once_than_there_is_memory_for(
    config: SweepConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    trial_bytes = estimate_trial_bytes(config, read_space(config.space))
    assert 2**30 < trial_bytes < 1.1 * 2**30, "a tiny model is nothing beside its libraries"
    memory = sum(node["Resources"]["memory"] for node in ray.nodes() if node["Alive"])
    config = replace(config, scale=replace(config.scale, cpus_per_worker=0.1, use_gpu=False))
    assert plan_resources(config)[1] > 1
    assert plan_resources(config, trial_bytes=int(memory / 1.5))[1] == 1
    assert "there is room for 1 at once, not" in capsys.readouterr().out
    assert plan_resources(config, trial_bytes=int(2 * memory))[1] == 1, "one is always tried"
    asked = replace(config, search=replace(config.search, parallel=3))
    assert plan_resources(asked, trial_bytes=int(memory / 2.5))[1] == 3, "what is asked for is done"
    assert "warning: a trial takes about" in capsys.readouterr().out


def test_a_value_given_twice_is_refused_or_one_point(config: SweepConfig) -> None:
    with pytest.raises(ConfigError, match=r"space\.method\.heads\.choice has 1 twice; its values must be different"):
        read_space({"method.heads": {"choice": [1, 2, 1]}})
    points, _ = choose_points(config, read_space({"optim.lr": {"choice": [1e-3, "1e-3"]}}))
    assert points == [{"optim.lr": 1e-3}] or points == [{"optim.lr": "1e-3"}]
    with pytest.raises(ConfigError, match=r"--tasks is 'ner,ner'; it must be different tasks"):
        replace(config, tasks=("ner", "ner"), data=("a", "a"))
    assert replace(config, tasks=("ner", "ner", "qa"), data=("a", "b", "c")).set_names == ("ner a", "ner b", "qa")


def test_a_space_without_a_valid_trial_is_refused(config: SweepConfig) -> None:
    with pytest.raises(ConfigError, match="the space makes no valid trial: --method.heads is -[12]"):
        run_sweep(replace(config, space={"method.heads": {"choice": [-1, -2]}}))


def start_sweep(config: SweepConfig, path: Path) -> subprocess.Popen[bytes]:
    path.write_text(dump_yaml(config), encoding="utf-8")
    return start_job([sys.executable, str(REPOSITORY / "jobs" / "sweep.py"), "--config", str(path)])


def wait_for(condition: Any, process: subprocess.Popen[bytes], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the job ended before"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def list_scored(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {trial.name: list(trial.steps) for trial in read_trials(Place(folder / "trials")) if trial.steps}


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_a_killed_sweep_goes_on_and_a_killed_trial_is_retried(config: SweepConfig, tmp_path: Path) -> None:
    """A trial's process dies in its second rung; then the whole job dies; the same command ends with all trials."""
    config = replace(config, run=replace(config.run, name="killed"), search=replace(config.search, scheduler="none"))
    folder = Path(config.run.dir) / "killed"
    process = start_sweep(config, tmp_path / "sweep.yaml")
    wait_for(lambda: list_scored(folder), process)
    first = next(iter(list_scored(folder)))
    workers = find_workers(process, "ResourceTrainable")  # the name that Ray Tune gives a class with resources
    assert workers
    for worker in workers:
        worker.kill()
    wait_for(lambda: len(list_scored(folder)[first]) == 3, process)
    wait_for(lambda: len(list_scored(folder)) >= 3, process)
    kept = list_scored(folder)
    kill_job(process)
    again = start_sweep(config, tmp_path / "sweep.yaml")
    assert again.wait(timeout=900) == 0
    trials = read_json(folder / "summary.json")["trials"]
    assert len(trials) == 6 and all(trial["status"] in ("complete", "failed") for trial in trials)
    found = list_scored(folder)
    assert all(found[name][: len(rungs)] == rungs for name, rungs in kept.items()), "no rung is scored twice"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("local_ray")
def test_a_thousand_trials_leave_the_driver_as_it_was(config: SweepConfig) -> None:
    """Trials of a made objective: the driver's memory stays flat, and the page opens."""
    process = psutil.Process(os.getpid())
    run_sweep(make_stub(config, "hundred", trials=100), StubTrials)
    before = process.memory_info().rss
    folder = Path(run_sweep(make_stub(config, "thousand", trials=1000, rungs=2, scheduler="asha"), StubTrials))
    assert process.memory_info().rss - before < 300 * 2**20
    assert len(read_json(folder / "summary.json")["trials"]) == 1000
    assert (folder / "sweep.html").stat().st_size < 8 * 2**20
