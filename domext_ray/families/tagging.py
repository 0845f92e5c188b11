"""Token classification: sentences with IOB2 tags -> rows of windows -> one valid tag sequence a sentence.

As BERT does (Devlin et al., 2019, section 5.3): the first piece of a word carries its tag, other pieces carry none, and
with `TaskOptions.context` the document around a sentence fills the row. A sentence that is longer than a row makes
several windows, cut between words; each word is read in the window where it has most pieces on its shorter side.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from scipy.special import softmax
from tokenizers import Tokenizer, pre_tokenizers

from domext_ray.families.comparison import Compared, compare_spans
from domext_ray.families.family import ENTITY_LIST, ENTITY_METRICS, ID, SPANS, Prediction, describe_entity
from domext_ray.families.losses import NO_TARGET, ClassTask, balance
from domext_ray.families.metrics.metrics import score_entities
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import RawSentence, TaggedSentence, order, read_tags, sort_entities
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.readers.offsets import Unit
from domext_ray.families.readers.set_description import WITH_PLACES
from domext_ray.families.readers.spans import place_annotations, read_annotations
from domext_ray.families.readers.tagged import choose_scheme, convert_tags, name_tags
from domext_ray.families.readers.words import NO_MARKS, WordMarks, cut_words, learn_marks
from domext_ray.families.rows import Row
from domext_ray.families.state import NOTHING_LEARNED, TEXTS, State
from domext_ray.families.task import Outputs
from domext_ray.families.windows import Window, read_template

if TYPE_CHECKING:
    from torch import Tensor

Pieces: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Ids of the pieces of a sentence, int64 [P], and the number of each one's word, int64 [P]."""


@dataclass(frozen=True)
class TaggedWords:
    """The words of a sentence that a row is asked about."""

    words: np.ndarray  # int64 [K], places in the sentence
    positions: np.ndarray  # int64 [K], places of their first pieces in the row


