"""Relation extraction in two steps: texts -> entities -> the relation of each pair of them -> triples.

Enters: annotated texts with entities and relations (CMeIE's layout). Leaves: the set of (subject, predicate, object)
strings of each text. Step 1 finds entities, which may nest; step 2 reads a text with two marked entities and names
their relation or none. Step 2 learns from pairs of labelled entities and is asked about pairs of predicted ones. These
are the two steps of CMeIE in the AF Adapter paper's evaluation on CBLUE.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import Compared, compare_sets
from domext_ray.families.family import ENTITY_LIST, ID, PLACE, Prediction, describe_entity, read_entity
from domext_ray.families.metrics.metrics import score_triples
from domext_ray.families.metrics.scores import Score
from domext_ray.families.nested import SpanTask
from domext_ray.families.readers.columns import get_value
from domext_ray.families.readers.examples import (
    AnnotatedText,
    Entity,
    LabelledSet,
    MarkedText,
    Relation,
    order,
    sort_entities,
)
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.readers.records import read_json_records
from domext_ray.families.readers.tagged import UNTYPED
from domext_ray.families.readers.words import is_whole
from domext_ray.families.relations import MarkingTask, RelationTask
from domext_ray.families.state import COUNT, NOTHING_LEARNED, PAIRS, TEXTS, State
from domext_ray.families.task import Predict, Task

ENTITIES, RELATIONS = "entities", "relations"
NO_RELATION = "no_relation"

Triple: TypeAlias = tuple[str, str, str]
"""Subject string, predicate, object string."""
MAIN_PART = "@value"
"""The part of a triple's object that every object has."""
Schema: TypeAlias = dict[tuple[str, str], frozenset[tuple[str, str]]]
"""For each predicate and part of its object, the allowed (subject type, object type)s."""
Pair: TypeAlias = tuple[Entity, Entity]


@dataclass(frozen=True)
class PairOptions:
    """Which pairs of entities step 2 sees."""

    num_negatives: int = 3  # unrelated pairs for every related one of a training text (for one, in a text without)
    max_pairs: int = 512  # of a text, those whose entities are nearest first; training never loses a related pair to it
    seed: int = 0  # of the choice of negatives


_RELATION = {"head": pa.struct(PLACE), "tail": pa.struct(PLACE), "label": pa.string(), "score": pa.float64()}


