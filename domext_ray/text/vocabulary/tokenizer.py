"""Tokenizers: load one, judge whether it fits its model and its own entries, fingerprint one, cut text as it does."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer, models
from tokenizers.normalizers import BertNormalizer

from domext_ray.errors import CorpusError, find_storage_error, to_line
from domext_ray.progress import quiet_libraries
from domext_ray.storage import Place, find_unfetched, hash_values, parse_json, require_readable
from domext_ray.text.vocabulary.family import PREFIX

_FILES = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(txt|json)|merges\.txt|"
    r"[\w.-]+\.model|learned_from\.json|extension\.json|statistics\.(json|txt)|attempts"
)
"""Files of a tokenizer's folder, learned or extended."""
LAST_FILE = "tokenizer_config.json"

if TYPE_CHECKING:  # transformers loads torch: seconds and 250 MB that reading tasks need not spend
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
"""Where the tokenizers of BERT, RoBERTa and XLM-R keep their entries; one of them is needed."""
PLAIN_TEXT = (
    "The people of the city read a book in the house. Les gens lisent. Die Leute lesen. La gente lee. "
    "Люди читают книги. 人们在城市里看书。人々は街で本を読む。사람들이 책을 읽는다. الناس يقرأون الكتب."
)
SAMPLE_ENTRIES = 1000
"""By which merges are judged."""
LOST_FRAC = 0.03
"""A rule that loses more of the entries is wrong. Right ones, measured, lose none of bert-base-uncased, 0.1 % of
bert-base-chinese and 1.8 % of SciBERT, which has some accents and Greek capitals. A wrong one loses every word that
begins with a capital, or every one that has an accent."""
RARE_FRAC = 0.001
"""A vocabulary that has fewer entries with a capital is uncased; bert-base-chinese, which keeps case, has 0.14 %."""
_MOST_LOST, _PADDED = 8, 8
"""Entries that a vocab.txt may have lost on its way; a table is padded to a multiple of so many rows."""
JUDGED_ENTRIES = 50_000
"""Of a larger vocabulary so many entries are judged by rules: all of half a million take a second."""


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
    if not isinstance(tokenizer.model_max_length, int | float):
        raise CorpusError(
            f"{folder / LAST_FILE} has model_max_length {tokenizer.model_max_length!r}; it must be a number of tokens."
        )
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


class _Rule(NamedTuple):
    """A rule that does not fit: what both files call it, what it should be, and what is wrong with it."""

    option: str
    field: str
    value: bool
    fault: str


