"""A study: presets become runs, pilots become steps, what is finished stays, and a real one from text to picture."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPOSITORY
from job_processes import kill_job, start_job
from report_records import SUMMARY

from domext_ray.config.jobs import StudyConfig
from domext_ray.config.parsing import parse_config
from domext_ray.config.presets import find_preset
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.manifest import Manifest
from domext_ray.errors import ConfigError, RunError
from domext_ray.runs.run_directory import write_config
from domext_ray.study import study
from domext_ray.study.study import (
    choose_presets,
    estimate_step_seconds,
    make_method_config,
    read_presets,
    run_study,
)

DEFAULTS = find_preset("compare")
SHIPPED = read_presets(DEFAULTS)
EXTENSIONS = ("lora", "fl_tuning", "af", "bottleneck", "exbert", "exbert_no_vocab")
FIXED = ("full", "top_layers", "layer_norms", "biases")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1,000 lines, with words that the tiny base cuts into letters."""
    random = np.random.default_rng(0)
    words = "the a house tree river small old sees finds near under cortex thalamus neuron axon".split()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(" ".join(random.choice(words, 12)) + ".\n" for _ in range(1000)), encoding="utf-8")
    return path


def configure(*flags: str) -> StudyConfig:
    return parse_config(StudyConfig, str(DEFAULTS), flags)


def plan(config: StudyConfig) -> dict[str, PretrainConfig]:
    presets = choose_presets(config, SHIPPED)
    return {name: make_method_config(config, name, preset) for name, preset in presets.items()}


def test_presets_take_the_budget_where_they_have_a_size() -> None:
    methods = plan(configure("--seconds", "9", "--methods", ",".join(EXTENSIONS + FIXED), "--budget", "0.1"))
    assert [methods[name].method.trainable_budget for name in EXTENSIONS] == [0.1] * len(EXTENSIONS)
    assert [methods[name].method.trainable_budget for name in FIXED] == [0.0] * len(FIXED)
    assert [methods[name].optim.lr for name in ("full", "top_layers", "biases", "lora")] == [3e-4, 3e-4, 1e-3, 1e-3]
    assert all(each.method.name == name and each.train.global_batch_size == 16 for name, each in methods.items())
    assert methods["exbert"].vocab.size == 2000 and not methods["exbert_no_vocab"].vocab.size


