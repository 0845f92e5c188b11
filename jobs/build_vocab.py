"""`domext build_vocab` as a file, for `ray job submit … -- python jobs/build_vocab.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.pretraining import VOCAB

if __name__ == "__main__":
    run_job(VOCAB, program="python jobs/build_vocab.py")
