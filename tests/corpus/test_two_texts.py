"""Rows of two texts: both are of one row of the user's, in every batch, and what lacks one is counted."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import SPECIALS, read_texts, save_wordpiece, write_kinds, write_rows

from domext_ray.config.pretrain import ObjectiveConfig, PrepareConfig
from domext_ray.storage import Place
from domext_ray.text.corpus.estimate import estimate_rows
from domext_ray.text.corpus.manifest import Manifest
from domext_ray.text.corpus.pairs import NO_NEXT_SENTENCE
from domext_ray.text.corpus.rows import NO_TOKEN, build_two_text_rows
from domext_ray.text.corpus.sampler import Part, Sampler, share_rows
from domext_ray.text.corpus.shards import make_settings, prepare_corpus
from domext_ray.text.corpus.stream import BatchReader, RankBatch, stream_batches
from domext_ray.text.corpus.views import make_masker
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.evaluate import build_domain_set

PAIR = PrepareConfig(pair=("title", "body"), min_document_chars=1, shard_bytes=4096, held_out_frac=0.1)
VOCABULARY = [*SPECIALS, "title", "body", "a", *(f"{i}" for i in range(10)), *(f"##{i}" for i in range(10))]
CONTRAST = ObjectiveConfig(kind="infonce", group_rows=4)
NUM_ROWS = 700


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wordpiece(tmp_path_factory.mktemp("tokenizer"), VOCABULARY)


def make_records(num_rows: int) -> list[dict[str, str]]:
    return [{"id": "x", "body": f"a body {i}" + " a" * (i % 9), "title": f"title {i}"} for i in range(num_rows)]


def decode(ids: np.ndarray) -> str:
    return " ".join(VOCABULARY[i] for i in ids).replace(" ##", "")


def require_one_row(title: np.ndarray, body: np.ndarray) -> int:
    """The number of the user's row that both views are of."""
    first, second = decode(title).split(), decode(body).split()
    assert (first[:2], second[:3]) == (["[CLS]", "title"], ["[CLS]", "a", "body"])
    assert first[-1] == second[-1] == "[SEP]" and first[2] == second[3]
    return int(first[2])


def test_both_fields_are_read_in_the_order_of_the_option(tmp_path: Path) -> None:
    for path in write_kinds(tmp_path, make_records(5)):
        documents, dropped = read_texts(path, PAIR)
        assert documents == [f"title {i}\na body {i}" + " a" * i for i in range(5)] and not dropped.counts, path
    assert read_texts(path, replace(PAIR, pair=("body", "title")))[0][3] == "a body 3 a a a\ntitle 3"


def test_a_row_without_both_texts_is_counted_and_its_place_told(tmp_path: Path) -> None:
    whole = {"title": "title 1", "body": "line\nbreaks\r\nare  spaces"}
    lacking: list[Any] = [
        {"title": "title 2"},
        {"body": "a body"},
        {"title": None, "body": "a body"},
        {"title": "title 3", "body": 7},
        {"title": " \n", "body": "a body"},
        {"title": "title 4", "body": ""},
    ]
    documents, dropped = read_texts(write_rows(tmp_path / "rows.jsonl", [whole, *lacking, whole]), PAIR)
    assert documents == ["title 1\nline breaks are spaces"] * 2
    assert dropped.counts == {"no_field": 2, "null": 1, "not_text": 1, "empty": 2}
    path = tmp_path / "rows.jsonl"
    places = {reason: f"{path}:{line}" for reason, line in (("null", 4), ("not_text", 5), ("empty", 6))}
    assert dropped.places == {"no_field": f"{path}:2 (it has title)", **places}
    pq.write_table(pa.table({"title": ["title 1", None], "body": [None, "a body"]}), tmp_path / "rows.parquet")
    documents, dropped = read_texts(tmp_path / "rows.parquet", PAIR)
    assert not documents and dropped.counts == {"null": 2}


def test_a_text_that_is_too_long_is_cut_and_its_pair_stays_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"title": "title " * 10, "body": "body " * 20}])
    documents, dropped = read_texts(path, replace(PAIR, min_document_chars=9, max_document_chars=50))
    assert documents == ["title title title title title title title title ti\n" + ("body " * 10)] and not dropped.counts
    documents, dropped = read_texts(path, replace(PAIR, min_document_chars=500))
    assert not documents and dropped.counts == {"too_short": 1}


