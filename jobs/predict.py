"""`domext predict` as a file, for `ray job submit … -- python jobs/predict.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.predicting import PREDICT

if __name__ == "__main__":
    run_job(PREDICT, program="python jobs/predict.py")
