"""Evaluations: what is masked, what counts, by whom a row is scored, and codes for words however they are cut."""

from __future__ import annotations

import json
import math
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from lone_engine import make_lone_engine
from row_files import SPECIALS, make_wordpiece, write_arrow
from torch import Tensor, nn
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ObjectiveConfig, SettledConfig
from domext_ray.errors import CorpusError
from domext_ray.model.base import load_base
from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.model.domext.routers_domext import ROUTER_PAIRS
from domext_ray.model.domext.words_domext import compute_losses
from domext_ray.model.spec import ModelSpec
from domext_ray.storage import Place
from domext_ray.text.corpus import shards
from domext_ray.text.corpus.batching import MaskedRows, pad_masked
from domext_ray.text.corpus.manifest import FileRecord, Manifest
from domext_ray.text.corpus.pairs import PAIR_SCHEMA, build_pairs
from domext_ray.text.corpus.rows import SCHEMA, RowSettings
from domext_ray.training.engine import Engine
from domext_ray.training.evaluate import (
    GENERAL_PROBE,
    Evaluations,
    Scores,
    build_domain_set,
    build_evaluations,
    evaluate,
    evaluate_routed,
    measure_bits,
    pack_scores,
    read_probe,
    unpack_scores,
)
from domext_ray.training.objective import MaskedBatch, to_batch
from domext_ray.training.passages import (
    NOTHING,
    PROBE_PASSES,
    EvalSet,
    Passage,
    _split_passages,
    build_character_set,
    build_probe_set,
    build_word_set,
    find_kinds,
    read_passages,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_base_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_base_folder)


def write_held_out(folder: Path, tokenizer: PreTrainedTokenizerBase, shard_rows: tuple[int, ...]) -> Manifest:
    random, records = np.random.default_rng(0), []
    for i, size in enumerate(shard_rows):
        ids = [
            [tokenizer.cls_token_id, *random.integers(40, len(tokenizer), 20).tolist(), tokenizer.sep_token_id]
            for _ in range(size)
        ]
        write_arrow(folder / f"{i}.arrow", pa.table({"input_ids": ids, "word_starts": [[True] * 22] * size}, SCHEMA))
        records.append(FileRecord(f"{i}.arrow", "", size, 22 * size))
    return Manifest(Place(folder), "f", 32, "t", {}, (), tuple(records), 1, {})


def test_probe_masks_every_word_once(tokenizer: PreTrainedTokenizerBase) -> None:
    sentence = "the old man and the dog walk in the garden by the river, every day."
    batches = build_probe_set([sentence], tokenizer, batch_size=3, max_length=64).batches
    counted = sum(probe_batch.num_masked for probe_batch in batches)
    encoded = tokenizer(sentence)
    words = [word for word in encoded.word_ids() if word is not None]
    whole = [w for w in set(words) if words.count(w) == 1]
    punctuation = 2
    assert counted == len(whole) - punctuation
    masks = torch.zeros(len(encoded["input_ids"]), dtype=torch.int64)
    for batch in batches:
        assert batch.input_ids.shape[0] <= 3
        masks += (batch.input_ids == tokenizer.mask_token_id).sum(0)[: len(masks)]
        places = batch.masked_positions
        assert (batch.input_ids.reshape(-1)[places] == tokenizer.mask_token_id).all()
    assert masks.max() == 1
    assert sum(probe_batch.input_ids.shape[0] for probe_batch in batches) <= PROBE_PASSES


def test_the_shipped_probe_is_what_the_meter_needs() -> None:
    sentences = read_probe()
    assert len(sentences) >= 300 and len(set(sentences)) == len(sentences)
    assert GENERAL_PROBE.is_file()


def test_an_unusable_probe_is_an_error(tmp_path: Path) -> None:
    for content in (b"", b"\n \n", b"\xff\xfe broken", b"a \xe9", b'{"text": "a"}\n', b"id,text\n1,a\n2,b\n"):
        (tmp_path / "probe.txt").write_bytes(content)
        with pytest.raises(CorpusError, match="--train.general_probe"):
            read_probe(tmp_path / "probe.txt")


