"""Batches of packed rows of one shape: what is filling, that nothing else changes, and where there is no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from row_files import make_token_rows, make_wordpiece
from tiny_models import VOCAB, make_model
from transformers import BertTokenizer

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.text.corpus.batching import MaskedRows, Masker, RowLengths
from domext_ray.text.corpus.rows import RowSettings, build_rows
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, to_batch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB - 15)), *".!?:;"]
CPU = torch.device("cpu")


def pack(length: int, num_rows: int, words: int, epochs: int = 1) -> tuple[BertTokenizer, list[MaskedRows]]:
    """Packed rows of documents of some words on average, masked with the draws of some epochs."""
    tokenizer = make_wordpiece(WORDS)
    rng, backend = np.random.default_rng(0), tokenizer.backend_tokenizer.to_str()
    sizes = 1 + rng.geometric(1 / words, size=num_rows * length // words)
    documents = [" ".join(rng.choice([*WORDS[5:], *2 * WORDS[-5:]], size=size)) for size in sizes]
    ids = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    rows = [*build_rows(documents, RowSettings(backend, *ids, length, False, True, packed=True))][:num_rows]
    table = make_token_rows(*zip(*rows, strict=True))
    masker = Masker(tokenizer, ObjectiveConfig(), seed=1, packed=True)
    return tokenizer, [masker.mask(table, epoch) for epoch in range(epochs)]


def describe(batch: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes of a forward pass, and whatever else is no tensor."""
    return tuple((name, value.shape if isinstance(value, np.ndarray) else value) for name, value in batch.items())


def measure(rows: MaskedRows, full: int) -> RowLengths:
    return RowLengths(full, float(rows.lengths.mean()))


@pytest.mark.parametrize(
    ("length", "size"),
    [(256, 16), pytest.param(128, 256, marks=pytest.mark.slow), pytest.param(512, 64, marks=pytest.mark.slow)],
)
def test_a_thousand_batches_have_one_shape(length: int, size: int) -> None:
    """And their filling is little; batches as they are have many shapes."""
    tokenizer, epochs = pack(length, 40 * size, 90, epochs=4)
    rng, shapes, filled = np.random.default_rng(1), dict[bool, set[Any]](), list[float]()
    for is_fixed in (True, False):
        lengths = measure(epochs[0], length) if is_fixed else None
        masker, shapes[is_fixed] = Masker(tokenizer, ObjectiveConfig(), seed=1, packed=True, lengths=lengths), set()
        for number in range(1000 if is_fixed else 40):
            rows = epochs[number % 4].take(rng.choice(len(epochs[0]), size, replace=False))
            (batch,) = masker.collate(rows, size)
            shapes[is_fixed].add(describe(batch))
            assert batch["weights"].sum() == rows.selected.sum()
            sequences, tokens = np.diff(batch["cu_seq_lens"]), batch["token_indices"]
            num_tokens = batch["input_ids"].size if tokens is None else len(tokens)
            assert sequences.min() >= 0 and sequences.max() <= batch["max_length"] <= length
            assert sequences.sum() == num_tokens
            filled += [1 - rows.lengths.sum() / num_tokens] * is_fixed
    assert len(shapes[True]) == 1 and len(shapes[False]) > 20
    assert np.mean(filled) < 0.05


@pytest.mark.parametrize("position_rule", ["absolute", "rotary", "roberta"])
def test_losses_are_those_of_batches_as_they_are(position_rule: str) -> None:
    """Of rows with padding, too: it is a document of its own, which nobody sees."""
    tokenizer, (rows,) = pack(24, 6, 9)
    assert rows.lengths.min() < 24
    model = make_model(
        moved=0.1, vocab_size=len(WORDS), position_rule=position_rule, max_position_embeddings=40
    ).train()
    losses, gradients = [], []
    for lengths in (None, measure(rows, 24), RowLengths(24, 24.0)):
        (batch,) = Masker(tokenizer, ObjectiveConfig(), 1, packed=True, lengths=lengths).collate(rows, len(rows))
        loss = MaskedLoss(model, CPU, bf16=False).train()(to_batch(batch))[LOSS]
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
        model.zero_grad()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert all((gradient - gradients[0]).norm() < 1e-5 * gradients[0].norm() for gradient in gradients)


def test_what_has_no_room_has_a_shape_of_its_own() -> None:
    """Documents of one word, and rows of which nearly all is predicted: nothing is left out."""
    tokenizer, (rows,) = pack(64, 8, 1)
    everything = replace(rows, selected=np.ones_like(rows.selected))
    masker = Masker(tokenizer, ObjectiveConfig(), 1, packed=True, lengths=measure(rows, 64))
    usual, full = (masker.collate(masked, 8)[0] for masked in (rows, everything))
    num_sequences = np.diff(usual["cu_seq_lens"])
    assert (num_sequences > 0).sum() > 2 * 8 + 8 and len(num_sequences) % (2 * 8 + 8) == 0
    assert full["weights"].sum() == rows.lengths.sum() and len(full["weights"]) > len(usual["weights"])
    small, large = masker.collate(rows, 5)[0], masker.collate(rows, 5)[1]
    assert [len(batch["input_ids"]) for batch in (small, large)] == [5, 3]