class TokenClassificationTask(ClassTask):
    """Flat entities as one tag a word (`TaggedSentence`). A prediction has "entities", and the words' "tags".

    Tags are valid IOB2: of all valid sequences the one with the highest sum of logits, found by dynamic programming
    over the transitions that IOB2 allows. Nothing about transitions is learned (this is no CRF). A word that the
    tokenizer drops, such as a control character, is outside of entities. An entity's score is the mean probability of
    its words' tags. Places in a sentence that came as words are those in its words joined by single spaces.

    Its state has the marks that are part of words in training, by which running text is cut (`WordMarks`). It is empty
    where no mark is, where the set came as text, and in exports of version 0.1.0.
    """

    family = "ner"
    readers = {
        **{"conll": ("tokens", "tags"), "records": ("tokens", "tags"), "spans": ("text", "entities")},
        **dict.fromkeys(WITH_PLACES, ()),
    }
    columns = {
        **ID,
        "tokens": ("tokens", "words", 0),
        "tags": ("ner_tags", "tags", "labels", "ner", -1),
        "document": ("document", "doc_id"),
        **SPANS,
    }
    annotated = "entities"
    metrics = ENTITY_METRICS
    needed = (("text", "tokens"),)
    has_token_outputs = True
    head = "DomextForTokenClassification"
    metric = "f1.micro"
    target_pads = {"labels": NO_TARGET}
    fields = {"entities": ENTITY_LIST}
    found = "entities"
    hub_task = "token-classification"
    nothing = {"entities": [], "tags": []}
    state_rules = dict.fromkeys(NO_MARKS.to_json(), TEXTS)

    def learn(self) -> dict[str, Any]:
        """Learn which marks are part of words."""
        marks = learn_marks([sentence.words for sentence in self.data.train if not isinstance(sentence, RawSentence)])
        return marks.to_json() if marks else {}

    def load_state_dict(self, state: State) -> None:
        """Take over what another task's `state_dict` gave; it may be empty."""
        if state:
            super().load_state_dict(state)
        else:
            self.state = {}

    def prepare(self) -> None:
        """Number the tags, and count the entities whose words are others in running text."""
        for split in ("dev", "test"):
            self._note_cut_entities(split)
        self._tags = list_tags(self.data.labels)
        self._tag_ids = {tag: i for i, tag in enumerate(self._tags)}
        self._template = read_template(self.tokenizer, pair=False)
        self._room = self._template.measure_room(self.options.max_length, least=1)

    def _note_cut_entities(self, split: str) -> None:
        """Count the entities of a split whose words are cut otherwise in running text; no private word is named."""
        marks = WordMarks.from_json(self.state)
        is_kept = functools.cache(lambda word: cut_words(word, marks)[0] == (word,))
        cut: list[tuple[TaggedSentence, str]] = []
        total = 0
        for sentence in getattr(self.data, split):
            for entity in () if isinstance(sentence, RawSentence) else read_tags(sentence.tags):
                total += 1
                words = sentence.words[entity.start : entity.end]
                cut += [(sentence, word) for word in words if not is_kept(word)][:1]
        if cut:
            what = f"entities of {split} have words that are cut otherwise in running text"
            first, word = cut[0]
            shown = "" if first.group else f", such as {word!r}"
            self.note_cases([case.source for case, _ in cut], total, f"{what}{shown}")
            self.limits.append(f"{len(cut):,} of {total:,} {what}.")

    @classmethod
    def list_outputs(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        """Return the tags: O, then B- and I- of every type."""
        return list_tags(labels)

    def make_card_values(self, thresholds: Mapping[str, float]) -> dict[str, Any]:
        """Say whether marks are part of words, which transformers' pipeline does not know."""
        return {"is_tagger": True, "joins": bool(self.state)}

    @classmethod
    def read(cls, row: SetRow, scheme: str = "iob2", unit: Unit | None = None) -> TaggedSentence:
        """Make a sentence of words with their tags, or of a text that is cut into words; see `Family.read`.

        `scheme` is that of the tags, `unit` what the offsets of entities count.
        """
        if not _has_words(row):
            return read_sentence(row, unit)
        tokens, document = row.get("tokens"), row.get("document") if row.is_labelled else None
        if not isinstance(tokens, (list, tuple)) or not all(isinstance(token, str) for token in tokens):
            row.leave_out(f"has {str(tokens)[:60]!r} as 'tokens'; it must be a list of words")
        words = tokens if row.is_labelled else [token.strip() for token in tokens]  # a space may have a tag
        if not words or not all(words):
            row.leave_out("has an empty word" if words else "has no words")
        for token in tokens:
            row.check_text(token, "tokens")
        tags = convert_tags(row, scheme) if row.is_labelled else ("O",) * len(tokens)
        return TaggedSentence("", row.source, tuple(tokens), tags, "" if document is None else str(document))

    @classmethod
    def begin_split(
        cls, rows: Sequence[SetRow], side: Any
    ) -> tuple[Sequence[SetRow], Callable[[SetRow], TaggedSentence]]:
        if rows and not _has_words(rows[0]):
            rows, unit = read_annotations(rows)
            return rows, partial(cls.read, unit=unit)
        rows = name_tags(rows)
        return rows, partial(cls.read, scheme=choose_scheme(rows))

    @classmethod
    def adopt(cls, labels: tuple[str, ...], problem_type: str | None) -> dict[str, Any] | None:
        kinds = tuple(dict.fromkeys(label[2:] for label in labels if label != "O"))
        return {"labels": kinds} if labels == list_tags(kinds) else None

    @classmethod
    def compare(cls, example: TaggedSentence, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        return compare_spans(example, example.text, example.place(prediction["tags"]))

    def encode(self, examples: Sequence[TaggedSentence], *, is_training: bool) -> list[Row]:
        encoded = encode_words(self.backend, [example.words for example in examples])
        self._note_oddities(examples, encoded)
        rows: list[Row] = []
        for first, last in self._list_documents(examples):
            own = examples[first:last]
            starts = [0, *itertools.accumulate(len(example.words) for example in own)]
            ids, bounds = join_words(encoded[first:last], starts, self._room)
            for i, sentence in enumerate(own):
                tags = np.array([self._tag_ids.get(tag, NO_TARGET) for tag in sentence.tags], dtype=np.int64)
                rows.extend(self._make_rows(first + i, tags, ids, bounds, starts[i], starts[i + 1]))
        return rows

    def _note_oddities(self, sentences: Sequence[TaggedSentence], encoded: Sequence[Pieces]) -> None:
        """Count the words that have no piece, and those whose pieces alone overflow a row."""
        dropped, overlong, total = [], [], 0
        for sentence, (_, words) in zip(sentences, encoded, strict=True):
            sizes = np.bincount(words, minlength=len(sentence.words))
            dropped += [sentence.source] * int((sizes == 0).sum())
            overlong += [sentence.source] * int((sizes > self._room).sum())
            total += len(sizes)
        self.note_cases(dropped, total, "words are dropped by the tokenizer and taken as O")
        self.note_cases(overlong, total, f"words have more than {self._room} pieces and are read by their first ones")
        if self.options.context and sentences and not any(example.document for example in sentences):
            source = sentences[0].source
            self.keep_note(f"context is set, and no sentence names its document ({source}): rows hold one sentence.")

    def _list_documents(self, sentences: Sequence[TaggedSentence]) -> Iterator[Window]:
        """Yield the ranges of sentences that may stand in one row."""
        has_context = self.options.context
        for _, group in itertools.groupby(
            range(len(sentences)), key=lambda i: (has_context and sentences[i].document) or i
        ):
            numbers = [*group]
            yield numbers[0], numbers[-1] + 1

    def _make_rows(
        self, number: int, tags: np.ndarray, ids: np.ndarray, bounds: np.ndarray, begin: int, end: int
    ) -> Iterator[Row]:
        """Yield the rows of the sentence that is words `begin` to `end` of its document."""
        sizes = np.diff(bounds[begin : end + 1])
        windows = [(begin + a, begin + b) for a, b in split_windows(sizes, self._room, self.options.stride)]
        if self.options.context:
            windows = [grow_window(bounds, first, last, self._room) for first, last in windows]
        owners = assign_words(bounds, windows, begin, end)
        for i, (first, last) in enumerate(windows):
            words = np.flatnonzero((owners == i) & (sizes > 0))
            if not len(words) and len(windows) > 1:
                continue
            positions = self._template.find_text() + bounds[begin + words] - bounds[first]
            row_ids, types = self._template.join(ids[bounds[first] : bounds[last]])
            labels = np.full(len(row_ids), NO_TARGET, dtype=np.int64)
            labels[positions] = tags[words]
            yield Row(number, row_ids, types, {"labels": labels}, TaggedWords(words, positions))

    def compute_loss_sum(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        return self.sum_cross_entropy(outputs.logits.float().flatten(0, 1), targets["labels"].flatten())

    def balance_classes(self) -> np.ndarray:
        """Return the weights of the tags, O among them; see `losses.balance`."""
        return balance(itertools.chain.from_iterable(sentence.tags for sentence in self.data.train), self._tags)

    def decode(self, examples: Sequence[TaggedSentence], rows: Sequence[Row], outputs: Outputs) -> list[Prediction]:
        scores = [np.full((len(sentence.words), len(self._tags)), -np.inf) for sentence in examples]
        for matrix in scores:
            matrix[:, 0] = 0.0  # what no row is asked about is O
        for row, (logits,) in zip(rows, outputs, strict=True):
            scores[row.example][row.place.words] = logits[row.place.positions]
        return [self._read_entities(*pair) for pair in zip(examples, scores, strict=True)]

    def _read_entities(self, sentence: TaggedSentence, scores: np.ndarray) -> Prediction:
        """Choose the tags of a sentence by their logits, float64 [W, tags]."""
        best = find_best_tags(scores)
        tags = [self._tags[i] for i in best]
        found = []
        if best.any():
            probabilities = softmax(scores, axis=1)[np.arange(len(best)), best]
            for span, entity in zip(read_tags(tags), sentence.place(tags), strict=True):
                found.append(describe_entity(sentence.text, entity, probabilities[span.start : span.end].mean()))
        return {"entities": found, "tags": tags}

    def score(self, examples: Sequence[TaggedSentence], predictions: Sequence[Prediction]) -> Score:
        """Score entities by boundaries and type (seqeval's strict mode); what no tags can say is a miss."""
        gold = [sentence.gold for sentence in examples]
        found = [own.place(prediction["tags"]) for own, prediction in zip(examples, predictions, strict=True)]
        return score_entities(gold, found, self.data.labels)

    def predict_baseline(self, examples: Sequence[TaggedSentence]) -> list[Prediction]:
        """Give every word its most frequent tag in training, O if it is new; I- that continues nothing becomes B-.

        All O, the most frequent tag, would find no entity at all.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for sentence in self.data.train:
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                counts[word][tag] += 1
        usual = {word: max(sorted(tags), key=tags.__getitem__) for word, tags in counts.items()}
        return [{"tags": [*repair_tags([usual.get(word, "O") for word in example.words])]} for example in examples]


def encode_words(backend: Tokenizer, sentences: Sequence[Sequence[str]]) -> list[Pieces]:
    """Tokenise the words of sentences one by one, as `is_split_into_words` does with `add_prefix_space`."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        sentences = [[f" {word}" for word in words] for words in sentences]
    words = [list(sentence) for sentence in sentences]
    encodings = backend.encode_batch(words, is_pretokenized=True, add_special_tokens=False)
    return [
        (np.array(encoding.ids, dtype=np.int64), np.array(encoding.word_ids, dtype=np.int64)) for encoding in encodings
    ]


def join_words(encoded: Sequence[Pieces], starts: Sequence[int], room: int) -> tuple[np.ndarray, np.ndarray]:
    """Put the words of sentences one after another, each with its first `room` pieces.

    `starts` has for each sentence the number of its first word, then the number of all words. Returned are the pieces'
    ids, int64 [P], and bounds, int64 [W + 1]: word w has the pieces bounds[w] to bounds[w + 1], none if the tokenizer
    drops it.
    """
    ids = np.concatenate([own for own, _ in encoded])
    words = np.concatenate([start + own for start, (_, own) in zip(starts, encoded, strict=False)])
    numbers = np.arange(starts[-1] + 1)
    bounds = np.searchsorted(words, numbers)
    if np.diff(bounds).max(initial=0) > room:
        is_kept = np.arange(len(words)) - bounds[words] < room
        ids, bounds = ids[is_kept], np.searchsorted(words[is_kept], numbers)
    return ids, bounds


def list_tags(types: Sequence[str]) -> tuple[str, ...]:
    """Return the tags of entity types in the head's order: O, then B- and I- of every type."""
    return ("O", *(f"{prefix}-{label}" for label in types for prefix in "BI"))


def cut_again(sentence: RawSentence, marks: WordMarks) -> RawSentence:
    """Cut a text as the set of a model has its words; the text's entities are then gold that no tags say."""
    words, offsets = cut_words(sentence.text, marks)
    return replace(sentence, words=words, tags=("O",) * len(words), offsets=offsets, misplaced=sentence.gold)


def split_windows(sizes: np.ndarray, room: int, stride: int) -> list[Window]:
    """Cut a sentence into ranges [first, last) of whole words that fit a row; each goes further than the one before.

    `sizes` are the pieces of every word, int64 [W], each `room` at most. A window shares up to `stride` pieces with the
    one before, fewer where the next word needs the room.
    """
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    windows: list[Window] = []
    first = 0
    while True:
        last = int(np.searchsorted(bounds, bounds[first] + room, side="right")) - 1
        windows.append((first, last))
        if last == len(sizes):
            return windows
        # Word `last` did not fit after `first`, so the next window begins later, whatever the stride.
        shared_from = max(bounds[last] - stride, bounds[last + 1] - room)
        first = int(np.searchsorted(bounds, shared_from, side="left"))


def grow_window(bounds: np.ndarray, first: int, last: int, room: int) -> Window:
    """Widen a range of words until the row is full, by as many pieces on either side as there are.

    `bounds` are the document's, as of `join_words`; `last` is the word after the range's last.
    """
    spare = room - (bounds[last] - bounds[first])
    left = min(bounds[first], max(spare // 2, spare - (bounds[-1] - bounds[last])))
    first = int(np.searchsorted(bounds, bounds[first] - left, side="left"))
    return first, int(np.searchsorted(bounds, bounds[first] + room, side="right")) - 1


def assign_words(bounds: np.ndarray, windows: Sequence[Window], begin: int, end: int) -> np.ndarray:
    """Give every word of a sentence to the window where its shorter side has most pieces, the first of equals.

    `bounds` are the document's, as of `join_words`. The windows cover the sentence, which is words `begin` to `end`;
    their numbers are returned as int64 [end - begin].
    """
    owners = np.full(end - begin, -1, dtype=np.int64)
    most = np.full(end - begin, -1, dtype=np.int64)
    for i, (first, last) in enumerate(windows):
        words = np.arange(max(first, begin), min(last, end))
        context = np.minimum(bounds[words] - bounds[first], bounds[last] - bounds[words + 1])
        is_better = context > most[words - begin]
        better = words[is_better] - begin
        owners[better], most[better] = i, context[is_better]
    assert (owners >= 0).all()
    return owners


def find_best_tags(scores: np.ndarray) -> np.ndarray:
    """Return the valid IOB2 sequence with the highest sum of scores (Viterbi), as int64 columns [W].

    Scores are float [W, 1 + 2·T], of O, then of B- and I- of every type; -inf where a tag is out of the question.
    """
    best = scores.argmax(axis=1)
    before = np.concatenate([[0], best[:-1]])
    is_inside = (best > 0) & (best % 2 == 0)
    if not (is_inside & (before != best) & (before != best - 1)).any():
        return best
    total = scores[0].astype(np.float64)
    total[2::2] = -np.inf
    origins = np.zeros(scores.shape, dtype=np.int64)
    begins, insides = np.arange(1, scores.shape[1], 2), np.arange(2, scores.shape[1], 2)
    for i in range(1, len(scores)):
        origins[i] = total.argmax()
        origins[i, 2::2] = np.where(total[begins] >= total[insides], begins, insides)
        total = total[origins[i]] + scores[i]
    path = [int(total.argmax())]
    for i in range(len(scores) - 1, 0, -1):
        path.append(int(origins[i, path[-1]]))
    return np.array(path[::-1])


def repair_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Turn an I- that continues no entity of its type into B-."""
    repaired: list[str] = []
    for tag in tags:
        continues = bool(repaired) and repaired[-1] != "O" and repaired[-1][2:] == tag[2:]
        repaired.append(f"B-{tag[2:]}" if tag.startswith("I-") and not continues else tag)
    return tuple(repaired)


def _has_words(row: SetRow) -> bool:
    """Whether a row has words, and no text that is to be cut."""
    if row.is_labelled:
        return row.description.reader in ("conll", "records")
    return row.get("text") is None and row.get("tokens") is not None


def read_sentence(row: SetRow, unit: Unit | None = None) -> RawSentence:
    """Make the words of a text, with the tags of its entities; of those that overlap the longest is tagged."""
    text = row.read_text("text", is_stripped=False)
    entities, misplaced = place_annotations(row, text, unit) if row.is_labelled else ({}, {})
    words, offsets = cut_words(text, WordMarks.from_json(row.state))
    if not words and row.is_labelled:
        row.leave_out("has no words")
    firsts = {start: i for i, (start, _) in enumerate(offsets)}
    lasts = {end: i for i, (_, end) in enumerate(offsets)}
    tags = ["O"] * len(words)
    for entity, place in sorted(entities.items(), key=lambda pair: (pair[0].start - pair[0].end, order(pair[0]))):
        first, last = firsts.get(entity.start), lasts.get(entity.end)
        fault = ""
        if first is None or last is None:
            fault = "begins or ends inside a word"
        elif any(tag != "O" for tag in tags[first : last + 1]):
            fault = "overlaps another, and a word has one tag"
        else:
            tags[first : last + 1] = [f"B-{entity.label}", *[f"I-{entity.label}"] * (last - first)]
        if fault:
            row.keep_gold("entity", fault, text[entity.start : entity.end], place)
            misplaced[entity] = place
    return RawSentence("", row.source, words, tuple(tags), "", text, offsets, misplaced=sort_entities(misplaced))
