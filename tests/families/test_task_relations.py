"""Relations of marked pairs: marks stand where the stretches are, and stay when a text is cut."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from brief_training import answer_by_targets
from conftest import WORDS
from finetuned_models import draw_set
from transformers import BertTokenizer, PreTrainedTokenizerBase

from domext_ray.errors import ConfigError
from domext_ray.families.readers.examples import Entity, LabelledSet, MarkedText
from domext_ray.families.relations import RelationTask, choose_pieces, find_marks, mark_text
from domext_ray.families.task import TaskOptions
from domext_ray.families.triples import ExtractionTask
from domext_ray.text.vocabulary.extension import BaseVocabulary, extend_tokenizer
from domext_ray.text.vocabulary.family import tokenizer_family

LABELS = ("none", "likes", "fears")


def make_marked(text: str, label: str = "none", number: int = 0) -> MarkedText:
    """ "the <<cat>> of a [[man]]" -> head "cat", tail "man"; the marks may nest."""
    places: dict[str, int] = {}
    plain = ""
    while text:
        for mark in ("<<", ">>", "[[", "]]"):
            if text.startswith(mark):
                places[mark] = len(plain)
                text = text[2:]
                break
        else:
            plain, text = plain + text[0], text[1:]
    head, tail = Entity(places["<<"], places[">>"], ""), Entity(places["[["], places["]]"], "")
    return MarkedText(str(number), f"made.jsonl:{number + 1}", plain, head, tail, label)


def make_set(*texts: tuple[str, str]) -> LabelledSet:
    examples = tuple(make_marked(text, label, i) for i, (text, label) in enumerate(texts))
    return LabelledSet("made", examples, examples, examples, LABELS, "none")


THREE = make_set(
    ("the <<cat>> walk to a [[dog]]", "likes"), ("[[rain]] and <<wind>>", "none"), ("a <<man>> of [[sun]]", "none")
)


def test_marks_surround_the_stretches() -> None:
    for text, expected in (
        ("the <<cat>> of a [[man]].", "the  @ cat @  of a  # man # ."),
        ("[[man]]: <<cat>>", " # man # :  @ cat @ "),
        ("anti<<TNF>>-[[x]]", "anti @ TNF @ - # x # "),
        ("<<@GENE$>> and [[@DISEASE$]]", " @ @GENE$ @  and  # @DISEASE$ # "),
        ("<<big [[cat]]>> run", " @ big  # cat #  @  run"),
        ("<<[[big]] cat>> run", " @  # big #  cat @  run"),
        ("[[<<cat>>fish]]", " #  @ cat @ fish # "),
        ("<<cat>>[[fish]]", " @ cat @  # fish # "),
        ("<<one [[two>> three]]", " @ one  # two @  three # "),
    ):
        marked, marks = mark_text(make_marked(text), ("@", "#"))
        assert marked == expected and [marked[each] for each in marks] == ["@", "@", "#", "#"]
        example = make_marked(text)
        for span, (opened, closed) in ((example.head, marks[:2]), (example.tail, marks[2:])):
            inside = marked[opened + 1 : closed].replace(" # ", "").replace(" @ ", "")
            assert inside.replace(" ", "") == example.text[span.start : span.end].replace(" ", "")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_positions_are_those_of_the_opening_marks(name: str, request: pytest.FixtureRequest) -> None:
    """Marks of the text's own, and special tokens in it, are not mistaken for them."""
    tokenizer = request.getfixturevalue(name)
    data = make_set(
        ("the <<cat>> walk, to a [[dog]].", "likes"),
        ("[[rain.]] . , @ # <<,wind>> , .", "none"),
        ("[SEP] </s> <<[SEP]>> of [[</s>]]", "none"),
    )
    task = RelationTask(data, tokenizer, TaskOptions())
    for row, example in zip(task.encode(data.train, is_training=True), data.train, strict=True):
        positions = row.targets["input_entity_positions"]
        assert positions.dtype == np.int64 and positions.shape == (2,)
        for position, span, mark in zip(positions, (example.head, example.tail), task.state["written"], strict=True):
            rest = tokenizer.decode(row.input_ids[position:]).replace(" ", "")
            entity = tokenizer.decode(
                tokenizer.encode(
                    example.text[span.start : span.end].replace("[SEP]", "").replace("</s>", ""),
                    add_special_tokens=False,
                )
            )
            assert rest.startswith(mark + entity.replace(" ", ""))
        special = np.isin(row.input_ids, [tokenizer.cls_token_id, tokenizer.sep_token_id])
        assert np.flatnonzero(special).tolist() == [0, row.length - 1]
        assert row.token_type_ids is None
    batch = task.collate(task.encode(data.train, is_training=True))
    assert batch.inputs["entity_positions"].shape == (3, 2)  # type: ignore[union-attr]
    assert batch.targets.keys() == {"labels"} and batch.num_targets == 3


