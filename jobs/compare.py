"""Compare methods at an equal trainable budget and equal training time, several seeds each.

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

from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.job_config import StudyConfig
from domext_ray.study import read_presets, run_study

DEFAULTS = Path(__file__).parent / "configs" / "compare.yaml"

if __name__ == "__main__":
    with exit_on_user_error():
        run_study(parse_config(StudyConfig, str(DEFAULTS)), read_presets(DEFAULTS))
