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
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import ConfigError, TrainingError
from domext_ray.export.folder import FINE_TUNED, check_target
from domext_ray.families.errors_page import ERRORS, write_mistakes
from domext_ray.families.label_counts import describe_set
from domext_ray.finetuning.comparison import (
    AGAINST,
    ScoredRun,
    compare_pair,
    read_finetuned,
    summarize_pair,
    write_resamples,
)
from domext_ray.finetuning.finetuned import read_finetune_summary
from domext_ray.finetuning.output import (
    ScoredGrid,
    build_summary,
    describe_finetune_plan,
    format_pair,
    get_figure,
    tabulate_summary,
    write_finetune_report,
)
from domext_ray.finetuning.plan import FinetunePlan, is_finished, plan_finetuning
from domext_ray.finetuning.trainings import MORE_MEMORY, FinetuneWatch, make_pool, read_split, score
from domext_ray.intervals import Resampled
from domext_ray.report.compare import write_index
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
from domext_ray.runtime.trials import Outcome, Rules, Trial, choose_arm, describe_amount
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
        outcomes = [outcome for plan in plans for outcome in plan.ledger.read_all(plan.trials)]
        trained = max(sum(number for number, _ in plan.counts.values()) for plan in plans)
        amount = describe_amount(outcomes, len(outcomes), 4 * trained)
        print(f"{amount}\n\n{describe_finetune_plan(*plans)}")
        return folder
    if all(map(is_finished, plans)):
        said = f"the run in {folder} has ended; nothing is left to do."
        print(said, *_list_verdicts(read_finetune_summary(folder)), sep="\n")
        return folder
    if config.export:
        check_target(folder / "export", FINE_TUNED)
    print(describe_set(plans[0].task.data), flush=True)
    start_ray(config.scale.wait_seconds)
    settled = resolve_precision(resolve_gpu(plans[0].config))
    cpus, gpus, parallel = plan_resources(settled)
    ready = []
    for plan in plans:
        own = replace(plan.config, engine=settled.engine, scale=settled.scale)
        ready.append(replace(plan, config=own, cpus=cpus, gpus=gpus, parallel=parallel))
    _carry_out(*ready)
    write_index(folder.parent)
    return folder


