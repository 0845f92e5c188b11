"""AF Adapter: freeze a BERT, train extra attention heads and FFN units on your text, get a Hugging Face model.

    python jobs/pretrain_af.py                                  # the small base and corpus that every machine has
    python jobs/pretrain_af.py --base bert-base-uncased --corpus 'texts/*.jsonl' --run.name clinic

Options come from jobs/configs/af.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import LENGTH, PLACE, TRAINING, WITHOUT_BASE, Job, run_job
from domext_ray.config.pretrain import PretrainConfig


def pretrain(config: PretrainConfig) -> None:
    """Carry a run from text to report."""
    from domext_ray.pipeline import run_pretraining

    run_pretraining(config)


JOB = Job(
    __doc__,
    PretrainConfig,
    pretrain,
    Path(__file__).parent / "configs" / "af.yaml",
    main=(*TRAINING, "method.heads", "method.ffn_units", *LENGTH, *PLACE),
    unused=WITHOUT_BASE,
)

if __name__ == "__main__":
    run_job(JOB)
