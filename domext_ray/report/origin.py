"""Where a run comes from: what the driver puts into run.json when training starts, and the run's page reads.

Enters: what the job knows before the first step. Leaves: when and how it was started, on which machine, by which code,
on which text. It names no folder and no host.
"""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from domext_ray.config.method import MethodConfig
from domext_ray.errors import RunError
from domext_ray.model.counts import ParameterCounts
from domext_ray.options.places import hide_places
from domext_ray.runs.run_directory import RUN, read_run
from domext_ray.runtime.ray_cluster import describe_nodes, list_accelerators, list_nodes
from domext_ray.storage import Place, Where

_EXPECTED = {"started": str, "command": str, "commit": str, "parameters": dict, "corpus": dict, "machine": str}
_SECONDS = 5.0
"""Git is given up after so long: its disk may hang."""


def describe_origin(run_dir: Where, **facts: Any) -> dict[str, Any]:
    """Return what run.json says of a start; the time of the run's first start stays. Ray is initialised.

    Args:
        run_dir: the run's directory.
        facts: what else is known of it, plain values without paths.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    started = read_run(run_dir).get("origin", {}).get("started", now)
    command = describe_command(sys.argv)
    return {"started": started, "command": command, "commit": find_commit(), "machine": describe_machine(), **facts}


def read_origin(run_dir: Where) -> dict[str, Any]:
    """Return what `describe_origin` told of a run's newest start, with the versions of packages.

    Raises:
        RunError: run.json is missing or damaged.
    """
    run = read_run(run_dir, {f"origin.{name}": kind for name, kind in _EXPECTED.items()} | {"versions": list})
    if not run:
        raise RunError(f"{Place(run_dir) / RUN} is missing; a run writes it when training starts: run the job again.")
    versions = {name: each for name, each in run["versions"][-1].items() if name != "from_step"}
    return {**run["origin"], "versions": versions}


def describe_command(args: list[str]) -> str:
    """Return a command line as others may see it: of paths only the last part; empty for a call from Python.

    Args:
        args: the program and what it was given, as `sys.argv`.
    """
    program = Path(args[0]) if args else Path()
    if program.name in ("domext", "__main__.py"):
        name = "domext"
    elif program.parent.name == "jobs":
        name = f"python jobs/{program.name}"
    else:
        return ""
    return " ".join([name, *(shlex.quote(hide_places(each)) for each in args[1:])])


def find_commit() -> str:
    """Return the commit of a checkout that this package runs from, with "+" where files differ; empty: none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    commit = _ask_git(root, "rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if commit and _ask_git(root, "status", "--porcelain", "--untracked-files=no") else commit


def _ask_git(root: Path, *question: str) -> str:
    """What git says; nothing where it is not installed, or does not trust the checkout's owner."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *question], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def describe_processor() -> str:
    """Return the type of this machine's CPU; its architecture where Linux does not say more."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    return platform.machine()


def describe_machine() -> str:
    """Return what a run trains on: nodes, types of CPU (the driver's) and GPU; Ray is initialised."""
    kinds = ", ".join([describe_processor(), *list_accelerators()])
    return f"{describe_nodes(list_nodes())} ({kinds})"


def count_trained(counts: ParameterCounts, method: MethodConfig) -> dict[str, int]:
    """Return how many parameters a method trains by kind, as the page names it."""
    whole = {
        "all": "every parameter",
        "top_layers": f"the top {method.top_layers} layers",
        "layer_norms": "LayerNorms",
        "biases": "biases",
    }
    if method.trains in whole:
        return {whole[method.trains]: counts.trainable}
    kinds = {_name(kind): number for kind, number in counts.kinds.items()}
    kinds["heads of the model"] = counts.trainable - sum(kinds.values())
    return {name: number for name, number in kinds.items() if number}


def _name(kind: str) -> str:
    """A kind of extension in words: NewWords is "new words"."""
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", kind).lower().replace("lora", "LoRA")
