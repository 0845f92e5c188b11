"""How far a run has come: whether it has ended, and what it goes on from."""

from __future__ import annotations

from dataclasses import replace

from domext_ray.config.pretrain import RunOptions, SettledConfig
from domext_ray.errors import RunError
from domext_ray.export.folder import read_export_record
from domext_ray.report.summary import read_summary
from domext_ray.runs.run_directory import check_order, describe_continuation, read_config, write_config
from domext_ray.storage import Place
from domext_ray.training.checkpoint import Checkpoint, choose_checkpoint, find_latest, list_steps
from domext_ray.training.metrics import find_last_step
from domext_ray.training.phases import ADDED_TO_ORDER, ORDER


def is_finished(run_dir: Place, config: RunOptions) -> bool:
    """Whether a run has reached one of its limits, and all that it leaves is there and of its newest checkpoint.

    Raises:
        RunError: its summary.json is damaged.
    """
    summary, checkpoints = run_dir / "summary.json", run_dir / "checkpoints"
    if not (summary.is_file() and (run_dir / "report.html").is_file()):
        return False
    try:
        read_config(run_dir, SettledConfig)
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


def say_finished(run_dir: Place, config: SettledConfig) -> None:
    """Say so, and how the run could go on; keep where the base and the text are now: an export reads the base again."""
    stored = read_config(run_dir, SettledConfig)
    moved = replace(stored, base=config.base, corpus=config.corpus, init_from=config.init_from)
    if moved != stored:
        write_config(run_dir, moved)
    steps, horizon = read_summary(run_dir / "summary.json")["train"]["steps"], config.optim.decay_steps
    more = f"a larger --train.max_steps, max_tokens or max_seconds goes on, up to step {horizon:,}"
    more = more if steps < horizon else describe_continuation(config, run_dir)
    print(
        f"the run in {run_dir} has reached its limit; nothing is left to do ({more}; another --run.name starts anew)."
    )


def look_back(run_dir: Place) -> Checkpoint | None:
    """Choose the checkpoint that a run goes on from, and say what has changed since; None: it begins anew."""
    for changed in check_order(run_dir, ORDER, ADDED_TO_ORDER):
        print(f"note: {changed}.", flush=True)
    found = choose_checkpoint(run_dir / "checkpoints", tell=lambda sentence: print(f"warning: {sentence}", flush=True))
    if found is None and (step := find_last_step(run_dir / "metrics.jsonl")):
        print(f"note: step {step:,} was the last one and no checkpoint is there; the run begins anew.", flush=True)
    return found
