"""Answers to questions as stretches of their contexts (`Question`; SQuAD 1.1 and 2.0, CMRC 2018).

Devlin et al. (2019), sections 4.2 and 4.3: the answer from token i to token j scores S·T_i + E·T_j. Where some
questions have no answer, "none" scores S·C + E·C, the lowest of a context's windows, and a stretch is the answer if it
scores more than that plus tau, which is tuned on dev. All stretches are searched, so there is no n-best list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from domext_ray.errors import CorpusError
from domext_ray.families.comparison import MISSED, SPURIOUS, WRONG, WRONG_BOUNDARY, Compared, Mistake
from domext_ray.families.family import ID, Prediction
from domext_ray.families.metrics.answer_metrics import CMRC, SQUAD_V2, score_answer
from domext_ray.families.metrics.metrics import score_answers
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.cells import as_offset, read_mark
from domext_ray.families.readers.examples import Entity, Question
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.readers.set_description import RULES
from domext_ray.families.readers.words import is_whole
from domext_ray.families.rows import Row
from domext_ray.families.state import BOOL, NOTHING_LEARNED, State
from domext_ray.families.task import Outputs, Task
from domext_ray.families.windows import TextPieces, Window, encode_texts, holds, plan_windows, read_template

if TYPE_CHECKING:
    from torch import Tensor

MAX_QUESTION_LENGTH = 64
MAX_ANSWER_LENGTH = 30
"""Tokens; as in BERT's code for SQuAD."""

MAX_CHINESE_ANSWER_LENGTH = 60
"""Tokens, which are characters: a word has some two of them."""

NEAR_CHARS = 20
"""How far from its offset an answer may be that occurs more than once."""

ANSWER = "answer"
CLS = 0
"""Place of [CLS], which stands for "no answer"."""

_LOWEST = float(np.finfo(np.float32).min)
_BASELINE_QUESTIONS = 100


