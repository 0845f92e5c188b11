"""Command lines that documents and cluster files show, read by what they call; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from conftest import REPOSITORY
from ray.scripts.scripts import cli

from domext_ray.commands.job import Job
from domext_ray.commands.main import JOBS


def load_jobs() -> dict[str, Job[Any]]:
    """Return the job of every file in jobs/, by the file's name; benchmark.py has none."""
    files = sorted(path.stem for path in (REPOSITORY / "jobs").glob("*.py") if path.stem != "benchmark")
    jobs = {verb.replace(" ", "_"): job for verb, job in JOBS.items()}
    return {name: jobs[name] for name in files}


def read_ray_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Let Ray's own command line read a command.

    Args:
        words: the command without its first word, `ray`.

    Returns:
        The innermost name of the command, and the words after it.

    Raises:
        click.ClickException: Ray does not know the command or an option.
    """
    found: click.Command = cli
    rest, name = list(words), ""
    while isinstance(found, click.Group):
        name = rest.pop(0)
        found = found.commands[name]
    found.make_context(name, list(rest))
    return name, rest
