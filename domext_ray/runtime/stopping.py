"""How a job ends when it is told to: Ctrl-C, SIGTERM (pre-emption) or SIGHUP (the terminal is gone).

A signal raises KeyboardInterrupt wherever the job is. Inside `save_first` it asks for a save and lets the job go on
until that is done, within a limit: its own, or that of whoever kills it (`find_kill_timer`), less what it takes to say
where the job stands. A Ctrl-C after the first signal ends the job at once; other signals after it change nothing,
because a terminal that closes may send SIGHUP twice. The exit code is 128 + the first signal's number, as shells have
it.

A program that calls this library (a notebook, say) is not ended: it gets `Stopped`, and its own handlers back.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from domext_ray.config.options.submitted import find_submission
from domext_ray.errors import DomextError, StorageError, find_user_error

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
SAVE_SECONDS = {signal.SIGINT: 60, signal.SIGTERM: 600, signal.SIGHUP: 600}
"""How long a job goes on for its save, where nobody kills it sooner."""
GIVEN, RAY_GIVEN = "DOMEXT_STOP_SECONDS", "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variables: the seconds from SIGTERM to SIGKILL, of any program that starts a job, and of Ray's jobs."""
RAY_SECONDS, OTHERS_SECONDS = 3.0, 30.0
"""What Ray's jobs have without its variable; what Slurm (KillWait) and Kubernetes give unless they are configured."""
LAST_WORDS = 1 / 3, 10.0
"""Of those seconds what a job keeps for what follows its save: a share, and no more than so many seconds."""
LOOK_SECONDS = 0.5
"""Between two looks at whether the save is done."""


@dataclass(frozen=True)
class KillTimer:
    """Another program's limit: it kills this job so many seconds after it has told it to end."""

    seconds: float
    source: str  # who says so

    def describe(self) -> str:
        """Return it as a part of a sentence."""
        return f"the job is killed {self.seconds:g} s after it is told to end: {self.source}"

    @property
    def left(self) -> float:
        """Seconds of it that a job may spend on its save."""
        share, most = LAST_WORDS
        return self.seconds - min(share * self.seconds, most)


def find_kill_timer(environment: Mapping[str, str] = os.environ) -> KillTimer | None:
    """Return the limit of the program that has started this job; None: as far as can be seen, nobody kills it.

    Ctrl-C and a terminal that closes, once they have come, are no such program's.
    """
    if find_submission(environment):
        given = _read_seconds(environment.get(RAY_GIVEN))
        if given is None:
            return KillTimer(RAY_SECONDS, f"{RAY_GIVEN} was not set at `ray start`")
        return KillTimer(given, RAY_GIVEN)
    if _SIGNALS.first not in (None, signal.SIGTERM):
        return None
    if (given := _read_seconds(environment.get(GIVEN))) is not None:
        return KillTimer(given, GIVEN)
    for name, whose in (("SLURM_JOB_ID", "Slurm's KillWait"), ("KUBERNETES_SERVICE_HOST", "a pod's grace period")):
        if name in environment:
            return KillTimer(OTHERS_SECONDS, f"{whose}, unless {GIVEN} says otherwise")
    return None


def name_stop() -> str:
    """Return what ends this job: a key, or of a submitted job, which has no terminal, a command."""
    submission = find_submission()
    return f"ray job stop {submission}" if submission else "Ctrl-C"


def _read_seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


class Stopped(KeyboardInterrupt):
    """A job has ended because it was told to; its message is one sentence that says how to go on."""

    _render_traceback_ = DomextError._render_traceback_


