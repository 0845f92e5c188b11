"""Faults at named points of a job, in whichever of its processes comes there; Python imports this file at its start.

FAULTS is a JSON list of faults, each once per folder FAULTS_DIR, where the processes of a job count their calls:

    {"point": "domext_ray.training.checkpoint:_write_files", "call": 3, "action": "kill", "delay": 0.02}

is a SIGKILL of the process that makes the third call of that function, 0.02 s after it has begun, or as it ends; with
no delay, before it begins. Actions are those of `_ACT`. Only modules that a fault names are touched, as they are
imported.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def _kill_driver() -> None:
    os.kill(int((_FOLDER / "driver").read_text()), signal.SIGKILL)


def _fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_ACT = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_driver": _kill_driver,
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "full_disk": _fill_disk,
    "sleep": lambda: time.sleep(5.0),
    "sleep_long": lambda: time.sleep(10.0),
}
_FOLDER = Path(os.environ.get("FAULTS_DIR", "/nonexistent"))
_FAULTS = json.loads(os.environ.get("FAULTS", "[]"))


def _count(point: str) -> int:
    """The number of this call of a point, over all processes: the size of a file that each call makes longer."""
    file = os.open(_FOLDER / point.replace(":", "-"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)
    os.close(file)
    return number


def _note(fault: dict, number: int) -> None:
    with (_FOLDER / "fired").open("a") as file:
        file.write(json.dumps({**fault, "call": number, "pid": os.getpid(), "at": time.time()}) + "\n")


def _wrap(function, faults):
    @functools.wraps(function)
    def call(*args, **kwargs):
        number = _count(faults[0]["point"])
        due = [planned for planned in faults if planned["call"] == number]
        if not due:
            return function(*args, **kwargs)
        fault, has_fired = due[0], threading.Event()

        def fire() -> None:
            if not has_fired.is_set():
                has_fired.set()
                _note(fault, number)
                _ACT[fault["action"]]()

        if fault.get("delay") is None:
            fire()
            return function(*args, **kwargs)
        threading.Timer(fault["delay"], fire).start()
        try:
            return function(*args, **kwargs)
        finally:
            fire()

    return call


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that faults name, and wraps their points once they are executed."""

    def __init__(self) -> None:
        self.points: dict[str, dict[str, list]] = {}
        for fault in _FAULTS:
            module, _, name = fault["point"].partition(":")
            self.points.setdefault(module, {}).setdefault(name, []).append(fault)

    def find_spec(self, name, path=None, target=None):
        if name not in self.points:
            return None
        wrapped = self.points.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            for dotted, faults in wrapped.items():
                *outer, last = dotted.split(".")
                owner = functools.reduce(getattr, outer, module)
                setattr(owner, last, _wrap(getattr(owner, last), faults))

        spec.loader.exec_module = exec_module
        return spec


if _FAULTS:
    sys.meta_path.insert(0, _Finder())
