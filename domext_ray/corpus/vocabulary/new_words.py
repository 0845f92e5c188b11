"""Word counts and a base's vocabulary -> new entries, the most useful first (exBERT, section 3: extension vocabulary).

Candidates are WordPieces learned on the words that the base splits, and these words themselves. They are ranked by
elimination: starting from all of them, the entry whose removal costs the fewest additional tokens in the corpus goes,
then the next, until none is left. The order backwards is the ranking, so a smaller vocabulary is the start of a larger.
Deviation from the paper, which takes the trainer's entries as they are: these are full of steps on the way to longer
entries, which nothing uses once the longer ones are there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from domext_ray.corpus.vocabulary.kind import NUM_CANDIDATES, PREFIX, UNKNOWN_PIECES, Ranking

MAX_FED_WORDS = 20_000_000
"""Occurrences of words that the trainer is fed, at most: counts are scaled down to that."""
MAX_RANKED_WORDS = 500_000
"""Distinct words that the ranking looks at: the most frequent that the base splits."""
ALPHABET_SHARE = 1e-6
"""A character that the base lacks gets entries when it is one in a million of the text, or more."""


def split_greedily(text: str, entries: Collection[str], longest: int, without: str = "") -> list[str] | None:
    """Split a word, or the inside of one (`##…`), by greedy longest match as WordPiece does.

    Args:
        text: the word.
        entries: the vocabulary.
        longest: characters of its longest entry, prefix not counted.
        without: an entry that is not used.

    Returns:
        The entries, or None where the vocabulary cannot spell the word.
    """
    pieces = []
    prefix, start = ("", 0) if not text.startswith(PREFIX) or text == PREFIX else (PREFIX, len(PREFIX))
    size = len(text)
    while start < size:
        for end in range(min(size, start + longest), start, -1):
            piece = prefix + text[start:end]
            if piece in entries and piece != without:
                pieces.append(piece)
                start = end
                break
        else:
            return None
        prefix = PREFIX
    return pieces


def find_longest(entries: Iterable[str]) -> int:
    """Return the characters of the longest entry, prefix not counted."""
    return max((len(each.removeprefix(PREFIX)) for each in entries), default=0)


def rank_entries(
    words: Sequence[str], counts: Sequence[int], base: Collection[str], size: int, min_frequency: int, whole_words: bool
) -> Ranking:
    """Find what a base's vocabulary lacks, and rank it.

    Args:
        words: distinct words, the most frequent first.
        counts: occurrences of each.
        base: the base's entries, and others that are given.
        size: entries that are wanted; more are ranked.
        min_frequency: occurrences below which a word is not learned from.
        whole_words: entries are words, not pieces of words.
    """
    known = set(base)
    alphabet = [] if whole_words else choose_alphabet(words, counts, known, min_frequency)
    known.update(alphabet)
    longest = find_longest(known)
    split = {}
    for word, count in zip(words, counts, strict=True):
        if word not in known:
            pieces = split_greedily(word, known, longest)
            split[word] = (count, pieces)
            if len(split) == MAX_RANKED_WORDS:
                break
    limit = max(NUM_CANDIDATES, 2 * size)
    saved = {
        word: count * ((len(pieces) if pieces else UNKNOWN_PIECES) - 1)
        for word, (count, pieces) in split.items()
        if count >= min_frequency
    }
    candidates = set(sorted(saved, key=lambda word: (-saved[word], word))[:limit])
    scale = 0.0
    if not whole_words:
        spelled = {word: count for word, (count, pieces) in split.items() if pieces and count >= min_frequency}
        scale = min(1.0, MAX_FED_WORDS / max(sum(spelled.values()), 1))
        candidates |= learn_pieces(spelled, scale, min_frequency, limit) - known
    elimination = _Elimination({word: count for word, (count, _) in split.items()}, known, candidates)
    unreachable = tuple(sorted(elimination.drop_unused()))
    return Ranking(tuple(alphabet), tuple(elimination.rank()), unreachable, scale)


def choose_alphabet(
    words: Sequence[str], counts: Sequence[int], known: Collection[str], min_frequency: int
) -> list[str]:
    """Return the entries c and ##c that words lack which the base cannot spell, the most frequent first."""
    found: Counter[str] = Counter()
    num_chars = 0
    spelled = {each for each in known if len(each) == 1 and PREFIX + each in known}
    longest = find_longest(known)
    for word, count in zip(words, counts, strict=True):
        num_chars += len(word) * count
        if word in known or spelled.issuperset(word) or split_greedily(word, known, longest):
            continue
        found[word[0]] += count
        for character in word[1:]:
            found[PREFIX + character] += count
    least = max(min_frequency, ALPHABET_SHARE * num_chars)
    missing = [each for each, count in found.items() if count >= least and each not in known]
    return sorted(missing, key=lambda each: (-found[each], each))