def test_a_document_is_one_row_of_two_texts(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    counts: Counter[str] = Counter()
    documents = ["title 12\na. body. a", "title\n\u0301", "title [SEP] [CLS]\na", "a" + " 12345" * 4 + "\n" + "a " * 20]
    rows = list(build_two_text_rows(documents, make_settings(tokenizer, PAIR, 10), counts))
    assert counts == {"used": 3, NO_TOKEN: 1}
    texts = [[decode(ids) for ids in np.split(row.ids, [row.second_start])] for row in rows]
    assert texts[0] == ["[CLS] title 12 [SEP]", "[CLS] a [UNK] body [UNK] a [SEP]"]
    assert texts[1][1] == "[CLS] a [SEP]" and texts[1][0].startswith("[CLS] title ")
    assert texts[2] == ["[CLS] a 12345 [SEP]", "[CLS] " + "a " * 8 + "[SEP]"], "cut before a word"
    for row in rows:
        assert row.word_starts.tolist() == [not VOCABULARY[i].startswith("##") for i in row.ids]


@pytest.fixture(scope="module")
def prepared(local_ray: None, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """700 rows, of which one makes no token, and one that lacks its body."""
    folder = tmp_path_factory.mktemp("prepared")
    odd = [{"title": "\u0301", "body": "a body"}, {"title": "title 9"}]
    path = write_rows(folder / "rows.jsonl", [*make_records(NUM_ROWS), *odd])
    return prepare_corpus(str(path), PAIR, tokenizer_dir, 16, Place(folder / "cache"))


def open_reader(manifest: Manifest, tokenizer_dir: Path, rank: int, world_size: int, group: int = 1) -> BatchReader:
    sampler = Sampler((Part("--corpus", tuple(shard.num_rows for shard in manifest.train), seed=5),), 16)
    masker, corpora = make_masker(load_tokenizer(tokenizer_dir), CONTRAST, seed=5), (manifest.shards("train"),)
    return BatchReader(corpora, sampler, (masker,), (), share_rows(16, rank, world_size, group), 16)


def list_rows(batch: RankBatch) -> list[int]:
    """The user's rows of a rank's share of a batch; that both views are of one is required."""
    ((views,), tokens) = batch
    titles, bodies = np.split(views["input_ids"], 2)
    assert tokens == [int(views["attention_mask"].sum())], "both texts are read"
    return [require_one_row(*(ids[ids != 0] for ids in pair)) for pair in zip(titles, bodies, strict=True)]


def test_the_corpus_says_what_it_holds_and_lost(prepared: Manifest) -> None:
    assert prepared.dropped == {"no_field": 1, NO_TOKEN: 1} and prepared.settings["pair"] == ["title", "body"]
    assert prepared.num_rows("train") + prepared.num_rows("held_out") == prepared.num_documents == NUM_ROWS
    assert len(prepared.train) > 2


def test_batches_hold_pairs_whatever_the_workers_and_go_on_anywhere(prepared: Manifest, tokenizer_dir: Path) -> None:
    batches = np.arange(prepared.num_rows("train") // 16 + 3)
    read = {}
    for world_size, group in ((1, 1), (2, 1), (3, 4), (4, 4), (5, 1), (7, 1)):
        readers = [open_reader(prepared, tokenizer_dir, rank, world_size, group) for rank in range(world_size)]
        shares = [[list_rows(batch) for batch in reader(batches)] for reader in readers]
        assert all(len(rows) % group == 0 for share in shares for rows in share), "groups that are compared stay whole"
        read[world_size] = [list(itertools.chain(*batch)) for batch in zip(*shares, strict=True)]
    assert all(found == read[1] for found in read.values())
    seen = [row for batch in read[1][: prepared.num_rows("train") // 16] for row in batch]
    assert len(set(seen)) == len(seen) > 500
    resumed = stream_batches(open_reader(prepared, tokenizer_dir, 1, 2), 20)
    assert [list_rows(next(resumed)) for _ in range(2)] == [batch[8:] for batch in read[1][20:22]]


def test_held_out_pairs_are_scored(prepared: Manifest, tokenizer_dir: Path) -> None:
    batches = build_domain_set(prepared, load_tokenizer(tokenizer_dir), CONTRAST, num_rows=22, batch_size=4).batches
    assert [[*pairs.counts.values()] for pairs in batches] == [[4]] * 5
    for batch in batches:
        titles, bodies = batch.input_ids.numpy().reshape(2, 4, -1)
        for pair in zip(titles, bodies, strict=True):
            require_one_row(*(ids[ids != 0] for ids in pair))


def test_documents_that_make_no_row_are_told() -> None:
    lines = Dropped(Counter({NO_TOKEN: 2, NO_NEXT_SENTENCE: 1})).describe(PAIR)
    assert lines == ["1 document of a single sentence", "2 documents of which a text makes no token"]


def test_a_dry_run_knows_how_many_rows_there_will_be(tokenizer_dir: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", make_records(NUM_ROWS))
    settings = make_settings(load_tokenizer(tokenizer_dir), PAIR, 16)
    estimate = estimate_rows(check_corpus(str(path), PAIR, to_end=True), settings)
    assert estimate is not None and estimate.num_rows == pytest.approx(0.9 * NUM_ROWS, rel=0.05)
