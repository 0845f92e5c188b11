"""Vocabularies, made anew only where something changed: new words for a base, and WordPieces for a model without one.

New words are learned on a corpus, or brought (exBERT, section 3).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from domext_ray.config.pretrain import PrepareConfig, VocabConfig, identify_documents, resolve_min_groups
from domext_ray.errors import CorpusError
from domext_ray.storage import Place, hash_text, parse_json, write_json
from domext_ray.text.data.documents import read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.groups import PEOPLE, tell_groups
from domext_ray.text.data.sources import Sources, resolve_sources
from domext_ray.text.vocabulary.extension import (
    RECORD_FILE,
    BaseVocabulary,
    ExtensionVocabulary,
    find_made,
    load_extension,
    save_extension,
)
from domext_ray.text.vocabulary.family import Groups, add_groups, tokenizer_family
from domext_ray.text.vocabulary.ranking import Ranking, rank_new_entries
from domext_ray.text.vocabulary.statistics import STATISTICS_FILE, count_pieces, describe_vocabulary
from domext_ray.text.vocabulary.tokenizer import load_tokenizer, replace_folder
from domext_ray.text.vocabulary.word_counts import keep_counts
from domext_ray.text.vocabulary.word_list import read_words

LEARNED_FROM = "learned_from.json"
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_REFILLS = 20
MAX_CACHED_CHUNKS = 2**18
SAMPLE_BYTES = 200 * 2**20
"""Text that WordPieces are learned from, at most; tasks are taken evenly over the corpus."""


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


def learn_wordpiece(
    spec: str,
    prepare: PrepareConfig,
    vocab: VocabConfig,
    folder: Path,
    model_max_length: int,
    cache_dir: Place | None = None,
) -> Path:
    """Learn a WordPiece vocabulary on a corpus and save it as a BERT tokenizer; return its folder.

    A folder learned from the same content with the same settings is kept.
    """
    from transformers import BertTokenizer

    sources = resolve_sources(spec, prepare, cache_dir)
    record = {
        "content": sources.fingerprint,
        "size": vocab.size,
        "lowercase": vocab.lowercase,
        "prepare": identify_documents(prepare),
        "min_groups": resolve_min_groups(prepare, vocab),
        "model_max_length": model_max_length,
    }
    with contextlib.suppress(FileNotFoundError, ValueError):  # damaged: it is learned anew
        if parse_json(Place(folder / LEARNED_FROM).read_bytes()) == record:
            return folder
    wordpiece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer(lowercase=vocab.lowercase)
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    documents = _choose_documents(sources, prepare, vocab, wordpiece)
    alphabet = _choose_alphabet(sources, documents(Dropped()), vocab)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab.size,
        special_tokens=[*SPECIAL_TOKENS, *_list_continuations(wordpiece, alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    dropped = Dropped(watched=() if prepare.group_field else PEOPLE)
    wordpiece.train_from_iterator(documents(dropped), trainer)
    tell_groups(dropped.values, spec, prepare, learned=vocab.learned_by)
    sources.require_unchanged()
    tokenizer = BertTokenizer(
        vocab=wordpiece.get_vocab(), do_lower_case=vocab.lowercase, model_max_length=model_max_length
    )
    with replace_folder(Place(folder)) as temporary:
        tokenizer.save_pretrained(temporary)
        write_json(Place(temporary / LEARNED_FROM), record)
    return folder


def _choose_documents(
    sources: Sources, prepare: PrepareConfig, vocab: VocabConfig, wordpiece: Tokenizer
) -> Callable[[Dropped], Iterator[str]]:
    """Return what reads the documents; where rows have groups, only their words that enough of these have."""
    enough = resolve_min_groups(prepare, vocab)
    if not enough:
        return lambda dropped: (document for document, _ in _sample_documents(sources, prepare, dropped))

    @functools.lru_cache(MAX_CACHED_CHUNKS)
    def split(chunk: str) -> tuple[str, ...]:
        text = wordpiece.normalizer.normalize_str(chunk)
        return tuple(word for word, _ in wordpiece.pre_tokenizer.pre_tokenize_str(text))

    groups: Groups = {}
    for document, group in _sample_documents(sources, prepare, Dropped()):
        for word in {word for chunk in set(document.split(" ")) for word in split(chunk)}:
            add_groups(groups, word, (int.from_bytes(group, "big"),), enough)
    common = {word for word, found in groups.items() if len(found) >= enough}

    def read(dropped: Dropped) -> Iterator[str]:
        for document, _ in _sample_documents(sources, prepare, dropped):
            yield " ".join(word for chunk in document.split(" ") for word in split(chunk) if word in common)

    return read


def _sample_documents(sources: Sources, prepare: PrepareConfig, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
    stride = max(1, -(-sources.num_bytes // SAMPLE_BYTES))
    read = 0
    for task in sources.tasks[::stride]:
        for document, group in read_grouped(task, prepare, dropped):
            yield document, group
            read += len(document.encode())
            if read > SAMPLE_BYTES:
                return


def _list_continuations(wordpiece: Tokenizer, alphabet: list[str]) -> list[str]:
    """The entries for characters inside of words.

    Given to the trainer in a fixed order: its own is that of a hash table, and the order decides between equal counts.
    """
    joined = [wordpiece.normalizer.normalize_str(f"a{character}") for character in alphabet]
    return [
        f"##{character}"
        for character, text in zip(alphabet, joined, strict=True)
        if len(wordpiece.pre_tokenizer.pre_tokenize_str(text)) == 1
    ]


def _choose_alphabet(sources: Sources, documents: Iterator[str], vocab: VocabConfig) -> list[str]:
    """The characters that get an entry: those that make up 99.98 % of the text, in at most half of the entries.

    Every character costs two entries (at the start and inside of a word), unless it is always a word of its own.
    """
    normalizer = normalizers.BertNormalizer(lowercase=vocab.lowercase)
    counts: Counter[str] = Counter()
    seen = 0
    for document in documents:
        counts.update(normalizer.normalize_str(document))
        seen += len(document)
        if seen > SAMPLE_BYTES // 20:
            break
    del counts[" "]
    total, covered, alphabet = sum(counts.values()), 0, []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= 0.9998 * total:
            break
        covered += count
        alphabet.append(character)
    kept = len(alphabet)
    if not kept:
        raise CorpusError(f"--corpus {sources.spec!r} has no usable line; give text.")
    if 2 * min(kept, 64) + len(SPECIAL_TOKENS) > vocab.size:
        raise CorpusError(
            f"--vocab.size is {vocab.size}; the corpus' alphabet of {kept} characters alone needs "
            f"{2 * min(kept, 64) + len(SPECIAL_TOKENS)} entries."
        )
    return sorted(alphabet[: (vocab.size - len(SPECIAL_TOKENS)) // 2])
