"""AF Adapter: freeze a BERT, train extra attention heads and FFN units on your text, get a Hugging Face model.

    python jobs/pretrain_af.py                                  # the small base and corpus that every machine has
    python jobs/pretrain_af.py --base bert-base-uncased --corpus 'texts/*.jsonl' --run.name clinic

Options come from jobs/configs/af.yaml, then from --config_path, then from flags.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.pipeline import run_pretraining

if __name__ == "__main__":
    with exit_on_user_error():
        run_pretraining(parse_config(PretrainConfig, str(Path(__file__).parent / "configs" / "af.yaml")))
