"""The import order of the rooms, and the modules that only certain rooms may import, read from the source."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeGuard

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "domext_ray"

ROOMS = (
    "errors",
    "storage",
    "progress",
    "intervals",
    "files",
    "config.options",
    "config.extensions",
    "config",
    "runtime",
    "runs",
    "text.data",
    "text.vocabulary",
    "text.corpus",
    "model.domext",
    "model",
    "training",
    "report",
    "export",
    "families.readers",
    "families.metrics",
    "families",
    "models",
    "finetuning",
    "inference",
    "serving",
    "pretraining",
    "studies.ablation",
    "studies.forgetting",
    "studies.retrieval",
    "studies.methods",
    "studies.sweep",
    "commands",
    "api",
)
"""The rooms: folders of the package, and modules at its root. One may import only those before it; jobs import all."""

DOOR = ("storage", "text.corpus.index")
"""What alone may rename, lock, append or map files; the last one maps those of a folder that goes with its job."""
TAKE_WHAT_USERS_GIVE = {"api", "models.bank"}
"""What takes a path or an address from Python and makes it a place; everything else is given places."""

EXPORTED = (
    "model.domext.configuration_domext",
    "model.domext.layers_domext",
    "model.domext.words_domext",
    "model.domext.routers_domext",
    "model.domext.modeling_domext",
    "model.domext.heads_domext",
)
"""Copied into exports as they are, so they may import only each other and `EXPORTED_MAY_IMPORT`."""
EXPORTED_MAY_IMPORT = {"torch", "transformers", "__future__", "collections", "dataclasses", "itertools", "typing"}

RESTRICTED = {
    "ray": (
        "runtime.ray_cluster",
        "runtime.ray_private",
        "runtime.tasks",
        "runtime.on_tune",
        "text.corpus.",
        "training.elastic",
        "training.entry",
        "training.pretrain",
        "training.tracking",
        "studies.sweep.resources",
        "serving.deployment",
        "serving.serve",
        "jobs.",
    ),
    "deepspeed": ("training.engine",),
    "pydantic": (
        "config.",
        "families.described_sets",
        "families.readers.set_description",
        "serving.app",
        "serving.endpoints",
    ),
    "obstore": ("storage",),
    "tqdm": ("progress",),
    "triton": ("model.kernels",),
}
"""A third-party package -> the modules (or, ending in a dot, groups of modules) that may import it."""


def name_of(node: ast.Call) -> str:
    """Return the last part of what is called."""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


@functools.cache
def list_imports(source: str, module: str) -> set[str]:
    """Return the absolute names of all modules that `source` imports, wherever in the file it does so."""
    package = f"{PACKAGE}.{module}".split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and name_of(node) in ("import_module", "__import__"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def room_of(module: str) -> str:
    """Return the room of a module (`text.corpus.stream` is in `text.corpus`); one at the root is a room of its own."""
    return module.rpartition(".")[0] or module


def find_violations(module: str, source: str) -> list[str]:
    """Return what `source`, as the module `module` (`text.corpus.stream`, `jobs.prepare_corpus`), may not import."""
    imports = list_imports(source, module)
    place = len(ROOMS) if module.startswith("jobs.") else ROOMS.index(room_of(module))
    found = []
    for other in sorted(SOURCES):
        name = f"{PACKAGE}.{other}"
        if name in imports and not other.startswith("jobs.") and ROOMS.index(room_of(other)) > place:
            found.append(f"{module} imports {name}, which comes after it")
    top_level = {imported.split(".")[0] for imported in imports}
    for library, allowed in RESTRICTED.items():
        if library in top_level and not any(
            module.startswith(user) if user.endswith(".") else module == user for user in allowed
        ):
            found.append(f"{module} imports {library}, which only {', '.join(allowed)} may")
    if module in EXPORTED:
        found += find_export_violations(module, source)
    return found


def find_export_violations(module: str, source: str) -> list[str]:
    """Return the imports that would not work in an exported folder, and what whoever trusts it would not expect."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("open", "eval", "exec", "compile", "__import__") or called.startswith(
                ("torch.load", "torch.hub")
            ):
                found.append(f"{module} calls {called}")
        if isinstance(node, ast.ImportFrom) and node.level:
            # transformers copies the files named in `from .name import x` along, but overlooks `from . import name`.
            if node.level > 1 or not node.module or f"model.domext.{node.module}" not in EXPORTED:
                found.append(f"{module} has the relative import '{ast.unparse(node)}'")
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        found += [f"{module} imports {name}" for name in names if name.split(".")[0] not in EXPORTED_MAY_IMPORT]
    return found