class QuestionTask(Task):
    """Stretches of contexts that answer questions. A prediction has "answer", "start" and "end", None if there is none.

    It also has "score" (the sum of the logits of the best stretch, less that of "none" where a question may have no
    answer: an answer if this is above tau), "null_score" (of "none") and "best", the first character of that stretch
    and the one after its last.

    Questions are cut to 64 tokens, in short rows to two thirds of the row. A window of the context that does not hold
    the whole answer has [CLS] as its target; in training one window at least holds it. Answers are found up to
    `max_answer_length` tokens: 30, or 60 in a Chinese set, whose answers are compared as CMRC 2018 does. Questions
    without an answer in train or dev allow "none".
    """

    family = "qa"
    readers = dict.fromkeys(("squad", "records"), ("question", "context", "answers"))
    columns = {
        **ID,
        **{role: (role,) for role in ("question", "context", "is_impossible")},
        "answers": ("answers", "answer"),
        "start": ("answer_start", "start"),
    }
    metrics = ("f1", "exact", "has_answer.*", "no_answer.*")
    rules = RULES
    needed = (("question",), ("context",))
    has_token_outputs = True
    head = "DomextForQuestionAnswering"
    metric = "f1"
    fields = {"answer": pa.string(), "start": pa.int64(), "end": pa.int64(), "score": pa.float64()}
    found = "answer"
    hub_task = "question-answering"
    outputs = ("start", "end")
    nothing = {"answer": None}
    state_rules = {"rule": (f"one of {', '.join(RULES)}", RULES.__contains__), "has_no_answer": BOOL}

    def learn(self) -> dict[str, Any]:
        """Take the set's rule for answers, SQuAD 2.0's if it names none; find whether a question may have no answer."""
        questions = (*self.data.train, *self.data.dev)
        has_none = any(not question.answer_texts for question in questions)
        return {"rule": self.data.rule or SQUAD_V2, "has_no_answer": has_none}

    def prepare(self) -> None:
        """Start with a tau of 0, where a question may have no answer."""
        self.rule, self.has_null = self.state["rule"], self.state["has_no_answer"]
        self.thresholds = {"tau": 0.0} if self.has_null else {}

    @property
    def max_answer_length(self) -> int:
        """Tokens of an answer at most."""
        return MAX_CHINESE_ANSWER_LENGTH if self.rule == CMRC else MAX_ANSWER_LENGTH

    @classmethod
    def read(cls, row: SetRow) -> Question:
        """Make a question with the places of its answers; those that the context does not have stay as texts.

        The description's `no_answer` says whether a question without answers is one.
        """
        context, question = row.read_text("context", is_stripped=False), row.get("question")
        if not row.is_labelled:
            return Question("", row.source, row.read_text("question"), context, ())
        is_empty = isinstance(question, str) and not question.strip()  # scripts count its answers all the same
        question = "" if is_empty else row.read_text("question")
        listed = _read_answers(row)
        if not listed and not row.description.no_answer:
            row.leave_out("has no answer (no_answer is false)", what="question")
        places = [_place_answer(values, context, row) for values in listed]
        answers = tuple(place for place in places if place is not None)
        unplaced = tuple(values["text"] for values, place in zip(listed, places, strict=True) if place is None)
        if unplaced and not answers:
            row.keep_gold("question", "has none of its answers in the context", "")
        if is_empty:
            row.keep_gold("question", "is empty", "")
        return Question("", row.source, question, context, answers, unplaced=unplaced)

    @classmethod
    def list_found(cls, record: Mapping[str, Any]) -> list[str]:
        return ["no answer" if record["answer"] is None else "answer"]

    @classmethod
    def compare(cls, example: Question, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        """Compare answers: right is one of the accepted ones by the set's rule, or none where there is none.

        The text that is shown is the question, and the context on the next line.
        """
        place = len(example.question) + 1
        accepted = [Entity(span.start + place, span.end + place, ANSWER) for span in example.answers]
        answer = prediction["answer"]
        found = [Entity(prediction["start"] + place, prediction["end"] + place, ANSWER)] if answer else []
        texts = (*example.answer_texts, "none")[0], answer or "none"
        is_right, _ = score_answer(example.answer_texts, answer or "", state.get("rule", SQUAD_V2))
        spans = (*accepted[:1], *found)
        mistakes = () if is_right else (Mistake(_name_mistake(example, accepted, found), *texts, spans),)
        text = f"{example.question}\n{example.context}"
        return Compared(example.id, example.source, text, tuple(accepted[:1]), tuple(found), *texts, mistakes=mistakes)

    def encode(self, examples: Sequence[Question], *, is_training: bool) -> list[Row]:
        template = read_template(self.tokenizer, pair=True)
        room = template.measure_room(self.options.max_length, least=2)
        longest = min(MAX_QUESTION_LENGTH, room * 2 // 3)  # a third of a short row at least is the context's
        asked = encode_texts(self.backend, [item.question for item in examples])
        contexts = list(dict.fromkeys(item.context for item in examples))
        pieces = dict(zip(contexts, encode_texts(self.backend, contexts), strict=True))
        rows: list[Row] = []
        counts: dict[str, list[str]] = {}
        for i, (example, question) in enumerate(zip(examples, asked, strict=True)):
            context = pieces[example.context]
            answer = find_answer(example, context) if is_training and example.answers else None
            if len(question) > longest:
                counts.setdefault(f"questions are cut to {longest} tokens", []).append(example.source)
            if is_training and example.answer_texts and answer is None:
                what = "questions are left out of training because no token has anything of their answer"
                counts.setdefault(what, []).append(example.source)
                continue
            ids = question.ids[:longest]
            size, first = room - len(ids), template.find_text(ids)
            if answer is not None and answer[1] - answer[0] > min(self.max_answer_length, size):
                what = f"answers have more than {self.max_answer_length} tokens, or than a window, and cannot be found"
                counts.setdefault(what, []).append(example.source)
            for window in plan_windows(len(context), size, self.options.stride, [answer] if answer else ()):
                part = context.cut(window)
                start, end = CLS, CLS
                if answer is not None and holds(window, answer):
                    start, end = (first + place - window[0] for place in (answer[0], answer[1] - 1))
                targets = {"starts": np.array(start, dtype=np.int64), "ends": np.array(end, dtype=np.int64)}
                rows.append(Row(i, *template.join(ids, part.ids), targets, (part, first)))
        for what, sources in counts.items():
            self.note_cases(sources, len(examples), what)
        return rows

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        from torch.nn.functional import cross_entropy

        start = cross_entropy(outputs.start_logits.float(), targets["starts"], reduction="sum")
        end = cross_entropy(outputs.end_logits.float(), targets["ends"], reduction="sum")
        return (start + end) / 2

    def read_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return the scores of first and last token, fp32 [B, N, 2]."""
        import torch

        return (torch.stack([outputs.start_logits.float(), outputs.end_logits.float()], dim=-1),)

    def decode(self, examples: Sequence[Question], rows: Sequence[Row], outputs: Outputs) -> list[Prediction]:
        best: list[tuple[float, list[int]]] = [(_LOWEST, [0, 0])] * len(examples)
        null = [np.inf] * len(examples)
        for row, (scores,) in zip(rows, outputs, strict=True):
            pieces, begin = cast("tuple[TextPieces, int]", row.place)
            null[row.example] = min(null[row.example], float(scores[CLS].sum()))
            own = scores[begin : begin + len(pieces)].astype(np.float64)
            first, last, score = find_best(own, pieces.is_visible, self.max_answer_length)
            if score > best[row.example][0]:
                best[row.example] = score, [int(pieces.starts[first]), int(pieces.ends[last])]
        found: list[Prediction] = []
        for (score, stretch), lowest in zip(best, null, strict=True):
            none = lowest if self.has_null else 0.0
            found.append({"score": score - none, "null_score": none, "best": stretch})
        return self.decide_all(examples, found)

    def decide(self, example: Question, prediction: Prediction) -> Prediction:
        """Answer with the best stretch, if it scores more than tau."""
        start, end = prediction["best"]
        if self.has_null and prediction["score"] <= self.thresholds["tau"]:
            start = end = 0
        return {**prediction, **_answer(example.context, start, end)}

    def score(self, examples: Sequence[Question], predictions: Sequence[Prediction]) -> Score:
        """Score the answers' texts; see `metrics.score_answers`."""
        gold = [example.answer_texts for example in examples]
        return score_answers(gold, [prediction["answer"] or "" for prediction in predictions], self.rule)

    def fit_thresholds(self, examples: Sequence[Question], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Choose tau by the mean F1 (or exact match, if dev chooses by it), of equal ones that nearest to 0.

        Nothing is to be chosen where every question has an answer.
        """
        if not self.has_null:
            return {}
        figure = 0 if self.metric.endswith("exact") else 1
        gains = []
        for example, prediction in zip(examples, predictions, strict=True):
            texts = example.context[slice(*prediction["best"])], ""
            answered, refused = (score_answer(example.answer_texts, text, self.rule)[figure] for text in texts)
            gains.append((prediction["score"], answered - refused))
        self.thresholds = {"tau": choose_tau(gains)}
        return self.thresholds

    def predict_baseline(self, examples: Sequence[Question]) -> list[Prediction]:
        """Answer with as many first words of the context (Chinese: characters) as were best in training, or none."""
        return [take_units(example, self._num_units, self.rule) for example in examples]

    @cached_property
    def _num_units(self) -> int:
        every = max(1, len(self.data.train) // _BASELINE_QUESTIONS)
        train = self.data.train[::every]
        counts = range(0 if self.has_null else 1, MAX_ANSWER_LENGTH + 1)

        def measure(count: int) -> float:
            return self.score(train, [take_units(question, count, self.rule) for question in train]).get("f1")

        return max(counts, key=measure)


def _name_mistake(example: Question, accepted: Sequence[Entity], found: Sequence[Entity]) -> str:
    if not example.answer_texts or not found:
        return MISSED if example.answer_texts else SPURIOUS
    is_near = any(answer.start < found[0].end and found[0].start < answer.end for answer in accepted)
    return WRONG_BOUNDARY if is_near else WRONG


def find_answer(example: Question, context: TextPieces) -> Window | None:
    """Return the pieces that have something of the first accepted answer; None if none has."""
    answer = example.answers[0]
    places = np.flatnonzero(context.is_visible & (context.ends > answer.start) & (context.starts < answer.end))
    return (int(places[0]), int(places[-1]) + 1) if len(places) else None


def find_best(scores: np.ndarray, is_allowed: np.ndarray, max_length: int) -> tuple[int, int, float]:
    """Return the first and the last token of the best stretch, and its score.

    Scores are float64 [P, 2], of the first and the last token; `is_allowed`, bool [P], says which may be first or last.
    """
    starts, ends = np.where(is_allowed[:, None], scores, _LOWEST).T
    best = (0, 0, _LOWEST)
    for further in range(min(max_length, len(scores))):
        sums = starts[: len(starts) - further] + ends[further:]
        first = int(sums.argmax())
        if sums[first] > best[2]:
            best = (first, first + further, float(sums[first]))
    return best


def choose_tau(gains: Sequence[tuple[float, float]]) -> float:
    """Return the threshold above which things are done with the highest sum of gains, of equal ones that nearest to 0.

    `gains` has for every thing its value, which is compared with the threshold, and what doing it gains.
    """
    values, amounts = np.array(sorted(gains, reverse=True), dtype=np.float64).T
    sums = np.concatenate([[0.0], np.cumsum(amounts)])
    # A threshold lies between two different values, or beyond them all.
    between = np.concatenate([[values[0] + 1.0], (values[:-1] + values[1:]) / 2, [values[-1] - 1.0]])
    is_cut = np.concatenate([[True], values[:-1] > values[1:], [True]])
    places = np.flatnonzero(is_cut)
    order = np.lexsort((np.abs(between[places]), -sums[places].round(9)))
    return float(between[places[order[0]]])


def take_units(example: Question, count: int, rule: str) -> Prediction:
    """Answer with the first words of the context, or its first characters; 0: with none."""
    if rule == CMRC:
        end = min(count, len(example.context))
    else:
        words = list(re.finditer(r"\S+", example.context))[:count]
        end = words[-1].end() if words else 0
    return _answer(example.context, end - len(example.context[:end].lstrip()), end)


def _answer(context: str, start: int, end: int) -> Prediction:
    if start >= end:
        return {"answer": None, "start": None, "end": None}
    return {"answer": context[start:end], "start": start, "end": end}


def _read_answers(row: SetRow) -> list[dict[str, Any]]:
    """Return the answers of a question; where `is_impossible` says that it has none, there are none."""
    answer, mark = row.get("answers"), row.get("is_impossible")
    if isinstance(answer, str):  # a single one, whose offset is another column
        start = -1 if row.get("start") is None else row.get("start")
        row = row.put("answers", [{"text": answer, "answer_start": start}] if answer.strip() else [])
    answers = row.read_objects("answers", "text")
    try:
        is_impossible = read_mark(mark)
    except ValueError:
        row.leave_out("has neither true nor false as 'is_impossible'", mark, what="question")
    if is_impossible and any(answer["text"].strip() for answer in answers):
        row.issues.add(
            row.source, "question", "has answers, and is_impossible is true", outcome="kept without its answers"
        )
    if is_impossible is False and not answers and row.description.no_answer:
        row.issues.add(row.source, "question", "has none, and is_impossible is false", outcome="kept without an answer")
    return [] if is_impossible else answers


def _place_answer(values: dict[str, Any], context: str, row: SetRow) -> Entity | None:
    """Return the stretch of an answer: at its offset, or nearest to it, rather as whole words, or where it is alone."""
    text, start = values["text"], as_offset(values.get("answer_start"))
    if start is None:
        raise CorpusError(f"{row.source} has an answer without a whole number as 'answer_start'.")
    if not text.strip():
        row.keep_gold("answer", "is empty", text)
        return None
    if start >= 0 and context.startswith(text, start):
        return Entity(start, start + len(text), "")
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    near = [place for place in places if len(places) == 1 or abs(place - start) <= NEAR_CHARS]
    whole = [place for place in near if is_whole(context, place, place + len(text))]
    nearest = min(whole or near, key=lambda place: abs(place - start), default=None)
    if nearest is None:
        row.keep_gold("answer", "is not in the context near its offset", text)
        return None
    row.issues.add(row.source, "answer", "is not at its offset", text, outcome="moved")
    return Entity(nearest, nearest + len(text), "")
