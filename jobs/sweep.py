"""`domext sweep` as a file, for `ray job submit … -- python jobs/sweep.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.measuring import SWEEP

if __name__ == "__main__":
    run_job(SWEEP, program="python jobs/sweep.py")
