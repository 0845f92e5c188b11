"""Jobs that are told to end: what they say, their exit code, and what they still do; each in a process of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from job_processes import heed_signals

JOB = """
import sys, time
from domext_ray.runtime import stopping
from domext_ray.runtime.stopping import exit_on_user_error

asked = []

def work(seconds):
    print("ready", flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (asked and {saves}):
        time.sleep(0.01)
    print("saved" if asked else "done", flush=True)

with exit_on_user_error():
    stopping.SAVE_SECONDS = dict.fromkeys(stopping.SAVE_SECONDS, {limit})
    if {can_save}:
        try:
            with stopping.save_first(lambda: asked.append(1) is None, lambda: {is_done}):
                work({seconds})
        except KeyboardInterrupt:
            raise stopping.Stopped("stopped at step 7 by " + stopping.signal_name() + ".") from None
    else:
        work({seconds})
"""


@contextmanager
def start(begin: Callable[[], object] = heed_signals, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """A job that works until it is stopped; `begin` is called in its process first."""
    code = JOB.format(**{"seconds": 240, "limit": 240, "can_save": False, "saves": True, "is_done": False, **settings})
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, preexec_fn=begin)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


SIGNALS = [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143), (signal.SIGHUP, "SIGHUP", 129)]


@pytest.mark.parametrize("can_save", [False, True])
def test_a_job_ends_with_one_sentence_and_the_signals_code(can_save: bool) -> None:
    """One that can save does so first."""
    for number, name, code in SIGNALS:
        with start(can_save=can_save) as job:
            job.send_signal(number)
            output, error = job.communicate(timeout=120)
        assert job.returncode == code and output == ("saved\n" if can_save else "")
        if can_save:
            assert error.endswith(f"stopped at step 7 by {name}.\n") and "Traceback" not in error
        else:
            assert error == f"stopped by {name}; the same command goes on with what is not finished.\n"


def test_only_ctrl_c_cuts_a_save_short() -> None:
    with start(can_save=True, saves=False) as job:
        assert job.stderr is not None
        job.send_signal(signal.SIGHUP)
        assert job.stderr.readline() == "\n" and job.stderr.readline().startswith("SIGHUP: the next step is saved")
        job.send_signal(signal.SIGHUP)  # a terminal that closes may send it twice
        job.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(timeout=0.5)
        job.send_signal(signal.SIGINT)
        output, error = job.communicate(timeout=120)
    assert job.returncode == 129 and output == "" and error == "stopped at step 7 by SIGHUP.\n"


def test_a_save_that_takes_too_long_or_is_done_is_not_waited_for() -> None:
    for settings in ({"limit": 1}, {"is_done": True}):
        with start(can_save=True, saves=False, **settings) as job:
            job.send_signal(signal.SIGTERM)
            output, error = job.communicate(timeout=120)
        assert job.returncode == 143 and output == "" and error.endswith("stopped at step 7 by SIGTERM.\n")


def test_a_signal_that_the_job_was_started_to_ignore_stays_ignored() -> None:
    with start(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), seconds=1) as job:  # as nohup does
        job.send_signal(signal.SIGHUP)
        output, error = job.communicate(timeout=120)
    assert job.returncode == 0 and output == "done\n" and error == ""


def test_a_terminal_that_closes_lets_the_job_save() -> None:
    code = JOB.format(seconds=240, limit=240, can_save=True, saves=True, is_done=False)
    process, terminal = pty.fork()
    if process == 0:
        heed_signals()
        os.execv(sys.executable, [sys.executable, "-c", code])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)  # the kernel sends SIGHUP, and writing fails from here on
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 129