def _carry_out(plan: FinetunePlan, against: FinetunePlan | None = None) -> None:
    """Train, score and report a run; before it the model that it is compared with, unless that has ended."""
    with lock_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_run(plan.folder, identity=plan.identity)
        write_files(plan.folder, plan.task.data.files)
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
    num_trainings = len(config.grid.list_points()) * config.grid.restarts
    cpus, gpus = sum(node.cpus for node in nodes), sum(int(node.gpus) for node in nodes)
    room = gpus * int(1.0 / scale.gpus + 1e-9) if scale.uses_gpu else int(cpus / (scale.cpus or 1.0))
    parallel = min(num_trainings, scale.parallel or max(1, room))  # without room the first waits for it
    largest = max(node.cpus for node in nodes)
    share = scale.cpus or min(max(1.0, cpus // parallel), largest or 1.0)  # without a CPU it waits for one
    if share > largest > 0:
        raise ConfigError(f"--scale.cpus is {share:g}; no node has more than {largest:g} CPUs{describe_hold()}.")
    return share, scale.gpus if scale.uses_gpu else 0.0, parallel


def train_grid(plan: FinetunePlan) -> Sequence[Outcome]:
    """Run the trainings of a grid that have not ended before, and return what all left; one at least has ended well."""
    outcomes = _train_all(plan, plan.trials)
    if not any(outcome.is_complete for outcome in outcomes):
        raise TrainingError(f"all {len(outcomes)} trainings failed; of the first: {outcomes[0].failure}")
    return outcomes


def score_grid(plan: FinetunePlan, outcomes: Sequence[Outcome]) -> ScoredGrid:
    """Choose a point by dev, score its restarts on test, and export the best of them."""
    chosen = _restore_tensors(plan, choose_arm(outcomes, "dev"))
    best = max(chosen, key=lambda outcome: outcome.get("dev"))
    tasks = [Task(i, (outcome, outcome is best), 1.0, outcome.name) for i, outcome in enumerate(chosen)]
    said = {"verb": "scoring", "unit": "models", "remedy": MORE_MEMORY}
    shares = {"total": len(tasks), "cpus": plan.cpus, "gpus": plan.gpus}
    (baselines,) = filter(None, run_tasks(partial(score, plan), tasks, None, **said, **shares))  # type: ignore[arg-type]
    return ScoredGrid(outcomes, chosen, best, *_gather_scores(plan, chosen, best), baselines)


def report_finetuning(plan: FinetunePlan, scored: ScoredGrid, seconds: float) -> None:
    """Write a run's summary and report, and print the table; `seconds` is the wall clock of this start."""
    summary, compared = build_summary(plan, scored, seconds), ""
    if plan.config.against:
        run = ScoredRun(plan.folder.name, summary, scored.samples[plan.splits[-1]])
        pair = read_finetuned(plan.folder / AGAINST), run
        lines = compare_pair(*pair)
        summary["against"], compared = summarize_pair(*pair, lines), format_pair(*pair, lines)
    summary["mistakes"] = _write_mistakes(plan, scored)
    write_json(plan.folder / "summary.json", summary)
    write_finetune_report(plan.folder, summary, compared)
    print(tabulate_summary(summary).show_text())
    print(f"\n{plan.folder / 'report.html'}", *_list_verdicts(summary), sep="\n")


def _write_mistakes(plan: FinetunePlan, scored: ScoredGrid) -> dict[str, Any]:
    """Write errors.html, what the exported model got wrong on dev, and return how much it is, by kind."""
    best, metric = scored.best.name, plan.task.metric
    lines = (plan.trainings / best / "dev.predictions.jsonl").read_text(encoding="utf-8").splitlines()
    report = write_mistakes(
        plan.folder / ERRORS,
        plan.task,
        plan.task.data.dev,
        [json.loads(line)["prediction"] for line in lines],
        title=f"{plan.folder.name}: what is wrong on dev",
        score=(metric, f"{get_figure(scored.splits['dev']['figures'], metric):.4f}"),
    )
    return {name: report[name] for name in ("examples", "wrong", "mistakes")}


def _list_verdicts(summary: dict[str, Any]) -> list[str]:
    return [summary["against"]["verdict"]] if "against" in summary else []


def _gather_scores(
    plan: FinetunePlan, chosen: Sequence[Outcome], best: Outcome
) -> tuple[dict[str, dict[str, Any]], dict[str, Resampled]]:
    """Read what the chosen trainings scored, and write the predictions of the best and the resamples of all.

    Return what the best one has left of each split, and the metric of all.
    """
    folders = {outcome.name: plan.trainings / outcome.name for outcome in chosen}
    own, samples, splits = folders[best.name], dict[str, Resampled](), dict[str, dict[str, Any]]()
    lines = [(own / f"{split}.predictions.jsonl").read_text(encoding="utf-8") for split in plan.splits]
    write_text(plan.folder / "predictions.jsonl", "".join(lines))
    for split in plan.splits:
        read = {name: read_split(folder, split) for name, folder in folders.items()}
        values = [get_figure(record["figures"], plan.task.metric) for record in read.values()]
        drawn = np.stack([np.load(folder / f"{split}.npy") for folder in folders.values()])
        splits[split] = read[best.name]
        samples[split] = Resampled(np.array(values), drawn, splits[split]["figures"]["clusters"])
    write_resamples(plan.folder, samples)
    return splits, samples


def _train_all(plan: FinetunePlan, trials: Sequence[Trial], *, keep_all: bool = False) -> Sequence[Outcome]:
    """Run the trainings that have not ended before; one that fails leaves its reason, and the others go on."""
    stages, begun = tuple(plan.task.stages), plan.ledger.read_all(trials)
    watch = FinetuneWatch(plan.trainings, stages, begun, keep_all=keep_all)
    # A process keeps the memory of a GPU that its trial has taken.
    rules = Rules("fine-tuning", _explain_death, reuses=not plan.gpus, failures=TrainingError)
    run_trials(make_pool(plan, len(trials)), trials, plan.ledger, watch, rules)
    watch.line.keep(watch.describe_ended())
    return plan.ledger.read_all(trials)


def _explain_death(trial: Trial, deaths: int) -> str:
    return f"the process of {trial.name} died, as one does that needs more memory than there is; {MORE_MEMORY}."


def _restore_tensors(plan: FinetunePlan, chosen: Sequence[Outcome]) -> Sequence[Outcome]:
    """Train those of the chosen trainings again whose tensors were dropped: an earlier grid had a better point.

    Return what the chosen ones have left then.
    """
    names = [*(f"{name}.safetensors" for name in plan.task.stages), "dev.json", "dev.npy", "dev.predictions.jsonl"]
    lost = [
        outcome.trial
        for outcome in chosen
        if not all((plan.trainings / outcome.name / name).is_file() for name in names)
    ]
    if not lost:
        return chosen
    print(f"{len(lost)} of the chosen trainings were overtaken in an earlier grid: trained again for their tensors.")
    for trial in lost:
        plan.ledger.find(trial.name).delete()
    for outcome in _train_all(plan, lost, keep_all=True):
        if not outcome.is_complete:
            raise TrainingError(outcome.failure)
    return plan.ledger.read_all(outcome.trial for outcome in chosen)
