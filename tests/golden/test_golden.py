"""Golden files: what must not change by a refactoring, made and compared through the command line. See make.py."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter
import cases
import made_inputs
import pytest
import torch
from conftest import REPOSITORY
from make import MAKING

GOLDEN = Path(__file__).parent
_PINNED = (REPOSITORY / "cluster" / "constraints.txt").read_text(encoding="utf-8")
IS_PINNED = f"torch=={torch.__version__.split('+')[0]}\n" in _PINNED
RTOL, ATOL = (1e-5, 1e-6) if IS_PINNED else (1e-4, 1e-5)
"""Of losses; what is computed with trained weights, or is a mean of many of them, may differ ten times as much."""


@pytest.fixture(scope="module", params=["quick", pytest.param("all", marks=pytest.mark.slow)])
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether a test makes what the default tier compares, or every entry of its file."""
    return bool(request.param == "quick")


@pytest.fixture(scope="module")
def folder(quick: bool, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Iterator[Path]:
    """All inputs; commands name them relative to it."""
    folder, before = tmp_path_factory.mktemp("golden"), Path.cwd()
    made_inputs.make_inputs(folder)
    os.chdir(folder)
    yield folder
    os.chdir(before)


def check(name: str, found: dict[str, Any], rtol: float = 0.0, atol: float = 0.0, *, quick: bool = False) -> None:
    """Compare with the golden file, or write it; quickly with some of its entries."""
    path = GOLDEN / f"{name}.json"
    found = json.loads(json.dumps(found))
    if os.environ.get(MAKING):
        kept = json.loads(path.read_text(encoding="utf-8")) if quick else {}
        path.write_text(dump({**kept, **found}), encoding="utf-8")
    expected = json.loads(path.read_text(encoding="utf-8"))
    differences = list(compare({k: v for k, v in expected.items() if not quick or k in found}, found, rtol, atol))
    assert not differences, f"{path.name} differs in {len(differences)} places:\n" + "\n".join(differences[:40])


def dump(value: Any, indent: str = "") -> str:
    """Write JSON with a line per entry of a case; floats with the digits that are compared."""
    if isinstance(value, dict) and len(indent) < 6:
        inner = f"{indent}  "
        lines = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {dump(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + ("" if indent else "\n")
    return json.dumps(_round(value), ensure_ascii=False)


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round(item) for item in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def compare(old: Any, new: Any, rtol: float, atol: float, place: str = "") -> Iterator[str]:
    """Yield where two records differ; floats may by the tolerances, all else must not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(name for name in new if name not in old)]:
            if key in old and key in new:
                yield from compare(old[key], new[key], rtol, atol, f"{place} > {key}" if place else key)
            else:
                yield f"{place} > {key}: {'is gone' if key in old else 'is new'}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (first, second) in enumerate(zip(old, new, strict=True)):
            yield from compare(first, second, rtol, atol, f"{place} [{i}]")
    elif isinstance(old, float) and isinstance(new, (int, float)) and not isinstance(new, bool):
        if not math.isclose(old, new, rel_tol=rtol, abs_tol=atol):
            yield f"{place}: {old!r} -> {new!r}"
    elif old != new or type(old) is not type(new):
        yield f"{place}: {old!r} -> {new!r}"


def test_rows(folder: Path, quick: bool) -> None:
    check("rows", cases.make_rows(folder, quick=quick), quick=quick)


def test_batches(folder: Path, quick: bool) -> None:
    check("batches", cases.make_batches(folder, quick=quick), quick=quick)


@pytest.fixture(scope="module")
def losses(folder: Path, quick: bool) -> dict[str, Any]:
    return cases.make_losses(folder, quick=quick)


def test_losses(losses: dict[str, Any], quick: bool) -> None:
    check("losses", losses, RTOL, ATOL, quick=quick)


def test_exports(folder: Path, quick: bool, losses: dict[str, Any], own_modules: None) -> None:
    check("exports", cases.make_exports(folder, quick=quick), 10 * RTOL, 10 * ATOL, quick=quick)


def test_encoded(folder: Path, quick: bool) -> None:
    check("encoded", cases.make_encoded(folder, quick=quick), quick=quick)


@pytest.mark.slow
@pytest.mark.parametrize("quick", ["all"], indirect=True)
def test_tasks(folder: Path) -> None:
    check("tasks", cases.make_tasks(folder), 100 * RTOL, 100 * ATOL)


@pytest.fixture(scope="module")
def measures(folder: Path, losses: dict[str, Any]) -> dict[str, Any]:
    """What trained models measure; their bank stays for the mistakes."""
    return cases.make_measures(folder)


def test_measures(measures: dict[str, Any]) -> None:
    check("measures", measures, 100 * RTOL, 100 * ATOL)


def test_mistakes(folder: Path, measures: dict[str, Any]) -> None:
    check("mistakes", cases.make_mistakes(folder))


@pytest.mark.slow
@pytest.mark.parametrize("quick", ["all"], indirect=True)
@pytest.mark.parametrize("name", cases.IN_CLUSTER)
def test_a_job_on_ray_train_has_the_same_losses(name: str, folder: Path, losses: dict[str, Any]) -> None:
    """As the in-process worker, whose losses the golden file has."""
    run = folder / "trained" / f"on-ray-{cases.name_run(name)}"
    ended = adapter.call(f"{cases.write_loss_command(name)} --scale.cpus_per_worker 1 --run.name {run.name}")
    assert ended.code == 0, ended.err
    expected = json.loads((GOLDEN / "losses.json").read_text(encoding="utf-8"))[name]
    del expected["command"]
    assert not [*compare(expected, adapter.read_figures(run), 10 * RTOL, 10 * ATOL)]