def find_own_ways(source: str) -> list[str]:
    """Return what a source does to files that only `storage` may: renames, locks, appends, maps."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
            found += sorted(names & {"fcntl", "mmap"})
        elif isinstance(node, ast.Call):
            name = name_of(node)
            values = [arg.value for arg in (*node.args, *(keyword.value for keyword in node.keywords)) if is_text(arg)]
            opens = name == "open" and any(value[:1] == "a" and len(value) < 4 for value in values)
            maps = name in ("memory_map", "memmap", "open_memmap")
            maps |= any(keyword.arg == "mmap_mode" for keyword in node.keywords)
            moves = name in ("rename", "replace", "link", "move") and is_move(ast.unparse(node.func), len(node.args))
            if opens or moves or maps:
                found.append(ast.unparse(node))
    return found


def is_move(called: str, num_args: int) -> bool:
    renames = called.endswith(".rename") and not called.startswith("os.") and "Path" not in called
    return called in ("os.rename", "os.replace", "os.link", "shutil.move") or (
        renames and num_args == 1 and "fields" not in called
    )


def is_text(node: ast.expr) -> TypeGuard[Any]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def module_of(path: Path) -> str:
    relative = path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
    return relative.removeprefix(f"{PACKAGE}.")


SOURCES = {
    module_of(path): path
    for folder in (PACKAGE, "jobs")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path.name != "__init__.py"
}


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {room_of(module) for module in SOURCES if not module.startswith("jobs.")}
    assert sorted(rooms) == sorted(ROOMS), "a new room needs its place in ROOMS; a removed one leaves it"


def test_no_room_has_a_circle_inside() -> None:
    imports = {module: list_imports(path.read_text(encoding="utf-8"), module) for module, path in SOURCES.items()}
    for room in ROOMS:
        waiting = {module: names for module, names in imports.items() if room_of(module) == room}
        while waiting:
            first = [
                module for module in waiting if not any(f"{PACKAGE}.{other}" in waiting[module] for other in waiting)
            ]
            assert first, f"{room}: {sorted(waiting)} import each other in a circle"
            waiting = {module: names for module, names in waiting.items() if module not in first}


def test_a_module_imports_only_what_it_may() -> None:
    for module, path in SOURCES.items():
        assert find_violations(module, path.read_text(encoding="utf-8")) == []


def test_one_door_to_what_outlives_a_process() -> None:
    found = {
        module: find_own_ways(path.read_text(encoding="utf-8"))
        for module, path in SOURCES.items()
        if module not in DOOR
    }
    assert {module: ways for module, ways in found.items() if ways} == {}


def test_what_users_give_becomes_a_place_at_the_door() -> None:
    imports = {module: list_imports(path.read_text(encoding="utf-8"), module) for module, path in SOURCES.items()}
    assert {module for module, names in imports.items() if f"{PACKAGE}.storage.Where" in names} == TAKE_WHAT_USERS_GIVE


def test_the_check_finds_another_way() -> None:
    for source in (
        "import fcntl",
        "os.replace(a, b)",
        "path.open('ab')",
        "open(path, mode='a')",
        "path.rename(target)",
        "np.load(path, mmap_mode='r')",
        "pa.memory_map(path)",
    ):
        assert find_own_ways(source), source
    for source in ("text.replace('a', 'b')", "path.open('rb')", "open(path)", "table.rename({'a': 1}, 2)"):
        assert not find_own_ways(source), source


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def list_imports_at_once(source: str) -> set[str]:
    """Return the modules that a package file imports when it is imported itself: not in functions, nor for types."""
    at_once = [statement for statement in ast.parse(source).body if not is_for_type_checkers(statement)]
    kept = [statement for statement in at_once if not isinstance(statement, ast.FunctionDef)]
    return {name.partition(".")[0] for name in list_imports(ast.unparse(ast.Module(kept, [])), "errors")}


def test_package_files_import_nothing() -> None:
    root = REPOSITORY / PACKAGE / "__init__.py"
    for path in (REPOSITORY / PACKAGE).rglob("__init__.py"):
        allowed = {"__future__", "typing"} if path == root else {"__future__"}
        assert list_imports_at_once(path.read_text(encoding="utf-8")) <= allowed, path


def test_the_check_finds_what_a_package_file_imports() -> None:
    in_try, in_function = "try:\n    import torch\nexcept ImportError: pass", "def f():\n    import torch"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from domext_ray.api import pretrain"
    at_once = [list_imports_at_once(code) for code in ("from domext_ray.api import x", in_try, in_function, for_types)]
    assert at_once == [{"domext_ray"}, {"torch"}, set(), {"typing"}]


def test_the_check_finds_a_forbidden_import_and_passes_an_allowed_one() -> None:
    for module, source, reason in (
        ("config.pretrain", "from domext_ray.text.vocabulary.tokenizer import load_tokenizer", "comes after"),
        ("config.pretrain", "def f():\n    from domext_ray.pretraining import pipeline", "comes after"),
        ("text.vocabulary.tokenizer", "from ...training import engine", "comes after"),
        ("training.objective", "importlib.import_module('domext_ray.export.model_folder')", "comes after"),
        ("pretraining.pipeline", "import ray.train", "imports ray"),
        ("training.checkpoint", "from deepspeed.utils import groups", "imports deepspeed"),
        ("jobs.export_hf", "import pydantic", "imports pydantic"),
        ("model.domext.modeling_domext", "import numpy as np", "imports numpy"),
        ("model.domext.modeling_domext", "from . import layers_domext", "relative import"),
        ("model.domext.modeling_domext", "from ..build import load_base", "comes after"),
        ("model.domext.layers_domext", "from domext_ray.errors import DomextError", "imports domext_ray.errors"),
        ("model.domext.layers_domext", "import socket", "imports socket"),
        ("model.domext.layers_domext", "eval('1')", "calls eval"),
        ("model.domext.layers_domext", "import torch\ntorch.load('x')", "calls torch.load"),
    ):
        assert any(reason in violation for violation in find_violations(module, source)), (module, source)
    for module, source in (
        ("training.pretrain", "import ray\nfrom domext_ray.text.corpus.stream import stream_batches"),
        ("text.corpus.shards", "import ray.data\nfrom ..vocabulary.tokenizer import load_tokenizer"),
        ("jobs.pretrain_af", "import ray\nfrom domext_ray.pretraining.pipeline import run"),
        ("model.domext.modeling_domext", "from .layers_domext import DomextLayer"),
    ):
        assert find_violations(module, source) == []


def test_the_controller_of_ray_train_is_without_torch() -> None:
    """It reads that file, and starts the ranks only then."""
    code = "import sys, domext_ray.training.entry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
