"""Files of `.github/benchmarks` -> the tables and figures of speed in the documents, for `jobs/benchmark.py tables`.

A document says where: a table of the records of one verb stands between `<!-- benchmark: step -->` and `<!-- end -->`,
and one figure of a single record between `<!-- figure: predict ratio -->` and `<!-- end -->`. Conditions on a record's
case may follow, such as `layout=bert`. A verb is a row in `TABLES`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import REPOSITORY, read_records

from domext_ray.errors import RunError
from domext_ray.files import read_text
from domext_ray.storage import write_text

DOCUMENTS = ("README.md", ".github/RESULTS.md", "jobs/README.md")
COMMAND = "python jobs/benchmark.py tables"
_MARKED = re.compile(r"(<!-- (benchmark|figure): ([^>]+?) -->)(.*?)(<!-- end -->)", re.S)
Row = Mapping[str, str]
Content = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """How the records of one verb are shown.

    Args:
        rows: a record's lines: cells by the heading of their column, which the first one's order gives. A column that
            only some lines have is kept, and is "–" in the others.
        wordy: headings whose cells are words; the others are figures.
    """

    rows: Callable[[Content], Iterator[Row]]
    wordy: tuple[str, ...] = ("",)


def update_documents(folder: Path = REPOSITORY, *, is_check: bool = False) -> list[str]:
    """Write every marked table and figure anew.

    Args:
        folder: the repository, with its documents and `.github/benchmarks`.
        is_check: write nothing.

    Returns:
        The documents that were, or with `is_check` would be, changed.

    Raises:
        RunError: a marker asks for what no record has, or a record is damaged.
    """
    records, changed = read_records(folder / ".github" / "benchmarks"), dict[str, str]()
    for name in DOCUMENTS:
        text = read_text(folder / name, "restore it from git")
        new = _MARKED.sub(lambda found, name=name: _fill(found, records, name), text)  # type: ignore[misc]
        if new != text:
            changed[name] = new
    for name, new in {} if is_check else changed.items():
        write_text(folder / name, new)
    return list(changed)


def _fill(found: re.Match[str], records: Sequence[Content], document: str) -> str:
    """Return what stands at a marker, the markers included."""
    begin, form, asked, _, end = found.groups()
    kind, *words = asked.split()
    conditions = dict(word.split("=", 1) for word in words if "=" in word)
    chosen = [each for each in records if each["kind"] == kind and _meets(each["case"], conditions)]
    where = f"{document}: the marker '{asked}'"
    if kind not in TABLES or not chosen:
        raise RunError(f"{where} asks for a record that .github/benchmarks does not have; measure it with --publish.")
    if form == "benchmark":
        return f"{begin}\n{make_table(chosen)}\n{end}"
    if len(chosen) > 1:
        raise RunError(f"{where} fits {len(chosen)} records; add a condition that one of them meets, such as rows=8.")
    return f"{begin}{_find_figure(chosen[0], [each for each in words if '=' not in each], where)}{end}"


def _meets(case: Mapping[str, Any], conditions: Mapping[str, str]) -> bool:
    return all(str(case.get(name)) == value for name, value in conditions.items())


def _find_figure(record: Content, names: Sequence[str], where: str) -> str:
    value: Any = record["figures"]
    for part in names[0].split(".") if names else ():
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)):
        raise RunError(f"{where} names no figure; {COMMAND} takes: {', '.join(record['figures'])}.")
    return show(value)


def make_table(records: Sequence[Content]) -> str:
    """Return the tables of one verb's records, one per machine, each with what it was measured with."""
    table, machines = TABLES[records[0]["kind"]], dict[str, list[Content]]()
    for each in records:
        machines.setdefault(_describe_machine(each), []).append(each)
    return "\n\n".join(f"{_format(table, own)}\n\n{_describe(machine, own)}" for machine, own in machines.items())


