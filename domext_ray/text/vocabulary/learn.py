"""New words for a base: learned on a corpus, or brought (exBERT, section 3); made anew only where something changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from domext_ray.config.pretrain import PrepareConfig, VocabConfig, identify_documents, resolve_min_groups
from domext_ray.errors import CorpusError
from domext_ray.storage import Place, hash_text, write_json
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary.extension import (
    RECORD_FILE,
    BaseVocabulary,
    ExtensionVocabulary,
    find_made,
    load_extension,
    save_extension,
)
from domext_ray.text.vocabulary.family import tokenizer_family
from domext_ray.text.vocabulary.ranking import Ranking, rank_new_entries
from domext_ray.text.vocabulary.statistics import STATISTICS_FILE, count_pieces, describe_vocabulary
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.text.vocabulary.word_counts import keep_counts
from domext_ray.text.vocabulary.word_list import read_words

MAX_REFILLS = 20


def learn_extension(
    spec: str, prepare: PrepareConfig, vocab: VocabConfig, known: BaseVocabulary, folder: Path, cache_dir: Place
) -> ExtensionVocabulary:
    """Learn new words on a corpus; Ray is initialised.

    A folder learned from the same content, settings and base is kept.
    """
    given = read_given(vocab, known)
    sources, min_groups = resolve_sources(spec, prepare, cache_dir), resolve_min_groups(prepare, vocab)
    made_from = {
        "content": sources.fingerprint,
        "prepare": identify_documents(prepare),
        "size": vocab.size,
        "min_frequency": vocab.min_frequency,
        "min_groups": min_groups,
        "whole_words": vocab.whole_words,
        "given": hash_text("\n".join(given)),
    }
    made = find_made(folder, made_from, known)
    if made:
        return made
    tokenizer_json = known.tokenizer.backend_tokenizer.to_str()
    learned = vocab.learned_by
    with keep_counts(sources, prepare, tokenizer_json, cache_dir, min_groups, learned=learned) as counts:
        words, statistics = _choose_words(spec, vocab, counts, known, given)
        return save_extension(folder, known, words, made_from, statistics)


def import_words(vocab: VocabConfig, known: BaseVocabulary, folder: Path) -> ExtensionVocabulary:
    """Make the vocabulary of a list of words, or take over that of a folder made before.

    A folder of the same words and base is kept.
    """
    words = read_given(vocab, known)
    made_from = {"given": hash_text("\n".join(words))}
    return find_made(folder, made_from, known) or save_extension(folder, known, words, made_from)


def count_new_words(vocab: VocabConfig, known: BaseVocabulary) -> int:
    """Return how many words `import_words` takes, or `learn_extension` at most; tell what is odd, raise as these do."""
    given = read_given(vocab, known, lambda sentence: print(f"note: {sentence}", flush=True))
    return len(given) if vocab.words else vocab.size


def measure_extension(
    spec: str, prepare: PrepareConfig, vocab: VocabConfig, extension: ExtensionVocabulary, cache_dir: Place
) -> None:
    """Count the words of a corpus and save the statistics of a vocabulary in its folder; Ray is initialised."""
    tokenizer = load_tokenizer(extension.folder)
    family, new = tokenizer_family(tokenizer), range(extension.first_id, extension.first_id + len(extension.words))
    base = {entry: i for entry, i in tokenizer.get_vocab().items() if i not in new}
    tokenizer_json, min_groups = tokenizer.backend_tokenizer.to_str(), resolve_min_groups(prepare, vocab)
    with keep_counts(
        resolve_sources(spec, prepare, cache_dir), prepare, tokenizer_json, cache_dir, min_groups
    ) as counts:
        entries = [family.to_entry(word) for word in extension.words]
        statistics = describe_vocabulary(counts, family, base, tokenizer.unk_token_id, entries)
        write_json(Place(extension.folder) / STATISTICS_FILE, statistics)


def _choose_words(
    spec: str, vocab: VocabConfig, counts: Mapping[str, int], known: BaseVocabulary, given: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the words of a learned vocabulary, and its statistics."""
    family, unk_id = known.family, known.tokenizer.unk_token_id
    fixed = [family.to_entry(word) for word in given]
    ranking = rank_new_entries(counts, family, {*known.entries, *fixed}, vocab)
    chosen, further = _fill(counts, known, fixed, ranking, vocab.size)
    if len(chosen) == len(given) < vocab.size:
        raise CorpusError(
            f"--corpus {spec!r} has no new word for --base {known.name} with {vocab.min_frequency} occurrences; give "
            "more text of the domain, or a lower --vocab.min_frequency."
        )
    if len(chosen) < vocab.size:
        print(f"new words: the corpus has only {len(chosen):,} of {vocab.size:,}", file=sys.stderr)
    statistics = describe_vocabulary(counts, family, known.entries, unk_id, chosen, further)
    return [family.to_name(entry) for entry in chosen], statistics


