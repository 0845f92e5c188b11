"""`domext evaluate_forgetting` as a file, for `ray job submit … -- python jobs/evaluate_forgetting.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.measuring import FORGETTING

if __name__ == "__main__":
    run_job(FORGETTING, program="python jobs/evaluate_forgetting.py")
