"""How much of a text its tokenizer cannot read: told, warned of, and refused where it is much.

Text in another script, or in words that WordPiece finds too long, becomes rows of unknown tokens. A model learns to
predict that one token within minutes, and every held-out figure looks splendid. So tokens are counted as text is
prepared, with the run's own tokenizer, new words included, and before that in a sample. A word of any length is one
unknown token, so that characters count as well.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.corpus.rows import RowSettings, TokenCounts, tokenize_documents, tokenize_sentences
from domext_ray.text.data.files import PACKAGE_DOCS
from domext_ray.text.data.sample import Sample
from domext_ray.text.vocabulary.family import MAX_WORD_CHARS
from domext_ray.text.vocabulary.tokenizer import make_backend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARNING_FRAC, REFUSED_FRAC, REFUSED_SAMPLE_FRAC = 0.02, 1 / 3, 1 / 2
"""Shares above which unknown text is warned of, and is refused; the last where only a part of it was read."""
SAMPLED_CHARS = 2**20
"""Characters of a sample that are tokenised, as many of each of its places."""
SPLIT_PIECES, SPLIT_RATIO = 2.2, 1.65
"""Pieces of a word, on average, from which on a text seems to be of another language than its base, and how many times
those of everyday English: in an English base German has 2.5 times as many, French 1.7, English of medicine 1.5."""
_WORD = re.compile(r"[a-zA-Z\u00c0-\u024f\u0370-\u052f]{2,}")
"""Of Latin, Greek and Cyrillic letters: other scripts have no spaces, or signs within words."""
_FEWEST_WORDS, _MOST_WORDS = 500, 20_000


def count_sample(sample: Sample, settings: RowSettings) -> tuple[TokenCounts, bool]:
    """Count the tokens of a sample of a text, and the unknown ones; say whether that is all of the text."""
    counts, most = TokenCounts(), SAMPLED_CHARS // max(len(sample.places), 1)

    def take(documents: Sequence[str]) -> Iterator[str]:
        left = most
        for document in documents:
            yield document[:left]
            left -= len(document)
            if left <= 0:
                return

    documents = itertools.chain.from_iterable(take(place.documents) for place in sample.places)
    own = replace(settings, chinese_words=False)  # jieba has no say in what is known
    deque(tokenize_documents(documents, own, counts), maxlen=0)
    is_all = sample.frac == 1 and all(sum(map(len, place.documents)) <= most for place in sample.places)
    return counts, is_all


def check_sample(sample: Sample, settings: RowSettings, *, warns: bool = False) -> None:
    """Refuse a text by a sample of it: more than half of that is unknown, or a third where it is all of the text.

    With `warns`, less is warned of, too, as by `warn_of_unknown`.
    """
    found, is_all = count_sample(sample, settings)
    counts, part = found.pack(), "" if is_all else "a sample of "
    if _find_share(counts) > (REFUSED_FRAC if is_all else REFUSED_SAMPLE_FRAC):
        require_known(sample.spec, counts, settings, sample.prepare, part)
    if warns:
        warn_of_unknown(sample.spec, counts, settings, sample.prepare, part)


def warn_of_split_words(sample: Sample, tokenizer: PreTrainedTokenizerBase, everyday: Sequence[str]) -> None:
    """Warn of text whose words a tokenizer cuts into many pieces; `everyday` are plain sentences of English."""
    most = -(-_MOST_WORDS // max(len(sample.places), 1))
    words = [
        word
        for place in sample.places
        for word in itertools.islice(itertools.chain.from_iterable(map(_WORD.findall, place.documents)), most)
    ]
    if len(words) < _FEWEST_WORDS:
        return
    pieces = _count_pieces(words, tokenizer)
    usual = _count_pieces(_WORD.findall(" ".join(everyday)), tokenizer)
    if pieces >= min(SPLIT_PIECES, SPLIT_RATIO * usual):
        print(
            f"warning: the tokenizer cuts a word of --corpus {sample.spec!r} into {pieces:.1f} pieces on average (of "
            f"everyday English {usual:.1f}), as where a text is in another language than the base's, or has many terms "
            "of its own; give a --base of its language, or new words (--vocab.size, --vocab.words).",
            file=sys.stderr,
            flush=True,
        )


def _count_pieces(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> float:
    """Pieces of a word, on average; each stands behind a space."""
    encodings = make_backend(tokenizer).encode_batch([f" {word}" for word in words], add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings) / max(len(words), 1)


def require_known(
    spec: str, counts: Mapping[str, Any], settings: RowSettings, prepare: PrepareConfig, part: str = ""
) -> None:
    """Refuse a text of which more than a third is unknown to its tokenizer.

    `counts` are `TokenCounts.pack`; `part`, such as "a sample of ", stands before the text's name.
    """
    if prepare.unknown == "refuse" and _find_share(counts) > REFUSED_FRAC:
        raise CorpusError(
            f"{_describe_share(spec, counts, prepare, part)}, so that a model would learn to predict unknown tokens; "
            f"{_advise(counts, settings, prepare)}, or train on it as it is with --prepare.unknown allow."
        )


def warn_of_unknown(
    spec: str, counts: Mapping[str, Any], settings: RowSettings, prepare: PrepareConfig, part: str = ""
) -> None:
    """Warn of a text of which more than a fiftieth is unknown; arguments as of `require_known`.

    Package documentation is whatever a machine has, with its markup: its share stands on the page alone.
    """
    if _find_share(counts) > WARNING_FRAC and not spec.startswith(PACKAGE_DOCS):
        share, advice = _describe_share(spec, counts, prepare, part), _advise(counts, settings, prepare)
        print(f"warning: {share}; {advice}.", file=sys.stderr, flush=True)


def find_unknown(counts: Mapping[str, Any], prepare: PrepareConfig) -> dict[str, Any]:
    """Return what is told of a text: the shares of its tokens and characters that are unknown, and some such words.

    Words of text that belongs to people are not told: they may be names. Of empty counts nothing is told.
    """
    if not counts:
        return {}
    of_tokens, of_chars = _find_shares(counts)
    return {"tokens": of_tokens, "characters": of_chars, "words": _list_words(counts, prepare)}


def describe_unknown(found: Mapping[str, Any]) -> str:
    """Say what `find_unknown` found, as it follows "unknown to the tokenizer:"."""
    if not found or not found["tokens"]:
        return "nothing" if found else ""
    words = f", such as {', '.join(map(repr, found['words']))}" if found["words"] else ""
    return f"{found['tokens']:.2%} of the tokens, {found['characters']:.2%} of the characters{words}"


def _find_shares(counts: Mapping[str, Any]) -> tuple[float, float]:
    """The share of tokens that are unknown, and of characters that these stand for, 0 to 1."""
    return counts["num_unknown"] / max(counts["num_tokens"], 1), counts["unknown_chars"] / max(counts["num_chars"], 1)


def _find_share(counts: Mapping[str, Any]) -> float:
    return max(_find_shares(counts))


def _list_words(counts: Mapping[str, Any], prepare: PrepareConfig) -> list[str]:
    return [] if prepare.grouped_by else list(counts["words"])[:3]


def _describe_share(spec: str, counts: Mapping[str, Any], prepare: PrepareConfig, part: str = "") -> str:
    of_tokens, of_chars = _find_shares(counts)
    words = ", ".join(map(repr, _list_words(counts, prepare)))
    return (
        f"{of_tokens:.1%} of the tokens of {part}--corpus {spec!r} ({of_chars:.1%} of its characters) are unknown to "
        f"the tokenizer{words and f', such as {words}'}"
    )


def _advise(counts: Mapping[str, Any], settings: RowSettings, prepare: PrepareConfig) -> str:
    """What to do about the most frequent of the unknown words."""
    if counts["unknown_chars"] > MAX_WORD_CHARS * counts["num_unknown"]:
        return (
            f"WordPiece knows no word of more than {MAX_WORD_CHARS} characters, so part them with spaces, or give a "
            "--base with a tokenizer of another kind"
        )
    word, in_small = next(iter(counts["words"])), TokenCounts()
    deque(tokenize_sentences([word.lower()], settings, in_small), maxlen=0)
    if word != word.lower() and not in_small.num_unknown:
        known = "in small letters it is known" if prepare.grouped_by else f"{word.lower()!r} is known"
        return (
            f'{known}, so write "do_lower_case": true into the tokenizer_config.json of the --base if '
            "it was made for small letters"
        )
    return "give a --base that was made for such text, or new words for it (--vocab.size, --vocab.words)"