def test_domain_batches_depend_on_the_corpus_only(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = write_held_out(tmp_path, tokenizer, (30, 3, 41))
    whole = build_domain_set(manifest, tokenizer, ObjectiveConfig(), num_rows=50, batch_size=50).batches[0]
    parts = build_domain_set(manifest, tokenizer, ObjectiveConfig(), num_rows=50, batch_size=8).batches
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    labels = torch.cat([part.labels[part.weights > 0] for part in parts])
    assert torch.equal(labels, whole.labels[whole.weights > 0])
    assert whole.num_masked / (50 * 20) == pytest.approx(0.15, abs=0.04)
    (every,) = build_domain_set(manifest, tokenizer, ObjectiveConfig(), num_rows=500, batch_size=500).batches
    assert len(every.input_ids) == 74


def test_halves_of_held_out_text_share_no_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = write_held_out(tmp_path, tokenizer, (30, 3, 41))

    def read(half: str) -> set[bytes]:
        options: dict[str, Any] = {"num_rows": 50, "batch_size": 50, "half": half}
        (batch,) = build_domain_set(manifest, tokenizer, ObjectiveConfig(), **options).batches
        return {row.numpy().tobytes() for row in batch.input_ids}

    first, second = read("first"), read("second")
    assert not first & second and first | second == read("both") and len(first) == len(second)


def test_left_to_right_measures_no_masked_words(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = write_held_out(tmp_path, tokenizer, (30,))
    config = SettledConfig(objective=ObjectiveConfig(kind="causal"))
    found = build_evaluations(config, manifest, tokenizer, (), 32)
    assert found.general is found.characters is found.words is NOTHING and NOTHING.batches == []
    assert sum(batch.num_masked for batch in found.domain.batches) == 30 * 21
    assert all((batch.input_ids != tokenizer.mask_token_id).all() for batch in found.domain.batches)


def make_model(base_folder: Path, next_sentence: bool = False) -> nn.Module:
    method = MethodConfig(heads=1, ffn_units=8)
    return ModelSpec(load_base(str(base_folder)), method, next_sentence=next_sentence, dropout=0.1).build()


WORDS = "patient disease protein heart gene drug study treat house water garden bread thalamus brain 1998".split()


def write_texts(folder: Path, num_documents: int = 60, num_files: int = 3) -> Manifest:
    """A manifest with held-out text only: documents of a few sentences."""
    random, records = np.random.default_rng(0), []
    for i in range(num_files):
        documents = []
        for _ in range(num_documents):
            sentences = [" ".join(random.choice(WORDS, random.integers(3, 25))) for _ in range(8)]
            documents.append(". ".join(sentences) + ".")
        record = shards._write_texts(Place(folder / f"text-{i}.jsonl"), documents)
        assert record is not None
        records.append(record)
    return Manifest(Place(folder), "f", 32, "t", {}, (), (), 1, {}, texts=tuple(records))


@pytest.fixture(scope="module")
def extended(tokenizer: PreTrainedTokenizerBase) -> BertTokenizer:
    """The base's tokenizer and four words more, of which it has pieces only."""
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return make_wordpiece([*words, "thalamus", "##amus", "brain", "1998"])


def read_words(characters: EvalSet, tokenizer: PreTrainedTokenizerBase) -> Counter[tuple[str, str]]:
    """The (passage, chosen words in their places) of every row."""
    found: Counter[tuple[str, str]] = Counter()
    for batch in characters.batches:
        labels = batch.input_ids.clone().reshape(-1)
        chosen = torch.zeros_like(labels, dtype=torch.bool)
        labels[batch.masked_positions], chosen[batch.masked_positions] = batch.labels, True
        for ids, is_chosen in zip(labels.view_as(batch.input_ids), chosen.view_as(batch.input_ids), strict=True):
            length = int((ids != tokenizer.pad_token_id).sum())
            tokens, text, words, inside = tokenizer.convert_ids_to_tokens(ids[:length].tolist()), "", "", False
            for token, is_masked in list(zip(tokens, is_chosen.tolist(), strict=False))[1:-1]:
                continues = token.startswith("##")
                assert not continues or is_masked == inside, "a word is masked as a whole"
                text += token[2:] if continues else f" {token}"
                words += "" if not is_masked else token[2:] if continues else f" {len(text.split())}:{token}"
                inside = is_masked
            found[text, words] += 1
    return found


def build_characters(
    manifest: Manifest, tokenizer: PreTrainedTokenizerBase, num_passages: int, max_length: int, batch_size: int
) -> EvalSet:
    passages = read_passages(manifest, tokenizer, num_passages=num_passages, max_length=max_length)
    return build_character_set(passages, tokenizer, batch_size=batch_size)


def test_characters_are_chosen_whatever_the_vocabulary(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, extended: BertTokenizer
) -> None:
    manifest = write_texts(tmp_path)
    sets = [build_characters(manifest, vocabulary, 150, 64, batch_size=7) for vocabulary in (tokenizer, extended)]
    rows = [read_words(characters, used) for characters, used in zip(sets, (tokenizer, extended), strict=True)]
    assert rows[0] == rows[1]
    assert 120 < sum(rows[0].values()) <= 150
    assert sets[0].num_chars == sets[1].num_chars
    words = [choice.split(":")[1] for _, chosen in rows[0] for choice in chosen.split()]
    assert {"thalamus", "brain"} <= set(words)
    assert sets[0].num_chars == sum(map(len, words))
    total = sum(sum(word not in "." for word in text.split()) for text, _ in rows[0])
    assert len(words) / total == pytest.approx(0.15, abs=0.03)
    pieces = [sum(own_batch.num_masked for own_batch in characters.batches) for characters in sets]
    assert pieces[0] > pieces[1] >= len(words)
    for batch in sets[0].batches:
        assert (batch.input_ids.reshape(-1)[batch.masked_positions] == tokenizer.mask_token_id).all()
        assert batch.input_ids.shape[1] <= 64


def test_passages_are_the_same_every_time_and_nested(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    manifest = write_texts(tmp_path)
    rows = [
        read_words(build_characters(manifest, tokenizer, n, 64, batch_size=b), tokenizer)
        for n, b in ((40, 3), (40, 40), (100, 8))
    ]
    assert rows[0] == rows[1] and rows[0] <= rows[2] and rows[0] != rows[2]
    for text, _ in rows[2]:
        assert len(text.replace(" .", ".").strip()) <= 2 * 62


def test_words_that_fall_off_or_are_unknown_are_not_scored(tmp_path: Path, extended: BertTokenizer) -> None:
    """Letters only: passages of twice as many characters as there is room for tokens overflow by half."""
    characters = {*string.ascii_lowercase, *string.digits, "."}
    kept = [*SPECIALS, *(piece for piece in sorted(extended.get_vocab()) if piece.strip("#") in characters)]
    letters, blind = (make_wordpiece(entry for entry in kept if entry != left_out) for left_out in ("", "##e"))
    manifest = write_texts(tmp_path)
    whole, cut, unknown = (
        build_characters(manifest, vocabulary, 100, 40, batch_size=8) for vocabulary in (extended, letters, blind)
    )
    assert all(batch.input_ids.shape[1] <= 40 for batch in cut.batches)
    assert 0.4 * whole.num_chars < cut.num_chars < 0.75 * whole.num_chars
    assert sum(batch.num_masked for batch in cut.batches) == cut.num_chars  # a piece a letter, and whole words only
    assert unknown.num_chars < cut.num_chars
    assert all((batch.labels != blind.unk_token_id).all() for batch in unknown.batches)


PASSAGES = {
    "One two. Three four. Five.": ["One two.", "Three four.", "Five."],
    "A b. C d. Efghijk lm.": ["A b. C d.", "Efghijk lm."],
    "abc defg hijk lmno pq": ["abc defg", "hijk lmno", "pq"],
    "abcdefghijklmnopq": ["abcdefghijk", "lmnopq"],
    "天地人。你我。山水火日月口手": ["天地人。", "你我。", "山水火日月", "口手"],
}


def test_passages() -> None:
    for document, passages in PASSAGES.items():
        assert list(_split_passages(document, 11)) == passages


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, tiny_base_folder: Path
) -> None:
    characters = build_characters(write_texts(tmp_path), tokenizer, 20, 64, batch_size=4)
    model = make_model(tiny_base_folder)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.shape[:1] == (len(tokenizer),):  # the word embeddings, tied to the output, and its bias
                param.zero_()
                assert "word_embeddings" in name or "bias" in name
    pieces = sum(batch.num_masked for batch in characters.batches)
    expected = math.log2(len(tokenizer)) * pieces / characters.num_chars
    engine = make_lone_engine(model)
    for asked, bits in ((characters, expected), (NOTHING, math.nan)):
        found = measure_bits(Scores.add_up(evaluate(engine, asked)), asked)
        assert found == pytest.approx(bits, rel=1e-6, nan_ok=True)


def write_pairs(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Manifest:
    """A manifest with held-out pairs."""
    texts = [folder / text.path for text in write_texts(folder).texts]
    documents = [json.loads(line)["text"] for path in texts for line in path.read_text(encoding="utf-8").splitlines()]
    settings = RowSettings(tokenizer.backend_tokenizer.to_str(), 2, 3, 64, True, False, True)
    rows = build_pairs(documents, settings, (0, 1), Counter())
    record, _ = shards._write_shard(Place(folder / "held_out.arrow"), rows, PAIR_SCHEMA)
    assert record is not None
    return Manifest(Place(folder), "f", 64, "t", {}, (), (record,), 1, {}, True, 2, 3)


def test_domain_batches_of_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Pairs are those of the held-out rows, in any batches."""
    manifest = write_pairs(tmp_path, tokenizer)
    (whole,), parts = (
        build_domain_set(manifest, tokenizer, ObjectiveConfig(), num_rows=400, batch_size=size).batches
        for size in (400, 64)
    )
    assert whole.next_sentence_labels is not None and whole.token_type_ids is not None
    assert 0.4 < whole.next_sentence_labels.float().mean() < 0.6
    separators = (whole.input_ids == tokenizer.sep_token_id).sum(1)
    assert (separators == 2).all() and (whole.token_type_ids.sum(1) > 1).all()
    assert torch.equal(torch.cat([part.next_sentence_labels for part in parts]), whole.next_sentence_labels)


def test_scores_are_the_models(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, tiny_base_folder: Path) -> None:
    """Of words, and of pairs."""
    asked = build_domain_set(write_pairs(tmp_path, tokenizer), tokenizer, ObjectiveConfig(), num_rows=60, batch_size=8)
    model = make_model(tiny_base_folder, next_sentence=True)
    rows = evaluate(make_lone_engine(model), asked)
    scores, sets = Scores.add_up(rows), Evaluations(asked)
    assert np.array_equal(unpack_scores(pack_scores({"domain": rows}, sets), sets)["domain"], rows[:, :3])
    model.eval()
    losses, words, pairs = [], [], []
    with torch.no_grad():
        for batch in asked.batches:
            segments = {"attention_mask": batch.attention_mask, "token_type_ids": batch.token_type_ids}
            found = model(batch.input_ids, **segments)
            counts = batch.weights > 0
            chosen = found[0].flatten(0, 1)[batch.masked_positions[counts]]
            losses.append(nn.functional.cross_entropy(chosen, batch.labels[counts], reduction="none"))
            words.append(chosen.argmax(-1) == batch.labels[counts])
            pairs.append(found.seq_relationship_logits.argmax(-1) == batch.next_sentence_labels)
    assert (scores.num_tokens, scores.num_pairs) == (len(torch.cat(words)), 60) and 0 < torch.cat(pairs).sum() < 60
    figures = [torch.cat(values).float().mean().item() for values in (losses, words, pairs)]
    assert [scores.loss, scores.accuracy, scores.next_sentence_accuracy] == pytest.approx(figures, abs=1e-5)


OWN, OTHER = 50, 51
"""The words by which the router knows the domain's rows, and others."""
FIRST = [OWN, OTHER, OTHER, OWN, OTHER, OTHER, OTHER, OTHER, OWN, OWN]
SIZES = [11, 11, 9, 14, 11, 8, 12, 11, 20, 10]


@pytest.fixture
def routed(tiny_base_folder: Path) -> nn.Module:
    base = load_base(str(tiny_base_folder))
    method = MethodConfig(heads=1, ffn_units=8)
    made = ModelSpec(base, method).build()
    generator = torch.Generator().manual_seed(1)
    for name, param in made.named_parameters():
        if ".adapters." in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return cast(nn.Module, made)


def make_set() -> EvalSet:
    """Ten rows in batches of four, of which some begin with the domain's word; nothing is asked of one of them."""
    draw = np.random.default_rng(2)
    rows = [np.array([own, *draw.integers(60, 200, size)]) for own, size in zip(FIRST, SIZES, strict=True)]
    selected = [np.isin(np.arange(len(row)), (3, 7) if i != 6 else ()) for i, row in enumerate(rows)]
    flat = [np.concatenate(column) for column in (rows, [row + 1 for row in rows], selected)]
    lengths = np.array([len(row) for row in rows])

    def collate(some: MaskedRows) -> list[Any]:
        cuts = (some.cut(slice(first, first + 4)) for first in range(0, len(some.lengths), 4))
        return [to_batch(pad_masked(cut, 0, with_filler=True)) for cut in cuts]

    return EvalSet(MaskedRows(flat[0], flat[1], flat[2], lengths), collate)


def test_every_row_is_scored_once_by_whom_it_is_sent_to(routed: nn.Module) -> None:
    """Whether all that are asked score theirs now, or some or all have scored every row before."""
    network: Any = routed
    table = torch.zeros(network.config.vocab_size + ROUTER_PAIRS, dtype=torch.int32)
    table[OWN], table[OTHER] = 1000, -1000
    network.bert.set_router("domain", table, 0.0)
    engine, asked = make_lone_engine(routed), make_set()
    alone = []
    for row, first in enumerate(FIRST):
        network.config.active_adapters = ["domain"] if first == OWN else []
        alone.append(evaluate(engine, replace(asked, rows=asked.rows.take(np.array([row]))))[0])
    network.config.active_adapters = []
    of_base = evaluate(engine, asked)
    network.config.active_adapters = None
    adapted, score, scored = evaluate(engine, asked), engine.evaluate, list[Any]()

    def note(batch: Any) -> torch.Tensor:
        scored.append(batch)
        return score(batch)

    engine.evaluate = note  # type: ignore[method-assign]
    both = {"domain": adapted, BASE_NAME: of_base}
    for names, num_batches in (((), 3), (("domain",), 2), ((BASE_NAME,), 1), (("domain", BASE_NAME), 0)):
        known = {name: both[name] for name in names}
        scored.clear()
        found = evaluate_routed(engine, routed, asked, known, lambda: None)
        assert network.config.active_adapters is None, "the model is as it was"
        assert len(scored) == num_batches, names
        np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert found[:, 2].sum() == 18 and (found[:, 2] == 0).sum() == 1
    assert abs(found - adapted)[:, 0].max() > 1e-3, "the adapter changes what its rows get alone"


SHARES = {"heart": 0.35, "head": 0.2, "gene": 0.15, "genome": 0.12, "drug": 0.1, "druse": 0.08}
"""How often the texts have a word, whatever stands around it."""
WHOLE = {word: (word,) for word in SHARES}
CUT = {word: (word[:2], f"##{word[2:]}") for word in SHARES}
MIXED = {word: (WHOLE if i % 2 else CUT)[word] for i, word in enumerate(SHARES)}


def make_cut_tokenizer(cuts: dict[str, tuple[str, ...]]) -> BertTokenizer:
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


def write_words(folder: Path, words: Sequence[str], shares: Sequence[float], separator: str) -> Manifest:
    """A manifest with held-out text only: words drawn by their shares, each on its own."""
    drawn = np.random.default_rng(0).choice(words, (400, 25), p=shares)
    record = shards._write_texts(Place(folder / "text.jsonl"), [separator.join(text) for text in drawn])
    assert record is not None
    return Manifest(Place(folder), "f", 64, "t", {}, (), (), 1, {}, texts=(record,))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return write_words(tmp_path_factory.mktemp("texts"), list(SHARES), list(SHARES.values()), ", ")


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
        tokenizer = make_cut_tokenizer(cuts)
        found.append(measure(make_lone_engine(Knowing(tokenizer, cuts, waste)), manifest, tokenizer))
    tokenizer = make_cut_tokenizer(WHOLE)
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
    tokenizer = make_cut_tokenizer(MIXED)
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
    tokenizer = make_cut_tokenizer(MIXED)
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
    tokenizer = make_cut_tokenizer(CUT)
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
    texts = write_words(tmp_path, ["heart", "thalamus", "garden"], [0.3, 0.3, 0.4], " ")
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
    texts = write_words(tmp_path, ["患者", "治疗", "心脏"], [0.3, 0.3, 0.4], "，")
    passages = read_passages(texts, tokenizer, num_passages=50, max_length=64)
    words = build_word_set(passages, tokenizer, batch_size=16)
    assert words.num_chars == sum(len(batch.labels) for batch in words.batches) > 100
    assert words.price_bits / words.num_chars < 0.01
