"""In how many groups (`--prepare.group_field`) a word occurs, counted no further than a decision needs.

A word that a person's rows alone have, such as a name, must become no entry of a vocabulary, which is passed on with a
model. A word keeps the hashes of its groups until there are `--vocab.min_groups` of them: fewer are an exact count, and
what memory makes us forget is counted too low, never too high.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

Groups = dict[str, tuple[int, ...]]
"""Hashes of different groups that a word occurs in, up to as many as are asked for."""


def add_groups(groups: Groups, word: str, found: Iterable[int], enough: int) -> None:
    """Note groups that a word occurs in, until there are enough."""
    known = groups.get(word, ())
    if len(known) < enough:
        groups[word] = tuple(dict.fromkeys((*known, *found)))[:enough]


def forget_missing(groups: Groups, totals: Mapping[str, int]) -> None:
    """Forget the groups of words that are not counted any more."""
    for word in groups.keys() - totals.keys():
        del groups[word]


def drop_rare_words(totals: Counter[str], groups: Groups, least: int) -> int:
    """Drop the words that occur in fewer groups; return their occurrences."""
    rare = [word for word in totals if len(groups[word]) < least]
    return sum(totals.pop(word) for word in rare)


def pack_groups(groups: Groups, words: Iterable[str]) -> dict[str, bytes]:
    """Return the groups of words as bytes."""
    found = [groups[word] for word in words]
    sizes = np.fromiter(map(len, found), dtype=np.uint16, count=len(found))
    hashes = np.fromiter((each for own in found for each in own), dtype=np.uint64, count=int(sizes.sum()))
    return {"sizes": sizes.tobytes(), "hashes": hashes.tobytes()}


def add_packed(groups: Groups, words: Iterable[str], packed: Mapping[str, bytes], enough: int) -> None:
    """Note the groups of words that `pack_groups` made bytes of."""
    ends = np.cumsum(np.frombuffer(packed["sizes"], dtype=np.uint16), dtype=np.int64).tolist()
    hashes, first = np.frombuffer(packed["hashes"], dtype=np.uint64).tolist(), 0
    for word, end in zip(words, ends, strict=True):
        add_groups(groups, word, hashes[first:end], enough)
        first = end
