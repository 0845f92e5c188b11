"""Read tasks -> how often every word occurs, on Ray Data, in memory that does not grow with the text.

A word is what the base's own normaliser and BERT's pre-tokenizer leave whole. Texts repeat themselves, so a task counts
raw chunks between spaces, and normalises each distinct chunk once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from domext_ray.config.identity import hashed_options
from domext_ray.config.pretrain import PrepareConfig
from domext_ray.corpus.texts.documents import read_documents
from domext_ray.corpus.texts.dropped import Dropped, check_dropped
from domext_ray.corpus.texts.ray_tasks import run_tasks
from domext_ray.corpus.texts.sources import ReadTask, Sources
from domext_ray.corpus.texts.work_folder import KeptParts, hold_work_folder
from domext_ray.errors import CorpusError

MAX_WORD_CHARS = 100
"""WordPiece's limit: a longer word is [UNK] whatever the vocabulary."""
PREFIX = "##"
"""WordPiece's mark of an entry for the inside of words."""
MAX_CHUNKS = 250_000
"""Distinct raw chunks that a task holds before it turns them into words."""
MAX_TASK_WORDS = 1_000_000
"""Distinct words that a task holds; with the chunks, about 200 MB."""
MAX_WORDS = 2_000_000
"""Distinct words that the driver holds: about 300 MB."""

_ASCII_WORD = re.compile(r"[^ !-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")


@dataclass(frozen=True)
class WordCounts:
    """How often words occur in a corpus.

    Args:
        words: distinct words, the most frequent first, ties by text.
        counts: occurrences of each, int64 [W].
        num_documents: documents they are from.
        num_text_bytes: UTF-8 bytes of these documents.
        num_too_long: occurrences of words beyond `MAX_WORD_CHARS`, which are not among the words.
        num_forgotten: occurrences of rare words that were dropped to bound memory, which are not among the words.
        task_seconds: CPU time that the tasks took, summed.
    """

    words: tuple[str, ...]
    counts: np.ndarray
    num_documents: int
    num_text_bytes: int
    num_too_long: int
    num_forgotten: int
    task_seconds: float

    @property
    def num_words(self) -> int:
        """Occurrences of all words, the ones left out included."""
        return int(self.counts.sum()) + self.num_too_long + self.num_forgotten


