"""Jobs as processes of their own, which tests start, find the workers of, and kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

import psutil


def heed_signals() -> None:
    """Give a new process its signals back: one that is started by nohup, or in the background, ignores some."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_job(command: Sequence[str], stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a job in a session of its own."""
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True, preexec_fn=heed_signals
    )


def stop_job(process: subprocess.Popen[bytes], number: signal.Signals, *, group: bool = False) -> str:
    """Send a signal to a job, or to its process group as a terminal does; return what it said on standard error."""
    children = psutil.Process(process.pid).children(recursive=True)
    (os.killpg if group else os.kill)(process.pid, number)
    said = process.communicate(timeout=240)[1].decode()
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said and "***" not in said, said
    assert not psutil.wait_procs(children, timeout=240)[1], "processes are left"
    return said


def find_workers(process: subprocess.Popen[bytes], title: str) -> list[psutil.Process]:
    """Return a job's descendants whose title, which Ray gives, has a word."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if title in " ".join(child.cmdline()):
                found.append(child)
    return found


def kill_job(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a job and all its descendants."""
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
