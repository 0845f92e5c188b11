"""Work that a program calls, in a notebook for example, and that is told to stop: the program goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from domext_ray.errors import ConfigError, RunError, StorageError
from domext_ray.runtime.stopping import NAMES, Stopped, is_stopped, raise_user_error, save_first, signal_name


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    """Every signal has a handler of the program's own, and has it again afterwards."""

    def handle(number: int, frame: object) -> None:
        raise AssertionError("the program's own handler")

    before = {signum: signal.signal(signum, handle) for signum in NAMES}
    try:
        yield
        assert [signal.getsignal(signum) for signum in NAMES] == [handle] * len(NAMES)
        assert not is_stopped()
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def test_a_signal_is_raised_and_the_program_goes_on() -> None:
    for number, name in NAMES.items():
        with pytest.raises(Stopped) as stopped, raise_user_error():
            os.kill(os.getpid(), number)
        assert str(stopped.value) == f"stopped by {name}; the same command goes on with what is not finished."
        with raise_user_error():
            assert not is_stopped()


def test_what_was_saved_is_said() -> None:
    asked: list[int] = []

    def work() -> None:
        try:
            with save_first(lambda: asked.append(1) is None, lambda: bool(asked)):
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise Stopped(f"stopped at step 7 by {signal_name()}.") from None

    with pytest.raises(Stopped, match=r"^stopped at step 7 by Ctrl-C\.$"), raise_user_error():
        work()
    assert asked == [1]


def test_storage_that_is_silent_while_a_save_is_waited_for_is_asked_again() -> None:
    """And where the save cannot be asked for at all, the job ends at once."""
    met: list[Exception] = [StorageError("the bucket has not answered"), OSError("the disk fails")]

    def is_done() -> bool:
        if met:
            raise met.pop()
        return True

    def refuse() -> bool:
        raise StorageError("the disk is full")

    for ask, done in ((lambda: True, is_done), (refuse, lambda: False)):
        started = time.monotonic()
        with pytest.raises(Stopped), raise_user_error(), save_first(ask, done):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        assert time.monotonic() - started < 20 and not met


def test_a_second_ctrl_c_ends_the_work_and_not_the_program() -> None:
    with pytest.raises(Stopped), raise_user_error():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_mistake_loses_its_wrappers_and_a_defect_keeps_its_kind() -> None:
    with pytest.raises(RunError, match="^the disk$") as raised, raise_user_error():
        try:
            raise RunError("the disk")
        except RunError as error:
            raise RuntimeError("a task failed") from error
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(ZeroDivisionError), raise_user_error():
        _ = 1 // 0


def test_a_mistake_after_a_signal_is_told() -> None:
    with pytest.raises(ConfigError), raise_user_error():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ConfigError("it must be 1.") from None


def test_in_another_thread_no_signal_is_caught() -> None:
    found: list[object] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        try:
            with raise_user_error():
                found.append(signal.getsignal(signal.SIGINT) is before)
                raise ConfigError("it must be 1.")
        except ConfigError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, "it must be 1."]
