"""Word bits per character: the length of a code for words, blind to how a vocabulary cuts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lone_engine import make_lone_engine
from row_files import SPECIALS, make_wordpiece
from torch import Tensor, nn
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from domext_ray.model.domext.words_domext import compute_losses
from domext_ray.storage import Place
from domext_ray.text.corpus import shards
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import Scores, evaluate, measure_bits
from domext_ray.training.objective import MaskedBatch
from domext_ray.training.passages import (
    EvalSet,
    Passage,
    build_character_set,
    build_word_set,
    find_kinds,
    read_passages,
)

SHARES = {"heart": 0.35, "head": 0.2, "gene": 0.15, "genome": 0.12, "drug": 0.1, "druse": 0.08}
"""How often the texts have a word, whatever stands around it."""
WHOLE = {word: (word,) for word in SHARES}
CUT = {word: (word[:2], f"##{word[2:]}") for word in SHARES}
MIXED = {word: (WHOLE if i % 2 else CUT)[word] for i, word in enumerate(SHARES)}


def make_tokenizer(cuts: dict[str, tuple[str, ...]]) -> BertTokenizer:
    """A tokenizer that cuts the words so, with spare entries that no text has."""
    pieces = dict.fromkeys(piece for pieces in cuts.values() for piece in pieces)
    return make_wordpiece([*SPECIALS, ",", "spare", "##spare", *pieces])


class Head:
    """A head that finds scores where states should be."""

    compute_losses = staticmethod(compute_losses)

    def __call__(self, scores: Tensor, *_: Any, **__: Any) -> Tensor:
        return scores


class MaskedModel(nn.Module):
    """A model whose states are its scores already."""

    predicts_next_sentence = False

    def __init__(self) -> None:
        super().__init__()
        self.bert = SimpleNamespace(embeddings=SimpleNamespace(adapters=None))
        self.cls = SimpleNamespace(predictions=Head())

    def encode(self, *inputs: Any, **named: Any) -> tuple[None, tuple[Tensor, ...]]:
        return None, self(*inputs, **named)


class Knowing(MaskedModel):
    """Knows how often each word is, and predicts a piece from the number of masks and the pieces before it.

    `waste` of its probability goes to entries that cannot stand there.
    """

    def __init__(self, tokenizer: BertTokenizer, cuts: dict[str, tuple[str, ...]], waste: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.mask, self.kinds, self.waste = tokenizer.mask_token_id, find_kinds(tokenizer), waste
        self.words = {tuple(tokenizer.convert_tokens_to_ids(list(cuts[word]))): SHARES[word] for word in cuts}
        self.begun = {pieces[:i] for pieces in self.words for i in range(1, len(pieces))}

    def forward(self, input_ids: Tensor, masked_positions: Tensor, **_: Any) -> tuple[Tensor]:
        length = input_ids.shape[1]
        places = [divmod(place, length) for place in masked_positions.tolist()]
        rows = [self.predict(input_ids[row].tolist(), place) for row, place in places]
        return (torch.stack(rows).log() * self.scale,)

    def predict(self, row: list[int], place: int) -> Tensor:
        first = end = place
        while row[first - 1] == self.mask:
            first -= 1
        while row[end] == self.mask:
            end += 1
        before = tuple(row[first - 1 : first]) if tuple(row[first - 1 : first]) in self.begun else ()
        found = torch.zeros(len(self.kinds))
        for pieces, share in self.words.items():
            if len(pieces) == len(before) + end - first and pieces[: len(before)] == before:
                found[pieces[len(before) + place - first]] += share
        is_other = self.kinds != self.kinds[found.argmax()]
        return (1 - self.waste) * found / found.sum() + self.waste * is_other / is_other.sum()


class Ignorant(MaskedModel):
    """A model that knows nothing, with three rows more than its tokenizer has entries."""

    def __init__(self, num_entries: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_entries + 3))

    def forward(self, masked_positions: Tensor, **_: Any) -> tuple[Tensor]:
        return (self.logits.expand(len(masked_positions), -1),)


def write_texts(folder: Path, words: Sequence[str], shares: Sequence[float], separator: str) -> Manifest:
    """A manifest with held-out text only: words drawn by their shares, each on its own."""
    drawn = np.random.default_rng(0).choice(words, (400, 25), p=shares)
    record = shards._write_texts(Place(folder / "text.jsonl"), [separator.join(text) for text in drawn])
    assert record is not None
    return Manifest(Place(folder), "f", 64, "t", {}, (), (), 1, {}, texts=(record,))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_texts(tmp_path_factory.mktemp("texts"), list(SHARES), list(SHARES.values()), ", ")


def measure(
    engine: Engine, manifest: Manifest, tokenizer: BertTokenizer, passages: list[Passage] | None = None
) -> tuple[float, float]:
    """Word bits and bits per character."""
    passages = passages or read_passages(manifest, tokenizer, num_passages=300, max_length=128)
    words, characters = (build(passages, tokenizer, batch_size=16) for build in (build_word_set, build_character_set))
    return measure_set(engine, words), measure_set(engine, characters)


def measure_set(engine: Engine, asked: EvalSet) -> float:
    return measure_bits(Scores.add_up(evaluate(engine, asked)), asked)


def test_the_cuts_of_words_do_not_matter(manifest: Manifest) -> None:
    """Models that know the same of words need the same bits for them, and those that the words' shares say."""
    found = []
    for cuts, waste in ((WHOLE, 0.0), (CUT, 0.0), (MIXED, 0.0), (MIXED, 0.3)):
        tokenizer = make_tokenizer(cuts)
        found.append(measure(make_lone_engine(Knowing(tokenizer, cuts, waste)), manifest, tokenizer))
    tokenizer = make_tokenizer(WHOLE)
    passages = read_passages(manifest, tokenizer, num_passages=300, max_length=128)
    words = [tokenizer.convert_ids_to_tokens(int(p.ids[at[0]])) for p in passages for _, at in p.scored]
    expected = -sum(math.log2(SHARES[word]) for word in words) / sum(map(len, words))
    assert len(words) > 500
    whole, cut, mixed, wasteful = (bits for bits, _ in found)
    assert whole == pytest.approx(expected, abs=1e-3) and cut == pytest.approx(expected, abs=1e-3)
    assert mixed == pytest.approx(expected, rel=0.01), "the number of pieces is known as well as 5,000 words tell it"
    assert wasteful == pytest.approx(mixed, abs=1e-6), "what is no word costs nothing"
    old = [bits for _, bits in found]
    assert abs(old[1] - old[0]) > 0.05 * old[0] and abs(old[2] - old[0]) > 0.05 * old[0], "the other figure is not"


