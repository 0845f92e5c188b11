"""What the names in documentation stand for, found by inspecting the source of the packages that define them.

Enters: the Python files of installed distributions. Leaves: tables of definitions (function, class, module, or a value
such as an attribute or a constant), and for every file its docstrings with the names that are in sight there. A name
that the source gives two kinds has none: the tables are for labels, and a wrong label costs more than a lost one.
"""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import os
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from domext_ray.corpus.texts import package_docs

FUNCTION, CLASS, MODULE, PARAMETER = "function", "class", "module", "parameter"
VALUE = "value"
"""Attributes, properties and constants: known names that are none of the four types."""
UNKNOWN = "unknown"
"""A definition whose kind cannot be told from the text, such as an alias: it makes a name ambiguous."""

BUILTIN_TYPES = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type) and name.islower())
"""int, str, list, ...: in documentation they are names of classes as often as English words or plain types."""
_BUILTIN_CLASSES = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and name[0].isupper()
)
_BUILTIN_FUNCTIONS = frozenset(
    name for name, value in vars(builtins).items() if callable(value) and not isinstance(value, type) and name.islower()
)
_USUAL_ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "nx": "networkx", "sp": "scipy"}

_OTHERS_CODE = frozenset({"externals", "extern", "_extern", "thirdparty_files", "third_party", "thirdparty", "vendor"})
"""Folders of other projects' code within a package: it belongs to no package in particular."""

_DEF = re.compile(rb"def (\w+)[(\[]")
_PROPERTY = re.compile(rb"property[^\n]*\n[ \t]+def (\w+)")
_SETTER = re.compile(rb"\.(?:setter|deleter|getter)[^\n]*\n[ \t]+def (\w+)")
_CLASS = re.compile(rb"class (\w+)[(:\[]")
_ATTRIBUTE = re.compile(rb"self\.(\w+)(?:: [^=\n]+)? = (?!\1\b)")
_KEPT_ARGUMENT = re.compile(rb"self\.(\w+)(?:: [^=\n]+)? = \1\b")
_FIELD = re.compile(rb"\n    (\w+): [A-Za-z]")
_ASSIGNED = re.compile(rb"\n([A-Z_a-z]\w*)(?:: [^=\n]+)? = ")


@dataclass(frozen=True)
class SourcePackage:
    """An installed distribution.

    Args:
        name: lower-case.
        version: its version.
        files: dotted name and path of its modules, in order.
    """

    name: str
    version: str
    files: tuple[tuple[str, Path], ...]


def find_packages(names: Iterable[str] | None = None) -> list[SourcePackage]:
    """Return the installed distributions with Python files in the order of their names.

    Args:
        names: only these; those that are not installed are left out.
    """
    wanted = None if names is None else {each.lower() for each in names}
    roots = sorted((each.rstrip("/") + "/" for each in sys.path if each), key=len, reverse=True)
    packages = []
    for name, _ in package_docs.find_distributions():
        if wanted is None or name in wanted:
            paths = (
                (path, next(filter(path.startswith, roots), None)) for path in package_docs.list_source_files(name)
            )
            files = (_name_module(path, root) for path, root in paths if root)
            packages.append(SourcePackage(name, importlib.metadata.version(name), tuple(sorted(filter(None, files)))))
    return packages


def _name_module(path: str, root: str) -> tuple[str, Path] | None:
    parts = path[len(root) :].removesuffix(".py").split("/")
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    is_own = not _OTHERS_CODE.intersection(parts) and all(each.isidentifier() for each in parts)
    return (".".join(parts), Path(path)) if parts and is_own else None


