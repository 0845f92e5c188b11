"""Masked words of held-out text that a model predicted before its training, and after.

Enters: a trained run and its prepared corpus. Leaves: examples, which are the user's own text and so go into the run's
page and nowhere else. Sentences and words are drawn by a hash of their text, whatever the models say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from domext_ray.corpus.manifest import Manifest
from domext_ray.data.sentences import split_sentences
from domext_ray.runs.run_directory import read_identity
from domext_ray.storage import Place, Where
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.rebuild import RebuiltRun, rebuild_run
from domext_ray.training.start import apply_start, build_run_model
from domext_ray.vocabulary.tokenizer import group_pieces, make_backend

NUM_EXAMPLES = 8
NUM_GUESSES = 3
MIN_WORDS, MAX_CHARS = 6, 240
"""Of a sentence: shorter ones say nothing, longer ones do not fit a table."""
MIN_LETTERS = 4
"""Of the masked word."""
_READ_SENTENCES = 2000
_SEED = b"domext examples"


@dataclass(frozen=True)
class Guess:
    """A word that a model expects.

    Args:
        word: the token as text.
        share: its probability.
        is_right: it is the word that stands there.
    """

    word: str
    share: float
    is_right: bool


@dataclass(frozen=True)
class Masked:
    """A sentence with a masked word.

    Args:
        left, word, right: its text; `word` is masked.
        ids: tokens, [MASK] among them, and [CLS] and [SEP].
        place: of [MASK] in `ids`.
        answer: the token that stands there.
    """

    left: str
    word: str
    right: str
    ids: tuple[int, ...]
    place: int
    answer: int


@dataclass(frozen=True)
class Example:
    """What two models say of a masked word, most probable first; nothing where a model is not there any more."""

    masked: Masked
    before: tuple[Guess, ...]
    after: tuple[Guess, ...]


def make_examples(run_dir: Where, manifest: Manifest) -> list[Example]:
    """Let a run's model as it was before the first step, and as it is now, predict masked words of held-out text.

    Args:
        run_dir: the run's directory, with a checkpoint.
        manifest: its prepared corpus.

    Returns:
        The examples; none of a model that was not trained on masked words, of text that is somebody's (`group_field`),
        or without a sentence that fits.
    """
    if manifest.settings.get("group_field"):
        return []
    run = rebuild_run(run_dir)
    if run.config.objective.kind != "masked":
        return []
    sentences = choose_sentences(manifest, run.tokenizer, max_length=run.config.train.seq_length)
    after = predict(run.model, run.tokenizer, sentences)
    start = _rebuild_start(run, run_dir)
    before = [()] * len(sentences) if start is None else predict(start, run.tokenizer, sentences)
    return [Example(*each) for each in zip(sentences, before, after, strict=True)]


def _rebuild_start(run: RebuiltRun, run_dir: Where) -> Any | None:
    """The model before the first step; None if it started from a run that has gone or trained on."""
    model = build_run_model(run.config, run.base, (Place(run_dir) / "tokenizer").local(), 0.0, run.extensions)
    if run.config.init_from:
        folder = Path(run.config.init_from).expanduser()
        found = find_latest(folder / "checkpoints")
        if found is None or found.tensors_sha256 != (read_identity(run_dir) or {}).get("init_sha256"):
            return None
        apply_start(model, found, folder)
    return model


def choose_sentences(manifest: Manifest, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Masked]:
    """Draw sentences of held-out text, and one word in each that is a single token.

    Args:
        manifest: the prepared corpus.
        tokenizer: the run's tokenizer.
        max_length: tokens of a sentence, at most, [CLS] and [SEP] included.
    """
    chosen: list[Masked] = []
    for sentence in sorted(_read_sentences(manifest), key=_hash):
        masked = _mask(sentence, tokenizer, max_length)
        chosen += [masked] if masked else []
        if len(chosen) == NUM_EXAMPLES:
            break
    return chosen


def _read_sentences(manifest: Manifest) -> set[str]:
    """Sentences of the first held-out documents, those of the same text once."""
    found: set[str] = set()
    for document in _read_documents(manifest):
        sentences = (" ".join(each.split()) for each in split_sentences(document))
        found.update(each for each in sentences if len(each.split()) >= MIN_WORDS and len(each) <= MAX_CHARS)
        if len(found) >= _READ_SENTENCES:
            break
    return found


def _read_documents(manifest: Manifest) -> Iterator[str]:
    for record in sorted(manifest.texts, key=lambda each: each.sha256):
        for line in (manifest.folder / record.path).read_text().split("\n"):
            if line:
                yield json.loads(line)["text"]


def _mask(sentence: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Masked | None:
    """Mask one word of a sentence; None if it has no word to mask, or is too long."""
    encoding = make_backend(tokenizer).encode(sentence, add_special_tokens=False)
    if len(encoding.ids) > max_length - 2:
        return None
    words = []
    for places in group_pieces(encoding.word_ids):
        (first, end), id_ = encoding.offsets[places[0]], encoding.ids[places[0]]
        text = sentence[first:end]
        if len(places) == 1 and text.isalpha() and len(text) >= MIN_LETTERS and id_ != tokenizer.unk_token_id:
            words.append((places[0], first, end))
    if not words:
        return None
    place, first, end = min(words, key=lambda each: _hash(f"{each[1]} {sentence}"))
    ids = [tokenizer.cls_token_id, *encoding.ids, tokenizer.sep_token_id]
    answer, ids[1 + place] = ids[1 + place], tokenizer.mask_token_id
    return Masked(sentence[:first], sentence[first:end], sentence[end:], tuple(ids), 1 + place, answer)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8, key=_SEED).digest()


def predict(model: Any, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Masked]) -> list[tuple[Guess, ...]]:
    """Return the words that a model expects at each mask, most probable first; on the CPU, in fp32, without dropout."""
    cast(nn.Module, model).eval()
    found = []
    with torch.no_grad():
        for each in sentences:
            ids = torch.tensor([each.ids])
            outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            logits = outputs[0][0, each.place]  # by place: with a next-sentence head they have another name
            shares, tokens = logits.float().softmax(-1).topk(NUM_GUESSES)
            found.append(
                tuple(
                    Guess(str(tokenizer.decode([token])).strip(), share, token == each.answer)
                    for share, token in zip(shares.tolist(), tokens.tolist(), strict=True)
                )
            )
    return found
