"""A grid of trainings as Ray tasks: best mean on dev, test scored once -> a run directory.

Enters: a `FinetuneConfig`. Leaves RUN.DIR/RUN.NAME with config.yaml, run.json, trainings/ (one JSON a training,
and the tensors of the best one and its restarts), predictions.jsonl, resamples.npz, summary.json, scores.png,
report.html and export/. With --against the folder against/ in it is such a run of that model, which is not exported;
summary and report have the difference. The same command goes on, also with a grid that has grown or shrunk: trainings
that have ended are kept. BERT section A.3 (grid, random restarts, chosen on dev).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.finetune.comparison import summarize_pair, write_resamples
from domext_ray.downstream.finetune.errors_page import ERRORS, write_mistakes
from domext_ray.downstream.finetune.finetuned import read_finetune_summary
from domext_ray.downstream.finetune.grid import GridResults, choose_point, gather_results
from domext_ray.downstream.finetune.output import (
    FinalScores,
    ScoredGrid,
    build_summary,
    describe_finetune_plan,
    format_finetune_summary,
    get_figure,
    write_finetune_report,
)
from domext_ray.downstream.finetune.plan import FinetunePlan, is_finished, plan_finetuning
from domext_ray.downstream.finetune.progress import FinetuneWatch
from domext_ray.downstream.finetune.training import Point
from domext_ray.downstream.finetune.trainings import MORE_MEMORY, make_pool, score
from domext_ray.errors import ConfigError, TrainingError
from domext_ray.export.folder import FINE_TUNED, check_target
from domext_ray.files import read_json
from domext_ray.runs.run_directory import lock_run, write_config, write_run
from domext_ray.runtime.on_tune import run_trials
from domext_ray.runtime.ray_cluster import (
    check_shared_storage,
    describe_hold,
    list_nodes,
    resolve_gpu,
    resolve_precision,
    start_ray,
)
from domext_ray.runtime.tasks import Task, run_tasks
from domext_ray.runtime.trials import Rules, Trial, describe_amount
from domext_ray.storage import Place, write_json, write_text
from domext_ray.text.data.sources import write_files


def run_finetuning(config: FinetuneConfig) -> Place:
    """Carry a fine-tuning run from labelled files to scores, report and export; return its directory.

    With `dry_run` everything is checked and printed, and nothing is trained or written.
    """
    plans = plan_finetuning(config)
    folder = plans[0].folder
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(note)
    if config.dry_run:
        outcomes = [plan.ledger.read(trial) for plan in plans for trial in plan.trials]
        trained = max(sum(number for number, _ in plan.counts.values()) for plan in plans)
        amount = describe_amount([outcome for outcome in outcomes if outcome.has_ended], len(outcomes), 4 * trained)
        print(f"{amount}\n\n{describe_finetune_plan(*plans)}")
        return folder
    if all(map(is_finished, plans)):
        said = f"the run in {folder} has ended; nothing is left to do."
        print(said, *_list_verdicts(read_finetune_summary(folder)), sep="\n")
        return folder
    if config.export:
        check_target(folder / "export", FINE_TUNED)
    print(plans[0].loaded.describe(), flush=True)
    start_ray(config.scale.wait_seconds)
    settled = resolve_precision(resolve_gpu(plans[0].config))
    cpus, gpus, parallel = plan_resources(settled)
    ready = []
    for plan in plans:
        own = replace(plan.config, engine=settled.engine, scale=settled.scale)
        ready.append(replace(plan, config=own, cpus=cpus, gpus=gpus, parallel=parallel))
    _carry_out(*ready)
    return folder


def _carry_out(plan: FinetunePlan, against: FinetunePlan | None = None) -> None:
    """Train, score and report a run; before it the model that it is compared with, unless that has ended."""
    with lock_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_run(plan.folder, identity=plan.identity)
        write_files(plan.folder, plan.loaded.files)
        check_shared_storage(plan.folder)
        plan.trainings.local().mkdir(exist_ok=True)
        if against is not None and not is_finished(against):
            print(f"{against.start.name}, which {plan.start.name} is compared with:", flush=True)
            _carry_out(against)
            print(f"\n{plan.start.name}:", flush=True)
        started = time.perf_counter()
        scored = score_grid(plan, train_grid(plan))
        report_finetuning(plan, scored, time.perf_counter() - started)


def plan_resources(config: FinetuneConfig) -> tuple[float, float, int]:
    """Return CPUs and GPUs of a training, and trainings at once; Ray is initialised."""
    nodes, scale = list_nodes(), config.scale
    num_trainings = len(config.grid.points) * config.grid.restarts
    cpus, gpus = sum(node.cpus for node in nodes), sum(int(node.gpus) for node in nodes)
    room = gpus * int(1.0 / scale.gpus + 1e-9) if scale.uses_gpu else int(cpus / (scale.cpus or 1.0))
    parallel = min(num_trainings, scale.parallel or max(1, room))  # without room the first waits for it
    largest = max(node.cpus for node in nodes)
    share = scale.cpus or min(max(1.0, cpus // parallel), largest or 1.0)  # without a CPU it waits for one
    if share > largest > 0:
        raise ConfigError(f"--scale.cpus is {share:g}; no node has more than {largest:g} CPUs{describe_hold()}.")
    return share, scale.gpus if scale.uses_gpu else 0.0, parallel


def train_grid(plan: FinetunePlan) -> GridResults:
    """Run the trainings of a grid that have not ended before; one at least has ended well."""
    results = _train_all(plan, plan.trials)
    if not results.ended:
        raise TrainingError(f"all {len(plan.trials)} trainings failed; of the first: {results.failed[0]['reason']}")
    return results


def score_grid(plan: FinetunePlan, results: GridResults) -> ScoredGrid:
    """Choose a point by dev, score its restarts on test, and export the best of them."""
    best, chosen = choose_point(results)
    points, best_point = [Point(**record["point"]) for record in chosen], Point(**best["point"])
    _restore_tensors(plan, points)
    tasks = [Task(i, (point, point == best_point), 1.0, point.key) for i, point in enumerate(points)]
    said = {"verb": "scoring", "unit": "models", "remedy": MORE_MEMORY}
    shares = {"total": len(tasks), "cpus": plan.cpus, "gpus": plan.gpus}
    outcomes = run_tasks(partial(score, plan), tasks, None, **said, **shares)  # type: ignore[arg-type]
    (baselines,) = filter(None, outcomes)  # of the best one
    return ScoredGrid(results, best, chosen, gather_scores(plan, points, best_point, baselines))


def report_finetuning(plan: FinetunePlan, scored: ScoredGrid, seconds: float) -> None:
    """Write a run's summary and report, and print the table; `seconds` is the wall clock of this start."""
    summary = build_summary(plan, scored, seconds)
    if plan.config.against:
        summary["against"] = summarize_pair(plan.folder, summary)
    summary["mistakes"] = _write_mistakes(plan, summary)
    write_json(plan.folder / "summary.json", summary)
    write_finetune_report(plan.folder)
    print(format_finetune_summary(summary))
    print(f"\n{plan.folder / 'report.html'}", *_list_verdicts(summary), sep="\n")


