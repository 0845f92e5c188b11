"""Upgrades: the table of what libraries do not promise is that of the code, and the script tests what it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from project_file import read_project_file

from domext_ray.runtime.ray_private import REACHES

UPGRADING = REPOSITORY / ".github" / "UPGRADING.md"
SCRIPT = REPOSITORY / "tests" / "upgrade.sh"
SOURCES = sorted(
    [*REPOSITORY.glob("domext_ray/**/*.py"), *REPOSITORY.glob("jobs/**/*.py"), REPOSITORY / "cluster/drain_node.py"]
)
DOCUMENTED = {"os._exit"}
"""Names that look private and are in the documentation of what has them."""
OUR_BASES = {"super()._compute_loss"}
"""Methods of our own classes that are called by `super()`."""
OTHERS = {"domext_ray", *sys.stdlib_module_names}
"""Packages that no upgrade of a library changes."""

Row = tuple[set[str], list[Path], list[str]]
"""Names, the files that use them, and the tests that notice."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def place_of(text: str) -> Path:
    """Return the file that a cell calls so: those of the package go without its name."""
    inside = REPOSITORY / "domext_ray" / text
    return inside if inside.is_file() else REPOSITORY / text


@cache
def read_table() -> list[Row]:
    found = []
    for line in UPGRADING.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[0] != "library" and not set(cells[0]) <= {"-"}:
            names, places, notices = (re.findall(r"`([^`]+)`", cells[i]) for i in (1, 2, 4))
            found.append((set(names), [place_of(place) for place in places], notices))
    return found


def find_private(path: Path) -> Iterator[str]:
    """Yield the names of other libraries that a file uses and that begin with an underscore."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {definition.name for definition in ast.walk(tree) if isinstance(definition, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        attribute.attr
        for attribute in ast.walk(tree)
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            words = node.module.split(".")
            if words[0] not in OTHERS:
                names = [node.module] if any(map(is_private, words)) else [alias.name for alias in node.names]
                yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] not in OTHERS]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            whole = ast.unparse(node)
            is_own = ast.unparse(node.value) in ("self", "cls") or (node.attr in own and "super()" not in whole)
            if not is_own and whole not in DOCUMENTED | OUR_BASES:
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            yield node.arg


BY_METACLASS = ("_abc_impl", "_backward_cls")
"""Names that a metaclass gives to every class, abstract ones and functions of autograd."""


def find_overridden(path: Path) -> Iterator[str]:
    """Yield the private names of other libraries' classes that classes of a file have, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not any(isinstance(node, ast.ClassDef) and node.bases for node in ast.walk(tree)):
        return
    name = path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
    module = importlib.import_module(name)
    for _, made in inspect.getmembers(module, inspect.isclass):
        theirs = [base for base in made.__mro__[1:] if base.__module__.partition(".")[0] not in OTHERS]
        if made.__module__ == name:
            for attr in vars(made):
                if is_private(attr) and attr not in BY_METACLASS and any(attr in vars(other) for other in theirs):
                    yield attr


def has_row(name: str, path: Path) -> bool:
    parts = {part for names, places, _ in read_table() if path in places for full in names for part in list_parts(full)}
    return name in parts


def list_parts(name: str) -> set[str]:
    """Return what a name may be called in the code: whole, without its last parts, and its last part alone."""
    words = name.replace(":", ".").split(".")
    return {".".join(words[:i]) for i in range(1, len(words) + 1)} | set(words) | {name}


def test_every_private_name_has_its_row() -> None:
    assert len(read_table()) > 20
    for path in SOURCES:
        for name in find_private(path):
            assert has_row(name, path), f"{path.relative_to(REPOSITORY)}: {name} has no row in {UPGRADING.name}"


def test_every_private_name_that_a_class_takes_over_has_its_row() -> None:
    ours = [path for path in SOURCES if path.is_relative_to(REPOSITORY / "domext_ray")]
    libraries = re.compile(r"^(from|import) (transformers|torch|ray|peft|deepspeed|datasets|safetensors)\b", re.M)
    found = {}
    for path in ours:
        if libraries.search(path.read_text(encoding="utf-8")):
            found[path] = sorted({*find_overridden(path)})
    missing = {path: [name for name in names if not has_row(name, path)] for path, names in found.items()}
    assert not {path: names for path, names in missing.items() if names}
    named = {name for names in found.values() for name in names}
    assert {"_init_weights", "_tied_weights_keys", "_create_default_callbacks"} <= named, "the check has found them"


