"""Pairs for next-sentence prediction: texts of one document, half of them of another, nothing given away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from row_files import SPECIALS, make_wordpiece, save_wordpiece
from transformers import BertTokenizer

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.corpus import pairs, shards
from domext_ray.text.corpus.manifest import Manifest, Split, find_shard_fault, read_manifest
from domext_ray.text.corpus.pairs import NO_NEXT_SENTENCE, NO_OTHER_TEXT, PAIR_SCHEMA, PairRow, build_pairs
from domext_ray.text.corpus.rows import RowSettings
from domext_ray.text.corpus.shards import prepare_corpus

NUM_DOCUMENTS = 400
SEQ_LENGTH = 64
FILLERS = ["red", "green", "blue", "run", "##ner", "##s", "very", "house"]
HAN = "天地人你我他山水火日月口手上下大小多少"
TOKENS = [*SPECIALS, ".", *FILLERS, *HAN, "。", *(f"doc{i}" for i in range(NUM_DOCUMENTS))]
FIRST_DOCUMENT_ID = TOKENS.index("doc0")
PREPARE = PrepareConfig(shard_bytes=16384, held_out_frac=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizer:
    return make_wordpiece(TOKENS)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wordpiece(tmp_path_factory.mktemp("tokenizer"), TOKENS)


def make_settings(tokenizer: BertTokenizer, seq_length: int = SEQ_LENGTH) -> RowSettings:
    record = tokenizer.backend_tokenizer.to_str()
    return RowSettings(record, tokenizer.cls_token_id, tokenizer.sep_token_id, seq_length, True, False, True)


def make_documents(num_documents: int = NUM_DOCUMENTS) -> list[str]:
    """Documents of 2 to 20 sentences of 3 to 17 words; every sentence names its document."""
    random = np.random.default_rng(0)
    words = ["red", "green", "blue", "runner", "very", "houses"]
    return [
        " ".join(
            f"doc{i} {' '.join(random.choice(words, random.integers(1, 15)))}." for _ in range(random.integers(2, 21))
        )
        for i in range(num_documents)
    ]


def make_pairs(
    documents: Sequence[str], settings: RowSettings, counts: Counter[str] | None = None, seed: int = 0
) -> list[PairRow]:
    return list(build_pairs(documents, settings, (seed, 0), Counter() if counts is None else counts))


@pytest.fixture(scope="module")
def drawn(tokenizer: BertTokenizer) -> list[PairRow]:
    return make_pairs(make_documents(), make_settings(tokenizer))


def show(row: PairRow) -> tuple[list[int], int, int]:
    return row.ids.tolist(), row.second_start, row.next_sentence


def split_texts(row: PairRow) -> tuple[list[int], list[int]]:
    """The two texts of a pair, special tokens not included."""
    ids = row.ids.tolist()
    return ids[1 : row.second_start - 1], ids[row.second_start : -1]


def find_documents(ids: Sequence[int]) -> set[int]:
    """The documents that a text's sentences name."""
    return {token - FIRST_DOCUMENT_ID for token in ids if token >= FIRST_DOCUMENT_ID}


def prepare(text: Path, tokenizer_dir: Path, cache: Path, seq_length: int = SEQ_LENGTH, **options: Any) -> Manifest:
    return prepare_corpus(str(text), replace(PREPARE, **options), tokenizer_dir, seq_length, Place(cache), pairs=True)


def test_texts_of_a_document_hold_every_sentence_in_order(tokenizer: BertTokenizer) -> None:
    """What gave way to another document's text begins the next row, so that no sentence is lost."""
    counts: Counter[str] = Counter()
    documents = make_documents(60)
    rows = make_pairs(documents, make_settings(tokenizer), counts)
    assert counts == {"used": 60}
    num_missing = 0
    for i, document in enumerate(documents):
        own = [row for row in rows if find_documents(split_texts(row)[0]) == {i}]
        found = [token for row in own for text in split_texts(row)[: 2 - row.next_sentence] for token in text]
        expected = tokenizer.encode(document, add_special_tokens=False)
        # Only a last sentence that finds no partner may be missing, or one that was to follow and gave way.
        assert found == expected[: len(found)] and TOKENS[found[-1]] == "."
        num_missing += len(expected) - len(found)
    assert num_missing < 0.1 * sum(len(tokenizer.encode(whole, add_special_tokens=False)) for whole in documents)


