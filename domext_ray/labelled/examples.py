"""What readers make of labelled files, and tasks learn from: one frozen dataclass a kind of example.

Character places count Unicode code points from 0; ends are exclusive. Every example knows where it was read, so that a
message can name file and line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias


@dataclass(frozen=True)
class Entity:
    """A labelled stretch [start, end) of a text (characters) or of a sentence (words)."""

    start: int
    end: int
    label: str


class ScatteredEntity(Entity):
    """An entity of several stretches, from the first to the last: it equals no predicted one, which is one stretch."""


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

    inputs: ClassVar[tuple[str, ...]] = ("text",)
    """Fields that a model sees; by a hash of the first a set is cut."""

    @property
    def seen(self) -> tuple[Any, ...]:
        """All that a model sees of it."""
        return tuple(getattr(self, each) for each in self.inputs)

    @property
    def whole(self) -> str:
        """What must not be on two sides of a cut."""
        return str(getattr(self, self.inputs[0]))

    @property
    def unit(self) -> str:
        """What is cut or drawn as one: all of whose it is, where the set says that, or what is `whole`."""
        return f"group {self.group}" if self.group else self.whole


@dataclass(frozen=True)
class TaggedSentence(Example):
    """A sentence of words, each with an IOB2 tag (flat entities).

    Args:
        words: at least one.
        tags: as many, "O", "B-TYPE" or "I-TYPE", valid IOB2 whatever scheme the file has.
        document: sentences of one document share it and follow each other in their split; "" if the file has none.
        misplaced: gold entities, in characters, that no tags say: they end inside a word, overlap others, or are those
            of a text that was cut again for a model. Nothing is learned from them, and they are scored as all others.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: str = ""
    misplaced: tuple[Entity, ...] = field(default=(), kw_only=True)

    inputs = ("words",)

    @property
    def whole(self) -> str:
        return f"document {self.document}" if self.document else " ".join(self.words)


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
        misplaced: gold entities that the text does not have where their offsets say.
        unplaced: gold triples (subject, predicate, object) that the text or the schema does not have. Nothing is
            learned from either, and what is not predicted all the same is a miss.
    """

    text: str
    entities: tuple[Entity, ...]
    relations: tuple[Relation, ...] = ()
    misplaced: tuple[Entity, ...] = field(default=(), kw_only=True)
    unplaced: tuple[tuple[str, str, str], ...] = field(default=(), kw_only=True)

    @property
    def gold(self) -> tuple[Entity, ...]:
        """All entities that predictions are scored by."""
        return (*self.entities, *self.misplaced)


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

    inputs = ("text", "head", "tail")


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

    inputs = ("text", "pair")


@dataclass(frozen=True)
class MultiLabelText(Example):
    """A text, or a pair of texts (None: there is no second), with any number of different labels."""

    text: str
    pair: str | None
    labels: tuple[str, ...]

    inputs = ("text", "pair")


@dataclass(frozen=True)
class Question(Example):
    """A question about a context (SQuAD).

    Args:
        question: the question.
        context: the text that may hold the answer.
        answers: accepted stretches of `context`, labels "", in the file's order.
        unplaced: accepted answers that the context does not have where their offsets say; without these and those the
            question has no answer.
    """

    question: str
    context: str
    answers: tuple[Entity, ...]
    unplaced: tuple[str, ...] = field(default=(), kw_only=True)

    inputs = ("context", "question")

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The accepted answers."""
        return (*(self.context[each.start : each.end] for each in self.answers), *self.unplaced)


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

    inputs = ("context", "stem", "options")


@dataclass(frozen=True)
class Mention(Example):
    """A free wording, and the one or more standard terms of the set's catalogue that it means (CHIP-CDN)."""

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
        warnings: those of `notes` that must be heard before training.
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
    warnings: tuple[str, ...] = ()

    @property
    def splits(self) -> dict[str, tuple[AnyExample, ...]]:
        """The examples of each split."""
        return {split: getattr(self, split) for split in SPLITS}


def list_shared(splits: Mapping[str, Sequence[AnyExample]], held_out: str, seen: str) -> list[str]:
    """Return where the examples of one split stand that another one has, too."""
    known = {each.seen for each in splits[seen]}
    return [each.source for each in splits[held_out] if each.seen in known]