def test_a_word_is_masked_alone_and_read_from_left_to_right(manifest: Manifest) -> None:
    tokenizer = make_tokenizer(MIXED)
    passages = read_passages(manifest, tokenizer, num_passages=40, max_length=128)
    words = build_word_set(passages, tokenizer, batch_size=7)
    wanted = sorted(
        (passage.ids.tolist(), places[i:])
        for passage in passages
        for _, places in passage.scored
        for i in range(len(places))
    )
    found = []
    for batch in words.batches:
        assert len(batch.input_ids) == len(batch.labels) <= 7
        for row, place, label in zip(batch.input_ids, batch.masked_positions, batch.labels, strict=True):
            masked = torch.nonzero(row == tokenizer.mask_token_id)[:, 0].tolist()
            assert int(place) % len(row) == masked[0]
            found.append((masked, int(label)))
    assert sorted(found) == sorted((masked, ids[masked[0]]) for ids, masked in wanted)
    assert words.num_chars == sum(chars for passage in passages for chars, _ in passage.scored)


def test_short_rows_share_a_batch_up_to_its_tokens(manifest: Manifest) -> None:
    """The same rows in fewer batches, each with at most the tokens of `batch_size` full rows."""
    tokenizer = make_tokenizer(MIXED)
    passages = read_passages(manifest, tokenizer, num_passages=40, max_length=128)
    apart, together = (
        build_word_set(passages, tokenizer, batch_size=4, full_length=length).batches for length in (0, 128)
    )
    assert max(len(batch.input_ids) for batch in together) > 4 and len(together) < len(apart)
    assert all(batch.input_ids.numel() <= 4 * 128 or len(batch.input_ids) == 4 for batch in together)
    assert list_rows(together) == list_rows(apart)


