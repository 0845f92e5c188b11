"""A tokenizer -> whether its rules fit its entries, as a sentence.

Old cased checkpoints are a vocab.txt without tokenizer_config.json, which transformers reads by the rules of BERT's
uncased one, so that half of the entries are lost in silence. What a rule does to an entry is asked of the tokenizer's
own normaliser, and of one without the rule. Only WordPiece is read so: the rules of byte-level BPE and of unigram
models come with their entries, in tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer

from domext_ray.text.vocabulary.family import PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOST_FRAC = 0.03
"""A rule that loses more of the entries is wrong. Right ones, measured, lose none of bert-base-uncased, 0.1 % of
bert-base-chinese and 1.8 % of SciBERT, which has some accents and Greek capitals. A wrong one loses every word that
begins with a capital, or every one that has an accent."""
RARE_FRAC = 0.001
"""A vocabulary that has fewer entries with a capital is uncased; bert-base-chinese, which keeps case, has 0.14 %."""
SAMPLE_ENTRIES = 50_000
"""Of a larger vocabulary so many entries are judged: all of half a million take a second."""

CONFIG, FILE = "tokenizer_config.json", "tokenizer.json"


class _Rule(NamedTuple):
    """A rule that does not fit: what both files call it, what it should be, and what is wrong with it."""

    option: str
    field: str
    value: bool
    fault: str


def find_wrong_rules(tokenizer: PreTrainedTokenizerBase, base: str, folder: Path) -> str:
    """Say which of a tokenizer's rules do not fit its entries, and what mends that; empty where all do."""
    from transformers import BertTokenizer

    backend = tokenizer.backend_tokenizer
    if twice := _find_twice(folder):
        return (
            f"the tokenizer of --base {base} {twice}; give the model's own vocab.txt, unless the base was trained so."
        )
    if not isinstance(backend.model, WordPiece) or not isinstance(backend.normalizer, BertNormalizer):
        return ""
    vocab, special = backend.get_vocab(), set(tokenizer.all_special_tokens)
    step = -(-len(vocab) // SAMPLE_ENTRIES)
    entries = [entry.removeprefix(PREFIX) for entry, i in vocab.items() if i % step == 0 and entry not in special]
    wrong = _find_wrong(entries, backend.normalizer, step)
    if not wrong:
        return ""
    reads_config = isinstance(tokenizer, BertTokenizer)  # any other class takes its rules from tokenizer.json alone
    lines = json.dumps({rule.option if reads_config else rule.field: rule.value for rule in wrong})
    mended = f"write {lines} as {folder / CONFIG}"
    if not reads_config:
        mended = f"set {lines[1:-1]} in the normalizer of {folder / FILE}"
    elif (folder / CONFIG).is_file():
        mended = f"set {lines[1:-1]} in {folder / CONFIG}"
    faults = ", and ".join(rule.fault for rule in wrong)
    return (
        f"the tokenizer of --base {base} {faults}; unless the base was trained so, {mended} (exports have the rules of "
        "their base)."
    )


def _find_twice(folder: Path) -> str:
    """Say which entry stands twice in a vocab.txt that is read, so that its ids may be those of other words."""
    path = folder / "vocab.txt"
    if (folder / FILE).is_file() or not path.is_file():
        return ""
    places: dict[str, int] = {}
    entries = path.read_text(encoding="utf-8").split("\n")
    twice = [(places[entry], i, entry) for i, entry in enumerate(entries, 1) if places.setdefault(entry, i) != i]
    twice = [found for found in twice if found[2].strip()]
    if not twice:
        return ""
    first, second, entry = twice[0]
    number = f"has {len(twice):,} entr{'y' if len(twice) == 1 else 'ies'} a second time in its vocab.txt"
    return f"{number} (the first is {entry!r} in lines {first:,} and {second:,}), where the last one counts"


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
