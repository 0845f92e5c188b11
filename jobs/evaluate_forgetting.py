"""Compare models by the masked words of general text that they still predict: AF Adapter's test of forgetting.

python jobs/evaluate_forgetting.py --models base=general-mini,af=runs/af --corpus general.txt --output forgetting
"""

from __future__ import annotations

from domext_ray.config.command_line import Job, run_job
from domext_ray.config.jobs import ForgettingConfig


def evaluate(config: ForgettingConfig) -> None:
    """Measure, write and print."""
    from domext_ray.downstream.forgetting.forgetting import measure_forgetting
    from domext_ray.downstream.forgetting.report import write_forgetting

    print(write_forgetting(measure_forgetting(config)))
    print(f"figures, table and picture: {config.output}")


JOB = Job(
    __doc__,
    ForgettingConfig,
    evaluate,
    unused=("prepare.held_out_frac", "prepare.cross_documents", "prepare.cache_dir"),
)

if __name__ == "__main__":
    run_job(JOB)
