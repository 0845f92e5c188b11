"""Word counts and a ranking of new words -> what a user needs to choose a size, as a record and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from domext_ray.corpus.vocabulary.kind import MAX_WORD_CHARS, CountPieces, PieceCounts, WordCounts

TABLE_SIZES = (0, 1_000, 2_000, 5_000, 10_000, 20_000)
NUM_TOP_WORDS = 50
NUM_EXAMPLES = 20
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
    count_pieces: CountPieces,
    spell: Callable[[str], str],
    words: Sequence[str],
    further: Sequence[str],
    unreachable: Sequence[str],
) -> dict[str, Any]:
    """Return the statistics of a vocabulary, and of smaller and larger ones.

    Args:
        counts: the words of the corpus.
        count_pieces: tells what they become with some new words.
        spell: tells the text of one.
        words: the new words.
        further: what would come next in a larger vocabulary.
        unreachable: candidates that can never be a token.
    """
    ranked = [*words, *further]
    sizes = sorted({*(each for each in TABLE_SIZES if each <= len(ranked)), len(words)})
    has_letter = np.fromiter((any(map(str.isalnum, spell(each))) for each in counts.words), dtype=bool)
    rows = []
    for size in sizes:
        pieces = count_pieces(ranked[:size])
        rows.append(asdict(_measure_size(counts, has_letter, pieces, size)))
        if size == len(words):
            usage = pieces.usage.tolist()
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
