"""plan -> prepare -> train -> report -> export: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, run.json, tokenizer/,
metrics.jsonl, what trackers keep, checkpoints/, export/, summary.json, curves.png and report.html, which is there
while the run trains, too; and a line in RUN.DIR/index.html. The same command goes on from the newest checkpoint, and
says so when there is nothing left to do.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.unknown import find_unknown
from domext_ray.data.sample import Sample
from domext_ray.errors import ConfigError, ReportError, RunError, StorageError
from domext_ray.export.folder import HUGGINGFACE, check_target, read_export_record
from domext_ray.export.model_folder import export_run
from domext_ray.inputs import (
    check_texts,
    get_or_build_tokenizer,
    get_or_prepare_texts,
    require_same_texts,
)
from domext_ray.model.budget import TOLERANCE
from domext_ray.model.spec import ModelSpec
from domext_ray.options.places import hide_places
from domext_ray.plan import identify_run, plan_run, resolve_workers, warn_of_rate, warn_of_rules
from domext_ray.report.compare import write_index
from domext_ray.report.examples import make_examples
from domext_ray.report.figures import describe_times, format_summary
from domext_ray.report.forecast import describe_plan, make_forecast
from domext_ray.report.report import LiveReport, write_report
from domext_ray.report.summary import add_times, count_trained, describe_origin, read_summary, write_summary
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
from domext_ray.storage import Place, write_text
from domext_ray.training.checkpoint import Checkpoint, choose_checkpoint, find_latest, list_steps
from domext_ray.training.cost import estimate_memory, make_dry_run_model, measure_step_cost
from domext_ray.training.elastic import check_room
from domext_ray.training.metrics import find_last_step
from domext_ray.training.phases import ADDED_TO_ORDER, ORDER, Phase, make_phases, resolve_max_steps
from domext_ray.training.pretrain import pretrain
from domext_ray.training.run import Run
from domext_ray.training.start import check_vocabulary

REPORT_LOG = "report_error.log"
FEW_EPOCHS = 0.1  # below this a run says how little of its corpus it reads


def run_pretraining(config: PretrainConfig, preset: str = "", started: float | None = None) -> Place:
    """Carry a pre-training run from text to report.

    Args:
        config: the run; with `dry_run` everything is checked and printed and nothing is started or written.
        preset: the name of the one that its options stand on, for its page; empty: the defaults.
        started: when the job began, as `time.time()` has it; None: now.

    Returns:
        The run's directory.

    Raises:
        DomextError: any mistake of the user's, before anything is written where that can be known.
    """
    started = time.time() if started is None else started
    run = replace(plan_run(config), preset=preset)
    run_dir = run.paths.run
    if not config.dry_run and is_finished(run_dir, run.config):
        _say_finished(run)
        return run_dir
    base = run.spec.base
    samples = check_texts(run.config, base)
    run = replace(run, goes_on_from=_look_back(run_dir))
    warn_of_rules(base)
    if base is not None:
        warn_of_rate(run.config.optim, base, "--optim.lr")
    if config.dry_run:
        print(_forecast(run, samples))
        return run_dir
    with lock_run(run_dir) as held:  # before Ray starts: storage that refuses is told within seconds
        start_ray(run.config.scale.wait_seconds)
        run = replace(run.at(held), config=resolve_workers(run.config))
        check_room(run.config)
        print(f"run directory: {held}", flush=True)
        if not held.is_local:
            print(f"prepared corpora: {run.paths.corpora}", flush=True)
        check_target(held / "export", HUGGINGFACE)
        enter_phase(held, "starting the job", START_UP, started)
        enter_phase(held, "preparing the text", PREPARING)
        run = prepare_run(run)
        if is_finished(held, run.config):  # known only now, where the corpus says how many steps there are
            _say_finished(run)
        else:
            train_run(run)
            publish_run(run)
    return held


def prepare_run(run: Run) -> Run:
    """Provide a run's tokenizer and corpora, and settle what depends on them; its directory is held, Ray initialised.

    Raises:
        DomextError: the text gave another vocabulary than a budget was solved for, the run that this one starts from
            has other words, or the corpus is not the run's.
    """
    config, base, paths = run.config, run.spec.base, run.paths
    require_same_texts(config, paths)
    tokenizer_dir = get_or_build_tokenizer(config, base, paths)
    spec = run.spec.with_tokenizer(tokenizer_dir)
    _check_budget(config, spec)
    if run.start is not None and run.goes_on_from is None:
        check_vocabulary(run.start, tokenizer_dir)
    inputs = get_or_prepare_texts(config, base, tokenizer_dir, paths)
    inputs = replace(inputs, tokenizer=paths.run / "tokenizer")  # which workers on all nodes see
    if config.train.epochs or not config.train.max_steps:
        config = resolve_schedule(resolve_max_steps(config, [own for own, *_ in inputs.texts]), paths.run)
    run = replace(run, config=config, spec=spec, prepared=inputs)
    check_identity(paths.run, identify_run(run))
    return run


def train_run(run: Run) -> None:
    """Record what a run is, and train it to its limit."""
    run_dir, phases = run.paths.run, make_phases(run.config, run.inputs.texts)
    _print_corpus(run.config, phases)
    write_config(run_dir, run.config)
    write_run(
        run_dir,
        identity=identify_run(run),
        order=ORDER,
        versions=add_versions(run_dir, run.goes_on_from.step if run.goes_on_from else 0),
        origin=_describe_origin(run, phases),
    )
    report = LiveReport(run_dir)
    enter_phase(run_dir, "starting the workers", WORKERS)
    try:
        pretrain(run, report.note_evaluation)
    except BaseException:  # a signal, too
        report.note_stop()
        raise
    report.close()


def publish_run(run: Run) -> None:
    """Report a trained run and export its model; a page that fails is no reason to go without the model.

    Raises:
        ReportError: the report failed, and the export is there.
    """
    run_dir, log, failure = run.paths.run, run.paths.run / REPORT_LOG, None
    try:
        enter_phase(run_dir, "writing the report", REPORT)
        summary = write_summary(run_dir, run.config)
        write_report(run_dir, examples=make_examples(run_dir, run.inputs.domain))
        write_index(run_dir.parent)
        print(format_summary(summary))
        log.delete()
    except Exception as error:
        with contextlib.suppress(OSError, StorageError):  # the disk may be what is wrong
            write_text(log, traceback.format_exc())
            (run_dir / "report.html").delete()  # one of before the end: without it the same command writes it anew
        reason = " ".join(str(error).split()).removesuffix(".")
        failure = ReportError(
            f"the model in {run_dir / 'export'} is whole, but the report could not be written ({type(error).__name__}: "
            f"{reason}; see {log}); the same command writes it again."
        )
    enter_phase(run_dir, "exporting the model", EXPORT)
    export_run(run_dir, run_dir / "export")  # last: by its record a later start sees that all of this was done
    enter_phase(run_dir, "done")
    if failure is None:
        print(describe_times(add_times(run_dir)))
    print(f"export: {run_dir / 'export'}")
    if failure is not None:
        raise failure
    print(f"report: {run_dir / 'report.html'}")


def _describe_origin(run: Run, phases: Sequence[Phase]) -> dict[str, Any]:
    """What the run's page says of its text and of what trains."""
    spec, counts, manifest = run.spec, run.spec.counts, run.inputs.domain
    return describe_origin(
        run.paths.run,
        base_sha256=spec.base_sha256,
        wrong_rules=hide_places(spec.base.wrong_rules) if spec.base else "",
        preset=run.preset,
        parameters={
            "total": counts.total,
            "trainable": counts.trainable,
            "trainable_frac": counts.trainable_frac,
            "kinds": count_trained(spec),
            **({"decoder": counts.decoder} if counts.decoder else {}),
        },
        corpus={
            "sources": hide_places(run.config.corpus),
            "documents": manifest.num_documents,
            "dropped": manifest.dropped,
            "rows": manifest.num_rows("train"),
            "tokens": manifest.num_tokens("train"),
            "held_out_rows": manifest.num_rows("held_out"),
            "overlaps": list(run.inputs.overlaps),
            "unknown": {
                text.name: find_unknown(own.unknown, run.config.prepare_for(text))
                for text, own in zip(run.config.texts, run.inputs.texts[0], strict=True)
            },
            "phases": [[each.first_step, each.end_step, each.steps_per_epoch] for each in phases],
        },
    )


