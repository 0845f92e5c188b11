"""What readers make of labelled files, and tasks learn from: one frozen dataclass a kind of example.

Character places count Unicode code points from 0; ends are exclusive. Every example knows where it was read, so that a
message can name file and line.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from domext_ray.text.data.sources import FileRecord


@dataclass(frozen=True)
class Entity:
    """A labelled stretch [start, end) of a text (characters) or of a sentence (words)."""

    start: int
    end: int
    label: str


class ScatteredEntity(Entity):
    """An entity of several stretches, from the first to the last: it equals no predicted one, which is one stretch."""


def order(entity: Entity) -> tuple[int, int, str]:
    """What entities are sorted by: their places."""
    return entity.start, entity.end, entity.label


def sort_entities(entities: Collection[Entity]) -> tuple[Entity, ...]:
    """Return entities by their places."""
    return tuple(sorted(entities, key=order))


@dataclass(frozen=True)
class Relation:
    """A labelled, directed pair of entities of one text."""

    head: Entity
    tail: Entity
    label: str


def add_article(noun: str) -> str:
    """Return a noun behind its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def read_tags(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence's IOB2 tags, in order; I- that continues no entity of its type is outside."""
    found: list[Entity] = []
    label, start = "", 0
    for i, tag in enumerate([*tags, "O"]):
        if tag.startswith("I-") and label and tag[2:] == label:
            continue
        if label:
            found.append(Entity(start, i, label))
        label, start = (tag[2:] if tag.startswith("B-") else ""), i
    return found


@dataclass(frozen=True)
class Example:
    """What all kinds of examples have."""

    id: str  # unique in its split
    source: str  # FILE:PLACE
    path: str = field(default="", kw_only=True, compare=False)  # FILE alone: a place may have a colon
    group: str = field(default="", kw_only=True)  # a hash of whose it is, where the set has a `group_field`

    inputs: ClassVar[tuple[str, ...]] = ("text",)
    """Fields that a model sees; by a hash of the first a set is cut."""
    gold_names: ClassVar[tuple[str, str] | None] = None
    """What it may have or not, and what such examples are called; None: each has its label."""
    number: ClassVar[float | None] = None
    """Its label, where that is a number."""
    is_learnable: ClassVar[bool] = True
    """Whether it can be learned from."""

    @property
    def seen(self) -> tuple[Any, ...]:
        """All that a model sees of it."""
        return tuple(getattr(self, name) for name in self.inputs)

    @property
    def whole(self) -> str:
        """What must not be on two sides of a cut."""
        return str(getattr(self, self.inputs[0]))

    @property
    def shown(self) -> str:
        """The text that its prediction is about."""
        return str(getattr(self, self.inputs[0]))

    @property
    def cluster(self) -> tuple[str, str]:
        """What is drawn whole when figures are resampled; an example is its own cluster where it is of no other."""
        return ("group", self.group) if self.group else self.own_cluster

    @property
    def own_cluster(self) -> tuple[str, str]:
        return "example", self.id

    @property
    def gold(self) -> tuple[Entity, ...]:
        """All entities that predictions are scored by, in characters."""
        return ()

    def list_labels(self) -> tuple[str, ...]:
        """Return its class or classes, its predicates, or the types of its gold entities."""
        return ()

    @property
    def has_gold(self) -> bool:
        """Whether it has what `gold_names` says."""
        return bool(self.list_labels())

    @property
    def teaches(self) -> bool:
        """Whether it has gold that is learned from."""
        return self.has_gold

    @property
    def verdict(self) -> str:
        """Its class, its classes or its number, as a sentence has it; empty: it is about something else."""
        return ""

    @property
    def counted(self) -> tuple[str, ...]:
        """What is counted of it in a table of labels; what is no label stands in brackets."""
        labels = self.list_labels()
        return labels if labels or self.gold_names is None else (f"(without {add_article(self.gold_names[0])})",)

    @property
    def unit(self) -> str:
        """What is cut or drawn as one: all of whose it is, where the set says that, or what is `whole`."""
        return f"group {self.group}" if self.group else self.whole

    def draw(self, seed: int) -> int:
        """Return a place in an order that a seed gives, below 2^64; examples of one unit have the same."""
        return int.from_bytes(hashlib.sha256(f"{seed}\n{self.unit}".encode()).digest()[:8], "big")


@dataclass(frozen=True)
class TaggedSentence(Example):
    """A sentence of words, each with an IOB2 tag (flat entities)."""

    words: tuple[str, ...]  # at least one
    tags: tuple[str, ...]  # valid IOB2 whatever scheme the file has
    document: str = ""  # sentences of one document share it and follow each other; "" if the file has none
    misplaced: tuple[Entity, ...] = field(default=(), kw_only=True)
    """Gold entities, in characters, that no tags say: they end inside a word, overlap others, or are those of a text
    that was cut again for a model. Nothing is learned from them, and they are scored as all others."""

    inputs = ("words",)
    gold_names = ("entity", "sentences")

    @property
    def text(self) -> str:
        """The sentence; words without a text are joined by spaces."""
        return " ".join(self.words)

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """The place of each word in the text."""
        ends = [end - 1 for end in itertools.accumulate(len(word) + 1 for word in self.words)]
        return [(end - len(word), end) for word, end in zip(self.words, ends, strict=True)]

    def place(self, tags: Sequence[str]) -> list[Entity]:
        """Return the entities of IOB2 tags of its words, with their places in the text."""
        offsets = self.offsets
        return [Entity(offsets[span.start][0], offsets[span.end - 1][1], span.label) for span in read_tags(tags)]

    @property
    def whole(self) -> str:
        return f"document {self.document}" if self.document else " ".join(self.words)

    @property
    def shown(self) -> str:
        return self.text

    @property
    def own_cluster(self) -> tuple[str, str]:
        return ("document", self.document) if self.document else super().own_cluster

    @property
    def gold(self) -> tuple[Entity, ...]:
        return (*self.place(self.tags), *self.misplaced)

    def list_labels(self) -> tuple[str, ...]:
        return (*(tag[2:] for tag in self.tags if tag.startswith("B-")), *(e.label for e in self.misplaced))

    @property
    def teaches(self) -> bool:
        return any(tag != "O" for tag in self.tags)


@dataclass(frozen=True)
class RawSentence(TaggedSentence):
    """A text that was cut into words here, so that what is found in it has places in the text itself."""

    text: str = ""
    offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AnnotatedText(Example):
    """A text with entities, which may nest and overlap, and relations between them.

    `misplaced` entities are gold that the text does not have where their offsets say, `unplaced` triples (subject,
    predicate, object) gold that the text or the schema does not have. Nothing is learned from either, and one that is
    not predicted is a miss.
    """

    text: str
    entities: tuple[Entity, ...]  # without duplicates, sorted by (start, end, label)
    relations: tuple[Relation, ...] = ()  # of `entities`
    misplaced: tuple[Entity, ...] = field(default=(), kw_only=True)
    unplaced: tuple[tuple[str, str, str], ...] = field(default=(), kw_only=True)

    gold_names = ("entity or relation", "texts")

    @property
    def gold(self) -> tuple[Entity, ...]:
        return (*self.entities, *self.misplaced)

    def list_labels(self) -> tuple[str, ...]:
        return tuple(gold.label for gold in self.relations or self.gold)

    @property
    def teaches(self) -> bool:
        return bool(self.relations or self.entities)


class _Classified(Example):
    """An example of one class."""

    label: str

    def list_labels(self) -> tuple[str, ...]:
        return (self.label,) if self.label else ()

    @property
    def verdict(self) -> str:
        return f"label {self.label!r}"


@dataclass(frozen=True)
class MarkedText(_Classified):
    """A text with two marked stretches, and the relation between them."""

    text: str  # without the file's own marks
    head: Entity  # its label, like the tail's, is the argument's type, or ""
    tail: Entity
    label: str  # the relation, or the set's negative label

    inputs = ("text", "head", "tail")

    @property
    def own_cluster(self) -> tuple[str, str]:
        return "text", self.text


@dataclass(frozen=True)
class LabelledText(_Classified):
    """A text, or a pair of texts, with a class or a number."""

    text: str
    pair: str | None
    label: str  # "" in regression, which has the value
    value: float = 0.0

    inputs = ("text", "pair")

    @property
    def number(self) -> float | None:  # type: ignore[override]
        return None if self.label else self.value

    @property
    def verdict(self) -> str:
        return super().verdict if self.label else f"value {self.value:g}"


@dataclass(frozen=True)
class MultiLabelText(Example):
    """A text, or a pair of texts (None: there is no second), with any number of different labels."""

    text: str
    pair: str | None
    labels: tuple[str, ...]

    inputs = ("text", "pair")
    gold_names = ("label", "texts")

    def list_labels(self) -> tuple[str, ...]:
        return self.labels

    @property
    def verdict(self) -> str:
        return f"label {', '.join(map(repr, sorted(set(self.labels))))}"


@dataclass(frozen=True)
class Question(Example):
    """A question about a context (SQuAD); it has no answer if both `answers` and `unplaced` are empty."""

    question: str
    context: str
    answers: tuple[Entity, ...]  # accepted stretches of `context`, labels "", in the file's order
    unplaced: tuple[str, ...] = field(default=(), kw_only=True)
    """Accepted answers that the context does not have where their offsets say."""

    inputs = ("context", "question")
    gold_names = ("answer", "questions")

    @property
    def own_cluster(self) -> tuple[str, str]:
        return "text", self.context

    @property
    def has_gold(self) -> bool:
        return bool(self.answer_texts)

    @property
    def counted(self) -> tuple[str, ...]:
        return ("(with an answer)",) if self.answer_texts else super().counted

    @property
    def is_learnable(self) -> bool:  # type: ignore[override]
        """One whose answers are all elsewhere would teach that it has none."""
        return bool(self.question) and (bool(self.answers) or not self.unplaced)

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The accepted answers."""
        return (*(self.context[answer.start : answer.end] for answer in self.answers), *self.unplaced)


@dataclass(frozen=True)
class Choice(Example):
    """A beginning with several continuations, one of them right (SWAG)."""

    context: str
    stem: str  # the options' common beginning, or ""
    options: tuple[str, ...]  # two or more, equally many in a set
    answer: int  # place of the right one, from 0

    inputs = ("context", "stem", "options")

    @property
    def counted(self) -> tuple[str, ...]:
        return (f"(option {self.answer + 1})",)


@dataclass(frozen=True)
class Mention(Example):
    """A free wording, and the one or more standard terms of the set's catalogue that it means (CHIP-CDN)."""

    text: str
    terms: tuple[str, ...]

    @property
    def counted(self) -> tuple[str, ...]:
        return ("(one term)" if len(self.terms) == 1 else "(several terms)",)


SPLITS = ("train", "dev", "test")
Splits: TypeAlias = Mapping[str, tuple[Example, ...]]


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set in memory."""

    name: str
    train: tuple[Any, ...]  # one or more
    dev: tuple[Any, ...]  # one or more, which choose hyperparameters and thresholds
    test: tuple[Any, ...]  # scored once; may be empty
    labels: tuple[str, ...] = ()  # classes, entity types or predicates in the order of a model's head
    negative_label: str | None = None  # the relation that is none
    catalogue: tuple[str, ...] = ()  # standard terms (normalization only)
    notes: tuple[str, ...] = field(default=())  # one sentence for each thing that was counted instead of refused
    positive_label: str | None = None  # the class whose F1 is "f1.positive"
    marks: tuple[tuple[str, ...], ...] = ()  # of a relation's two arguments: (open, close) or one placeholder
    rule: str | None = None  # how answers are compared (qa only), one of `set_description.RULES`
    warnings: tuple[str, ...] = ()  # those of `notes` that must be heard before training
    family: str = ""  # what it is for
    metric: str = ""  # path of the figure that dev chooses by; empty: the family's
    sha256: str = ""  # of all examples, wherever they were read
    files: Sequence[FileRecord] = ()  # with hashes of their examples, as `require_files` compares them

    @property
    def splits(self) -> dict[str, tuple[Any, ...]]:
        """The examples of each split."""
        return {split: getattr(self, split) for split in SPLITS}
