"""Learn new words of a domain for a base, and say what a vocabulary of which size would save.

    python jobs/build_vocab.py --corpus 'texts/*.jsonl' --base bert-base-uncased --vocab.size 5000 --run.name words
    python jobs/build_vocab.py --vocab.words words.txt --base bert-base-uncased       # words of one's own, one a line
    python jobs/pretrain_exbert.py --vocab.words runs/words …                         # uses them

Takes the options of jobs/pretrain_exbert.py; what counts is --corpus, --prepare.*, --base, --vocab.*, --run.dir and
--run.name.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config import PretrainConfig, parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.pipeline import run_vocabulary

if __name__ == "__main__":
    with exit_on_user_error():
        run_vocabulary(parse_config(PretrainConfig, str(Path(__file__).parent / "configs" / "vocab.yaml")))
