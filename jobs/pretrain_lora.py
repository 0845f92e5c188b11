"""`domext pretrain lora` as a file, for `ray job submit … -- python jobs/pretrain_lora.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import LORA

if __name__ == "__main__":
    run_job(LORA, program="python jobs/pretrain_lora.py")
