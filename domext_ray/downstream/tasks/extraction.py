"""Relation extraction in two steps: texts -> entities -> the relation of each pair of them -> triples.

Enters: annotated texts with entities and relations (CMeIE's layout). Leaves: the set of (subject, predicate, object)
strings of each text. Step 1 finds entities, which may nest; step 2 reads a text with two marked entities and names
their relation or none. Step 2 learns from pairs of labelled entities and is asked about pairs of predicted ones. These
are the two steps of CMeIE in the AF Adapter paper's evaluation on CBLUE.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from domext_ray.downstream.tasks.learned import (
    Learned,
    check_learned,
    read_lists_of_texts,
    read_texts,
    read_whole,
)
from domext_ray.downstream.tasks.records import describe_entity
from domext_ray.downstream.tasks.relations import RelationTask
from domext_ray.downstream.tasks.spans import SpanPrediction, SpanTask
from domext_ray.downstream.tasks.stages import Predict, Records, StagedTask, choose_metric
from domext_ray.downstream.tasks.task import Task, TaskOptions, keep_note
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.labelled.examples import AnnotatedText, AnyExample, Entity, LabelledSet, MarkedText
from domext_ray.labelled.metrics.metrics import score_triples
from domext_ray.labelled.metrics.scores import Score

ENTITIES, RELATIONS = "entities", "relations"
NO_RELATION = "no_relation"
METRICS = ("f1.micro", "precision.micro", "recall.micro")

Triple: TypeAlias = tuple[str, str, str]
"""Subject string, predicate, object string."""
Pair: TypeAlias = tuple[Entity, Entity]


@dataclass(frozen=True)
class PairOptions:
    """Which pairs of entities step 2 sees.

    Args:
        num_negatives: unrelated pairs for every related one of a training text (for one, in a text without), 0 or more.
        max_pairs: pairs of a text at most, 1 or more, those whose entities are nearest first; training never loses a
            related pair to it.
        seed: of the choice of negatives.
    """

    num_negatives: int = 3
    max_pairs: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_negatives < 0 or self.max_pairs < 1:
            raise ConfigError(
                f"num_negatives {self.num_negatives} must be 0 or more and max_pairs {self.max_pairs} 1 or more."
            )


@dataclass(frozen=True)
class CandidatePairs:
    """Pairs of entities to classify.

    Args:
        examples: one a pair, in the texts' order; label NO_RELATION where nothing is known.
        texts: for each the place of its text in the sequence that they were made from.
    """

    examples: tuple[MarkedText, ...]
    texts: tuple[int, ...]


@dataclass(frozen=True)
class ExtractionSteps:
    """What the two steps found in some texts.

    Args:
        found: what step 1 found in each text.
        pairs: of these entities.
        labels: predicate or NO_RELATION of each pair.
    """

    found: tuple[SpanPrediction, ...]
    pairs: CandidatePairs
    labels: tuple[str, ...]


class ExtractionTask(StagedTask):
    """Extraction of (subject, predicate, object) by entities, then the relation of each pair.

    A triple is right when its three strings are, wherever in the text its entities are; see `score_triples`. A
    pair gets one predicate; training pairs with several are seen with each.

    Args:
        data: texts with entities and relations; `labels` are the predicates.
        tokenizer: the model's.
        options: how examples become rows, in both steps.
        metric: path of the figure that dev chooses by; empty: "f1.micro".
        pair_options: which pairs step 2 sees; None: the defaults.
        learned: as of `Task`.

    Raises:
        CorpusError: training or dev has no related pair, or a relation that is not among the set's labels.
        ConfigError: there is no figure `metric`.
        ValueError: `learned` is not what such a task finds out.
    """

    def __init__(
        self,
        data: LabelledSet,
        tokenizer: PreTrainedTokenizerBase,
        options: TaskOptions,
        *,
        metric: str = "",
        pair_options: PairOptions | None = None,
        learned: Learned | None = None,
    ) -> None:
        super().__init__(data, choose_metric(metric, METRICS, data))
        self.pair_options = pair_options or PairOptions()
        self._train = cast(tuple[AnnotatedText, ...], data.train)
        if learned is None:
            self._learn(tokenizer, options)
        else:
            self._recall(learned, tokenizer, options)

    def _learn(self, tokenizer: PreTrainedTokenizerBase, options: TaskOptions) -> None:
        """Make the stages from labelled texts."""
        data = self.data
        predicates = _find_predicates(data)
        self._types = {(each.head.label, each.tail.label) for text in self._train for each in text.relations}
        dev, test = cast(tuple[AnnotatedText, ...], data.dev), cast(tuple[AnnotatedText, ...], data.test)
        entity_types = sorted({each.label for text in (*self._train, *dev) for each in text.entities})
        self.entity_task = SpanTask(replace(data, labels=tuple(entity_types), notes=()), tokenizer, options)
        relation_data = LabelledSet(
            f"{data.name} pairs",
            train=self._label_pairs(self._train, is_training=True),
            dev=self._label_pairs(dev, is_training=False),
            test=self._label_pairs(test, is_training=False),
            labels=(NO_RELATION, *predicates),
            negative_label=NO_RELATION,
        )
        for split in ("train", "dev"):
            if not getattr(relation_data, split):
                raise CorpusError(f"the {split} split of {data.name} has no pair of entities to classify.")
        self.relation_task = RelationTask(relation_data, tokenizer, options)

    def _recall(self, learned: Learned, tokenizer: PreTrainedTokenizerBase, options: TaskOptions) -> None:
        """Make the stages from what `learned` was."""
        check_learned(learned, "entity_types", "predicates", "related_types", "max_pairs")
        types = read_texts(learned, "entity_types")
        self._types = {(head, tail) for head, tail in read_lists_of_texts(learned, "related_types", (2,))}
        self.pair_options = replace(self.pair_options, max_pairs=read_whole(learned, "max_pairs", 1))
        entity_data = LabelledSet(self.data.name, (), (), (), types)
        self.entity_task = SpanTask(entity_data, tokenizer, options, learned={})
        labels = (NO_RELATION, *read_texts(learned, "predicates"))
        relation_data = LabelledSet(f"{self.data.name} pairs", (), (), (), labels, NO_RELATION)
        self.relation_task = RelationTask(relation_data, tokenizer, options, learned={"marks": []})

    @property
    def learned(self) -> dict[str, Any]:
        """Types of entities, predicates, and which types are related somewhere in training."""
        return {
            "entity_types": list(self.entity_task.data.labels),
            "predicates": list(self.relation_task.data.labels[1:]),
            "related_types": [list(each) for each in sorted(self._types)],
            "max_pairs": self.pair_options.max_pairs,
        }

    @property
    def stages(self) -> dict[str, Task]:
        return {ENTITIES: self.entity_task, RELATIONS: self.relation_task}

    def make_pairs(self, texts: Sequence[AnnotatedText], entities: Sequence[Collection[Entity]]) -> CandidatePairs:
        """Pair up entities as step 2 is asked about them.

        Args:
            texts: the texts.
            entities: what step 1 found in each.

        Returns:
            All ordered pairs of different stretches whose types are related somewhere in training, up to
            `PairOptions.max_pairs` a text; what exceeds it is counted in `notes`.
        """
        examples, places, num_left = [], [], 0
        for place, (text, found) in enumerate(zip(texts, entities, strict=True)):
            pairs = self._pair_up(found)
            num_left += max(0, len(pairs) - self.pair_options.max_pairs)
            pairs = pairs[: self.pair_options.max_pairs]
            examples += [_mark(text, pair, NO_RELATION) for pair in pairs]
            places += [place] * len(pairs)
        if num_left:
            what = (
                "pairs of predicted entities were not asked about: their texts have more than "
                f"{self.pair_options.max_pairs}, and these are the farthest apart"
            )
            self.cases[what] += num_left
            keep_note(self.notes, f"{num_left} {what}.")
        return CandidatePairs(tuple(examples), tuple(places))

    def assemble(
        self, texts: Sequence[AnnotatedText], pairs: CandidatePairs, labels: Sequence[str]
    ) -> list[set[Triple]]:
        """Collect the triples of every text.

        Args:
            texts: what the pairs were made from.
            pairs: the pairs.
            labels: predicate of each pair, or NO_RELATION.
        """
        triples: list[set[Triple]] = [set() for _ in texts]
        for pair, place, label in zip(pairs.examples, pairs.texts, labels, strict=True):
            if label != NO_RELATION:
                triples[place].add((_cut(pair, pair.head), label, _cut(pair, pair.tail)))
        return triples

    def run_steps(self, predictors: Mapping[str, Predict], examples: Sequence[AnyExample]) -> ExtractionSteps:
        """Find entities, then the relation of every pair; predictors are those of "entities" and "relations"."""
        texts = cast(Sequence[AnnotatedText], examples)
        found: tuple[SpanPrediction, ...] = tuple(predictors[ENTITIES](texts))
        pairs = self.make_pairs(texts, [each.entities for each in found])
        labels = predictors[RELATIONS](pairs.examples) if pairs.examples else []
        return ExtractionSteps(found, pairs, tuple(labels))

    def decode(self, examples: Sequence[AnyExample], steps: ExtractionSteps) -> list[set[Triple]]:
        return self.assemble(cast(Sequence[AnnotatedText], examples), steps.pairs, steps.labels)

    def to_records(
        self, examples: Sequence[AnyExample], steps: ExtractionSteps, stages: Mapping[str, Records]
    ) -> Records:
        """Return "entities" and "relations" with head, tail, label and score; see `Task.to_records`.

        A relation's score is the probability of its label.
        """
        records: Records = [{**each, "relations": []} for each in stages[ENTITIES]]
        asked = zip(steps.pairs.examples, steps.pairs.texts, stages.get(RELATIONS, ()), strict=True)
        for pair, place, found in asked:
            if found["label"] != NO_RELATION:
                records[place]["relations"].append(
                    {
                        "head": describe_entity(pair.text, pair.head),
                        "tail": describe_entity(pair.text, pair.tail),
                        "label": found["label"],
                        "score": found["probabilities"][found["label"]],
                    }
                )
        return records

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Collection[Triple]]) -> Score:
        """Score triples by their strings; see `score_triples`."""
        gold = [_read_triples(each) for each in cast(Sequence[AnnotatedText], examples)]
        return score_triples(gold, predictions, self.relation_task.data.labels[1:])

    def score_steps(self, examples: Sequence[AnyExample], steps: ExtractionSteps) -> dict[str, Score]:
        """Score step 1 by its entities, and as "pairs" what a perfect step 2 would reach on its pairs."""
        texts = cast(Sequence[AnnotatedText], examples)
        gold = [_read_triples(each) for each in texts]
        asked: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for pair, place in zip(steps.pairs.examples, steps.pairs.texts, strict=True):
            asked[place].add((_cut(pair, pair.head), _cut(pair, pair.tail)))
        reachable = [{each for each in gold[i] if (each[0], each[2]) in asked[i]} for i in range(len(texts))]
        return {
            ENTITIES: self.entity_task.score(texts, steps.found),
            "pairs": score_triples(gold, reachable),
        }

    def predict_baselines(self, examples: Sequence[AnyExample]) -> dict[str, list[Any]]:
        """Predict, as "majority", every training triple whose two strings both occur in the text."""
        known: dict[str, list[Triple]] = defaultdict(list)
        for triple in sorted({each for text in self._train for each in _read_triples(text)}):
            known[triple[0]].append(triple)
        predictions = []
        for each in cast(Sequence[AnnotatedText], examples):
            subjects = (subject for subject in known if subject in each.text)
            predictions.append({triple for subject in subjects for triple in known[subject] if triple[2] in each.text})
        return {"majority": predictions}

    def _pair_up(self, entities: Collection[Entity]) -> list[Pair]:
        """All ordered pairs whose types are related in training, the nearest first."""
        ordered = sorted(set(entities), key=_order)
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
            for each in text.relations:
                if _is_pair(each.head, each.tail):
                    labels[each.head, each.tail].append(each.label)
            # Scoring is by strings, so another occurrence of two related strings is no example of "no relation".
            related = {(_cut(text, head), _cut(text, tail)) for head, tail in labels}
            candidates = self._pair_up(text.entities)
            negatives = [pair for pair in candidates if (_cut(text, pair[0]), _cut(text, pair[1])) not in related]
            if is_training:
                positives = [(pair, label) for pair, each in labels.items() for label in dict.fromkeys(each)]
                chosen = self._choose_negatives(text.id, negatives, len(positives))
            else:
                positives = [(pair, labels[pair][0]) for pair in candidates if pair in labels]
                chosen = negatives[: max(0, self.pair_options.max_pairs - len(positives))]
            for i, (pair, label) in enumerate([*positives, *((pair, NO_RELATION) for pair in chosen)]):
                examples.append(_mark(text, pair, label, f"#{i}"))
        return tuple(examples)

    def _choose_negatives(self, text_id: str, negatives: list[Pair], num_positives: int) -> list[Pair]:
        wanted = self.pair_options.num_negatives * max(1, num_positives)
        wanted = min(wanted, max(0, self.pair_options.max_pairs - num_positives), len(negatives))
        # By the text's id, so that neither order nor number of the other texts changes what is chosen.
        generator = np.random.default_rng([self.pair_options.seed, zlib.crc32(text_id.encode())])
        return [negatives[i] for i in sorted(generator.choice(len(negatives), wanted, replace=False))] if wanted else []


def _find_predicates(data: LabelledSet) -> tuple[str, ...]:
    texts = cast(tuple[AnnotatedText, ...], (*data.train, *data.dev))
    if not any(each.relations for each in data.train if isinstance(each, AnnotatedText)):
        raise CorpusError(f"the training texts of {data.name} have no relation; relation extraction needs some.")
    predicates = data.labels or tuple(sorted({each.label for text in texts for each in text.relations}))
    for text in texts:
        for each in text.relations:
            if each.label not in predicates or each.label == NO_RELATION:
                raise CorpusError(
                    f"{text.source}: the relation {each.label!r} must be one of {', '.join(predicates)}, and not "
                    f"{NO_RELATION!r}, which stands for none."
                )
    return tuple(each for each in predicates if each != NO_RELATION)


def _order(entity: Entity) -> tuple[int, int, str]:
    return entity.start, entity.end, entity.label


def _is_pair(head: Entity, tail: Entity) -> bool:
    """Whether two entities can be marked apart: one stretch cannot be both arguments."""
    return (head.start, head.end) != (tail.start, tail.end)


def _cut(text: AnnotatedText | MarkedText, entity: Entity) -> str:
    return text.text[entity.start : entity.end]


def _read_triples(text: AnnotatedText) -> set[Triple]:
    return {(_cut(text, each.head), each.label, _cut(text, each.tail)) for each in text.relations}


def _mark(text: AnnotatedText, pair: Pair, label: str, suffix: str = "") -> MarkedText:
    head, tail = pair
    # Types belong to the place: one stretch may be predicted with two.
    place = f"{head.start}-{head.end}-{head.label}>{tail.start}-{tail.end}-{tail.label}"
    return MarkedText(f"{text.id}/{place}{suffix}", text.source, text.text, head, tail, label)
