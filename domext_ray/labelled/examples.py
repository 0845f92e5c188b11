"""What readers make of labelled files, and tasks learn from: one frozen dataclass a kind of example.

Character places count Unicode code points from 0; ends are exclusive. Every example knows where it was read, so that a
message can name file and line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Entity:
    """A labelled stretch [start, end) of a text (characters) or of a sentence (words)."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Relation:
    """A labelled, directed pair of entities of one text."""

    head: Entity
    tail: Entity
    label: str


@dataclass(frozen=True)
class Example:
    """What all kinds of examples have.

    Args:
        id: unique in its split.
        source: where it was read, as FILE:LINE.
        group: a hash of whose it is, where the set has a `group_field`.
    """

    id: str
    source: str
    group: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class TaggedSentence(Example):
    """A sentence of words, each with an IOB2 tag (flat entities).

    Args:
        words: at least one.
        tags: as many, "O", "B-TYPE" or "I-TYPE", valid IOB2 whatever scheme the file has.
        document: sentences of one document share it and follow each other in their split; "" if the file has none.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: str = ""


@dataclass(frozen=True)
class RawSentence(TaggedSentence):
    """A text that was cut into words here, so that what is found in it has places in the text itself.

    Args:
        text: the text as it was given.
        offsets: for each word its first character in `text`, and the one after its last.
    """

    text: str = ""
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AnnotatedText(Example):
    """A text with entities, which may nest and overlap, and relations between them.

    Args:
        text: the text.
        entities: stretches of characters, without duplicates, sorted by (start, end, label).
        relations: heads and tails are among `entities`.
    """

    text: str
    entities: tuple[Entity, ...]
    relations: tuple[Relation, ...] = ()


@dataclass(frozen=True)
class MarkedText(Example):
    """A text with two marked stretches, and the relation between them.

    Args:
        text: the text, without the file's own marks.
        head: the first argument's stretch; its label is the argument's type, or "".
        tail: the second argument's.
        label: the relation, or the set's negative label.
    """

    text: str
    head: Entity
    tail: Entity
    label: str


@dataclass(frozen=True)
class LabelledText(Example):
    """A text, or a pair of texts, with a class or a number.

    Args:
        text: the first text.
        pair: the second text, or None.
        label: the class.
        value: the number, where the task is regression; then `label` is "".
    """

    text: str
    pair: str | None
    label: str
    value: float = 0.0


@dataclass(frozen=True)
class MultiLabelText(Example):
    """A text, or a pair of texts, with any number of labels.

    Args:
        text: the first text.
        pair: the second text, or None.
        labels: different labels, or none.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Question(Example):
    """A question about a context (SQuAD).

    Args:
        question: the question.
        context: the text that may hold the answer.
        answers: accepted stretches of `context`, labels "", in the file's order; empty: it has no answer.
    """

    question: str
    context: str
    answers: tuple[Entity, ...]

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The accepted answers."""
        return tuple(self.context[each.start : each.end] for each in self.answers)


@dataclass(frozen=True)
class Choice(Example):
    """A beginning with several continuations, one of them right (SWAG).

    Args:
        context: the text before.
        stem: the continuations' common beginning, or "".
        options: two or more continuations, equally many in a set.
        answer: place of the right one, from 0.
    """

    context: str
    stem: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Mention(Example):
    """A free wording, and the standard terms that it means (CHIP-CDN).

    Args:
        text: the wording.
        terms: one or more entries of the set's catalogue.
    """

    text: str
    terms: tuple[str, ...]


AnyExample: TypeAlias = (
    TaggedSentence | AnnotatedText | MarkedText | LabelledText | MultiLabelText | Question | Choice | Mention
)

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set in memory.

    Args:
        name: what it is called.
        train: examples to learn from, one or more.
        dev: examples that choose hyperparameters and thresholds, one or more.
        test: examples that are scored once; may be empty where a set has none.
        labels: classes, entity types or predicates in the order that a model's head has them (of `train` and `dev`
            where the description names none).
        negative_label: the relation that is none, where there is one.
        catalogue: standard terms (normalisation only).
        notes: one sentence for every thing that was counted instead of refused, such as overlong pairs.
        positive_label: the class whose F1 is "f1.positive", where the description names one.
        marks: of the two arguments in the set's files (relation only), each (open, close) or one placeholder.
        rule: how answers are compared (qa only), one of `set_families.RULES`.
    """

    name: str
    train: tuple[AnyExample, ...]
    dev: tuple[AnyExample, ...]
    test: tuple[AnyExample, ...]
    labels: tuple[str, ...] = ()
    negative_label: str | None = None
    catalogue: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    positive_label: str | None = None
    marks: tuple[tuple[str, ...], ...] = ()
    rule: str | None = None
