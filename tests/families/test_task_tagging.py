"""Token classification: every word tagged once whatever the windows, and valid IOB2."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brief_training import answer_by_targets
from conftest import WORDS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from domext_ray.families.losses import NO_TARGET
from domext_ray.families.readers.examples import Entity, LabelledSet, RawSentence, TaggedSentence
from domext_ray.families.readers.words import NO_MARKS, WordMarks, cut_words
from domext_ray.families.tagging import (
    TokenClassificationTask,
    assign_words,
    cut_again,
    encode_words,
    find_best_tags,
    grow_window,
    join_words,
    repair_tags,
    split_windows,
)
from domext_ray.families.task import TaskOptions
from domext_ray.text.vocabulary.tokenizer import make_backend

TYPES = ("Person", "Place")
DROPPED = "\x07"


def make_sentence(text: str, number: int = 0, document: str = "") -> TaggedSentence:
    """ "the/B-Person dog/I-Person runs" -> a sentence; words without a tag are O."""
    pairs = [each.rpartition("/") if "/" in each else (each, "", "O") for each in text.split(" ")]
    words, _, tags = zip(*pairs, strict=True)
    return TaggedSentence(f"s{number}", f"made.txt:{number + 1}", words, tags, document)


def make_set(*texts: str) -> LabelledSet:
    sentences = tuple(make_sentence(text, i) for i, text in enumerate(texts))
    return LabelledSet("made", sentences, sentences, sentences, TYPES)


SIMPLE = make_set("the doctor/B-Person walk to town/B-Place")


def make_random_sentences(seed: int, count: int = 12) -> tuple[TaggedSentence, ...]:
    """Words of one or many pieces, unknown characters, and words without any piece; valid tags; some documents."""
    draw = random.Random(seed)
    sentences = []
    for i in range(count):
        size = draw.randint(1, 40)
        pool = [*WORDS, "zebra", "unquestionably", "x" * 25, "\u4e2d\u6587", "[SEP]", "</s>", DROPPED]
        words = tuple(draw.choice(pool) for _ in range(size))
        tags = [
            "O" if word == DROPPED else draw.choice(["O", *(f"{p}-{t}" for t in TYPES for p in "BI")]) for word in words
        ]
        sentences.append(TaggedSentence(str(i), f"made.txt:{i + 1}", words, repair_tags(tags), f"d{i // 4}"))
    return tuple(sentences)


def test_the_first_piece_of_a_word_carries_its_tag(bert: PreTrainedTokenizerBase) -> None:
    data = make_set("the zoo/B-Place [SEP] dog/B-Person walk/I-Person")
    task = TokenClassificationTask(data, bert, TaskOptions())
    assert task.head_labels == ("O", "B-Person", "I-Person", "B-Place", "I-Place")
    (row,) = task.encode(data.train, is_training=True)
    tokens = bert.convert_ids_to_tokens(row.input_ids.tolist())
    expected = ["[CLS]", "the", "z", "##o", "##o", "[UNK]", "s", "##e", "##p", "[UNK]", "dog", "walk", "[SEP]"]
    assert tokens == expected
    none = NO_TARGET
    assert row.targets["labels"].tolist() == [none, 0, 3, none, none, 0, none, none, none, none, 1, 2, none]
    assert row.token_type_ids is None
    assert row.input_ids.dtype == row.targets["labels"].dtype == np.int64
    batch = task.collate([row, *task.encode([make_sentence("the dog/B-Person")], is_training=True)])
    assert batch.num_targets == 7
    assert batch.targets["labels"].shape == batch.inputs["input_ids"].shape == (2, 13)  # type: ignore[union-attr]


def test_words_have_the_pieces_that_transformers_gives_them(
    bert: PreTrainedTokenizerBase, roberta: PreTrainedTokenizerBase, tiny_roberta_folder: Path
) -> None:
    sentences = [[w for w in each.words if w not in ("[SEP]", "</s>")] for each in make_random_sentences(0)]
    sentences = [each for each in sentences if each]
    spaced = AutoTokenizer.from_pretrained(tiny_roberta_folder, add_prefix_space=True)
    for tokenizer, reference in ((bert, bert), (roberta, spaced)):
        for words, pieces in zip(sentences, encode_words(make_backend(tokenizer), sentences), strict=True):
            expected = reference(words, is_split_into_words=True, add_special_tokens=False)
            ids, bounds = join_words([pieces], [0, len(words)], 100)
            assert ids.tolist() == expected["input_ids"]
            sizes = [expected.word_ids().count(i) for i in range(len(words))]
            assert np.diff(bounds).tolist() == sizes
            ids, bounds = join_words([pieces, pieces], [0, len(words), 2 * len(words)], 2)
            assert np.diff(bounds).tolist() == [min(2, each) for each in sizes] * 2 and len(ids) == bounds[-1]
    assert roberta.sep_token_id not in encode_words(make_backend(roberta), [["the", "</s>"]])[0][0]


def test_windows_cover_and_owners_have_most_context() -> None:
    for seed in range(300):
        draw = np.random.default_rng(seed)
        room, stride = int(draw.integers(1, 20)), int(draw.integers(0, 25))
        sizes = draw.integers(0, min(room, 6) + 1, size=int(draw.integers(1, 60)))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        windows = split_windows(sizes, room, stride)
        assert windows[0][0] == 0 and windows[-1][1] == len(sizes), seed
        for (first, last), (after, further) in itertools.pairwise(windows):
            assert first < after <= last < further, seed
            assert bounds[last] - bounds[after] <= stride, seed
            # One word more would be too much to share, or leave the next word no room.
            assert bounds[last] - bounds[after - 1] > stride or bounds[last + 1] - bounds[after - 1] > room, seed
        assert all(bounds[last] - bounds[first] <= room for first, last in windows), seed
        for word, owner in enumerate(assign_words(bounds, windows, 0, len(sizes))):
            contexts = [
                min(bounds[word] - bounds[first], bounds[last] - bounds[word + 1]) if first <= word < last else -1
                for first, last in windows
            ]
            assert contexts[owner] == max(contexts) >= 0, seed


def test_a_grown_window_is_full_and_centred() -> None:
    for seed in range(300):
        draw = np.random.default_rng(seed)
        bounds = np.concatenate([[0], np.cumsum(draw.integers(0, 4, size=40))])
        first, last = sorted(draw.integers(0, 41, size=2).tolist())
        room = int(bounds[last] - bounds[first] + draw.integers(0, 40))
        begin, end = grow_window(bounds, first, last, room)
        assert 0 <= begin <= first <= last <= end <= 40 and bounds[end] - bounds[begin] <= room, seed
        if bounds[end] - bounds[begin] < room - 2 * 3:  # a word has 3 pieces at most
            assert bounds[begin] == 0 and end == 40, seed
        if bounds[begin] > 0 and end < 40:
            assert abs(bounds[first] - bounds[begin] - (bounds[end] - bounds[last])) <= 2 * 3, seed


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_every_word_is_asked_about_exactly_once(name: str, request: pytest.FixtureRequest) -> None:
    """It stands there as a whole, or as much of it as a row holds."""
    tokenizer = request.getfixturevalue(name)
    for seed, context in itertools.product(range(6), (False, True)):
        draw, sentences = random.Random(seed), make_random_sentences(seed)
        options = TaskOptions(max_length=draw.randint(3, 60), stride=draw.randint(0, 30), context=context)
        task = TokenClassificationTask(LabelledSet("made", *[sentences] * 3, TYPES), tokenizer, options)
        pieces = [
            join_words([each], [0, len(own.words)], options.max_length - 2)
            for each, own in zip(encode_words(task.backend, [e.words for e in sentences]), sentences, strict=True)
        ]
        rows = task.encode(sentences, is_training=True)
        assert [row.example for row in rows] == sorted(row.example for row in rows), seed
        asked: list[tuple[int, int]] = []
        for row in rows:
            assert row.length <= options.max_length, seed
            assert row.input_ids[[0, -1]].tolist() == [tokenizer.cls_token_id, tokenizer.sep_token_id], seed
            (own, bounds), tags = pieces[row.example], sentences[row.example].tags
            for word, position in zip(row.place.words, row.place.positions, strict=True):
                asked.append((row.example, int(word)))
                ids = own[bounds[word] : bounds[word + 1]]
                assert row.input_ids[position : position + len(ids)].tolist() == ids.tolist(), seed
                assert task.head_labels[row.targets["labels"][position]] == tags[word], seed
            assert (row.targets["labels"] != NO_TARGET).sum() == len(row.place.words), seed
        assert sorted(asked) == [
            (i, w) for i, (_, bounds) in enumerate(pieces) for w in np.flatnonzero(np.diff(bounds))
        ]
        predictions = answer_by_targets(task, sentences)
        assert [tuple(each["tags"]) for each in predictions] == [each.tags for each in sentences], seed
        assert task.score(sentences, predictions).get("f1.micro") == 1.0, seed


def test_context_is_of_the_same_document_and_not_asked_about(bert: PreTrainedTokenizerBase) -> None:
    texts = ["the cat walk", "a dog/B-Person run", "the rain and the sun", "new table"]
    sentences = tuple(make_sentence(text, i, "one" if i < 3 else "two") for i, text in enumerate(texts))
    data = LabelledSet("made", sentences, sentences, sentences, TYPES)

    def read_rows(max_length: int) -> list[str]:
        task = TokenClassificationTask(data, bert, TaskOptions(max_length=max_length, context=True))
        rows = task.encode(sentences, is_training=False)
        assert [row.place.words.tolist() for row in rows] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]
        return [bert.decode(row.input_ids[1:-1]) for row in rows]

    whole = " ".join(text.replace("/B-Person", "") for text in texts[:3])
    assert read_rows(30) == [whole, whole, whole, "new table"]
    assert read_rows(9) == [
        "the cat walk a dog run the",
        "cat walk a dog run the rain",
        "dog run the rain and the sun",
        "new table",
    ]
    alone = TokenClassificationTask(SIMPLE, bert, TaskOptions(context=True))
    alone.encode(SIMPLE.train, is_training=True)
    assert len(alone.notes) == 1 and "made.txt:1" in alone.notes[0] and "context" in alone.notes[0]


def test_what_no_piece_or_no_room_is_left_for_is_counted(bert: PreTrainedTokenizerBase) -> None:
    data = make_set("the dog/B-Person", f"{DROPPED}/B-Person the {DROPPED}", "the " + "z" * 30 + "/B-Place")
    task = TokenClassificationTask(data, bert, TaskOptions(max_length=12, stride=4))
    for _ in range(2):
        assert [each["tags"] for each in answer_by_targets(task, data.train)[1:]] == [["O", "O", "O"], ["O", "B-Place"]]
    assert task.notes == [
        "2 of 7 words are dropped by the tokenizer and taken as O; the first is at made.txt:2.",
        "1 of 7 words have more than 10 pieces and are read by their first ones; the first is at made.txt:3.",
    ]
    # A sentence that the tokenizer drops as a whole still has a row and a prediction.
    nothing = [make_sentence(DROPPED)]
    assert [row.length for row in task.encode(nothing, is_training=False)] == [2]
    assert answer_by_targets(task, nothing) == [{"entities": [], "tags": ["O"]}]


def test_words_that_running_text_has_not_are_counted_in_each_split(bert: PreTrainedTokenizerBase) -> None:
    train = make_set("X-12/B-Person melts .", "the dog/B-Place").train
    dev = make_set("the X-13/B-Person is X_1 .", "U.S./B-Place Y-2/B-Person Z_1/I-Person Z_2/I-Person").train
    test = tuple(replace(each, group="a patient's") for each in make_set("X_1/B-Person").train)
    task = TokenClassificationTask(LabelledSet("made", train, dev, test, TYPES), bert, TaskOptions())
    assert task.state == {"inner_marks": ["-"], "leading_marks": [], "trailing_marks": [], "closing_marks": []}
    assert task.notes == [
        "2 of 3 entities of dev have words that are cut otherwise in running text, such as 'U.S.'; the first is at "
        "made.txt:2.",
        "1 of 1 entities of test have words that are cut otherwise in running text; the first is at made.txt:1.",
    ]
    again = TokenClassificationTask(LabelledSet("made", (), (), (), TYPES), bert, TaskOptions(), state=task.state)
    assert again.state == task.state and not again.notes
    for given in ({}, {**task.state, "inner_marks": []}):
        assert TokenClassificationTask(SIMPLE, bert, TaskOptions(), state=given).state == given
    for damaged in ({"inner_marks": ["-"]}, {**task.state, "inner_marks": "-"}, {"marks": []}):
        with pytest.raises(ValueError):
            TokenClassificationTask(SIMPLE, bert, TaskOptions(), state=damaged)


def test_a_set_of_texts_learns_no_words(bert: PreTrainedTokenizerBase) -> None:
    words, offsets = cut_words("X-12 melts", WordMarks(("-",)))
    text = RawSentence("t", "made.json:1", words, ("B-Person", "O"), "", "X-12 melts", offsets)
    task = TokenClassificationTask(LabelledSet("made", (text,), (text,), (), TYPES), bert, TaskOptions())
    assert task.state == {} and not task.notes
    assert TokenClassificationTask(SIMPLE, bert, TaskOptions()).state == {}
    again = cut_again(text, NO_MARKS)
    assert again.words == ("X", "-", "12", "melts") and again.misplaced == (Entity(0, 4, "Person"),)
    assert task.score([again], [{"tags": ["B-Person", "I-Person", "I-Person", "O"]}]).get("f1.micro") == 1.0
    assert task.score([again], [{"tags": ["B-Person", "O", "O", "O"]}]).get("f1.micro") == 0.0


def test_tags_are_the_best_valid_sequence() -> None:
    """Against all sequences, one by one."""
    draw = np.random.default_rng(0)

    def is_valid(path: tuple[int, ...]) -> bool:
        return all(tag == 0 or tag % 2 or (i > 0 and path[i - 1] in (tag, tag - 1)) for i, tag in enumerate(path))

    num_repaired = 0
    for size in [1, 2, 3, 4, 5] * 12:
        scores = draw.normal(size=(size, 5))
        valid = [path for path in itertools.product(range(5), repeat=size) if is_valid(path)]
        expected = max(valid, key=lambda path: sum(scores[range(size), path]))
        assert tuple(find_best_tags(scores)) == expected
        num_repaired += tuple(scores.argmax(axis=1)) != expected
    assert num_repaired > 10
    impossible = np.array([[0.0, -np.inf, -np.inf], [1.0, 0.0, 5.0]])
    assert find_best_tags(impossible).tolist() == [0, 0]


def test_the_baseline_gives_each_word_its_usual_tag(bert: PreTrainedTokenizerBase) -> None:
    data = make_set("dog/B-Person walk", "dog/B-Person house", "dog water/B-Place house/I-Place", "red house/I-Place")
    task = TokenClassificationTask(data, bert, TaskOptions())
    found = task.predict_baseline([make_sentence("dog zebra house"), make_sentence("water house")])
    assert [each["tags"] for each in found] == [["B-Person", "O", "B-Place"], ["B-Place", "I-Place"]]
    assert repair_tags(["I-A", "I-A", "I-B", "O", "I-B", "B-B", "I-B"]) == (
        "B-A", "I-A", "B-B", "O", "B-B", "B-B", "I-B",
    )  # fmt: skip