def _fill(
    counts: Mapping[str, int], known: BaseVocabulary, given: list[str], ranking: Ranking, size: int
) -> tuple[list[str], list[str]]:
    """Take the best entries until there are `size`; return them, and the ones after them.

    The ranking leaves hardly a piece unused; such a one makes room for the next. Given words stay in any case, and so
    do single characters, without which a word that is not in the corpus may be [UNK].
    """
    fixed = [*given, *ranking.alphabet]
    if len(fixed) > size:
        raise CorpusError(
            f"--vocab.size is {size}; the alphabet that --base {known.name} lacks takes {len(ranking.alphabet)} entries"
            f"{f', the given words {len(given)}' if given else ''}; give a larger size or a higher "
            "--vocab.min_frequency."
        )
    first_id, rest = len(known.entries), ranking.entries
    for _ in range(MAX_REFILLS):
        chosen = [*fixed, *rest[: size - len(fixed)]]
        entries = {**known.entries, **{entry: first_id + i for i, entry in enumerate(chosen)}}
        usage = count_pieces(counts, known.family, entries, known.tokenizer.unk_token_id).usage
        found = {entry for entry in chosen[len(fixed) :] if not usage[entries[entry]]}
        if not found:
            break
        chosen, rest = ([entry for entry in entries if entry not in found] for entries in (chosen, rest))
    return chosen, rest[size - len(fixed) :]


def read_given(
    vocab: VocabConfig, known: BaseVocabulary, tell: Callable[[str], None] = lambda sentence: None
) -> list[str]:
    """Return the words that are there in any case: those of an earlier vocabulary, then brought or protected ones.

    `tell` is as in `read_words`.
    """
    earlier = _read_made(vocab.extend, "vocab.extend", known) if vocab.extend else []
    if vocab.words:
        if Path(vocab.words).expanduser().is_dir():
            if vocab.skip:
                raise CorpusError(
                    f"--vocab.words {vocab.words!r} is a vocabulary that was made, without lines that "
                    "--vocab.skip could leave out; leave out --vocab.skip."
                )
            return list(dict.fromkeys([*earlier, *_read_made(vocab.words, "vocab.words", known)]))
        own = read_words(vocab.words, "vocab.words", known, vocab.skip, tell)
        if not own:
            raise CorpusError(f"--vocab.words {vocab.words!r} has no line that --vocab.skip leaves; give new words.")
        return list(dict.fromkeys([*earlier, *own]))
    skip = (*vocab.skip, "known")
    own = read_words(vocab.protected, "vocab.protected", known, skip, tell) if vocab.protected else []
    given = list(dict.fromkeys([*earlier, *own]))
    if len(given) > vocab.size or (earlier and len(earlier) == vocab.size):
        raise CorpusError(
            f"--vocab.size is {vocab.size}; the words of --vocab.extend and --vocab.protected are {len(given)} "
            "already, and the size counts them too."
        )
    return given


def _read_made(folder: str, option: str, known: BaseVocabulary) -> list[str]:
    """Read the words of a folder that was made for the same base."""
    extension = load_extension(Path(folder).expanduser())
    if extension is None:
        raise CorpusError(f"--{option} {folder!r} has no {RECORD_FILE}; give a folder that domext build vocab made.")
    if (extension.base_fingerprint, extension.first_id) != (known.fingerprint, len(known.entries)):
        raise CorpusError(
            f"--{option} {folder!r} was made for --base {extension.base}, whose tokenizer is another than that of "
            f"{known.name}; give the same base, or make a vocabulary for this one."
        )
    return list(extension.words)
