"""A run's directory: where it is, whose it is, who holds it, and whether it is finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domext_ray.config import PretrainConfig, describe_difference, resolve_warmup_steps
from domext_ray.errors import RunError

SUBMITTED_RUNS = Path("~/domext_runs")


@dataclass(frozen=True)
class RunPaths:
    """Places of one run.

    Args:
        run: the run's directory.
        corpora: folder of prepared corpora, shared by the runs beside it.
    """

    run: Path
    corpora: Path


def resolve_paths(config: PretrainConfig) -> RunPaths:
    """Say where a run lives."""
    root = resolve_root(config.run.dir)
    cache = Path(config.prepare.cache_dir).expanduser().resolve() if config.prepare.cache_dir else root / ".corpora"
    return RunPaths(root / (config.run.name or config.method.name), cache)


def resolve_root(directory: str) -> Path:
    """Return the folder of all runs.

    A submitted job (`ray job submit`) runs in a copy of the working directory that a resubmission does not find
    again, so there a relative --run.dir stands below ~/domext_runs.

    Args:
        directory: --run.dir.
    """
    root = Path(directory).expanduser()
    if not root.is_absolute() and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        root = SUBMITTED_RUNS.expanduser() / ("" if directory == "runs" else root)
    return root.resolve()


def resolve_schedule(config: PretrainConfig, run_dir: Path) -> PretrainConfig:
    """Fix the schedule's horizon: the option's, or the one that the run started with, or its first limit."""
    decay_steps = config.optim.decay_steps
    stored = read_identity(run_dir)
    if not decay_steps:
        decay_steps = stored["optim"]["decay_steps"] if stored else config.train.max_steps
    is_limited = config.train.max_tokens or config.train.max_seconds
    if config.train.max_steps > decay_steps and not is_limited:
        print(
            f"warning: the schedule ends at step {decay_steps:,} (--optim.decay_steps); later steps train at rate 0.",
            flush=True,
        )
    resolved = replace(config, optim=replace(config.optim, decay_steps=decay_steps))
    return replace(
        resolved,
        optim=replace(resolved.optim, warmup_steps=resolve_warmup_steps(resolved)),
    )


def check_identity(run_dir: Path, identity: dict[str, Any]) -> None:
    """Refuse a run directory that was made by a run of another identity.

    Raises:
        RunError: naming every option that differs.
    """
    stored = read_identity(run_dir)
    if stored is None:
        return
    differing = describe_difference({name: stored.get(name) for name in identity}, identity)
    if differing:
        raise RunError(
            f"the run directory {run_dir} belongs to another run ({'; '.join(differing)}); "
            "give another --run.name, or the options that it was made with."
        )


def read_identity(run_dir: Path) -> dict[str, Any] | None:
    """Return the identity that a run's directory was made with; None before its first start.

    Raises:
        RunError: identity.json is damaged.
    """
    path = run_dir / "identity.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is not valid JSON; delete the run directory or give another --run.name.") from error


@contextlib.contextmanager
def hold_run(run_dir: Path) -> Iterator[None]:
    """Make a run's directory and hold it against a second job; a killed job lets go by itself.

    A mistake that shows before the run has an identity (an empty corpus, say) leaves no new directory behind.

    Raises:
        RunError: another job holds it, or it cannot be made.
    """
    made = [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("a")
    except OSError as error:
        raise RunError(
            f"the run directory {run_dir} cannot be made ({error.strerror}); give another --run.dir."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"another job is working in {run_dir}; wait for it, stop it, or give another --run.name."
            ) from error
        try:
            yield
        except BaseException:
            if made and not (run_dir / "identity.json").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                for each in made[1:]:
                    with contextlib.suppress(OSError):  # others may have put something there
                        each.rmdir()
            raise


def is_finished(run_dir: Path, config: PretrainConfig) -> bool:
    """Whether a run has reached one of its limits, and its export and report are there."""
    summary = run_dir / "summary.json"
    if not (summary.exists() and (run_dir / "report.html").exists() and (run_dir / "export").exists()):
        return False
    done, limits = json.loads(summary.read_text(encoding="utf-8"))["train"], config.train
    return (
        done["steps"] >= limits.max_steps
        or 0 < limits.max_tokens <= done["tokens"]
        or 0 < limits.max_seconds <= done["wall_seconds"]
    )
