"""plan -> prepare -> train -> report -> export: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, run.json, tokenizer/,
metrics.jsonl, tensorboard/, checkpoints/, export/, summary.json, curves.png and report.html, which is there
while the run trains, too; and a line in RUN.DIR/index.html. The same command goes on from the newest checkpoint, and
says so when there is nothing left to do.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.config.mixture import GENERAL, TextPart
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.data.sources import resolve_sources
from domext_ray.errors import ConfigError, ReportError, RunError, StorageError
from domext_ray.export.folder import HUGGINGFACE, check_target, read_export_record
from domext_ray.export.model_folder import export_run
from domext_ray.inputs import Corpora, check_texts, count_words, get_or_build_tokenizer, get_or_prepare_corpora
from domext_ray.model.budget import TOLERANCE
from domext_ray.model.counts import ParameterCounts
from domext_ray.options.build import identity_of
from domext_ray.options.places import hide_places
from domext_ray.plan import RunPlan, count_run, describe_run, plan_run, resolve_workers
from domext_ray.report.examples import make_examples
from domext_ray.report.figures import describe_times, format_summary
from domext_ray.report.forecast import Forecast, describe_plan, make_forecast
from domext_ray.report.index import write_index
from domext_ray.report.live import LiveReport
from domext_ray.report.origin import count_trained, describe_origin
from domext_ray.report.report import write_report
from domext_ray.report.summary import add_times, read_summary, write_summary
from domext_ray.runs.events import EXPORT, PREPARING, REPORT, START_UP, WORKERS, enter_phase
from domext_ray.runs.run_directory import (
    add_versions,
    check_identity,
    check_order,
    describe_continuation,
    lock_run,
    read_config,
    resolve_schedule,
    write_config,
    write_run,
)
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.storage import Place, Where, write_text
from domext_ray.training.checkpoint import (
    CheckpointId,
    find_resume_point,
    find_tensors_sha256,
    list_steps,
)
from domext_ray.training.metrics import find_last_step
from domext_ray.training.phases import describe_order, make_phases, resolve_max_steps
from domext_ray.training.pretrain import pretrain, reserve
from domext_ray.training.rate import Trial, estimate_memory, make_trial, measure_rate
from domext_ray.training.router import get_or_train_routers
from domext_ray.training.start import check_start
from domext_ray.training.worker import PretrainTask

REPORT_LOG = "report_error.log"
FEW_EPOCHS = 0.1
"""Below this a run says how little of its corpus it reads."""


@dataclass(frozen=True)
class Run(RunPlan):
    """A run whose tokenizer and corpus are there: its plan, with what only they tell.

    Args:
        tokenizer_dir: the run's tokenizer.
        corpora: its texts, prepared.
        goes_on_from: the run's own checkpoint; None: it begins.
    """

    tokenizer_dir: Path
    corpora: Corpora
    goes_on_from: CheckpointId | None


def run_pretraining(config: PretrainConfig, started: float | None = None) -> Place:
    """Carry a pre-training run from text to report.

    Args:
        config: the run; with `dry_run` everything is checked and printed and nothing is started or written.
        started: when the job began, as `time.time()` has it; None: now.

    Returns:
        The run's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is written where that can be known.
    """
    started = time.time() if started is None else started
    plan = plan_run(config)
    run_dir = plan.paths.run
    if not config.dry_run and is_finished(run_dir, plan.config):
        _say_finished(plan)
        return run_dir
    check_texts(config)
    goes_on_from = _look_back(run_dir)
    if config.dry_run:
        trial = make_trial(plan.config, plan.base, plan.config.vocab.size, plan.num_new_words, plan.earlier)
        memory = estimate_memory(trial)
        print(describe_plan(plan.config, plan.paths, plan.counts, memory, _forecast(plan, trial)))
        return run_dir
    with lock_run(run_dir) as run_dir:  # before Ray starts: storage that refuses is told within seconds
        start_ray()
        plan = replace(plan, config=resolve_workers(plan.config), paths=replace(plan.paths, run=run_dir))
        reserve(plan.config)
        print(f"run directory: {run_dir}", flush=True)
        if not run_dir.is_local:
            print(f"prepared corpora: {plan.paths.corpora}", flush=True)
        check_target(run_dir / "export", HUGGINGFACE)
        enter_phase(run_dir, "starting the job", START_UP, started)
        enter_phase(run_dir, "preparing the text", PREPARING)
        run = prepare_run(plan, goes_on_from)
        if is_finished(run_dir, run.config):  # known only now, where the corpus says how many steps there are
            _say_finished(run)
            return run_dir
        train_run(run)
        failure = _try_to_report(run)
        enter_phase(run_dir, "exporting the model", EXPORT)
        export_run(run_dir, run_dir / "export")  # last: by its record a later start sees that all of this was done
        enter_phase(run_dir, "done")
        if failure is not None:
            print(f"export: {run_dir / 'export'}")
            raise failure
        print(describe_times(add_times(run_dir)))
        print(f"export: {run_dir / 'export'}\nreport: {run_dir / 'report.html'}")
    return run_dir


def prepare_run(plan: RunPlan, goes_on_from: CheckpointId | None) -> Run:
    """Provide a run's tokenizer and corpus, and settle what depends on them.

    Args:
        plan: the run; its directory is held, and Ray is initialised.
        goes_on_from: the run's own checkpoint; None: it begins.

    Raises:
        DomextError: the text gave another vocabulary than a budget was solved for, the run that this one starts from
            has other words, or the corpus is not the run's.
    """
    config, paths = plan.config, plan.paths
    tokenizer_dir = get_or_build_tokenizer(config, plan.base, paths)
    vocab_size, num_new_words = count_words(tokenizer_dir)
    counts = count_run(config, plan.base, vocab_size, num_new_words, plan.earlier)
    _check_budget(config, counts, num_new_words)
    if plan.start is not None and goes_on_from is None:
        check_start(plan.start, plan.identity["base_sha256"], tokenizer_dir)
    corpora = get_or_prepare_corpora(config, plan.base, tokenizer_dir, paths)
    if config.train.epochs or not config.train.max_steps:
        config = resolve_schedule(resolve_max_steps(config, corpora.domain), paths.run)
    identity = {**plan.identity, **identity_of(config), "corpus_fingerprint": corpora.domain[0].fingerprint}
    for part, manifests in zip(config.parts, corpora.beside, strict=True):
        identity |= {_name_fingerprint(part): manifests[0].fingerprint}
    check_identity(paths.run, identity)
    known = {"config": config, "identity": identity, "counts": counts, "num_new_words": num_new_words}
    return Run(**{**vars(plan), **known}, tokenizer_dir=tokenizer_dir, corpora=corpora, goes_on_from=goes_on_from)


def _name_fingerprint(part: TextPart) -> str:
    """What a run's identity calls the text of a part."""
    return "replay_fingerprint" if part.name == GENERAL else f"part_fingerprint.{part.name}"


