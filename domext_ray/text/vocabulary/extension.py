"""Extension vocabularies: new words beside a base's own (exBERT, section 3), as a folder.

The folder is one tokenizer over base and new words, with `extension.json`, which says what the new words are, and with
the statistics of a corpus (`statistics`). The base's ids stay; new ids follow the last row of its embedding table and
are only ever appended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domext_ray.errors import CorpusError, DomextError, to_line
from domext_ray.files import describe_format, newest_format
from domext_ray.storage import Place, parse_json, write_json
from domext_ray.text.vocabulary.family import TokenizerFamily, make_refusal, tokenizer_family
from domext_ray.text.vocabulary.statistics import STATISTICS_FILE
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = newest_format("vocabulary")
RECORD_FILE = "extension.json"


@dataclass(frozen=True)
class BaseVocabulary:
    """What new words are added to.

    The ids of `entries`, from 0 to the embedding table's last row, have no gap: `[unusedN]` fills those without a name.
    """

    name: str  # what the user calls the base
    family: TokenizerFamily
    tokenizer: PreTrainedTokenizerBase
    entries: dict[str, int]
    fingerprint: str

    def has(self, name: str) -> bool:
        """Whether the base has a word already."""
        return self.family.to_entry(name) in self.entries


@dataclass(frozen=True)
class ExtensionVocabulary:
    """New words of a base, and the folder of the tokenizer over both."""

    folder: Path
    words: tuple[str, ...]  # names in the order of their ids, joined ones as `##…` (see `family`)
    first_id: int  # of the first word: rows of the base's embedding table
    base: str  # what the user called it
    base_fingerprint: str  # `fingerprint_tokenizer` of its tokenizer


def load_extension(folder: Path) -> ExtensionVocabulary | None:
    """Read the new words of a tokenizer's folder; None when it has none, a `CorpusError` when they are damaged."""
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        record = parse_json(Place(path).read_bytes())
        if record["format"] != FORMAT_VERSION:
            raise CorpusError(f"{path} {describe_format('vocabulary', record['format'])}; make it again.")
        words, first_id = tuple(record["words"]), record["first_id"]
        family = tokenizer_family(Place(path.parent / "tokenizer.json").read_text())
        found = {i: entry for entry, i in family.record["model"]["vocab"].items() if i >= first_id}
        if found != {first_id + i: family.to_entry(word) for i, word in enumerate(words)}:
            raise CorpusError(f"{path} and the tokenizer beside it have other words; make the folder again.")
        return ExtensionVocabulary(folder, words, first_id, record["base"], record["base_fingerprint"])
    except DomextError:
        raise
    except Exception as error:  # tokenizers raises nothing else
        raise CorpusError(f"{path} is damaged ({to_line(error)}); make the folder again.") from error


def find_made(folder: Path, made_from: dict[str, Any], known: BaseVocabulary) -> ExtensionVocabulary | None:
    """Return the vocabulary of a folder when it is what would be made now; see `save_extension`."""
    try:
        made = load_extension(folder)
        if made is None or parse_json((folder / RECORD_FILE).read_text(encoding="utf-8"))["made_from"] != made_from:
            return None
    except (CorpusError, KeyError):  # damaged: it is made anew
        return None
    return made if (made.base_fingerprint, made.first_id) == (known.fingerprint, len(known.entries)) else None


def save_extension(
    folder: Path,
    known: BaseVocabulary,
    words: Sequence[str],
    made_from: dict[str, Any],
    statistics: dict[str, Any] | None = None,
) -> ExtensionVocabulary:
    """Write the folder of new words, in place of one that is there; `made_from` is what decides them."""
    if folder.exists() and not (folder / RECORD_FILE).exists() and any(folder.iterdir()):
        raise CorpusError(f"{folder} holds other files; give another --run.name, or remove them.")
    tokenizer = extend_tokenizer(known, words)
    record = {
        "format": FORMAT_VERSION,
        "base": known.name,
        "base_fingerprint": known.fingerprint,
        "first_id": len(known.entries),
        "made_from": made_from,
        "words": list(words),
    }
    with replace_folder(Place(folder)) as temporary:
        tokenizer.save_pretrained(temporary)
        write_json(Place(temporary / RECORD_FILE), record)
        if statistics:
            write_json(Place(temporary / STATISTICS_FILE), statistics)
        if fingerprint_tokenizer(load_tokenizer(temporary)) != fingerprint_tokenizer(tokenizer):
            raise CorpusError(f"the tokenizer of --base {known.name} changes when it is saved with new words.")
    return ExtensionVocabulary(folder, tuple(words), len(known.entries), known.name, known.fingerprint)


def extend_tokenizer(known: BaseVocabulary, words: Sequence[str]) -> PreTrainedTokenizerBase:
    """Make one tokenizer over base and new words, whose ids follow the base's."""
    family, first_id = known.family, len(known.entries)
    entries = {**known.entries, **{family.to_entry(word): first_id + i for i, word in enumerate(words)}}
    tokenizer = family.make_tokenizer(known.tokenizer, entries)
    made, wanted = tokenizer_family(tokenizer).record, {**family.record, "model": family.make_model(entries)}
    for part in ("normalizer", "pre_tokenizer", "added_tokens", "model"):
        if made[part] != wanted[part]:
            raise make_refusal(known.name, f"has a {part.replace('_', '-')} that changes when it is made anew")
    return tokenizer


def base_token_ids(base_tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
    """Return the base's ids of every new word, by name; what cannot be spelled is the unknown token."""
    family, entries = tokenizer_family(base_tokenizer), base_tokenizer.get_vocab()
    unknown = [str(base_tokenizer.unk_token)]
    return [[entries[piece] for piece in family.split(family.to_entry(word), entries) or unknown] for word in words]


def check_appended(old: ExtensionVocabulary, new: ExtensionVocabulary) -> None:
    """Check that a vocabulary is of the same base as an earlier one, and keeps its ids."""
    if (old.base_fingerprint, old.first_id) != (new.base_fingerprint, new.first_id):
        raise CorpusError(
            f"the vocabulary {new.folder} was made for --base {new.base}, the earlier one {old.folder} for {old.base}; "
            "both must be of one base."
        )
    if new.words[: len(old.words)] != old.words:
        raise CorpusError(
            f"the vocabulary {new.folder} does not begin with the words of the earlier one, {old.folder}; new words may"
            " only be appended: make it with --vocab.extend, or use the earlier one."
        )


def read_base_vocabulary(base: str, tokenizer: PreTrainedTokenizerBase, num_base_rows: int) -> BaseVocabulary:
    """Return the vocabulary of a base, whose embedding table may have more rows than its tokenizer has entries."""
    family = tokenizer_family(tokenizer, base)
    entries = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    highest = max(entries.values())
    if highest >= num_base_rows or len(set(entries.values())) < len(entries):
        raise CorpusError(
            f"the tokenizer of --base {base} has ids up to {highest} for {len(entries)} entries, the model "
            f"{num_base_rows} embedding rows; give a base whose tokenizer fits its model."
        )
    names = (name for i in range(2 * num_base_rows) if (name := f"[unused{i}]") not in entries)
    taken = set(entries.values())
    filled = entries | {next(names): i for i in range(num_base_rows) if i not in taken}
    return BaseVocabulary(base, family, tokenizer, filled, fingerprint_tokenizer(tokenizer))