class _Signals:
    """What has arrived; there is one for the process, as there is one handler of each signal."""

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self.ends_process = True
        self.reset()

    def reset(self) -> None:
        self.first: signal.Signals | None = None
        self.save: tuple[Callable[[], bool], Callable[[], bool]] | None = None  # see `save_first`
        self.deadline = 0.0  # of a save that is waited for, as time.monotonic() has it; 0: none is
        self.has_waited = False  # the save is there, or is not waited for any longer

    def install(self) -> None:
        for number in self.before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
            if self._can_save():
                return
        elif number in (signal.SIGTERM, signal.SIGHUP) and not self.has_waited:
            return
        elif number == signal.SIGINT and not self.deadline and self.ends_process:
            _say(f"\n{describe_end()}\n")  # the job is ending, and its user will not wait for it
            os._exit(exit_code())
        self.end_saving()
        raise KeyboardInterrupt

    def _can_save(self) -> bool:
        """Ask for a save; whether there is one to wait for."""
        assert self.first is not None
        try:
            if self.save is None or not self.save[0]():
                return False
        except (OSError, StorageError):  # the request cannot be written, so nothing could be saved either
            return False
        timer = find_kill_timer()
        seconds = min(SAVE_SECONDS[self.first], timer.left if timer else math.inf)
        self.deadline = time.monotonic() + seconds
        # `threading` has locks, which may be held now.
        _thread.start_new_thread(self._wait_for_save, (self.save[1], self.deadline))
        haste = "" if find_submission() else " (Ctrl-C ends it at once)"
        limit = f" if that takes at most {seconds:.3g} s ({timer.describe()})" if timer else ""
        _say(f"\n{NAMES[self.first]}: the next step is saved{limit}, then the job ends{haste}\n")
        return True

    def _wait_for_save(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Send the main thread a signal, wherever it waits, when the save is there or is not waited for any longer."""
        waking = signal.SIGTERM if signal.SIGTERM in self.before else self.first
        while self.deadline == deadline and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError, StorageError):  # it is asked again: nothing else would end the job
                if is_done():
                    break
            time.sleep(min(LOOK_SECONDS, left))
        if self.deadline == deadline and waking is not None:  # else it is over, and another one may be waited for
            self.has_waited = True
            signal.pthread_kill(threading.main_thread().ident or 0, waking)

    def end_saving(self) -> None:
        self.deadline, self.has_waited = 0.0, False


_SIGNALS = _Signals()


@contextlib.contextmanager
def catch_signals(*, ends_process: bool = True) -> Iterator[None]:
    """Answer the three signals as this module says; one that the job was started to ignore (nohup) stays ignored.

    With `ends_process` the process ends with the job: a second Ctrl-C may end it at once, and signals that come after
    the job have their default.
    """
    handlers = {number: signal.getsignal(number) for number in NAMES}
    _SIGNALS.before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    _SIGNALS.ends_process = ends_process
    _SIGNALS.reset()
    _SIGNALS.install()
    try:
        yield
    finally:
        for number, handler in _SIGNALS.before.items():
            signal.signal(number, signal.SIG_DFL if is_stopped() and ends_process else handler)
        _SIGNALS.before = {}


@contextlib.contextmanager
def keep_signals() -> Iterator[None]:
    """Keep the handlers over the start of Ray, which takes SIGTERM; its processes do not get a terminal's SIGHUP."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # children have the mask, too
    try:
        yield
    finally:
        _SIGNALS.install()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def save_first(ask: Callable[[], bool], is_done: Callable[[], bool]) -> Iterator[None]:
    """Answer the first signal by asking for a save; what is inside goes on until that is done, or its time is over.

    `ask` is False when there is nothing to save, and the job ends at once. It also ends at once when `is_done`: what
    else it waits for may have got the signal, too. After a signal the block ends with a KeyboardInterrupt.
    """
    _SIGNALS.save = ask, is_done
    try:
        yield
    finally:
        _SIGNALS.end_saving()
        _SIGNALS.save = None
    if _SIGNALS.first is not None:
        raise KeyboardInterrupt


def is_stopped() -> bool:
    """Whether one of the signals has arrived: errors after it are what ending brings with it."""
    return _SIGNALS.first is not None


def signal_name() -> str:
    """Return what the user calls the signal that ends the job."""
    return NAMES[_SIGNALS.first or signal.SIGINT]


def exit_code() -> int:
    """Return 128 + the signal's number."""
    return 128 + (_SIGNALS.first or signal.SIGINT)


def describe_end() -> str:
    """Return the last sentence of a job that was told to end and has nothing to say about where it stands."""
    return f"stopped by {signal_name()}; the same command goes on with what is not finished."


def exit_saying(sentence: str, code: int) -> SystemExit:
    """Say a job's last sentence on standard error, and return what ends it."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{sentence}\n")):
        try:
            print(text, end="", file=stream, flush=True)
        except OSError:  # the terminal is gone: nothing can be said there, and the exit code shall stay
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return SystemExit(code)


def _say(text: str) -> None:
    """Write to standard error from a handler; a terminal that is gone is no reason to fail."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


@contextlib.contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise a mistake without what Ray has wrapped around it, and `Stopped` for what ending brings with it."""
    try:
        yield
    except BaseException as error:
        if is_stopped() and not isinstance(error, DomextError):
            raise error if isinstance(error, Stopped) else Stopped(describe_end()) from None
        user_error = find_user_error(error) if isinstance(error, Exception) else None
        if user_error is None or user_error is error:
            raise
        raise user_error from error


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a user's mistake, or that the job was stopped, as one sentence and exit; other exceptions pass.

    The exit code is the error's, 2 for a mistake, and 128 + the signal's number for a job that was stopped (130 for
    Ctrl-C).
    """
    with catch_signals():
        try:
            with _unwrap_errors():
                yield
        except Stopped as error:
            raise exit_saying(str(error), exit_code()) from None
        except DomextError as error:
            raise exit_saying(f"error: {error}", error.exit_code) from None


@contextlib.contextmanager
def raise_user_error() -> Iterator[None]:
    """Raise a user's mistake, or `Stopped`, in a program that goes on; other exceptions pass.

    Python gives signals to the main thread alone, so in another one none is caught here.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with catch_signals(ends_process=False) if is_main else contextlib.nullcontext(), _unwrap_errors():
            yield
    finally:
        if is_main:
            _SIGNALS.reset()