def test_layout_labels_and_documents(drawn: list[PairRow]) -> None:
    assert len(drawn) > 1000
    cls, sep = TOKENS.index("[CLS]"), TOKENS.index("[SEP]")
    shares = []
    for row in drawn:
        ids = row.ids.tolist()
        assert len(ids) <= SEQ_LENGTH and len(row.word_starts) == len(ids)
        assert [i for i, token in enumerate(ids) if token in (cls, sep)] == [0, row.second_start - 1, len(ids) - 1]
        assert row.word_starts.tolist() == [not TOKENS[i].startswith("##") for i in ids]
        first, second = split_texts(row)
        own, other = find_documents(first), find_documents(second)
        assert len(own) == len(other) == 1 and (own != other) == row.next_sentence
        for text in (first, second):
            assert TOKENS[text[0]].startswith("doc") and TOKENS[text[-1]] == "."  # whole sentences
        shares.append(len(first) / (len(first) + len(second)))
    labels = np.array([row.next_sentence for row in drawn])
    assert abs(labels.mean() - 0.5) < 3 * 0.5 / np.sqrt(len(labels))
    assert 0.4 < np.mean(shares) < 0.6 and np.std(shares) > 0.15  # the boundary is anywhere


def test_the_label_does_not_follow_from_lengths(tokenizer: BertTokenizer) -> None:
    rows = [row for seed in range(3) for row in make_pairs(make_documents(), make_settings(tokenizer), seed=seed)]
    label = np.array([row.next_sentence for row in rows])
    for figure in ([len(row.ids) for row in rows], [len(split_texts(row)[1]) for row in rows]):
        for threshold in range(SEQ_LENGTH):
            accuracy = ((np.array(figure) > threshold) == label).mean()
            assert 0.43 < accuracy < 0.57


def test_pairs_depend_on_text_and_seed_alone(tokenizer: BertTokenizer, drawn: list[PairRow]) -> None:
    found, settings = [show(row) for row in drawn], make_settings(tokenizer)
    assert [show(row) for row in make_pairs(make_documents(), settings)] == found
    assert [show(row) for row in make_pairs(make_documents(), settings, seed=1)] != found


def test_long_sentences_are_cut_before_words(tokenizer: BertTokenizer) -> None:
    documents = [f"{name} {'runners red ' * 60}" for name in ("doc0", "doc1")]  # run ##ner ##s red
    rows = make_pairs(documents, make_settings(tokenizer, 43))
    assert len(rows) > 10 and {row.next_sentence for row in rows} == {0, 1}
    for row in rows:
        assert len(row.ids) <= 43 and row.word_starts[1] and row.word_starts[row.second_start]


def test_documents_that_make_no_pair_are_counted(tokenizer: BertTokenizer) -> None:
    documents = ["red green.", "red green. blue house.", "very", "blue red. green."]
    counts: Counter[str] = Counter()
    assert make_pairs(documents, make_settings(tokenizer), counts)
    assert counts == {"used": 2, NO_NEXT_SENTENCE: 2}
    counts.clear()
    assert not make_pairs(documents[:3], make_settings(tokenizer), counts)
    assert counts == {NO_OTHER_TEXT: 1, NO_NEXT_SENTENCE: 2}


