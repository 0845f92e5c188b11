"""Word counts and a ranking of new words -> what a user needs to choose a size, as a record and as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from domext_ray.corpus.vocabulary.word_counts import MAX_WORD_CHARS, WordCounts

TABLE_SIZES = (0, 1_000, 2_000, 5_000, 10_000, 20_000)
NUM_TOP_WORDS = 50
NUM_EXAMPLES = 20
_BLOCK_WORDS = 20_000
_WORDS_PER_LINE = 5


@dataclass(frozen=True)
class SizeStatistics:
    """How a corpus is tokenised with so many new words.

    Args:
        num_new: new words.
        split_frac: share of the occurrences of words (with a letter or a digit) that take more than one piece.
        pieces_per_word: mean pieces of such words, those that cannot be spelled left out.
        tokens_per_document: mean tokens of a document, special ones not included.
        unknown_frac: share of tokens that are [UNK].
    """

    num_new: int
    split_frac: float
    pieces_per_word: float
    tokens_per_document: float
    unknown_frac: float


@dataclass(frozen=True)
class PieceCounts:
    """What the words of a corpus become.

    Args:
        num_pieces: tokens of each word, int64 [W].
        is_unknown: the word is [UNK], bool [W].
        usage: occurrences of each id in the corpus, int64 [V].
    """

    num_pieces: np.ndarray
    is_unknown: np.ndarray
    usage: np.ndarray


def _split_words(
    words: Sequence[str], vocabulary: dict[str, int], unk_token: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, number of ids of each word) of blocks of words, which are not cut or normalised any more."""
    model = models.WordPiece(vocabulary, unk_token=unk_token, max_input_chars_per_word=MAX_WORD_CHARS)
    tokenizer = Tokenizer(model)
    for first in range(0, len(words), _BLOCK_WORDS):
        block = list(words[first : first + _BLOCK_WORDS])
        ids = [each.ids for each in tokenizer.encode_batch(block, add_special_tokens=False)]
        yield np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64), np.fromiter(map(len, ids), np.int64)


def count_pieces(counts: WordCounts, vocabulary: dict[str, int], unk_token: str) -> PieceCounts:
    """Tokenise every counted word once.

    Args:
        counts: the words.
        vocabulary: id by entry.
        unk_token: the entry for words that cannot be spelled.
    """
    num_pieces = np.ones(len(counts.words), dtype=np.int64)
    is_unknown = np.zeros(len(counts.words), dtype=bool)
    usage = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    # Greedy longest match takes a word that is an entry as a whole.
    whole = np.fromiter((vocabulary.get(each, -1) for each in counts.words), dtype=np.int64)
    np.add.at(usage, whole[whole >= 0], counts.counts[whole >= 0])
    rest = np.flatnonzero(whole < 0)
    first = 0
    for ids, sizes in _split_words([counts.words[i] for i in rest], vocabulary, unk_token):
        places = rest[first : first + len(sizes)]
        first += len(sizes)
        num_pieces[places] = sizes
        is_unknown[places] = ids[np.cumsum(sizes) - sizes] == vocabulary[unk_token]
        np.add.at(usage, ids, np.repeat(counts.counts[places], sizes))
    return PieceCounts(num_pieces, is_unknown, usage)


def _measure_size(counts: WordCounts, has_letter: np.ndarray, pieces: PieceCounts, num_new: int) -> SizeStatistics:
    """Sum up what the words of a corpus become with so many new words."""
    num_ordinary = max(int(counts.counts[has_letter].sum()), 1)
    is_spelled = has_letter & ~pieces.is_unknown
    num_spelled = max(int(counts.counts[is_spelled].sum()), 1)
    is_split = has_letter & (pieces.num_pieces > 1)
    num_tokens = int((counts.counts * pieces.num_pieces).sum()) + counts.num_too_long
    num_unknown = int(counts.counts[pieces.is_unknown].sum()) + counts.num_too_long
    return SizeStatistics(
        num_new,
        int(counts.counts[is_split].sum()) / num_ordinary,
        int((counts.counts * pieces.num_pieces)[is_spelled].sum()) / num_spelled,
        num_tokens / max(counts.num_documents, 1),
        num_unknown / max(num_tokens, 1),
    )


