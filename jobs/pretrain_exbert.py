"""`domext pretrain exbert` as a file, for `ray job submit … -- python jobs/pretrain_exbert.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import EXBERT

if __name__ == "__main__":
    run_job(EXBERT, program="python jobs/pretrain_exbert.py")
