"""The import order of the rooms, and the modules that only certain rooms may import, read from the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "domext_ray"

ORDER = (
    "stopping",
    "errors",
    "files",
    "status_line",
    "quiet",
    "places",
    "events",
    "yaml_file",
    "option_list",
    "option_values",
    "config",
    "job_config",
    "finetune_config",
    "search_config",
    "export_folder",
    "cluster",
    "command_line",
    "run_directory",
    "corpus.package_docs",
    "corpus.draws",
    "corpus.sources",
    "corpus.dropped",
    "corpus.documents",
    "corpus.check",
    "corpus.work_folder",
    "corpus.split",
    "corpus.tasks",
    "corpus.vocab",
    "corpus.rows",
    "corpus.manifest",
    "corpus.pairs",
    "corpus.shards",
    "corpus.estimate",
    "corpus.stream",
    "corpus.word_counts",
    "corpus.base_vocabulary",
    "corpus.new_words",
    "corpus.vocab_statistics",
    "corpus.extension",
    "labelled.examples",
    "labelled.scores",
    "labelled.answer_metrics",
    "labelled.metrics",
    "labelled.files",
    "labelled.json_places",
    "labelled.set_families",
    "labelled.set_description",
    "labelled.read_records",
    "labelled.read_tagged",
    "labelled.read_spans",
    "labelled.read_marked",
    "labelled.read_texts",
    "labelled.read_questions",
    "labelled.read_choices",
    "labelled.read_terms",
    "labelled.readers",
    "labelled.sets",
    "labelled.code_names",
    "labelled.code_parameters",
    "labelled.code_sentences",
    "labelled.code_mentions",
    "labelled.code_entities",
    "labelled.loading",
    "model.configuration_domext",
    "model.layers_domext",
    "model.modeling_domext",
    "model.heads_domext",
    "model.base",
    "model.lora",
    "model.counts",
    "model.budget",
    "model.graft",
    "training.objective",
    "training.phases",
    "training.metrics",
    "training.optimizer",
    "training.engine",
    "training.checkpoint",
    "training.evaluate",
    "training.start",
    "training.worker",
    "training.rate",
    "training.pretrain",
    "forecast",
    "summary",
    "card",
    "export",
    "export_adapters",
    "bank",
    "serving",
    "report",
    "comparison",
    "downstream.tasks",
    "downstream.pieces",
    "downstream.windows",
    "downstream.entity_dictionary",
    "downstream.task_tokens",
    "downstream.task_texts",
    "downstream.task_relations",
    "downstream.task_spans",
    "downstream.task_questions",
    "downstream.task_choices",
    "downstream.stages",
    "downstream.task_extraction",
    "downstream.task_normalization",
    "downstream.task_list",
    "downstream.rules",
    "downstream.start_head",
    "downstream.start_model",
    "downstream.text_embedding",
    "downstream.batches",
    "downstream.feature_model",
    "downstream.feature_store",
    "downstream.features",
    "downstream.training",
    "downstream.task_export",
    "downstream.finetuned",
    "downstream.finetune_grid",
    "downstream.trainings",
    "downstream.finetune_comparison",
    "downstream.finetune_output",
    "downstream.finetune",
    "downstream.ablation",
    "downstream.ablation_sweeps",
    "downstream.ablation_report",
    "downstream.mask_set",
    "downstream.forgetting",
    "downstream.forgetting_report",
    "pipeline",
    "search.space",
    "search.trial",
    "search.trainable",
    "search.results",
    "search.searcher",
    "search.sweep_report",
    "search.sweep_comparison",
    "search.sweep",
    "tradeoff",
    "study",
)
"""Every module of the package; one may import only those before it. Jobs come last and may import all."""

EXPORTED = ("model.configuration_domext", "model.layers_domext", "model.modeling_domext", "model.heads_domext")
"""Copied into exports as they are, so they may import only torch, transformers, the standard library and each other."""

RESTRICTED = {
    "ray": (
        "cluster",
        "corpus.",
        "training.pretrain",
        "downstream.finetune",
        "downstream.features",
        "search.searcher",
        "search.trainable",
        "search.sweep",
        "jobs.",
    ),
    "deepspeed": ("training.engine",),
    "draccus": ("option_values",),
}
"""A third-party package -> the modules (or, ending in a dot, groups of modules) that may import it."""


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return names


def find_violations(module: str, source: str) -> list[str]:
    """Return what `source`, as the module `module` (`corpus.vocab`, `jobs.prepare_corpus`), may not import."""
    imports = list_imports(source, module)
    is_job = module.startswith("jobs.")
    place = len(ORDER) if is_job else ORDER.index(module)
    found = []
    for later in ORDER[place:]:
        name = f"{PACKAGE}.{later}"
        if later != module and any(each == name or each.startswith(f"{name}.") for each in imports):
            found.append(f"{module} imports {name}, which comes after it")
    top_level = {each.split(".")[0] for each in imports}
    for library, allowed in RESTRICTED.items():
        if library in top_level and not any(
            module.startswith(each) if each.endswith(".") else module == each for each in allowed
        ):
            found.append(f"{module} imports {library}, which only {', '.join(allowed)} may")
    if module in EXPORTED:
        found += find_export_violations(module, source)
    return found


def find_export_violations(module: str, source: str) -> list[str]:
    """Return the imports that would not work, or would not be copied along, in an exported folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            # transformers copies the files named in `from .name import x` along, but overlooks `from . import name`.
            if node.level > 1 or not node.module or f"model.{node.module}" not in EXPORTED:
                found.append(f"{module} has the relative import '{ast.unparse(node)}'")
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        allowed = {"torch", "transformers", *sys.stdlib_module_names}
        found += [f"{module} imports {each}" for each in names if each.split(".")[0] not in allowed]
    return found


