"""A study: presets become runs that end together, rates are tried, what is finished stays, and a real one is killed."""

from __future__ import annotations

import copy
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FEW_SENTENCES, REPOSITORY, write_corpus
from given_options import parse_config
from job_processes import kill_job, start_job
from labelled_fixtures import write_ner
from report_records import SUMMARY

from domext_ray.config.finetune import DROPOUTS, FinetuneConfig
from domext_ray.config.jobs import StudyConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError, CorpusError, DivergenceError, RunError, TrainingError
from domext_ray.export.folder import HUGGINGFACE, ExportRecord, new_export
from domext_ray.finetuning import comparison
from domext_ray.finetuning.comparison import write_resamples
from domext_ray.intervals import Resampled, compare
from domext_ray.runs.run_directory import resolve_paths, write_config
from domext_ray.storage import Place
from domext_ray.studies.methods import runs as study_runs
from domext_ray.studies.methods import tasks as study_tasks
from domext_ray.studies.methods.arms import choose_presets, keeps, make_configs
from domext_ray.studies.methods.study import run_study

DEFAULTS = "compare"
SHIPPED = parse_config(StudyConfig, DEFAULTS, ("--seconds", "9")).presets
EXTENSIONS = ("lora", "fl_tuning", "af", "bottleneck", "exbert", "exbert_no_vocab")
FIXED = ("full", "top_layers", "layer_norms", "biases")
Make = Callable[..., StudyConfig]
KEPT = ("full_kept", "af_kept", "af_words", "af_words_mask30")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1,000 lines, with words that the tiny base cuts into letters."""
    random = np.random.default_rng(0)
    words = "the a house tree river small old sees finds near under cortex thalamus neuron axon".split()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(random.choice(words, 12)) + ".\n" for _ in range(1000)), encoding="utf-8")
    return path


def configure(*flags: str) -> StudyConfig:
    return parse_config(StudyConfig, DEFAULTS, flags)


def plan(config: StudyConfig) -> dict[str, PretrainConfig]:
    presets = choose_presets(config)
    return {arm: made for name, preset in presets.items() for arm, made in make_configs(config, name, preset).items()}


def test_presets_take_the_budget_where_they_have_a_size() -> None:
    methods = plan(configure("--seconds", "9", "--methods", ",".join(EXTENSIONS + FIXED), "--budget", "0.1"))
    assert [methods[name].method.trainable_budget for name in EXTENSIONS] == [0.1] * len(EXTENSIONS)
    assert [methods[name].method.trainable_budget for name in FIXED] == [0.0] * len(FIXED)
    assert [methods[name].optim.lr for name in ("full", "top_layers", "biases", "lora")] == [1e-3, 3e-4, 1e-3, 1e-3]
    assert all(config.method.name == name and config.train.global_batch_size == 16 for name, config in methods.items())
    assert methods["exbert"].vocab.size == 2000 and not methods["exbert_no_vocab"].vocab.size


def test_a_preset_can_be_changed_and_added() -> None:
    changes = "{exbert: {vocab: {size: 50}}, wide: {method: {heads: 0, ffn_units: 9}, train: {dropout: 0.2}}}"
    methods = plan(configure("--seconds", "9", "--methods", "exbert,wide", "--presets", changes, "--budget", "0"))
    assert methods["exbert"].vocab.size == 50 and methods["exbert"].method.module_hidden_size == 84
    assert (methods["wide"].method.ffn_units, methods["wide"].train.dropout) == (9, 0.2)
    assert methods["wide"].method.trainable_budget == 0


def test_a_rate_is_chosen_on_other_text_than_is_reported(tmp_path: Path) -> None:
    config = configure("--seconds", "9", "--rates", "1e-3,3e-3", "--run.dir", str(tmp_path))
    place = study_runs.Workplace(config, resolve_paths(PretrainConfig(run=config.run)))
    made = plan(config)["af"]
    names = ("rate-af-0.001", "af-seed0", study_runs.BASE)
    assert [place.place(made, name).train.eval_half for name in names] == ["first", "second", "second"]
    untuned = replace(place, config=configure("--seconds", "9", "--run.dir", str(tmp_path)))
    assert untuned.place(made, "af-seed0").train.eval_half == "both"


def test_every_sized_method_runs_at_each_budget() -> None:
    flags = ("--methods", "full,af,af_words_unkept", "--budgets", "0.05,0.2")
    methods = plan(configure("--seconds", "9", *flags))
    assert {name: config.method.trainable_budget for name, config in methods.items()} == {
        **{"full": 0.0, "af@0.05": 0.05, "af@0.2": 0.2},
        "af_words_unkept": 0.0,
    }
    assert methods["af@0.05"].method.name == "af", "what it is made of has the preset's name"
    assert (methods["af_words_unkept"].method.ffn_units, methods["af_words_unkept"].method.word_head) == (400, True)


def test_only_methods_that_keep_read_general_text() -> None:
    flags = ("--seconds", "9", "--replay.corpus", "general.txt", "--replay.frac", "0.2")
    plain = ("full", "af", "af_words_unkept")
    methods = plan(configure(*flags, "--methods", ",".join((*KEPT, *plain))))
    assert all(methods[name].replay.corpus == "general.txt" and methods[name].replay.frac == 0.2 for name in KEPT)
    assert all((methods[name].objective.keep, methods[name].objective.keep_weight) == ("kl", 3.0) for name in KEPT)
    assert not any(methods[name].replay.corpus for name in plain)
    assert [name for name, preset in SHIPPED.items() if keeps(preset)] == [*KEPT, "af_routed"]
    assert [methods[name].objective.mask_prob for name in KEPT] == [0.15, 0.15, 0.15, 0.3]
    own = "{full: {replay: {frac: 0.5}}, af: {objective: {keep: replay}}}"
    methods = plan(configure(*flags, "--methods", "full,af", "--presets", own))
    assert [(made.replay.frac, made.objective.keep) for made in methods.values()] == [(0.5, "kl"), (0.2, "replay")]


def test_a_mistake_is_one_sentence() -> None:
    for flags, message in (
        ((), "--seconds is 0.0 (its default); it must be above 0 when --tokens is 0"),
        (("--seconds", "1", "--tokens", "5"), "--seconds is 1.0; it must be 0 when --tokens is 5"),
        (
            ("--seconds", "1", "--methods", "af,nope"),
            "--methods names 'nope'; it must be one of full, full_kept, top_layers",
        ),
        (("--seconds", "1", "--methods", ""), "--methods is ''"),
        (("--seconds", "1", "--methods", "af,af"), "--methods is 'af,af'"),
        (("--seconds", "1", "--seeds", "0"), "--seeds is 0"),
        (("--seconds", "1", "--base", "none"), "--base is 'none'"),
        (("--seconds", "1", "--train.max_steps", "7"), "--train.max_steps is 7"),
        (("--seconds", "1", "--optim.lr", "1"), "--optim.lr is 1.0"),
        (("--seconds", "1", "--methods", "af", "--presets", "{af: {run: {}}}"), "the preset 'af' has 'run'"),
        (("--seconds", "1", "--methods", "af", "--presets", "{af: {method: {headz: 1}}}"), "'af' cannot be used"),
        (("--seconds", "1", "--methods", "lora", "--presets", "{lora: {method: {heads: 1}}}"), "'lora' must have"),
        (("--seconds", "1", "--methods", "af", "--presets", "{af: {method: {heads: -1}}}"), "--method.heads is -1"),
        (("--seconds", "1", "--methods", "af", "--presets", "{af: {train: {max_steps: 9}}}"), "--train.max_steps is 9"),
        (("--seconds", "1", "--methods", "af", "--presets", "{af: {optim: {schedule: wsd}}}"), "--optim.schedule is"),
        (("--seconds", "1", "--optim.schedule", "cosine"), "--optim.schedule is 'cosine'"),
        (("--seconds", "1", "--methods", "af_words"), "the method 'af_words' reads general text beside the domain's"),
        *(
            (
                ("--seconds", "1", "--labels", labels),
                f"--labels is '{labels}'; it must be two or more different numbers",
            )
            for labels in ("all", "100", "100,100", "0,100", "100.5,200", "100,al", "-5,all")
        ),
        (("--seconds", "1", "--budgets", "0.1,0.1"), "--budgets is '0.1,0.1'"),
        (("--seconds", "1", "--budgets", "0.1,1"), "--budgets is 1.0; it must be below 1"),
        (("--seconds", "1", "--budgets", "0.1;0.2"), "--budgets is '0.1;0.2'; it must be a number"),
        (("--seconds", "1", "--rates", "1e-3"), "--rates is '0.001'; it must be two or more"),
        (("--seconds", "1", "--rates", "1e-3,0"), "--rates is 0.0; it must be above 0"),
        (("--seconds", "1", "--rates", "1e-3,nan"), "--rates is 'nan'; it must be a finite number"),
        (("--seconds", "1", "--tune_frac", "0"), "--tune_frac is 0.0"),
        (("--seconds", "1", "--retention_texts", "0"), "--retention_texts is 0"),
        (("--tokens", "9", "--tokens_by_method", "{nope: 9}"), "--tokens_by_method is 'nope'; it must be a method"),
        (("--seconds", "1", "--tokens_by_method", "{af: 9}"), "--tokens_by_method is 'af'; it must be left out"),
        (("--tokens", "9", "--tokens_by_method", "{af: 0}"), "--tokens_by_method.af is 0; it must be 1 or more"),
        (("--tokens", "9", "--tokens_by_method", "{af: many}"), "--tokens_by_method.af is 'many'; it must be a whole"),
    ):
        with pytest.raises(ConfigError) as error:
            plan(configure(*flags))
        assert message in str(error.value) and "\n" not in str(error.value)


class FakeRuns:
    """Stands for `run_pretraining`: writes what a study reads, notes each call, and dies when it is told to.

    A run that tries a rate is best at 0.001, and diverges from 0.1 on.
    """

    def __init__(self) -> None:
        self.made: list[PretrainConfig] = []
        self.left = 10**6

    def __call__(self, config: PretrainConfig) -> Path:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.made.append(config)
        if config.optim.lr >= 0.1:
            raise DivergenceError("step 3 has a loss of nan.")
        folder = Path(config.run.dir) / config.run.name
        summary: dict[str, Any] = copy.deepcopy(SUMMARY)
        with new_export(Place(folder / "export"), ExportRecord(HUGGINGFACE, step=summary["train"]["steps"])):
            pass
        summary["train"] |= {"tokens": max(9, config.train.max_tokens), "wall_seconds": config.train.max_seconds}
        summary["domain"]["bits_per_character"]["after"] -= 0.01 * config.seed - abs(math.log10(config.optim.lr) + 3)
        summary["evaluation"] = {"domain_characters": 900, "general_words": 500}
        summary["method"] = {"name": config.method.name}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "report.html").touch()
        write_config(Place(folder), config)
        return folder

    @property
    def names(self) -> list[str]:
        return [config.run.name for config in self.made]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(study_runs, "run_pretraining", fake)
    return fake


@pytest.fixture
def small(tiny_base_folder: Path, text_file: Path, tmp_path: Path) -> Make:
    """Makes a study of two methods and two seeds; a later flag takes the place of an earlier one."""
    return lambda *flags: configure(
        *("--base", str(tiny_base_folder), "--corpus", str(text_file), "--run.dir", str(tmp_path), "--run.name", "s"),
        *("--methods", "full,af", "--budget", "0.3", "--seeds", "2", "--train.seq_length", "32"),
        *("--train.global_batch_size", "8", "--train.eval_rows", "40", "--engine.precision", "fp32"),
        *(flags if {"--seconds", "--tokens"} & set(flags) else ("--seconds", "20", *flags)),
    )


def test_seeds_are_the_outer_loop_and_runs_end_by_their_clock(runs: FakeRuns, small: Make, tmp_path: Path) -> None:
    folder = run_study(small())
    assert runs.names == ["base", "full-seed0", "af-seed0", "full-seed1", "af-seed1"]
    for config in runs.made[1:]:
        assert (config.train.max_seconds, config.train.max_tokens, config.optim.schedule) == (20.0, 0, "wsd")
        assert config.train.max_steps == config.optim.decay_steps >= 10**6, "out of reach"
        assert Path(config.prepare.cache_dir) == tmp_path / ".corpora"
    assert [made.seed for made in runs.made[1:]] == [0, 0, 1, 1]
    assert "| af | " in (folder / "comparison.md").read_text()
    results = json.loads((folder / "results.json").read_text())
    assert results["seeds"] == [0, 1] and set(results["methods"]) == {"full", "af"}
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_all_runs_read_as_much_of_the_documentation(runs: FakeRuns, small: Make) -> None:
    """The run of one step that scores the base, too."""
    run_study(small("--corpus", "package-docs", "--tokens", "300000"))
    assert {config.corpus for config in runs.made} == {"package-docs:2"} and len(runs.made) == 5


def test_a_method_may_read_another_number_of_tokens(runs: FakeRuns, small: Make) -> None:
    flags = ("--tokens", "1001", "--tokens_by_method", "{full: 1.2e3}")
    folder = run_study(small(*flags, "--seeds", "1"))
    assert {(config.train.max_seconds, config.optim.schedule) for config in runs.made[1:]} == {(0.0, "wsd")}
    assert {config.method.name: config.train.max_tokens for config in runs.made[1:]} == {"full": 1200, "af": 1001}
    assert "1,001 tokens (full 1,200) per run" in (folder / "comparison.md").read_text()
    with pytest.raises(RunError, match=r"presets\.full\.tokens was 1200 and is 1300 now"):
        run_study(small(*flags[:3], "{full: 1300}"))
    run_study(small(*flags, "--methods", "full,af,lora"))


def test_the_same_command_goes_on_and_more_seeds_methods_and_budgets_may_come(runs: FakeRuns, small: Make) -> None:
    config = small()
    runs.left = 3
    with pytest.raises(KeyboardInterrupt):
        run_study(config)
    runs.left = 10**6
    run_study(config)
    assert runs.names[3:] == ["full-seed1", "af-seed1"], "nothing that is finished is made again"
    run_study(replace(config, seeds=3, methods=("full", "af", "biases")))
    assert runs.names[5:] == ["biases-seed0", "biases-seed1", "full-seed2", "af-seed2", "biases-seed2"]
    run_study(replace(config, seeds=1, budgets=(0.2, 0.4)))
    assert runs.names[10:] == ["af@0.2-seed0", "af@0.4-seed0"]


def test_each_method_takes_its_best_rate(runs: FakeRuns, small: Make, capsys: pytest.CaptureFixture[str]) -> None:
    config = small("--rates", "0.1,1e-4,1e-3", "--seeds", "1")
    runs.left = 3
    with pytest.raises(KeyboardInterrupt):
        run_study(config)
    runs.left = 10**6
    folder = run_study(config)
    tried = [f"rate-{name}-{rate}" for name in ("full", "af") for rate in ("0.0001", "0.001", "0.1")]
    assert runs.names == ["base", *tried, "full-seed0", "af-seed0"], "what was tried is not tried again"
    assert {made.train.max_seconds for made in runs.made[1:7]} == {10.0}
    assert [made.optim.lr for made in runs.made[7:]] == [1e-3, 1e-3]
    assert not (folder / "rate-af-0.001" / "export").exists()
    results = json.loads((folder / "results.json").read_text())
    assert results["methods"]["full"]["bits_per_character_by_rate"] == {
        "0.0001": pytest.approx(2.71),
        "0.001": pytest.approx(1.71),
        "0.1": None,
    }
    shown = capsys.readouterr().out
    assert "Training diverged at these rates: full 0.1, af 0.1." in shown
    assert "Of the rates 0.0001, 0.001, 0.1 each method has the one after which" in shown
    assert "| full | 2,632,704 | 32.1% (fixed) | 0.001 |" in shown
    with pytest.raises(RunError, match=r"--rates was 0\.1,0\.0001,0\.001 and is 0\.0001,0\.001 now"):
        run_study(replace(config, rates=(1e-4, 1e-3)))


@pytest.mark.slow
def test_each_method_may_take_the_rate_that_is_best_on_dev(
    runs: FakeRuns, tuned: FakeFinetunings, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On held-out text 1e-3 is best (`FakeRuns`), on dev 1e-4."""
    places = [str(write_ner(tmp_path / name, (8, 4, 4))) for name in ("one", "two")]
    sets = ("--tasks", "ner,ner", "--data", ",".join(places), "--seeds", "1", "--finetune.grid.lr", "1e-4,1e-3")
    config = small("--rates", "0.1,1e-4,1e-3", "--rates_by", "dev", *sets)
    run_study(replace(config, dry_run=True))
    # of each set the base and two models, twice each, and of each of two methods three rates at two points
    assert f"; {2 * (3 * 2 + 2 * 3 * 2)} fine-tunings follow" in capsys.readouterr().out
    runs.left = 3
    with pytest.raises(KeyboardInterrupt):
        run_study(config)
    assert tuned.list_new() == [f"ner-{i}/rate-full-{rate} (0.0001, 0.001) 1" for rate in (1e-4, 1e-3) for i in (0, 1)]
    runs.left = 10**6
    folder = run_study(config)
    tried = [name for name in tuned.list_new() if "/rate-" in name]
    assert tried == [f"ner-{i}/rate-af-{rate} (0.0001, 0.001) 1" for rate in (1e-4, 1e-3) for i in (0, 1)]
    assert [made.optim.lr for made in runs.made[-2:]] == [1e-4, 1e-4]
    assert {made.train.eval_half for made in runs.made} == {"both"}, "held-out text chooses nothing"
    results = json.loads((folder / "results.json").read_text())
    mean = {rate: pytest.approx(0.5 - 0.11 * math.log10(float(rate)) / 2) for rate in ("0.0001", "0.001")}
    assert results["methods"]["af"]["dev_by_rate"] == {**mean, "0.1": None}
    assert results["rates_by"] == "dev" and "bits_per_character_by_rate" not in results["methods"]["af"]
    said = "the one after which fine-tuning on all labels had the best figure on dev (the mean of 2 sets), in a run"
    assert said in (folder / "comparison.md").read_text()
    with pytest.raises(RunError, match=r"--rates_by was dev and is left out now"):
        run_study(replace(config, rates_by="loss"))
    run_study(replace(config, tasks=("ner",), data=(places[1],)))
    assert {name.partition(" ")[0] for name in tuned.list_new() if "/rate-" in name} == {
        f"ner/rate-{name}-{rate}" for name in ("full", "af") for rate in (1e-4, 1e-3)
    }, "another mean is another question"
    for flags in (("--rates", "1e-4,1e-3"), sets):
        with pytest.raises(ConfigError, match="--rates_by is 'dev'; it must be loss without --rates and --tasks"):
            small("--rates_by", "dev", *flags)


