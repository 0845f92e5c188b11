"""What a benchmark writes: one file per machine and case, with every repetition and what the figures depend on.

All verbs of `jobs/benchmark.py` write records of one form into a folder; with --publish also into `PUBLISHED`, from
whose files `benchmark.py tables` makes the tables of the documents (benchmarks/tables.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch

from domext_ray.files import Kind, read_json
from domext_ray.options.places import hide_places
from domext_ray.runtime.machine import count_cpus
from domext_ray.storage import write_text

REPOSITORY = Path(__file__).parents[2]
PUBLISHED = REPOSITORY / ".github" / "benchmarks"
LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "peft", "domext_ray")
_UNRECORDED = {"run", "runs", "output", "publish", "rival_python", "cache_dir", "folder", "data", "text", "port"}
_UNRECORDED |= {"job_options"}
"""Options that say where things are, which no record tells."""
_EXPECTED: dict[str, Kind] = {
    "kind": str,
    "case": dict,
    "measured_at": str,
    "versions": dict,
    "machine.device": str,
    "machine.threads": int,
    "settings": dict,
    "results": list,
    "figures": dict,
}


@dataclass(frozen=True)
class Measured:
    """Every repetition of one thing that was measured.

    Args:
        name: what, such as one of two sides.
        unit: of the values.
        values: in the order in which they were measured.
    """

    name: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The middle repetition."""
        return statistics.median(self.values)

    def describe(self) -> dict[str, Any]:
        """Return what a record holds of it."""
        spread = {"median": self.median, "min": min(self.values), "max": max(self.values)}
        return {"name": self.name, "unit": self.unit, "values": list(self.values), **spread}


@dataclass(frozen=True)
class Record:
    """What one file holds, beside machine and versions.

    Args:
        kind: the verb.
        case: what distinguishes it from other records of its kind, in the order of the file's name.
        results: what was measured.
        figures: what follows from these, such as ratios.
    """

    kind: str
    case: Mapping[str, str | int]
    results: Sequence[Measured]
    figures: Mapping[str, Any] = field(default_factory=dict)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add where a verb writes."""
    parser.add_argument("--output", default="runs/benchmark", help="folder of the JSON files")
    parser.add_argument("--publish", action="store_true", help="write them into .github/benchmarks, too")


def write_records(options: argparse.Namespace, records: Sequence[Record], device: torch.device) -> None:
    """Write each record into a file of its own, and say where."""
    about = {
        "measured_at": describe_commit(),
        "versions": describe_versions(),
        "machine": describe_machine(device),
        "settings": {name: value for name, value in vars(options).items() if name not in _UNRECORDED},
    }
    for each in records:
        content = {
            "kind": each.kind,
            "case": hide_places(dict(each.case)),
            **hide_places(about),
            "results": [result.describe() for result in each.results],
            "figures": hide_places(dict(each.figures)),
        }
        for folder in (Path(options.output), *([PUBLISHED] if options.publish else [])):
            path = folder / name_record(content)
            write_json(path, content)
            print(f"written to {path}")


def name_record(content: Mapping[str, Any]) -> str:
    """Return a record's file name, from the machine and the case."""
    machine = content["machine"]
    threads = "" if machine.get("is_gpu") else f" {machine['threads']} threads"
    parts = [f"{machine['device']}{threads}", content["kind"], *map(str, content["case"].values())]
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", each.lower().replace(",", "")).strip("-") for each in parts) + ".json"


def read_records(folder: Path = PUBLISHED) -> list[dict[str, Any]]:
    """Read all records of a folder, in the order of their names.

    Raises:
        RunError: a file is damaged, or is no record.
    """
    remedy = "restore it from git, or measure again with --publish"
    return [read_json(path, remedy, _EXPECTED) for path in sorted(folder.glob("*.json"))]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on; nothing that names the machine itself."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else _name_processor()
    return {"device": name, "is_gpu": is_gpu, "threads": torch.get_num_threads(), "cpus": count_cpus()}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute, those that are here: a card needs no Ray."""
    here = {each.metadata["Name"] for each in distributions()}
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES if name in here}}


def describe_commit() -> str:
    """Return the commit of this checkout, with a plus sign where code differs from it; without git the version."""
    if shutil.which("git"):
        commit = _ask_git("rev-parse", "--short", "HEAD")
        if commit:
            return commit + ("+" if _ask_git("status", "--porcelain", "domext_ray", "jobs") else "")
    return version("domext_ray")


def _ask_git(*words: str) -> str:
    """Return what git says of this checkout; empty where it is none."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _name_processor() -> str:
    """Return the processor's name, family and model, for a virtual machine's name is often that of its maker alone.

    Where Linux does not say, its architecture.
    """
    info = Path("/proc/cpuinfo")
    said = dict(re.findall(r"^(.+?)\s*:\s*(.+?)\s*$", info.read_text(encoding="utf-8"), re.M)) if info.exists() else {}
    if not {"model name", "cpu family", "model"} <= said.keys():
        return said.get("model name", platform.machine())
    return f"{said['model name']} (family {said['cpu family']}, model {said['model']})"
