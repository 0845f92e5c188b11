"""resolve -> prepare -> train -> report -> export: what a training job calls.

Enters: a `PretrainConfig`. Leaves: the run directory RUN.DIR/RUN.NAME with config.yaml, run.json, tokenizer/,
metrics.jsonl, what trackers keep, checkpoints/, export/, summary.json, curves.png and report.html, which is there
while the run trains, too; and a line in RUN.DIR/index.html. The same command goes on from the newest checkpoint, and
says so when there is nothing left to do.
"""

from __future__ import annotations

import time

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.export.model_folder import export_run
from domext_ray.pretraining.inputs import check_texts, prepare_run
from domext_ray.pretraining.plan import begin, look_back, resolve, tell_if_finished, tell_of_base
from domext_ray.report.forecast import forecast_run
from domext_ray.report.report import LiveReport, report_run, suggest_comparison
from domext_ray.report.summary import record_start, show_times
from domext_ray.runs.events import EXPORT, enter_phase
from domext_ray.storage import Place
from domext_ray.training.pretrain import pretrain


def run_pretraining(config: PretrainConfig, preset: str = "", started: float | None = None) -> Place:
    """Carry a pre-training run from text to report, and return its directory.

    `preset` is the one that its options stand on, for its page; `started` is when the job began, as `time.time()` has
    it.
    """
    started = time.time() if started is None else started
    plan = resolve(config, preset)
    if not config.dry_run and tell_if_finished(plan.paths.run, plan.config):
        return plan.paths.run
    samples = check_texts(plan.config, plan.spec.base)
    goes_on_from = look_back(plan.paths.run)
    tell_of_base(plan.config, plan.spec.base)
    if config.dry_run:
        print(forecast_run(plan, samples))
        return plan.paths.run
    with begin(plan, started) as held:
        run = prepare_run(held, goes_on_from)
        run_dir = run.paths.run
        if tell_if_finished(run_dir, run.config):  # known only now, where the corpus says how many steps there are
            return run_dir
        record_start(run)
        with LiveReport(run_dir) as report:
            pretrain(run, report.note_evaluation)
        failure = report_run(run)
        enter_phase(run_dir, "exporting the model", EXPORT)
        export_run(run_dir, run_dir / "export")  # last: by its record a later start sees that all of this was done
        enter_phase(run_dir, "done")
        if failure is None:
            show_times(run_dir)
        print(f"export: {run_dir / 'export'}")
        if failure is not None:  # a page is no reason to go without the model
            raise failure
        print(f"report: {run_dir / 'report.html'}")
        if config.base != "none" and run_dir.is_local:
            print(f"did it help? {suggest_comparison(str(run_dir), config.base)} (or another --task)")
    return run_dir