def _format(table: Table, records: Sequence[Content]) -> str:
    rows = [row for each in sorted(records, key=_order) for row in table.rows(each)]
    headings = list(dict.fromkeys(name for row in rows for name in row))
    rules = [":---" if name in table.wordy else "---:" for name in headings]
    lines = [headings, rules, *([row.get(name) or "–" for name in headings] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _order(record: Content) -> list[Any]:
    """Cases in the order of their values, numbers before words."""
    return [(isinstance(each, str), each) for each in record["case"].values()]


def _describe_machine(record: Content) -> str:
    machine = record["machine"]
    return machine["device"] if machine.get("is_gpu") else f"{machine['device']}, {count(machine['threads'], 'thread')}"


def _describe(machine: str, records: Sequence[Content]) -> str:
    """Return the line below a table: machine, versions and commits."""
    versions = list(dict.fromkeys(f"torch {each['versions'].get('torch', '–')}" for each in records))
    commits = list(dict.fromkeys(f"`{each['measured_at']}`" for each in records))
    return f"{machine}; {', '.join(versions)}; measured at {', '.join(commits)}."


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show(value: float) -> str:
    """Return a figure with three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _result(record: Content, name: str) -> Content:
    (found,) = (each for each in record["results"] if each["name"] == name)
    return dict(found)


def show_spread(record: Content, name: str) -> str:
    """Return the median of what was measured, and how far it spread."""
    found = _result(record, name)
    spread = f" ({show(found['min'])}–{show(found['max'])})" if len(found["values"]) > 1 else ""
    return f"{show(found['median'])}{spread}"


SMALLEST_SHARE = 0.005
"""Of a step, that a table of its operations names."""
METHODS = {"af": "AF Adapter", "exbert": "exBERT", "bottleneck": "bottlenecks", "lora": "LoRA", "full": "full training"}


def _name_method(case: Content) -> str:
    """Return a method with its sizes, and with its layout and process where these are not BERT's and torch's own."""
    layout = "" if case["layout"] == "bert" else f", {case['layout']}, {case['layers']} layers"
    return METHODS[case["method"]] + (f" ({case['sizes']})" if case["sizes"] else "") + layout + _name_process(case)


def _name_process(case: Content) -> str:
    return ", as a worker" if case.get("process") == "worker" else ""


def _rows_of_step(record: Content) -> Iterator[Row]:
    case, figures = record["case"], record["figures"]
    yield {
        "": _name_method(case),
        "precision": case["precision"],
        "tokens per row": f"{case['length']:,}",
        "rows": f"{case['rows']:,}",
        "ours, s": show_spread(record, "domext_ray"),
        "other, s": show_spread(record, "rival"),
        "ratio": f"{figures['ratio']:.2f}",
        "tokens/s": show(figures["tokens_per_second"]),
        **({"of attainable": f"{figures['attained_frac']:.0%}"} if "attained_frac" in figures else {}),
    }


def _rows_of_profile(record: Content) -> Iterator[Row]:
    case = record["case"]
    yield {
        "": _name_method(case),
        "precision": case["precision"],
        "tokens per row": f"{case['length']:,}",
        **{kind: f"{share:.0%}" for kind, share in record["figures"]["shares"].items() if share >= SMALLEST_SHARE},
    }


def _rows_of_methods(record: Content) -> Iterator[Row]:
    case = record["case"]
    for each, share in zip(record["results"], record["figures"]["shares"].values(), strict=True):
        yield {
            "": each["name"] + _name_process(case),
            "precision": case["precision"],
            "tokens per row": f"{case['length']:,}",
            "s per step": show_spread(record, each["name"]),
            "of continued pre-training": f"{share:.2f}",
        }


def _rows_of_gpu(record: Content) -> Iterator[Row]:
    case, found = record["case"], record["figures"]
    for each in found["sides"]:
        yield {
            "": f"{each['name']}, {case['base']}" + (", compiled" if "compiled" in case else ""),
            "precision": case["precision"],
            "tokens per row": f"{case['length']:,}",
            "rows": f"{case['rows']:,}",
            "tokens/s": show(each["tokens_per_second"]),
            "MFU": f"{each['mfu']:.1%}",
            "peak, GiB": f"{each['peak_bytes'] / 2**30:.2f}",
            "no kernel runs": f"{each['gap_frac']:.1%}",
        }


def _rows_of_keep(record: Content) -> Iterator[Row]:
    case = record["case"]
    yield {
        "precision": case["precision"] + _name_process(case),
        "tokens per row": f"{case['length']:,}",
        "rows": f"{case['rows']:,}",
        "keeping, s": show_spread(record, "keeping"),
        "without, s": show_spread(record, "without"),
        "ratio": f"{record['figures']['ratio']:.2f}",
    }


def _rows_of_finetune(record: Content) -> Iterator[Row]:
    ratios = iter(record["figures"]["ratios"].values())
    for each in record["results"]:
        is_ours = each["name"] == "domext_ray"
        yield {
            "": f"{each['name']}, {record['case']['task']}, {record['case']['precision']}",
            "s per run": show_spread(record, each["name"]),
            "of ours": "" if is_ours else f"{next(ratios):.2f}",
        }


def _rows_of_overhead(record: Content) -> Iterator[Row]:
    yield {
        "job": f"`{record['case']['job']}`" if record["case"]["job"].startswith("-") else record["case"]["job"],
        "job, s per step": show_spread(record, "job"),
        "the loop computes": "as a worker" if record["case"].get("loop") == "worker" else "as torch comes",
        "bare loop, s per step": show_spread(record, "bare loop"),
        "ratio": f"{record['figures']['ratio']:.3f}",
    }


def _rows_of_e2e(record: Content) -> Iterator[Row]:
    for each in record["figures"]["runs"]:
        reached = each["seconds_to_target"]
        yield {
            "": f"{each['side']}, rate {each['rate']:g}",
            "start, s": show(each["start_seconds"]),
            "tokens/s": show(each["tokens_per_second"]),
            "bits per character": f"{each['curve'][-1]['bits_per_character']:.3f}",
            f"minutes to {record['figures']['target']:.3f}": "–" if reached is None else show(reached / 60),
        }


def _rows_of_predict(record: Content) -> Iterator[Row]:
    ours = record["results"][0]["median"]
    for each in record["results"]:
        ratio = "" if each is record["results"][0] else f"{ours / each['median']:.2f}"
        yield {
            "": each["name"],
            "texts": f"{record['case']['rows']:,}",
            "rows/s": show(each["median"]),
            "ours / other": ratio,
        }


def _rows_of_serve(record: Content) -> Iterator[Row]:
    for each in record["results"]:
        turns = record["figures"]["traffic"][each["name"]]
        refused = sum(number for turn in turns for status, number in turn["statuses"].items() if status != "200")
        yield {
            "": SERVED.get(each["name"], each["name"]),
            "requests/s": ", ".join(show(value) for value in each["values"]),
            "p50, ms": show(statistics.median(turn["p50_ms"] for turn in turns)),
            "p99, ms": show(statistics.median(turn["p99_ms"] for turn in turns)),
            "answers": f"{sum(turn['answers'] for turn in turns):,}",
            "refused": f"{refused:,}",
            "wrong": f"{sum(turn['wrong'] for turn in turns):,}",
        }


def _rows_of_memory(record: Content) -> Iterator[Row]:
    case = record["case"]
    yield {
        "": f"{METHODS[case['method']]} ({case['sizes']}), {case['layers']} layers",
        "precision": case["precision"],
        "tokens per row": f"{case['length']:,}",
        "rows": f"{case['rows']:,}",
        "peak, GiB": f"{_result(record, case['method'])['median'] / 2**30:.2f}",
        "full training, GiB": f"{_result(record, 'full')['median'] / 2**30:.2f}",
        "ratio": f"{record['figures']['ratio']:.2f}",
    }


def _rows_of_plan(record: Content) -> Iterator[Row]:
    case = record["case"]
    for each, planned in zip(record["results"], record["figures"]["cases"], strict=True):
        yield {
            "": METHODS[planned["method"]],
            "tokens per row": f"{case['length']:,}",
            "rows": f"{case['rows']:,}",
            "ZeRO": str(planned["stage"]),
            "planned, GiB": f"{planned['planned'] / 2**30:.2f}",
            "measured, GiB": f"{each['median'] / 2**30:.2f}",
            "off by": f"{planned['off_frac']:+.0%}",
        }


SERVED = {
    "mixed": "rows of all adapters in one pass",
    "rival": "one adapter per batch",
    "10 x clients": "10 times the clients",
    "after that": "as many as before, after that",
    "16 texts each": "requests of 16 texts, each of its own adapter",
    "replica killed": "two replicas, one killed",
}

TABLES = {
    "step": Table(_rows_of_step, ("", "precision")),
    "profile": Table(_rows_of_profile, ("", "precision")),
    "methods": Table(_rows_of_methods, ("", "precision")),
    "gpu": Table(_rows_of_gpu, ("", "precision")),
    "keep": Table(_rows_of_keep, ("precision",)),
    "finetune": Table(_rows_of_finetune),
    "overhead": Table(_rows_of_overhead, ("job", "the loop computes")),
    "e2e": Table(_rows_of_e2e),
    "predict": Table(_rows_of_predict),
    "serve": Table(_rows_of_serve),
    "memory": Table(_rows_of_memory, ("", "precision")),
    "plan": Table(_rows_of_plan),
}
"""By verb."""


def run_tables(options: argparse.Namespace) -> None:
    """Write the tables anew, or say which are not what the files have.

    Raises:
        RunError: with --check, a document is stale.
    """
    changed = update_documents(is_check=options.check)
    if changed and options.check:
        raise RunError(f"{', '.join(changed)}: a table is not what .github/benchmarks says; run {COMMAND}.")
    print(f"written: {', '.join(changed)}" if changed else "every table is what .github/benchmarks says")
