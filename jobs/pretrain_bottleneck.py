"""`domext pretrain bottleneck` as a file, for `ray job submit … -- python jobs/pretrain_bottleneck.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import BOTTLENECK

if __name__ == "__main__":
    run_job(BOTTLENECK, program="python jobs/pretrain_bottleneck.py")
