"""`domext embed` as a file, for `ray job submit … -- python jobs/embed.py …`."""

from __future__ import annotations

from domext_ray.commands.embedding import EMBED
from domext_ray.commands.main import run_job

if __name__ == "__main__":
    run_job(EMBED, program="python jobs/embed.py")
