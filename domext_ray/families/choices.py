"""Multiple choice: one of several continuations of a text (`Choice`).

A row has one segment a choice, `[CLS] context [SEP] stem option [SEP]`, and the head gives each a score (Devlin et al.,
2019, section 4.4).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from scipy.special import softmax
from tokenizers import Tokenizer

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import WRONG, Compared, Mistake
from domext_ray.families.family import ID, Prediction, SplitRows
from domext_ray.families.metrics.metrics import score_classes
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.cells import as_offset, as_whole
from domext_ray.families.readers.columns import get_value
from domext_ray.families.readers.examples import Choice
from domext_ray.families.readers.issues import DataIssues, SetRow
from domext_ray.families.rows import Row
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import Task
from domext_ray.families.windows import make_cutting_backend

if TYPE_CHECKING:
    from torch import Tensor


_LETTER = re.compile(r"\(?([A-Za-z])[.)]?")


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
    needed = (("context",), ("options",))
    head = "DomextForMultipleChoice"
    metric = "accuracy"
    fields = {"answer": pa.int64(), "text": pa.string(), "probabilities": pa.list_(pa.float64())}
    found = "answer"
    hub_task = "multiple-choice"
    outputs = ("score",)
    nothing = {"answer": 0}

    @classmethod
    def read(cls, row: SetRow) -> Choice:
        """Make a beginning with its continuations, from a column each (SWAG) or from one that lists them.

        Its answer is a place among them, as `read_together` has it.
        """
        context, options, stem = row.read_text("context"), row.get("options"), row.get("stem")
        if not isinstance(options, (list, tuple)) or len(options) < 2 or not all(isinstance(o, str) for o in options):
            rule = "give 2 texts or more" + (", or set columns.options" if row.is_labelled else "")
            raise CorpusError(f"{row.source} has {str(options)[:60]!r} as 'options'; {rule}.")
        for option in options:
            row.check_text(option, "options")
            if not option.strip():
                row.leave_out("has an empty option")
        answer = row.get("answer") if row.is_labelled else 0
        if type(answer) is not int or not 0 <= answer < len(options):
            row.leave_out("names no option as its answer", answer)
        stem = "" if stem is None or (isinstance(stem, str) and not stem.strip()) else row.read_text("stem")
        return Choice("", row.source, context, stem, tuple(option.strip() for option in options), answer)

    @classmethod
    def read_together(cls, splits: SplitRows, issues: DataIssues) -> SplitRows:
        """Return rows of choices whose answers are places among their options, from 0.

        A file may count from 1, which no 0 and a number as high as there are options show, or have letters, or the
        options' own texts; of two ways that differ the one that fits more rows is meant, and a tie is a CorpusError. An
        answer that is none stays as it is.
        """
        splits = {split: [_name_options(row) for row in own] for split, own in splits.items()}
        every = [row for split in splits.values() for row in split if _has_options(row)]
        numbers = {
            (number, len(row.get("options"))) for row in every if (number := as_offset(row.get("answer"))) is not None
        }
        has_zero = any(number == 0 for number, _ in numbers)
        _require_one_start(splits)
        first = int(not has_zero and any(number == count for number, count in numbers))
        ways: dict[str, Callable[[SetRow], int | None]] = {
            "a place": lambda row: _find_place(row, first),
            "a letter, and A is the first option": _find_letter,
            "the text of its option": _find_text,
        }
        found = [{way: place for way, read in ways.items() if (place := read(row)) is not None} for row in every]
        counts = Counter(way for places in found for way in places)
        chosen, used = dict[int, int](), Counter[str]()
        for row, places in zip(every, found, strict=True):
            best = [way for way in places if counts[way] == max(counts[other] for other in places)]
            if len({places[way] for way in best}) > 1:
                raise CorpusError(
                    f"{row.source} has the answer {row.get('answer')!r}, which is a place and the text of another "
                    "option; write answers as places from 0, and options that are no numbers or letters."
                )
            if best:
                chosen[id(row)] = places[best[0]]
                used[best[0]] += 1
        for way, number in used.items():
            if way != "a place":
                issues.say(f"{number:,} x answer read as {way}.")
        if used["a place"] and first:
            issues.say("Answers are counted from 1: none is 0, and some are as high as the number of options.")
        elif used["a place"] and not has_zero:
            issues.say("Answers are counted from 0, though none is 0; write letters if they are counted from 1.")
        return {
            split: [row.put("answer", chosen[id(row)]) if id(row) in chosen else row for row in own]
            for split, own in splits.items()
        }

    @classmethod
    def begin_split(cls, rows: Sequence[SetRow], side: Any) -> tuple[Sequence[SetRow], Callable[[SetRow], Choice]]:
        """Return the rows, and what reads each and refuses one that has not as many options as the first."""
        sizes: list[int] = []

        def read(row: SetRow) -> Choice:
            choice = cls.read(row)
            sizes.append(len(choice.options))
            if sizes[-1] != sizes[0]:
                raise CorpusError(f"{row.source} has {sizes[-1]} options; it must have {sizes[0]} as the first row.")
            return choice

        return rows, read

    @classmethod
    def compare(cls, example: Choice, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        gold, found = (f"{place}: {example.options[place]}" for place in (example.answer, prediction["answer"]))
        mistakes = () if gold == found else (Mistake(WRONG, gold, found),)
        text = f"{example.context} {example.stem}".strip()
        return Compared(example.id, example.source, text, (), (), gold, found, mistakes)

    @cached_property
    def _cutting(self) -> Tokenizer:
        return make_cutting_backend(self.tokenizer, self.options.max_length)

    def encode(self, examples: Sequence[Choice], *, is_training: bool) -> list[Row]:
        cutting, pad_id = self._cutting, self.tokenizer.pad_token_id or 0
        contexts = self.backend.encode_batch([choice.context for choice in examples], add_special_tokens=False)
        texts = [join_stem(choice.stem, option) for choice in examples for option in choice.options]
        continuations = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        rows: list[Row] = []
        cut: list[str] = []
        for i, (example, context) in enumerate(zip(examples, contexts, strict=True)):
            segments = [cutting.post_process(context, next(continuations)) for _ in example.options]
            if any(segment.overflowing for segment in segments):
                cut.append(example.source)
            lengths = tuple(len(segment.ids) for segment in segments)
            for segment in segments:
                segment.pad(max(lengths), pad_id=pad_id)
            ids = np.array([segment.ids for segment in segments], dtype=np.int64)
            types = np.array([segment.type_ids for segment in segments], dtype=np.int64) * has_types
            answer = np.array(example.answer, dtype=np.int64)
            rows.append(Row(i, ids, types if types.any() else None, {"labels": answer}, segment_lengths=lengths))
        what = f"examples have more than {self.options.max_length} tokens: the longer one of context and continuation"
        self.note_cases(cut, len(examples), f"{what} is cut first")
        return rows

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), targets["labels"], reduction="sum")

    def decode_row(self, example: Choice, output: np.ndarray) -> Prediction:
        """Return the place of the highest score, its text, and all probabilities in the choices' order."""
        answer = int(output.argmax())
        probabilities = softmax(output.reshape(-1).astype(np.float64)).tolist()
        return {"answer": answer, "text": example.options[answer], "probabilities": probabilities}

    def score(self, examples: Sequence[Choice], predictions: Sequence[Prediction]) -> Score:
        """Score places; see `metrics.score_classes`."""
        labels = [str(i) for i in range(max(len(choice.options) for choice in examples))]
        found = [str(prediction["answer"]) for prediction in predictions]
        return score_classes([str(choice.answer) for choice in examples], found, labels)

    def predict_baseline(self, examples: Sequence[Choice]) -> list[Prediction]:
        """Return the most frequent place of the right choice in training, the first of equals."""
        counts = Counter(example.answer for example in self.data.train)
        return [{"answer": min(counts, key=lambda answer: (-counts[answer], answer))}] * len(examples)


