"""The first rows of a corpus are read before Ray starts, so that mistakes in it are told at once.

Enters: `--corpus`. The beginnings of a bounded number of its files are read, in this process.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.data.documents import read_documents, require_fields
from domext_ray.data.dropped import Dropped, count_rows, describe_dropped, require_text
from domext_ray.data.files import JSONL, LOCAL, PACKAGE_DOCS, TEXT, SourceFile, find_files
from domext_ray.data.sources import ReadTask
from domext_ray.errors import CorpusError

MAX_FILES = 32
MAX_REMOTE_FILES = 4
MAX_DOCUMENTS = 256
"""Read of a file, at most."""

MAX_BYTES = 2**18
"""Read of a file of lines, at most."""


def check_corpus(spec: str, prepare: PrepareConfig) -> None:
    """Read the first documents of some of a corpus's files; neither Ray nor a hash of the content is needed.

    Args:
        spec: the `--corpus` option.
        prepare: what a document is.

    Raises:
        CorpusError: a file that is missing, unreadable, of another format or encoding, or without the field; nothing
            but rows without text; or a corpus of less than two documents.
    """
    files, repeated = find_files(spec)
    for file in files:
        require_fields(file, prepare)
    if repeated:
        print(f"warning: --corpus names {repeated[0]} more than once; it is read once.", file=sys.stderr, flush=True)
    chosen = _choose_files([each for each in files if each.kind != PACKAGE_DOCS])
    has_docs = any(each.kind == PACKAGE_DOCS for each in files)  # which are text
    dropped, documents = Dropped(), list[str]()
    is_whole = len(chosen) == len(files)
    for file in chosen:
        found, is_all = _read_beginning(file, prepare, dropped)
        documents += found
        is_whole &= is_all
    num_not_text, num_rows = count_rows(dropped.counts, len(documents))
    if is_whole or (
        num_not_text == num_rows and not has_docs
    ):  # else only a reading of all of it says which share holds no text
        require_text(spec, dropped.counts, dropped.describe_places(), len(documents), prepare)
    if is_whole:
        _require_two_documents(spec, dropped, documents, prepare)


def _require_two_documents(spec: str, dropped: Dropped, documents: Sequence[str], prepare: PrepareConfig) -> None:
    """Refuse a corpus, read whole, that is too small for a training and a held-out split."""
    num_documents = len(set(documents))
    if num_documents < 2:
        counts = {**dropped.counts, "duplicate": len(documents) - num_documents}
        reasons = "; ".join(describe_dropped(counts, dropped.describe_places(), prepare)) or "nothing else is there"
        raise CorpusError(
            f"--corpus {spec!r} has {num_documents or 'no'} usable document (dropped: {reasons}), and training and "
            "evaluation need one each; give more text, or a finer --prepare.document."
        )


def _choose_files(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Some of the files, from the first to the last at equal distances."""
    limit = MAX_FILES if all(each.scheme in LOCAL for each in files) else MAX_REMOTE_FILES
    if len(files) <= limit:
        return files
    return [files[i * (len(files) - 1) // (limit - 1)] for i in range(limit)]


def _read_beginning(file: SourceFile, prepare: PrepareConfig, dropped: Dropped) -> tuple[list[str], bool]:
    """Documents of the beginning of a file, and whether these are all."""
    is_range = file.kind in (TEXT, JSONL) and not file.is_gzip and file.size > MAX_BYTES
    if is_range and not (file.kind == TEXT and prepare.document == "file"):
        documents = read_documents(ReadTask((file,), 0, MAX_BYTES), prepare, dropped)
        return list(itertools.islice(documents, MAX_DOCUMENTS)), False
    documents = read_documents(ReadTask((file,)), prepare, dropped)
    found = list(itertools.islice(documents, MAX_DOCUMENTS))
    return found, next(documents, None) is None
