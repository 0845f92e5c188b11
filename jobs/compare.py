"""`domext compare` as a file, for `ray job submit … -- python jobs/compare.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.models import COMPARE

if __name__ == "__main__":
    run_job(COMPARE, program="python jobs/compare.py")
