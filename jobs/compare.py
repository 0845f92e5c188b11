r"""Compare methods with one trainable budget and one training time, several seeds each.

    python jobs/compare.py --seconds 90                            # the small base and corpus that ship
    python jobs/compare.py --base BASE --corpus 'texts/*.txt' --methods full,lora,af,bottleneck --budget 0.17 \
        --seconds 600 --seeds 3 --run.name study
    python jobs/compare.py --tokens 1000000 --presets '{exbert: {vocab: {size: 5000}}}' --dry_run true

Makes RUN.DIR/RUN.NAME with a run for each method and seed, comparison.md, comparison.png and results.json: bits per
character gained on held-out text of the domain against points of general accuracy lost. The same command goes on where
it stopped; more --methods or --seeds may come later. A method is a preset: options of a training job by name, in
jobs/configs/compare.yaml, in a file of your own (--config_path, `presets:`), or in --presets.
"""

from __future__ import annotations

from pathlib import Path

from domext_ray.config.command_line import Job, run_job
from domext_ray.config.jobs import StudyConfig

DEFAULTS = Path(__file__).parent / "configs" / "compare.yaml"


def compare(config: StudyConfig) -> None:
    """Train every method on every seed and compare them."""
    from domext_ray.study.study import read_presets, run_study

    run_study(config, read_presets(DEFAULTS))


JOB = Job(
    __doc__,
    StudyConfig,
    compare,
    DEFAULTS,
    main=(
        *("base", "corpus", "methods", "budget", "seconds", "tokens", "seeds", "presets", "train.global_batch_size"),
        *("train.seq_length", "scale.num_workers", "scale.use_gpu", "run.name", "run.dir", "dry_run"),
    ),
    unused=("train.max_", "train.long_", "optim.lr", "optim.decay_steps"),
)

if __name__ == "__main__":
    run_job(JOB)
