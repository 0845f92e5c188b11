"""What a benchmark leaves: a table on the terminal, and a JSON file per machine and case, with every repetition.

Every verb reports records of one form. With --publish they go into `PUBLISHED`, too, and `benchmark.py tables` puts
their rows and figures into the documents: a table stands between `<!-- benchmark: step -->` and `<!-- end -->`, one
figure of a single record between `<!-- figure: predict ratio -->` and `<!-- end -->`. Conditions on a record's case may
follow, such as `layout=bert`.
"""

from __future__ import annotations

import argparse
import platform
import re
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from benchmarks.timing import DISTURBED_FRAC

from domext_ray.config.options.submitted import hide_places
from domext_ray.errors import RunError
from domext_ray.files import Kind, read_json, read_text
from domext_ray.runtime.machine import count_cpus
from domext_ray.storage import Place, write_json, write_text

REPOSITORY = Path(__file__).parents[2]
PUBLISHED = Path(".github", "benchmarks")
DOCUMENTS = ("README.md", ".github/RESULTS.md", ".github/guides/predict-and-serve.md")
COMMAND = "python jobs/benchmark.py tables"
LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "peft", "triton", "domext_ray")
_EXPECTED: dict[str, Kind] = {name: dict for name in ("case", "versions", "figures")}
_EXPECTED |= {"kind": str, "measured_at": str, "machine.device": str, "machine.threads": int, "rows": list}
_MARKED = re.compile(r"(<!-- (benchmark|figure): ([^>]+?) -->)(.*?)(<!-- end -->)", re.S)
Row = Mapping[str, str]
Content = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Record:
    """What one file holds, beside machine, versions, commit and command."""

    kind: str  # the verb
    case: Mapping[str, str | int]  # what tells it from others of its kind, in the order of the file's name
    rows: Sequence[Row]  # of the table: cells by the heading of their column
    unit: str  # of what was measured
    results: Mapping[str, Sequence[float]]  # every repetition, by what was measured
    figures: Mapping[str, Any] = field(default_factory=dict)  # what follows from these, such as ratios
    others_frac: float = 0.0  # share of the machine's processors that other programs took meanwhile

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took so much that the times are not this machine's own."""
        return self.others_frac > DISTURBED_FRAC


def report(options: argparse.Namespace, records: Sequence[Record], device: torch.device) -> None:
    """Print the records' tables, and write each record into a file of its own."""
    show_tables(records)
    write(options, records, device)


def show_tables(records: Sequence[Record]) -> None:
    """Print a table per kind of record, and say what disturbed them."""
    for kind in dict.fromkeys(record.kind for record in records):
        rows = [row for record in records if record.kind == kind for row in _describe_rows(record)]
        print(format_table(rows, is_padded=True))
    if any(record.is_disturbed for record in records):
        print("disturbed: other programs took a share of this machine's processors meanwhile")


def write(options: argparse.Namespace, records: Sequence[Record], device: torch.device) -> None:
    """Write each record into a file of its own, with command, commit, versions and machine."""
    about = {"measured_at": describe_commit(), "command": options.command, "versions": describe_versions()}
    about |= {"machine": describe_machine(device)}
    for record in records:
        content = {"kind": record.kind, "case": hide_places(dict(record.case)), **about}
        content |= {"others_frac": record.others_frac, "is_disturbed": record.is_disturbed}
        content |= {"rows": hide_places(_describe_rows(record))}
        content |= {
            "results": [{"name": name, "unit": record.unit, "values": [*of]} for name, of in record.results.items()]
        }
        content |= {"figures": hide_places(dict(record.figures))}
        for folder in (Path(options.output), *([REPOSITORY / PUBLISHED] if options.publish else [])):
            path = Place(folder / name_record(content))
            write_json(path, content)
            print(f"written to {path}", flush=True)


def _describe_rows(record: Record) -> list[Row]:
    noise = {"others took": f"{record.others_frac:.0%}"} if record.is_disturbed else {}
    return [{**row, **noise} for row in record.rows]


def describe_command(words: Sequence[str]) -> str:
    """Return the command of a record, without this machine's places."""
    return shlex.join(["python", "jobs/benchmark.py", *map(hide_places, words)])


def name_record(content: Mapping[str, Any]) -> str:
    """Return a record's file name, from the machine and the case."""
    machine = content["machine"]
    threads = "" if machine.get("is_gpu") else f" {machine['threads']} threads"
    parts = [f"{machine['device']}{threads}", content["kind"], *map(str, content["case"].values())]
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower().replace(",", "")).strip("-") for part in parts) + ".json"


def read_records(folder: Path) -> list[Content]:
    """Read all records of a folder, in the order of their names; a damaged one is a `RunError`."""
    remedy = "restore it from git, or measure again with --publish"
    return [read_json(Place(path), remedy, _EXPECTED) for path in sorted(folder.glob("*.json"))]