def train_run(run: Run) -> None:
    """Record what a run is, fit its router, and train it to its limit.

    Raises:
        DomextError: see `training.pretrain.pretrain`.
    """
    config, run_dir = run.config, run.paths.run
    _print_corpus(config, run.corpora)
    write_config(run_dir, config)
    write_run(
        run_dir,
        identity=run.identity,
        order=describe_order(),
        versions=add_versions(run_dir, run.goes_on_from.step if run.goes_on_from else 0),
        origin=_describe_origin(run),
    )
    general = run.corpora.beside[0][0] if config.replay.corpus else None  # the first of `config.parts`
    texts = (run.corpora.domain[0], general)
    get_or_train_routers(config, run_dir, texts, run.tokenizer_dir, run.base, run.start)
    report = LiveReport(run_dir)
    task = PretrainTask(
        config,
        run_dir,
        tuple(manifest.folder for manifest in run.corpora.domain),
        run.tokenizer_dir if run_dir.is_local else run_dir / "tokenizer",
        run.identity["base_sha256"],
        beside_dirs=tuple(tuple(each.folder for each in own) for own in run.corpora.beside),
        general_tokenizer_dir=run.corpora.general_tokenizer_dir,
        init_from=run.start,
        earlier=run.earlier,
        goes_on_from=run.goes_on_from,
        starts_from=run.starts_from,
        scratch_dir=run.paths.scratch,
    )
    enter_phase(run_dir, "starting the workers", WORKERS)
    try:
        pretrain(task, report.note_evaluation)
    except BaseException:  # a signal, too
        report.note_stop()
        raise
    report.close()


