"""User-facing exceptions: what was wrong, by which rule, and which option or file to change.

A job turns any of them into one sentence on standard error and exit code 2 (`domext_ray.runtime.stopping`). Everything
else is a defect of this library and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Any

_STORAGE_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "mend its permissions, or give another place"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO), "look after that storage"),
    errno.EFBIG: "lift the limit on the size of files",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "lift the limit on open files (ulimit -n)"),
}
"""What to do about an error of the operating system that is no defect of this library."""
_FILE_ADVICE = _STORAGE_ADVICE | {
    **dict.fromkeys((errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV, errno.EREMOTEIO), "look after that storage"),
    **dict.fromkeys((errno.EHOSTDOWN, errno.EHOSTUNREACH), "look after that storage"),
    errno.ENOMEM: "give this job more memory",
}
"""The same where a file is named, which may be another machine's; where none is, it may be a connection's error."""
_MAX_CHARS = 4000
"""Of a sentence: a file may have a value of megabytes where a name is expected."""
_PASSWORD = re.compile(r"(?<!\w)((?!hf:)\w[\w+.-]*://)[^/\s]+@")
"""What stands before the host in an address; in hf://NAME@REVISION it is the name."""
_MISSING = re.compile(r"(?:\w+\.)*(?:ModuleNotFoundError|System error): No module named '([\w.]+)'.*")
_OPTION = re.compile(r"(domext \w+ --|'--|--help|--wrap none)|--(?=[a-z])")
"""What stands before an option's name in a sentence; in a command, a value and the name of help it stays."""
_NODE = re.compile(r"\bip=([\w.:]+)")


class DomextError(Exception):
    """Base of every mistake that a user can mend; its message is one complete sentence.

    It is no `ValueError`: who catches those around what it reads means damage, and storage that is silent is none.
    """

    exit_code = 2
    """Of a job that ends with it."""

    def __str__(self) -> str:
        text = hide_passwords(" ".join(super().__str__().splitlines()))  # of a name or a value with line breaks in it
        return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS // 2]} … {text[-_MAX_CHARS // 4 :]}"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback: the sentence, with options as a function's arguments."""
        return [name_arguments(str(self))]


class ConfigError(DomextError, ValueError):
    """An option has a value outside its rule, or two options contradict each other; pydantic collects it."""


class OptionError(ConfigError):
    """One option has a value outside its rule.

    `rule` ends the sentence; `place` is a file and line, or says that it is the default (empty: a flag's).
    """

    def __init__(self, option: str, value: object, rule: str, place: str = "") -> None:
        super().__init__(option, value, rule, place)  # all of them: an exception travels between processes as its args
        self.option, self.value, self.rule, self.place = option, value, rule, place

    def __str__(self) -> str:
        shown = repr(",".join(map(str, self.value)) if isinstance(self.value, tuple) else self.value)
        shown = shown if len(shown) <= 200 else f"{shown[:150]} … {shown[-10:]}"
        text = f"--{self.option} is {shown}{f' ({self.place})' if self.place else ''}; it must be {self.rule}."
        return hide_passwords(text)

    def under(self, prefix: str) -> OptionError:
        """Return the same error of an option whose name has further sections before it."""
        return OptionError(f"{prefix}{self.option}", self.value, self.rule, self.place)


class CorpusError(DomextError):
    """A text source, a shard or a manifest is missing, empty or not what its record says."""


class BaseModelError(DomextError):
    """A base checkpoint is missing, of another architecture, or not the one that a run was made with."""


class RunError(DomextError):
    """A run directory belongs to another configuration, is in use, or holds no usable checkpoint."""


class StorageError(DomextError):
    """Storage is full, refuses, fails or does not answer: nothing is known of what it holds, so that is not damaged.

    The work is not to blame, and goes on once that is mended.
    """


class AccessError(StorageError):
    """What a disk holds is another user's, and may not be read or written."""


class ReportError(RunError):
    """A run was trained and exported, and only its report could not be written."""

    exit_code = 3


