"""Masking: every rate of the papers, whole words, draws that move with the row; and batches of one shape."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from made_tokenizers import save_roberta, save_xlm_roberta
from row_files import SPECIALS, make_token_rows, make_wordpiece
from tiny_models import VOCAB, make_model
from transformers import AutoTokenizer, BertTokenizer

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.text.corpus.batching import (
    SPAN_TOKENS,
    MaskedRows,
    Masker,
    RowLengths,
    find_sequences,
    find_spans,
    pad_masked,
)
from domext_ray.text.corpus.rows import RowSettings, build_rows
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, NO_LABEL, MaskedBatch, pad_batch, to_batch

NAMES = [*SPECIALS, "[unused0]"]
NUM_WORDS = 500


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return make_wordpiece([*NAMES, *(f"word{i}" for i in range(NUM_WORDS))])


def make_rows(num_rows: int, length: int = 62, seed: int = 0) -> pa.Table:
    """Random rows [CLS] … [SEP] with words of one to four tokens."""
    random = np.random.default_rng(seed)
    ids = random.integers(len(NAMES), len(NAMES) + NUM_WORDS, (num_rows, length))
    starts = random.random((num_rows, length)) < 0.5
    starts[:, 0] = True
    words = [[True, *row.tolist(), True] for row in starts]
    return make_token_rows([[2, *row.tolist(), 3] for row in ids], words, 1000)


def collate(masker: Masker, rows: MaskedRows, micro_batch_size: int) -> list[MaskedBatch]:
    return [to_batch(arrays) for arrays in masker.collate(rows, micro_batch_size)]


def test_rates(tokenizer: BertTokenizer) -> None:
    """Special tokens are neither predicted nor drawn; every word is drawn."""
    rows = make_rows(2000)
    for mix in ((0.8, 0.1), (0.0, 1.0), (0.8, 0.0)):
        for whole_word in (False, True):
            objective = ObjectiveConfig(mask_token_frac=mix[0], random_token_frac=mix[1], whole_word=whole_word)
            masked = Masker(tokenizer, objective, seed=1).mask(rows, epoch=0)
            chosen, ordinary = masked.selected, masked.labels >= len(NAMES)
            assert chosen[ordinary].mean() == pytest.approx(0.15, abs=0.006) and not chosen[~ordinary].any()
            inputs, labels = masked.inputs[chosen], masked.labels[chosen]
            is_mask, is_same = inputs == tokenizer.mask_token_id, inputs == labels
            assert is_mask.mean() == pytest.approx(mix[0], abs=0.015), (mix, whole_word)
            assert (~is_mask & ~is_same).mean() == pytest.approx(mix[1] * (1 - 1 / NUM_WORDS), abs=0.015)
            np.testing.assert_array_equal(masked.inputs[~chosen], masked.labels[~chosen])
            drawn = np.unique(inputs[~is_mask & ~is_same])
            assert mix[1] < 1 or (drawn.min() >= len(NAMES) and len(drawn) == NUM_WORDS)


def test_only_ids_with_a_token_are_drawn() -> None:
    """Ids from 106 to 205 have no token; where there is no gap, every id between the first and the last is drawn."""
    words = [f"word{i}" for i in range(NUM_WORDS)]
    ids = [*range(len(NAMES)), *range(len(NAMES), len(NAMES) + 100), *range(206, 206 + NUM_WORDS - 100)]
    gapped = BertTokenizer(vocab=dict(zip([*NAMES, *words], ids, strict=True)))
    objective = ObjectiveConfig(mask_token_frac=0.0, random_token_frac=1.0)
    rows = make_rows(2000)
    rows = rows.set_column(0, "input_ids", pa.array([[2, *[7] * 62, 3]] * 2000, type=pa.list_(pa.int32())))
    masked = Masker(gapped, objective, seed=1).mask(rows, epoch=0)
    drawn = masked.inputs[masked.selected]
    assert set(drawn.tolist()) == set(ids[len(NAMES) :])


def test_whole_words_are_masked_together(tokenizer: BertTokenizer) -> None:
    rows = make_rows(500)
    masked = Masker(tokenizer, ObjectiveConfig(), seed=1).mask(rows, epoch=0)
    starts = np.concatenate(rows.column("word_starts").to_pylist())
    words = np.cumsum(starts)
    selected = np.bincount(words, weights=masked.selected)[1:]
    sizes = np.bincount(words)[1:]
    assert np.isin(selected / sizes, [0.0, 1.0]).all()
    assert (sizes > 1).any()


def test_spans_of_a_word_are_equal_and_as_few_as_there_can_be() -> None:
    sizes = [1, 16, 17, 1, 33, 126, 15, 16, 200_000, 2]
    starts = np.zeros(sum(sizes), dtype=bool)
    starts[np.cumsum([0, *sizes[:-1]])] = True
    found = find_spans(starts)
    numbers = np.cumsum([-(-size // SPAN_TOKENS) for size in sizes])
    spans = np.split(np.unique(found, return_counts=True)[1], numbers[:-1])
    for size, own in zip(sizes, spans, strict=True):
        assert own.sum() == size and len(own) == -(-size // SPAN_TOKENS) and own.max() - own.min() <= 1, size
    np.testing.assert_array_equal(found[found], found)
    short = starts | (np.arange(len(starts)) % 16 == 0)
    words = np.maximum.accumulate(np.where(short, np.arange(len(short)), 0))
    np.testing.assert_array_equal(find_spans(short), words, "words of up to 16 tokens are whole")
    assert find_spans(np.zeros(0, dtype=bool)).shape == (0,)


def draw_letters(alphabet: str, length: int) -> str:
    return "".join(np.random.default_rng(7).choice(list(alphabet), length))


PIECED = "words that a WordPiece has pieces of"
LONG_WORDS = {
    "DNA": draw_letters("ACGT", 15_000),
    "a protein": draw_letters("ACDEFGHIKLMNPQRSTVWY", 15_000),
    "base64": base64.b64encode(np.random.default_rng(7).bytes(9_000)).decode(),
    "dots": "." * 15_000,
    "one long word among others": " ".join(["the cat", draw_letters("ACGT", 300)] * 40),
    PIECED: " ".join([draw_letters("acgt", 90)] * 100),
}
TOKENIZERS = {"byte-level BPE": save_roberta, "unigram": save_xlm_roberta, "WordPiece": None}


@pytest.fixture(scope="module", params=TOKENIZERS)
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer and how its rows are made."""
    if save := TOKENIZERS[request.param]:
        loaded = AutoTokenizer.from_pretrained(save(tmp_path_factory.mktemp("tokenizer")))
    else:
        pieces = [*"acgt", *(f"##{letter}" for letter in "acgt"), "the", "cat"]
        loaded = make_wordpiece([*NAMES, *pieces])
    made = RowSettings(loaded.backend_tokenizer.to_str(), loaded.cls_token_id, loaded.sep_token_id, 128, True, False)
    return loaded, made


