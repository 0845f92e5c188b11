"""Multiple choice: one of several continuations of a text (`Choice`).

A row has one segment a choice, `[CLS] context [SEP] stem option [SEP]`, and the head gives each a score (Devlin et al.,
2019, section 4.4).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from scipy.special import softmax
from tokenizers import Tokenizer

from domext_ray.families.comparison import WRONG, Compared, Mistake
from domext_ray.families.family import ID, Prediction
from domext_ray.families.metrics.metrics import score_classes
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import AnyExample, Choice
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import Row, Task
from domext_ray.families.windows import make_cutting_backend, stack_rows

if TYPE_CHECKING:
    from torch import Tensor


class ChoiceTask(Task):
    """The right one of several continuations. A prediction has its place from 0, "answer", and what users read of it.

    A choice that is too long is cut at its end, the longer one of context and continuation first; `notes` counts these.
    """

    family = "multiple_choice"
    readers = {"records": ("context", "options", "answer")}
    columns = {
        **ID,
        "context": ("context", "sent1"),
        "stem": ("stem", "sent2"),
        "options": ("ending0", "ending1", "ending2", "ending3"),
        "answer": ("answer", "label"),
    }
    metrics = ("accuracy",)
    head = "DomextForMultipleChoice"
    metric = "accuracy"
    fields = {"answer": pa.int64(), "text": pa.string(), "probabilities": pa.list_(pa.float64())}
    found = "answer"
    hub_task = "multiple-choice"
    names_outputs = False
    nothing = {"answer": 0}

    @classmethod
    def list_outputs(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the one score, whichever choice it is of."""
        return ("score",)

    @classmethod
    def compare(cls, example: Choice, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        """Compare the chosen options; see `Family.compare`."""
        gold, found = (f"{place}: {example.options[place]}" for place in (example.answer, prediction["answer"]))
        mistakes = () if gold == found else (Mistake(WRONG, gold, found),)
        text = f"{example.context} {example.stem}".strip()
        return Compared(example.id, example.source, text, (), (), gold, found, mistakes)

    @cached_property
    def _cutting(self) -> Tokenizer:
        return make_cutting_backend(self.tokenizer, self.options.max_length)

    def encode(self, examples: Sequence[AnyExample], *, is_training: bool) -> list[Row]:
        """Make one row an example, with a segment a choice; see `Task.encode`."""
        choices = cast("Sequence[Choice]", examples)
        cutting, pad_id = self._cutting, self.tokenizer.pad_token_id or 0
        contexts = self.backend.encode_batch([choice.context for choice in choices], add_special_tokens=False)
        texts = [join_stem(choice.stem, option) for choice in choices for option in choice.options]
        continuations = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        rows: list[Row] = []
        cut: list[str] = []
        for i, (example, context) in enumerate(zip(choices, contexts, strict=True)):
            segments = [cutting.post_process(context, next(continuations)) for _ in example.options]
            if any(segment.overflowing for segment in segments):
                cut.append(example.source)
            ids = stack_rows([segment.ids for segment in segments], pad_id)
            types = stack_rows([segment.type_ids for segment in segments], 0) * has_types
            answer = np.array(example.answer, dtype=np.int64)
            lengths = tuple(len(segment.ids) for segment in segments)
            rows.append(Row(i, ids, types if types.any() else None, {"labels": answer}, segment_lengths=lengths))
        what = f"examples have more than {self.options.max_length} tokens: the longer one of context and continuation"
        self.note_cases(cut, len(choices), f"{what} is cut first")
        return rows

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the summed cross-entropy over the choices; see `Task.compute_loss_sum`."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), targets["labels"], reduction="sum")

    def decode_row(self, example: Choice, output: np.ndarray) -> Prediction:
        """Return the place of the highest score, its text, and all probabilities in the choices' order."""
        answer = int(output.argmax())
        probabilities = softmax(output.reshape(-1).astype(np.float64)).tolist()
        return {"answer": answer, "text": example.options[answer], "probabilities": probabilities}

    def score(self, examples: Sequence[AnyExample], predictions: Sequence[Prediction]) -> Score:
        """Score places; see `metrics.score_classes`."""
        choices = cast("Sequence[Choice]", examples)
        labels = [str(i) for i in range(max(len(choice.options) for choice in choices))]
        found = [str(prediction["answer"]) for prediction in predictions]
        return score_classes([str(choice.answer) for choice in choices], found, labels)

    def predict_baseline(self, examples: Sequence[AnyExample]) -> list[Prediction]:
        """Return the most frequent place of the right choice in training, the first of equals."""
        counts = Counter(cast(Choice, example).answer for example in self.data.train)
        return [{"answer": min(counts, key=lambda answer: (-counts[answer], answer))}] * len(examples)


def join_stem(stem: str, option: str) -> str:
    """Join the common beginning of continuations and one of them, with a space unless the script has none."""
    is_joined = not stem or not option or stem[-1].isspace() or option[0].isspace()
    is_wide = not is_joined and unicodedata.east_asian_width(stem[-1]) in "WF"
    return stem + option if is_joined or is_wide else f"{stem} {option}"