def _write_mistakes(plan: FinetunePlan, summary: dict[str, Any]) -> dict[str, Any]:
    """Write errors.html, what the exported model got wrong on dev, and return how much it is, by kind."""
    own, metric = Point(**summary["best"]["point"]), summary["metric"]
    lines = (plan.trainings / own.key / "dev.predictions.jsonl").read_text(encoding="utf-8").splitlines()
    report = write_mistakes(
        plan.folder / ERRORS,
        plan.task,
        plan.task.data.dev,
        [json.loads(line)["prediction"] for line in lines],
        title=f"{plan.folder.name}: what is wrong on dev",
        score=(metric, f"{get_figure(summary['dev'], metric):.4f}"),
    )
    return {name: report[name] for name in ("examples", "wrong", "mistakes")}


def _list_verdicts(summary: dict[str, Any]) -> list[str]:
    return [summary["against"]["verdict"]] if "against" in summary else []


def gather_scores(
    plan: FinetunePlan, points: Sequence[Point], best: Point, baselines: dict[str, dict[str, dict[str, Any]]]
) -> FinalScores:
    """Read what the chosen training and its restarts reached, and write the run's predictions and resamples."""
    splits, folder = plan.splits, plan.trainings / best.key
    lines = [(folder / f"{split}.predictions.jsonl").read_text(encoding="utf-8") for split in splits]
    write_text(plan.folder / "predictions.jsonl", "".join(lines))
    drawn = {split: [np.load(plan.trainings / point.key / f"{split}.npy") for point in points] for split in splits}
    write_resamples(plan.folder, {split: np.stack(arrays) for split, arrays in drawn.items()})
    remedy = "delete the training's folder and the .json beside it: the same command trains it again"
    read = {
        (point, split): read_json(plan.trainings / point.key / f"{split}.json", remedy, {"figures": dict})
        for point in points
        for split in splits
    }
    own = {split: read[best, split] for split in splits}
    notes = [note for record in own.values() for note in record["notes"]]
    return FinalScores(
        own["dev"]["figures"],
        own["test"]["figures"] if "test" in own else {},
        {split: [get_figure(read[point, split]["figures"], plan.task.metric) for point in points] for split in splits},
        baselines,
        {split: record["steps"] for split, record in own.items()},
        tuple(dict.fromkeys(notes)),
    )


def _train_all(plan: FinetunePlan, trials: Sequence[Trial], *, keep_all: bool = False) -> GridResults:
    """Run the trainings that have not ended before; one that fails leaves its reason, and the others go on."""
    outcomes = [plan.ledger.read(trial) for trial in trials]
    watch = FinetuneWatch(plan.trainings, tuple(plan.task.stages), outcomes, keep_all=keep_all)
    # A process keeps the memory of a GPU that its trial has taken.
    rules = Rules("fine-tuning", _explain_death, reuses=not plan.gpus, failures=TrainingError)
    run_trials(make_pool(plan, len(trials)), trials, plan.ledger, watch, rules)
    watch.line.keep(watch.describe_ended())
    return gather_results(plan.ledger.read(trial) for trial in trials)


def _explain_death(trial: Trial, deaths: int) -> str:
    return f"the process of {trial.name} died, as one does that needs more memory than there is; {MORE_MEMORY}."


def _restore_tensors(plan: FinetunePlan, points: Sequence[Point]) -> None:
    """Train those of the chosen trainings again whose tensors were dropped: an earlier grid had a better point."""
    names = [*(f"{name}.safetensors" for name in plan.task.stages), "dev.json", "dev.npy", "dev.predictions.jsonl"]
    lost = [point for point in points if not all((plan.trainings / point.key / name).is_file() for name in names)]
    if not lost:
        return
    print(f"{len(lost)} of the chosen trainings were overtaken in an earlier grid: trained again for their tensors.")
    for point in lost:
        plan.ledger.find(point.key).delete()
    failed = _train_all(plan, [Trial(point.key, asdict(point)) for point in lost], keep_all=True).failed
    if failed:
        raise TrainingError(failed[0]["reason"])
