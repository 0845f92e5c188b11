"""Export a run's newest checkpoint as a Hugging Face folder that needs torch and transformers only.

python jobs/export_hf.py --run runs/af
python jobs/export_hf.py --run runs/af --output ~/models/clinic-bert
"""

from __future__ import annotations

from pathlib import Path

import torch

from domext_ray.config import ExportConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.export import export_run

if __name__ == "__main__":
    with exit_on_user_error():
        config = parse_config(ExportConfig)
        run_dir = Path(config.run).expanduser()
        output = Path(config.output).expanduser() if config.output else run_dir / "export"
        folder = export_run(run_dir, output, getattr(torch, config.dtype))
        print(f"export: {folder}")
