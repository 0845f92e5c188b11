"""`domext pretrain af` as a file, for `ray job submit … -- python jobs/pretrain_af.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import AF

if __name__ == "__main__":
    run_job(AF, program="python jobs/pretrain_af.py")
