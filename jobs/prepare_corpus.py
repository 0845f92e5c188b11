"""Prepare a corpus ahead of training: text in, shards of token rows out, where the training job will look for them.

    python jobs/prepare_corpus.py --corpus 'texts/*.jsonl' --base bert-base-uncased --train.seq_length 512
    python jobs/prepare_corpus.py --corpus big.txt --dry_run true     # only list what would be read

Takes the options of jobs/pretrain_af.py; what counts is --corpus, --prepare.*, --base, --train.seq_length, --run.dir.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.pipeline import run_preparation

if __name__ == "__main__":
    with exit_on_user_error():
        run_preparation(parse_config(PretrainConfig, str(Path(__file__).parent / "configs" / "af.yaml")))
