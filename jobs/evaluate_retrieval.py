"""`domext evaluate_retrieval` as a file, for `ray job submit … -- python jobs/evaluate_retrieval.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.measuring import RETRIEVAL

if __name__ == "__main__":
    run_job(RETRIEVAL, program="python jobs/evaluate_retrieval.py")
