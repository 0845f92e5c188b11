"""The page of a run: what it reached, how, from what, and what to do next; while it trains, too.

Enters: a run directory with metrics.jsonl, run.json and config.yaml, which its workers may still write to. Leaves:
report.html, which needs no network, and curves.png in the same directory. While a run trains all of it happens in the
driver, in at most a fiftieth of the time, and no fault of a page ends a run.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Literal

from domext_ray.config.options.build import dump_yaml, list_values, read_file
from domext_ray.config.options.submitted import hide_places
from domext_ray.config.presets import find_preset, list_presets
from domext_ray.config.pretrain import PretrainConfig, SettledConfig
from domext_ray.errors import ReportError, RunError, StorageError
from domext_ray.files import read_json
from domext_ray.report.compare import write_index
from domext_ray.report.examples import NUM_GUESSES, Example, make_examples
from domext_ray.report.figures import (
    describe_result,
    describe_sizes,
    format_summary,
    list_columns,
    list_cost,
    list_parts,
    list_rows,
    list_times,
    measure_run,
)
from domext_ray.report.page import format_settings, render_page
from domext_ray.report.plots import list_curves, write_curves
from domext_ray.report.summary import read_origin, write_summary
from domext_ray.runs.events import REPORT, enter_phase, measure_times
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place, new_file, write_text
from domext_ray.text.corpus.unknown import describe_unknown
from domext_ray.text.data.files import has_own_text
from domext_ray.text.vocabulary.statistics import STATISTICS_FILE
from domext_ray.training.metrics import DOMAIN, find_last_step, find_losses, read_metrics
from domext_ray.training.router import describe_router, read_records
from domext_ray.training.run import Run

State = Literal["running", "stopped", "finished"]
REPORT_LOG = "report_error.log"
REST = 50.0
"""Times the seconds that a page took: so long is the next one waited for."""
_OWN_TEXT = "This page quotes your own text. Think of this before you share it."


class LiveReport:
    """Writes a run's page, and the index of all runs, while it trains and when it stops, whatever stopped it.

    Around a training it is a context manager: a signal or an error inside is a stop.
    """

    def __init__(self, run_dir: Place) -> None:
        self.run_dir = run_dir
        self._due, self._lock, self._has_ended = 0.0, threading.Lock(), False

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.note_stop()
        self.close()

    def note_evaluation(self) -> None:
        """Write the page, unless the last one was a moment ago."""
        if time.monotonic() >= self._due:
            self._write("running")

    def note_stop(self) -> None:
        """Write the page of a run that is ending before its limit."""
        if find_last_step(self.run_dir / "metrics.jsonl", default=-1) >= 0:  # else there is no figure yet
            self._write("stopped")

    def close(self) -> None:
        """Wait for a page that is being written; the thread that waits for evaluations writes no other one."""
        with self._lock:
            self._has_ended = True

    def _write(self, state: State) -> None:
        with self._lock:
            if self._has_ended:
                return
            started = time.monotonic()
            try:
                write_report(self.run_dir, state)
                write_index(self.run_dir.parent)
            except Exception as error:  # a full disk, a damaged file, a figure that cannot be drawn: the run goes on
                print(f"warning: the report could not be written ({error})", file=sys.stderr, flush=True)
            ended = time.monotonic()
            self._due = ended + REST * (ended - started)


def report_run(run: Run) -> ReportError | None:
    """Write what a run that has ended leaves to read, and print its table; a failure is returned, not raised.

    Without a page the same command writes it anew.
    """
    run_dir, log = run.paths.run, run.paths.run / REPORT_LOG
    try:
        enter_phase(run_dir, "writing the report", REPORT)
        summary = write_summary(run_dir, run.config)
        write_report(run_dir, examples=make_examples(run_dir, run.inputs.domain))
        write_index(run_dir.parent)
        print(format_summary(summary))
        log.delete()
        return None
    except Exception as error:
        with contextlib.suppress(OSError, StorageError):
            (run_dir / "report.html").delete()  # of before the end
        with contextlib.suppress(OSError, StorageError):  # the disk may be what is wrong
            write_text(log, traceback.format_exc())
        reason = " ".join(str(error).split()).removesuffix(".")
        return ReportError(
            f"the model in {run_dir / 'export'} is whole, but the report could not be written ({type(error).__name__}: "
            f"{reason}; see {log}); the same command writes it again."
        )


def write_report(run_dir: Place, state: State = "finished", examples: Sequence[Example] = ()) -> Place:
    """Draw a run's curves, write report.html and curves.png, and return the place of the former.

    With `examples` only the owner may read the page, as the text itself.
    """
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise RunError(f"{run_dir / 'metrics.jsonl'} is missing or empty; run the job again to fill it.")
    origin, config = read_origin(run_dir), read_config(run_dir, SettledConfig)
    summary, router = measure_run(records), read_records(run_dir).get(config.method.adapter)
    evaluated = [record["step"] for record in records if find_losses(record, DOMAIN)]
    after = "after" if state == "finished" or not evaluated else f"at step {evaluated[-1]:,}"
    num_words, words = _list_words(run_dir)
    preset, changed = _list_changed(config, origin)
    private = f"No text is shown: its rows say whose they are (--prepare.group_field {config.prepare.grouped_by}), and"
    write_curves(run_dir / "curves.png", records)
    page = render_page(
        "run.html",
        run_dir.name,
        state=_describe_state(run_dir, config, records, state),
        result=describe_result(summary),
        header=list_columns(summary, after),
        figures=list_rows(summary),
        sizes=describe_sizes(summary),
        parts=list_parts(summary),
        curves=list_curves(records),
        examples=examples,
        num_guesses=NUM_GUESSES,
        warning=_OWN_TEXT if has_own_text(config.corpus) else "",
        excuse=f"{private} pages are passed on." if config.prepare.grouped_by else "",
        num_words=f"{num_words:,}",
        words=words,
        facts=list_facts(config, origin, records, asdict(router) if router else None),
        cost=list_cost(summary),
        times=list_times(measure_times(run_dir)),
        preset=preset,
        changed=changed,
        settings=format_settings(dump_yaml(config)),
        next=_suggest_next(run_dir, config),
    )
    with new_file(run_dir / "report.html") as temporary:
        temporary.touch(mode=0o600 if examples else 0o666)  # in a bucket, its own rules say who may read
        temporary.write_text(page, encoding="utf-8")
    return run_dir / "report.html"


def _describe_state(run_dir: Place, config: SettledConfig, records: Sequence[Mapping[str, Any]], state: State) -> str:
    """How far a run is, and when that was: the time of its newest figure."""
    step, info = f"step {records[-1]['step']:,}", (run_dir / "metrics.jsonl").info()
    moment = f"{datetime.fromtimestamp(info.modified if info else time.time(), UTC):%Y-%m-%d %H:%M} UTC"
    limit = f"of {config.train.max_steps:,}"
    return {
        "finished": f"Finished at {step} on {moment}.",
        "stopped": f"Stopped at {step} {limit} on {moment}; the same command goes on.",
        "running": f"Running: {step} {limit} on {moment}. The page is written anew after evaluations.",
    }[state]


def _list_words(run_dir: Place) -> tuple[int, Sequence[Sequence[Any]]]:
    """How many new words a run has, and the most frequent ones with their counts in its text."""
    path = run_dir / "tokenizer" / STATISTICS_FILE
    if not path.is_file():  # no new words, or words whose text was not counted
        return 0, []
    remedy = "delete it: only the words' counts are lost with it"
    statistics = read_json(path, remedy, {"num_new": int, "top_words": list})
    return statistics["num_new"], statistics["top_words"]


def _list_changed(config: SettledConfig, origin: Mapping[str, Any]) -> tuple[str, list[tuple[str, str, str]]]:
    """The options that are not those of the preset that they stand on: its name, and the rows option, here, there.

    Sizes that a budget was solved for are among them, and the schedule that the corpus decided.
    """
    named = origin.get("preset", config.method.name)  # version 0.1.0 did not record it
    preset = named if named in list_presets() else ""
    layers = [read_file(PretrainConfig, find_preset(preset), "the preset")] if preset else []
    rows = []
    for name, default in list_values(PretrainConfig, layers).items():
        if (value := attrgetter(name)(config)) != default:
            rows.append((name, _show(value), _show(default)))
    return (f"preset {preset}" if preset else "default"), rows


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(hide_places(value)) or "(empty)"


def list_facts(
    config: SettledConfig,
    about: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    router: Mapping[str, float] | None = None,
) -> list[tuple[str, str]]:
    """Return where a run comes from, given `summary.read_origin` and its adapter's `RouterRecord`."""
    corpus, counts = about["corpus"], about["parameters"]
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(corpus["dropped"].items()))
    kinds = "; ".join(f"{name} {number:,}" for name, number in counts["kinds"].items())
    base = "none: random weights"
    if config.base != "none":
        base = f"{hide_places(config.base)} (sha256 {about['base_sha256'][:12]})"
    step, read = (
        records[-1]["step"],
        _find_last(records, "train/domain_epochs"),
    )  # of a mixture, whose shares may change
    if read is None:
        read = sum(max(0, min(step, end) - first) / size for first, end, size in corpus["phases"])
    clean = about["commit"].removesuffix("+")
    facts = {
        "method": config.method.name,
        "base": base,
        "tokenizer": about.get("wrong_rules", ""),
        "what trains": f"{counts['trainable']:,} of {counts['total']:,} parameters, {counts['trainable_frac']:.1%} of "
        f"base and extension: {kinds}",
        "text": str(corpus["sources"]),
        "documents": f"{corpus['documents']:,}; dropped: {dropped or 'none'}",
        "rows": f"{corpus['rows']:,} for training, {corpus['tokens']:,} tokens; {corpus['held_out_rows']:,} held out",
        "unknown to the tokenizer": _describe_unknown(corpus.get("unknown", {})),
        "epochs read": f"{read:.2f}",
        "general text": _describe_replay(config, _find_last(records, "train/replay_epochs")),
        "router": describe_router(config, router),
        "other texts": _describe_mixture(config),
        "overlap": "; ".join(corpus.get("overlaps", [])),
        "seed": f"{config.seed}",
        "started": f"{about['started'][:16].replace('T', ' ')} UTC",
        "machine": str(about["machine"]),
        "workers": f"{config.scale.num_workers}, ZeRO stage {config.engine.zero_stage}",
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "commit": clean + ", with changes" * (clean != about["commit"]),
        "command": about["command"] or "called from Python",
    }
    return [(name, value) for name, value in facts.items() if value]


