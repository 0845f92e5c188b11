"""`domext prepare_corpus` as a file, for `ray job submit … -- python jobs/prepare_corpus.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import PREPARE

if __name__ == "__main__":
    run_job(PREPARE, program="python jobs/prepare_corpus.py")
