"""Word counts and new words -> what a user chooses a size by: how much text is split without them, and with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from domext_ray.files import read_json
from domext_ray.storage import Place
from domext_ray.text.vocabulary.family import TokenizerFamily

STATISTICS_FILE = "statistics.json"
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


def count_pieces(
    counts: Mapping[str, int], family: TokenizerFamily, entries: dict[str, int], unk_id: int
) -> PieceCounts:
    """Tokenise every counted word once; `unk_id` is of what the base's entries and new ones cannot spell."""
    words, occurrences = [*counts], np.fromiter(counts.values(), dtype=np.int64)
    num_pieces = np.ones(len(words), dtype=np.int64)
    is_unknown = np.zeros(len(words), dtype=bool)
    usage = np.zeros(max(entries.values()) + 1, dtype=np.int64)
    whole = np.fromiter((entries.get(word, -1) for word in words), dtype=np.int64)
    np.add.at(usage, whole[whole >= 0], occurrences[whole >= 0])
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": family.make_model(entries)}))
    rest = np.flatnonzero(whole < 0)
    for first in range(0, len(rest), _BLOCK_WORDS):
        places = rest[first : first + _BLOCK_WORDS]
        found = tokenizer.encode_batch([words[i] for i in places], add_special_tokens=False)
        sizes = np.array([len(encoding.ids) for encoding in found], dtype=np.int64)
        ids = np.array([i for encoding in found for i in encoding.ids], dtype=np.int64)
        num_pieces[places] = sizes
        is_unknown[places] = [encoding.ids == [unk_id] for encoding in found]
        np.add.at(usage, ids, np.repeat(occurrences[places], sizes))
    return PieceCounts(num_pieces, is_unknown, usage)


def describe_vocabulary(
    counts: Mapping[str, int],
    family: TokenizerFamily,
    base: dict[str, int],
    unk_id: int,
    new: Sequence[str],
    further: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the statistics of a vocabulary, and of smaller and larger ones, over words with a letter or a digit.

    `new` are the new entries, `further` what would come next in a larger vocabulary. Of each size, split_frac is the
    share of the words' occurrences that take more than one piece, and pieces_per_word the mean of those that can be
    spelled.
    """
    ranked, first_id = [*new, *further], len(base)
    has_letter = np.fromiter((any(map(str.isalnum, family.to_name(word))) for word in counts), dtype=bool)
    words = np.fromiter(counts.values(), dtype=np.int64) * has_letter
    rows = []
    for size in sorted({*(number for number in TABLE_SIZES if number <= len(ranked)), len(new)}):
        entries = {**base, **{entry: first_id + i for i, entry in enumerate(ranked[:size])}}
        pieces = count_pieces(counts, family, entries, unk_id)
        spelled = words * ~pieces.is_unknown
        split_frac = int(words[pieces.num_pieces > 1].sum()) / max(int(words.sum()), 1)
        pieces_per_word = int((spelled * pieces.num_pieces).sum()) / max(int(spelled.sum()), 1)
        rows.append({"num_new": size, "split_frac": split_frac, "pieces_per_word": pieces_per_word})
        if size == len(new):
            usage = list(zip(map(family.to_name, new), pieces.usage[first_id:].tolist(), strict=True))
    unused = [name for name, count in usage if not count]
    return {
        "num_words": sum(counts.values()),
        "num_distinct_words": len(counts),
        "num_new": len(new),
        "sizes": rows,
        "top_words": sorted(map(list, usage), key=lambda item: (-item[1], item[0]))[:NUM_TOP_WORDS],
        "num_unused": len(unused),
        "unused_examples": unused[:NUM_EXAMPLES],
    }


def format_statistics(folder: Place) -> str:
    """Return the record of `describe_vocabulary` that a vocabulary's folder has as a text for people."""
    record = read_json(folder / STATISTICS_FILE, "delete the vocabulary's folder, and the same command makes it again")
    lines = [
        f"text: {record['num_words']:,} words, {record['num_distinct_words']:,} distinct ones",
        f"{'new words':>12}{'words split':>14}{'pieces per word':>16}",
    ]
    for row in record["sizes"]:
        size = f"{row['num_new']:,}" if row["num_new"] else "0 (the base)"
        own = "  <- this vocabulary" if row["num_new"] == record["num_new"] else ""
        lines.append(f"{size:>12}{row['split_frac']:>14.2%}{row['pieces_per_word']:>16.4f}{own}")
    lines.append("most frequent new words:")
    top = [f"{word} {count:,}" for word, count in record["top_words"]]
    lines += ["  " + "  ".join(top[i : i + _WORDS_PER_LINE]) for i in range(0, len(top), _WORDS_PER_LINE)]
    if num_unused := record.get("num_unused"):  # 0.1.0 counted none
        examples = ", ".join(record["unused_examples"])
        lines.append(f"given words that the text never has: {num_unused:,} (for example {examples})")
    return "\n".join(lines)
