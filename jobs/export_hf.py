"""`domext export_hf` as a file, for `ray job submit … -- python jobs/export_hf.py …`."""

from __future__ import annotations

from domext_ray.commands.main import run_job
from domext_ray.commands.models import EXPORT

if __name__ == "__main__":
    run_job(EXPORT, program="python jobs/export_hf.py")
