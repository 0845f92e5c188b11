"""User-facing exceptions: what was wrong, by which rule, and which option or file to change.

A job turns any of them into one sentence on standard error and exit code 2 (`exit_on_user_error`). Everything
else is a defect of this library and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class DomextError(ValueError):
    """Base of every mistake that a user can mend; its message is one complete sentence."""


class ConfigError(DomextError):
    """An option has a value outside its rule, or two options contradict each other."""


class CorpusError(DomextError):
    """A text source, a shard or a manifest is missing, empty or not what its record says."""


class BaseModelError(DomextError):
    """A base checkpoint is missing, of another architecture, or not the one that a run was made with."""


class RunError(DomextError):
    """A run directory belongs to another configuration, is in use, or holds no usable checkpoint."""


class TrainingError(DomextError):
    """Training cannot go on, for example because a loss is not finite."""


def find_user_error(error: BaseException) -> DomextError | None:
    """Return the `DomextError` that caused `error`, looking through the wrappers that Ray puts around it.

    Ray hands a worker's exception to the driver as `cause` (task errors), `worker_failures` (Train) or
    `__cause__`; the first `DomextError` found in that order is the one to show.
    """
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, DomextError):
            return current
        failures = getattr(current, "worker_failures", None) or {}
        linked = [getattr(current, "cause", None), *failures.values(), current.__cause__, current.__context__]
        queue.extend(each for each in linked if isinstance(each, BaseException))
    return None


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a user's mistake as one sentence and exit with code 2; let every other exception pass."""
    try:
        yield
    except Exception as error:
        user_error = find_user_error(error)
        if user_error is None:
            raise
        sys.stdout.flush()
        print(f"error: {user_error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
