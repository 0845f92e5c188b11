"""Jobs as processes of their own, which tests start, find the workers of, and kill."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

import psutil


def start_job(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a job in a session of its own."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def find_workers(process: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
    """Return a job's descendants whose title, which Ray gives, has a word."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [each for each in children if title in " ".join(each.cmdline())]


def kill_job(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a job and all its descendants."""
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