def describe_vocabulary(
    counts: WordCounts,
    base: dict[str, int],
    unk_token: str,
    words: Sequence[str],
    further: Sequence[str],
    unreachable: Sequence[str],
) -> dict[str, Any]:
    """Return the statistics of a vocabulary, and of smaller and larger ones.

    Args:
        counts: the words of the corpus.
        base: id by entry of the base.
        unk_token: its entry for words that cannot be spelled.
        words: the new words.
        further: what would come next in a larger vocabulary.
        unreachable: candidates that can never be a token.
    """
    ranked = [*words, *further]
    sizes = sorted({*(each for each in TABLE_SIZES if each <= len(ranked)), len(words)})
    first_id = max(base.values()) + 1
    has_letter = np.fromiter((any(map(str.isalnum, each)) for each in counts.words), dtype=bool)
    rows = []
    for size in sizes:
        vocabulary = {**base, **{word: first_id + i for i, word in enumerate(ranked[:size])}}
        pieces = count_pieces(counts, vocabulary, unk_token)
        rows.append(asdict(_measure_size(counts, has_letter, pieces, size)))
        if size == len(words):
            usage = pieces.usage[first_id : first_id + size].tolist()
    top = sorted(zip(words, usage, strict=True), key=lambda item: (-item[1], item[0]))[:NUM_TOP_WORDS]
    return {
        "format": 1,
        "num_documents": counts.num_documents,
        "num_text_bytes": counts.num_text_bytes,
        "num_words": counts.num_words,
        "num_distinct_words": len(counts.words),
        "num_too_long": counts.num_too_long,
        "num_forgotten": counts.num_forgotten,
        "num_new": len(words),
        "sizes": rows,
        "top_words": [list(each) for each in top],
        "num_unreachable": len(unreachable),
        "unreachable_examples": list(unreachable[:NUM_EXAMPLES]),
    }


def format_table(record: dict[str, Any]) -> str:
    """Return the record of `describe_vocabulary` as a text for people."""
    lines = [
        f"text: {record['num_documents']:,} documents, {record['num_text_bytes'] / 1e6:,.1f} MB, "
        f"{record['num_words']:,} words, {record['num_distinct_words']:,} distinct ones",
        f"{'new words':>12}{'words split':>14}{'pieces per word':>16}{'tokens per document':>20}{'[UNK]':>11}",
    ]
    for row in record["sizes"]:
        size = f"{row['num_new']:,}" if row["num_new"] else "0 (the base)"
        lines.append(
            f"{size:>12}{row['split_frac']:>14.2%}{row['pieces_per_word']:>16.4f}{row['tokens_per_document']:>20.2f}"
            f"{row['unknown_frac']:>11.4%}{'  <- this vocabulary' if row['num_new'] == record['num_new'] else ''}"
        )
    lines.append("most frequent new words:")
    top = [f"{word} {count:,}" for word, count in record["top_words"]]
    lines += ["  " + "  ".join(top[i : i + _WORDS_PER_LINE]) for i in range(0, len(top), _WORDS_PER_LINE)]
    examples = ", ".join(record["unreachable_examples"])
    lines.append(
        f"unreachable pieces, dropped: {record['num_unreachable']:,}{f' (for example {examples})' if examples else ''}"
    )
    if record["num_too_long"]:
        lines.append(f"words of more than {MAX_WORD_CHARS} characters, always [UNK]: {record['num_too_long']:,}")
    if record["num_forgotten"]:
        lines.append(f"occurrences of rare words that are not in these figures: {record['num_forgotten']:,}")
    return "\n".join(lines) + "\n"
