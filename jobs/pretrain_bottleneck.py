"""Houlsby's bottleneck adapters: two a layer, with shifts of its LayerNorms, beside a frozen base.

    python jobs/pretrain_bottleneck.py --base bert-base-uncased --corpus 'texts/*.txt' --run.name clinic
    python jobs/pretrain_bottleneck.py … --method.bottleneck_size 8 --method.layers 6-11 --method.init paper
    python jobs/pretrain_bottleneck.py … --init_from runs/clinic --method.domain cardiology --run.name clinic-2
                                                    # a second domain beside the first one, which is frozen now

Options come from jobs/configs/bottleneck.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.pipeline import run_pretraining

if __name__ == "__main__":
    with exit_on_user_error():
        run_pretraining(parse_config(PretrainConfig, str(Path(__file__).parent / "configs" / "bottleneck.yaml")))
