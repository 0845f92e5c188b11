"""Word counts and a ranking of new words -> what a user needs to choose a size, as a record and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from domext_ray.text.vocabulary.family import MAX_WORD_CHARS, TokenizerFamily, WordCounts

TABLE_SIZES = (0, 1_000, 2_000, 5_000, 10_000, 20_000)
NUM_TOP_WORDS = 50
NUM_EXAMPLES = 20
_WORDS_PER_LINE = 5
_BLOCK_WORDS = 20_000


class PieceCounts(NamedTuple):
    """What the W words of a corpus become, and how often each of V entries occurs in it, by id; int64 and bool."""

    num_pieces: np.ndarray
    is_unknown: np.ndarray
    usage: np.ndarray


def count_pieces(counts: WordCounts, family: TokenizerFamily, entries: dict[str, int], unk_id: int) -> PieceCounts:
    """Tokenise every counted word once; `unk_id` is of what the base's entries and new ones cannot spell."""
    num_pieces = np.ones(len(counts.words), dtype=np.int64)
    is_unknown = np.zeros(len(counts.words), dtype=bool)
    usage = np.zeros(max(entries.values()) + 1, dtype=np.int64)
    whole = np.fromiter((entries.get(word, -1) for word in counts.words), dtype=np.int64)
    np.add.at(usage, whole[whole >= 0], counts.counts[whole >= 0])
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": family.make_model(entries)}))
    rest = np.flatnonzero(whole < 0)
    for first in range(0, len(rest), _BLOCK_WORDS):
        places = rest[first : first + _BLOCK_WORDS]
        found = tokenizer.encode_batch([counts.words[i] for i in places], add_special_tokens=False)
        sizes = np.array([len(encoding.ids) for encoding in found], dtype=np.int64)
        ids = np.array([i for encoding in found for i in encoding.ids], dtype=np.int64)
        num_pieces[places] = sizes
        is_unknown[places] = [encoding.ids == [unk_id] for encoding in found]
        np.add.at(usage, ids, np.repeat(counts.counts[places], sizes))
    return PieceCounts(num_pieces, is_unknown, usage)


def _measure_size(counts: WordCounts, has_letter: np.ndarray, pieces: PieceCounts, num_new: int) -> dict[str, float]:
    """Say how a corpus is tokenised with so many new words.

    split_frac: share of the occurrences of words (with a letter or a digit) that take more than one piece.
    pieces_per_word: mean pieces of such words, those that cannot be spelled left out.
    tokens_per_document: mean tokens of a document, special ones not included.
    unknown_frac: share of tokens that are [UNK].
    """
    occurrences, tokens = counts.counts, counts.counts * pieces.num_pieces
    is_spelled = has_letter & ~pieces.is_unknown
    num_tokens = int(tokens.sum()) + counts.num_too_long
    num_unknown = int(occurrences[pieces.is_unknown].sum()) + counts.num_too_long
    num_split = int(occurrences[has_letter & (pieces.num_pieces > 1)].sum())
    return {
        "num_new": num_new,
        "split_frac": num_split / max(int(occurrences[has_letter].sum()), 1),
        "pieces_per_word": int(tokens[is_spelled].sum()) / max(int(occurrences[is_spelled].sum()), 1),
        "tokens_per_document": num_tokens / max(counts.num_documents, 1),
        "unknown_frac": num_unknown / max(num_tokens, 1),
    }


def describe_vocabulary(
    counts: WordCounts,
    family: TokenizerFamily,
    base: dict[str, int],
    unk_id: int,
    new: Sequence[str],
    further: Sequence[str] = (),
    unreachable: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the statistics of a vocabulary, and of smaller and larger ones.

    `new` are the new entries, `further` what would come next in a larger vocabulary, and `unreachable` candidates that
    can never be a token.
    """
    ranked, first_id = [*new, *further], len(base)
    sizes = sorted({*(number for number in TABLE_SIZES if number <= len(ranked)), len(new)})
    has_letter = np.fromiter((any(map(str.isalnum, family.to_name(word))) for word in counts.words), dtype=bool)
    rows = []
    for size in sizes:
        entries = {**base, **{entry: first_id + i for i, entry in enumerate(ranked[:size])}}
        pieces = count_pieces(counts, family, entries, unk_id)
        rows.append(_measure_size(counts, has_letter, pieces, size))
        if size == len(new):
            usage = list(zip(map(family.to_name, new), pieces.usage[first_id:].tolist(), strict=True))
    unused = [name for name, count in usage if not count]
    return {
        "format": 2,
        "num_documents": counts.num_documents,
        "num_text_bytes": counts.num_text_bytes,
        "num_words": counts.num_words,
        "num_distinct_words": len(counts.words),
        "num_too_long": counts.num_too_long,
        "num_forgotten": counts.num_forgotten,
        "num_new": len(new),
        "sizes": rows,
        "top_words": sorted(map(list, usage), key=lambda item: (-item[1], item[0]))[:NUM_TOP_WORDS],
        "num_unused": len(unused),
        "unused_examples": unused[:NUM_EXAMPLES],
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
    if record["num_unused"]:
        lines.append(f"given words that the text never has: {_name_some(record, 'unused')}")
    lines.append(f"unreachable pieces, dropped: {_name_some(record, 'unreachable')}")
    if record["num_too_long"]:
        lines.append(f"words of more than {MAX_WORD_CHARS} characters, always [UNK]: {record['num_too_long']:,}")
    if record["num_forgotten"]:
        lines.append(f"occurrences of rare words that are not in these figures: {record['num_forgotten']:,}")
    return "\n".join(lines) + "\n"


def _name_some(record: dict[str, Any], kind: str) -> str:
    """Return how many words of a kind there are, with a few of them."""
    examples = ", ".join(record[f"{kind}_examples"])
    return f"{record[f'num_{kind}']:,}{f' (for example {examples})' if examples else ''}"
