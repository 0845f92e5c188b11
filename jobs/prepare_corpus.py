"""Prepare a corpus ahead of training: text in, shards of token rows out, where the training job will look for them.

    python jobs/prepare_corpus.py --corpus 'texts/*.jsonl' --base bert-base-uncased --train.seq_length 512
    python jobs/prepare_corpus.py --corpus big.txt --dry_run true     # only list what would be read

What decides a corpus are --corpus, --prepare.*, --base, --vocab.*, --train.seq_length and --objective.next_sentence;
training's other options may be given too, and have no effect here.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import FOLDER, TRAINING, Job, run_job
from domext_ray.config.pretrain import PretrainConfig


def prepare(config: PretrainConfig) -> None:
    """Prepare a corpus where a run of the same options will look for it."""
    from domext_ray.pipeline import run_preparation

    run_preparation(config)


JOB = Job(
    __doc__,
    PretrainConfig,
    prepare,
    Path(__file__).parent / "configs" / "af.yaml",
    main=(*TRAINING, "prepare.shard_bytes", "prepare.cache_dir", "train.seq_length", "vocab.size", *FOLDER),
    used=(
        *("base", "corpus", "prepare.", "vocab.", "train.seq_length", "train.long_seq_length"),
        *("objective.next_sentence", *FOLDER),
    ),
)

if __name__ == "__main__":
    run_job(JOB)