def _forecast(run: Run, samples: Sequence[Sample | None]) -> str:
    """What a dry run says; the model is timed for a moment."""
    model = make_dry_run_model(run.config, run.spec)
    forecast = make_forecast(run.config, run.spec, samples, lambda: measure_step_cost(model))
    return describe_plan(run, estimate_memory(model), forecast)


def is_finished(run_dir: Place, config: PretrainConfig) -> bool:
    """Whether a run has reached one of its limits, and all that it leaves is there and of its newest checkpoint.

    Raises:
        RunError: its summary.json is damaged.
    """
    summary, checkpoints = run_dir / "summary.json", run_dir / "checkpoints"
    if not (summary.is_file() and (run_dir / "report.html").is_file()):
        return False
    try:
        read_config(run_dir, PretrainConfig)
    except RunError:  # going on writes it anew
        return False
    done, limits = read_summary(summary)["train"], config.train
    reached = [(limits.max_steps, "steps"), (limits.max_tokens, "tokens"), (limits.max_seconds, "wall_seconds")]
    record, step = read_export_record(run_dir / "export"), done["steps"]  # an export is what a job writes last
    newest = max(list_steps(checkpoints), default=step)  # none: they were deleted to save space
    if record is None or not newest == record.step == step:
        return False
    saved = find_latest(checkpoints, step, hashes=False)
    is_its = saved is None or saved.tensors_sha256 == record.checkpoint_sha256
    return is_its and any(0 < limit <= done[name] for limit, name in reached)


