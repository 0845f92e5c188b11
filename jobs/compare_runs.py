"""`domext compare_runs` as a file, for `ray job submit … -- python jobs/compare_runs.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.models import COMPARE_RUNS

if __name__ == "__main__":
    run_job(COMPARE_RUNS, program="python jobs/compare_runs.py")