@pytest.mark.parametrize("kind", LONG_WORDS)
def test_rows_that_are_one_word_are_masked_in_spans(kind: str, settings: Any) -> None:
    """As text becomes rows; a row goes on within a word of the one before."""
    tokenizer, made = settings
    if isinstance(tokenizer, BertTokenizer) and kind != PIECED:
        return  # [UNK]: a word of over 100 letters, or a character of its own
    ids, starts = zip(*build_rows([LONG_WORDS[kind]], made), strict=True)
    table = make_token_rows(ids, starts)
    masker, shares = Masker(tokenizer, ObjectiveConfig(), seed=1), []
    for epoch in range(5):
        masked = masker.mask(table, epoch)
        is_ordinary = ~masker.is_special[masked.labels]
        _, spans, sizes = np.unique(find_spans(np.concatenate(starts)), return_inverse=True, return_counts=True)
        ordinary, selected = np.bincount(spans, is_ordinary), np.bincount(spans, masked.selected)
        assert sizes.max() <= SPAN_TOKENS and ((selected == 0) | (selected == ordinary)).all()
        rows = np.split(masked.selected, np.cumsum(masked.lengths)[:-1])
        shares += [row.mean() for row in rows if len(row) > 60]
    assert np.mean(shares) == pytest.approx(0.15, abs=0.04) and np.mean(np.array(shares) > 0.7) < 0.01


def test_masks_move_with_the_row_and_change_with_epoch_and_seed(tokenizer: BertTokenizer) -> None:
    rows = make_rows(64)
    masker = Masker(tokenizer, ObjectiveConfig(), seed=1)
    whole = masker.mask(rows, epoch=2)
    shuffled = masker.mask(rows.take(pa.array([9, 3])), epoch=2)
    np.testing.assert_array_equal(shuffled.inputs[64:], whole.inputs[3 * 64 : 4 * 64])
    sliced = masker.mask(rows.slice(7, 2), epoch=2)  # which keeps its parent's buffers
    np.testing.assert_array_equal(sliced.inputs, whole.inputs[7 * 64 : 9 * 64])
    assert (masker.mask(rows, epoch=3).selected != whole.selected).mean() > 0.1
    assert (Masker(tokenizer, ObjectiveConfig(), seed=2).mask(rows, epoch=2).selected != whole.selected).mean() > 0.1