class Definitions:
    """The names that packages and the standard library define, by top-level module.

    Args:
        packages: whose source to read.
        with_standard_library: read that of this Python as well.
    """

    def __init__(self, packages: Sequence[SourcePackage], *, with_standard_library: bool = True) -> None:
        self.kinds: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.modules: set[str] = {*sys.stdlib_module_names, "os.path"}  # the latter has a file of another name
        files = [each for package in packages for each in package.files]
        for module, path in [*_list_standard_library(), *files] if with_standard_library else files:
            self._add(module, path)
        self._camel_kinds: dict[str, set[str]] = defaultdict(set)
        for table in self.kinds.values():
            for name in filter(is_camel_case, table):
                self._camel_kinds[name] |= table[name]
        # "torch:nn.utils" for torch.nn.utils: what is left when the first parts of a module's name are left out.
        self._suffixes: set[str] = set()
        for module in self.modules:
            root, *parts = module.split(".")
            self._suffixes.update(f"{root}:{'.'.join(parts[start:])}" for start in range(1, len(parts)))
            self._suffixes.update([f"{root}:{'.'.join(parts)}"] if parts else [])

    def _add(self, module: str, path: Path) -> None:
        parts = module.split(".")
        self.modules.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
        table = self.kinds[parts[0]]
        for part in parts[1:]:
            table[part].add(MODULE)
        try:
            source = path.read_bytes()
        except OSError:  # a file that its package's record names and that is not there
            return
        for name, kind in _scan_definitions(b"\n" + source):
            table[name].add(kind)

    def find_kind(self, root: str, name: str) -> str | None:
        """Return what `name` is everywhere in the package `root`, or None where that is unknown or ambiguous."""
        kinds = self.kinds[root].get(name, set()) if root in self.kinds else set()
        return next(iter(kinds)) if len(kinds) == 1 and kinds != {UNKNOWN} else None

    def find_member_kind(self, root: str, name: str) -> str | None:
        """Return what `name` is as a member of some class of the package `root`."""
        kinds = (self.kinds[root].get(name, set()) if root in self.kinds else set()) & {FUNCTION, VALUE}
        return next(iter(kinds)) if len(kinds) == 1 else None

    def is_global_class(self, name: str) -> bool:
        """Tell whether packages define the CamelCase `name` as a class, and as nothing else."""
        return self._camel_kinds.get(name) == {CLASS}

    def is_camel_name(self, name: str) -> bool:
        """Tell whether some package defines the CamelCase `name`, or what it is the plural of."""
        return name in self._camel_kinds or name.removesuffix("s") in self._camel_kinds

    def find_path_kind(self, path: str) -> str | None:
        """Return what an absolute dotted name stands for.

        Args:
            path: such as "torch.nn.Linear".
        """
        if path in self.modules:
            return MODULE
        root, *parts = path.split(".")
        if root not in self.kinds or not parts:
            return None
        owner = ".".join((root, *parts[:-1]))
        if owner in self.modules:
            return self.find_kind(root, parts[-1])
        if len(parts) > 1 and self.find_kind(root, parts[-2]) == CLASS:
            return self.find_member_kind(root, parts[-1])
        return None

    def find_suffix_kind(self, root: str, path: str) -> str | None:
        """Return what a dotted name stands for whose first parts are left out, such as "nn.Linear" within torch."""
        owner, _, name = path.rpartition(".")
        last = owner.rpartition(".")[2]
        if self.find_kind(root, last) == CLASS and last[:1].isupper():
            return self.find_member_kind(root, name)
        if f"{root}:{path}" in self._suffixes:
            return MODULE
        return self.find_kind(root, name) if f"{root}:{owner}" in self._suffixes else None


def find_builtin_kind(name: str) -> str | None:
    """Return what a name of Python itself stands for: an exception's is a class."""
    return CLASS if name in _BUILTIN_CLASSES else FUNCTION if name in _BUILTIN_FUNCTIONS else None


def is_camel_case(name: str) -> bool:
    """Tell whether a name has a capital after a small letter, or a capital before one in the middle (LRScheduler)."""
    return "_" not in name and bool(re.search(r"[a-z0-9][A-Z]|[A-Z]{2,}[a-z]{2}", name))


def _list_standard_library() -> Iterator[tuple[str, Path]]:
    root = sysconfig.get_path("stdlib")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        for name in sorted(files):
            named = _name_module(os.path.join(folder, name), root + "/") if name.endswith(".py") else None
            if named:
                yield named


