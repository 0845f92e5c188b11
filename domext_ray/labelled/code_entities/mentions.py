"""Docstrings -> sentences of words whose mentions of code are labelled, with no trace of the mark-up that told.

What an author marked as code (roles, literals, emphasis) or what can be nothing but a name (an underscore, a dot, a
capital in the middle) is looked up in the names in sight. A sentence with a mark or a shape that cannot be looked up,
or with a plain word that is a name elsewhere in its docstring, is left out: the labels should be right, and there is
more documentation than anybody needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from domext_ray.corpus.texts.package_docs import split_blocks
from domext_ray.labelled.code_entities.names import (
    BUILTIN_TYPES,
    CLASS,
    FUNCTION,
    MODULE,
    PARAMETER,
    UNKNOWN,
    VALUE,
    Definitions,
    Docstring,
    FileScope,
    find_builtin_kind,
    is_camel_case,
)
from domext_ray.labelled.code_entities.parameters import list_parameters
from domext_ray.labelled.code_entities.sentences import (
    CONSTANTS,
    NAME,
    CodeSentence,
    Token,
    agrees_with_nouns,
    is_prose,
    split_sentences,
    tokenize,
)

_ROLE_KINDS = {
    "func": FUNCTION,
    "function": FUNCTION,
    "meth": FUNCTION,
    "method": FUNCTION,
    "class": CLASS,
    "exc": CLASS,
}
_ROLE_KINDS |= {"mod": MODULE, "module": MODULE, "data": VALUE, "const": VALUE}
_TEXT_ROLES = {"ref", "doc", "term", "pep", "rfc", "mpltype"}
"""Roles of references to text, whose wording is prose."""

_MARK = re.compile(
    r":(?P<role>[A-Za-z][\w:.+-]*):`(?P<role_text>[^`]+)`"
    r"|``(?P<double>[^`]+)``"
    r"|\[`(?P<bracket>[^`\]]+)`\](?:\([^)\s]*\))?"
    r"|\[(?P<link>[^\]\[`]+)\]\([^)\s]*\)"
    r"|`(?P<single>[^`]+)`_{0,2}"
    r"|\*\*(?P<bold>[^*`]+)\*\*"
    r"|(?<![\w*])\*(?P<emphasis>[^\s*`][^*`]*)\*(?![\w*])"
)

_STRING = re.compile(r"([\"'])[\w .:/+-]*\1")

_FILENAME = re.compile(
    r"[\w-]+\.(py|json|txt|md|rst|ya?ml|toml|cfg|ini|csv|tsv|bin|pt|safetensors|zip|gz|html|org|com|io)"
)
_LEADING_TITLE = re.compile(
    r"^(returns?|yields?|raises|notes?|args|arguments|warnings?|examples?)\s*:\s+", re.IGNORECASE
)


class MentionFinder:
    """Looks up what the words of one docstring stand for.

    Args:
        docstring: the docstring.
        scope: the names of its file.
        definitions: the names of all packages.
    """

    def __init__(self, docstring: Docstring, scope: FileScope, definitions: Definitions) -> None:
        self.scope, self.definitions, self.docstring = scope, definitions, docstring
        listed, self.values = list_parameters(docstring.text)
        self.parameters = listed | docstring.arguments
        self.members = scope.members.get(docstring.owner, {})
        self.marked_names: set[str] = set()

    def read_sentences(self) -> Iterator[CodeSentence]:
        """Yield the sentences that are sure, in their order."""
        blocks = [
            self._read_tokens(_LEADING_TITLE.sub("", re.sub(r"::(?=\s|$)", ":", block)))
            for block in split_blocks(self.docstring.text)
        ]
        for tokens in blocks:
            for sentence in split_sentences(tokens):
                if self._label_plain_words(sentence) and is_prose(sentence) and agrees_with_nouns(sentence):
                    tags = ["O" if each.label in (None, VALUE) else f"B-{each.label}" for each in sentence]
                    words = tuple(each.text for each in sentence)
                    nouns = frozenset(each.text for each in sentence if each.label is None and is_camel_case(each.text))
                    yield CodeSentence(words, tuple(tags), self.scope.module, self.docstring.line, nouns)

    def _read_tokens(self, block: str) -> list[Token]:
        tokens: list[Token] = []
        end = 0
        for match in _MARK.finditer(block):
            tokens += tokenize(block[end : match.start()])
            tokens += self._read_mark(match)
            if tokens and match.end() < len(block) and re.match(r"\w|-\w", block[match.end() :]):
                tokens[-1].is_doubtful = True  # a plural's s, or half of a compound
            if re.search(r"[\w-]$", block[: match.start()]):
                tokens[-1].is_doubtful = True
            end = match.end()
        return tokens + tokenize(block[end:])

    def _read_mark(self, match: re.Match[str]) -> list[Token]:
        space = match.start() == 0 or match.string[match.start() - 1].isspace()
        role = (match["role"] or "").rpartition(":")[2]
        emphasis = match["bold"] or match["emphasis"]
        content = match["role_text"] or match["double"] or match["bracket"] or match["single"] or emphasis
        prose = match["link"]
        if role in _TEXT_ROLES:
            prose = re.sub(r"\s*<[^>]*>$", "", content)
            if prose == content and role in ("ref", "doc"):  # a page's own name, whose title is not at hand
                return [Token(content, space, is_marked=True, is_doubtful=True)]
        elif emphasis and emphasis not in self.parameters:
            prose = emphasis
        if prose is not None:
            return tokenize(" " * space + prose)
        content = content.strip()
        titled = re.fullmatch(r"(.*?)\s*<([^>]*)>", content)
        if titled:  # "the title <the.target>"
            target = titled[2].lstrip("~.!")
            is_same = titled[1].rstrip("()").rpartition(".")[2] == target.rpartition(".")[2]
            content = titled[1] if is_same else "?"
        return self._read_code(content.lstrip("~!."), role, space)

    def _read_code(self, content: str, role: str, space: bool) -> list[Token]:
        """Tokens of what is marked as code; doubtful ones where it cannot be looked up."""
        if _STRING.fullmatch(content) or content in CONSTANTS or re.fullmatch(r"-?\d+(\.\d+)?", content):
            tokens = tokenize(" " * space + content)
            for each in tokens:
                each.label, each.is_marked = VALUE, True
            return tokens
        setting = re.fullmatch(r"(\w+)\s*=\s*(None|True|False|\d+)", content)
        if setting and setting[1] in self.parameters and not role:
            self.marked_names.add(setting[1])
            values = (Token(each, False, VALUE, True) for each in ("=", setting[2]))
            return [Token(setting[1], space, PARAMETER, True), *values]
        is_called = content.endswith("()")
        name = content.removesuffix("()").lstrip("*")
        kind = self.find_marked_kind(name, role, is_called=is_called) if NAME.fullmatch(name) else None
        if kind in (FUNCTION, CLASS, MODULE, PARAMETER):
            self.marked_names.add(name)
        return [Token(name if kind else content, space, kind, True, is_doubtful=kind is None)]

    def find_marked_kind(self, name: str, role: str = "", *, is_called: bool = False) -> str | None:
        """Return what a name that is marked as code stands for, or None where that is not sure.

        Args:
            name: without mark-up and parentheses.
            role: the role it was marked with, without its domain.
            is_called: parentheses followed it.
        """
        if name in BUILTIN_TYPES or (name.startswith("__") and name.endswith("__")):
            return None
        kind = self._find_dotted_kind(name) if "." in name else self._find_simple_kind(name, is_called=is_called)
        last = name.rpartition(".")[2]
        is_told = is_called or _ROLE_KINDS.get(role) == FUNCTION
        is_odd_function = kind == FUNCTION and (is_camel_case(last) or last.isupper())
        if (kind == VALUE and last[0].isupper() and not last.isupper()) or is_odd_function:
            kind = kind if kind == FUNCTION and is_told else None
        if role in _ROLE_KINDS:
            wanted = _ROLE_KINDS[role]
            if role == "exc" and not name.rpartition(".")[2][:1].isupper():
                return None
            found = kind or self._guess_kind(name)
            return wanted if found in (wanted, None) and kind != PARAMETER else None
        if role and role not in ("attr", "obj", "any", "param", "paramref", "arg"):
            return None
        if is_called and kind not in (FUNCTION, CLASS):
            return None
        return kind

    def _guess_kind(self, name: str) -> str | None:
        """The kind of a name's last part in its own package, to check what a role says."""
        return self.definitions.find_kind(self.scope.root, name.rpartition(".")[2])

    def _find_simple_kind(self, name: str, *, is_called: bool = False) -> str | None:
        if name in self.parameters:
            return PARAMETER
        if name in self.values:
            return VALUE
        for table in (self.members, self.scope.names):
            if name in table:
                return table[name] if table[name] != UNKNOWN else None
        if name == self.docstring.owner:
            return CLASS
        if name in self.scope.imports:
            path = self.scope.imports[name]
            return self.definitions.find_path_kind(path) if path.rpartition(".")[2] == name else None
        kind = self.definitions.find_kind(self.scope.root, name)
        if kind == CLASS:
            return CLASS if name[0].isupper() else None
        if kind in (FUNCTION, VALUE):  # a plain word may be a value, and the namesake elsewhere a coincidence
            return kind if "_" in name.strip("_") or (is_called and kind == FUNCTION) else None
        if kind is None and name not in self.definitions.kinds.get(self.scope.root, {}):
            if self.definitions.is_global_class(name):
                return CLASS
            # A file that does not import html may call a format by that name.
            if name in self.definitions.kinds and name not in sys.stdlib_module_names:
                return MODULE
            builtin = find_builtin_kind(name)
            return builtin if builtin != FUNCTION or is_called or "_" in name else None
        return None

    def _find_dotted_kind(self, path: str) -> str | None:
        first, _, rest = path.partition(".")
        if first in ("self", "cls"):
            return self.members.get(rest) if self.members.get(rest) != UNKNOWN else None
        if first in self.parameters or _FILENAME.fullmatch(path):
            return VALUE if _FILENAME.fullmatch(path) else None
        absolute = self.scope.expand(path)
        kind = self.definitions.find_path_kind(absolute)
        if kind is None and first in self.scope.members and "." not in rest:
            kind = self.scope.members[first].get(rest)
        if kind is None and absolute.partition(".")[0] in self.definitions.modules:
            return None
        return (kind or self.definitions.find_suffix_kind(self.scope.root, path)) if kind != UNKNOWN else None

    def _label_plain_words(self, sentence: list[Token]) -> bool:
        """Label names that no mark told; tell whether the sentence is sure."""
        for place, token in enumerate(sentence):
            if token.is_doubtful:
                return False
            if token.is_marked or not (token.text[0].isalpha() or token.text[0] == "_"):
                continue
            word = token.text.removesuffix("()")
            kind = self._find_plain_kind(word, is_called=word != token.text, is_first=place == 0)
            if kind == UNKNOWN:
                return False
            token.text, token.label = (word, kind) if kind not in (None, VALUE) else (token.text, kind)
        return True

    def _find_plain_kind(self, word: str, *, is_called: bool, is_first: bool) -> str | None:
        """Kind of an unmarked word: None for a plain word, UNKNOWN where nobody can tell."""
        if word in CONSTANTS or re.fullmatch(r"(e\.g|i\.e|etc|vs|cf|w\.r\.t|a\.k\.a|[Ff]ig|[Ee]q)\.?|et al\.?", word):
            return None
        if word.isupper() and "_" not in word and word not in self.parameters | self.marked_names:
            return None  # an acronym
        is_shaped = "_" in word or "." in word or is_camel_case(word) or is_called
        if not is_shaped:
            is_name = word in self.parameters or word in self.marked_names or word in self.values
            is_class = word[0].isupper() and not is_first and CLASS in self._own_kinds(word)
            return UNKNOWN if is_name or is_class or word in ("str", "dict", "int", "bool", "np") else None
        if is_camel_case(word) and "." not in word and not is_called:
            if word in self.parameters:
                return PARAMETER
            if MODULE in self._own_kinds(word.lower()) or word.lower() == self.scope.root:
                return UNKNOWN  # TensorBoard may be the product or the class
            if self._own_kinds(word) == {CLASS} or find_builtin_kind(word) == CLASS:
                return CLASS
            return UNKNOWN if self.definitions.is_camel_name(word) else None
        kind = self.find_marked_kind(word, is_called=is_called)
        return UNKNOWN if kind == CLASS and word.rpartition(".")[2].islower() else kind or UNKNOWN

    def _own_kinds(self, name: str) -> set[str]:
        return self.definitions.kinds.get(self.scope.root, {}).get(name, set())
