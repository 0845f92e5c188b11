"""Where entities begin and end: invisible characters around them, and offsets that count something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled_fixtures import dump_lines, load, refuse, write

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.families.nested import SpanTask
from domext_ray.families.readers.examples import AnnotatedText, Entity, LabelledSet, RawSentence, read_tags
from domext_ray.families.readers.words import INVISIBLE
from domext_ray.families.sets import load_labelled
from domext_ray.families.tagging import TokenClassificationTask
from domext_ray.families.task import TaskOptions
from domext_ray.inference.examples import make_example

Count = Callable[[str], int]
COUNTS: dict[str, Count] = {
    "UTF-16 code units": lambda text: len(text.encode("utf-16-le")) // 2,
    "bytes of UTF-8": lambda text: len(text.encode()),
}


def find(text: str, mention: str, count: Count = len, /, **more: Any) -> dict[str, Any]:
    """An entity of a text, with offsets as a tool counts them."""
    start = text.index(mention)
    return {"start": count(text[:start]), "end": count(text[: start + len(mention)]), "type": "Drug", **more}


def list_mentions(made: LabelledSet) -> list[list[str]]:
    """The entities' texts as training has them."""
    found = []
    for each in made.train:
        if isinstance(each, AnnotatedText):
            found.append([each.text[entity.start : entity.end] for entity in each.entities])
        else:
            assert isinstance(each, RawSentence)
            places = [(each.offsets[own.start][0], each.offsets[own.end - 1][1]) for own in read_tags(each.tags)]
            found.append([each.text[start:end] for start, end in places])
    return found


def read(folder: Path, task: str, rows: list[dict[str, Any]], **description: Any) -> LabelledSet:
    reader = "spans" if task == "ner" else "records"
    return load(folder, task, {"train.jsonl": dump_lines(rows)}, reader=reader, **description)


AROUND = [" ", "\u00a0", "\ufeff", "\u200d", "\u00ad", "\u200b", "\u2060\u3000", "\u202a"]


@pytest.mark.parametrize("task", ["ner", "nested_ner"])
def test_what_is_invisible_around_an_entity_is_no_part_of_it(tmp_path: Path, task: str) -> None:
    rows = []
    for each in AROUND:
        text = f"took {each}aspirin{each} daily"
        rows += [{"text": text, "spans": [find(text, f"{each}aspirin{each}", text=f"{each}aspirin{each}")]}]
        rows += [{"text": text, "spans": [find(text, f"{each}aspirin{each}", text="aspirin")]}]
    made = read(tmp_path, task, rows)
    assert list_mentions(made) == [["aspirin"]] * len(rows)
    assert not any(each.misplaced for each in made.train)  # type: ignore[union-attr]
    fault = f"{2 * len(rows)} x entity trimmed: it begins or ends with white space or an invisible character ("
    assert any(each.startswith(fault) for each in made.notes)


