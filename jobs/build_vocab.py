"""Learn new words of a domain for a base, and show what vocabularies of other sizes would save.

    python jobs/build_vocab.py --corpus 'texts/*.jsonl' --base bert-base-uncased --vocab.size 5000 --run.name words
    python jobs/build_vocab.py --vocab.words words.txt --base bert-base-uncased       # your own words, one per line
    python jobs/pretrain_exbert.py --vocab.size 0 --vocab.words runs/words …          # uses them

Training's other options may be given too, and have no effect here.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import FOLDER, TRAINING, Job, run_job
from domext_ray.config.pretrain import PretrainConfig


def build_vocabulary(config: PretrainConfig) -> None:
    """Learn new words into RUN.DIR/RUN.NAME."""
    from domext_ray.pipeline import run_vocabulary

    run_vocabulary(config)


JOB = Job(
    __doc__,
    PretrainConfig,
    build_vocabulary,
    Path(__file__).parent / "configs" / "vocab.yaml",
    main=(*TRAINING, "vocab.size", "vocab.min_frequency", "vocab.whole_words", "vocab.words", "vocab.extend", *FOLDER),
    used=("base", "corpus", "prepare.", "vocab.", *FOLDER),
    unused=("vocab.lowercase",),
)

if __name__ == "__main__":
    run_job(JOB)
