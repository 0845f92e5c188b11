"""Which documents are held out: single ones, blocks of neighbours, whole files, or all of a group.

Where documents are the lines of a text, one of them tells much about the next: held out one by one, the text that a
model is tested on would stand between sentences that it was trained on. So lines of text files are held out in blocks
of neighbours, and documents of other kinds one by one, unless `--prepare.held_out_by` says otherwise. Where rows say
whose they are (`--prepare.group_field`), a hash of the group alone decides, so that texts prepared apart agree.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.draws import to_uniform
from domext_ray.text.data.files import TEXT, SourceFile

HeldOut: TypeAlias = Literal["document", "block", "file", "group"]
CHUNK = 2**20
"""Documents that are worked through at a time: a corpus may have billions."""
BLOCK_DOCUMENTS = 64
MIN_BLOCKS = 4
"""A small corpus holds out this many blocks of fewer documents, so that they come from several places of it."""
FEWEST = 4
"""Documents, or groups, that a corpus holds out of which the share would be none: of fewer than 16 a quarter."""


def resolve_held_out_by(files: Sequence[SourceFile], prepare: PrepareConfig) -> HeldOut:
    """Return what is held out, "auto" resolved."""
    if prepare.grouped_by:
        return "group"
    if prepare.held_out_by != "auto":
        return prepare.held_out_by
    is_lines = prepare.document == "line" and any(file.kind == TEXT for file in files)
    return "block" if is_lines else "document"


def describe_split(files: Sequence[SourceFile], prepare: PrepareConfig, held_out_by: str) -> str:
    """Return a sentence on what is held out where neighbouring documents may be of one text; else nothing."""
    noun = {"line": "lines", "blank_line": "paragraphs between blank lines"}.get(prepare.document)
    if noun is None or not any(file.kind == TEXT for file in files):
        return ""
    return {
        "block": f"held out: blocks of up to {BLOCK_DOCUMENTS} neighbouring {noun} (if each is a text of its own, set "
        "--prepare.held_out_by document)",
        "document": f"held out: single {noun}, whose neighbours train (if neighbours are of one text, set "
        "--prepare.held_out_by block, or file)",
    }.get(held_out_by, "")


def hold_out_blocks(keep: np.ndarray, held_out_frac: float, is_held_out: np.ndarray) -> None:
    """Choose blocks of neighbours, one in each of equal stretches of the corpus, at a place that is drawn.

    `keep`, bool [D], has the documents that stay, in order; in `is_held_out`, bool [D] and false, those that are held
    out become true. Where the share is less than one document, `_count_fewest` says how many.
    """
    num_kept = int(np.count_nonzero(keep))
    num_held_out = round(num_kept * held_out_frac) or _count_fewest(num_kept)
    num_blocks = max(num_held_out // BLOCK_DOCUMENTS, min(num_held_out, MIN_BLOCKS))
    stretches = np.linspace(0, num_kept, num_blocks + 1).astype(np.int64)
    sizes = np.diff(np.linspace(0, num_held_out, num_blocks + 1).astype(np.int64))
    draws = np.random.default_rng(num_kept).random(num_blocks)
    starts = stretches[:-1] + (draws * (np.diff(stretches) - sizes + 1)).astype(np.int64)
    before, block = 0, 0
    for own in list_chunks(len(keep)):
        kept = np.flatnonzero(keep[own]) + own.start
        end = before + len(kept)
        while block < num_blocks and starts[block] < end:
            is_held_out[kept[max(starts[block] - before, 0) : starts[block] + sizes[block] - before]] = True
            if starts[block] + sizes[block] > end:
                break  # the rest of it is in the next chunk
            block += 1
        before = end


def list_chunks(number: int) -> Iterator[slice]:
    """Yield the chunks of so many documents."""
    for start in range(0, number, CHUNK):
        yield slice(start, min(start + CHUNK, number))


def hold_out_hashes(hashes: np.ndarray, share: float) -> np.ndarray:
    """Choose each document, or all of a group, by its hash alone, uint64 [D]; bool [D], which are held out."""
    return to_uniform(hashes) < share


def choose_share(hashes: Iterable[np.ndarray], held_out_frac: float) -> float:
    """Return the share of the hashes' range that is held out: `held_out_frac`, or more if no hash falls into that.

    The hashes, unsigned integers of 8 bytes, in parts, are of the documents that stay, or of their groups.
    """
    different = np.zeros(0)
    for own in hashes:
        different = np.union1d(different, to_uniform(own.astype(np.uint64)))
        if len(different) and different[0] < held_out_frac:
            return held_out_frac
    fewest = _count_fewest(len(different))
    return float(np.nextafter(different[fewest - 1], 1.0)) if fewest else held_out_frac


def _count_fewest(number: int) -> int:
    """How many of so many documents, or groups, are held out where the share is less than one of them."""
    return max(min(FEWEST, max(number // 4, 1), number - 1), 0)


def hold_out_files(
    keep: np.ndarray,
    draws: np.ndarray,
    files: Sequence[tuple[str, int]],
    held_out_frac: float,
    is_held_out: np.ndarray,
) -> None:
    """Choose whole files, in the order of a hash of their content, while they fit into the share; at least one.

    `draws` has hashes of the documents, unsigned integers of 8 bytes [D], and `files` the path and number of documents
    of each part of a file, in order; `keep` and `is_held_out` are as of `hold_out_blocks`.
    """
    ends = itertools.accumulate(number for _, number in files)
    parts = [(path, slice(end - number, end)) for (path, number), end in zip(files, ends, strict=True)]
    numbers: dict[str, int] = {}
    sizes, hashes = Counter[int](), Counter[int]()
    for path, own in parts:
        number, kept = numbers.setdefault(path, len(numbers)), keep[own]
        sizes[number] += int(np.count_nonzero(kept))
        hashes[number] ^= int(np.bitwise_xor.reduce(draws[own][kept].astype(np.uint64)))
    used = [index for index in numbers.values() if sizes[index]]
    if len(used) < 2:
        raise CorpusError(
            f"--prepare.held_out_by is 'file' and the documents are of {len(used)} file; give two or more files, or "
            "--prepare.held_out_by block."
        )
    wanted, taken, chosen = held_out_frac * sizes.total(), 0, set[int]()
    for file in sorted(used, key=lambda index: hashes[index]):
        if taken < wanted and taken + sizes[file] <= 1.5 * wanted:
            chosen.add(file)
            taken += sizes[file]
    chosen = chosen or {min(used, key=lambda index: sizes[index])}
    for path, own in parts:
        if numbers[path] in chosen:
            is_held_out[own] = keep[own]
