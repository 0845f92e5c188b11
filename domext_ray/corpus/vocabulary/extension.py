"""Extension vocabularies: new words beside a base's own, learned on a corpus or brought (exBERT, section 3).

Enters: a base's tokenizer, and word counts of a corpus or a list of words. Leaves: a folder that is one tokenizer
over base and new words, with `extension.json`, which says what the new words are, and the statistics of the corpus.
The base's ids stay; new ids follow the last row of its embedding table and are only ever appended to.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domext_ray.config.pretrain import PrepareConfig, VocabConfig, resolve_min_groups
from domext_ray.corpus.texts.sources import resolve_sources
from domext_ray.corpus.vocabulary.base_vocabulary import BaseVocabulary, read_base_vocabulary, read_words
from domext_ray.corpus.vocabulary.kind import CountPieces, Ranking, WordCounts
from domext_ray.corpus.vocabulary.kinds import find_kind
from domext_ray.corpus.vocabulary.statistics import describe_vocabulary, format_table
from domext_ray.corpus.vocabulary.vocab import fingerprint_tokenizer, load_tokenizer, make_folder_anew
from domext_ray.corpus.vocabulary.word_counts import keep_counts
from domext_ray.errors import CorpusError
from domext_ray.options.build import identity_of
from domext_ray.storage import Where, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 1
RECORD_FILE = "extension.json"
STATISTICS_FILE = "statistics.json"
TABLE_FILE = "statistics.txt"
MAX_REFILLS = 20


@dataclass(frozen=True)
class ExtensionVocabulary:
    """New words of a base.

    Args:
        folder: the tokenizer over base and new words.
        words: names of the new words in the order of their ids, pieces of words as `##…` (see `kind`).
        first_id: id of the first one: rows of the base's embedding table.
        base: what the user called the base.
        base_fingerprint: `vocab.fingerprint_tokenizer` of the base's tokenizer.
    """

    folder: Path
    words: tuple[str, ...]
    first_id: int
    base: str
    base_fingerprint: str


def learn_extension(
    spec: str,
    prepare: PrepareConfig,
    vocab: VocabConfig,
    *,
    base: str,
    tokenizer_folder: Path,
    num_base_rows: int,
    folder: Path,
    cache_dir: Where,
) -> ExtensionVocabulary:
    """Learn new words on a corpus; Ray is initialised.

    Args:
        spec: the `--corpus` option.
        prepare: how documents are read.
        vocab: how many new words, the ones of `extend` included, and of which kind.
        base: what the user calls the base.
        tokenizer_folder: the base's tokenizer.
        num_base_rows: rows of the base's embedding table.
        folder: where to save; a folder learned from the same content, settings and base is kept.
        cache_dir: where finished counts are kept until the words are learned.

    Raises:
        CorpusError: the base's tokenizer takes no new words, the size has no room for the words that must be in or for
            the alphabet, or the corpus has nothing new.
    """
    known = read_base_vocabulary(base, tokenizer_folder, num_base_rows)
    given = _read_given(vocab, known)
    sources = resolve_sources(spec, prepare)
    made_from: dict[str, Any] = {
        "content": sources.fingerprint,
        "prepare": identity_of(prepare),
        "size": vocab.size,
        "min_frequency": vocab.min_frequency,
        "min_groups": resolve_min_groups(prepare, vocab),
        "whole_words": vocab.whole_words,
        "given": _hash_words(given),
    }
    kept = _find_kept(folder, made_from, known)
    if kept:
        return kept
    with keep_counts(sources, prepare, known.tokenizer_json, cache_dir, made_from["min_groups"]) as counts:
        words, statistics = _rank_words(spec, vocab, counts, known, given)
        return _save(folder, known, words, made_from, statistics)


def _rank_words(
    spec: str, vocab: VocabConfig, counts: WordCounts, known: BaseVocabulary, given: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the words of a learned vocabulary, and its statistics."""
    ranking = known.kind.rank(
        counts,
        known.tokenizer_json,
        known.entries,
        given,
        size=vocab.size,
        min_frequency=vocab.min_frequency,
        whole_words=vocab.whole_words,
    )
    unk_token = str(known.tokenizer.unk_token)
    count_pieces = known.kind.make_counter(counts, known.tokenizer_json, known.entries, unk_token)
    words, further, unreachable = _choose_words(count_pieces, known, given, ranking, vocab.size)
    if len(words) == len(given) < vocab.size:
        raise CorpusError(
            f"--corpus {spec!r} has no new word for --base {known.name} with {vocab.min_frequency} occurrences; give "
            "more text of the domain, or a lower --vocab.min_frequency."
        )
    if len(words) < vocab.size:
        print(f"new words: the corpus has only {len(words):,} of {vocab.size:,}", file=sys.stderr)
    statistics = describe_vocabulary(counts, count_pieces, known.kind.spell, words, further, unreachable)
    statistics["feed_scale"] = ranking.feed_scale
    return words, statistics