def test_rates_that_all_diverge_and_a_damaged_record_are_one_sentence(
    runs: FakeRuns, small: Make, tmp_path: Path
) -> None:
    config = small("--rates", "0.1,0.2")
    with pytest.raises(TrainingError, match="training of full diverged at every rate of --rates"):
        run_study(config)
    (tmp_path / "s" / "rates" / "full-0.1.json").write_text('{"full": [1, 2]}')
    with pytest.raises(RunError, match=r"full-0\.1\.json .*; delete it: the same command runs that trial again"):
        run_study(config)


def test_general_text_counts_once_a_method_reads_it(runs: FakeRuns, small: Make, tmp_path: Path) -> None:
    config = small("--seeds", "1")
    run_study(config)
    general = write_corpus(tmp_path / "general.txt", 40)
    kept = replace(config, methods=("full", "af", "full_kept"), replay=replace(config.replay, corpus=str(general)))
    run_study(kept)
    assert runs.names[3:] == ["full_kept-seed0"] and runs.made[-1].replay.corpus == str(general)
    write_corpus(general, 40, seed=1)
    with pytest.raises(
        RunError, match=rf"{general} has changed, so that --replay.corpus .* is not the text that the study in "
    ):
        run_study(kept)
    for texts, message in (
        ({"replay": replace(config.replay, corpus="no.txt")}, "--replay"),
        ({"retention": "no"}, "--retention"),
    ):
        with pytest.raises(CorpusError, match=message):
            run_study(replace(kept, **texts))


