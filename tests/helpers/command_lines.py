"""Command lines that documents and cluster files show, read by what they call; nothing is run."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from typing import Any

import click
from conftest import REPOSITORY
from ray.scripts.scripts import cli

from domext_ray.commands.job import Job


def load_jobs() -> dict[str, Job[Any]]:
    """Return the job of every file in jobs/, by the file's name; benchmark.py has none."""
    found = {}
    for path in sorted((REPOSITORY / "jobs").glob("*.py")):
        if path.stem != "benchmark":
            (found[path.stem],) = (each for each in runpy.run_path(str(path)).values() if isinstance(each, Job))
    return found


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
