"""Jobs as functions: a file of jobs/ run in this process, as `python jobs/JOB.py` would run it."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from typing import NamedTuple

from conftest import REPOSITORY


class Ended(NamedTuple):
    """How a job ended: its exit code, and what it printed to standard output and standard error."""

    code: int
    out: str
    err: str


def call_job(job: str, *arguments: str) -> Ended:
    """Run a job here; `job` is its file's name without the ending."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    code = 0
    sys.argv = [str(REPOSITORY / "jobs" / f"{job}.py"), *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = argv
    return Ended(code, out.getvalue(), err.getvalue())