def test_every_reach_into_ray_has_its_row() -> None:
    rows = {name for names, places, _ in read_table() for name in names if place_of("runtime/ray_private.py") in places}
    assert rows == REACHES.keys()


def test_every_row_has_its_code_and_its_tests() -> None:
    for names, places, notices in read_table():
        assert names and places and notices
        for path in places:
            source = path.read_text(encoding="utf-8")
            lacking = [row_name for row_name in names if re.split(r"[.:]", row_name)[-1] not in source]
            shared = [row_name for row_name in lacking if len(places) > 1]
            assert not lacking or len(shared) < len(names), f"{path} has no {lacking}"
        for name in names:
            last = re.split(r"[.:]", name)[-1]
            assert any(last in path.read_text(encoding="utf-8") for path in places), name
        for notice in notices:
            place, _, test = notice.partition("::")
            path = REPOSITORY / "tests" / place
            assert path.is_file(), notice
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), notice


def test_a_name_without_a_row_is_found(tmp_path: Path) -> None:
    path = tmp_path / "reaching.py"
    path.write_text(
        "import torch\nimport ray._private.node\nfrom torch._inductor import config\nfrom ray.tune import _trial\n"
        "torch._C.call()\nray.init(_system_config={})\nos._exit(1)\nself._own\nclass A:\n    def _mine(self): x._mine\n"
    )
    assert {*find_private(path)} == {"ray._private.node", "torch._inductor", "_trial", "_C", "_system_config"}
    assert not any(has_row(name, path) for name in find_private(path))


# --- the script -----------------------------------------------------------------------------------------------------


def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=600)


def test_the_script_passes_its_linter() -> None:
    command = [Path(sys.executable).with_name("shellcheck"), SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_are_those_of_the_project() -> None:
    project = read_project_file()["project"]
    listed = call("--list")
    assert listed.returncode == 0, listed.stderr
    rows = {cells[1]: cells[2:4] for cells in (re.split(r" *\| *", line) for line in listed.stdout.splitlines())}
    pythons = [row for row in rows if row.startswith("python3.")]
    assert pythons[0] == f"python{project['requires-python'].removeprefix('>=')}"
    assert pythons == [
        f"python{classifier.split()[-1]}" for classifier in project["classifiers"] if "Python :: 3." in classifier
    ]
    constraints = (REPOSITORY / "cluster" / "constraints.txt").read_text(encoding="utf-8")
    (least,) = re.findall(r"for Python 3\.(\d+) and later", constraints)
    for python in pythons:
        place, *pins = rows[python]
        constrained = int(python.partition(".")[2]) >= int(least)
        assert place.startswith("no python") or pins == ["-c cluster/constraints.txt" if constrained else ""], python
    assert f"python3.{sys.version_info.minor}" in pythons
    lowest = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, project["dependencies"])}
    pins = dict(pin.split("==") for pin in rows["oldest"][1].split())
    assert pins.keys() == lowest.keys() and rows["newest"][1] == ""
    for name, version in pins.items():
        assert f">={version.removesuffix('.*')}" in lowest[name].split(","), name


@pytest.mark.parametrize("row", ["python2.7", "latest", "--pythons"])
def test_a_row_that_is_none_is_refused(row: str) -> None:
    done = call(row)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {row} is no row; ") and not done.stdout


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """Without an index nothing can be installed: every row says so, and the exit code is 1."""
    done = call("oldest", "newest", LOGS=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert done.returncode == 1 and len(table) == 3, done.stdout + done.stderr
    assert all(line.endswith("| not installed |") for line in table[1:])
    assert {path.parent.name for path in tmp_path.glob("*/install.log")} == {"oldest", "newest"}
    assert not list(tmp_path.glob("*/venv"))
