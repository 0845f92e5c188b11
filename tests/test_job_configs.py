"""Every YAML that ships beside the jobs is read by its job, and what trains says its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from domext_ray.config import ObjectiveConfig, PretrainConfig, parse_config
from domext_ray.finetune_config import AblateConfig, FinetuneConfig
from domext_ray.job_config import StudyConfig
from domext_ray.pipeline import run_pretraining, run_vocabulary
from domext_ray.search.space import read_space
from domext_ray.search.sweep import choose_points
from domext_ray.search_config import SweepConfig

CONFIGS = Path(__file__).resolve().parents[1] / "jobs" / "configs"
OTHER_JOBS: dict[str, tuple[type[Any], list[str]]] = {
    "ablate.yaml": (AblateConfig, ["--study", "size"]),
    "compare.yaml": (StudyConfig, ["--tokens", "1000"]),
    "finetune.yaml": (FinetuneConfig, []),
    "vocab.yaml": (PretrainConfig, ["--vocab.size", "50"]),
}
"""What is no training job's: its configuration, and what its user must give."""
SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))
PRETRAINING = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.name not in OTHER_JOBS and path not in SWEEPS]
MIXES = {path.stem.removeprefix("masks_"): path for path in PRETRAINING if path.stem.startswith("masks_")}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A small corpus, and a folder of runs that must stay empty."""
    (tmp_path / "corpus.txt").write_text("the dog and the cat run in the garden\n" * 20, encoding="utf-8")
    return ["--corpus", str(tmp_path / "corpus.txt"), "--run.dir", str(tmp_path / "runs"), "--dry_run", "true"]


@pytest.mark.parametrize("path", PRETRAINING, ids=[path.stem for path in PRETRAINING])
def test_a_training_jobs_file_dry_runs(path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(PretrainConfig, None, ["--config_path", str(path), *options])
    run = run_pretraining(config)
    printed = capsys.readouterr().out
    assert "dry run: nothing was started" in printed and "trainable" in printed
    assert not run.exists() and not run.parent.exists()


def test_files_of_a_folder_name_different_runs() -> None:
    for folder in {path.parent for path in PRETRAINING}:
        runs = [yaml.safe_load(path.read_text()).get("run", {}).get("name") for path in sorted(folder.glob("*.yaml"))]
        named = [name for name in runs if name and name != "general-mini"]  # two phases of one run
        assert len(named) == len(set(named))


@pytest.mark.parametrize("name", OTHER_JOBS)
def test_another_jobs_file_is_read(name: str, options: list[str]) -> None:
    config_class, given = OTHER_JOBS[name]
    config = parse_config(config_class, str(CONFIGS / name), given)
    assert isinstance(config, config_class)
    if config_class is PretrainConfig:
        assert run_vocabulary(parse_config(PretrainConfig, str(CONFIGS / name), [*given, *options])) is None


def test_masking_mixes_are_those_of_their_names() -> None:
    """MASK, SAME and RND of BERT's table 8, in per cent."""
    assert MIXES.keys() == {"80_10_10", "100_0_0", "80_0_20", "80_20_0", "0_20_80", "0_0_100"}
    for name, path in MIXES.items():
        objective = parse_config(PretrainConfig, None, ["--config_path", str(path)]).objective
        masked, replaced = objective.mask_token_frac, objective.random_token_frac
        shares = [masked, 1 - masked - replaced, replaced]
        assert [round(100 * each) for each in shares] == [int(each) for each in name.split("_")]


def test_ablations_of_one_table_differ_in_one_thing() -> None:
    folder = CONFIGS / "ablations"

    def read(pattern: str, *left_out: str) -> list[dict[str, Any]]:
        found = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob(pattern))]
        return [{name: value for name, value in each.items() if name not in (*left_out, "run")} for each in found]

    tasks = [read(f"{name}.yaml", "objective")[0] for name in ("next_sentence", "no_next_sentence", "left_to_right")]
    for table in (read("masks_*.yaml", "objective"), read("size_*.yaml", "shape"), tasks):
        assert len(table) >= 3 and all(each == table[0] for each in table)
    left_to_right = parse_config(PretrainConfig, None, ["--config_path", str(folder / "left_to_right.yaml")])
    assert left_to_right.objective == ObjectiveConfig(kind="left_to_right")


@pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])
def test_a_sweeps_space_makes_trials(path: Path) -> None:
    config = parse_config(SweepConfig, None, ["--config_path", str(path)])
    space = read_space(config.space)
    assert config.run.name == path.stem.replace("_", "-") and space.list_preparations()
    if config.base == "general-mini":  # no other one is on every machine
        points, reasons = choose_points(config, space)
        assert len(points) == {"grid": 20 if "exbert" in path.stem else 10, "random": config.search.trials}.get(
            config.search.searcher, 0
        )
        assert all("there is no extension" in reason for reason in reasons), "AF without heads and units is none"
