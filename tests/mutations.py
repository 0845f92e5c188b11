"""Breaks the package in the ways of a table, one at a time, and says which a test notices.

    python tests/mutations.py [NUMBER ...] [--jobs 2]

Each runs in a copy of the working tree. The table, mutations.yaml, says what is broken, and which test must fail: one
that passes guards nothing there. README.md has the list with its results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
COPIED = ("domext_ray", "jobs", "tests", "cluster", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """A way to break the package: in `file`, `old` becomes `new`; `test`, what must fail, is what pytest is given."""

    about: str
    file: str
    old: str
    new: str
    test: str


def read_mutations() -> list[Mutation]:
    """Return the table, in the order of its numbers."""
    entries = yaml.safe_load((REPOSITORY / "tests" / "mutations.yaml").read_text(encoding="utf-8"))
    places = [(f"domext_ray/{entry.pop('file')}", f"tests/{entry.pop('test')}") for entry in entries]
    return [Mutation(file=file, test=test, **entry) for (file, test), entry in zip(places, entries, strict=True)]


def run(number: int, mutation: Mutation) -> str:
    """Break a copy of the working tree, run the test there; return a line of the table."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as place:
        copy = Path(place) / "tree"
        copy.mkdir()
        for name in COPIED:
            (shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy)(REPOSITORY / name, copy / name)
        text = (copy / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.file} has not once {mutation.old!r}"
        (copy / mutation.file).write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", mutation.test, "-n", "0", "-x", "-q", "--durations=0", "-m", ""]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = next((line.split(" - ")[0] for line in ended.stdout.splitlines() if line.startswith("FAILED")), "")
    result = {0: "**survives**", 1: "caught"}.get(ended.returncode, f"pytest ended with {ended.returncode}")
    seconds = time.monotonic() - started
    place = (failed or mutation.test).split("tests/")[-1]
    return f"| {number} | {mutation.about} | {result} | `{place}` | {seconds:.0f} s |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="of the table; none: all")
    parser.add_argument("--jobs", type=int, default=1, help="at a time")
    asked, mutations = parser.parse_args(), read_mutations()
    chosen = asked.numbers or range(1, len(mutations) + 1)
    with ThreadPoolExecutor(asked.jobs) as pool:
        for line in pool.map(lambda number: run(number, mutations[number - 1]), chosen):
            print(line, flush=True)
