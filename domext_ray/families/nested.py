"""Nested named entities: every span of tokens is scored for every type (`AnnotatedText`).

Enters: texts with entities that may nest and overlap. Leaves: their entities in characters. Long texts make several
windows, whose predictions are joined. The loss is ZLPR (Su et al., 2022), summed over rows and types: its threshold is
0, from which `fit_thresholds` may move on dev.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import expit

from domext_ray.families.comparison import Compared, compare_spans
from domext_ray.families.entity_dictionary import DictionaryMatcher, build_matcher
from domext_ray.families.family import ENTITY_LIST, ENTITY_METRICS, ID, SPANS, Prediction, describe_entity, read_entity
from domext_ray.families.metrics.metrics import score_entities
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import AnnotatedText, Entity, sort_entities
from domext_ray.families.readers.issues import DataIssues, SetRow, list_places
from domext_ray.families.readers.offsets import Unit
from domext_ray.families.readers.set_description import WITH_PLACES
from domext_ray.families.readers.spans import place_annotations, read_annotations
from domext_ray.families.readers.words import is_whole
from domext_ray.families.rows import Row
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import Outputs, Task
from domext_ray.families.windows import (
    TextPieces,
    Window,
    encode_texts,
    holds,
    plan_windows,
    read_template,
)

if TYPE_CHECKING:
    from torch import Tensor

SPANS_PER_TOKEN = 8
"""Best spans of a row that decoding sees, for every token of it: all [T, N, N] scores would fill the memory."""

TUNED_RANGE = 3.0
"""The threshold is tuned from minus this to this: the loss puts it at 0."""

FEWEST_CUT = 3
"""Entities that begin or end inside a word are told if they are so many at least, and half of all."""

_STEPS = 60
_NO_SPAN = -1


class SpanTask(Task):
    """Entities that may nest and overlap. A prediction has "entities" above the threshold, sorted by place.

    It also has "candidates": these and others that a lower threshold would let in, each [start, end, label, logit], the
    highest first. An entity's score is the logistic function of its logit: one half where the loss puts the threshold.

    An entity whose ends are no ends of tokens cannot be predicted; it stays among the gold entities, and `notes` counts
    it. In training every entity that fits into a window is whole in one.
    """

    family = "nested_ner"
    readers = {"records": ("text", "entities"), **dict.fromkeys(WITH_PLACES, ())}
    columns = {**ID, **SPANS}
    annotated = "entities"
    metrics = ENTITY_METRICS
    head = "DomextForSpanClassification"
    metric = "f1.micro"
    target_pads = {"spans": _NO_SPAN}
    fields = {"entities": ENTITY_LIST}
    found = "entities"
    hub_task = "token-classification"
    nothing = {"entities": []}

    def prepare(self) -> None:
        """Number the types."""
        self.thresholds = {"threshold": 0.0}
        self._type_ids = {label: i for i, label in enumerate(self.data.labels)}
        self._template = read_template(self.tokenizer, pair=False)

    def encode(self, examples: Sequence[AnnotatedText], *, is_training: bool) -> list[Row]:
        template = self._template
        size = template.measure_room(self.options.max_length, least=1)
        rows: list[Row] = []
        unaligned: list[str] = []
        cut: list[str] = []
        encoded = encode_texts(self.backend, [text.text for text in examples])
        for i, (example, pieces) in enumerate(zip(examples, encoded, strict=True)):
            spans = self._align(example, pieces, unaligned)
            whole = [span for _, span in spans] if is_training else []
            windows = plan_windows(len(pieces), size, self.options.stride, whole)
            cut += [example.source for _, span in spans if not any(holds(window, span) for window in windows)]
            for window in windows:
                part = pieces.cut(window)
                ids, types = template.join(part.ids)
                shift = template.find_text() - window[0]
                own = [[kind, span[0] + shift, span[1] - 1 + shift] for kind, span in spans if holds(window, span)]
                rows.append(Row(i, ids, types, {"spans": np.array(own, dtype=np.int64).reshape(-1, 3)}, part))
        num_entities = sum(len(text.entities) for text in examples)
        self.note_cases(unaligned, num_entities, "entities begin or end inside a token and cannot be found")
        self.note_cases(cut, num_entities, "entities are whole in no window; a larger stride or max_length helps")
        return rows

    def _align(self, example: AnnotatedText, pieces: TextPieces, unaligned: list[str]) -> list[tuple[int, Window]]:
        """Type and pieces of the entities whose ends are ends of pieces; the sources of the others are kept."""
        # A character may be several pieces: the first one begins it and the last one ends it.
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for place in np.flatnonzero(pieces.is_visible) if example.entities else ():
            firsts.setdefault(int(pieces.starts[place]), int(place))
            lasts[int(pieces.ends[place])] = int(place)
        spans = []
        for entity in example.entities:
            kind = self._type_ids.get(entity.label)
            first, last = firsts.get(entity.start), lasts.get(entity.end)
            if first is None or last is None or last < first:
                unaligned.append(example.source)
            elif kind is not None:
                spans.append((kind, (first, last + 1)))
        return spans

    @classmethod
    def read(cls, row: SetRow, unit: Unit | None = None) -> AnnotatedText:
        """Make a text with entities, which may nest and overlap; `unit` is what their offsets count."""
        text = row.read_text("text", is_stripped=False)
        entities, misplaced = place_annotations(row, text, unit) if row.is_labelled else ({}, {})
        return AnnotatedText("", row.source, text, sort_entities(entities), misplaced=sort_entities(misplaced))

    @classmethod
    def begin_split(
        cls, rows: Sequence[SetRow], side: Any
    ) -> tuple[Sequence[SetRow], Callable[[SetRow], AnnotatedText]]:
        rows, unit = read_annotations(rows)
        return rows, partial(cls.read, unit=unit)

    @classmethod
    def check_set(cls, splits: Mapping[str, Sequence[AnnotatedText]], side: Any, issues: DataIssues) -> None:
        """Warn of a split most of whose entities begin or end inside a word."""
        for split, texts in splits.items():
            entities = [(text, entity) for text in texts for entity in text.entities]
            cut = [text.source for text, entity in entities if not is_whole(text.text, entity.start, entity.end)]
            if len(cut) >= max(FEWEST_CUT, len(entities) / 2):
                issues.warn(
                    f"{len(cut):,} of {len(entities):,} entities of {split} begin or end inside a word "
                    f"({list_places(cut)}); do offsets count characters from 0, and are ends exclusive (else set ends: "
                    "inclusive)?"
                )

    @classmethod
    def compare(cls, example: AnnotatedText, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        return compare_spans(example, example.text, [*map(read_entity, prediction["entities"])])

    def count_targets(self, targets: dict[str, Tensor], num_rows: int) -> int:
        """Return rows times types: the loss of each is one term."""
        return num_rows * len(self.data.labels)

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        import torch

        from domext_ray.model.domext.heads_domext import compute_zlpr

        logits, spans = outputs.logits, targets["spans"]
        (kind, first, last), width, end = spans.unbind(dim=-1), logits.shape[-1], logits[0].numel()
        # What fills rows has a place behind all others: to leave it out would have the host wait for a GPU.
        places = torch.where(kind == _NO_SPAN, end, (kind * width + first) * width + last)
        labels = torch.zeros(len(logits), end + 1, dtype=torch.bool, device=logits.device).scatter(1, places, True)
        labels = labels[:, :end].reshape(logits.shape)
        return compute_zlpr(logits, labels).sum()

    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return type, first token, last token and score of a row's best spans, fp32 [B, K, 4]."""
        import torch

        logits = outputs.logits.float()
        _, num_types, _, width = logits.shape
        num_kept = min(SPANS_PER_TOKEN * width, num_types * width * (width + 1) // 2)
        scores, places = logits.flatten(1).topk(num_kept, dim=1)
        pair = places % (width * width)
        parts = (places // (width * width), pair // width, pair % width, scores)
        return (torch.stack([part.float() for part in parts], dim=-1),)

    def decode(self, examples: Sequence[AnnotatedText], rows: Sequence[Row], outputs: Outputs) -> list[Prediction]:
        shift = self._template.find_text()
        found: list[dict[tuple[int, int, str], float]] = [{} for _ in examples]
        for row, (spans,) in zip(rows, outputs, strict=True):
            pieces: TextPieces = row.place
            spans = spans[: SPANS_PER_TOKEN * row.length]  # a longer batch must not change a prediction
            spans = spans[spans[:, 3] > -TUNED_RANGE]
            kinds, firsts, lasts = spans[:, :3].astype(np.int64).T
            firsts, lasts = firsts - shift, lasts - shift
            is_text = (firsts >= 0) & (lasts < len(pieces)) & (firsts <= lasts)
            kinds, firsts, lasts, scores = (column[is_text] for column in (kinds, firsts, lasts, spans[:, 3]))
            columns = (pieces.starts[firsts], pieces.ends[lasts], kinds, scores)
            own = found[row.example]
            for start, end, kind, score in zip(*(column.tolist() for column in columns), strict=True):
                span = (start, end, self.data.labels[kind])
                if start < end and score > own.get(span, -TUNED_RANGE):
                    own[span] = score
        ranked = [sorted(scored.items(), key=lambda item: (-item[1], item[0])) for scored in found]
        candidates = [{"candidates": [[*span, score] for span, score in scored]} for scored in ranked]
        return self.decide_all(examples, candidates)

    def decide(self, example: AnnotatedText, prediction: Prediction) -> Prediction:
        """Choose the entities above the threshold."""
        text = example.text
        above = sorted(
            candidate for candidate in prediction["candidates"] if candidate[3] > self.thresholds["threshold"]
        )
        found = [describe_entity(text, Entity(*span), expit(score)) for *span, score in above]
        return {"entities": found, "candidates": prediction["candidates"]}

    def score(self, examples: Sequence[AnnotatedText], predictions: Sequence[Prediction]) -> Score:
        """Score entities in characters; see `metrics.score_entities`."""
        gold = [example.gold for example in examples]
        return score_entities(
            gold, [[*map(read_entity, prediction["entities"])] for prediction in predictions], self.data.labels
        )

    def fit_thresholds(self, examples: Sequence[AnnotatedText], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose the threshold with the best micro F1, of equal ones that nearest to 0."""
        golds = [set(example.gold) for example in examples]
        pairs = zip(golds, predictions, strict=True)
        candidates = [
            (score, Entity(*span) in gold) for gold, prediction in pairs for *span, score in prediction["candidates"]
        ]
        scores = np.array([score for score, _ in candidates])
        is_right = np.array([right for _, right in candidates], dtype=bool)
        num_gold = sum(map(len, golds))

        def measure(threshold: float) -> float:
            is_kept = scores > threshold
            return 2 * int((is_kept & is_right).sum()) / max(1, int(is_kept.sum()) + num_gold)

        thresholds: list[float] = np.linspace(-TUNED_RANGE, TUNED_RANGE, _STEPS + 1).round(6).tolist()
        self.thresholds = {"threshold": max(thresholds, key=lambda threshold: (measure(threshold), -abs(threshold)))}
        return self.thresholds

    def predict_baseline(self, examples: Sequence[AnnotatedText]) -> list[Prediction]:
        """Look the text up in a dictionary of the training entities, the longest entry first.

        An entry has its most frequent type; entries that are no entity in most of their places in training are left
        out.
        """
        texts = [example.text for example in examples]
        return [{"entities": [describe_entity(text, entity) for entity in self._matcher.match(text)]} for text in texts]

    @cached_property
    def _matcher(self) -> DictionaryMatcher:
        return build_matcher(self.data.train)