@pytest.mark.parametrize("task", ["ner", "nested_ner"])
def test_an_entity_of_nothing_visible_is_empty(tmp_path: Path, task: str) -> None:
    text = "took \u00ad\u200d aspirin"
    empty = [find(text, "\u00ad\u200d", text="\u00ad\u200d"), {"start": 3, "end": 3, "type": "Drug", "text": ""}]
    made = read(tmp_path, task, [{"text": text, "spans": [find(text, "aspirin", text="aspirin"), *empty]}])
    assert list_mentions(made) == [["aspirin"]]
    assert any(each.startswith("4 x entity left out: it is empty (") for each in made.notes)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_no_entity_is_found_that_begins_or_ends_with_something_invisible(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer, options = request.getfixturevalue(kind), TaskOptions(max_length=64)
    record = {"text": "\ufeffthe \u200ddog\u00ad, \u2060 \u00a0cat\u200e"}
    sentence = make_example("ner", record, "record 1")
    words = TokenClassificationTask(
        LabelledSet("made", (sentence,), (sentence,), (sentence,), ("Drug",)), tokenizer, options
    )
    rows = words.encode([sentence], is_training=False)
    (found,) = words.decode([sentence], rows, [(np.tile([0.0, 1.0, 0.0], (each.length, 1)),) for each in rows])
    assert [each["text"] for each in found["entities"]] == ["the", "dog", ",", "cat"]
    text = make_example("nested_ner", record, "record 1")
    spans = SpanTask(LabelledSet("made", (text,), (text,), (text,), ("Drug",)), tokenizer, options)
    rows = spans.encode([text], is_training=False)
    size = rows[0].length
    pairs = [[0, first, last, 1.0] for first in range(size) for last in range(first, min(first + 8, size))]
    (found,) = spans.decode([text], rows, [(np.array(pairs),)])
    assert {"the", "dog", "cat"} <= {each["text"] for each in found["entities"]}
    assert not any({each["text"][0], each["text"][-1]} & INVISIBLE for each in found["entities"])
    nothing = make_example("ner", {"text": "\ufeff"}, "record 1")
    rows = words.encode([nothing], is_training=False)
    assert words.decode([nothing], rows, [(np.zeros((each.length, 3)),) for each in rows])[0]["entities"] == []


def make_rows(count: Count, *, has_text: bool, num_plain: int = 3) -> list[dict[str, Any]]:
    """Texts with an emoji and a ü before the entity, and without, so that all units, or none, are the same."""
    texts = [*[f"\U0001f525 für drug{i} aspirin" for i in range(4)], *[f"old{i} aspirin" for i in range(num_plain)]]
    more = {"text": "aspirin"} if has_text else {}
    return [{"text": text, "spans": [find(text, "aspirin", count, **more)]} for text in texts]


@pytest.mark.parametrize("unit", COUNTS)
@pytest.mark.parametrize("task", ["ner", "nested_ner"])
def test_own_texts_tell_what_offsets_count(tmp_path: Path, task: str, unit: str) -> None:
    rows = make_rows(COUNTS[unit], has_text=True)
    text = "\U0001f525 für nothing and aspirin"
    lost = {"start": 0, "end": 3, "type": "Drug", "text": "gone"}
    rows += [{"text": text, "spans": [find(text, "aspirin", COUNTS[unit]), lost]}] if task == "ner" else []
    made = read(tmp_path, task, rows)
    assert list_mentions(made) == [["aspirin"]] * len(rows), "one without a text, too"
    num_moved = 2 * (4 + (task == "ner"))
    assert any(each.startswith(f"{num_moved} x entity moved: it has offsets in {unit} (") for each in made.notes)
    assert not made.warnings


@pytest.mark.parametrize("unit", COUNTS)
def test_inclusive_ends_may_count_another_unit(tmp_path: Path, unit: str) -> None:
    rows = make_rows(COUNTS[unit], has_text=True)
    for row in rows:
        row["spans"][0]["end"] -= 1
    assert list_mentions(read(tmp_path, "nested_ner", rows)) == [["aspirin"]] * len(rows)


def test_texts_that_contradict_leave_offsets_alone(tmp_path: Path) -> None:
    """Some entities are where they say, so that the others are lost for another reason."""
    rows = make_rows(COUNTS["UTF-16 code units"], has_text=True)[:2] + make_rows(len, has_text=True)[:1]
    made = read(tmp_path, "ner", rows)
    assert [len(each) for each in list_mentions(made)] == [0, 0, 1]
    assert any(each.startswith("4 x entity left out: it is not where its offsets say") for each in made.notes)


@pytest.mark.parametrize("unit", COUNTS)
def test_offsets_that_look_as_if_they_counted_something_else_are_told(
    tmp_path: Path, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(COUNTS[unit], has_text=False)
    rows += [{"text": "unlike", "spans": [[0, 2, "Drug"]]}]  # inside a word, whatever is counted
    made = read(tmp_path, "ner", rows)
    assert len(made.warnings) == 2, "train, and the same file as dev"
    assert made.warnings[0].startswith(
        f"4 of 8 entities begin or end inside a word, at a space or outside of their text ({tmp_path}/train.jsonl:1, "
    )
    assert f"and none would if offsets counted {unit}, as " in made.warnings[0] and {*made.warnings} <= {*made.notes}
    write(tmp_path / "dev.jsonl", dump_lines(rows))
    write(tmp_path / "set.yaml", "task: ner\nreader: spans\n")
    load_labelled(FinetuneConfig(task="ner", data=str(tmp_path)))
    assert capsys.readouterr().out.count("warning: 4 of 8 entities begin") == 2


@pytest.mark.parametrize("unit", COUNTS)
def test_the_cure_of_a_warning_converts_offsets(tmp_path: Path, unit: str) -> None:
    made = read(tmp_path, "ner", make_rows(COUNTS[unit], has_text=False))
    cure = made.warnings[0].partition("make characters of them (")[2].partition("), or give")[0]
    text = "\U0001f525 für aspirin"
    offset = COUNTS[unit](text[: text.index("aspirin")])
    assert eval(cure, {"len": len, "text": text, "offset": offset}) == text.index("aspirin")


def letter(text: str, place: int) -> dict[str, Any]:
    return {"text": text, "spans": [[place, place + 1, "Grade"]]}


def test_offsets_that_fit_either_way_are_told_where_they_are_many(tmp_path: Path) -> None:
    """Of words of one letter each is a whole word, one place further as well."""
    odd = [letter(f"\U0001f525\U0001f9ea a b c d of {i}", 7) for i in range(4)]
    plain = [letter(f"x a b c of lot {i}", 2) for i in range(60)]
    fits = "whole words whichever of them offsets count: the one of"
    for i, (rows, is_told) in enumerate(
        [
            (odd, True),
            (odd + plain[:30], True),
            (odd[:1] + plain, False),
            (plain, False),
            ([letter("a b c \U0001f525", 2)], False),
            (odd + [{"text": "\U0001f525 aspirin", "spans": [[2, 9, "Drug"]]}], False),
            ([{**each, "spans": [{"start": 7, "end": 8, "label": "Grade", "text": "c"}]} for each in odd], False),
            ([{"text": f"\U0001f525慢性胃炎伴胃痛{i}", "spans": [[3, 5, "Sign"]]} for i in range(4)], False),
        ]
    ):
        warnings = read(tmp_path / str(i), "ner", rows).warnings
        assert [fits in each for each in warnings] == [True] * (2 * is_told), (i, warnings)
    warning = read(tmp_path / "0", "ner", odd).warnings[0]
    assert warning.startswith("4 of 4 entities stand behind characters such as '\U0001f525', which is several UTF-16")
    assert "train.jsonl:1 is 'c' in characters, as it is read, and 'b' in UTF-16 code units;" in warning


@pytest.mark.parametrize("place", [(5, 12), (5.0, 12.0), ("5", "12"), ("5.0", " 12 ")])
def test_offsets_are_whole_numbers_however_they_are_written(tmp_path: Path, place: tuple[Any, Any]) -> None:
    start, end = place
    forms: list[Any] = [[start, end, "Drug"], [start, end, "Drug", "aspirin"], ["Drug", start, end]]
    forms += [{"start": start, "end": end, "label": "Drug"}]
    rows = [{"text": "took aspirin", "spans": [each]} for each in forms]
    assert list_mentions(read(tmp_path, "ner", rows)) == [["aspirin"]] * len(forms)
    row = {"question": "What?", "context": "took aspirin", "answers": [{"text": "aspirin", "answer_start": start}]}
    made = load(tmp_path / "qa", "qa", {"train.jsonl": dump_lines([row])}, reader="records")
    assert made.train[0].answers == (Entity(5, 12, ""),)  # type: ignore[union-attr]


def test_spans_that_their_annotator_rejected_are_counted(tmp_path: Path) -> None:
    text = "took aspirin and heparin"
    spans = [
        find(text, "aspirin", answer="accept"),
        find(text, "took", answer="reject"),
        find(text, "and", answer="ignore"),
    ]
    made = read(tmp_path, "ner", [{"text": text, "spans": spans}])
    assert list_mentions(made) == [["aspirin"]] and not made.train[0].misplaced  # type: ignore[union-attr]
    for answer in ("reject", "ignore"):
        assert any(each.startswith(f"2 x entity left out: it is marked {answer!r} by its") for each in made.notes)


def test_several_types_of_a_stretch_are_entities_that_nest(tmp_path: Path) -> None:
    row = {"text": "took aspirin", "label": [{"start": 5, "end": 12, "text": "aspirin", "labels": ["Drug", "Brand"]}]}
    made = read(tmp_path, "nested_ner", [row])
    assert made.train[0].entities == (Entity(5, 12, "Brand"), Entity(5, 12, "Drug"))  # type: ignore[union-attr]
    message = refuse(tmp_path, "ner", {}, reader="spans")
    assert message.startswith(
        "train.jsonl:1 has an entity with the labels 'Drug' and 'Brand', but in ner a word has one"
    )