def test_marks_are_characters_of_the_vocabulary(
    bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase
) -> None:
    assert find_marks(roberta) == ["@", "#"]
    assert find_marks(bert) == ["!", "?"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    poor = BertTokenizer(vocab={each: i for i, each in enumerate([*specials, "the", "#"])})
    with pytest.raises(ConfigError, match="the model's vocabulary has 1 of the characters @#"):
        RelationTask(THREE, poor, TaskOptions())


def test_marks_are_words_of_the_base(bert: PreTrainedTokenizerBase) -> None:
    """New words are hardly trained. What 0.1.0 exported has the marks that it was trained with."""
    known = BaseVocabulary("base", tokenizer_family(bert), bert, bert.get_vocab(), "")
    extended = extend_tokenizer(known, ["@", "#"])
    task = RelationTask(THREE, extended, TaskOptions(), base_words=len(bert))
    rows = task.encode(THREE.train, is_training=True)
    opened = [extended.convert_ids_to_tokens(row.input_ids[row.targets["input_entity_positions"]]) for row in rows]
    assert opened == [["!", "?"]] * 3 and task.identity == {"marks": ["!", "?"]}
    assert task.state_dict() == {"marks": [], "written": ["!", "?"]}
    assert RelationTask(THREE, extended, TaskOptions(), state=task.state_dict()).state == task.state
    released = RelationTask(THREE, extended, TaskOptions(), state={"marks": []})
    assert released.state["written"] == ["@", "#"] and released.state_dict() == {"marks": []}
    plain = RelationTask(THREE, bert, TaskOptions(), base_words=len(bert))
    assert plain.state_dict() == {"marks": []} and not plain.identity, "the same files as before"
    triples = ExtractionTask(draw_set("relation_extraction"), extended, TaskOptions(), base_words=len(bert))
    assert triples.relation_task.state["written"] == ["!", "?"] == triples.identity["marks"]


def test_cut_texts_keep_what_is_nearest() -> None:
    for seed in range(400):
        draw = np.random.default_rng(seed)
        size = int(draw.integers(5, 60))
        marks = np.sort(draw.choice(size, 4, replace=False))
        kind = int(draw.integers(3))
        marks = marks[[[0, 1, 2, 3], [2, 3, 0, 1], [0, 3, 1, 2]][kind]]
        room = int(draw.integers(4, 60))
        kept, lost = choose_pieces(size, marks.tolist(), room)
        assert len(kept) == min(room, size) and (np.diff(kept) > 0).all(), seed
        assert {*marks} <= {*kept.tolist()}, seed
        first, last = marks.min(), marks.max()
        if size <= room:
            assert lost == 0, seed
        elif last + 1 - first <= room:
            assert lost == 3 and (np.diff(kept) == 1).all(), seed
            left, right = first - kept[0], kept[-1] - last
            assert abs(left - right) <= 1 or kept[0] == 0 or kept[-1] == size - 1, seed
        else:
            assert lost == 2 and kept[0] == first and kept[-1] == last, seed
            whole = sum(marks[i + 1] + 1 - marks[i] for i in (0, 2))
            if kind < 2 and whole <= room:
                assert all({*range(marks[i], marks[i + 1] + 1)} <= {*kept.tolist()} for i in (0, 2)), seed
                assert np.count_nonzero(np.diff(kept) > 1) == 1, "one gap, between the stretches"


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_both_marks_stay_in_a_row(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for max_length in (6, 9, 20, 40):
        draw, texts = random.Random(max_length), []
        for _ in range(30):
            words = draw.choices(WORDS, k=draw.randint(4, 40))
            i, j = sorted(draw.sample(range(len(words)), 2))
            words[i], words[j] = f"<<{words[i]}>>", f"[[{words[j]}]]"
            texts.append((" ".join(words), draw.choice(LABELS)))
        data = make_set(*texts)
        task = RelationTask(data, tokenizer, TaskOptions(max_length=max_length))
        rows = task.encode(data.train, is_training=True)
        marks = [tokenizer.encode(f" {mark}", add_special_tokens=False)[-1] for mark in task.state["written"]]
        for row in rows:
            assert row.length <= max_length
            assert row.input_ids[row.targets["input_entity_positions"]].tolist() == marks
            assert [np.count_nonzero(row.input_ids == mark) for mark in marks] == [2, 2]
        uncut = RelationTask(data, tokenizer, TaskOptions(max_length=1000)).encode(data.train, is_training=True)
        counted = [int(note.split(" of 30 texts ")[0]) for note in task.notes]
        assert sum(counted) == sum(row.length > max_length for row in uncut) > 0
        assert len(task.notes) <= 2 and all("made.jsonl:" in note for note in task.notes)
        assert [each["label"] for each in answer_by_targets(task, data.train)] == [each.label for each in data.train]


def test_scores_leave_the_negative_label_out(bert: PreTrainedTokenizerBase) -> None:
    task = RelationTask(THREE, bert, TaskOptions())
    assert task.head_labels == LABELS
    predictions = answer_by_targets(task, THREE.test)
    assert [each["label"] for each in predictions] == ["likes", "none", "none"]
    score = task.score(THREE.test, predictions)
    assert score.get("f1.micro") == 1.0
    majority = task.score(THREE.test, task.predict_baseline(THREE.test))
    assert majority.get("accuracy") == pytest.approx(2 / 3) and majority.get("f1.micro") == 0.0
    binary = replace(
        THREE,
        labels=("0", "1"),
        negative_label=None,
        **{split: tuple(replace(each, label="1") for each in THREE.train) for split in ("train", "dev", "test")},
    )
    task = RelationTask(binary, bert, TaskOptions(), metric="f1.positive")
    assert task.score(binary.test, [{"label": each} for each in "110"]).get(task.metric) == pytest.approx(0.8)
