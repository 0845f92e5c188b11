"""resolve -> prepare -> train -> report -> export: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, run.json, tokenizer/,
metrics.jsonl, what trackers keep, checkpoints/, export/, summary.json, curves.png and report.html, which is there
while the run trains, too; and a line in RUN.DIR/index.html. The same command goes on from the newest checkpoint, and
says so when there is nothing left to do.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import replace

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ReportError, StorageError
from domext_ray.export.folder import HUGGINGFACE, check_target
from domext_ray.export.model_folder import export_run
from domext_ray.inputs import check_texts, prepare_run
from domext_ray.plan import is_finished, look_back, resolve, resolve_workers, say_finished, warn_of_rate, warn_of_rules
from domext_ray.report.compare import write_index
from domext_ray.report.examples import make_examples
from domext_ray.report.figures import describe_times, format_summary
from domext_ray.report.forecast import forecast_run
from domext_ray.report.report import LiveReport, write_report
from domext_ray.report.summary import add_times, describe_origin, write_summary
from domext_ray.runs.events import EXPORT, PREPARING, REPORT, START_UP, WORKERS, enter_phase
from domext_ray.runs.run_directory import add_versions, lock_run, write_config, write_run
from domext_ray.runtime.ray_cluster import start_ray
from domext_ray.storage import Place, write_text
from domext_ray.training.elastic import check_room
from domext_ray.training.phases import ORDER, describe_reading, make_phases
from domext_ray.training.pretrain import pretrain
from domext_ray.training.run import Run

REPORT_LOG = "report_error.log"


def run_pretraining(config: PretrainConfig, preset: str = "", started: float | None = None) -> Place:
    """Carry a pre-training run from text to report, and return its directory.

    `preset` is the one that its options stand on, for its page; `started` is when the job began, as `time.time()` has
    it.
    """
    started = time.time() if started is None else started
    plan = resolve(config, preset)
    run_dir, base = plan.paths.run, plan.spec.base
    if not config.dry_run and is_finished(run_dir, plan.config):
        say_finished(run_dir, plan.config)
        return run_dir
    samples = check_texts(plan.config, base)
    goes_on_from = look_back(run_dir)
    warn_of_rules(base)
    if base is not None:
        warn_of_rate(config.optim, base, "--optim.lr")
    if config.dry_run:
        print(forecast_run(plan, samples))
        return run_dir
    with lock_run(run_dir) as held:  # before Ray starts: storage that refuses is told within seconds
        start_ray(config.scale.wait_seconds)
        settled = resolve_workers(plan.config)  # what a cluster's machines are is known only now
        check_room(settled.scale)
        print(f"run directory: {held}", flush=True)
        if not held.is_local:
            print(f"prepared corpora: {plan.paths.corpora}", flush=True)
        check_target(held / "export", HUGGINGFACE)
        enter_phase(held, "starting the job", START_UP, started)
        enter_phase(held, "preparing the text", PREPARING)
        run = prepare_run(replace(plan, config=settled, paths=replace(plan.paths, run=held)), goes_on_from)
        if is_finished(held, run.config):  # known only now, where the corpus says how many steps there are
            say_finished(held, run.config)
        else:
            train_run(run)
            publish_run(run)
    return held


def train_run(run: Run) -> None:
    """Record what a run is, and train it to its limit."""
    run_dir, phases = run.paths.run, make_phases(run.config, run.inputs.texts)
    print(*describe_reading(run.config, phases), sep="\n", flush=True)
    write_config(run_dir, run.config)
    versions = add_versions(run_dir, run.goes_on_from.step if run.goes_on_from else 0)
    write_run(run_dir, identity=run.identity, order=ORDER, versions=versions, origin=describe_origin(run, phases))
    report = LiveReport(run_dir)
    enter_phase(run_dir, "starting the workers", WORKERS)
    try:
        pretrain(run, report.note_evaluation)
    except BaseException:  # a signal, too
        report.note_stop()
        raise
    report.close()


def publish_run(run: Run) -> None:
    """Report a trained run and export its model; a page that fails is no reason to go without the model."""
    run_dir, log, failure = run.paths.run, run.paths.run / REPORT_LOG, None
    try:
        enter_phase(run_dir, "writing the report", REPORT)
        summary = write_summary(run_dir, run.config)
        write_report(run_dir, examples=make_examples(run_dir, run.inputs.domain))
        write_index(run_dir.parent)
        print(format_summary(summary))
        log.delete()
    except Exception as error:
        with contextlib.suppress(OSError, StorageError):
            (run_dir / "report.html").delete()  # of before the end: without it the same command writes it anew
        with contextlib.suppress(OSError, StorageError):  # the disk may be what is wrong
            write_text(log, traceback.format_exc())
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