class WordSplitter:
    """Cuts raw chunks of text into words as a BERT tokenizer does.

    Args:
        tokenizer_json: the fast tokenizer, serialised; see `require_bert_words`.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._lowercase = bool(json.loads(tokenizer_json)["normalizer"]["lowercase"])

    def split(self, chunk: str) -> list[str]:
        """Return the words of a chunk between two spaces of a clean document."""
        if chunk.isascii():  # nothing to decompose: BERT isolates the punctuation, and the rest are words
            return _ASCII_WORD.findall(chunk.lower() if self._lowercase else chunk)
        return self.split_text(chunk)

    def split_text(self, text: str) -> list[str]:
        """Return the words of any text."""
        normalized = self._tokenizer.normalizer.normalize_str(text)
        return [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]


def require_bert_words(tokenizer_json: str, name: str) -> None:
    """Check that a tokenizer is a WordPiece model over BERT's words.

    Args:
        tokenizer_json: the fast tokenizer, serialised.
        name: what the user calls it.

    Raises:
        CorpusError: it is another kind of tokenizer, or has tokens beside its WordPiece model.
    """
    record = json.loads(tokenizer_json)
    kinds = {each: (record.get(each) or {}).get("type") for each in ("model", "normalizer", "pre_tokenizer")}
    if kinds["model"] != "WordPiece":
        raise CorpusError(
            f"the tokenizer of --base {name} is a {kinds['model']} model; new words need a WordPiece one, as BERT's; "
            "give such a base, or leave --vocab.size 0 and --vocab.words empty."
        )
    for each, wanted in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
        if kinds[each] != wanted:
            raise CorpusError(
                f"the tokenizer of --base {name} has the {each.replace('_', '-')} {kinds[each]}; new words need "
                f"{wanted}; leave --vocab.size 0 and --vocab.words empty."
            )
    added = [each["content"] for each in record.get("added_tokens") or [] if not each["special"]]
    if added:
        raise CorpusError(
            f"the tokenizer of --base {name} has {len(added)} added tokens outside of its WordPiece model, the first "
            f"is {added[0]!r}; new words need one model: put these tokens into its vocabulary."
        )


@contextlib.contextmanager
def keep_counts(sources: Sources, prepare: PrepareConfig, tokenizer_json: str, cache_dir: Path) -> Iterator[WordCounts]:
    """Count the words of a corpus, and keep the finished counts for a second start until what they are for is done.

    Ray is initialised.

    Args:
        sources: what to read.
        prepare: what a document is.
        tokenizer_json: the base's fast tokenizer, serialised.
        cache_dir: where the counts of finished tasks are kept.

    Raises:
        CorpusError: the corpus has no word, or too many rows without text.
        RunError: counts cannot be written.
    """
    splitter_json = _without_vocabulary(tokenizer_json)
    identity = [sources.fingerprint, hashed_options(prepare), splitter_json]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    with hold_work_folder(cache_dir, f"words-{key[:16]}", f"counting the words of --corpus {sources.spec!r}") as work:
        yield _count_words(sources, prepare, splitter_json, KeptParts(work, "words", key))


def _count_words(sources: Sources, prepare: PrepareConfig, splitter_json: str, kept: KeptParts) -> WordCounts:
    totals: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    dropped = Dropped()
    seconds = 0.0
    function = functools.partial(_count_task, prepare, splitter_json)
    for result in run_tasks(function, sources, "counting words", kept):
        words = result["words"].decode().split(" ") if result["words"] else []
        counts = np.frombuffer(result["counts"], dtype=np.int64).tolist()
        totals.update(dict(zip(words, counts, strict=True)))
        sums.update(result["sums"])
        dropped.merge(Dropped.from_record(result["dropped"]))
        sums["forgotten"] += forget_rarest(totals, MAX_WORDS)
        seconds += result["seconds"]
    places = dropped.describe_places()
    check_dropped(sources.spec, dropped.counts, places, sums["documents"], prepare, is_new=False)
    if not totals:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable word; give text.")
    megabytes = sums["text_bytes"] / 1e6
    print(f"words: {megabytes:,.0f} MB of text, {megabytes / max(seconds, 1e-9):.1f} MB/s a core", file=sys.stderr)
    if sums["forgotten"]:
        print(
            f"words: {sums['forgotten']:,} occurrences of rare words were forgotten to bound memory ({len(totals):,} "
            "distinct words are kept)",
            file=sys.stderr,
        )
    ordered = sorted(totals, key=lambda word: (-totals[word], word))
    return WordCounts(
        tuple(ordered),
        np.array([totals[each] for each in ordered], dtype=np.int64),
        sums["documents"],
        sums["text_bytes"],
        sums["too_long"],
        sums["forgotten"],
        seconds,
    )


def _without_vocabulary(tokenizer_json: str) -> str:
    """What splits words, without the vocabulary that would travel to every task."""
    record = json.loads(tokenizer_json)
    record["model"]["vocab"] = {record["model"]["unk_token"]: 0}
    record |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return json.dumps(record)


def _count_task(prepare: PrepareConfig, splitter_json: str, number: int, task: ReadTask, plan: bytes) -> dict[str, Any]:
    started = time.process_time()
    splitter = WordSplitter(splitter_json)
    totals: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    dropped = Dropped()
    for document in read_documents(task, prepare, dropped):
        sums["documents"] += 1
        sums["text_bytes"] += len(document) if document.isascii() else len(document.encode())
        chunks.update(document.split(" "))  # no word reaches across a space
        if len(chunks) > MAX_CHUNKS:
            _add_chunks(chunks, splitter, totals, sums)
    _add_chunks(chunks, splitter, totals, sums)
    words = sorted(totals)
    counts = np.array([totals[each] for each in words], dtype=np.int64)
    return {
        "words": " ".join(words).encode(),  # no word has white space
        "counts": counts.tobytes(),
        "sums": sums,
        "dropped": dropped.to_record(),
        "seconds": time.process_time() - started,
    }


def _add_chunks(chunks: Counter[str], splitter: WordSplitter, totals: Counter[str], sums: Counter[str]) -> None:
    """Move the counts of raw chunks to their words."""
    for chunk, count in chunks.items():
        for word in splitter.split(chunk):
            if len(word) > MAX_WORD_CHARS:
                sums["too_long"] += count
            else:
                totals[word] += count
    chunks.clear()
    sums["forgotten"] += forget_rarest(totals, MAX_TASK_WORDS)


def forget_rarest(totals: Counter[str], limit: int) -> int:
    """Drop the rarest words when there are more than `limit`, at least half of them; return their occurrences.

    All words of one count go or stay together, so that the result does not depend on their order.
    """
    if len(totals) <= limit:
        return 0
    counts = np.fromiter(totals.values(), dtype=np.int64, count=len(totals))
    threshold = int(np.sort(counts)[len(counts) // 2])
    kept = {word: count for word, count in totals.items() if count > threshold}
    dropped = int(counts.sum()) - sum(kept.values())
    totals.clear()
    totals.update(kept)
    return dropped
