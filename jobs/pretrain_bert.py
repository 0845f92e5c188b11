"""`domext pretrain bert` as a file, for `ray job submit … -- python jobs/pretrain_bert.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import BERT

if __name__ == "__main__":
    run_job(BERT, program="python jobs/pretrain_bert.py")