def _try_to_report(run: Run) -> ReportError | None:
    """Report a run, and return what to say where that fails: a page is no reason to go without the model."""
    run_dir = run.paths.run
    try:
        report_run(run)
        (run_dir / REPORT_LOG).delete()
        return None
    except Exception as error:
        with contextlib.suppress(OSError, StorageError):  # the disk may be what is wrong
            write_text(run_dir / REPORT_LOG, traceback.format_exc())
            (run_dir / "report.html").delete()  # one of before the end: without it the same command writes it anew
        reason = " ".join(str(error).split()).removesuffix(".")
        return ReportError(
            f"the model in {run_dir / 'export'} is whole, but the report could not be written ({type(error).__name__}: "
            f"{reason}; see {run_dir / REPORT_LOG}); the same command writes it again."
        )


def report_run(run: Run) -> None:
    """Write a trained run's summary, report and line in the index, and print the table."""
    run_dir, manifest = run.paths.run, run.corpora.domain[0]
    enter_phase(run_dir, "writing the report", REPORT)
    summary = write_summary(run_dir, run.config)
    write_report(run_dir, examples=make_examples(run_dir, manifest))
    write_index(run_dir.parent)
    print(format_summary(summary))


def _describe_origin(run: Run) -> dict[str, Any]:
    """What the run's page says of its text and of what trains."""
    counts, corpora = run.counts, run.corpora
    manifest, phases = corpora.domain[0], make_phases(run.config, corpora.domain, corpora.beside)
    shape = describe_run(run.config, run.base, *count_words(run.tokenizer_dir), run.earlier)
    return describe_origin(
        run.paths.run,
        base_sha256=run.identity["base_sha256"],
        parameters={
            "total": counts.total,
            "trainable": counts.trainable,
            "trainable_frac": counts.trainable_frac,
            "kinds": count_trained(shape, run.config.method, counts.trainable),
            **({"decoder": counts.decoder} if counts.decoder else {}),
        },
        corpus={
            "sources": hide_places(run.config.corpus),
            "documents": manifest.num_documents,
            "dropped": manifest.dropped,
            "rows": manifest.num_rows("train"),
            "tokens": manifest.num_tokens("train"),
            "held_out_rows": manifest.num_rows("held_out"),
            "overlaps": list(corpora.overlaps),
            "phases": [[each.first_step, each.end_step, each.steps_per_epoch] for each in phases],
        },
    )


def _forecast(plan: RunPlan, trial: Trial) -> Forecast:
    """What the run will take; its corpus is read in part, and its model is timed for a moment."""
    config = plan.config
    sources = resolve_sources(config.corpus, config.prepare)
    own = [(each, config.prepare_for(each)) for each in config.parts]
    beside = [None if part.is_written else resolve_sources(part.corpus, prepare) for part, prepare in own]
    return make_forecast(config, plan.base, sources, plan.counts, lambda: measure_rate(trial), beside)


def is_finished(where: Where, config: PretrainConfig) -> bool:
    """Whether a run has reached one of its limits, and all that it leaves is there and of its newest checkpoint.

    Raises:
        RunError: its summary.json is damaged.
    """
    run_dir = Place(where)
    summary = run_dir / "summary.json"
    if not (summary.is_file() and (run_dir / "report.html").is_file() and (run_dir / "export").exists()):
        return False
    try:
        read_config(run_dir, PretrainConfig)
    except RunError:  # going on writes it anew
        return False
    done, limits = read_summary(summary)["train"], config.train
    has_reached_limit = (
        0 < limits.max_steps <= done["steps"]
        or 0 < limits.max_tokens <= done["tokens"]
        or 0 < limits.max_seconds <= done["wall_seconds"]
    )
    return has_reached_limit and _is_exported(run_dir, done["steps"])


def _is_exported(run_dir: Place, step: int) -> bool:
    """Whether a run's export is of its newest checkpoint, at the step of its summary: it is what a job writes last."""
    record = read_export_record(run_dir / "export")
    if record is None:
        return False
    newest = max(list_steps(run_dir / "checkpoints"), default=step)  # none: they were deleted to save space
    return newest == record.step == step and record.checkpoint_sha256 == (
        find_tensors_sha256(run_dir / "checkpoints", step) or record.checkpoint_sha256
    )