def join_stem(stem: str, option: str) -> str:
    """Join the common beginning of continuations and one of them, with a space unless the script has none."""
    is_joined = not stem or not option or stem[-1].isspace() or option[0].isspace()
    is_wide = not is_joined and unicodedata.east_asian_width(stem[-1]) in "WF"
    return stem + option if is_joined or is_wide else f"{stem} {option}"


def _require_one_start(splits: SplitRows) -> None:
    """Refuse answers that one split counts from 0, and another one from 1."""
    starts = dict[int, tuple[str, SetRow]]()
    for split, rows in splits.items():
        places = {as_offset(row.get("answer")): row for row in reversed(rows) if _has_options(row)}
        last = next((row for number, row in places.items() if number == len(row.get("options"))), None)
        if (0 in places) != (last is not None):
            starts.setdefault(0 if 0 in places else 1, (split, places.get(0) or cast(SetRow, last)))
    if len(starts) == 2:
        (zero, _), (one, row) = starts[0], starts[1]
        raise CorpusError(
            f"{row.source} has the answer {row.get('answer')!r}, so that {one} counts from 1, and {zero} has answers "
            "that are 0; count all from 0, or write letters."
        )


def _name_options(row: SetRow) -> SetRow:
    """Return a row whose options have names with their texts alone, and a letter as its answer.

    Options are an object of texts (MedQA), of lists (ARC, CommonsenseQA on the hub), or a list of objects.
    """
    given: Any = row.get("options")
    names: list[Any]
    if isinstance(given, Mapping) and given.keys() == {"text", "label"}:
        lists = [given[key] if isinstance(given[key], list | tuple) else [] for key in ("label", "text")]
        names, texts = map(list, lists)
    elif isinstance(given, Mapping):
        names, texts = [*given], [*given.values()]
    elif isinstance(given, list | tuple) and all(isinstance(option, Mapping) for option in given):
        names, texts = ([get_value(option, own) for option in given] for own in (("label", "key"), ("text", "value")))
    else:
        return row
    answer, names = row.get("answer"), [str(name) for name in names]
    letter = chr(ord("A") + names.index(str(answer))) if str(answer) in names else answer
    return row.put("options", texts).put("answer", letter)


def _has_options(row: SetRow) -> bool:
    options = row.get("options")
    return isinstance(options, (list, tuple)) and all(isinstance(option, str) for option in options)


def _find_place(row: SetRow, first: int) -> int | None:
    number = as_offset(row.get("answer"))
    return number - first if number is not None and 0 <= number - first < len(row.get("options")) else None


def _find_letter(row: SetRow) -> int | None:
    match = _LETTER.fullmatch(str(row.get("answer")).strip())
    place = ord(match[1].upper()) - ord("A") if match else -1
    return place if 0 <= place < len(row.get("options")) else None


def _find_text(row: SetRow) -> int | None:
    answer = str(as_whole(row.get("answer"))).strip()
    places = [i for i, option in enumerate(row.get("options")) if option.strip() == answer]
    return places[0] if len(places) == 1 and answer else None
