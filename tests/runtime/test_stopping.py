"""Jobs that are told to end: what they say, their exit code, and what they still do; each in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from job_processes import heed_signals

from domext_ray.runtime import stopping

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


RAY = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})}
SLURM, POD = {"SLURM_JOB_ID": "7"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
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


def test_a_save_that_takes_too_long_or_is_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long is also what does not fit before the job is killed."""
    cases: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
        ({"limit": 1}, {}),
        ({"is_done": True}, {}),
        ({}, RAY | {stopping.RAY_GIVEN: "1"}),
    )
    for settings, environment in cases:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
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


@pytest.mark.parametrize(
    ("environment", "seconds", "left", "says"),
    [
        (RAY, 3, 2, "killed 3 s after it is told to end: RAY_JOB_STOP_WAIT_TIME_S was not set at `ray start`"),
        (RAY | {stopping.RAY_GIVEN: "300"}, 300, 290, "killed 300 s after it is told to end: RAY_JOB_STOP_WAIT_TIME_S"),
        (RAY | {stopping.RAY_GIVEN: "0"}, 0, 0, "killed 0 s after"),
        (RAY | {stopping.RAY_GIVEN: "5 minutes"}, 3, 2, "was not set"),
        (RAY | SLURM | {stopping.GIVEN: "90"}, 3, 2, "was not set"),
        (SLURM | {stopping.GIVEN: "90"}, 90, 80, "killed 90 s after it is told to end: DOMEXT_STOP_SECONDS"),
        ({stopping.GIVEN: "45.5"}, 45.5, 35.5, "45.5 s after it is told to end: DOMEXT_STOP_SECONDS"),
        (SLURM, 30, 20, "Slurm's KillWait, unless DOMEXT_STOP_SECONDS says otherwise"),
        (POD, 30, 20, "a pod's grace period, unless DOMEXT_STOP_SECONDS says otherwise"),
    ],
)
def test_who_kills_a_job_and_when(environment: dict[str, str], seconds: float, left: float, says: str) -> None:
    timer = stopping.find_kill_timer(environment)
    assert stopping.find_kill_timer({"HOME": "/root"}) is None, "nobody kills a job of a terminal"
    assert timer is not None and (timer.seconds, timer.left) == (seconds, left) and says in timer.describe()


@pytest.mark.parametrize(
    ("environment", "number", "promise"),
    [
        (RAY, signal.SIGTERM, " if that takes at most 2 s (the job is killed 3 s after .*), then the job ends"),
        (RAY | {stopping.RAY_GIVEN: "300"}, signal.SIGTERM, " if that takes at most 290 s (.*), then the job ends"),
        (RAY, signal.SIGINT, " if that takes at most 2 s (.*), then the job ends"),
        (SLURM, signal.SIGINT, ", then the job ends (Ctrl-C ends it at once)"),
        (SLURM, signal.SIGTERM, " if that takes at most 20 s (.*), then the job ends (Ctrl-C ends it at once)"),
        ({}, signal.SIGTERM, ", then the job ends (Ctrl-C ends it at once)"),
    ],
)
def test_no_more_is_promised_than_fits(
    environment: dict[str, str], number: signal.Signals, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*RAY, *SLURM, *POD, stopping.GIVEN, stopping.RAY_GIVEN):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with start(can_save=True, limit=600) as job:
        job.send_signal(number)
        output, error = job.communicate(timeout=120)
    assert output == "saved\n" and job.returncode == 128 + number
    said = f"\n{stopping.NAMES[number]}: the next step is saved{promise}\n"
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), error), error


def test_what_ends_a_job_is_what_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopping.name_stop() == "Ctrl-C"
    settings = {"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1", "job_name": "raysubmit_1"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(settings))  # as the job server sets it
    assert stopping.name_stop() == "ray job stop raysubmit_1"
