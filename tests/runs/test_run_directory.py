"""What a run's directory says of itself: whose it is, whether its files are whole, what older versions left there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from domext_ray.config.identity import hashed_options, identity_of
from domext_ray.config.pretrain import EngineConfig, PrepareConfig, PretrainConfig, TrainConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.options.fields import added, free
from domext_ray.report.summary import is_finished, read_summary
from domext_ray.runs.run_directory import (
    check_identity,
    hold_run,
    keep_precision,
    read_config,
    write_config,
    write_identity,
)
from domext_ray.training.start import read_run_config

CONFIG = PretrainConfig(seed=7, train=TrainConfig(max_steps=12))


def lay_out(run: Path, config: PretrainConfig = CONFIG, *, sealed: bool = True) -> Path:
    """Write config.yaml and identity.json; `sealed=False`: as versions did whose config.yaml had no hash."""
    run.mkdir()
    write_config(run, config)
    write_identity(run, {**identity_of(config), "base_sha256": "b" * 64})
    if not sealed:
        path = run / "config.yaml"
        path.write_text(path.read_text().split("\n", 1)[1])
    return run


def test_config_comes_back(tmp_path: Path) -> None:
    assert read_run_config(lay_out(tmp_path / "new")) == CONFIG
    assert read_run_config(lay_out(tmp_path / "old", sealed=False)) == CONFIG


@pytest.mark.parametrize("sealed", [True, False])
def test_a_part_of_a_config_is_refused(tmp_path: Path, sealed: bool) -> None:
    run = lay_out(tmp_path / "run", sealed=sealed)
    content = (run / "config.yaml").read_bytes()
    options_end = content.index(b"  on_non_finite:")  # what comes then decides no result; only the hash knows it
    ends = [i + 1 for i in range(options_end - 1) if content[i : i + 1] == b"\n"]
    for size in [*range(0, len(content) if sealed else options_end, 97), *ends[sealed:]]:
        (run / "config.yaml").write_bytes(content[:size])
        with pytest.raises(RunError, match=r"config\.yaml .*its own command again") as raised:
            read_run_config(run)
        assert len(str(raised.value).splitlines()) == 1


def test_an_edited_config_is_refused(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run")
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("heads: 1\n", "heads: 2\n", 1))
    with pytest.raises(RunError, match="was edited"):
        read_run_config(run)


def test_a_run_goes_on_in_its_own_precision(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run", replace(CONFIG, engine=EngineConfig(precision="fp32")))
    assert keep_precision(CONFIG, run).engine.precision == "fp32"
    assert keep_precision(CONFIG, tmp_path / "another") == CONFIG
    asked = replace(CONFIG, engine=EngineConfig(precision="bf16"))
    assert keep_precision(asked, run) == asked
    (run / "config.yaml").write_text("damaged", encoding="utf-8")
    assert keep_precision(CONFIG, run) == CONFIG


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("seed: !include other.yaml\n", "not valid YAML"),
        ("- 1\n- 2\n", "no YAML mapping"),
        ("seed: seven\n", "cannot be used"),
        ("train: 5\n", "cannot be used"),
        ("method:\n  heads: -1\n", "--method.heads is -1"),
        ("no_such_option: 1\n", "cannot be used"),
        ("seed: \x00\n", "not valid YAML"),
        ("seed: 2020-99-99\n", "not valid YAML"),
    ],
)
def test_a_config_of_something_else_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(RunError, match=message) as raised:
        read_run_config(tmp_path)
    assert str(tmp_path / "config.yaml") in str(raised.value) and len(str(raised.value).splitlines()) == 1


@dataclass(frozen=True)
class OldPart:
    size: int = 4


@dataclass(frozen=True)
class OldConfig:
    name: str = "af"
    workers: int = free(1)
    part: OldPart = field(default_factory=OldPart)


@dataclass(frozen=True)
class NewPart:
    size: int = 4
    shift: bool = added(False)
    rule: str = added("exact", before="rough")


@dataclass(frozen=True)
class NewConfig:
    name: str = "af"
    workers: int = free(1)
    part: NewPart = field(default_factory=NewPart)
    late: int = added(0)


def test_options_that_came_later_do_not_make_another_run(tmp_path: Path) -> None:
    write_identity(tmp_path, identity_of(OldConfig()))
    as_before = NewConfig(part=NewPart(rule="rough"))
    check_identity(tmp_path, {**identity_of(as_before), "fact": "not recorded then"}, NewConfig)
    for config, difference in (
        (NewConfig(), "part.rule: 'rough' -> 'exact'"),
        (replace(as_before, late=1), "late: 0 -> 1"),
        (replace(as_before, part=replace(as_before.part, shift=True)), "part.shift: False -> True"),
        (replace(as_before, name="x"), "name: 'af' -> 'x'"),
    ):
        with pytest.raises(RunError, match=difference):
            check_identity(tmp_path, identity_of(config), NewConfig)


def test_options_that_came_later_are_read_as_they_were(tmp_path: Path) -> None:
    write_config(tmp_path, OldConfig(name="x"))
    assert read_config(tmp_path, NewConfig) == NewConfig(name="x", part=NewPart(rule="rough"))


def test_options_that_came_later_leave_hashes_alone() -> None:
    assert hashed_options(NewConfig(part=NewPart(rule="rough"))) == identity_of(OldConfig())
    assert hashed_options(NewConfig(late=3))["late"] == 3
    assert {**hashed_options(PrepareConfig()), "packed": False, "pair": ""} == identity_of(PrepareConfig())


def test_what_has_moved_is_the_same(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run", replace(CONFIG, base="/old/base"))
    moved = {**identity_of(replace(CONFIG, base="/new/base")), "base_sha256": "b" * 64}
    check_identity(run, moved, PretrainConfig)
    with pytest.raises(RunError, match="base: '/old/base' -> '/new/base'"):
        check_identity(run, {**moved, "base_sha256": "c" * 64}, PretrainConfig)


@pytest.mark.parametrize("content", ["", '{"seed": 7, "tra', "[1]", "\x80", "{}", '{"optim": {"decay_steps": "x"}}'])
def test_a_damaged_identity_is_one_sentence(tmp_path: Path, content: str) -> None:
    from domext_ray.runs.run_directory import resolve_schedule

    run = lay_out(tmp_path / "run")
    (run / "identity.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=r"identity\.json .*--run\.name") as raised:
        resolve_schedule(CONFIG, run)
    assert len(str(raised.value).splitlines()) == 1


SUMMARY: dict[str, Any] = {
    "parameters": {"total": 10, "trainable": 1, "trainable_frac": 0.1},
    "domain": {
        name: {"before": 2.0, "after": 1.0 if name != "bits_per_character" else None}
        for name in ("mlm_loss", "mlm_accuracy", "bits_per_character")
    },
    "general": {"mlm_accuracy": {"before": None, "after": None}},
    "train": {"steps": 12, "tokens": 99, "tokens_per_second": 9.0, "data_wait_frac": 0, "wall_seconds": 11.0},
}


@pytest.mark.parametrize("content", [json.dumps(SUMMARY)[:-40], "", "null", '{"train": {"steps": 12}}'])
def test_a_damaged_summary_is_one_sentence(tmp_path: Path, content: str) -> None:
    run = lay_out(tmp_path / "run")
    (run / "export").mkdir()
    (run / "report.html").touch()
    path = run / "summary.json"
    path.write_text(json.dumps(SUMMARY))
    assert read_summary(path) == SUMMARY
    path.write_text(content)
    with pytest.raises(RunError, match=r"summary\.json .*delete it and run the job again") as raised:
        is_finished(run, CONFIG)
    assert len(str(raised.value).splitlines()) == 1


def test_a_run_without_its_options_is_not_finished(tmp_path: Path) -> None:
    run = lay_out(tmp_path / "run")
    (run / "export").mkdir()
    (run / "report.html").touch()
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    assert is_finished(run, CONFIG)
    (run / "config.yaml").write_text("train: {")
    assert not is_finished(run, CONFIG)


def test_a_summary_of_wrong_types_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for name, value in (("steps", "12"), ("steps", True), ("tokens", None), ("wall_seconds", [])):
        path.write_text(json.dumps({**SUMMARY, "train": {**SUMMARY["train"], name: value}}))
        with pytest.raises(RunError, match=f"train.{name} = .* wrong type"):
            read_summary(path)


@pytest.mark.parametrize(
    ("error", "is_kept"), [(KeyboardInterrupt, True), (SystemExit, True), (RunError, True), (CorpusError, False)]
)
def test_a_job_that_is_stopped_leaves_what_it_learned(
    tmp_path: Path, error: type[BaseException], is_kept: bool
) -> None:
    run = tmp_path / "runs" / "new"
    with pytest.raises(error), hold_run(run):
        (run / "tokenizer").mkdir()
        raise error
    assert (run / "tokenizer").exists() == (tmp_path / "runs").exists() == is_kept
    with pytest.raises(error), hold_run(tmp_path / "other" / "empty"):
        raise error
    assert not (tmp_path / "other").exists()
