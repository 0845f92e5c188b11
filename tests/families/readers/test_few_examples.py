"""Few labels of a set: whole documents in a seed's order, nested, and a dev that shrinks with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from labelled_fixtures import write_ner

from domext_ray.config.finetune import FinetuneConfig, LabelledConfig
from domext_ray.errors import CorpusError
from domext_ray.families.label_counts import describe_set
from domext_ray.families.readers.examples import Entity as Stretch
from domext_ray.families.readers.examples import (
    Example,
    LabelledSet,
    LabelledText,
    MarkedText,
    Question,
    TaggedSentence,
)
from domext_ray.families.sets import MIN_DEV, load_labelled, take_examples


def make_sentence(i: int, documents: int) -> TaggedSentence:
    return TaggedSentence(f"{i}", f"file:{i}", (f"word{i}",), ("B-X",), document=f"{i % documents}")


def make_set(*sizes: int, documents: int = 100) -> LabelledSet:
    splits = [tuple(make_sentence(i, documents) for i in range(size)) for size in sizes]
    return LabelledSet("made", splits[0], splits[1], splits[2], labels=("X",))


def test_documents_are_whole_and_a_larger_number_has_the_smaller_ones() -> None:
    data = make_set(700, 300, 90)
    taken = [take_examples(data, number, 3) for number in (20, 50, 300, 699)]
    for number, each in zip((20, 50, 300, 699), taken, strict=True):
        documents = {example.unit for example in each.train}
        assert each.train == tuple(example for example in data.train if example.unit in documents), "in their own order"
        assert number <= len(each.train) < number + 7 and len(each.train) == 7 * len(documents)
        assert each.test == data.test and each.labels == data.labels
    for first, second in zip(taken, taken[1:], strict=False):
        assert {*first.train} < {*second.train} and {*first.dev} <= {*second.dev}
    assert [len(each.dev) for each in taken] == [51, 51, 129, 300] and MIN_DEV == 50, "three of each document"
    assert taken[0].notes == ("Of train 21 of 700 examples are taken, and of dev 51 of 300.",)


def test_the_order_is_the_seeds_and_not_the_files() -> None:
    data = make_set(700, 300, 90)
    turned = replace(data, train=data.train[::-1])
    first = take_examples(data, 70, 0)
    assert {*take_examples(turned, 70, 0).train} == {*first.train}
    orders = {frozenset(take_examples(data, 70, seed).train) for seed in range(9)}
    assert len(orders) == 9
    small = take_examples(make_set(700, 30, 90), 70, 0)
    assert len(small.dev) == 30, "a dev that is small stays whole"


@pytest.mark.parametrize(
    ("make", "unit"),
    [
        (lambda i: TaggedSentence(str(i), "f", (f"w{i}",), ("B-X",), group=f"p{i // 4}"), 4),
        (lambda i: MarkedText(str(i), "f", f"text {i // 3}", Stretch(0, 1, ""), Stretch(2, 3, ""), f"{i % 2}"), 3),
        (lambda i: Question(str(i), "f", f"question {i}", f"context {i // 5}", (Stretch(0, 7, ""),)), 5),
        (lambda i: LabelledText(str(i), "f", f"text {i}", None, f"{i % 2}"), 1),
    ],
    ids=["people", "relations", "questions", "texts"],
)
def test_what_belongs_together_is_taken_together(make: type[Example], unit: int) -> None:
    examples = tuple(make(i) for i in range(240))
    data = LabelledSet("made", examples, examples, examples)  # type: ignore[arg-type]
    taken = take_examples(data, 31, 0).train
    assert len(taken) % unit == 0 and 31 <= len(taken) < 31 + unit


def test_too_many_and_too_few_are_one_sentence() -> None:
    data = make_set(700, 300, 90)
    with pytest.raises(CorpusError) as error:
        take_examples(data, 700, 0)
    assert str(error.value) == (
        "--labelled.num_examples has 700, and train of made has 700 examples; give fewer, or leave it out."
    )
    rare = [LabelledText(str(i), f"file:{i}", f"text {i}", None, "yes" if i == 500 else "no") for i in range(900)]
    with pytest.raises(CorpusError, match=r"all 5 training examples of made \(--labels 5\) .*give a larger number\.$"):
        take_examples(LabelledSet("made", tuple(rare), tuple(rare), ()), 5, 0, "--labels")


def test_a_configuration_says_how_many(tmp_path: Path) -> None:
    config = FinetuneConfig(task="ner", data=str(write_ner(tmp_path)))
    some = [
        load_labelled(replace(config, labelled=LabelledConfig(num_examples=number, examples_seed=seed)))
        for number, seed in ((0, 0), (20, 0), (20, 1))
    ]
    assert [len(each.train) for each in some] == [80, 20, 20] and len({each.sha256 for each in some}) == 3
    assert "note: Of train 20 of 80 examples are taken, and of dev 30 of 30." in describe_set(some[1])
