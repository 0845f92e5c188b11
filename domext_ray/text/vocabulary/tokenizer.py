"""Tokenizers: load one, fingerprint one, cut text as it does, learn WordPieces for a model without a base."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from domext_ray.config.pretrain import PrepareConfig, VocabConfig, identify_documents, resolve_min_groups
from domext_ray.errors import CorpusError, find_storage_error, to_line
from domext_ray.progress import quiet_libraries
from domext_ray.storage import Place, find_unfetched, hash_values, parse_json, require_readable, write_json
from domext_ray.text.data.documents import read_grouped
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.groups import PEOPLE, tell_groups
from domext_ray.text.data.sources import Sources, resolve_sources
from domext_ray.text.vocabulary.family import Groups, add_groups

_FILES = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|merges\.txt|"
    r"[\w.-]+\.model|learned_from\.json|extension\.json|statistics\.(json|txt)|attempts"
)
"""Files of a tokenizer's folder, learned or extended."""
LAST_FILE, LEARNED_FROM = "tokenizer_config.json", "learned_from.json"

if TYPE_CHECKING:  # transformers loads torch: seconds and 250 MB that reading tasks need not spend
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
"""Where the tokenizers of BERT, RoBERTa and XLM-R keep their entries; one of them is needed."""
PLAIN_TEXT = (
    "The people of the city read a book in the house. Les gens lisent. Die Leute lesen. La gente lee. "
    "Люди читают книги. 人们在城市里看书。人々は街で本を読む。사람들이 책을 읽는다. الناس يقرأون الكتب."
)
SAMPLE_ENTRIES = 1000
"""By which merges are judged."""
MAX_CACHED_CHUNKS = 2**18
SAMPLE_BYTES = 200 * 2**20
"""Text that a vocabulary is learned from, at most; tasks are taken evenly over the corpus."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; it must be a fast one, and have the special tokens that masking needs."""
    from transformers import AutoTokenizer

    check_tokenizer_files(folder)
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its reader raises
        require_readable(folder)
        _require_fast(folder, _find_class(folder))
        fault = CorpusError(f"{folder} holds no tokenizer that can be loaded ({to_line(error)}).")
        raise find_storage_error(error, folder) or fault from error
    _require_fast(folder, type(tokenizer))
    entries = _read_entries(folder, tokenizer)
    for name in ("cls", "sep", "mask", "pad", "unk"):
        token = getattr(tokenizer, f"{name}_token")
        # One that its files lack is made up by transformers, with an id that the model has not learned.
        if token is None or token not in entries:
            near = next((entry for entry in entries if token and token in entry), "")
            raise CorpusError(
                f"the tokenizer of {folder} has no {name} token{f' ({token})' if token else ''}"
                f"{f', only {near[:40]!r}' if near else ''}; masked-language modelling needs one."
            )
    return tokenizer


def _find_class(folder: Path) -> type | None:
    """Return the class of transformers that a tokenizer's files name; None where they name none."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for path in (folder / LAST_FILE, folder / "config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # what cannot be read names none
            name = parse_json(Place(path).read_bytes()).get("tokenizer_class")
            if name:
                return tokenizer_class_from_name(name)
    return None


def _require_fast(folder: Path, kind: type | None) -> None:
    """Refuse a tokenizer that has no fast implementation, whatever it needs to be installed (MeCab for Japanese)."""
    from transformers import PreTrainedTokenizer

    if kind not in (None, PreTrainedTokenizer) and issubclass(kind, PreTrainedTokenizer):
        raise CorpusError(
            f"the tokenizer of {folder} is a {kind.__name__}, which has no fast implementation (tokenizer.json), so it "
            "cannot be used; give another base, such as xlm-roberta-base, which reads a hundred languages."
        )


def check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without a tokenizer's files; nothing is loaded."""
    if not folder.is_dir():
        raise CorpusError(f"{folder} is no folder; a tokenizer's folder is needed.")
    names = Place(folder).list_names()
    if not any(fnmatch.filter(names, pattern) for pattern in VOCABULARY_FILES):
        # transformers would make an empty tokenizer up
        raise CorpusError(
            f"{folder} has no tokenizer (none of {', '.join(VOCABULARY_FILES)}); save the tokenizer there "
            "(tokenizer.save_pretrained)."
        )
    if "vocab.json" in names and not {"merges.txt", "tokenizer.json"} & {*names}:
        raise CorpusError(f"{folder} has a vocab.json without merges.txt, which says how words are made; add that.")
    for pattern in (*VOCABULARY_FILES, LAST_FILE, "merges.txt"):
        for name in fnmatch.filter(names, pattern):
            if fault := find_unfetched(folder / name):
                raise CorpusError(f"{folder / name} {fault}.")


