"""BERT pre-training: every parameter trains, from random weights (--base none) or on from a base.

    python jobs/pretrain_bert.py --base none --vocab.size 8192 --corpus 'texts/*.txt' --run.name small-bert
    python jobs/pretrain_bert.py --base bert-base-uncased --corpus 'texts/*.txt'        # continued pre-training

Options come from jobs/configs/bert.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import LENGTH, PLACE, TRAINING, Job, run_job
from domext_ray.config.pretrain import PretrainConfig


def pretrain(config: PretrainConfig) -> None:
    """Carry a run from text to report."""
    from domext_ray.pipeline import run_pretraining

    run_pretraining(config)


JOB = Job(
    __doc__,
    PretrainConfig,
    pretrain,
    Path(__file__).parent / "configs" / "bert.yaml",
    main=(*TRAINING, "vocab.size", "objective.whole_word", *LENGTH, *PLACE),
)

if __name__ == "__main__":
    run_job(JOB)
