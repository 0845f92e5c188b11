"""How often a run is saved and evaluated: after so many steps, or after a time."""

from __future__ import annotations

import pytest
from given_options import parse_config

from domext_ray.config.pretrain import PretrainConfig, TrainConfig
from domext_ray.errors import ConfigError
from domext_ray.options.build import dump_yaml, from_dict, to_dict
from domext_ray.options.declare import read_seconds


def test_a_cadence_is_steps_or_a_time() -> None:
    for given, value in (("200", 200), ("1e3", 1000), ("15m", "15m"), ("1.5h", "1.5h")):
        config = parse_config(PretrainConfig, "", ["--train.save_every", given, "--train.evaluate_every", given])
        assert config.train.save_every == config.train.evaluate_every == value
        assert f"  save_every: {value}\n" in dump_yaml(config)
        assert from_dict(PretrainConfig, to_dict(config)) == config
    rule = "it must be steps, 1 or more, or a time, such as 90s, 15m or 2h"
    for wrong in (0, -1, 1.5, True, "0s", "0.0m", "15min", "m", "-5m", "1e3s", "15M", "", [200]):
        with pytest.raises(ConfigError, match=f"--save_every is .*; {rule}"):
            TrainConfig(save_every=wrong)  # type: ignore[arg-type]
    for text, seconds in (("90s", 90.0), ("15m", 900.0), ("1.5h", 5400.0)):
        assert read_seconds(text) == seconds
