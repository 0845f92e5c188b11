"""A base's tokenizer -> the vocabulary that new words are added to, and whether a given word can be added."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from domext_ray.errors import CorpusError
from domext_ray.vocabulary.families import tokenizer_family
from domext_ray.vocabulary.family import MAX_WORD_CHARS, PREFIX, TokenizerFamily
from domext_ray.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BaseVocabulary:
    """What new words are added to.

    Args:
        name: what the user calls the base.
        family: of its tokenizer.
        tokenizer: the base's.
        entries: id by entry; the ids from 0 to the last row have no gap, `[unusedN]` fills those without a name.
        fingerprint: `vocab.fingerprint_tokenizer` of the tokenizer.
    """

    name: str
    family: TokenizerFamily
    tokenizer: PreTrainedTokenizerBase
    entries: dict[str, int]
    fingerprint: str

    def has(self, name: str) -> bool:
        """Whether the base has a word already."""
        return self.family.to_entry(name) in self.entries


def read_base_vocabulary(base: str, tokenizer_folder: Path, num_base_rows: int) -> BaseVocabulary:
    """Read the vocabulary of a base.

    Args:
        base: what the user calls the base.
        tokenizer_folder: its tokenizer.
        num_base_rows: rows of its embedding table, which may be more than its tokenizer has entries.

    Raises:
        CorpusError: the tokenizer takes no new words, or has more ids than there are rows.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
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


def read_words(path: str, option: str, known: BaseVocabulary, may_be_known: bool = False) -> list[str]:
    """Read a list of new words, one per line.

    Args:
        path: a UTF-8 file.
        option: the option that names it, for messages.
        known: the base.
        may_be_known: words that the base has are no mistake.

    Raises:
        CorpusError: the file is missing or empty, or a line is no possible new entry; names the line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"--{option} {path!r} cannot be read as UTF-8 text ({error}).") from error
    lines = [each.removesuffix("\r") for each in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise CorpusError(f"--{option} {path!r} is empty; give one word per line.")
    places: dict[str, int] = {}
    for number, word in enumerate(lines, start=1):
        fault = f"stands in line {places[word]} already" if word in places else _find_fault(word, known, may_be_known)
        if fault:
            raise CorpusError(f"--{option} {path!r}, line {number}: {word!r} {fault}; mend or remove the line.")
        places[word] = number
    return lines


def _find_fault(word: str, known: BaseVocabulary, may_be_known: bool) -> str:
    """Say why a word cannot be a new entry; empty when it can."""
    text = word.removeprefix(PREFIX)
    if not text.strip():
        return "is empty, and ids must have no gap"
    if word in known.tokenizer.all_special_tokens:
        return "is a special token"
    if len(text) > MAX_WORD_CHARS:
        return f"has more than {MAX_WORD_CHARS} characters, so no text can produce it"
    if known.has(word):
        return "" if may_be_known else "is in the base's vocabulary already"
    seen = known.family.cut_name(word)
    if len(seen) != 1:
        return f"can never be one token: the base's tokenizer cuts it into {len(seen)} words"
    if seen[0] != word:
        found = seen[0].removeprefix(PREFIX) if word.startswith(PREFIX) else seen[0]
        return f"can never be a token: the base's normaliser makes it {found!r}"
    return ""
