"""The index of all runs: one line per run of a folder, with a link to its page.

Enters: RUN.DIR. Leaves: RUN.DIR/index.html. A folder that is damaged, or of a run that is being written, has a line
that says so and stops nothing.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from domext_ray.errors import DomextError
from domext_ray.files import read_yaml
from domext_ray.options.places import hide_places
from domext_ray.report.origin import read_origin
from domext_ray.report.page import Markup, fill_page, format_html, format_paragraph, format_section
from domext_ray.report.summary import measure_run, read_summary
from domext_ray.report.tables import NONE
from domext_ray.runs.losses import MLM, find_losses
from domext_ray.runs.run_directory import read_run
from domext_ray.storage import Place, Where, write_text
from domext_ray.training.metrics import find_last_step, read_metrics

INDEX = "index.html"
_PAGES = ("report.html", "sweep.html")


@dataclass(frozen=True)
class _Line:
    """A run of the index; `started` sorts it, the newest first."""

    name: str
    started: str
    cells: tuple[str, ...]


def write_index(where: Where) -> Place:
    """Write the index of the runs in a folder.

    Args:
        where: the folder of all runs, RUN.DIR.

    Returns:
        Path of index.html.
    """
    folder = Place(where)
    lines = sorted(_list_runs(folder), key=lambda each: each.name)
    lines.sort(key=lambda each: each.started, reverse=True)
    header = ("run", "method", "base", "started (UTC)", "steps", "held-out loss", "general accuracy")
    others = [(_link(folder, each, page), page) for each, page in _list_others(folder, [each.name for each in lines])]
    page = fill_page(
        "Runs",
        [
            format_paragraph(
                f"{len(lines):,} pre-training run{'' if len(lines) == 1 else 's'}, the newest first; loss and general "
                "accuracy before and after.",
                "state",
            ),
            format_html(header, [(_link(folder, each.name), *each.cells) for each in lines], "runs") if lines else "",
            format_section("Fine-tuned models and sweeps", format_html(("", ""), others, "pairs") if others else ""),
        ],
    )
    write_text(folder / INDEX, page)
    return folder / INDEX


def _list_runs(folder: Place) -> Iterator[_Line]:
    """The pre-training runs: what has a record of how it was started."""
    for run in (folder / name for name in folder.list_names()):
        name = run.name
        try:
            if "origin" in read_run(run):
                yield _describe_run(run)
        except (DomextError, OSError, KeyError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, DomextError) else f"{type(error).__name__}: {error}"
            yield _Line(name, "", (*[NONE] * 5, f"cannot be read ({hide_places(reason)[:120]})"))


def _describe_run(run_dir: Place) -> _Line:
    about = read_origin(run_dir)
    options = read_yaml(run_dir / "config.yaml", "run its command again")
    step = find_last_step(run_dir / "metrics.jsonl")
    measured = _read_finished(run_dir, step)
    steps = f"{step:,}"
    if not measured:
        measured = measure_run(read_metrics(run_dir / "metrics.jsonl"))
        steps += f" of {options['train']['max_steps']:,}"
    names = find_losses(measured["domain"]) or MLM
    loss, general = measured["domain"][names.loss], measured["general"]["mlm_accuracy"]
    return _Line(
        run_dir.name,
        about["started"],
        (
            str(options["method"]["name"]),
            str(hide_places(options["base"])),
            about["started"][:16].replace("T", " "),
            steps,
            _show_loss(loss) + (f" ({names.title})" if names is not MLM else ""),
            _show_general(general),
        ),
    )


def _read_finished(run_dir: Place, step: int) -> dict[str, Any]:
    """The summary of a run that has ended at a step; empty while it trains, or goes on."""
    path = run_dir / "summary.json"
    summary = read_summary(path) if path.is_file() else {}
    return summary if summary and summary["train"]["steps"] == step else {}


def _show_loss(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    if before is None or after is None:
        return NONE if before is None else f"{before:.3f}"
    return f"{before:.3f} → {after:.3f}"


def _show_general(pair: dict[str, float | None]) -> str:
    before, after = pair["before"], pair["after"]
    if before is None or after is None:
        return NONE if before is None else f"{before:.1%}"
    return f"{before:.1%} → {after:.1%} ({100 * (after - before):+.1f} points)"


def _list_others(folder: Place, listed: Collection[str]) -> Iterator[tuple[str, str]]:
    """Folders with a page that are no pre-training runs, and the page's name."""
    for page in _PAGES:
        for run in (folder / name for name in folder.list_names()):
            if (run / page).is_file() and run.name not in listed:
                yield run.name, page


def _link(folder: Place, name: str, page: str = _PAGES[0]) -> str:
    if not (folder / name / page).is_file():
        return name
    return Markup(f'<a href="{quote(name)}/{page}">{html.escape(name)}</a>')
