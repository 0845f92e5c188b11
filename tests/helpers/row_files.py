"""Rows of a user's as a file of every kind, rows of tokens as a shard has them, and tokenizers of given entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from labelled_fixtures import dump_lines, write
from pyarrow import csv, feather, parquet
from transformers import BertTokenizer

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sources import Sources, resolve_sources

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON Lines, packed where the name says so."""
    return write(path, dump_lines([dict(row) for row in rows]))


def write_kinds(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write a file of every kind; bytes are in tables of columns alone."""
    table, saved = pa.Table.from_pylist([*rows]), datasets.Dataset.from_list([*rows])
    plain = table.drop_columns([field.name for field in table.schema if pa.types.is_binary(field.type)])
    paths = [write_rows(folder / name, plain.to_pylist()) for name in ("x.jsonl", "x.jsonl.gz")]
    paths += [folder / name for name in ("x.csv", "x.tsv", "x.parquet", "x.arrow", "saved", "saved_dict")]
    csv.write_csv(plain, folder / "x.csv")
    csv.write_csv(plain, folder / "x.tsv", csv.WriteOptions(delimiter="\t", quoting_style="none"))
    parquet.write_table(table, folder / "x.parquet")
    write_arrow(folder / "x.arrow", table)
    saved.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": saved}).save_to_disk(folder / "saved_dict")
    return paths


def write_arrow(path: Path, table: pa.Table, chunk_rows: int | None = None) -> None:
    """Write Arrow's file format, as shards have it."""
    feather.write_feather(table, str(path), compression="uncompressed", chunksize=chunk_rows)


def read_texts(spec: object, prepare: PrepareConfig) -> tuple[list[str], Dropped]:
    """The documents of a corpus, task by task, and what is lost of it, as records of tasks say."""
    documents, dropped = list[str](), Dropped()
    for task in (spec if isinstance(spec, Sources) else resolve_sources(str(spec), prepare)).tasks:
        lost = Dropped()
        documents += read_documents(task, prepare, lost)
        dropped.merge(json.loads(json.dumps(vars(lost))))
    return documents, dropped


def make_token_rows(
    ids: Sequence[Sequence[int]], starts: Sequence[Sequence[bool]], first: int = 0, **more: Any
) -> pa.Table:
    """Rows of tokens, which are numbered from `first` on."""
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "word_starts": pa.array(starts, pa.list_(pa.bool_()))}
    return pa.table({**columns, "row_id": pa.array(range(first, first + len(ids)), pa.int64()), **more})


def make_wordpiece(entries: Iterable[str], **options: Any) -> BertTokenizer:
    """BERT's tokenizer with entries in their order."""
    return BertTokenizer(vocab={entry: i for i, entry in enumerate(entries)}, **options)


def save_wordpiece(folder: Path, entries: Iterable[str], **options: Any) -> Path:
    """Save such a tokenizer; return the folder."""
    make_wordpiece(entries, **options).save_pretrained(folder)
    return folder
