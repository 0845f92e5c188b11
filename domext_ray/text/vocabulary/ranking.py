"""Word counts and a base's vocabulary -> new entries, the most useful first (exBERT, section 3: extension vocabulary).

An entry is worth its occurrences × the tokens that each saves: the pieces that it falls into without itself, minus one.
Candidates are the words that the base splits and, with WordPiece, pieces learned on these. They use each other, so they
are ranked in rounds: all that are left are valued, and the half of lesser value goes. The order backwards is the
ranking, so a smaller vocabulary is the start of a larger. Deviation from the paper, which takes the trainer's entries
as they are: these are full of steps on the way to longer entries, which nothing uses once the longer ones are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from domext_ray.config.pretrain import VocabConfig
from domext_ray.text.vocabulary.family import PREFIX, TokenizerFamily

NUM_CANDIDATES = 40_000
"""Words and learned pieces that are considered, of each, at least; so sizes up to that are nested."""
MAX_RANKED_WORDS = 500_000
"""Distinct words that are looked at: the most frequent that the base splits."""
MAX_FED_WORDS = 20_000_000
"""Occurrences of words that the trainer of pieces is fed, at most: counts are scaled down to that, of no word to 0."""
ALPHABET_SHARE = 1e-6
"""A character that the base lacks gets entries when it is one in a million of the text, or more."""
UNKNOWN_PIECES = 2
"""What a word that cannot be spelled counts as: knowing it is worth a token."""

Split = Callable[[str, Collection[str], str], list[str]]
"""`TokenizerFamily.split`."""


@dataclass(frozen=True)
class Ranking:
    """Entries that a base lacks, the most useful first."""

    alphabet: list[str]  # for characters that the base cannot spell; they come before all others
    entries: list[str]  # the others, by the tokens that they save


def rank_new_entries(
    counts: Mapping[str, int], family: TokenizerFamily, known: Collection[str], vocab: VocabConfig
) -> Ranking:
    """Rank what a vocabulary lacks; known are the base's entries, and those that are new in any case."""
    known = set(known)
    has_pieces = family.learns_pieces and not vocab.whole_words
    alphabet = choose_alphabet(counts, known, family.split, vocab.min_frequency) if has_pieces else []
    known.update(alphabet)
    words: dict[str, int] = {}
    for word, count in counts.items():
        if word not in known and family.is_learnable(word, known):
            words[word] = count
            if len(words) == MAX_RANKED_WORDS:
                break
    frequent = {word: count for word, count in words.items() if count >= vocab.min_frequency}
    limit = max(NUM_CANDIDATES, 2 * vocab.size)
    pieces = {word: family.split(word, known) for word in frequent}
    saved = {word: count * _count_saved(pieces[word]) for word, count in frequent.items()}
    candidates = set(sorted(saved, key=lambda word: (-saved[word], word))[:limit])
    if has_pieces:
        spelled = {word: count for word, count in frequent.items() if pieces[word]}
        candidates |= learn_pieces(spelled, vocab.min_frequency, limit) - known
    return Ranking(alphabet, rank_candidates(words, known, candidates, family.split))


def rank_candidates(
    words: dict[str, int], known: Collection[str], candidates: Iterable[str], split: Split
) -> list[str]:
    """Rank candidates in rounds, the most useful first; those that no word is cut into are left out."""
    left = set(candidates)
    ranked: list[str] = []
    pieces: dict[str, list[str]] = {}
    changed = list(words)
    while left:
        entries = {*known, *left}
        pieces.update((word, split(word, entries, "")) for word in changed)
        usage = dict.fromkeys(left, 0)
        for word, own in pieces.items():
            for piece in own:
                if piece in usage:
                    usage[piece] += words[word]
        gone = sorted(entry for entry in left if not usage[entry])
        if ranked or not gone:  # the going of those that are never used changes nothing
            worth = {entry: usage[entry] * _count_saved(split(entry, entries, entry)) for entry in left}
            gone = sorted(left, key=lambda each: (-worth[each], each))[len(left) // 2 :]
            ranked[:0] = gone
        left.difference_update(gone)
        lost = set(gone)
        changed = [word for word, own in pieces.items() if not lost.isdisjoint(own)]
    return ranked


def _count_saved(pieces: list[str]) -> int:
    return (len(pieces) or UNKNOWN_PIECES) - 1


def choose_alphabet(counts: Mapping[str, int], known: Collection[str], split: Split, min_frequency: int) -> list[str]:
    """Return the entries c and ##c that words lack which the base cannot spell, the most frequent first."""
    found: Counter[str] = Counter()
    num_chars = 0
    spelled = {entry for entry in known if len(entry) == 1 and PREFIX + entry in known}
    for word, count in counts.items():
        num_chars += len(word) * count
        if word in known or spelled.issuperset(word) or split(word, known, ""):
            continue
        found[word[0]] += count
        for character in word[1:]:
            found[PREFIX + character] += count
    least = max(min_frequency, ALPHABET_SHARE * num_chars)
    missing = [entry for entry, count in found.items() if count >= least and entry not in known]
    return sorted(missing, key=lambda each: (-found[each], each))


def learn_pieces(counts: dict[str, int], min_frequency: int, size: int, max_fed: int = MAX_FED_WORDS) -> set[str]:
    """Learn so many WordPieces with the `tokenizers` trainer, which takes text, not counts: words are repeated."""
    if not counts:
        return set()
    scale = min(1.0, max_fed / sum(counts.values()))
    alphabet = sorted({character for word in counts for character in word})
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=2 * len(alphabet) + 1 + size,
        min_frequency=max(1, round(min_frequency * scale)),
        # The order of the trainer's own continuations is a hash table's, and it decides between equal counts.
        special_tokens=["[UNK]", *(PREFIX + character for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    repeats = ((word, max(1, round(count * scale))) for word, count in counts.items())
    lines = (f"{word} " * min(1000, number - first) for word, number in repeats for first in range(0, number, 1000))
    tokenizer.train_from_iterator(lines, trainer)
    return set(tokenizer.get_vocab()) - {"[UNK]"}