def _read_given(vocab: VocabConfig, known: BaseVocabulary) -> list[str]:
    """Return the words that a learned vocabulary begins with: those of an earlier one, then protected ones."""
    given = _read_earlier(vocab.extend, known)
    is_full = bool(given) and len(given) == vocab.size
    if vocab.protected:
        protected = read_words(vocab.protected, "vocab.protected", known, may_be_known=True)
        new = [each for each in protected if not known.kind.has_entry(each, known.entries)]
        given = list(dict.fromkeys([*given, *new]))
    if len(given) > vocab.size or is_full:
        raise CorpusError(
            f"--vocab.size is {vocab.size}; the words of --vocab.extend and --vocab.protected are {len(given)} "
            "already, and the size counts them too."
        )
    return given


def _choose_words(
    count_pieces: CountPieces, known: BaseVocabulary, given: list[str], ranking: Ranking, size: int
) -> tuple[list[str], list[str], list[str]]:
    """Take the best entries until there are `size`; return them, the ones after them, and all that are unreachable.

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
    unused: set[str] = set()
    for _ in range(MAX_REFILLS):
        rest = [each for each in ranking.entries if each not in unused]
        words, further = [*fixed, *rest[: size - len(fixed)]], rest[size - len(fixed) :]
        usage = count_pieces(words).usage
        found = {word for word, number in zip(words, usage.tolist(), strict=True) if not number}.difference(fixed)
        if not found:
            break
        unused |= found
    words = [each for each in words if each not in unused]
    return words, further, sorted({*ranking.unreachable, *unused})


def import_words(
    vocab: VocabConfig, *, base: str, tokenizer_folder: Path, num_base_rows: int, folder: Path
) -> ExtensionVocabulary:
    """Make the vocabulary of a list of words, or take over that of a folder made before.

    Args:
        vocab: `words` names the file or folder; the words of `extend` come first.
        base: what the user calls the base.
        tokenizer_folder: the base's tokenizer.
        num_base_rows: rows of the base's embedding table.
        folder: where to save; a folder of the same words and base is kept.

    Raises:
        CorpusError: the base's tokenizer takes no new words, or the list has a word that can be no new entry.
    """
    known = read_base_vocabulary(base, tokenizer_folder, num_base_rows)
    words = _read_brought(vocab, known)
    made_from = {"given": _hash_words(words)}
    return _find_kept(folder, made_from, known) or _save(folder, known, words, made_from, None)


def count_brought_words(vocab: VocabConfig, *, base: str, tokenizer_folder: Path, num_base_rows: int) -> int:
    """Return how many words `import_words` would take; it raises as that does, and writes nothing."""
    return len(_read_brought(vocab, read_base_vocabulary(base, tokenizer_folder, num_base_rows)))


def check_given_words(vocab: VocabConfig, *, base: str, tokenizer_folder: Path, num_base_rows: int) -> None:
    """Refuse the words that a learned vocabulary would begin with as `learn_extension` does; writes nothing."""
    _read_given(vocab, read_base_vocabulary(base, tokenizer_folder, num_base_rows))


def _read_brought(vocab: VocabConfig, known: BaseVocabulary) -> list[str]:
    path = Path(vocab.words).expanduser()
    earlier = _read_earlier(vocab.extend, known)
    brought = _read_made(vocab.words, "vocab.words", known) if path.is_dir() else None
    return list(dict.fromkeys([*earlier, *(brought or read_words(vocab.words, "vocab.words", known))]))


def measure_extension(spec: str, prepare: PrepareConfig, vocab: VocabConfig, folder: Path, cache_dir: Where) -> None:
    """Count the words of a corpus and save the statistics of a vocabulary beside it; Ray is initialised.

    Args:
        spec: the `--corpus` option.
        prepare: how documents are read.
        vocab: its `min_groups`, below which a word is not counted.
        folder: the vocabulary, for example of brought words.
        cache_dir: where finished counts are kept until the statistics are written.
    """
    extension = load_extension(folder)
    if extension is None:
        raise CorpusError(f"{folder} has no {RECORD_FILE}; make it with domext vocab.")
    tokenizer = load_tokenizer(folder)
    base = {word: i for word, i in tokenizer.get_vocab().items() if i < extension.first_id}
    kind, tokenizer_json = find_kind(tokenizer), tokenizer.backend_tokenizer.to_str()
    sources = resolve_sources(spec, prepare)
    with keep_counts(sources, prepare, tokenizer_json, cache_dir, resolve_min_groups(prepare, vocab)) as counts:
        count_pieces = kind.make_counter(counts, tokenizer_json, base, str(tokenizer.unk_token))
        statistics = describe_vocabulary(counts, count_pieces, kind.spell, extension.words, [], [])
        for name, text in ((STATISTICS_FILE, _dump(statistics)), (TABLE_FILE, format_table(statistics))):
            write_text(folder / name, text)


def format_statistics(folder: Path) -> str:
    """Return the statistics of a vocabulary's corpus as a table; of brought words, their number."""
    path = folder / TABLE_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").rstrip("\n")
    extension = load_extension(folder)
    return f"new words: {len(extension.words) if extension else 0:,} (no text was counted)"