def module_of(path: Path) -> str:
    relative = path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
    return relative.removeprefix(f"{PACKAGE}.")


SOURCES = {
    module_of(path): path
    for folder in (PACKAGE, "jobs")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
    if path.name != "__init__.py"
}


def test_every_module_has_a_place_in_the_order() -> None:
    modules = [each for each in SOURCES if not each.startswith("jobs.")]
    assert sorted(modules) == sorted(ORDER), "a new module needs its place in ORDER; a removed one leaves it"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_a_module_imports_only_what_it_may(module: str) -> None:
    if not module.startswith("jobs."):
        assert module in ORDER
    assert find_violations(module, SOURCES[module].read_text(encoding="utf-8")) == []


def test_package_files_import_nothing() -> None:
    for path in (REPOSITORY / PACKAGE).rglob("__init__.py"):
        assert list_imports(path.read_text(encoding="utf-8"), "errors") <= {"__future__", "__future__.annotations"}, (
            path
        )


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("config", "from domext_ray.corpus.vocab import load_tokenizer", "comes after"),
        ("config", "def f():\n    from domext_ray import pipeline", "comes after"),
        ("corpus.sources", "from .vocab import load_tokenizer", "comes after"),
        ("corpus.vocab", "from ..training import engine", "comes after"),
        ("training.objective", "import importlib\nimportlib.import_module('domext_ray.export')", "comes after"),
        ("pipeline", "import ray.train", "imports ray"),
        ("training.checkpoint", "from deepspeed.utils import groups", "imports deepspeed"),
        ("jobs.export_hf", "import draccus", "imports draccus"),
        ("model.modeling_domext", "import numpy as np", "imports numpy"),
        ("model.modeling_domext", "from . import layers_domext", "relative import"),
        ("model.modeling_domext", "from .graft import load_base", "comes after"),
        ("model.layers_domext", "from domext_ray.errors import DomextError", "imports domext_ray.errors"),
    ],
)
def test_the_check_finds_a_forbidden_import(module: str, source: str, reason: str) -> None:
    assert any(reason in each for each in find_violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("training.pretrain", "import ray\nfrom domext_ray.corpus.stream import stream_batches"),
        ("corpus.shards", "import ray.data\nfrom .vocab import load_tokenizer"),
        ("jobs.pretrain_af", "import ray\nfrom domext_ray.pipeline import run"),
        ("model.modeling_domext", "import torch\nfrom transformers.activations import ACT2FN"),
        ("model.modeling_domext", "from .layers_domext import DomextLayer"),
    ],
)
def test_the_check_passes_an_allowed_import(module: str, source: str) -> None:
    assert find_violations(module, source) == []
