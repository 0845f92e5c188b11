"""Which documents are held out: single ones, blocks of neighbours, whole files, or all of a group.

Where documents are the lines of a text, one of them tells much about the next: held out one by one, the text that a
model is tested on would stand between sentences that it was trained on. So lines of text files are held out in blocks
of neighbours, and documents of other kinds one by one, unless `--prepare.held_out_by` says otherwise. Where rows say
whose they are (`--prepare.group_field`), a hash of the group alone decides, so that texts prepared apart agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from domext_ray.config.pretrain import MOST_HELD_OUT, PrepareConfig
from domext_ray.data.files import TEXT, SourceFile
from domext_ray.errors import CorpusError

BLOCK_DOCUMENTS = 64
MIN_BLOCKS = 4
"""A small corpus holds out this many blocks of fewer documents, so that they come from several places of it."""


def resolve_held_out_by(
    files: Sequence[SourceFile], prepare: PrepareConfig
) -> Literal["document", "block", "file", "group"]:
    """Return what is held out, "auto" resolved."""
    if prepare.group_field:
        return "group"
    if prepare.held_out_by != "auto":
        return prepare.held_out_by
    is_lines = prepare.document == "line" and any(file.kind == TEXT for file in files)
    return "block" if is_lines else "document"


def describe_split(files: Sequence[SourceFile], prepare: PrepareConfig, held_out_by: str) -> str:
    """Return a sentence on what is held out where neighbouring documents may be of one text; else nothing."""
    if prepare.group_field:
        return f"held out: all rows of some {prepare.group_field!r}, each by a hash of it alone"
    noun = {"line": "lines", "blank_line": "paragraphs between blank lines"}.get(prepare.document)
    if noun is None or not any(file.kind == TEXT for file in files):
        return ""
    return {
        "block": f"held out: blocks of up to {BLOCK_DOCUMENTS} neighbouring {noun} (where each is a text of its own: "
        "--prepare.held_out_by document)",
        "document": f"held out: single {noun}, whose neighbours train (where neighbours are of one text: "
        "--prepare.held_out_by block, or file)",
    }.get(held_out_by, "")


def hold_out_blocks(keep: np.ndarray, held_out_frac: float) -> np.ndarray:
    """Choose blocks of neighbours, one in each of equal stretches of the corpus, at a place that is drawn.

    Args:
        keep: bool [D], documents that stay, in order; returned are, likewise, those that are held out.
        held_out_frac: share of them that is held out.
    """
    kept = np.flatnonzero(keep)
    num_held_out = round(len(kept) * held_out_frac)
    num_blocks = max(num_held_out // BLOCK_DOCUMENTS, min(num_held_out, MIN_BLOCKS))
    is_held_out = np.zeros(len(keep), dtype=bool)
    if not num_blocks:
        return is_held_out
    stretches = np.linspace(0, len(kept), num_blocks + 1).astype(np.int64)
    ends = np.linspace(0, num_held_out, num_blocks + 1).astype(np.int64)
    draws = np.random.default_rng(len(kept)).random(num_blocks)
    for first, end, size, draw in zip(stretches[:-1], stretches[1:], np.diff(ends), draws, strict=True):
        start = first + int(draw * (end - first - size + 1))
        is_held_out[kept[start : start + size]] = True
    return is_held_out


def hold_out_hashes(hashes: np.ndarray, held_out_frac: float) -> np.ndarray:
    """Choose each document, or all of a group, by its hash alone, uint64 [D]; bool [D], which are held out."""
    return _to_uniform(hashes) < held_out_frac


def _to_uniform(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def require_held_out_group(groups: np.ndarray, prepare: PrepareConfig) -> None:
    """Refuse a corpus of which no group is held out, and say which share would do.

    Args:
        groups: uint64 [D], hashes of the groups of the documents that stay.
        prepare: what a group is, and the share of them that is held out.
    """
    lowest = float(_to_uniform(groups).min(initial=1.0))
    if lowest >= prepare.held_out_frac:
        needed = math.floor(100 * lowest + 1) / 100
        advice = f"give {needed:g} or more" if needed < MOST_HELD_OUT else "give rows of more groups"
        raise CorpusError(
            f"--prepare.held_out_frac is {prepare.held_out_frac:g}, and the hash of none of the "
            f"{len(np.unique(groups)):,} different {prepare.group_field!r} falls into that share, so none is held out; "
            f"{advice}."
        )


def hold_out_files(
    keep: np.ndarray, draws: np.ndarray, files: Sequence[tuple[str, int]], held_out_frac: float
) -> np.ndarray:
    """Choose whole files, in the order of a hash of their content, while they fit into the share.

    Args:
        keep: bool [D], documents that stay, in order.
        draws: uint64 [D], hashes of the documents.
        files: path and number of documents of each part of a file, in order.
        held_out_frac: share of the documents that is held out, as nearly as files allow: at least one file's.

    Raises:
        CorpusError: fewer than two files have documents.
    """
    numbers: dict[str, int] = {}
    of_document = np.repeat([numbers.setdefault(path, len(numbers)) for path, _ in files], [size for _, size in files])
    sizes = np.bincount(of_document[keep], minlength=len(numbers))
    used = np.flatnonzero(sizes)
    if len(used) < 2:
        raise CorpusError(
            f"--prepare.held_out_by is 'file' and the documents are of {len(used)} file; give two or more files, or "
            "--prepare.held_out_by block."
        )
    hashes = np.zeros(len(numbers), dtype=np.uint64)
    np.bitwise_xor.at(hashes, of_document[keep], draws[keep])
    wanted, taken = held_out_frac * keep.sum(), 0
    chosen = np.zeros(len(numbers), dtype=bool)
    for file in used[np.argsort(hashes[used], kind="stable")]:
        if taken < wanted and taken + sizes[file] <= 1.5 * wanted:
            chosen[file] = True
            taken += int(sizes[file])
    if not taken:
        chosen[used[np.argmin(sizes[used])]] = True
    return keep & chosen[of_document]
