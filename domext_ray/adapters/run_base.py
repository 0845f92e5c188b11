"""Which base a fine-tuned model grew from, as the runs on its way say.

Enters: a fine-tuning run, or its export within it. Leaves: what `load_base` takes. Whether the model still has that
base's tensors is seen when a bank takes it.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.downstream.start.model import TRAININGS, is_export, is_run
from domext_ray.errors import RunError
from domext_ray.runs.run_directory import read_config
from domext_ray.training.start import read_run_config


def find_base(model: str) -> str:
    """Return the base at the beginning of a model's runs.

    Args:
        model: a run's directory, an export within it, a base's folder, or a hub id; a run may have started from any of
            these.

    Raises:
        RunError: an export is in no run's directory any more, or a run's config.yaml is damaged.
    """
    folder = Path(model).expanduser()
    if is_export(folder):  # one that has an extension; what trained all weights is a base
        run = folder.resolve().parent
        if not is_run(run):
            raise RunError(f"{folder} does not say what its base is, and is no longer in the folder of its run.")
        return find_base(str(run))
    if not is_run(folder):
        return model
    if (folder / TRAININGS).is_dir():
        return find_base(read_config(folder, FinetuneConfig).model)
    config = read_run_config(folder)
    return config.base if config.method.has_domain else model