class TrainingError(DomextError):
    """Training cannot go on, for example because a loss is not finite."""


class DivergenceError(TrainingError):
    """A loss or a gradient is not finite: the learning rate is too high for this run."""


def name_arguments(text: str) -> str:
    """Return a sentence with the names of options as those of a function's arguments: without --."""
    return _OPTION.sub(r"\1", text)


def find_user_error(error: BaseException) -> DomextError | None:
    """Return the `DomextError` that caused `error`, looking through the wrappers that Ray puts around it.

    Ray hands a worker's exception to the driver as `cause` (task errors), `worker_failures` or `controller_failure`
    (Train) or `__cause__`; the first `DomextError` found is the one to show. The error of a Ray task is of its cause's
    class too, but its text is the traceback from the other process: what counts is the cause. Where there is none, a
    disk that is full, may not be written or fails is the user's to mend, too, and so is a node that lacks a package.
    """
    found: list[BaseException] = [error]
    for current in found:
        cause = getattr(current, "cause", None)
        if isinstance(current, DomextError) and not isinstance(cause, BaseException):
            return current
        failures = (getattr(current, "worker_failures", None) or {}).values()
        # No `__context__`: a defect met while a mistake is told is still a defect.
        linked = (cause, getattr(current, "controller_failure", None), *failures, current.__cause__)
        found += [failure for failure in linked if isinstance(failure, BaseException) and failure not in found]
    return next(
        (told for find in (find_storage_error, _find_missing) for failure in found if (told := find(failure))), None
    )


def _find_missing(error: BaseException) -> RunError | None:
    """Return the sentence about a node without a package that its process needs; Ray has that as text alone."""
    lines = str(error).strip().splitlines() if type(error).__module__.startswith("ray.") else []
    missing = next((match for line in lines if (match := _MISSING.fullmatch(line.strip()))), None)
    if missing is None:
        return None
    node = _NODE.search(str(error))
    return RunError(
        f"{f'the node {node[1]}' if node else 'a node'} has no Python package {missing[1].partition('.')[0]!r} "
        f"({missing[1]}), which this job needs there; install this package, in the job's version, with all that it "
        "needs on every node, and the same command goes on."
    )


def to_line(error: object) -> str:
    """Return what an error says as a part of a sentence: in one line, and no long one."""
    return " ".join(str(error).split())[:200]


def find_storage_error(error: BaseException, path: object = "") -> StorageError | None:
    """Return the sentence about a disk that is full, may not be written or fails; None for any other error.

    Without a `path` it names the error's own file.
    """
    number: Any = getattr(error, "errno", None)
    if number is None:  # safetensors, Arrow and shutil write the number into their text
        quoted = re.search(r"\b(?:os error|errno:?) (\d+)", str(error), re.IGNORECASE)
        number = int(quoted[1]) if quoted else None
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        number = errno.ENOSPC  # NumPy's, which does not say why
    place = path or getattr(error, "filename", None)
    advice = (_FILE_ADVICE if place else _STORAGE_ADVICE).get(number)
    if isinstance(getattr(error, "cause", None), BaseException) or advice is None:
        return None
    kind = AccessError if number in (errno.EACCES, errno.EPERM) else StorageError
    return kind(
        f"{place or 'a file of this job'} cannot be read or written ({os.strerror(number)}): {advice}, and the same "
        "command goes on."
    )


def hide_passwords(text: str) -> str:
    """Return text without what addresses have before their host, as in http://USER:PASSWORD@HOST."""
    return _PASSWORD.sub(r"\1***@", text)


@contextlib.contextmanager
def name_file(path: object) -> Iterator[None]:
    """Name the file where its storage is what fails, so that this is told apart from damage."""
    try:
        yield
    except DomextError:
        raise
    except Exception as error:  # libraries have their own, and quote the operating system's
        found = find_storage_error(error, path)
        if found is None:
            raise
        raise found from error
