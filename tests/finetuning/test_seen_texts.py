"""Texts to be scored that the start model has read as it was pre-trained: told where they are many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import write_corpus
from labelled_fixtures import load
from small_runs import make_config

from domext_ray.families.readers.examples import LabelledSet
from domext_ray.finetuning.seen_texts import describe_seen
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.models.start import StartModel
from domext_ray.pretraining.inputs import prepare_run
from domext_ray.pretraining.plan import resolve
from domext_ray.runs.run_directory import write_config, write_run
from domext_ray.text.vocabulary.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> StartModel:
    """A run whose text is prepared."""
    run = prepare_run(
        resolve(make_config(tiny_base_folder, write_corpus(tmp_path_factory.mktemp("read") / "a.txt", 400)))
    )
    Path(run.paths.run).mkdir(parents=True, exist_ok=True)
    write_config(run.paths.run, run.config)
    write_run(run.paths.run, identity=run.identity)
    return StartModel(str(run.paths.run), "run", DomextConfig(), {}, load_tokenizer(tiny_base_folder))


def make_set(folder: Path, start: StartModel, number: int) -> LabelledSet:
    """A set whose test has as many texts of the run's corpus among a hundred; those of train do not count."""
    lines = (Path(start.id).parent.parent / "a.txt").read_text(encoding="utf-8").splitlines()
    splits = {"train": lines, "dev": ["x"] * 100, "test": [*lines[: 2 * number], *["y"] * 100][:100]}
    files: dict[str, str | bytes] = {
        f"{split}.jsonl": "".join(
            json.dumps({"text": text if len(text) > 1 else f"{text} {i}", "label": i % 2}) + "\n"
            for i, text in enumerate(texts)
        )
        for split, texts in splits.items()
    }
    return load(folder, "classification", files)


def test_a_split_that_was_read_is_told(start: StartModel, tmp_path: Path) -> None:
    (told,) = describe_seen(start, make_set(tmp_path / "many", start, 40))
    assert told.startswith("warning: ") and " of the 100 different texts of test are training documents of " in told
    assert 70 <= int(told.split()[1]) <= 80  # the others are held out
    assert describe_seen(start, make_set(tmp_path / "few", start, 1)) == []


def test_only_a_run_whose_text_is_there_is_asked(start: StartModel, tmp_path: Path) -> None:
    data = make_set(tmp_path / "many", start, 40)
    exported = StartModel(start.id, "export", start.config, {}, start.tokenizer)
    assert describe_seen(exported, data) == []
    corpora = Path(start.id).parent / ".corpora"
    corpora.rename(corpora.with_name("moved"))
    assert describe_seen(start, data) == []
    corpora.with_name("moved").rename(corpora)
    assert describe_seen(start, data)
    for file in corpora.glob("*/documents-*.npy"):
        file.write_bytes(b"damaged")
    assert describe_seen(start, data) == []