def test_a_preset_can_be_changed_and_added() -> None:
    changes = "{exbert: {vocab: {size: 50}}, wide: {method: {heads: 0, ffn_units: 9}, train: {dropout: 0.2}}}"
    methods = plan(configure("--seconds", "9", "--methods", "exbert,wide", "--presets", changes, "--budget", "0"))
    assert methods["exbert"].vocab.size == 50 and methods["exbert"].method.module_hidden_size == 84
    assert (methods["wide"].method.ffn_units, methods["wide"].train.dropout) == (9, 0.2)
    assert methods["wide"].method.trainable_budget == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--seconds is 0.0; it must be above 0 when --tokens is 0"),
        (("--seconds", "1", "--tokens", "5"), "--seconds is 1.0; it must be 0 when --tokens is 5"),
        (("--seconds", "1", "--methods", "af,nope"), "--methods names 'nope'; it must be one of full, top_layers"),
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
    ],
)
def test_a_mistake_is_one_sentence(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(configure(*flags))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_pilot_is_a_median_without_its_first_steps() -> None:
    assert estimate_step_seconds([9.0, 5.0, 3.0, 2.0, 2.0, 1.0, 1.2, 1.1, 7.0]) == pytest.approx(1.6)
    assert estimate_step_seconds([4.0]) == 4.0
    assert estimate_step_seconds([*[9.0] * 5, *[0.1] * 20]) == 0.1


class FakeRuns:
    """Stands for `run_pretraining`: writes what a study reads, notes each call, and dies when it is told to."""

    def __init__(self) -> None:
        self.made: list[PretrainConfig] = []
        self.left = 10**6

    def __call__(self, config: PretrainConfig) -> Path:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.made.append(config)
        folder = Path(config.run.dir) / config.run.name
        (folder / "export").mkdir(parents=True, exist_ok=True)
        steps = 7 if config.train.max_seconds else config.train.max_steps
        summary: dict[str, Any] = copy.deepcopy(SUMMARY)
        summary["train"]["steps"], summary["train"]["wall_seconds"] = steps, 0.5 * steps
        summary["domain"]["bits_per_character"]["after"] -= 0.01 * config.seed
        summary["evaluation"] = {"domain_characters": 900, "general_words": 500}
        summary["method"] = {"name": config.method.name}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "report.html").touch()
        write_config(folder, config)
        records = [{"step": step, "time/step_seconds": 0.5} for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return folder

    @property
    def names(self) -> list[str]:
        return [each.run.name for each in self.made]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(study, "run_pretraining", fake)
    return fake


def small(base: Path, corpus: Path, runs: Path, *flags: str) -> StudyConfig:
    return configure(
        *("--base", str(base), "--corpus", str(corpus), "--run.dir", str(runs), "--run.name", "s"),
        *("--methods", "full,af", "--budget", "0.3", "--seeds", "2", "--train.seq_length", "32"),
        *("--train.global_batch_size", "8", "--train.eval_rows", "40", "--engine.precision", "fp32"),
        *(flags or ("--seconds", "20")),
    )


def test_pilots_come_first_and_seeds_are_the_outer_loop(
    runs: FakeRuns,
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    folder = run_study(small(tiny_base_folder, text_file, tmp_path), SHIPPED)
    seeds = ["full-seed0", "af-seed0", "full-seed1", "af-seed1"]
    pilots = ["pilot-full", "pilot-full", "pilot-af", "pilot-af"]  # seven steps are too few, so each goes on
    assert runs.names == ["base", *pilots, *seeds]
    for each in runs.made[-4:]:
        assert each.train.max_steps == each.optim.decay_steps == 40, "20 seconds of 0.5"
        assert Path(each.prepare.cache_dir) == tmp_path / ".corpora"
    assert [each.seed for each in runs.made[-4:]] == [0, 0, 1, 1]
    assert not (folder / "pilot-full" / "export").exists()
    assert "| af | " in (folder / "comparison.md").read_text()
    results = json.loads((folder / "results.json").read_text())
    assert results["seeds"] == [0, 1] and set(results["methods"]) == {"full", "af"}
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_command_goes_on_and_more_seeds_and_methods_may_come(
    runs: FakeRuns,
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    config = small(tiny_base_folder, text_file, tmp_path)
    runs.left = 7
    with pytest.raises(KeyboardInterrupt):
        run_study(config, SHIPPED)
    steps = (tmp_path / "s" / "steps.json").read_bytes()
    runs.left = 10**6
    run_study(config, SHIPPED)
    assert runs.names[7:] == ["full-seed1", "af-seed1"], "nothing that is finished is made again"
    assert (tmp_path / "s" / "steps.json").read_bytes() == steps
    run_study(replace(config, seeds=3, methods="full,af,biases"), SHIPPED)
    assert [each for each in runs.names[9:] if "pilot" not in each] == [
        *("biases-seed0", "biases-seed1"),
        *("full-seed2", "af-seed2", "biases-seed2"),
    ]


def test_other_settings_are_refused(
    runs: FakeRuns,
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    config = small(tiny_base_folder, text_file, tmp_path)
    run_study(config, SHIPPED)
    with pytest.raises(RunError, match=r"seconds: 20\.0 -> 21\.0"):
        run_study(replace(config, seconds=21.0), SHIPPED)
    with pytest.raises(RunError, match=r"presets\.af\.optim\.lr: 0\.001 -> 0\.5"):
        run_study(replace(config, presets={"af": {"optim": {"lr": 0.5}}}), SHIPPED)
    with pytest.raises(RunError, match=r"train\.eval_rows: 40 -> 41"):
        run_study(replace(config, train=replace(config.train, eval_rows=41)), SHIPPED)
    num_made = len(runs.made)
    run_study(replace(config, presets={"lora": {"optim": {"lr": 0.5}}}), SHIPPED)  # not a method of this study
    assert len(runs.made) == num_made


def test_tokens_become_steps(
    runs: FakeRuns,
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Prepared(Manifest):
        def __init__(self) -> None: ...

        def num_tokens(self, split: str) -> int:
            return 250

        def num_rows(self, split: str) -> int:
            return 10

    monkeypatch.setattr(study, "run_preparation", lambda config: Prepared())
    run_study(small(tiny_base_folder, text_file, tmp_path, "--tokens", "1001"), SHIPPED)
    assert [each.train.max_steps for each in runs.made[1:]] == [6] * 4, "8 rows of 25 tokens per step"


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    runs: FakeRuns,
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = replace(small(tiny_base_folder, text_file, tmp_path / "runs"), dry_run=True)
    run_study(config, SHIPPED)
    shown = capsys.readouterr().out
    assert "2 methods, 2 seeds, 20 seconds per run: 4 runs" in shown and "heads 1, ffn_units" in shown
    assert not runs.made and not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="the method 'af' does not fit"):
        run_study(replace(config, budget=0.001), SHIPPED)


def build_command(base: Path, corpus: Path, folder: Path) -> list[str]:
    sizes = "{exbert: {vocab: {size: 4}, method: {module_hidden_size: 12, module_ffn_size: 20}}}"
    return [
        *(sys.executable, str(REPOSITORY / "jobs" / "compare.py"), "--base", str(base), "--corpus", str(corpus)),
        *("--run.dir", str(folder), "--run.name", "s", "--methods", "full,exbert", "--budget", "0.3"),
        *("--seeds", "2", "--tokens", "4000", "--presets", sizes, "--train.seq_length", "32"),
        *("--train.global_batch_size", "8", "--train.eval_rows", "40", "--engine.precision", "fp32"),
        *("--train.checkpoint_every", "5"),
    ]


def read_losses(folder: Path) -> dict[str, list[float]]:
    return {
        run.parent.name: [
            each["train/mlm_loss"] for each in map(json.loads, run.open()) if each.get("train/mlm_loss") is not None
        ]
        for run in sorted(folder.glob("*-seed*/metrics.jsonl"))
    }


@pytest.mark.jobs
@pytest.mark.timeout(1800)
def test_a_killed_study_ends_as_an_undisturbed_one(
    tiny_base_folder: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    """The real thing, killed with all its processes in the second run."""
    command = build_command(tiny_base_folder, text_file, tmp_path / "killed")
    process = start_job(command)
    metrics = tmp_path / "killed" / "s" / "exbert-seed0" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 8:
        assert process.poll() is None, "the study ended before it was killed"
        time.sleep(0.02)
    kill_job(process)
    losses = []
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        result = subprocess.run(
            build_command(tiny_base_folder, text_file, folder), capture_output=True, text=True, timeout=900
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert "[4 of 4] exbert, seed 1" in result.stdout and "points lost" in result.stdout
        losses.append(read_losses(folder / "s"))
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert losses[0]["full-seed0"] != losses[0]["full-seed1"]
