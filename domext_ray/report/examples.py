"""Masked words of held-out text that a model predicted before its training, and after.

Enters: a trained run and its prepared corpus. Leaves: examples, which are text of the corpus and so go into the run's
page and nowhere else. Sentences and words are drawn by a hash of their text before any model is asked; a word is whole,
one token of every vocabulary that is asked for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.model.domext.modeling_domext import AUTO
from domext_ray.model.spec import build_base
from domext_ray.report.figures import ROUTED, UNTRAINED
from domext_ray.runs.run_directory import read_identity
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.text.data.documents import split_sentences
from domext_ray.text.vocabulary.tokenizer import group_pieces, load_tokenizer, make_backend
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.router import read_records
from domext_ray.training.start import RebuiltRun, apply_start, find_base_beside, rebuild_run

NUM_EXAMPLES = 8
NUM_GUESSES = 3
MIN_WORDS, MAX_CHARS = 6, 240
"""Of a sentence: shorter ones say nothing, longer ones do not fit a table."""
MIN_LETTERS = 4
"""Of the masked word."""
_READ_SENTENCES = 2000


@dataclass(frozen=True)
class Guess:
    """A word that a model expects."""

    word: str
    share: float  # its probability
    is_right: bool  # it is the word that stands there


@dataclass(frozen=True)
class Question:
    """A sentence with a masked word, as a tokenizer writes it."""

    ids: tuple[int, ...]  # tokens, [MASK] among them, and [CLS] and [SEP]
    place: int  # of [MASK] in `ids`
    answer: int  # the token that stands there


@dataclass(frozen=True)
class Masked:
    """A sentence in which `word` is masked."""

    left: str
    word: str
    right: str
    questions: tuple[Question, ...]  # one for each tokenizer


@dataclass(frozen=True)
class Example:
    """What models say of a masked word."""

    masked: Masked
    answers: dict[str, tuple[Guess, ...]]
    """By the heads of columns, the most probable words first, and the right one; none of a model that has gone."""


def make_examples(run_dir: Place, manifest: Manifest) -> list[Example]:
    """Let a run's base, and its model before the first step and now, predict masked words of held-out text.

    There are none of a model that was not trained on masked words, of text that is somebody's (`group_field`), or
    without a sentence that fits.
    """
    if manifest.settings.get("group_field"):
        return []
    run = rebuild_run(run_dir)
    if run.config.objective.kind != "masked":
        return []
    base, start = find_base_beside(run.config, run.spec), _rebuild_start(run, run_dir)
    tokenizers, asked = [run.tokenizer], list[tuple[str, Any, int, dict[str, str]]]()
    if base is not None:
        tokenizers += [load_tokenizer(base.folder)] if run.spec.new_words else []
        asked += [("before", build_base(base, torch.device("cpu")), len(tokenizers) - 1, {})]
    asked += [(UNTRAINED if asked else "before", start, 0, {}), ("after", run.model, 0, {})]
    if read_records(run_dir):
        asked += [(ROUTED, run.model, 0, {"adapter_names": AUTO})]
    sentences = choose_sentences(manifest, tokenizers, max_length=run.config.train.seq_length)
    answers = {}
    for name, model, number, options in asked:
        questions = [masked.questions[number] for masked in sentences]
        found = [()] * len(questions) if model is None else predict(model, tokenizers[number], questions, **options)
        answers[name] = found
    return [Example(masked, {name: found[i] for name, found in answers.items()}) for i, masked in enumerate(sentences)]


def _rebuild_start(run: RebuiltRun, run_dir: Place) -> Any | None:
    """The model before the first step; None if it started from a run that has gone or trained on."""
    model = run.spec.build()
    if run.config.init_from:
        folder = Place(run.config.init_from)
        found = find_latest(folder / "checkpoints")
        if found is None or found.tensors_sha256 != (read_identity(run_dir) or {}).get("init_sha256"):
            return None
        apply_start(model, found, folder)
    return model


def choose_sentences(
    manifest: Manifest, tokenizers: Sequence[PreTrainedTokenizerBase], *, max_length: int
) -> list[Masked]:
    """Draw sentences of held-out text of at most so many tokens, and one word in each that is a token for all."""
    drawn = (_mask(sentence, tokenizers, max_length) for sentence in sorted(_read_sentences(manifest), key=_hash))
    return list(islice((masked for masked in drawn if masked is not None), NUM_EXAMPLES))


def _read_sentences(manifest: Manifest) -> set[str]:
    """Sentences of the first held-out documents, those of the same text once."""
    found: set[str] = set()
    for record in sorted(manifest.texts, key=lambda text: text.sha256):
        for line in filter(None, (manifest.folder / record.path).read_text().split("\n")):
            sentences = (" ".join(sentence.split()) for sentence in split_sentences(json.loads(line)["text"]))
            found.update(text for text in sentences if text.count(" ") + 1 >= MIN_WORDS and len(text) <= MAX_CHARS)
            if len(found) >= _READ_SENTENCES:
                return found
    return found


def _mask(sentence: str, tokenizers: Sequence[PreTrainedTokenizerBase], max_length: int) -> Masked | None:
    """Mask one word of a sentence; None if it has no word to mask, or is too long."""
    found = [_find_words(sentence, tokenizer, max_length) for tokenizer in tokenizers]
    words = set.intersection(*({*places} for _, places in found))
    if not words:
        return None
    first, end = min(words, key=lambda word: _hash(f"{word[0]} {sentence}"))
    questions = []
    for tokenizer, (own, places) in zip(tokenizers, found, strict=True):
        ids, place = [tokenizer.cls_token_id, *own, tokenizer.sep_token_id], 1 + places[first, end]
        answer, ids[place] = ids[place], tokenizer.mask_token_id
        questions.append(Question(tuple(ids), place, answer))
    return Masked(sentence[:first], sentence[first:end], sentence[end:], tuple(questions))


def _find_words(
    sentence: str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[int], dict[tuple[int, int], int]]:
    """The tokens of a sentence, and the places of words that are one token by their characters; none if too long."""
    encoding = make_backend(tokenizer).encode(sentence, add_special_tokens=False)
    words = {}
    for places in group_pieces(encoding.word_ids) if len(encoding.ids) <= max_length - 2 else ():
        (first, end), token = encoding.offsets[places[0]], encoding.ids[places[0]]
        text = sentence[first:end]
        if len(places) == 1 and text.isalpha() and len(text) >= MIN_LETTERS and token != tokenizer.unk_token_id:
            words[first, end] = places[0]
    return encoding.ids, words


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, key=b"domext examples").digest()


@torch.no_grad()
def predict(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], **options: str
) -> list[tuple[Guess, ...]]:
    """Return the words that a model expects at each mask, most probable first, and the right one behind them.

    It is asked on the CPU, in fp32, without dropout.
    """
    model.eval()
    found = []
    for asked in questions:
        ids = torch.tensor([asked.ids])
        # by place: names differ between heads
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0]
        shares = logits[0, asked.place].float().softmax(-1)
        tokens = dict.fromkeys([*shares.topk(NUM_GUESSES).indices.tolist(), asked.answer])
        words = {token: str(tokenizer.decode([token])).strip() for token in tokens}
        found.append(tuple(Guess(words[token], float(shares[token]), token == asked.answer) for token in tokens))
    return found
