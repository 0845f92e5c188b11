"""`domext ablate` as a file, for `ray job submit … -- python jobs/ablate.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.measuring import ABLATE

if __name__ == "__main__":
    run_job(ABLATE, program="python jobs/ablate.py")