def learn_pieces(counts: dict[str, int], scale: float, min_frequency: int, size: int) -> set[str]:
    """Learn WordPieces with the `tokenizers` trainer, which takes text, not counts: words are repeated.

    Args:
        counts: occurrences of words.
        scale: what these are multiplied by; every word is fed once at least.
        min_frequency: occurrences of a pair that is merged, before scaling.
        size: merges to learn, at most.
    """
    if not counts:
        return set()
    alphabet = sorted({character for word in counts for character in word})
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2 * len(alphabet) + 1 + size,
        min_frequency=max(1, round(min_frequency * scale)),
        # The order of the trainer's own continuations is a hash table's, and it decides between equal counts.
        special_tokens=["[UNK]", *(PREFIX + each for each in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_repeat_words(counts, scale), trainer)
    return set(tokenizer.get_vocab()) - {"[UNK]"}


def _repeat_words(counts: dict[str, int], scale: float) -> Iterator[str]:
    for word, count in counts.items():
        repeats = max(1, round(count * scale))
        for first in range(0, repeats, 1000):
            yield f"{word} " * min(1000, repeats - first)


class _Elimination:
    """Removes candidates one by one, always the one that costs the fewest tokens; keeps the splits of words up to date.

    The cost of an entry is its occurrences × (the pieces it falls into without itself − 1).
    """

    def __init__(self, words: dict[str, int], known: Collection[str], candidates: set[str]) -> None:
        self.entries = {*known, *candidates}
        self.candidates = candidates
        self.longest = find_longest(self.entries)
        self.words = words
        self.pieces: dict[str, list[str]] = {}
        self.users: dict[str, set[str]] = {each: set() for each in candidates}
        self.usage = dict.fromkeys(candidates, 0)
        self.dependents: dict[str, set[str]] = {each: set() for each in candidates}
        self.parts: dict[str, list[str]] = {}
        for word in words:
            self._split(word)

    def drop_unused(self) -> list[str]:
        """Remove and return the candidates that no word's split contains; that changes no split."""
        unused = [each for each in self.candidates if not self.usage[each]]
        self.candidates.difference_update(unused)
        self.entries.difference_update(unused)
        return unused

    def rank(self) -> list[str]:
        """Remove all candidates; return them, the last one to go first."""
        place = {each: i for i, each in enumerate(sorted(self.candidates, reverse=True))}
        for each in self.candidates:
            self._take_apart(each)
        cost = {each: self._cost(each) for each in self.candidates}
        queue = [(cost[each], place[each], each) for each in self.candidates]
        heapq.heapify(queue)
        removed = []
        while queue:
            old_cost, _, entry = heapq.heappop(queue)
            if entry not in self.candidates or old_cost != cost[entry]:
                continue
            removed.append(entry)
            for each in self._remove(entry):
                new_cost = self._cost(each)
                if new_cost != cost[each]:
                    cost[each] = new_cost
                    heapq.heappush(queue, (new_cost, place[each], each))
        return removed[::-1]

    def _cost(self, entry: str) -> int:
        return self.usage[entry] * ((len(self.parts[entry]) or UNKNOWN_PIECES) - 1)

    def _remove(self, entry: str) -> set[str]:
        """Remove an entry; return the candidates whose cost may have changed."""
        self.candidates.discard(entry)
        self.entries.discard(entry)
        changed: set[str] = set()
        for word in self.users.pop(entry):
            changed.update(self.pieces[word])
            self._split(word)
            changed.update(self.pieces[word])
        for each in self.dependents.pop(entry):
            if each in self.candidates:
                self._take_apart(each)
                changed.add(each)
        return changed & self.candidates

    def _split(self, word: str) -> None:
        count = self.words[word]
        for piece in self.pieces.get(word, ()):
            if piece in self.candidates:
                self.usage[piece] -= count
                self.users[piece].discard(word)
        pieces = split_greedily(word, self.entries, self.longest) or []
        self.pieces[word] = pieces
        for piece in pieces:
            if piece in self.candidates:
                self.usage[piece] += count
                self.users[piece].add(word)

    def _take_apart(self, entry: str) -> None:
        parts = split_greedily(entry, self.entries, self.longest, without=entry) or []
        self.parts[entry] = parts
        for part in parts:
            if part in self.candidates:
                self.dependents[part].add(entry)
