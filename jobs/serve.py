"""`domext serve` as a file, for `ray job submit … -- python jobs/serve.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.serving import SERVE

if __name__ == "__main__":
    run_job(SERVE, program="python jobs/serve.py")
