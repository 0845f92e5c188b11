"""A few labelled examples of every task family, and tasks made of them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from domext_ray.families.readers.examples import (
    AnnotatedText,
    Choice,
    Entity,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    Relation,
    TaggedSentence,
)
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task import StagedTask, TaskOptions

TEXT = "the drug and the heart disease"
DRUG, HEART = Entity(4, 8, "drug"), Entity(17, 22, "organ")
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "ner": (TaggedSentence("0", "t:1", ("the", "heart", "disease"), ("O", "B-Disease", "I-Disease")),),
    "nested_ner": (AnnotatedText("0", "t:1", TEXT, (DRUG, HEART)),),
    "relation": (
        MarkedText("0", "t:1", TEXT, Entity(4, 8, ""), Entity(17, 22, ""), "treats"),
        MarkedText("1", "t:2", TEXT, Entity(4, 8, ""), Entity(9, 12, ""), "none"),
    ),
    "classification": (LabelledText("0", "t:1", "a cat", None, "a"), LabelledText("1", "t:2", "a tree", "b", "b")),
    "multilabel": (
        MultiLabelText("0", "t:1", "a cat", None, ("a", "c")),
        MultiLabelText("1", "t:2", "a tree", "a dog", ()),
    ),
    "regression": (LabelledText("0", "t:1", "a cat", "a dog", "", 1.5), LabelledText("1", "t:2", "a", "b", "", 0.0)),
    "qa": (
        Question("0", "t:1", "where is the cat", "the cat is in the garden", (Entity(11, 24, ""),)),
        Question("1", "t:2", "where is the sun", "the cat is in the garden", ()),
    ),
    "multiple_choice": (Choice("0", "t:1", "the cat", "can", ("run", "read a book", "write"), 0),),
    "relation_extraction": (AnnotatedText("0", "t:1", TEXT, (DRUG, HEART), (Relation(DRUG, HEART, "treats"),)),),
    "normalization": (Mention("0", "t:1", "heart pain", ("disease of the heart",)),),
}
LABELS = {
    "ner": ("Disease",),
    "nested_ner": ("drug", "organ"),
    "relation": ("treats", "none"),
    "classification": ("a", "b"),
    "multilabel": ("a", "b", "c"),
    "relation_extraction": ("treats",),
}
CATALOGUE = ("disease of the heart", "pain", "heart", "cat")
STAGED = ("relation_extraction", "normalization")


def make_family_task(
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    options: TaskOptions | None = None,
    metric: str = "",
    *,
    examples: tuple[Any, ...] = (),
    labels: tuple[str, ...] = (),
) -> StagedTask:
    """Make a task of a family; all splits have the same examples."""
    examples, is_relation = examples or EXAMPLES[family], family == "relation"
    data = LabelledSet(
        "made",
        *[examples] * 3,
        labels or LABELS.get(family, ()),
        "none" if is_relation and not labels else None,
        CATALOGUE if family == "normalization" else (),
        marks=(("<<", ">>"), ("[[", "]]")) if is_relation else (),
    )
    return FAMILIES[family](data, tokenizer, options or TaskOptions(max_length=32, stride=8), metric=metric)