def test_a_pass_that_counts_nothing_counts_nothing() -> None:
    rows = MaskedRows(np.arange(8), np.arange(8), np.arange(8) % 2 == 1, np.array([5, 3]))
    rows = replace(rows, second_starts=np.array([2, 1]), next_sentence=np.array([0, 1]), parts=np.array([0, 2]))
    batch = to_batch(pad_masked(replace(rows, is_kept=np.array([False, True])), pad_id=0))
    assert batch.num_masked > 0 < batch.num_kept and batch.num_pairs == 2 and batch.count_predicted(3) == [2, 0, 2]
    silent = batch.without_weight()
    assert silent.num_masked == silent.num_kept == silent.num_pairs == 0 and silent.count_predicted(3) == [0, 0, 0]
    assert torch.equal(silent.input_ids, batch.input_ids)


def test_collate_cuts_and_pads(tokenizer: BertTokenizer) -> None:
    masker = Masker(tokenizer, ObjectiveConfig(), seed=1)
    rows = pa.concat_tables([make_rows(3, length=62), make_rows(2, length=20)]).combine_chunks()
    masked = masker.mask(rows, epoch=0)
    first, second, third = collate(masker, masked, micro_batch_size=2)
    assert first.input_ids.shape == (2, 64) and first.attention_mask is None
    assert second.input_ids.shape == (2, 64)
    assert second.attention_mask is not None and second.attention_mask.sum(1).tolist() == [64, 22]
    assert third.input_ids.shape == (1, 24)
    total = sum(batch.num_masked for batch in (first, second, third))
    assert total == masked.selected.sum()
    flat = first.input_ids.reshape(-1)
    assert (flat[first.masked_positions] != first.labels).float().mean() > 0.8


def test_token_indices_are_those_of_all_tokens_and_few_of_padding(tokenizer: BertTokenizer) -> None:
    masker, rows = Masker(tokenizer, ObjectiveConfig(), seed=1), pa.concat_tables([make_rows(6, 62), make_rows(6, 22)])
    (batch,) = collate(masker, masker.mask(rows, epoch=0), micro_batch_size=12)
    assert batch.attention_mask is not None and batch.token_indices is not None
    is_token = batch.attention_mask.flatten().bool()
    assert len(batch.token_indices) == 576  # 6 · 64 + 6 · 24 = 528 tokens
    assert batch.token_indices.diff().min() > 0 and torch.isin(is_token.nonzero().flatten(), batch.token_indices).all()
    assert torch.isin(batch.masked_positions, batch.token_indices).all()
    (full,) = collate(masker, masker.mask(make_rows(4, 62), epoch=0), micro_batch_size=4)
    (nearly,) = collate(masker, masker.mask(pa.concat_tables([make_rows(31), make_rows(1, 22)]), epoch=0), 32)
    assert full.token_indices is None and nearly.token_indices is None and nearly.attention_mask is not None
    # Stretches of padding are sequences of their own: here 48 tokens of it, which bring 528 tokens to 576.
    assert batch.cu_seq_lens.diff().tolist() == [64] * 6 + [24, 40, 24, 8] + [24] * 4 and batch.max_length == 64
    assert full.cu_seq_lens.tolist() == [0, 64, 128, 192, 256] and full.max_length == 64
    assert nearly.cu_seq_lens[-1] == nearly.input_ids.numel() and nearly.cu_seq_lens.dtype == torch.int32
    shown, document_ids = np.arange(8) < np.array([[5], [8]]), np.array([[1, 1, 2, 2, 2, 2, 2, 2], [1] * 8])
    assert find_sequences(shown, document_ids)["cu_seq_lens"].tolist() == [0, 2, 5, 8, 16]


def test_filler_leaves_few_numbers_of_predicted_positions() -> None:
    for num_masked, expected in ((1, 1), (31, 31), (33, 34), (155, 160), (160, 160), (513, 544)):
        row, selected = np.arange(600), np.arange(600) < num_masked
        plain = pad_batch([row], [row + 1], [selected], pad_id=0)
        filled = pad_batch([row], [row + 1], [selected], pad_id=0, with_filler=True)
        assert len(filled.labels) == len(filled.masked_positions) == expected
        assert filled.weights.tolist() == [1.0] * num_masked + [0.0] * (expected - num_masked)
        assert filled.num_masked == plain.num_masked == num_masked
        assert torch.equal(filled.labels[:num_masked], plain.labels)
    none = pad_batch([np.array([2, 7, 3])], [np.array([2, 7, 3])], [np.zeros(3, dtype=bool)], pad_id=0)
    assert none.weights.tolist() == [0.0] and none.num_masked == 0 and len(none.labels) == 1


