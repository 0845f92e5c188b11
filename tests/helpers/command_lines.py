"""Command lines that documents and cluster files show, read by what they call; nothing is run."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from typing import Any

import click
from conftest import REPOSITORY
from ray.scripts.scripts import cli


def load_jobs() -> dict[str, Any]:
    """Return the `Job` of every job, by its name; benchmark.py, which has an argument parser, is none."""
    paths = [path for path in sorted((REPOSITORY / "jobs").glob("*.py")) if "run_job(JOB)" in path.read_text()]
    return {path.stem: runpy.run_path(str(path))["JOB"] for path in paths}


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