def make_backend(tokenizer: PreTrainedTokenizerBase | str) -> Tokenizer:
    """Return a copy of a fast tokenizer's engine, which may be given as JSON, that neither cuts nor pads.

    A special token that a text has literally ("[SEP]") is text to it.
    """
    backend = Tokenizer.from_str(tokenizer if isinstance(tokenizer, str) else tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def group_pieces(word_ids: Sequence[int | None]) -> list[list[int]]:
    """Return the places of each word's pieces, in the words' order; special tokens have None for a word."""
    pieces: dict[int, list[int]] = {}
    for place, word in enumerate(word_ids):
        if word is not None:
            pieces.setdefault(word, []).append(place)
    return list(pieces.values())


def check_fit(tokenizer: PreTrainedTokenizerBase, num_rows: int, owner: str) -> None:
    """Refuse a tokenizer that is not the one of a model's embedding table.

    Tables are padded to a multiple of 8 to 128, and some keep rows in reserve, but none known has two for each entry:
    a tokenizer that names less than half of the rows is another model's.
    """
    entries = tokenizer.get_vocab()
    highest = max(entries.values())
    sizes = f"the tokenizer of {owner} has {len(entries):,} entries with ids up to {highest:,}, the model {num_rows:,}"
    if highest >= num_rows:
        raise CorpusError(f"{sizes} embedding rows, so some words have none; give the model's own tokenizer.")
    if 2 * len(entries) < num_rows:
        raise CorpusError(f"{sizes} embedding rows, more than half without a word; give the model's own tokenizer.")
    if isinstance(tokenizer.backend_tokenizer.model, models.BPE):
        long = [entry for entry in entries if len(entry) > 1 and entry not in tokenizer.all_special_tokens]
        long = long[:: -(-len(long) // SAMPLE_ENTRIES) or 1]
        made = [entry for entry in long if len(tokenizer.backend_tokenizer.model.tokenize(entry)) == 1]
        if 2 * len(made) < len(long):
            raise CorpusError(
                f"the tokenizer of {owner} makes {len(made):,} of {len(long):,} of its entries by its merges, so that "
                "they are not those of its vocabulary; give the model's own merges.txt or tokenizer.json."
            )
    # Its own entries, too: proteins, say, are no words.
    own = " ".join(entry for entry in entries if entry not in tokenizer.all_special_tokens)
    encode, unknown = tokenizer.backend_tokenizer.encode, {tokenizer.unk_token_id}
    if all({*encode(text, add_special_tokens=False).ids} <= unknown for text in (PLAIN_TEXT, own)):
        raise CorpusError(
            f"the tokenizer of {owner} makes {tokenizer.unk_token} of every word of plain text in nine languages, and "
            "of its own entries; give the model's own tokenizer, with its tokenizer_config.json, which may say that "
            "case matters."
        )


def _read_entries(folder: Path, tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the entries that a tokenizer's own files hold; all of its entries if they are in none of JSON or text."""
    place = Place(folder)

    def read(name: str) -> Any:
        return parse_json((place / name).read_bytes()) if (place / name).is_file() else {}

    try:
        if (place / "tokenizer.json").is_file():
            record = read("tokenizer.json")
            vocab = record["model"]["vocab"]  # of Unigram models a list of pairs
            found = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
            found |= {token["content"] for token in record.get("added_tokens", [])}
        elif (place / "vocab.json").is_file():
            found = set(read("vocab.json"))
        elif (place / "vocab.txt").is_file():
            lines = (place / "vocab.txt").read_text().split("\n")
            found = {line.removesuffix("\r") for line in lines}
        else:
            return set(tokenizer.get_vocab())
        extra = read("tokenizer_config.json").get("added_tokens_decoder", {})
        return found | set(read("added_tokens.json")) | {token["content"] for token in extra.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"the tokenizer of {folder} is damaged ({error!r}); save it there again.") from error


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides a text's ids: vocabulary, normaliser, pre-tokenizer, model, special tokens.

    Padding, truncation and the layout of the files do not matter.
    """
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    kept: dict[str, Any] = {name: record.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    kept["special"] = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "unk")}
    return hash_values(kept)


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


@contextlib.contextmanager
def replace_folder(place: Place) -> Iterator[Path]:
    """Give a temporary folder, and a vocabulary's place to what is written there; failing changes nothing.

    A place with files that are no part of a vocabulary is refused.
    """
    foreign = [name for name in place.list_names() if not _FILES.fullmatch(name)]
    if foreign:
        raise CorpusError(
            f"{place / foreign[0]} is no part of the vocabulary that would be replaced; move it away, or give another "
            "--run.name."
        )
    with place.new_files(LAST_FILE) as temporary:
        yield temporary