def show(value: float) -> str:
    """Return a figure with three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def show_spread(values: Sequence[float]) -> str:
    """Return the median of what was measured, and how far it spread."""
    spread = f" ({show(min(values))}–{show(max(values))})" if len(values) > 1 else ""
    return f"{show(statistics.median(values))}{spread}"


def show_ratio(figures: Mapping[str, float]) -> str:
    """Return a ratio of `compare`, and how far it spread."""
    least, most = figures["ratio_least"], figures["ratio_most"]
    return f"{figures['ratio']:.2f}" + ("" if least == most else f" ({least:.2f}–{most:.2f})")


def format_table(rows: Sequence[Row], *, is_padded: bool = False) -> str:
    """Return rows as a table; a column that only some rows have is kept, and is "–" in the others."""
    headings = list(dict.fromkeys(name for row in rows for name in row))
    cells = [headings, *([row.get(name) or "–" for name in headings] for row in rows)]
    is_wordy = [any(line[i][:1].isalpha() or line[i][:1] == "`" for line in cells[1:]) for i in range(len(headings))]
    if is_padded:
        widths = [max(len(line[i]) for line in cells) for i in range(len(headings))]
        forms = [f"{'<' if wordy else '>'}{width}" for width, wordy in zip(widths, is_wordy, strict=True)]
        return "\n".join("  ".join(map(format, line, forms)).rstrip() for line in cells)
    cells.insert(1, [":---" if wordy else "---:" for wordy in is_wordy])
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in cells)


# --- the documents ---


def run_tables(options: argparse.Namespace) -> None:
    """Write the documents' tables anew, or with --check refuse documents that are not what the files say."""
    changed = update_documents(is_check=options.check)
    if changed and options.check:
        raise RunError(f"{', '.join(changed)}: a table is not what {PUBLISHED} says; run {COMMAND}.")
    print(f"written: {', '.join(changed)}" if changed else f"every table is what {PUBLISHED} says")


def update_documents(folder: Path = REPOSITORY, *, is_check: bool = False) -> list[str]:
    """Write every marked table and figure anew, with `is_check` nothing; return the documents that change."""
    records, changed = read_records(folder / PUBLISHED), dict[str, str]()
    for name in DOCUMENTS:
        text = read_text(Place(folder / name), "restore it from git")
        new = _MARKED.sub(lambda found, name=name: _fill(found, records, name), text)  # type: ignore[misc]
        if new != text:
            changed[name] = new
    for name, new in {} if is_check else changed.items():
        write_text(Place(folder / name), new)
    return list(changed)


def _fill(found: re.Match[str], records: Sequence[Content], document: str) -> str:
    """Return what stands at a marker, the markers included."""
    begin, form, asked, _, end = found.groups()
    kind, *words = asked.split()
    conditions = dict(word.split("=", 1) for word in words if "=" in word)
    names, where = [word for word in words if "=" not in word], f"{document}: the marker '{asked}'"
    chosen = [
        record
        for record in records
        if record["kind"] == kind and conditions.items() <= _list_conditions(record, conditions).items()
    ]
    if not chosen:
        raise RunError(f"{where} asks for a record that {PUBLISHED} does not have; measure it with --publish.")
    if form == "benchmark":
        return f"{begin}\n{_make_tables(chosen)}\n{end}"
    if len(chosen) > 1:
        raise RunError(f"{where} fits {len(chosen)} records; add a condition that one of them meets, such as rows=8.")
    value: Any = chosen[0]["figures"]
    for part in names[0].split(".") if names else ():
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)):
        raise RunError(f"{where} names no figure; {COMMAND} takes: {', '.join(chosen[0]['figures'])}.")
    return f"{begin}{show(value)}{end}"


def _list_conditions(record: Content, names: Iterable[str]) -> dict[str, str]:
    """What a record says to a marker's conditions: its case, and cpu or cuda as its `device`."""
    said = {"device": "cuda" if record["machine"].get("is_gpu") else "cpu", **record["case"]}
    return {name: str(said.get(name)) for name in names}


def _make_tables(records: Sequence[Content]) -> str:
    """Return one table per machine, each with what it was measured with."""
    machines = dict[str, list[Content]]()
    for record in records:
        machine, count = record["machine"], record["machine"]["threads"]
        threads = "" if machine.get("is_gpu") else f", {count:,} thread{'' if count == 1 else 's'}"
        machines.setdefault(machine["device"] + threads, []).append(record)
    tables = []
    for name, own in machines.items():
        versions = ", ".join(dict.fromkeys(f"torch {record['versions'].get('torch', '–')}" for record in own))
        commits = ", ".join(dict.fromkeys(f"`{record['measured_at']}`" for record in own))
        own.sort(key=lambda each: [(isinstance(value, str), value) for value in each["case"].values()])
        table = format_table([row for record in own for row in record["rows"]])
        tables.append(f"{table}\n\n{name}; {versions}; measured at {commits}.")
    return "\n\n".join(tables)


# --- what figures depend on ---


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on; nothing that names the machine itself."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else _name_processor()
    return {"device": name, "is_gpu": is_gpu, "threads": torch.get_num_threads(), "cpus": count_cpus()}


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are here."""
    here = {distribution.metadata["Name"] for distribution in distributions()}  # a card needs no Ray
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES if name in here}}


def describe_commit(folder: Path = REPOSITORY) -> str:
    """Return a checkout's commit, with a plus sign where code differs; without git the version, or another's folder."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if shutil.which("git") and (commit := ask("rev-parse", "--short", "HEAD")):
        return commit + ("+" if ask("status", "--porcelain", "domext_ray", "jobs") else "")
    return version("domext_ray") if folder == REPOSITORY else folder.name


def _name_processor() -> str:
    """The processor's name, family and model, for a virtual machine's name is often that of its maker alone."""
    info = Path("/proc/cpuinfo")
    said = dict(re.findall(r"^(.+?)\s*:\s*(.+?)\s*$", info.read_text(encoding="utf-8"), re.M)) if info.exists() else {}
    if not {"model name", "cpu family", "model"} <= said.keys():
        return said.get("model name", platform.machine())
    return f"{said['model name']} (family {said['cpu family']}, model {said['model']})"
