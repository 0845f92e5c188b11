"""Masked words of held-out text that a model predicted before its training, and after.

Enters: a trained run and its prepared corpus. Leaves: examples, which are the user's own text and so go into the run's
page and nowhere else. Sentences and words are drawn by a hash of their text, whatever the models say.
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

from domext_ray.runs.run_directory import read_identity
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.text.data.documents import split_sentences
from domext_ray.text.vocabulary.tokenizer import group_pieces, make_backend
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.start import RebuiltRun, apply_start, rebuild_run

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
class Masked:
    """A sentence in which `word` is masked."""

    left: str
    word: str
    right: str
    ids: tuple[int, ...]  # tokens, [MASK] among them, and [CLS] and [SEP]
    place: int  # of [MASK] in `ids`
    answer: int  # the token that stands there


@dataclass(frozen=True)
class Example:
    """What two models say of a masked word, most probable first; nothing where a model is not there any more."""

    masked: Masked
    before: tuple[Guess, ...]
    after: tuple[Guess, ...]


def make_examples(run_dir: Place, manifest: Manifest) -> list[Example]:
    """Let a run's model as it was before the first step, and as it is now, predict masked words of held-out text.

    There are none of a model that was not trained on masked words, of text that is somebody's (`group_field`), or
    without a sentence that fits.
    """
    if manifest.settings.get("group_field"):
        return []
    run = rebuild_run(run_dir)
    if run.config.objective.kind != "masked":
        return []
    sentences = choose_sentences(manifest, run.tokenizer, max_length=run.config.train.seq_length)
    start = _rebuild_start(run, run_dir)
    before = predict(start, run.tokenizer, sentences) if start is not None else [()] * len(sentences)
    return [Example(*row) for row in zip(sentences, before, predict(run.model, run.tokenizer, sentences), strict=True)]


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


def choose_sentences(manifest: Manifest, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Masked]:
    """Draw sentences of held-out text of at most so many tokens, and one word in each that is a single token."""
    drawn = (_mask(sentence, tokenizer, max_length) for sentence in sorted(_read_sentences(manifest), key=_hash))
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


def _mask(sentence: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Masked | None:
    """Mask one word of a sentence; None if it has no word to mask, or is too long."""
    encoding = make_backend(tokenizer).encode(sentence, add_special_tokens=False)
    if len(encoding.ids) > max_length - 2:
        return None
    words = []
    for places in group_pieces(encoding.word_ids):
        (first, end), token = encoding.offsets[places[0]], encoding.ids[places[0]]
        text = sentence[first:end]
        if len(places) == 1 and text.isalpha() and len(text) >= MIN_LETTERS and token != tokenizer.unk_token_id:
            words.append((places[0], first, end))
    if not words:
        return None
    place, first, end = min(words, key=lambda word: _hash(f"{word[1]} {sentence}"))
    ids = [tokenizer.cls_token_id, *encoding.ids, tokenizer.sep_token_id]
    answer, ids[1 + place] = ids[1 + place], tokenizer.mask_token_id
    return Masked(sentence[:first], sentence[first:end], sentence[end:], tuple(ids), 1 + place, answer)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, key=b"domext examples").digest()


@torch.no_grad()
def predict(model: Any, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Masked]) -> list[tuple[Guess, ...]]:
    """Return the words that a model expects at each mask, most probable first; on the CPU, in fp32, without dropout."""
    model.eval()
    found = []
    for masked in sentences:
        ids = torch.tensor([masked.ids])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]  # by place: names differ between heads
        best = logits[0, masked.place].float().softmax(-1).topk(NUM_GUESSES)
        guessed = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        words = [(str(tokenizer.decode([token])).strip(), share, token == masked.answer) for share, token in guessed]
        found.append(tuple(Guess(*word) for word in words))
    return found
