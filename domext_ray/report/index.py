"""The index of all runs: one line per run of a folder, with a link to its page.

Enters: RUN.DIR. Leaves: RUN.DIR/index.html. A folder that is damaged, or of a run that is being written, has a line
that says so and stops nothing.
"""

from __future__ import annotations

from urllib.parse import quote

from markupsafe import Markup

from domext_ray.errors import DomextError
from domext_ray.files import read_yaml
from domext_ray.options.places import hide_places
from domext_ray.report.figures import list_figures, measure_run
from domext_ray.report.origin import read_origin
from domext_ray.report.page import fill_page, format_html, format_paragraph, format_section
from domext_ray.report.summary import read_summary
from domext_ray.report.tables import NONE
from domext_ray.runs.losses import MLM, find_losses
from domext_ray.runs.run_directory import read_run
from domext_ray.storage import Place, Where, write_text
from domext_ray.training.metrics import find_last_step, read_metrics

INDEX = "index.html"
_HEADER = ("run", "started (UTC)", "method", "base", "steps", "held-out loss", "general accuracy")
_PAGES = ("report.html", "sweep.html")


def write_index(where: Where) -> Place:
    """Write the index of the runs in a folder, RUN.DIR, and return its place."""
    folder = Place(where)
    names = folder.list_names()
    runs = {name: cells for name in names if (cells := _list_cells(folder / name))}
    newest = sorted(runs, key=lambda name: runs[name][0].removeprefix(NONE), reverse=True)
    rows = [(_link(folder, name, _PAGES[0]), *runs[name]) for name in newest]
    pages = [(name, page) for page in _PAGES for name in names if name not in runs and (folder / name / page).is_file()]
    state = (
        f"{len(runs):,} pre-training run{'' if len(runs) == 1 else 's'}, the newest first; loss and general accuracy "
        "before and after."
    )
    others = format_html((), [(_link(folder, *each), each[1]) for each in pages], "pairs")
    parts = [format_paragraph(state, "state"), format_html(_HEADER, rows, "runs")]
    write_text(folder / INDEX, fill_page("Runs", [*parts, format_section("Fine-tuned models and sweeps", others)]))
    return folder / INDEX


def _list_cells(run_dir: Place) -> tuple[str, ...]:
    """What the index says of a pre-training run; nothing of a folder that is none."""
    try:
        return _describe_run(run_dir) if "origin" in read_run(run_dir) else ()
    except (DomextError, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, DomextError) else f"{type(error).__name__}: {error}"
        return (*[NONE] * 5, f"cannot be read ({hide_places(reason)[:120]})")


def _describe_run(run_dir: Place) -> tuple[str, ...]:
    started = read_origin(run_dir)["started"]
    options = read_yaml(run_dir / "config.yaml", "run its command again")
    step, path = find_last_step(run_dir / "metrics.jsonl"), run_dir / "summary.json"
    measured, steps = read_summary(path) if path.is_file() else {}, f"{step:,}"
    if not measured or measured["train"]["steps"] != step:  # it trains, or goes on
        measured = measure_run(read_metrics(run_dir / "metrics.jsonl"))
        steps += f" of {options['train']['max_steps']:,}"
    names, figures = find_losses(measured["domain"]) or MLM, list_figures(measured)
    return (
        started[:16].replace("T", " "),
        str(options["method"]["name"]),
        str(hide_places(options["base"])),
        steps,
        figures["loss"].show_pair() + (f" ({names.title})" if names is not MLM else ""),
        figures["general"].show_pair(with_change=True) if "general" in figures else NONE,
    )


def _link(folder: Place, name: str, page: str) -> str:
    if not (folder / name / page).is_file():
        return name
    return Markup('<a href="{}/{}">{}</a>').format(quote(name), page, name)
