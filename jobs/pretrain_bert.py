"""BERT pre-training: every parameter trains, from random weights (--base none) or on from a base.

    python jobs/pretrain_bert.py --base none --vocab.size 8192 --corpus 'texts/*.txt' --run.name small-bert
    python jobs/pretrain_bert.py --base bert-base-uncased --corpus 'texts/*.txt'        # continued pre-training

Options come from jobs/configs/bert.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.pipeline import run_pretraining

if __name__ == "__main__":
    with exit_on_user_error():
        run_pretraining(parse_config(PretrainConfig, str(Path(__file__).parent / "configs" / "bert.yaml")))