def test_few_documents_are_held_at_a_time(tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second texts come from documents nearby, and a last document that would be alone has the one before it."""
    documents = [" ".join(f"doc{i} red green blue." for _ in range(40)) for i in range(21)]
    for held, farthest in ((1, 1), (400, 4)):
        monkeypatch.setattr(pairs, "HELD_TOKENS", held)
        counts: Counter[str] = Counter()
        rows = make_pairs(documents, make_settings(tokenizer), counts)
        assert counts == {"used": 21}
        names = [tuple(find_documents(text).pop() for text in split_texts(row)) for row in rows]
        assert {first for first, _ in names} == {*range(21)}
        assert 0 < max(abs(first - second) for first, second in names) <= farthest


@pytest.fixture(scope="module")
def prepared(local_ray: None, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("prepared")
    lines = [*make_documents(), *(f"doc{i} only one sentence here" for i in range(30))]
    (folder / "text.txt").write_text("\n".join(lines))
    return prepare(folder / "text.txt", tokenizer_dir, folder / "cache")


def read_pairs(manifest: Manifest, split: Split = "train") -> list[PairRow]:
    tables = [pa.ipc.open_file(shard.path).read_all() for shard in manifest.shards(split)]
    assert all(table.schema == PAIR_SCHEMA for table in tables)
    rows = [row for table in tables for row in table.to_pylist()]
    return [
        PairRow(*map(np.array, (r["input_ids"], r["word_starts"])), r["second_start"], r["next_sentence"]) for r in rows
    ]


def test_preparation_writes_pairs(prepared: Manifest, tokenizer_dir: Path) -> None:
    assert prepared.pairs and (prepared.cls_id, prepared.sep_id) == (2, 3)
    assert prepared.dropped[NO_NEXT_SENTENCE] == 30
    assert prepared.num_documents == NUM_DOCUMENTS - prepared.dropped.get(NO_OTHER_TEXT, 0) > 0.95 * NUM_DOCUMENTS
    assert len(prepared.train) > 2
    assert not find_shard_fault(prepared)
    found: dict[Split, set[int]] = {}
    for split in shards.SPLITS:
        rows = read_pairs(prepared, split)
        found[split] = {document for row in rows for document in find_documents(row.ids.tolist())}
        assert prepared.num_rows(split) == len(rows)
        assert prepared.num_tokens(split) == sum(len(row.ids) for row in rows)
    assert not found["train"] & found["held_out"]
    assert len(found["train"] | found["held_out"]) == prepared.num_documents
    plain = prepare_corpus(
        str(prepared.folder.parent.parent / "text.txt"), PREPARE, tokenizer_dir, SEQ_LENGTH, prepared.folder.parent
    )
    assert plain.fingerprint != prepared.fingerprint and not plain.pairs
    assert plain.texts == prepared.texts


def test_a_corpus_without_partners_is_refused(local_ray: None, tokenizer_dir: Path, tmp_path: Path) -> None:
    lines = [f"doc{i} has only one sentence" for i in range(200)]
    text, cache = tmp_path / "text.txt", tmp_path / "cache"
    none = "has 0 documents of two or more sentences in the training split.*--prepare.document blank_line or file"
    for documents, message in (
        (lines, none),
        (["doc0 red. doc0 blue.", *lines], "next-sentence prediction needs two or more"),
    ):
        text.write_text("\n".join(documents))
        with pytest.raises(CorpusError, match=message):
            prepare(text, tokenizer_dir, cache, unknown="allow")
        assert not cache.exists()


def test_chinese_pairs(local_ray: None, tokenizer_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("jieba")
    random = np.random.default_rng(0)
    lines = [
        "".join("".join(random.choice(list(HAN), random.integers(3, 12))) + "。" for _ in range(random.integers(2, 12)))
        for _ in range(200)
    ]
    (tmp_path / "zh.txt").write_text("\n".join(lines), encoding="utf-8")
    manifest = prepare(tmp_path / "zh.txt", tokenizer_dir, tmp_path / "cache", 48)
    assert read_manifest(manifest.folder) == manifest
    rows = read_pairs(manifest)
    labels = np.array([row.next_sentence for row in rows])
    assert len(labels) > 150 and abs(labels.mean() - 0.5) < 0.12
    for row in rows:
        texts = ["".join(TOKENS[i] for i in text) for text in split_texts(row)]
        homes = [{i for i, line in enumerate(lines) if text in line} for text in texts]
        assert homes[0] and homes[1]
        assert (sum(texts[0] + texts[1] in line for line in lines) > 0) == (row.next_sentence == 0)
        assert texts[0].endswith("。") and texts[1].endswith("。")
    starts = np.concatenate([row.word_starts for row in rows])
    assert starts.mean() < 1.0, "characters of a word share a start"
