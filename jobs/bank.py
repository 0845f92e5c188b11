"""`domext bank` as a file, for `ray job submit … -- python jobs/bank.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.models import BANK

if __name__ == "__main__":
    run_job(BANK, program="python jobs/bank.py")