def _scan_definitions(source: bytes) -> Iterator[tuple[str, str]]:
    """Find definitions by their first words: far faster than parsing, and the tables need no more."""
    values = Counter(_PROPERTY.findall(source)) + Counter(_SETTER.findall(source))
    for name in Counter(_DEF.findall(source)) - values:
        yield name.decode("ascii", "replace"), FUNCTION
    for name in [*values, *_ATTRIBUTE.findall(source)]:
        yield name.decode("ascii", "replace"), VALUE
    # What an object keeps of its making, and the fields of a dataclass, are parameters just as well.
    for name in [*_KEPT_ARGUMENT.findall(source), *_FIELD.findall(source)]:
        yield name.decode("ascii", "replace"), UNKNOWN
    for name in _CLASS.findall(source):
        yield name.decode("ascii", "replace"), CLASS
    for name in _ASSIGNED.findall(source):
        yield name.decode("ascii", "replace"), VALUE if name.isupper() else UNKNOWN


@dataclass(frozen=True)
class FileScope:
    """The names in sight of a whole file.

    Args:
        module: its dotted name.
        imports: what a name was imported as -> its absolute path.
        names: kinds of its top-level definitions.
        members: kinds of the members of its classes.
    """

    module: str
    imports: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    members: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The package's top-level module."""
        return self.module.partition(".")[0]

    def expand(self, path: str) -> str:
        """Return a dotted name with its first part replaced by what that was imported from."""
        first, dot, rest = path.partition(".")
        return self.imports.get(first, _USUAL_ALIASES.get(first, first)) + dot + rest


@dataclass(frozen=True)
class Docstring:
    """A docstring and what it documents.

    Args:
        text: between the quotes.
        line: where it starts, from 1.
        owner: the class that is documented or whose method is; "" for functions and modules.
        arguments: names of the signature's arguments.
    """

    text: str
    line: int
    owner: str = ""
    arguments: frozenset[str] = frozenset()


def read_docstrings(module: str, path: Path) -> tuple[FileScope, list[Docstring]]:
    """Read the docstrings of a Python file, and the names that it defines and imports.

    Args:
        module: its dotted name.
        path: the file; one that does not parse, or is not there, has no docstrings.
    """
    scope = FileScope(module)
    try:
        source = path.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return scope, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return scope, []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for body in tree.body:
        scope.imports.update(_list_imports(body, package))
        for name, kind in _list_definitions(body):
            scope.names[name] = UNKNOWN if scope.names.get(name, kind) != kind else kind
    return scope, list(_walk_docstrings(tree, scope, ""))


def _list_imports(node: ast.stmt, package: str) -> Iterator[tuple[str, str]]:
    """Names that a statement imports and their absolute paths, in branches too."""
    if isinstance(node, ast.Import):
        for each in node.names:
            first = each.name.partition(".")[0]
            yield (each.asname, each.name) if each.asname else (first, first)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        source = ".".join(filter(None, (base, node.module)))
        for each in node.names:
            yield each.asname or each.name, f"{source}.{each.name}"
    elif isinstance(node, ast.If | ast.Try):
        for body in _list_branches(node):
            yield from _list_imports(body, package)


def _list_branches(node: ast.If | ast.Try) -> list[ast.stmt]:
    handlers = node.handlers if isinstance(node, ast.Try) else []
    return [*node.body, *node.orelse, *(each for handler in handlers for each in handler.body)]


def _list_definitions(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Names that a statement defines, in branches too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
        yield node.name, VALUE if re.search(r"property|\.setter|\.deleter", decorators) else FUNCTION
    elif isinstance(node, ast.ClassDef):
        yield node.name, CLASS
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                yield target.id, VALUE if target.id.isupper() else UNKNOWN
    elif isinstance(node, ast.If | ast.Try):
        for each in _list_branches(node):
            yield from _list_definitions(each)


def _walk_docstrings(node: ast.AST, scope: FileScope, owner: str) -> Iterator[Docstring]:
    for body in getattr(node, "body", []) if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []:
        if isinstance(body, ast.ClassDef):
            members = scope.members.setdefault(body.name, {})
            for each in body.body:
                members.update(_list_definitions(each))
            yield from _walk_docstrings(body, scope, body.name)
        elif isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.Try):
            yield from _walk_docstrings(body, scope, owner)
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False) if node.body else None
        if text:
            yield Docstring(text, node.body[0].lineno, owner, frozenset(_list_arguments(node)))


def _list_arguments(node: ast.AST) -> Iterator[str]:
    """Names of a function's arguments, or of those that a class is made with."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__"):
                yield from _list_arguments(each)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        yield from (each.arg for each in every if each and each.arg not in ("self", "cls"))
