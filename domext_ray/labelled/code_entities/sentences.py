"""Words and sentences of documentation, and whether they can be trusted as prose with the labels that they were given.

A dotted name and a name with underscores are one word; parentheses right behind a name belong to its word until it is
looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from domext_ray.labelled.code_entities.names import BUILTIN_TYPES, CLASS, FUNCTION, MODULE, PARAMETER, VALUE

MIN_WORDS, MAX_WORDS = 5, 60
MIN_ENGLISH = 0.6
"""Share of a sentence's words that are plain words or mentions."""

NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
CONSTANTS = frozenset({"None", "True", "False", "NaN", "nan", "inf", "NotImplemented"})
_WORD = re.compile(
    r"(?:e\.g\.|i\.e\.|etc\.|et al\.|vs\.|cf\.|[Ff]ig\.|[Ee]q\.|a\.k\.a\.|w\.r\.t\.)(?!\w)"
    r"|(?:[A-Za-z]+(?:n't|'(?:re|ve|ll|d|m))|(?:[Ii]t|[Tt]hat|[Ww]hat|[Tt]here|[Hh]ere|[Ll]et)'s)\b"
    r"|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?|[A-Za-z_]\w*(?:\(\))?"
    r"|\d+(?:[.,]\d+)*\w*|'s\b|\.\.\.|\S"
)
_UNREADABLE = re.compile(r"[`{}<>|\\$=^~@*#]|https?|www|__\w+__|\w*\\\w*")

_NOUNS: dict[str, frozenset[str]] = {
    "function": frozenset({FUNCTION}),
    "functions": frozenset({FUNCTION}),
    "method": frozenset({FUNCTION}),
    "methods": frozenset({FUNCTION}),
    "class": frozenset({CLASS}),
    "classes": frozenset({CLASS}),
    "module": frozenset({MODULE}),
    "modules": frozenset({MODULE, CLASS}),  # a neural network's modules are objects
    "package": frozenset({MODULE}),
    "library": frozenset({MODULE}),
    "parameter": frozenset({PARAMETER}),
    "parameters": frozenset({PARAMETER}),
    "argument": frozenset({PARAMETER}),
    "arguments": frozenset({PARAMETER}),
    "kwarg": frozenset({PARAMETER}),
    "keyword": frozenset({PARAMETER}),
    "option": frozenset({PARAMETER}),
    "flag": frozenset({PARAMETER}),
}
_NOUNS |= dict.fromkeys(
    "attribute attributes property field fields column key variable constant file directory folder command "
    "environment section group chunk header entry".split(),
    frozenset(),
)
"""What a word beside a mention says of its kind; the last are of no kind that is labelled."""


@dataclass(frozen=True)
class CodeSentence:
    """A sentence of a docstring.

    Args:
        words: names with dots and underscores are one word.
        tags: IOB2.
        module: where it stands.
        line: where its docstring starts.
        nouns: words with a capital in the middle that no package defines: proper nouns, or names from elsewhere.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    module: str
    line: int
    nouns: frozenset[str] = frozenset()

    @property
    def num_entities(self) -> int:
        """Labelled mentions."""
        return sum(tag.startswith("B-") for tag in self.tags)


@dataclass
class Token:
    """A word or a punctuation mark on its way to a label.

    Args:
        text: without mark-up.
        space: space stands before it.
        label: one of the four types, VALUE for what is known to be none of them, or None for a plain word.
        is_marked: the author marked it as code.
        is_doubtful: it is code, and nobody can tell what.
    """

    text: str
    space: bool
    label: str | None = None
    is_marked: bool = False
    is_doubtful: bool = False


def tokenize(text: str) -> list[Token]:
    """Cut a text without mark-up into words and punctuation marks."""
    return [Token(match[0], match.start() > 0 and text[match.start() - 1].isspace()) for match in _WORD.finditer(text)]


def split_sentences(tokens: list[Token]) -> Iterator[list[Token]]:
    """Cut a paragraph's words behind full stops that a capital, a name or the end follows."""
    start = 0
    for place, token in enumerate(tokens):
        if token.text not in (".", "!", "?") or token.is_marked:
            continue
        following = tokens[place + 1] if place + 1 < len(tokens) else None
        if following is None or (following.space and (following.is_marked or re.match(r"[A-Z(\"']", following.text))):
            yield tokens[start : place + 1]
            start = place + 1
    if start < len(tokens):
        yield tokens[start:]


def is_prose(sentence: list[Token]) -> bool:
    """Tell whether words are a whole sentence of English, without formulas, code and seams."""
    if not MIN_WORDS <= len(sentence) <= MAX_WORDS or sentence[-1].text not in (".", "!", "?", ":"):
        return False
    texts = [each.text for each in sentence]
    if texts.count("(") != texts.count(")") or not all(text.isascii() for text in texts):
        return False
    if any(_UNREADABLE.fullmatch(each.text) for each in sentence if each.label != VALUE):
        return False
    if _has_seam(sentence):
        return False
    words = [each for each in sentence if each.label or each.text.isalpha()]
    if sum(len(each.text) > 1 for each in words) / len(sentence) < MIN_ENGLISH:
        return False
    return any(each.label is None and each.text.isalpha() and each.text.islower() for each in sentence)


def _has_seam(sentence: list[Token]) -> bool:
    """Tell whether a list entry's head runs into what is said of it, or a name lacks what stands before its dot."""
    for before, after in zip(sentence, sentence[1:], strict=False):
        # "array of shape (n,) The values ...", "size (int, optional): how large ..."
        if before.text == ")" and (after.text == ":" or after.text.istitle()) and after.label is None:
            return after is not sentence[-1]
        is_cut_off = before.text == "." and before.space and not after.space  # ".draw"
        is_call = after.text == "(" and not after.space and re.fullmatch(r"[\w.]+", before.text)
        if is_cut_off or is_call:
            return True
    first, second = sentence[0], sentence[1]
    # "bool True if it is so": the type of what is returned stands on a line of its own.
    is_type = first.label == CLASS or first.text in BUILTIN_TYPES or first.text.islower()
    return is_type and second.text.istitle() and second.label is None


def agrees_with_nouns(sentence: list[Token]) -> bool:
    """Tell whether "the X method", "the argument X" and the like fit the labels."""
    for place, token in enumerate(sentence):
        if token.label is not None and NAME.fullmatch(token.text) and token.text not in CONSTANTS:
            following = sentence[place + 1].text.lower() if place + 1 < len(sentence) else ""
            before = sentence[place - 1].text.lower() if place else ""
            if token.label == VALUE:
                if _NOUNS.get(before) or _NOUNS.get(following):
                    return False
                continue
            fitting = _NOUNS.get(following, {token.label})
            if token.label not in fitting and (token.label != MODULE or not fitting & {FUNCTION, CLASS}):
                return False
            if token.label not in _NOUNS.get(before, {token.label}):
                return False
            if token.label == MODULE and (before in ("a", "an") or following.startswith(("object", "instance"))):
                return False  # "a datetime" is the class
    return True
