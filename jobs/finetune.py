"""`domext finetune` as a file, for `ray job submit … -- python jobs/finetune.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.measuring import FINETUNE

if __name__ == "__main__":
    run_job(FINETUNE, program="python jobs/finetune.py")