def find_wrong_rules(tokenizer: PreTrainedTokenizerBase, base: str, folder: Path, num_rows: int = 0) -> str:
    """Say which of a tokenizer's rules do not fit its entries, and what mends that; empty where all do.

    `num_rows` are those of the model's embeddings; 0: they are unknown.
    """
    from transformers import BertTokenizer

    backend = tokenizer.backend_tokenizer
    if fault := _find_fault(tokenizer, folder, num_rows) or _find_bare(tokenizer):
        return f"the tokenizer of --base {base} {fault}, unless the base was trained so."
    if not isinstance(backend.model, models.WordPiece) or not isinstance(backend.normalizer, BertNormalizer):
        return ""
    vocab, special = backend.get_vocab(), set(tokenizer.all_special_tokens)
    step = -(-len(vocab) // JUDGED_ENTRIES)
    entries = [entry.removeprefix(PREFIX) for entry, i in vocab.items() if i % step == 0 and entry not in special]
    wrong = _find_wrong(entries, backend.normalizer, step)
    if not wrong:
        return ""
    reads_config = isinstance(tokenizer, BertTokenizer)  # any other class takes its rules from tokenizer.json alone
    lines = json.dumps({rule.option if reads_config else rule.field: rule.value for rule in wrong})
    mended = f"write {lines} as {folder / LAST_FILE}"
    if not reads_config:
        mended = f"set {lines[1:-1]} in the normalizer of {folder / 'tokenizer.json'}"
    elif (folder / LAST_FILE).is_file():
        mended = f"set {lines[1:-1]} in {folder / LAST_FILE}"
    faults = ", and ".join(rule.fault for rule in wrong)
    return (
        f"the tokenizer of --base {base} {faults}; unless the base was trained so, {mended} (exports have the rules of "
        "their base)."
    )


def _find_fault(tokenizer: PreTrainedTokenizerBase, folder: Path, num_rows: int) -> str:
    """Say what shows that the ids of a vocab.txt that is read may be those of other words."""
    path, own = folder / "vocab.txt", "give the model's own vocab.txt"
    if (folder / "tokenizer.json").is_file() or not path.is_file():
        return ""
    places: dict[str, int] = {}
    entries = path.read_text(encoding="utf-8").split("\n")
    twice = [(places[entry], i, entry) for i, entry in enumerate(entries, 1) if places.setdefault(entry, i) != i]
    twice = [found for found in twice if found[2].strip()]
    if twice:
        first, second, entry = twice[0]
        number = f"has {len(twice):,} entr{'y' if len(twice) == 1 else 'ies'} a second time in its vocab.txt"
        where = f"the first is {entry!r} in lines {first:,} and {second:,}"
        return f"{number} ({where}), where the last one counts; {own}"
    num_lost = num_rows - 1 - max(tokenizer.get_vocab().values())
    if 0 < num_lost <= _MOST_LOST and num_rows % _PADDED:
        return (
            f"has no entries for the last {num_lost} of the model's {num_rows:,} embedding rows, as if as many lines "
            f"of its vocab.txt were lost, and others had their ids; {own}"
        )
    return ""


def _find_bare(tokenizer: PreTrainedTokenizerBase) -> str:
    """Say which special tokens are not put around a text."""
    ids = tokenizer("a")["input_ids"]
    tokens = (tokenizer.cls_token, tokenizer.sep_token)
    lacking = [f"no {token}" for token in tokens if tokenizer.convert_tokens_to_ids(token) not in ids]
    return f"puts {' and '.join(lacking)} around a text; add its post_processor to tokenizer.json" if lacking else ""


def _find_wrong(entries: Sequence[str], normalizer: Any, step: int) -> list[_Rule]:
    """Return the rules that lose entries, or that an uncased vocabulary lacks; given every so many-th entry."""
    names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    rules: dict[str, Any] = {name: getattr(normalizer, name) for name in names}

    def list_kept(texts: Sequence[str], **other: bool) -> list[str]:
        normalize = BertNormalizer(**{**rules, **other}).normalize_str
        return [text for text in texts if normalize(text).strip() == text]

    def count_changed(**other: bool) -> int:
        return len(entries) - len(list_kept(entries, **other))

    def describe(number: int, what: str) -> str:
        return f"{'about ' * (step > 1)}{number * step:,} of its {len(entries) * step:,} entries have {what}"

    found, most = list[_Rule](), LOST_FRAC * len(entries)
    kept = set(list_kept(entries))
    lost = [entry for entry in entries if entry not in kept]
    accents = list_kept(lost, strip_accents=False)
    stripped = set(accents)  # without lowercase they stay, too, unless strip_accents says otherwise
    capitals = [entry for entry in list_kept(lost, lowercase=False) if entry not in stripped]
    several = list_kept(lost, handle_chinese_chars=False)
    if len(capitals) > most:
        fault = f"lowercases text: {describe(len(capitals), 'capitals')} and can never be produced"
        found.append(_Rule("do_lower_case", "lowercase", False, fault))
    if len(accents) > most and (rules["strip_accents"] or not found):
        fault = f"strips accents: {describe(len(accents), 'accents')} and can never be produced"
        found.append(_Rule("strip_accents", "strip_accents", False, fault))
    if len(several) > most:
        fault = f"parts Chinese characters: {describe(len(several), 'one beside others')} and can never be produced"
        found.append(_Rule("tokenize_chinese_chars", "handle_chinese_chars", False, fault))

    few = RARE_FRAC * len(entries)
    has_case = 2 * sum(entry != entry.upper() for entry in entries) > len(entries)
    if has_case and not rules["lowercase"]:
        number = count_changed(lowercase=True, strip_accents=False)
        if number <= few:
            fault = f"keeps capitals: {describe(number, 'one')}, so that words with a capital are unknown"
            found.append(_Rule("do_lower_case", "lowercase", True, fault))
    elif has_case and rules["strip_accents"] is False:
        number = count_changed(strip_accents=True) - len(lost)
        if number <= few:
            fault = f"keeps accents: {describe(number, 'one')}, so that words with an accent are unknown"
            found.append(_Rule("strip_accents", "strip_accents", True, fault))
    return found


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of what decides a text's ids: vocabulary, normaliser, pre-tokenizer, model, special tokens.

    Padding, truncation and the layout of the files do not matter.
    """
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    kept: dict[str, Any] = {name: record.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    kept["special"] = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "mask", "pad", "unk")}
    return hash_values(kept)


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
