"""The made sets: layout, determinism, and nothing of test that training tells."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import made_data
import made_words
import pytest

from domext_ray.labelled.examples import SPLITS, AnnotatedText, Choice, LabelledSet, Mention, Question
from domext_ray.labelled.readers.sets import load_set
from domext_ray.labelled.set_description import find_description

SIZES = {"train": 120, "dev": 40, "test": 60}
FAMILIES = {
    "relations": "relation_extraction",
    "relations_zh": "relation_extraction",
    "normalization": "normalization",
    "normalization_zh": "normalization",
    "multiple_choice": "multiple_choice",
    "qa_v1": "qa",
    "qa_v2": "qa",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    made_data.write_all(folder, sizes=SIZES)
    return folder


def read_set(folder: Path, name: str) -> LabelledSet:
    return load_set(find_description(FAMILIES[name], str(folder / name)), str(folder / name), strict=True)


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


def test_the_same_seed_makes_the_same_files(folder: Path, tmp_path: Path) -> None:
    random.seed(1)  # the global generator has no part in it
    made_data.write_all(tmp_path / "again", sizes=SIZES)
    made_data.write_all(tmp_path / "other", seed=1, sizes=SIZES)
    first, again, other = (read_bytes(each) for each in (folder, tmp_path / "again", tmp_path / "other"))
    assert len(first) == 4 * 4 + 3 * 3
    assert first == again
    assert {Path(name).parent.name for name in first} == set(FAMILIES)
    assert {name for name in first if first[name] == other[name]} <= {
        "relations/schema.jsonl",
        "relations_zh/schema.jsonl",
        "normalization_zh/catalogue.txt",  # every combination there is
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_readers_take_every_row(folder: Path, name: str) -> None:
    """Strict reading refuses a row that breaks any rule: offsets, schema, terms outside the catalogue."""
    data = read_set(folder, name)
    assert {split: len(getattr(data, split)) for split in SPLITS} == SIZES
    assert not [note for note in data.notes if "left out" in note]


def test_pools_share_no_word() -> None:
    for words in (made_words.NAMES, *(each.split() for each in made_words.ANSWERS.values())):
        assert len(set(words)) == len(words)
        pools = made_words.split_pool(words, 0)
        assert sorted(each for pool in pools.values() for each in pool) == sorted(words)
        assert min(map(len, pools.values())) >= 3
    everything = Counter(scene_word for words in made_words.SCENES.values() for scene_word in words.split())
    assert all(len(set(words.split())) == 12 for words in made_words.SCENES.values())
    assert everything["pan"] == 1


@pytest.mark.parametrize("name", ["relations", "relations_zh"])
def test_relations_have_new_names_in_test(folder: Path, name: str) -> None:
    data = read_set(folder, name)
    names: dict[str, set[str]] = {}
    for split in SPLITS:
        texts: list[AnnotatedText] = list(getattr(data, split))
        # One place a name, so that reading finds the place that was meant.
        assert all(t.text.count(t.text[e.start : e.end]) == 1 for t in texts for e in t.entities)
        names[split] = {text.text[each.start : each.end] for text in texts for each in text.entities}
        assert {each.label for text in texts for each in text.relations} == set(data.labels)
        assert {len(text.relations) for text in texts} == {1, 2, 3}
    assert not names["train"] & names["test"] and not names["train"] & names["dev"] and not names["dev"] & names["test"]


@pytest.mark.parametrize("name", ["normalization", "normalization_zh"])
def test_mentions_mean_new_terms_in_test(folder: Path, name: str) -> None:
    data = read_set(folder, name)
    terms: dict[str, set[str]] = {}
    for split in SPLITS:
        mentions: list[Mention] = list(getattr(data, split))
        terms[split] = {term for each in mentions for term in each.terms}
        assert {len(each.terms) for each in mentions} == {1, 2}
        # A term is seldom written as it stands in the catalogue.
        assert sum(each.text in each.terms for each in mentions) < 0.2 * len(mentions)
    assert not terms["train"] & terms["test"] and not terms["train"] & terms["dev"] and not terms["dev"] & terms["test"]
    assert set(data.catalogue) > terms["test"] and len(data.catalogue) == 200


def test_choices_tell_nothing_without_their_beginning(folder: Path) -> None:
    data = read_set(folder, "multiple_choice")
    all_choices: list[Choice] = [*data.train, *data.dev, *data.test]  # type: ignore[list-item]
    places = Counter(each.answer for each in all_choices)
    assert min(places.values()) > 0.15 * len(all_choices)
    for each in all_choices:
        assert len(set(each.options)) == 4 == len(each.options)
    right = {split: {c.options[c.answer] for c in getattr(data, split)} for split in SPLITS}
    assert not right["train"] & right["test"]
    # A thing is right about as often as the sizes of the pools say: every option comes from the same draw.
    wrong = Counter(option for c in all_choices for i, option in enumerate(c.options) if i != c.answer)
    shared = [option for option in wrong if any(option in each for each in right.values())]
    assert len(shared) > 0.5 * len(set().union(*right.values()))


def test_choices_have_swags_columns(folder: Path) -> None:
    with (folder / "multiple_choice" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
    assert ",".join(rows[0]) == expected
    assert rows[0]["startphrase"] == f"{rows[0]['sent1']} {rows[0]['sent2']}"
    right = [(row["sent1"].split(), row[f"ending{row['label']}"].rstrip(".").split()) for row in rows]
    repeated = sum(bool({w.rstrip(".") for w in first} & set(ending) - {"the"}) for first, ending in right)
    assert 0.35 < repeated / len(rows) < 0.65


@pytest.mark.parametrize("version", [1, 2])
def test_questions_have_squads_layout(folder: Path, version: int) -> None:
    for split in SPLITS:
        content: dict[str, Any] = json.loads((folder / f"qa_v{version}" / f"{split}.json").read_text(encoding="utf-8"))
        assert content["version"] == {1: "1.1", 2: "v2.0"}[version]
        impossible = []
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for each in paragraph["qas"]:
                    impossible.append(each.get("is_impossible"))
                    assert bool(each["answers"]) != bool(each.get("is_impossible"))
                    for answer in each["answers"]:
                        place = answer["answer_start"]
                        assert paragraph["context"][place : place + len(answer["text"])] == answer["text"]
                        assert paragraph["context"].count(answer["text"]) >= 1
        assert len(impossible) == SIZES[split]
        if version == 1:
            assert set(impossible) == {None}
        else:
            assert 0.15 < sum(impossible) / len(impossible) < 0.5


@pytest.mark.parametrize("name", ["qa_v1", "qa_v2"])
def test_questions_have_new_people_and_answers_in_test(folder: Path, name: str) -> None:
    data = read_set(folder, name)
    answers: dict[str, set[str]] = {}
    for split in SPLITS:
        questions: list[Question] = list(getattr(data, split))
        answers[split] = {text for each in questions for text in each.answer_texts}
        # The question's person is in the passage, also where there is no answer.
        for each in questions:
            assert any(word in made_words.NAMES and word in each.context for word in each.question.strip("?").split())
    assert not answers["train"] & answers["test"]
    # The best constant: no answer of test is frequent, nor always at one place.
    counts = Counter(text for each in data.test for text in each.answer_texts)  # type: ignore[union-attr]
    assert counts.most_common(1)[0][1] < 0.15 * SIZES["test"]


def test_some_unanswerable_questions_are_told_of_another_person(folder: Path) -> None:
    """Then the kind of the fact is in the passage, and only the person tells that there is no answer."""
    data = read_set(folder, "qa_v2")
    facts = [(question.split("{n}")[0], sentence.split("{")[1][2:]) for sentence, question in made_data.FACTS.values()]
    told = [
        any(each.question.startswith(asked) and words in each.context for asked, words in facts)
        for each in data.train
        if isinstance(each, Question) and not each.answers
    ]
    assert 0.3 < sum(told) / len(told) < 0.95