def describe_end(run_dir: Where, config: PretrainConfig) -> str:
    """Return what to say when there is nothing left to do, and how it could go on."""
    steps, horizon = read_summary(Place(run_dir) / "summary.json")["train"]["steps"], config.optim.decay_steps
    if steps < horizon:
        more = f"a larger --train.max_steps, max_tokens or max_seconds goes on, up to step {horizon:,}"
    else:
        more = describe_continuation(config, run_dir)
    return (
        f"the run in {run_dir} has reached its limit; nothing is left to do ({more}; another --run.name starts anew)."
    )


def _say_finished(plan: RunPlan) -> None:
    _note_moved(plan.paths.run, plan.config)
    print(describe_end(plan.paths.run, plan.config))


def _note_moved(run_dir: Place, config: PretrainConfig) -> None:
    """Keep where the base and the text of a finished run are now: an export of it reads the base again."""
    stored = read_config(run_dir, PretrainConfig)
    moved = replace(stored, base=config.base, corpus=config.corpus, init_from=config.init_from)
    if moved != stored:
        write_config(run_dir, moved)


def _look_back(run_dir: Place) -> CheckpointId | None:
    """Choose the checkpoint that a run goes on from, and say what has changed since; None: it begins anew."""
    for changed in check_order(run_dir, describe_order()):
        print(f"note: {changed} since this run's last start; losses may differ in their last digits.", flush=True)
    point = find_resume_point(run_dir / "checkpoints")
    for sentence in point.passed_over:
        print(f"warning: {sentence}", flush=True)
    if point.checkpoint is not None:
        return point.checkpoint.id
    step = find_last_step(run_dir / "metrics.jsonl")
    if step:
        print(f"note: step {step:,} was the last one and no checkpoint is there; the run begins anew.", flush=True)
    return None


def _check_budget(config: PretrainConfig, counts: ParameterCounts, num_new_words: int) -> None:
    """Refuse a budget that was solved for a vocabulary of another size than the text gave."""
    budget = config.method.trainable_budget
    if budget and abs(counts.trainable_frac - budget) > TOLERANCE * budget:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size} and the text gave {num_new_words}, so that the method trains "
            f"{counts.trainable_frac:.2%} instead of --method.trainable_budget {budget:g}; give --vocab.size "
            f"{num_new_words}."
        )


def _print_corpus(config: PretrainConfig, corpora: Corpora) -> None:
    limits = config.train
    is_open = config.optim.schedule == "wsd" and (limits.max_seconds > 0 or limits.max_tokens > 0)  # steps are no guess
    num_epochs = 0.0
    for phase in make_phases(config, corpora.domain, corpora.beside):
        manifest, sampler = phase.manifest, phase.sampler
        num_steps = max(0, min(config.train.max_steps, phase.end_step) - phase.first_step)
        own, *others = sampler.count_epochs(num_steps)
        num_epochs += own
        print(
            f"corpus: {manifest.num_rows('train'):,} rows of {config.prepare.describe_length(manifest.seq_length)}, "
            f"{manifest.num_tokens('train'):,} tokens for training, {manifest.num_rows('held_out'):,} rows held out; "
            f"{num_steps / own if own else phase.steps_per_epoch:,.0f} steps an epoch"
            + (f", {own:.2f} epochs" if not is_open else ""),
            flush=True,
        )
        num_rows = sampler.rows_before(num_steps)
        for part, beside, read, number in zip(config.parts, phase.beside, others, num_rows[1:], strict=True):
            print(
                f"{part.title}: {beside.num_rows('train'):,} rows, {beside.num_tokens('train'):,} tokens; "
                f"{number / max(sum(num_rows), 1):.0%} of all rows" + (f", {read:.2f} epochs" if not is_open else ""),
                flush=True,
            )
    if num_epochs < FEW_EPOCHS and not is_open:
        print(
            f"note: {config.train.max_steps:,} steps read {num_epochs:.1%} of the corpus; --train.max_steps 0 "
            "--train.epochs 1 reads it once.",
            flush=True,
        )
