"""Nested named entities: every span of tokens is scored for every type (`AnnotatedText`).

Enters: texts with entities that may nest and overlap. Leaves: their entities in characters. Long texts make several
windows, whose predictions are joined. The loss is ZLPR (Su et al., 2022), summed over rows and types: its threshold is
0, from which `tune` may move on dev.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from domext_ray.downstream.tasks.entity_dictionary import DictionaryMatcher, build_matcher
from domext_ray.downstream.tasks.records import describe_entity
from domext_ray.downstream.tasks.task import Row, Task, TaskBatch
from domext_ray.downstream.tasks.windows import (
    TextPieces,
    Window,
    add_windows,
    encode_texts,
    holds,
    plan_windows,
    read_template,
)
from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import AnnotatedText, AnyExample, Entity
from domext_ray.labelled.metrics.metrics import score_entities
from domext_ray.labelled.metrics.scores import Score
from domext_ray.model.domext.heads_domext import compute_zlpr

SPANS_PER_TOKEN = 8
"""Best spans of a row that decoding sees, for every token of it: all [T, N, N] scores would fill the memory."""

TUNED_RANGE = 3.0
"""The threshold is tuned from minus this to this: the loss puts it at 0."""

_STEPS = 60
_NO_SPAN = -1


@dataclass(frozen=True)
class SpanPrediction:
    """What was found in a text.

    Args:
        entities: those above the threshold, sorted; labels are types, places characters.
        candidates: these and others that a lower threshold would let in, with their scores, the highest first.
    """

    entities: tuple[Entity, ...]
    candidates: tuple[tuple[Entity, float], ...] = ()


class SpanTask(Task):
    """Entities that may nest and overlap. A prediction is a `SpanPrediction`.

    An entity whose ends are no ends of tokens cannot be predicted; it stays among the gold entities, and `notes` counts
    it. In training every entity that fits into a window is whole in one.
    """

    head = "DomextForSpanClassification"
    metric = "f1.micro"

    def prepare(self) -> None:
        """Number the types."""
        self.threshold = 0.0
        self._type_ids = {label: i for i, label in enumerate(self.data.labels)}

    @property
    def thresholds(self) -> dict[str, float]:
        """The score above which a span is an entity."""
        return {"threshold": self.threshold}

    @property
    def head_labels(self) -> tuple[str, ...]:
        """The entity types."""
        return self.data.labels

    def encode(self, examples: Sequence[AnyExample], *, is_training: bool) -> list[Row]:
        """Make one row a window; see `Task.encode`.

        Raises:
            ConfigError: the rows are too short for any text.
            CorpusError: an example to learn from has a type that the set does not name.
        """
        texts = cast("Sequence[AnnotatedText]", examples)
        template = read_template(self.tokenizer, pair=False)
        size = template.measure_room(self.options.max_length, least=1)
        rows: list[Row] = []
        unaligned: list[str] = []
        cut: list[str] = []
        for i, (example, pieces) in enumerate(
            zip(texts, encode_texts(self.tokenizer, [each.text for each in texts]), strict=True)
        ):
            spans = self._align(example, pieces, unaligned, is_training)
            windows = plan_windows(len(pieces), size, self.options.stride)
            if is_training:
                windows = add_windows(windows, [each for _, each in spans], len(pieces), size)
            cut += [example.source for _, each in spans if not any(holds(window, each) for window in windows)]
            for window in windows:
                part = pieces.cut(window)
                ids, types = template.join(part.ids)
                shift = template.find_text() - window[0]
                own = [[kind, span[0] + shift, span[1] - 1 + shift] for kind, span in spans if holds(window, span)]
                rows.append(Row(i, ids, types, {"spans": np.array(own, dtype=np.int64).reshape(-1, 3)}, part))
        num_entities = sum(len(each.entities) for each in texts)
        self.note_cases(unaligned, num_entities, "entities begin or end inside a token and cannot be found")
        self.note_cases(cut, num_entities, "entities are whole in no window; a larger stride or max_length helps")
        return rows

    def _align(
        self, example: AnnotatedText, pieces: TextPieces, unaligned: list[str], is_training: bool
    ) -> list[tuple[int, Window]]:
        """Type and pieces of the entities whose ends are ends of pieces; the sources of the others are kept."""
        # A character may be several pieces: the first one begins it and the last one ends it.
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for place in np.flatnonzero(pieces.is_visible) if example.entities else ():
            firsts.setdefault(int(pieces.starts[place]), int(place))
            lasts[int(pieces.ends[place])] = int(place)
        spans = []
        for each in example.entities:
            kind = self._type_ids.get(each.label)
            if kind is None and is_training:
                raise CorpusError(
                    f"{example.source}: the entity type {each.label!r} is none of {', '.join(self.data.labels)}; name "
                    "it among the set's labels."
                )
            first, last = firsts.get(each.start), lasts.get(each.end)
            if first is None or last is None or last < first:
                unaligned.append(example.source)
            elif kind is not None:
                spans.append((kind, (first, last + 1)))
        return spans

    def collate(self, rows: Sequence[Row]) -> TaskBatch:
        """Put rows side by side; "spans" int64 [B, S, 3] has type, first and last token, -1 where a row has fewer."""
        most = max(len(row.targets["spans"]) for row in rows)
        padded = []
        for row in rows:
            spans = row.targets["spans"]
            filled = np.pad(spans, ((0, most - len(spans)), (0, 0)), constant_values=_NO_SPAN)
            padded.append(replace(row, targets={"spans": filled}))
        return super().collate(padded)

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return rows times types: the loss of each is one term."""
        return num_rows * len(self.data.labels)

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed ZLPR loss; see `Task.compute_loss_sum` and `compute_zlpr`."""
        logits, spans = outputs.logits, targets["spans"]
        (kind, first, last), width, end = spans.unbind(dim=-1), logits.shape[-1], logits[0].numel()
        # What fills rows has a place behind all others: to leave it out would have the host wait for a GPU.
        places = torch.where(kind == _NO_SPAN, end, (kind * width + first) * width + last)
        labels = torch.zeros(len(logits), end + 1, dtype=torch.bool, device=logits.device).scatter(1, places, True)
        labels = labels[:, :end].reshape(logits.shape)
        return compute_zlpr(logits, labels).sum()

    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return type, first token, last token and score of a row's best spans, fp32 [B, K, 4]."""
        logits = outputs.logits.float()
        _, num_types, _, width = logits.shape
        num_kept = min(SPANS_PER_TOKEN * width, num_types * width * (width + 1) // 2)
        scores, places = logits.flatten(1).topk(num_kept, dim=1)
        pair = places % (width * width)
        parts = (places // (width * width), pair // width, pair % width, scores)
        return (torch.stack([each.float() for each in parts], dim=-1),)

    def decode(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[SpanPrediction]:
        """Join the spans of each text's windows; the higher score counts. See `Task.decode`."""
        shift = read_template(self.tokenizer, pair=False).find_text()
        found: list[dict[Entity, float]] = [{} for _ in examples]
        for row, (spans,) in zip(rows, outputs, strict=True):
            pieces: TextPieces = row.place
            spans = spans[: SPANS_PER_TOKEN * row.length]  # a longer batch must not change a prediction
            spans = spans[spans[:, 3] > -TUNED_RANGE]
            kinds, firsts, lasts = spans[:, :3].astype(np.int64).T
            firsts, lasts = firsts - shift, lasts - shift
            is_text = (firsts >= 0) & (lasts < len(pieces)) & (firsts <= lasts)
            kinds, firsts, lasts, scores = (each[is_text] for each in (kinds, firsts, lasts, spans[:, 3]))
            own = found[row.example]
            for kind, start, end, score in zip(
                kinds.tolist(),
                pieces.starts[firsts].tolist(),
                pieces.ends[lasts].tolist(),
                scores.tolist(),
                strict=True,
            ):
                entity = Entity(start, end, self.data.labels[kind])
                if start < end and score > own.get(entity, -TUNED_RANGE):
                    own[entity] = score
        return [self._predict(each) for each in found]

    def to_records(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[dict[str, Any]]:
        """Return "entities" with start, end, label, text and score, sorted by place; see `Task.to_records`.

        A score is the logistic function of the span's logit: one half where the loss puts the threshold.
        """
        records = []
        for example, each in zip(examples, self.decode(examples, rows, outputs), strict=True):
            text, scores = cast(AnnotatedText, example).text, dict(each.candidates)
            found = [describe_entity(text, entity, expit(scores[entity])) for entity in each.entities]
            records.append({"entities": found})
        return records

    def _predict(self, scores: dict[Entity, float]) -> SpanPrediction:
        candidates = sorted(scores.items(), key=lambda each: (-each[1], _sort_key(each[0])))
        above = [entity for entity, score in candidates if score > self.threshold]
        return SpanPrediction(tuple(sorted(above, key=_sort_key)), tuple(candidates))

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> Score:
        """Score entities in characters; see `metrics.score_entities`."""
        gold = [cast(AnnotatedText, each).entities for each in examples]
        return score_entities(gold, [each.entities for each in predictions], self.data.labels)

    def tune(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> dict[str, float]:
        """Choose the threshold with the best micro F1, of equal ones that nearest to 0; see `Task.tune`."""
        golds = [set(cast(AnnotatedText, each).entities) for each in examples]
        candidates = [
            (score, entity in gold)
            for gold, prediction in zip(golds, predictions, strict=True)
            for entity, score in prediction.candidates
        ]
        scores = np.array([score for score, _ in candidates])
        is_right = np.array([right for _, right in candidates], dtype=bool)
        num_gold = sum(map(len, golds))

        def measure(threshold: float) -> float:
            is_kept = scores > threshold
            return 2 * int((is_kept & is_right).sum()) / max(1, int(is_kept.sum()) + num_gold)

        thresholds: list[float] = np.linspace(-TUNED_RANGE, TUNED_RANGE, _STEPS + 1).round(6).tolist()
        self.threshold = max(thresholds, key=lambda each: (measure(each), -abs(each)))
        return {"threshold": self.threshold}

    def apply(self, thresholds: dict[str, float]) -> None:
        """Take over a threshold."""
        self.threshold = thresholds["threshold"]

    def predict_majority(self, examples: Sequence[AnyExample]) -> list[SpanPrediction]:
        """Look the text up in a dictionary of the training entities, the longest entry first.

        An entry has its most frequent type; entries that are no entity in most of their places in training are left
        out.
        """
        matcher = self._matcher
        return [SpanPrediction(tuple(matcher.match(cast(AnnotatedText, each).text))) for each in examples]

    @cached_property
    def _matcher(self) -> DictionaryMatcher:
        return build_matcher(cast("Sequence[AnnotatedText]", self.data.train))


def _sort_key(entity: Entity) -> tuple[int, int, str]:
    return entity.start, entity.end, entity.label
