"""The options of a job, read from its configuration class: names, kinds, defaults and help.

A class is a dataclass whose fields are options or sections, which are dataclasses themselves: field `max_steps` of the
section `train` is the option train.max_steps. An option's help is the comment beside its field.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Option:
    """An option of a job.

    Args:
        name: such as train.max_steps.
        kind: str, int, float, bool, dict, or words of which it is one.
        choices: the words; of a bool, what it may be beside true and false.
        default: its value where nothing is given.
        plain: its value where its section, which is taken whole, is given without it.
        owner: the class that has the field.
        whole: of a dict: "any" if what a file or flag says replaces what was there, instead of being merged into it.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    plain: Any
    owner: type
    whole: str = ""

    @property
    def help(self) -> str:
        """The comment beside its field; empty if there is none."""
        return read_comments(self.owner).get(self.name.rpartition(".")[2], "")


@dataclass(frozen=True)
class Section:
    """A group of options.

    Args:
        name: such as train.
        owner: its class.
        whole: "file" if a file that has one of its options replaces all of them, "any" if flags do so too.
    """

    name: str
    owner: type
    whole: str = ""


def list_options(config_class: type) -> Mapping[str, Option]:
    """Return a class's options by name, in the order of its fields."""
    return _list(config_class)[0]


def list_sections(config_class: type) -> Mapping[str, Section]:
    """Return a class's sections by name, in the order of its fields, a section before those within it."""
    return _list(config_class)[1]


@cache
def _list(config_class: type) -> tuple[Mapping[str, Option], Mapping[str, Section]]:
    found = list(_walk(config_class))
    options = {each.name: each for each in found if isinstance(each, Option)}
    return options, {each.name: each for each in found if isinstance(each, Section)}


def _walk(config_class: Any, instance: Any = None, prefix: str = "") -> Iterable[Option | Section]:
    kinds = typing.get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        kind, whole = kinds[each.name], each.metadata.get("whole", "")
        made = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        default = getattr(instance, each.name, made)
        if dataclasses.is_dataclass(kind):
            yield Section(f"{prefix}{each.name}", typing.cast(type, kind), whole)
            yield from _walk(kind, default, f"{prefix}{each.name}.")
        else:
            yield Option(f"{prefix}{each.name}", *_read_kind(kind), default, made, config_class, whole)


def _read_kind(kind: Any) -> tuple[type, tuple[str, ...]]:
    """Return a field's type as an option's kind and choices."""
    if get_origin(kind) is Literal:
        return Literal, get_args(kind)
    if get_origin(kind) is dict:
        return dict, ()
    parts = get_args(kind)  # of bool | Literal["auto"]
    return (bool, get_args(parts[1])) if bool in parts else (kind, ())


def read_comments(owner: type) -> Mapping[str, str]:
    """Return the comments beside the fields of a dataclass and of the classes that it builds on."""
    comments: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        if dataclasses.is_dataclass(each):
            comments.update(_read_module_comments(each.__module__).get(each.__name__, {}))
    return comments


@cache
def _read_module_comments(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the comments beside the fields of a module's classes."""
    source = inspect.getsource(sys.modules[name])
    by_line = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    comments: dict[str, dict[str, str]] = {}
    for definition in ast.parse(source).body:
        if isinstance(definition, ast.ClassDef):
            own = comments.setdefault(definition.name, {})
            for each in definition.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    lines = range(each.lineno, (each.end_lineno or each.lineno) + 1)
                    own[each.target.id] = " ".join(by_line[line] for line in lines if line in by_line)
    return comments


def suggest(name: str, known: Iterable[str]) -> list[str]:
    """Return the names that an unknown one was probably meant to be, at most three.

    The last part counts most: `lr` and `train.lr` are probably optim.lr.
    """
    known, name = list(known), name.lower().replace("-", "_")
    if name in known:
        return [name]
    leaf = name.rpartition(".")[2]
    same = [each for each in known if each.rpartition(".")[2] == leaf]
    if same:
        return sorted(same, key=len)[:3]
    begun = [each for each in known if len(name) > 2 and each.startswith(name)]
    if begun:
        return begun[:3]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        return near
    leaves = {each.rpartition(".")[2]: each for each in reversed(known)}
    return [leaves[each] for each in difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)]