class FakeFinetunings:
    """Stands for `run_finetuning`: writes what a study reads; dev likes 1e-3 and dropout most, `af` scores 0.1 more."""

    def __init__(self) -> None:
        self.made: list[FinetuneConfig] = []

    def __call__(self, config: FinetuneConfig) -> Path:
        self.made.append(config)
        folder = Path(config.run.dir) / config.run.name
        (folder / "trainings").mkdir(parents=True, exist_ok=True)
        seeds = [config.seed + i for i in range(config.grid.restarts)]
        few = config.labelled.num_examples
        values = [0.5 + 0.1 * config.run.name.startswith("af") - 0.2 * bool(few) + 0.01 * seed for seed in seeds]
        drawn = np.random.default_rng(0).normal(0.0, 0.01, (len(seeds), 200)) + np.array(values)[:, None]
        write_resamples(Place(folder), {"test": Resampled(np.array(values), drawn)})
        points = config.grid.list_points(new_words="exbert" in config.run.name)
        best = max(points, key=lambda each: (each["lr"] == 1e-3, *(each.get(name, 0.0) for name in DROPOUTS)))
        summary = {
            "set": {"name": config.task, "sha256": config.data, "examples": {"train": few or 80}},
            **{"metric": "f1.micro", "dev": {}},
            "test": {"clusters": 50},
            "restarts": {"seeds": seeds, "test": {"values": values}, "dev": {"mean": self.score_dev(config)}},
            "best": {"point": {**best, "seed": config.seed}},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    def score_dev(self, config: FinetuneConfig) -> float:
        """The lower the rate of pre-training is, the better is the model, on the second of two sets much more so."""
        is_tried = config.run.name.startswith("rate-")
        factor = 0.1 if config.run.dir.endswith("ner-1") else 0.01
        return 0.5 - factor * math.log10(float(config.run.name.rpartition("-")[2])) if is_tried else 0.5

    def list_new(self) -> list[str]:
        """What was made since it was last asked, by set, with rates and restarts."""
        names = [
            f"{Path(config.run.dir).name}/{config.run.name} {config.grid.lr} {config.grid.restarts}"
            for config in self.made
        ]
        self.made.clear()
        return names


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> FakeFinetunings:
    fake = FakeFinetunings()
    monkeypatch.setattr(study_tasks, "run_finetuning", fake)
    monkeypatch.setattr(
        comparison, "read_finetune_summary", lambda folder: json.loads((folder / "summary.json").read_text())
    )
    return fake


def test_models_are_fine_tuned_where_dev_chose_once(
    runs: FakeRuns, tuned: FakeFinetunings, small: Make, tmp_path: Path
) -> None:
    places = [str(write_ner(tmp_path / name, (8, 4, 4))) for name in ("one", "two")]
    sets = ("--tasks", "ner,ner", "--data", ",".join(places))
    config = small(*sets, "--finetune.grid.lr", "1e-4,1e-3", "--finetune.grid.restarts", "2")
    folder = run_study(config)
    once = ["base (0.0001, 0.001) 1", "base (0.001,) 4"]
    first = [f"{name}-seed0 {point}" for name in ("full", "af") for point in ("(0.0001, 0.001) 1", "(0.001,) 2")]
    second = [f"{name}-seed1 (0.001,) 2" for name in ("full", "af")]
    by_set = [[f"ner-{i}/{name}" for name in own] for own in ([*once, *first], second) for i in (0, 1)]
    assert tuned.list_new() == list(itertools.chain(*by_set))
    results = json.loads((folder / "results.json").read_text())
    assert list(results["tasks"]) == ["ner-0", "ner-1", "mean of 2 sets"]
    mean = results["tasks"]["mean of 2 sets"]
    assert mean["methods"]["base"]["values"] == pytest.approx([0.5, 0.51, 0.52, 0.53]), "its restarts"
    assert mean["methods"]["af"]["values"] == pytest.approx([0.605, 0.605]), "each of its models once"
    assert mean["differences_to_base"]["af"]["mean"] == pytest.approx(0.09)
    text = (folder / "comparison.md").read_text()
    assert "f1.micro on test after fine-tuning" in text and "against full" in text
    assert (folder / "tasks.png").read_bytes()[:4] == b"\x89PNG"
    run_study(replace(config, seeds=3))
    assert sorted({name.partition("/")[2] for name in tuned.list_new() if "seed2" in name or "base" in name}) == [
        *("af-seed2 (0.001,) 2", "base (0.001,) 6", "full-seed2 (0.001,) 2")
    ], "the point is known"
    asked = json.loads((Path(folder) / "tasks" / "points" / "ner-0-af.json").read_text())["config"]
    assert asked == {"method": "af", "points": [[1e-4, 32, 3.0], [1e-3, 32, 3.0]]}, "as 0.1.0 has it"


def test_each_method_takes_the_dropout_of_words_that_dev_chose(
    runs: FakeRuns, tuned: FakeFinetunings, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--tasks", "ner", "--data", str(write_ner(tmp_path / "ner")), "--methods", "full,exbert", "--budget", "0")
    shares = ("--finetune.grid.word_dropout", "0,0.2", "--finetune.grid.new_word_dropout", "0,0.5")
    changes = "{exbert: {vocab: {size: 4}, method: {module_hidden_size: 12, module_ffn_size: 20}}}"
    config = small(*sets, *shares, "--presets", changes, "--seeds", "1")
    run_study(replace(config, dry_run=True))
    assert f"; {2 + 2 + 4} fine-tunings follow" in capsys.readouterr().out, "only exBERT has new words to drop"
    place = study_runs.Workplace(config, resolve_paths(PretrainConfig(run=config.run)))
    for _ in range(2):
        study_tasks.finetune_seed(place, ["full", "exbert"], 0)
    made = [(one.run.name, one.grid.word_dropout, one.grid.new_word_dropout) for one in tuned.made]
    both, names = ((0.0, 0.2), (0.0, 0.5)), ("base", "full-seed0", "exbert-seed0")
    chosen = {name: ((0.2,), (0.5,) if "exbert" in name else (0.0,)) for name in names}
    first = [(name, *values) for name in names for values in (both, chosen[name])]
    assert made == [*first, *((name, *chosen[name]) for name in names)], "the point is known"
    fewer = replace(config.finetune, grid=replace(config.finetune.grid, new_word_dropout=(0.5,)))
    study_tasks.finetune_seed(replace(place, config=replace(config, finetune=fewer)), ["exbert"], 0)
    assert (tuned.made[-2].grid.word_dropout, tuned.made[-2].grid.new_word_dropout) == ((0.0, 0.2), (0.5,))


def test_each_seed_has_its_own_few_labels_and_steps_stay_the_same(
    runs: FakeRuns, tuned: FakeFinetunings, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--tasks", "ner", "--data", str(write_ner(tmp_path / "ner")), "--labels", "all,40,20")
    grid = ("--finetune.grid.lr", "1e-4,1e-3", "--finetune.grid.batch_size", "8", "--finetune.grid.restarts", "2")
    folder = run_study(config := small(*sets, *grid, "--methods", "af", "--seed", "5"))
    asked = [
        (str(Path(made.run.dir, made.run.name).relative_to(folder / "tasks" / "ner")), made.grid.epochs, made.seed)
        for made in tuned.made
        if made.grid.lr == (1e-3,)
    ]
    first = [(f"{n}/{name}-seed5", (epochs,), 0) for n, epochs in ((20, 10.0), (40, 6.0)) for name in ("base", "af")]
    second = [(name.replace("seed5", "seed6"), epochs, 2) for name, epochs, _ in first]
    assert asked == [*first, ("base", (3.0,), 0), ("af-seed5", (3.0,), 0), *second, ("af-seed6", (3.0,), 0)]
    few = [(made.labelled.num_examples, made.labelled.examples_seed) for made in tuned.made if "seed6" in made.run.name]
    assert few == [(20, 6)] * 2 + [(40, 6)] * 2 + [(0, 0)]
    assert {made.model for made in tuned.made if made.run.name.startswith("base")} == {config.base}
    assert tuned.list_new().count("ner/base (0.001,) 4") == 1, "with all labels one run for all seeds"
    assert "seed 6: 20, 40, 80 labels are taken" in capsys.readouterr().out
    found = json.loads((folder / "results.json").read_text())["labels"]["ner"]
    values = [score["methods"]["base"]["values"] for score in found["scores"]]
    assert found["numbers"] == [20, 40, 80] and [len(own) for own in values] == [2, 2, 2]
    assert values[2] == pytest.approx([0.505, 0.525]), "two restarts of the only run for each seed"
    text = (folder / "comparison.md").read_text()
    assert "## f1.micro on test by labels, ner" in text and "- Numbers of labels: whole documents" in text
    assert (folder / "labels.png").read_bytes()[:4] == b"\x89PNG"
    few = replace(config, labels=(10, 20))
    place = study_runs.Workplace(few, resolve_paths(PretrainConfig(run=few.run)), num_examples=(80,))
    study_tasks.finetune_seed(place, ["af"], 0)
    assert [curve.numbers for curve in study_tasks.read_curves(place, ["af"], [5])] == [(10, 20)]
    assert not study_tasks.read_scores(place, ["af"], [5]), "no model has all labels"


def test_labels_that_make_no_curve_are_refused(small: Make, tmp_path: Path) -> None:
    data = write_ner(tmp_path / "ner")
    for labels, message in (
        ("20,80,all", "--labels has 80, and train of ner has 80 examples; give fewer, or leave it out."),
        ("20,9000", "--labels has 9,000, and train of ner has 80 examples"),
        ("1,20", "training example"),
    ):
        with pytest.raises(CorpusError) as error:
            study_tasks.check_sets(small("--tasks", "ner", "--data", str(data), "--labels", labels))
        assert message in str(error.value), labels
    documents = ("-DOCSTART-\tO\n\n" + f"{word}\tB-X\n\n" * 30 for word in "ab")
    (data / "train.tsv").write_text("".join(documents))
    with pytest.raises(CorpusError, match=r"--labels has 5 and 9, for which the same 30 examples of ner are taken"):
        study_tasks.check_sets(small("--tasks", "ner", "--data", str(data), "--labels", "5,9,all"))
    (data / "test.tsv").unlink()
    with pytest.raises(CorpusError, match="--labels needs a test, and ner has none"):
        study_tasks.check_sets(small("--tasks", "ner", "--data", str(data), "--labels", "20,all"))
    with pytest.raises(ConfigError, match="--labels is '20,all'; it must be left out without --tasks"):
        small("--labels", "20,all")


def test_sets_of_a_study_are_read_before_anything_is_trained(runs: FakeRuns, small: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing', which does not exist"):
        run_study(small("--tasks", "ner", "--data", str(tmp_path / "nothing")))
    for flags, message in (
        (("--tasks", "ner", "--data", "a,b"), "--data is 'a,b'; it must be as many as --tasks (1)"),
        (("--finetune.model", "x"), "--finetune.model is 'x'; it must be left out: the study decides it"),
        (("--finetune.export", "false"), "--finetune.export is False; it must be left out: the study decides it"),
    ):
        with pytest.raises(ConfigError) as error:
            small(*flags)
        assert message in str(error.value)
    assert not runs.made


def test_intervals_of_fine_tuned_models_hold_the_true_difference() -> None:
    """Seeds of pre-training, restarts and documents vary; pooled restarts would be too sure of a method."""
    generator, hits, pooled = np.random.default_rng(0), 0, 0
    for _ in range(300):
        documents = generator.normal(0.0, 0.1, 60)
        rows = generator.integers(60, size=(200, 60))
        noise = documents[rows].mean(axis=1), documents.mean()

        def draw(seed: float, noise: tuple[np.ndarray, float] = noise) -> Resampled:
            values = 0.6 + seed + generator.normal(0.0, 0.004, 2)
            return Resampled(values + noise[1], values[:, None] + noise[0], 60)

        models = [draw(seed) for seed in generator.normal(0.02, 0.015, 4)]
        base = draw(0.0)
        found = compare(base, study_tasks.over_models(models))
        hits += found.low <= 0.02 <= found.high
        values, drawn = (np.concatenate([getattr(model, name) for model in models]) for name in ("values", "drawn"))
        found = compare(base, Resampled(values, drawn, 60))
        pooled += found.low <= 0.02 <= found.high
    assert hits / 300 > 0.92 > pooled / 300, (hits, pooled)


def test_other_settings_are_refused(runs: FakeRuns, small: Make) -> None:
    config = small()
    run_study(config)
    with pytest.raises(RunError, match=r"--seconds was 20 and is 21 now"):
        run_study(replace(config, seconds=21.0))
    with pytest.raises(RunError, match=r"presets\.af\.optim\.lr was 0\.001 and is 0\.5 now"):
        run_study(small("--presets", "{af: {optim: {lr: 0.5}}}"))
    with pytest.raises(RunError, match=r"--train\.eval_rows was 40 and is 41 now"):
        run_study(replace(config, train=replace(config.train, eval_rows=41)))
    num_made = len(runs.made)
    run_study(small("--presets", "{lora: {optim: {lr: 0.5}}}"))  # not a method of this study
    assert len(runs.made) == num_made


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    runs: FakeRuns, small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(small("--run.dir", str(tmp_path / "runs")), dry_run=True)
    run_study(config)
    shown = capsys.readouterr().out
    assert "2 methods, 2 seeds, 20 seconds per run: 4 runs" in shown and "heads 1, ffn_units" in shown
    assert not runs.made and not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="the method 'af' does not fit"):
        run_study(replace(config, budget=0.001))
    run_study(replace(config, budgets=(0.001, 0.3, 0.5), rates=(1e-4, 1e-3)))
    shown = capsys.readouterr().out
    assert "note: af@0.001 is left out: --method.trainable_budget is 0.001" in shown
    assert "3 methods, 2 seeds, 20 seconds per run: 6 runs and 6 that try rates, 0.1 hours of training" in shown
    assert "\naf@0.5 " in shown and "\naf@0.001 " not in shown and "tuned" in shown


def build_command(base: Path, corpus: Path, folder: Path) -> list[str]:
    """A study with new words, general text beside the domain's, two rates and a second measure of forgetting."""
    sizes = "{exbert: {vocab: {size: 4}, method: {module_hidden_size: 12, module_ffn_size: 20}}}"
    general = write_corpus(corpus.parent / "general.txt", 300)
    other = write_corpus(corpus.parent / "other.txt", 60, seed=1)
    return [
        *(sys.executable, str(REPOSITORY / "jobs" / "compare.py"), "--base", str(base), "--corpus", str(corpus)),
        *("--run.dir", str(folder), "--run.name", "s", "--methods", "full_kept,exbert", "--budget", "0.3"),
        *("--seeds", "1", "--tokens", "4000", "--presets", sizes, "--train.seq_length", "32"),
        *("--train.global_batch_size", "8", "--train.eval_rows", "40", "--engine.precision", "fp32"),
        *("--train.save_every", "5", "--train.general_probe", str(FEW_SENTENCES), "--optim.warmup_steps", "3"),
        *("--replay.corpus", str(general), "--rates", "1e-3,3e-3", "--retention", str(other)),
        *("--tasks", "ner", "--data", str(write_ner(corpus.parent / "ner")), "--finetune.grid.lr", "1e-3,3e-3"),
        *("--finetune.grid.epochs", "1", "--finetune.labelled.max_length", "64", "--labels", "20,40,all"),
    ]


def read_losses(folder: Path) -> dict[str, list[float]]:
    return {
        run.parent.name: [
            record["train/mlm_loss"]
            for record in map(json.loads, run.open())
            if record.get("train/mlm_loss") is not None
        ]
        for run in sorted(folder.glob("*-seed*/metrics.jsonl"))
    }


@pytest.mark.jobs
@pytest.mark.timeout(3600)
def test_a_killed_study_ends_as_an_undisturbed_one(
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    """The real thing, killed with all its processes: as it tries a rate, in the last run, and among few labels."""
    command = build_command(tiny_base_folder, text_file, tmp_path / "killed")
    last = "tasks/ner/40/full_kept-seed0/summary.json"
    for name in ("rate-exbert-0.001/metrics.jsonl", "exbert-seed0/metrics.jsonl", last):
        process = start_job(command)
        written = tmp_path / "killed" / "s" / name
        while not written.exists() or len(written.read_text().splitlines()) < 8:
            assert process.poll() is None, "the study ended before it was killed"
            time.sleep(0.02)
        kill_job(process)
    losses, found = [], []
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        result = subprocess.run(
            build_command(tiny_base_folder, text_file, folder), capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert "[2 of 2] exbert, seed 0" in result.stdout and "Points lost of the general text" in result.stdout
        losses.append(read_losses(folder / "s"))
        found.append(json.loads((folder / "s" / "results.json").read_text()))
    assert losses[0] == losses[1] and len(losses[0]) == 2
    check_found(tmp_path / "whole" / "s", found)


@pytest.mark.jobs
@pytest.mark.timeout(3600)
def test_a_killed_study_that_chooses_rates_on_dev_goes_on(
    tiny_base_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    """The real thing, killed with all its processes as a tried model is fine-tuned."""
    command = build_command(tiny_base_folder, text_file, tmp_path)
    command += ["--methods", "full_kept", "--rates_by", "dev", "--labels", "20,40", "--retention", ""]
    folder = tmp_path / "s"
    process, begun = start_job(command), folder / "tasks" / "ner" / "40" / "rate-full_kept-0.003" / "trainings"
    while not begun.exists():
        assert process.poll() is None, "the study ended before it was killed"
        time.sleep(0.02)
    kill_job(process)
    for said in ("] full_kept, seed 0", "full_kept-seed0 is finished"):
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert result.returncode == 0 and said in result.stdout, result.stderr[-3000:]
    assert "at rate" not in result.stdout, "what was tried is not tried again"
    found = json.loads((folder / "results.json").read_text())["methods"]["full_kept"]
    tuned = {rate: begun.parent.parent / f"rate-full_kept-{rate}" / "summary.json" for rate in ("0.001", "0.003")}
    dev = {rate: json.loads(path.read_text())["restarts"]["dev"]["mean"] for rate, path in tuned.items()}
    assert found["dev_by_rate"] == dev and found["learning_rate"] == float(max(dev, key=lambda rate: dev[rate]))


def check_found(folder: Path, found: list[dict[str, Any]]) -> None:
    """What both studies say, the killed one and the other."""
    for name, own in found[0]["methods"].items():
        other = found[1]["methods"][name]
        for figure in ("tokens", "learning_rate", "bits_per_character_by_rate", "bits_gained", "text_points_lost"):
            assert own[figure] == other[figure], figure
        assert min(own["tokens"]) >= 4000, "a run ends with the step that reaches its tokens"
        assert own["learning_rate"] in (1e-3, 3e-3) and len(own["bits_per_character_by_rate"]) == 2
        records = [json.loads(line) for line in (folder / f"{name}-seed0" / "metrics.jsonl").open()]
        rates = [record["train/lr"] for record in records if "train/lr" in record]
        assert max(rates) == pytest.approx(own["learning_rate"]), "its own rate"
        assert rates[-1] < max(rates) / 3, "of twenty steps, and a fall over the last fifth, the last has a quarter"
    assert found[0]["tasks"] == found[1]["tasks"] and set(found[0]["tasks"]["ner"]["methods"]) == {
        "base",
        *found[0]["methods"],
    }
    assert found[0]["labels"] == found[1]["labels"] and found[0]["labels"]["ner"]["numbers"] == [20, 40, 80]
    for run in ("exbert-seed0", "20/base-seed0", "40/exbert-seed0"):
        assert (folder / "tasks" / "ner" / run / "report.html").exists()
    asked = json.loads((folder / "retention" / "results.json").read_text())
    assert asked["shared_words"] and len(asked["models"]) == 3 and asked["scored_tokens"] > 50
    assert found[0]["base"]["text_accuracy"] == asked["models"]["base"]["accuracy"]
