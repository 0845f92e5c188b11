r"""exBERT: new words of the domain, and a gated extension module beside every frozen layer.

    python jobs/pretrain_exbert.py --base bert-base-uncased --corpus 'texts/*.txt' --vocab.size 5000 --run.name clinic
    python jobs/pretrain_exbert.py … --vocab.size 0 --vocab.words runs/words                   # words of build_vocab.py
    python jobs/pretrain_exbert.py … --vocab.size 0 --vocab.words runs/clinic/tokenizer --init_from runs/clinic \
        --method.trains all --run.name clinic-2                       # second stage: every parameter trains

Without modules: --method.module_hidden_size 0 --method.module_ffn_size 0; without new words: --vocab.size 0.
Options come from jobs/configs/exbert.yaml, then from --config_path, then from flags.
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
    Path(__file__).parent / "configs" / "exbert.yaml",
    main=(*TRAINING, "vocab.size", "method.module_hidden_size", "method.module_ffn_size", *LENGTH, *PLACE),
    unused=WITHOUT_BASE,
)

if __name__ == "__main__":
    run_job(JOB)
