"""Export a run's newest checkpoint for use without this library.

python jobs/export_hf.py --run runs/af                          # the model, for torch and transformers alone
python jobs/export_hf.py --run runs/af --output ~/models/clinic-bert
python jobs/export_hf.py --run runs/bottleneck --format adapterhub    # the bottlenecks, for AdapterHub's library
python jobs/export_hf.py --run runs/lora --format peft                # the updates, for peft
"""

from __future__ import annotations

from pathlib import Path

import torch

from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.export import export_run
from domext_ray.export_adapters import export_adapter_run
from domext_ray.job_config import ExportConfig

if __name__ == "__main__":
    with exit_on_user_error():
        config = parse_config(ExportConfig)
        run_dir = Path(config.run).expanduser()
        folder = Path(config.output).expanduser() if config.output else run_dir / config.folder_name
        if config.format == "huggingface":
            export_run(run_dir, folder, getattr(torch, config.dtype))
        else:
            export_adapter_run(run_dir, folder, form=config.format, domain=config.domain)
        print(f"export: {folder}")