def list_rows(batches: Sequence[MaskedBatch]) -> list[tuple[list[int], int]]:
    """Tokens of each row without padding, and its label, in order."""
    return [
        (row[row != 0].tolist(), int(label))
        for batch in batches
        for row, label in zip(batch.input_ids, batch.labels, strict=True)
    ]


def test_the_price_of_a_number_of_pieces_is_how_often_other_words_have_it() -> None:
    tokenizer = make_tokenizer(CUT)
    ids = np.array([tokenizer.cls_token_id, *tokenizer.convert_tokens_to_ids(["he", "##art"]), tokenizer.sep_token_id])
    passage = Passage(ids, [[1, 2]], [(5, [1, 2])], other_sizes=[1, 1, 2, 3])
    words = build_word_set([passage], tokenizer, batch_size=4)
    assert words.price_bits == pytest.approx(-math.log2((1 + 0.25) / 5))
    unseen = build_word_set([Passage(ids, [[1, 2]], [(5, [1, 2])], [1, 1, 1])], tokenizer, batch_size=4)
    assert unseen.price_bits == pytest.approx(-math.log2(0.25 / 4))
    whole = [*range(1, 1101)]  # a row of DNA: 0.5 ** 1100 is 0
    row = build_word_set([Passage(np.full(1102, ids[2]), [whole], [(1100, whole)], [])], tokenizer, batch_size=4)
    assert row.price_bits == 1100


def test_a_piece_competes_with_those_that_can_stand_in_its_place(
    tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    """A model that knows nothing needs the logarithm of how many entries begin words, or are inside."""
    texts = write_texts(tmp_path, ["heart", "thalamus", "garden"], [0.3, 0.3, 0.4], " ")
    for base, mark in ((tiny_base_folder, "##"), (tiny_roberta_folder, "Ġ")):
        check_competition(AutoTokenizer.from_pretrained(base), mark, texts)


def check_competition(tokenizer: PreTrainedTokenizerBase, mark: str, texts: Manifest) -> None:
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    marked = {name: name.startswith(mark) for name in names}
    ordinary = [name for name in names if name not in tokenizer.all_special_tokens]
    sizes = {flag: sum(marked[name] == flag for name in ordinary) for flag in (True, False)}
    passages = read_passages(texts, tokenizer, num_passages=30, max_length=100)
    words = build_word_set(passages, tokenizer, batch_size=16)
    labels = [names[label] for batch in words.batches for label in batch.labels.tolist()]
    assert {marked[label] for label in labels} == {True, False}
    expected = sum(math.log2(sizes[marked[label]]) for label in labels) + words.price_bits
    assert measure_set(make_lone_engine(Ignorant(len(names))), words) == pytest.approx(
        expected / words.num_chars, rel=1e-6
    )


def test_a_chinese_word_is_a_character(tmp_path: Path) -> None:
    tokenizer = make_wordpiece([*SPECIALS, *"患者治疗心脏，", "##脏"])
    texts = write_texts(tmp_path, ["患者", "治疗", "心脏"], [0.3, 0.3, 0.4], "，")
    passages = read_passages(texts, tokenizer, num_passages=50, max_length=64)
    words = build_word_set(passages, tokenizer, batch_size=16)
    assert words.num_chars == sum(len(batch.labels) for batch in words.batches) > 100
    assert words.price_bits / words.num_chars < 0.01
