"""A full disk, slow storage, death in an evaluation: one sentence or none, and the same command goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny_base, write_corpus
from kills import describe_run, list_command, train
from object_store import serve_objects, use_objects

from domext_ray.storage import Place

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
EVALUATION, LAST = "domext_ray.training.measures:Measures.evaluate", 16
"""That of the start is the first one."""
FLUSH = "domext_ray.storage:flush_files"
"""Where all that must outlive a process reaches the disk."""
CASES: dict[str, list[dict[str, Any]]] = {
    **{f"full disk at write {n}": [{"point": FLUSH, "call": n, "action": "full_disk"}] for n in (1, 4, 9, 15, 22, 31)},
    "slow saves": [
        {"point": "domext_ray.training.checkpoint:_write_files", "call": n, "action": "sleep"} for n in (2, 3)
    ],
    **{
        f"{what} dies in the {name} evaluation": [{"point": EVALUATION, "call": n, "action": action, "delay": 0.01}]
        for what, action in (("driver", "kill_driver"), ("worker", "kill"))
        for name, n in (("first", 1), ("middle", 7), ("last", LAST))
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serve_objects() as address, pytest.MonkeyPatch.context() as patch:
        use_objects(address, patch)
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    make_tiny_base(made / "base")
    write_corpus(made / "corpus.txt", 900)
    return made


def run(folder: Path, name: str, address: str, faults: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Train until it ends well; return what it has left, and how often its command was given."""
    place = Place(folder / name / "runs" / "run")
    command = list_command(folder / "base", folder / "corpus.txt", place, 1)
    times = train(command, folder / name / "own", address, faults, random.Random(0), mistakes=True)
    return describe_run(place), times


@pytest.fixture(scope="module")
def undisturbed(folder: Path, server: str) -> dict[str, Any]:
    return run(folder, "alone", server, [])[0]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_one_sentence_and_the_same_command_goes_on(
    name: str, folder: Path, server: str, undisturbed: dict[str, Any]
) -> None:
    place = name.replace(" ", "-")
    found, times = run(folder, place, server, CASES[name])
    assert found == undisturbed and times <= 2
    log = (folder / place / "own" / "job-001.log").read_text(encoding="utf-8")
    said = log.partition("free space there")[0].rpartition("\n")[2]
    # A sign of life that cannot be written is a warning: a job goes on without it.
    is_told = said.startswith("error: " if times == 2 else "warning: ") and "(No space left on device)" in said
    assert is_told or not name.startswith("full")
    assert times == 1 + name.startswith("driver") or name.startswith("full")