def load_extension(folder: Path) -> ExtensionVocabulary | None:
    """Read the new words of a tokenizer's folder; None when it has none.

    Raises:
        CorpusError: the record is damaged, its ids have gaps, duplicates or another order, or differ from the
            tokenizer's.
    """
    path = Path(folder) / RECORD_FILE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
        if record["format"] != FORMAT_VERSION:
            raise CorpusError(
                f"{path} has format {record['format']}, this version reads {FORMAT_VERSION}; make it again."
            )
        words, first_id = record["words"], record["first_id"]
        tokenizer_json = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
        kind = find_kind(tokenizer_json)
        tokenizer = kind.read_entries(json.loads(tokenizer_json))
        for i, (word, number) in enumerate(words.items()):
            found = tokenizer.get(kind.to_entry(word))
            if number != first_id + i or found != number:
                raise CorpusError(
                    f"{path} gives {word!r} the id {number}, where {first_id + i} comes next and the tokenizer beside "
                    f"it has {found}; ids must go on without gaps or changes: make the folder again."
                )
        num_entries = max(tokenizer.values()) + 1
        if num_entries != first_id + len(words):
            raise CorpusError(
                f"{path} has {len(words)} words from id {first_id} on, but the tokenizer beside it {num_entries} "
                "entries; make the folder again."
            )
        return ExtensionVocabulary(Path(folder), tuple(words), first_id, record["base"], record["base_fingerprint"])
    except (KeyError, TypeError, AttributeError, OSError, ValueError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(
            f"{path} is damaged ({' '.join(str(error).split())[:200]}); make the folder again."
        ) from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise CorpusError(f"{RECORD_FILE} has {name!r} twice; make its folder again.")
    return record


def check_appended(old: ExtensionVocabulary, new: ExtensionVocabulary) -> None:
    """Check that a vocabulary keeps the ids of an earlier one.

    Raises:
        CorpusError: it is of another base, or a word has another id.
    """
    if (old.base_fingerprint, old.first_id) != (new.base_fingerprint, new.first_id):
        raise CorpusError(
            f"the vocabulary {new.folder} was made for --base {new.base}, the earlier one {old.folder} for {old.base}; "
            "both must be of one base."
        )
    for i, word in enumerate(old.words):
        if i >= len(new.words) or new.words[i] != word:
            found = repr(new.words[i]) if i < len(new.words) else "nothing"
            raise CorpusError(
                f"the vocabulary {new.folder} has {found} at id {old.first_id + i}, where the earlier one has "
                f"{word!r}; new words may only be appended: make it with --vocab.extend, or use the earlier one."
            )


def decompose(base_tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
    """Return the base's ids of every new word, by name; what cannot be spelled is the unknown token."""
    return find_kind(base_tokenizer).decompose(base_tokenizer, words)


def _read_earlier(folder: str, known: BaseVocabulary) -> list[str]:
    return _read_made(folder, "vocab.extend", known) if folder else []


def _read_made(folder: str, option: str, known: BaseVocabulary) -> list[str]:
    """Read the words of a folder that was made for the same base."""
    extension = load_extension(Path(folder).expanduser())
    if extension is None:
        raise CorpusError(f"--{option} {folder!r} has no {RECORD_FILE}; give a folder that domext vocab made.")
    if (extension.base_fingerprint, extension.first_id) != (known.fingerprint, len(known.entries)):
        raise CorpusError(
            f"--{option} {folder!r} was made for --base {extension.base}, whose tokenizer is another than that of "
            f"{known.name}; give the same base, or make a vocabulary for this one."
        )
    return list(extension.words)


def _hash_words(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _find_kept(folder: Path, made_from: dict[str, Any], known: BaseVocabulary) -> ExtensionVocabulary | None:
    """Return the vocabulary of a folder when it is what would be made now."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        if record["made_from"] != made_from or record["format"] != FORMAT_VERSION:
            return None
        kept = load_extension(folder)
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it is made anew
        return None
    is_same = kept and (kept.base_fingerprint, kept.first_id) == (known.fingerprint, len(known.entries))
    return kept if is_same else None


def _save(
    folder: Path,
    known: BaseVocabulary,
    words: Sequence[str],
    made_from: dict[str, Any],
    statistics: dict[str, Any] | None,
) -> ExtensionVocabulary:
    if folder.exists() and not (folder / RECORD_FILE).exists() and any(folder.iterdir()):
        raise CorpusError(f"{folder} holds other files; give another --run.name, or remove them.")
    first_id = len(known.entries)
    tokenizer = known.kind.unite(known.tokenizer, known.name, known.entries, words)
    record = {
        "format": FORMAT_VERSION,
        "base": known.name,
        "base_fingerprint": known.fingerprint,
        "first_id": first_id,
        "made_from": made_from,
        "words": {word: first_id + i for i, word in enumerate(words)},
    }
    with make_folder_anew(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        write_text(temporary / RECORD_FILE, _dump(record))
        if statistics:
            write_text(temporary / STATISTICS_FILE, _dump(statistics))
            write_text(temporary / TABLE_FILE, format_table(statistics))
        if fingerprint_tokenizer(load_tokenizer(temporary)) != fingerprint_tokenizer(tokenizer):
            raise CorpusError(f"the tokenizer of --base {known.name} changes when it is saved with new words.")
    return ExtensionVocabulary(folder, tuple(words), first_id, known.name, known.fingerprint)


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"
