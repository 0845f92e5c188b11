"""Export a run's newest checkpoint for use without this library.

python jobs/export_hf.py --run runs/af                          # the model, for torch and transformers alone
python jobs/export_hf.py --run runs/af --output ~/models/clinic-bert
python jobs/export_hf.py --run runs/bottleneck --format adapterhub    # the bottlenecks, for AdapterHub's library
python jobs/export_hf.py --run runs/lora --format peft                # the updates, for peft
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import Job, run_job
from domext_ray.config.jobs import ExportConfig


def export(config: ExportConfig) -> None:
    """Write the export's folder."""
    import torch

    from domext_ray.export.adapter_folders import export_adapter_run
    from domext_ray.export.model_folder import export_run

    run_dir = Path(config.run).expanduser()
    folder = Path(config.output).expanduser() if config.output else run_dir / config.folder_name
    if config.format == "huggingface":
        export_run(run_dir, folder, getattr(torch, config.dtype))
    else:
        export_adapter_run(run_dir, folder, form=config.format, domain=config.domain)
    print(f"export: {folder}")


JOB = Job(__doc__, ExportConfig, export, found=("run",))

if __name__ == "__main__":
    run_job(JOB)
