"""Multiple choice: one of several continuations of a text (`Choice`).

A row has one segment a choice, `[CLS] context [SEP] stem option [SEP]`, and the head gives each a score (Devlin et al.,
2019, section 4.4).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from scipy.special import softmax
from torch import Tensor, nn

from domext_ray.downstream.tasks.records import round_score
from domext_ray.downstream.tasks.task import Row, Task
from domext_ray.downstream.tasks.windows import encode_texts, read_template
from domext_ray.labelled.examples import AnyExample, Choice
from domext_ray.labelled.metrics.metrics import score_classes
from domext_ray.labelled.metrics.scores import Score


class ChoiceTask(Task):
    """The right one of several continuations. A prediction is its place, from 0.

    A choice that is too long is cut at its end, the longer one of context and continuation first; `notes` counts these.
    """

    head = "DomextForMultipleChoice"
    metric = "accuracy"

    @property
    def head_labels(self) -> tuple[str, ...]:
        """One score, whichever choice it is of."""
        return ("score",)

    def encode(self, examples: Sequence[AnyExample], *, is_training: bool) -> list[Row]:
        """Make one row an example, with a segment a choice; see `Task.encode`.

        Raises:
            ConfigError: the rows are too short for a context and a continuation.
        """
        choices = cast("Sequence[Choice]", examples)
        template = read_template(self.tokenizer, pair=True)
        room = template.measure_room(self.options.max_length, least=2)
        contexts = encode_texts(self.tokenizer, [each.context for each in choices])
        continuations = encode_texts(
            self.tokenizer, [join_stem(each.stem, option) for each in choices for option in each.options]
        )
        rows: list[Row] = []
        cut: list[str] = []
        place = 0
        for i, (example, context) in enumerate(zip(choices, contexts, strict=True)):
            own = [each.ids for each in continuations[place : place + len(example.options)]]
            place += len(own)
            if len(context) + max(map(len, own)) > room:
                cut.append(example.source)
            segments = [template.join(*cut_pair(context.ids, each, room)) for each in own]
            ids = self._pad([ids for ids, _ in segments], self.tokenizer.pad_token_id or 0)
            types = None if template.types is None else self._pad([cast(np.ndarray, each) for _, each in segments], 0)
            rows.append(Row(i, ids, types, {"labels": np.array(example.answer, dtype=np.int64)}))
        what = f"examples have more than {self.options.max_length} tokens: the longer one of context and continuation"
        self.note_cases(cut, len(choices), f"{what} is cut first")
        return rows

    @staticmethod
    def _pad(segments: Sequence[np.ndarray], pad: int) -> np.ndarray:
        """Stack the segments of a row, int64 [C, N]."""
        longest = max(map(len, segments))
        return np.stack([np.pad(each, (0, longest - len(each)), constant_values=pad) for each in segments])

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed cross-entropy over the choices; see `Task.compute_loss_sum`."""
        return nn.functional.cross_entropy(outputs.logits.float(), targets["labels"], reduction="sum")

    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the scores, fp32 [B, 1, C]."""
        return (outputs.logits.float()[:, None],)  # the first dimension must not be taken for the row's length

    def decode(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[int]:
        """Return the place of the highest score; see `Task.decode`."""
        places = [0] * len(examples)
        for row, (scores,) in zip(rows, outputs, strict=True):
            places[row.example] = int(scores.argmax())
        return places

    def to_records(
        self, examples: Sequence[AnyExample], rows: Sequence[Row], outputs: Sequence[tuple[np.ndarray, ...]]
    ) -> list[dict[str, Any]]:
        """Return "answer" (a place, from 0), its "text", and "probabilities" in the choices' order."""
        records: list[dict[str, Any]] = [{} for _ in examples]
        for row, (scores,) in zip(rows, outputs, strict=True):
            answer = int(scores.argmax())
            probabilities = softmax(scores.reshape(-1).astype(np.float64))
            records[row.example] = {
                "answer": answer,
                "text": cast(Choice, examples[row.example]).options[answer],
                "probabilities": [round_score(each) for each in probabilities],
            }
        return records

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Any]) -> Score:
        """Score places; see `metrics.score_classes`."""
        choices = cast("Sequence[Choice]", examples)
        labels = [str(i) for i in range(max(len(each.options) for each in choices))]
        return score_classes([str(each.answer) for each in choices], [str(each) for each in predictions], labels)

    def predict_majority(self, examples: Sequence[AnyExample]) -> list[int]:
        """Return the most frequent place of the right choice in training, the first of equals."""
        counts = Counter(cast(Choice, each).answer for each in self.data.train)
        return [min(counts, key=lambda each: (-counts[each], each))] * len(examples)


def join_stem(stem: str, option: str) -> str:
    """Join the common beginning of continuations and one of them, with a space unless the script has none."""
    is_joined = not stem or not option or stem[-1].isspace() or option[0].isspace()
    is_wide = not is_joined and unicodedata.east_asian_width(stem[-1]) in "WF"
    return stem + option if is_joined or is_wide else f"{stem} {option}"


def cut_pair(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut two texts to so many pieces together, piece by piece at the end of the longer one.

    Args:
        first: int64 ids.
        second: int64 ids.
        room: pieces of both at most.
    """
    if len(first) + len(second) <= room:
        return first, second
    # The longer one is cut down to the shorter one's length; from there on both are, and it keeps the odd piece;
    # of equal ones the second does, as in transformers' longest_first.
    longer = max(room - min(len(first), len(second)), room - room // 2)
    num_first = longer if len(first) > len(second) else room - longer
    return first[:num_first], second[: room - num_first]
