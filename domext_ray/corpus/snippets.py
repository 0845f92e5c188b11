"""Prepared training rows -> short snippets around new words, some for each word, chosen by hashes.

They are found once, before workers start, and stored beside the corpus: every rank reads the small file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from domext_ray.corpus.draws import Purpose, hash_counters, to_uniform
from domext_ray.corpus.manifest import Manifest, read_train_batches
from domext_ray.errors import CorpusError, StorageError, name_file
from domext_ray.storage import Place, hash_values, map_file, new_file

_SPARE = 4
"""Occurrences of a word that are looked at for every one that is wanted."""


@dataclass(frozen=True)
class Snippets:
    """Snippets of a corpus around its new words.

    Args:
        ids: tokens of each snippet, without [CLS] and [SEP], int64.
        counts: occurrences of each new word in the corpus' training rows, int64 [E].
        num_tokens: tokens of these rows.
    """

    ids: list[np.ndarray]
    counts: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class SnippetRequest:
    """Which snippets of a corpus are wanted.

    Args:
        manifest: the prepared corpus.
        is_continuation: whether a token is the inside of a word (`##…`), bool [V + E].
        first_id: the first new word's id, V; the others follow.
        per_word: occurrences of a word that are wanted.
        length: tokens of a snippet, at most.
        seed: of the hashes.
    """

    manifest: Manifest
    is_continuation: np.ndarray
    first_id: int
    per_word: int
    length: int
    seed: int

    @property
    def place(self) -> Place:
        """Where they are stored; the name has all that decides them beside the corpus, which has its tokenizer."""
        own = {name: value for name, value in vars(self).items() if name not in ("manifest", "is_continuation")}
        name = hash_values({"corpus": self.manifest.fingerprint, "purpose": Purpose.OCCURRENCES, **own})[:16]
        return self.manifest.folder / f"snippets-{name}.npz"


def get_or_find_snippets(request: SnippetRequest) -> None:
    """Find snippets and store them, unless they are stored already; see `find_snippets`."""
    if request.place.is_file():
        return
    found = find_snippets(request)
    with new_file(request.place, is_flushed=False) as temporary:
        joined = np.concatenate([np.zeros(0, dtype=np.int64), *found.ids])
        np.savez(temporary, ids=joined, sizes=[*map(len, found.ids)], counts=found.counts, tokens=found.num_tokens)


def read_snippets(request: SnippetRequest) -> Snippets:
    """Return what `get_or_find_snippets` stored.

    Raises:
        CorpusError: it has gone, or is damaged.
    """
    try:
        with name_file(request.place), np.load(pa.BufferReader(map_file(request.place))) as stored:
            ids = np.split(stored["ids"], np.cumsum(stored["sizes"], dtype=np.int64)[:-1])
            return Snippets(ids if len(stored["sizes"]) else [], stored["counts"], int(stored["tokens"]))
    except StorageError:
        raise
    except Exception as error:  # of zipfile, zlib or numpy, whatever they meet first
        raise CorpusError(
            f"{request.place} is missing or damaged; delete it and run the same command again."
        ) from error


def find_snippets(request: SnippetRequest) -> Snippets:
    """Choose snippets so that each new word occurs as often as asked for in them, where the corpus has it that often.

    The rarest words come first, and of a word the occurrences with the lowest hashes. A snippet counts for every new
    word in it, so that frequent words need hardly one of their own.
    """
    manifest, first_id, per_word = request.manifest, request.first_id, request.per_word
    is_continuation = request.is_continuation
    tokens = manifest.token_counts(len(is_continuation))
    counts = tokens[first_id:]
    share = np.minimum(1.0, _SPARE * per_word / np.maximum(counts, 1))
    batches = list(read_train_batches(manifest))
    found = []
    for number, batch in enumerate(batches):
        ids = batch.column("input_ids").flatten().to_numpy()
        places = np.flatnonzero(ids >= first_id)
        words, draws = ids[places] - first_id, hash_counters(request.seed, Purpose.OCCURRENCES, number, places)
        kept = to_uniform(draws) < share[words]
        found.append((words[kept], draws[kept], np.full(int(kept.sum()), number), places[kept]))
    words, draws, numbers, places = (np.concatenate(each) for each in zip(*found, strict=True))
    num_found = np.zeros(len(counts), dtype=np.int64)
    snippets = []
    for i in np.lexsort((draws, words, counts[words])):
        if num_found[words[i]] < per_word:
            lists = batches[numbers[i]].column("input_ids")
            ids = _cut(lists, int(places[i]), is_continuation, request.length)
            ids = ids[(ids != manifest.cls_id) & (ids != manifest.sep_id)]
            np.add.at(num_found, ids[ids >= first_id] - first_id, 1)
            snippets.append(ids)
    return Snippets(snippets, counts, int(tokens.sum()))


def _cut(lists: pa.ListArray, place: int, is_continuation: np.ndarray, length: int) -> np.ndarray:
    """Return the tokens around a place of a list column's values, of one row, from the start of a word on."""
    ends = lists.offsets.to_numpy() - lists.offsets[0].as_py()
    row = int(np.searchsorted(ends, place, side="right"))
    first, end = int(ends[row - 1]), int(ends[row])
    ids = lists.flatten().to_numpy()
    start = max(first, min(place - length // 2, end - length))
    end = min(end, start + length)
    while start < place and is_continuation[ids[start]]:
        start += 1
    return ids[start:end].astype(np.int64)