def _say_finished(run: Run) -> None:
    """Say so, and how the run could go on; keep where the base and the text are now: an export reads the base again."""
    run_dir, config = run.paths.run, run.config
    stored = read_config(run_dir, PretrainConfig)
    moved = replace(stored, base=config.base, corpus=config.corpus, init_from=config.init_from)
    if moved != stored:
        write_config(run_dir, moved)
    steps, horizon = read_summary(run_dir / "summary.json")["train"]["steps"], config.optim.decay_steps
    more = f"a larger --train.max_steps, max_tokens or max_seconds goes on, up to step {horizon:,}"
    more = more if steps < horizon else describe_continuation(config, run_dir)
    print(
        f"the run in {run_dir} has reached its limit; nothing is left to do ({more}; another --run.name starts anew)."
    )


def _look_back(run_dir: Place) -> Checkpoint | None:
    """Choose the checkpoint that a run goes on from, and say what has changed since; None: it begins anew."""
    for changed in check_order(run_dir, ORDER, ADDED_TO_ORDER):
        print(f"note: {changed}.", flush=True)
    found = choose_checkpoint(run_dir / "checkpoints", tell=lambda sentence: print(f"warning: {sentence}", flush=True))
    if found is None and (step := find_last_step(run_dir / "metrics.jsonl")):
        print(f"note: step {step:,} was the last one and no checkpoint is there; the run begins anew.", flush=True)
    return found


def _check_budget(config: PretrainConfig, spec: ModelSpec) -> None:
    """Refuse a budget that was solved for a vocabulary of another size than the text gave."""
    budget, num_new_words = config.method.trainable_budget, len(spec.new_words)
    if budget and abs(spec.counts.trainable_frac - budget) > TOLERANCE * budget:
        raise ConfigError(
            f"--vocab.size is {config.vocab.size} and the text gave {num_new_words}, so that the method trains "
            f"{spec.counts.trainable_frac:.2%} instead of --method.trainable_budget {budget:g}; give --vocab.size "
            f"{num_new_words}."
        )


def _print_corpus(config: PretrainConfig, phases: Sequence[Phase]) -> None:
    limits = config.train
    is_open = config.optim.schedule == "wsd" and (limits.max_seconds > 0 or limits.max_tokens > 0)  # steps are no guess
    num_epochs = 0.0
    for phase in phases:
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
