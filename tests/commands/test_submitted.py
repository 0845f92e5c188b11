"""Paths of options: ~ is the home folder, and what a submitted job reads is found, and what it writes outlives Ray."""

from __future__ import annotations

import functools
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from conftest import write_corpus
from given_options import parse_config

import domext_ray
from domext_ray.commands.job import configure
from domext_ray.commands.main import JOBS, find_job
from domext_ray.config.mixture import NO_TEXT, SELF
from domext_ray.config.options import submitted
from domext_ray.config.options.build import Given, describe_difference, read_values
from domext_ray.config.options.declare import MODELS, OPTIONS, TEXTS, WRITTEN
from domext_ray.config.options.kinds import Option, list_options
from domext_ray.config.options.submitted import ROLES, settle_paths
from domext_ray.config.pretrain import REPAIR_NOTES, PretrainConfig
from domext_ray.errors import ConfigError, CorpusError, DomextError, OptionError
from domext_ray.families.sets import load_labelled
from domext_ray.text.data.files import PACKAGE_DOCS
from domext_ray.text.data.names import SHIPPED_BASE

NO_PATHS = """
adapter adapters field features.layers finetune.features.layers finetune.grid.stage_epochs finetune.grid.stage_lr
finetune.labelled.metric finetune.method.active_adapters finetune.method.adapter finetune.method.layers
finetune.method.name finetune.run.name finetune.scale.wait grid.stage_epochs grid.stage_lr host labelled.metric layers
method.active_adapters method.adapter method.layers method.name methods name prepare.field prepare.group_field
prepare.pair push remove run.name scale.wait search.axis search.curves split submission tokens_by_method
""".split()
"""Options that are text, or have text in them, and no path."""
GIVEN = {TEXTS: "notes/*.txt,{}", MODELS: "old=general-mini,{}", OPTIONS: '{{"deep": [{{"vocab.words": "{}"}}]}}'}
"""How an option of a kind has a path beside something else."""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working directory of a submitted job, in which this process is now, and its ~/domext_runs."""
    here, home = tmp_path / "session" / "_ray_pkg_1", tmp_path / "home"
    for folder in (here / "notes", home / "domext_runs"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    metadata = {"job_submission_id": "raysubmit_1"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": metadata}))
    write_corpus(here / "notes" / "a.txt", 90)
    return here, home / "domext_runs"


def list_texts() -> dict[str, Option]:
    """Every option of every job that may have a path: what is a text, a list of texts, or a mapping."""
    options = [pair for job in JOBS.values() for pair in list_options(job.config_class).items()]
    return {
        f"{option.owner.__name__}.{name}": option
        for name, option in options
        if {str, dict} & {option.kind, option.item}
    }


def test_every_option_says_whether_it_is_a_path() -> None:
    plain = {option.name for option in list_texts().values() if not option.tags & ROLES}
    assert plain == {*NO_PATHS}, "a new option is one of declare's Read, Written, Texts, …, or has no path"
    assert not [name for name, option in list_texts().items() if option.tags & ROLES and option.name in NO_PATHS]


def give(option: Option, path: str) -> Any:
    """Return a value of an option that has a path in it, beside something else where its kind takes that."""
    role = next((tag for tag in GIVEN if tag in option.tags), "")
    text = GIVEN.get(role, "{}").format(path)
    if role == OPTIONS:
        return {"deep": [{"vocab.words": path}], "corpus": path, "vocab": {"extend": path, "size": 3}}
    return tuple(text.split(",")) if option.is_list else text


def settle(option: Option, value: Any) -> Any:
    return submitted._map_paths(option, value, PretrainConfig, submitted._settle)


@pytest.mark.parametrize("name", [name for name, option in list_texts().items() if option.tags & ROLES])
def test_every_path_is_settled(name: str, folders: tuple[Path, Path]) -> None:
    here, home = folders
    option = list_texts()[name]
    given = functools.partial(give, option)
    (home / "af").mkdir()
    (home / "af" / "mine.yaml").touch()
    moved = str(home / "af" / "mine.yaml")
    for path in ("runs/af/mine.yaml", "./runs/af/mine.yaml", "af/mine.yaml"):
        assert settle(option, given(path)) == given(moved)
    for path in ("/data/mine.yaml", "s3://bucket/mine.yaml", "hf://owner/name", "general-mini", "none"):
        assert settle(option, given(path)) == given(path)
    assert settle(option, given("~/mine.yaml")) == given(str(home.parent / "mine.yaml"))
    (here / "af").mkdir()
    (here / "af" / "mine.yaml").touch()
    stays = WRITTEN not in option.tags
    assert settle(option, given("af/mine.yaml")) == given("af/mine.yaml" if stays else moved), "this one goes first"
    new = "af/new.yaml"
    assert settle(option, given(new)) == given(new if stays else str(home / new))
    if not stays:
        with pytest.raises(OptionError, match=r"it must be a path without \.\., which a submitted job has below ~/dom"):
            settle(option, "../vectors")


def test_names_of_what_ships_are_no_paths() -> None:
    assert {*submitted.NAMES} == {SHIPPED_BASE, PACKAGE_DOCS, REPAIR_NOTES, NO_TEXT, SELF}


def test_other_jobs_have_their_paths_as_they_are(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    (folders[1] / "af").mkdir()
    config = parse_config(PretrainConfig, "", ["--init_from", "runs/af", "--base", "af"])
    assert settle_paths(config, list_options(PretrainConfig), PretrainConfig) is config


def test_every_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, option in list_texts().items():
        if option.tags & ROLES:
            expected = give(option, f"{tmp_path}/a/mine.yaml")
            assert settle(option, give(option, "~/a/mine.yaml")) == expected, name
            for path in ("a/~/mine.yaml", "/data/~mine.yaml", "~nobody-here/mine.yaml", "s3://bucket/~/mine.yaml"):
                assert settle(option, give(option, path)) == give(option, path), name
    assert settle(list_texts()["ForgettingConfig.models"], ("old = ~/a",)) == (f"old ={tmp_path}/a",)


@pytest.mark.parametrize("way", ["flag", "yaml", "python"])
def test_a_labelled_set_in_the_home_folder(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "sets" / "ner"
    data.mkdir(parents=True)
    for split in ("dev", "test"):
        (data / f"{split}.txt").write_text("Ilvera B-ALLOY\nholds O\n")
    (tmp_path / "mine.tsv").write_text("Orrin B-ALLOY\nbends O\n")
    (tmp_path / "mine.yaml").write_text("task: ner\nfiles: {train: ~/mine.tsv}\n")
    (tmp_path / "config.yaml").write_text("task: ~/mine.yaml\ndata: ~/sets/ner\n")
    job, options = JOBS["finetune"], {"task": "~/mine.yaml", "data": "~/sets/ner"}
    flags = ["--config=~/config.yaml"] if way == "yaml" else [f"--{name}={value}" for name, value in options.items()]
    given = Given(read_values(job.config_class, options)) if way == "python" else job.read(flags)
    config = configure(job, given)
    assert config.data == str(data)
    assert load_labelled(config).train[0].words[0] == "Orrin"


def test_the_corpus_is_kept_as_it_was_written(tmp_path: Path) -> None:
    corpus = "notes/a.txt, notes/b.txt"
    config = PretrainConfig(corpus=corpus)
    assert settle_paths(config, list_options(PretrainConfig), PretrainConfig) is config


def test_a_run_whose_words_were_in_the_home_folder_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    old, new = ({"vocab": {"words": words}} for words in ("~/words", f"{tmp_path}/words"))
    assert describe_difference(old, new) == []
    assert describe_difference(new, old) and describe_difference(old, {"vocab": {"words": "/words"}})


WHOLE = {
    "pretrain af --corpus notes --run.dir runs/x": {"corpus": "notes", "run.dir": "{home}/x"},
    "pretrain af --corpus notes,more/*.txt,package-docs": {
        "corpus": "notes,{home}/more/*.txt,package-docs",
        "run.dir": "{home}",
        "base": "general-mini",
    },
    "pretrain exbert --corpus notes --config af/config.yaml": {"vocab.words": "{home}/af", "init_from": "{home}/af"},
    "embed --input notes/a.txt --model runs/af --output vectors": {"model": "{home}/af", "output": "{home}/vectors"},
    "predict --input more --model runs/bank:clinic --output runs/found": {
        "input": "{home}/more",
        "model": "{home}/bank:clinic",
        "output": "{home}/found",
    },
    "finetune --task ner --data more": {"task": "ner", "data": "{home}/more", "run.dir": "{home}"},
    "compare runs --runs runs/af,more/": {"runs": ("{home}/af", "{home}/more"), "output": "{home}/comparison.png"},
    "evaluate forgetting --models base=general-mini,runs/af,b=more --corpus notes": {
        "models": ("base=general-mini", "{home}/af", "b={home}/more"),
        "output": "{home}/forgetting",
    },
    "export hf --run runs/af": {"run": "{home}/af", "output": ""},
    "bank --bank bank --add runs/af --name x": {"bank": "{home}/bank", "add": "{home}/af"},
    "bank --bank new --add runs/af --name x": {"bank": "{home}/new"},
    "bank --bank shipped": {"bank": "shipped"},
    "serve --bank runs/bank": {"bank": "{home}/bank"},
    "verify runs/af": {"path": "{home}/af"},
    "env": {"run.dir": "{home}"},
    "sweep": {"run.dir": "{home}", "finetune.run.dir": "runs", "corpus": "repair-notes"},
    "compare --seconds 9 --corpus notes": {"run.dir": "{home}", "finetune.run.dir": "runs"},
}


@pytest.mark.parametrize("command", WHOLE)
def test_a_job_is_read_with_its_paths(command: str, folders: tuple[Path, Path]) -> None:
    here, home = folders
    for folder in ("af", "bank", "more"):
        (home / folder).mkdir()
    (here / "shipped").mkdir()
    write_corpus(home / "more" / "b.txt", 9)
    (home / "af" / "config.yaml").write_text("vocab: {size: 0, words: runs/af}\ninit_from: af\n")
    job, words = find_job(command.split())
    config = configure(job, job.read(words))
    for name, expected in WHOLE[command].items():
        value = attrgetter(name)(config)
        places = tuple(place.format(home=home) for place in expected) if isinstance(expected, tuple) else None
        assert value == (places or str(expected).format(home=home)), name


REFUSED = {
    "embed --input notes --output v --model runs/nope/a/b": (DomextError, "'runs/nope/a/b' was .* as {home}/nope/a/b"),
    "embed --input nope/*.txt --output v": (CorpusError, r"^--input 'nope/\*.txt' names .* as {home}/nope/\*.txt\.\)$"),
    "pretrain af --corpus nope": (CorpusError, "'nope' was looked for in the working directory of .* as {home}/nope"),
    "pretrain af --config nope.yaml": (ConfigError, "names 'nope.yaml', which .* as {home}/nope.yaml"),
    "finetune --task ner --data a/b/c": (ConfigError, "--data is 'a/b/c', which .*'a/b/c' was looked for"),
    "bank --bank shipped --remove x": (OptionError, "must be absolute, or below ~/domext_runs: .* is gone with it"),
    "verify nope": (ConfigError, "--path names 'nope', which does not exist; .* as {home}/nope"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_says_where_it_was_looked_for(command: str, folders: tuple[Path, Path]) -> None:
    (folders[0] / "shipped").mkdir()
    (job, words), (kind, says) = find_job(command.split()), REFUSED[command]
    with pytest.raises(kind, match=says.format(home=folders[1])):
        job.start(job.read(words))


def test_what_would_be_written_into_the_copy_is_refused(folders: tuple[Path, Path]) -> None:
    (folders[0] / "shipped").mkdir()
    for command in ("export hf --run shipped", "ablate --study spans --finetuned shipped"):
        job, words = find_job(command.split())
        with pytest.raises(OptionError, match="it must be absolute, or below ~/domext_runs, or given with --output"):
            job.start(job.read(words))


def test_in_python_too(folders: tuple[Path, Path], tiny_base_folder: Path) -> None:
    options: dict[str, Any] = {"train.max_steps": 2, "run.name": "clinic", "replay.corpus": "none", "dry_run": True}
    run = domext_ray.pretrain("af", base=tiny_base_folder, corpus="notes", **options)
    assert run.directory == folders[1] / "clinic"
    run.directory.mkdir()
    assert domext_ray.Run("runs/clinic").directory == domext_ray.Run("clinic").directory == run.directory
    with pytest.raises(CorpusError, match=rf"'nope' was looked for .* as {folders[1]}/nope"):
        domext_ray.pretrain("af", base=tiny_base_folder, corpus="nope", **options)
    assert not [*folders[0].glob("**/domext_runs")] and [path.name for path in folders[0].iterdir()] == ["notes"]
