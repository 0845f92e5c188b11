"""Compare models by the masked words of general text that they still predict: AF Adapter's test of forgetting.

python jobs/evaluate_forgetting.py --models base=general-mini,af=runs/af --corpus general.txt --output forgetting
"""

from __future__ import annotations

from domext_ray.config import parse_config
from domext_ray.downstream.forgetting import measure_forgetting
from domext_ray.downstream.forgetting_report import write_forgetting
from domext_ray.errors import exit_on_user_error
from domext_ray.job_config import ForgettingConfig

if __name__ == "__main__":
    with exit_on_user_error():
        config = parse_config(ForgettingConfig)
        print(write_forgetting(measure_forgetting(config)))
        print(f"figures, table and picture: {config.output}")