def test_left_to_right_predicts_the_next_token(tokenizer: BertTokenizer) -> None:
    masker = Masker(tokenizer, ObjectiveConfig(kind="causal"), seed=1)
    rows = pa.concat_tables([make_rows(2, length=30), make_rows(1, length=20), make_rows(1, length=1)])
    first, second = collate(masker, masker.mask(rows.combine_chunks(), epoch=3), micro_batch_size=3)
    ids = rows.column("input_ids").to_pylist()
    for i, row in enumerate(ids[:3]):
        assert first.input_ids[i, : len(row)].tolist() == row, "nothing is masked"
    width = first.input_ids.shape[1]
    pairs = [(i * width + place, row[place + 1]) for i, row in enumerate(ids[:3]) for place in range(len(row) - 1)]
    counts = first.weights > 0
    assert list(zip(first.masked_positions[counts].tolist(), first.labels[counts].tolist(), strict=True)) == pairs
    assert first.num_masked == len(pairs) and first.num_pairs == 0 and first.token_type_ids is None
    assert second.input_ids[0, :3].tolist() == ids[3] and second.labels.tolist() == ids[3][1:]


def make_pairs(num_rows: int) -> pa.Table:
    """Rows [CLS] A [SEP] B [SEP] of different lengths, A of 10 tokens in the even rows and of 20 in the odd ones."""
    rows = pa.concat_tables([make_rows(1, length=30 + i % 7, seed=i) for i in range(num_rows)]).combine_chunks()
    splits = [10 + 10 * (i % 2) for i in range(num_rows)]
    ids = rows.column("input_ids").to_pylist()
    for row, split in zip(ids, splits, strict=True):
        row[split + 1] = 3
    labels = pa.array([int(i % 3 == 0) for i in range(num_rows)], type=pa.int8())
    seconds = pa.array([position + 2 for position in splits], type=pa.int32())
    starts = rows.column("word_starts").to_pylist()
    return make_token_rows(ids, starts, second_start=seconds, next_sentence=labels)


def test_pairs_keep_segments_and_labels(tokenizer: BertTokenizer) -> None:
    rows = make_pairs(7)
    masker = Masker(tokenizer, ObjectiveConfig(next_sentence=True), seed=1)
    batches = collate(masker, masker.mask(rows, epoch=0), micro_batch_size=3)
    labels = [label for batch in batches for label in batch.next_sentence_labels.tolist()]  # type: ignore[union-attr]
    assert labels == [1, 0, 0, 1, 0, 0, 1] and [batch.num_pairs for batch in batches] == [3, 3, 1]
    filler = replace(batches[0], next_sentence_labels=torch.tensor([NO_LABEL, 1, NO_LABEL]))
    assert filler.num_pairs == 1 and pad_batch([np.zeros(3)], [np.zeros(3)], [np.zeros(3, bool)], 0).num_pairs == 0
    lengths = [len(ids) for ids in rows.column("input_ids").to_pylist()]
    starts = rows.column("second_start").to_pylist()
    segments = [row for batch in batches for row in batch.token_type_ids.tolist()]  # type: ignore[union-attr]
    for row, length, start in zip(segments, lengths, starts, strict=True):
        assert row == [0] * start + [1] * (length - start) + [0] * (len(row) - length)
    assert all(batch.token_type_ids.shape == batch.input_ids.shape for batch in batches)  # type: ignore[union-attr]


def test_pairs_are_masked_as_any_row(tokenizer: BertTokenizer) -> None:
    rows = make_pairs(900)
    masker = Masker(tokenizer, ObjectiveConfig(next_sentence=True), seed=1)
    masked = masker.mask(rows, epoch=0)
    plain = masker.mask(rows.select(["input_ids", "word_starts", "row_id"]), epoch=0)
    np.testing.assert_array_equal(masked.inputs, plain.inputs)
    assert plain.second_starts is None and collate(masker, plain, 900)[0].next_sentence_labels is None
    assert not masked.selected[masked.labels < len(NAMES)].any()
    assert masked.selected.mean() == pytest.approx(0.15 * 30 / 33, abs=0.01)
    turned = masker.mask(rows.take(pa.array([5, 2])), epoch=0)
    assert turned.next_sentence is not None and turned.next_sentence.tolist() == [0, 0]
    assert turned.second_starts is not None and turned.second_starts.tolist() == [22, 12]


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