def _describe_unknown(texts: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how much of each text is unknown to its tokenizer; empty: it was not counted."""
    found = {title: describe_unknown(unknown) for title, unknown in texts.items() if unknown}
    return "; ".join(f"{title}: {text}" if len(found) > 1 else text for title, text in found.items())


def _find_last(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((record[name] for record in reversed(records) if name in record), None)


def _describe_replay(config: SettledConfig, epochs: float | None) -> str:
    """Say which general text a run reads, what it is for, and how often it was read; empty: there is none."""
    if not config.replay.corpus:
        return ""
    source = "written by the base" if config.replay.is_written else hide_places(config.replay.corpus)
    uses = {"kl": "keeps to the base's predictions", "replay": "its masked words are learned"}
    use = uses.get(config.objective.keep, "like the domain's")
    read = "" if epochs is None else f", {epochs:.2f} epochs read"
    return f"{source}: {config.replay.frac:.0%} of all rows, {use}{read}"


def _describe_mixture(config: SettledConfig) -> str:
    """Say which further texts a run reads, and with which weights; empty: there are none."""
    said = []
    for part in config.mixture.list_parts():
        weights = [
            f"{float(weight):g}" + f" from {float(first):.0%} on" * (first > 0) for first, weight in part.weights
        ]
        kind = ", general text" if part.keep else ""
        said.append(f"{part.name} ({hide_places(part.corpus)}{kind}): weight {', '.join(weights)}")
    return f"{'; '.join(said)}; the text above: weight {config.mixture.weight:g}" if said else ""


def _suggest_next(run_dir: Place, config: SettledConfig) -> str:
    """Commands that take a run as their model, from the folder above that of all runs; the last tells if it helped."""
    above, name, base = run_dir.parent.name, run_dir.name, "" if config.base == "none" else hide_places(config.base)
    run, question = f"{above}/{name}", "did it help? fine-tune it and its base, and compare"
    models = f"base={base},{name}={run}" if base else f"{name}={run}"
    if not base:
        question = "fine-tune it on labelled text"
    copied = "" if run_dir.is_local else f"# copy it from {run_dir.root}/… to {run} first\n\n"
    return (
        f"{copied}# load it in Python\n"
        f"import domext_ray\n"
        f"tokenizer, model = domext_ray.load({run!r})\n\n"
        f"# how much general language it has lost\n"
        f"domext evaluate forgetting --models {shlex.quote(models)} --corpus TEXT --output forgetting\n\n"
        f"# {question}\n"
        f"{suggest_comparison(run, base)}\n"
    )


def suggest_comparison(run: str, base: str) -> str:
    """Return the command that fine-tunes a run on entities, beside the base that it is compared with, if it has one."""
    against, name = f" --against {shlex.quote(base)}" if base else "", shlex.quote(f"{run.rpartition('/')[2]}-ner")
    return (
        f"domext finetune --model {shlex.quote(run)}{against} --task ner --data FOLDER --grid.restarts 3 "
        f"--run.name {name}"
    )