class ExtractionTask(MarkingTask):
    """Extraction of (subject, predicate, object) by entities, then the relation of each pair.

    A prediction has "entities", and "relations" with head, tail, label and the label's probability as "score". A triple
    is right when its three strings are, wherever in the text its entities are (CBLUE's rule for CMeIE). A pair gets one
    predicate; training pairs with several are seen with each. The state has types of entities, predicates, and which
    types are related somewhere in training. The set's labels are the predicates.
    """

    family = "relation_extraction"
    readers = {"records": ("text", "triples")}
    columns = {
        **ID,
        "text": ("text",),
        "triples": ("spo_list", "triples", "triple_list"),
        **{role: (role,) for role in ("predicate", "subject", "subject_type", "object", "object_type")},
    }
    metrics = ("f1.*",)
    side_file = "schema"
    reads_by_side = True
    metric = "f1.micro"
    fields = {"entities": ENTITY_LIST, "relations": pa.list_(pa.struct(_RELATION))}
    found = "relations"
    nothing = {"entities": [], "relations": []}
    step_options = PairOptions()
    state_rules = {
        **{"entity_types": TEXTS, "predicates": TEXTS, "related_types": PAIRS, "max_pairs": COUNT},
        "written": TEXTS,
    }

    def learn(self) -> dict[str, Any]:
        """Find the types and the predicates of training and dev."""
        train, dev = self.data.train, self.data.dev
        predicates = _find_predicates(self.data)
        related = {(relation.head.label, relation.tail.label) for text in train for relation in text.relations}
        return {
            **super().learn(),
            "entity_types": sorted({entity.label for text in (*train, *dev) for entity in text.entities}),
            "predicates": list(predicates),
            "related_types": [list(pair) for pair in sorted(related)],
            "max_pairs": self.step_options.max_pairs,
        }

    def prepare(self) -> None:
        """Make the stages."""
        data, parts = self.data, (self.tokenizer, self.options)
        self.step_options = replace(self.step_options, max_pairs=self.state["max_pairs"])
        self._types = {(head, tail) for head, tail in self.state["related_types"]}
        entity_data = replace(data, labels=tuple(self.state["entity_types"]), notes=())
        relation_data = LabelledSet(
            f"{data.name} pairs",
            train=self._label_pairs(data.train, is_training=True),
            dev=self._label_pairs(data.dev, is_training=False),
            test=self._label_pairs(data.test, is_training=False),
            labels=(NO_RELATION, *self.state["predicates"]),
            negative_label=NO_RELATION,
        )
        for split in ("train", "dev"):
            if getattr(data, split) and not getattr(relation_data, split):
                raise CorpusError(f"the {split} split of {data.name} has no pair of entities to classify.")
        self.entity_task = SpanTask(entity_data, *parts, state={})
        self.relation_task = RelationTask(relation_data, *parts, state={"marks": [], "written": self.state["written"]})

    @property
    def stages(self) -> dict[str, Task]:
        return {ENTITIES: self.entity_task, RELATIONS: self.relation_task}

    def make_pairs(
        self, texts: Sequence[AnnotatedText], entities: Sequence[Collection[Entity]]
    ) -> list[list[MarkedText]]:
        """Pair up entities as step 2 is asked about them.

        A text has all ordered pairs of different stretches whose types are related somewhere in training, up to
        `PairOptions.max_pairs`; what exceeds it is counted in `notes`.
        """
        pairs = [self._pair_up(found) for found in entities]
        most = self.step_options.max_pairs
        if num_left := sum(max(0, len(own) - most) for own in pairs):
            what = (
                "pairs of predicted entities were not asked about: their texts have more than "
                f"{most}, and these are the farthest apart"
            )
            self.cases[what] += num_left
            self.keep_note(f"{num_left} {what}.")
        return [[_mark(text, pair, NO_RELATION) for pair in own[:most]] for text, own in zip(texts, pairs, strict=True)]

    def run(self, predictors: Mapping[str, Predict], examples: Sequence[AnnotatedText]) -> list[Prediction]:
        """Find entities, then the relation of every pair; predictors are those of "entities" and "relations"."""
        found = predictors[ENTITIES](examples)
        pairs = self.make_pairs(examples, [[*map(read_entity, prediction["entities"])] for prediction in found])
        asked = [pair for own in pairs for pair in own]
        answers = iter(predictors[RELATIONS](asked) if asked else ())
        return [
            {"entities": prediction["entities"], "relations": [*_relate(own, answers)]}
            for prediction, own in zip(found, pairs, strict=True)
        ]

    def score(self, examples: Sequence[AnnotatedText], predictions: Sequence[Prediction]) -> Score:
        """Score triples by their strings; see `score_triples`."""
        found = [_read_predicted(prediction) for prediction in predictions]
        return score_triples([_read_gold(text) for text in examples], found, self.relation_task.data.labels[1:])

    def score_steps(self, examples: Sequence[AnnotatedText], predictions: Sequence[Prediction]) -> dict[str, Score]:
        """Score step 1 by its entities, and as "pairs" what a perfect step 2 would reach on its pairs."""
        gold = [_read_gold(example) for example in examples]
        reachable = []
        for text, own, prediction in zip(examples, gold, predictions, strict=True):
            pairs = self._pair_up([*map(read_entity, prediction["entities"])])[: self.step_options.max_pairs]
            asked = {(_cut(text, head), _cut(text, tail)) for head, tail in pairs}
            reachable.append({triple for triple in own if (triple[0], triple[2]) in asked})
        return {ENTITIES: self.entity_task.score(examples, predictions), "pairs": score_triples(gold, reachable)}

    @classmethod
    def read(cls, row: SetRow, schema: Schema | None = None) -> AnnotatedText:
        """Make a text with relations; its arguments are located where they first occur, as whole words if they do.

        Triples that the text does not have, or the schema (None: all are allowed), are gold without a place.
        """
        text = row.read_text("text", is_stripped=False)
        found: dict[Relation, None] = {}
        unplaced: dict[tuple[str, str, str], None] = {}
        names = [row.description.columns[role][0] for role in ("subject", "predicate", "object")]  # of CasRel's lists
        for values in row.read_objects("triples", names=names) if row.is_labelled else ():
            for triple, kinds, key in _list_triples(row, values):
                subject, label, mention = triple
                head, tail = _locate(text, subject, kinds[0]), _locate(text, mention, kinds[1])
                if schema is not None and kinds not in schema.get(key, ()):
                    row.keep_gold("triple", "is not allowed by the schema", (subject, key[0], mention, *kinds))
                elif head is None or tail is None:
                    row.keep_gold("triple", "is not in the text", (subject, key[0], mention))
                else:
                    found[Relation(head, tail, label)] = None
                    continue
                unplaced[triple] = None
        relations = sorted(found, key=lambda r: (r.head.start, r.head.end, r.tail.start, r.tail.end, r.label))
        entities = sort_entities({entity for relation in relations for entity in (relation.head, relation.tail)})
        return AnnotatedText("", row.source, text, entities, tuple(relations), unplaced=tuple(unplaced))

    @classmethod
    def begin_split(
        cls, rows: Sequence[SetRow], side: Any
    ) -> tuple[Sequence[SetRow], Callable[[SetRow], AnnotatedText]]:
        return rows, partial(cls.read, schema=side)

    @classmethod
    def read_side(cls, path: Path) -> Schema:
        """Read the predicates and the types of their arguments, in the file's order.

        Its rows are {subject_type, predicate, object_type}; object_type may be an object by part.
        """
        schema: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for record in read_json_records(path, ("predicate",)):
            predicate, subject_type, object_type = (
                record.values.get(role) for role in ("predicate", "subject_type", "object_type")
            )
            parts = object_type if isinstance(object_type, dict) else {MAIN_PART: object_type}
            if not all(isinstance(value, str) for value in (predicate, subject_type, *parts.values())):
                raise CorpusError(f"{record.source} must have texts as predicate, subject_type and object_type.")
            for part, kind in parts.items():
                schema.setdefault((str(predicate), part), set()).add((str(subject_type), str(kind)))
        if not schema:
            raise CorpusError(f"{path} has no predicate; give a schema with one object a line.")
        return {key: frozenset(types) for key, types in schema.items()}

    @classmethod
    def name_labels(cls, side: Schema | None) -> tuple[str, ...]:
        """Return the relations that the schema has."""
        return tuple(dict.fromkeys(name_relation(*key) for key in side or ()))

    @classmethod
    def compare(cls, example: AnnotatedText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        sides = (_read_gold(example), _read_predicted(prediction))
        return compare_sets(example, example.text, *({(" – ".join(own), own[1]) for own in side} for side in sides))

    def predict_baseline(self, examples: Sequence[AnnotatedText]) -> list[Prediction]:
        """Predict every training triple whose two strings both occur in the text."""
        known: dict[str, list[Triple]] = defaultdict(list)
        for triple in sorted({fact for text in self.data.train for fact in _read_triples(text)}):
            known[triple[0]].append(triple)
        predictions = []
        for text in (example.text for example in examples):
            triples = [fact for subject in known if subject in text for fact in known[subject] if fact[2] in text]
            relations = [
                {"head": {"text": head}, "label": label, "tail": {"text": tail}} for head, label, tail in triples
            ]
            predictions.append({"relations": relations})
        return predictions

    def _pair_up(self, entities: Collection[Entity]) -> list[Pair]:
        """All ordered pairs whose types are related in training, the nearest first."""
        ordered = sorted(set(entities), key=order)
        pairs = [
            (head, tail)
            for head in ordered
            for tail in ordered
            if (head.label, tail.label) in self._types and _is_pair(head, tail)
        ]
        return sorted(pairs, key=lambda pair: max(pair[0].start, pair[1].start) - min(pair[0].end, pair[1].end))

    def _label_pairs(self, texts: Sequence[AnnotatedText], *, is_training: bool) -> tuple[MarkedText, ...]:
        """Pairs of labelled entities: all of them to choose and score by, fewer negatives for training."""
        examples: list[MarkedText] = []
        for text in texts:
            labels: dict[Pair, list[str]] = defaultdict(list)
            for relation in text.relations:
                if _is_pair(relation.head, relation.tail):
                    labels[relation.head, relation.tail].append(relation.label)
            # Scoring is by strings, so another occurrence of two related strings is no example of "no relation".
            related = {(_cut(text, head), _cut(text, tail)) for head, tail in labels}
            candidates = self._pair_up(text.entities)
            negatives = [pair for pair in candidates if (_cut(text, pair[0]), _cut(text, pair[1])) not in related]
            if is_training:
                positives = [(pair, label) for pair, own in labels.items() for label in dict.fromkeys(own)]
                chosen = self._choose_negatives(text.id, negatives, len(positives))
            else:
                positives = [(pair, labels[pair][0]) for pair in candidates if pair in labels]
                chosen = negatives[: max(0, self.step_options.max_pairs - len(positives))]
            for i, (pair, label) in enumerate([*positives, *((pair, NO_RELATION) for pair in chosen)]):
                examples.append(_mark(text, pair, label, f"#{i}"))
        return tuple(examples)

    def _choose_negatives(self, text_id: str, negatives: list[Pair], num_positives: int) -> list[Pair]:
        wanted = self.step_options.num_negatives * max(1, num_positives)
        wanted = min(wanted, max(0, self.step_options.max_pairs - num_positives), len(negatives))
        # By the text's id, so that neither order nor number of the other texts changes what is chosen.
        generator = np.random.default_rng([self.step_options.seed, zlib.crc32(text_id.encode())])
        return [negatives[i] for i in sorted(generator.choice(len(negatives), wanted, replace=False))] if wanted else []


def _find_predicates(data: LabelledSet) -> tuple[str, ...]:
    texts = (*data.train, *data.dev)
    for text in texts:
        if any(relation.label == NO_RELATION for relation in text.relations):
            raise CorpusError(
                f"{text.source}: the relation {NO_RELATION!r} must be one of {', '.join(data.labels)}, and not "
                f"{NO_RELATION!r}, which stands for none."
            )
    return tuple(predicate for predicate in data.labels if predicate != NO_RELATION)


def _relate(pairs: Sequence[MarkedText], answers: Iterator[Prediction]) -> Iterator[Prediction]:
    """Yield the relations among pairs, each of which takes an answer of step 2."""
    for pair, answer in zip(pairs, answers, strict=False):  # pairs first: what is left of answers is other texts'
        if answer["label"] != NO_RELATION:
            ends = {"head": describe_entity(pair.text, pair.head), "tail": describe_entity(pair.text, pair.tail)}
            yield {**ends, "label": answer["label"], "score": answer["probabilities"][answer["label"]]}


def _is_pair(head: Entity, tail: Entity) -> bool:
    """Whether two entities can be marked apart: one stretch cannot be both arguments."""
    return (head.start, head.end) != (tail.start, tail.end)


def _cut(text: AnnotatedText | MarkedText, entity: Entity) -> str:
    return text.text[entity.start : entity.end]


def _read_triples(text: AnnotatedText) -> set[Triple]:
    return {(_cut(text, relation.head), relation.label, _cut(text, relation.tail)) for relation in text.relations}


def _read_gold(text: AnnotatedText) -> set[Triple]:
    """Triples to score by: those that the text or the schema does not have are misses."""
    return {*_read_triples(text), *text.unplaced}


def _read_predicted(prediction: Prediction) -> set[Triple]:
    return {(own["head"]["text"], own["label"], own["tail"]["text"]) for own in prediction["relations"]}


def _mark(text: AnnotatedText, pair: Pair, label: str, suffix: str = "") -> MarkedText:
    head, tail = pair
    # Types belong to the place: one stretch may be predicted with two.
    place = f"{head.start}-{head.end}-{head.label}>{tail.start}-{tail.end}-{tail.label}"
    return MarkedText(f"{text.id}/{place}{suffix}", text.source, text.text, head, tail, label)


def name_relation(predicate: str, part: str) -> str:
    """Return the label of the relation to a part of an object: the predicate, for further parts "predicate.part"."""
    return predicate if part == MAIN_PART else f"{predicate}.{part}"


def _list_triples(
    row: SetRow, values: Mapping[str, Any]
) -> Sequence[tuple[tuple[str, str, str], tuple[str, str], tuple[str, str]]]:
    """Return for each part of the object the triple, the types of its arguments, and predicate and part."""
    roles = ("predicate", "subject", "subject_type", "object", "object_type")
    predicate, subject, subject_type, target, target_type = (
        get_value(values, row.description.columns[role]) for role in roles
    )
    parts = target if isinstance(target, dict) else {MAIN_PART: target}
    types = target_type if isinstance(target_type, dict) else {MAIN_PART: target_type}
    if not all(isinstance(value, str) for value in (predicate, subject, parts.get(MAIN_PART))) or not predicate.strip():
        raise CorpusError(f"{row.source} has a triple without texts as predicate, subject and object.")
    return [
        (
            (subject, name_relation(predicate, part), str(mention)),
            (str(subject_type or UNTYPED), str(types.get(part) or UNTYPED)),
            (predicate, part),
        )
        for part, mention in parts.items()
        if mention not in (None, "")  # datasets fill the parts that an object has not
    ]


def _locate(text: str, mention: str, label: str) -> Entity | None:
    """Return where a mention first occurs as whole words, or else as a part of one; None: it does not occur."""
    places = [found.start() for found in re.finditer(re.escape(mention), text)] if mention else []
    whole = [start for start in places if is_whole(text, start, start + len(mention))]
    return next((Entity(start, start + len(mention), label) for start in whole or places), None)
