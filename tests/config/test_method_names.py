"""A name that says a method goes with that method's sizes only."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from given_options import parse_config

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.method import KNOWN_METHODS
from domext_ray.config.options.build import dump_yaml, from_dict, to_dict
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError

SHIPPED = {"af": "af", "bert": "full", "bottleneck": "bottleneck", "exbert": "exbert", "lora": "lora"}
"""The presets of methods, and what each is called."""


def read(preset: str, *flags: str) -> PretrainConfig:
    return parse_config(PretrainConfig, preset, flags)


def test_a_known_name_is_one_methods() -> None:
    fitting: dict[str, set[str]] = {"bert": {"full"}}
    fitting |= dict.fromkeys(("fl_tuning", "top_layers", "layer_norms", "biases"), set())
    for name, (preset, own) in itertools.product(KNOWN_METHODS, SHIPPED.items()):
        if own in fitting.get(name, {name}):
            assert read(preset, "--method.name", name).method.name == name
        else:
            with pytest.raises(ConfigError, match=f"--method.name is '{name}'; it must be .*name of your own"):
                read(preset, "--method.name", name)
    assert read("bert", "--method.name", "clinic-a").method.name == "clinic-a"


def test_sizes_that_the_name_says_are_taken() -> None:
    for preset, flags in (
        ("af", "--method.name fl_tuning --method.heads 0"),
        ("af", "--method.name af --method.heads 0"),
        ("af", "--method.name LoRA --method.heads 0 --method.ffn_units 0 --method.lora_rank 8"),
        ("exbert", "--method.name exbert --method.trains all"),
        ("exbert", "--method.name exbert --method.module_hidden_size 0 --method.module_ffn_size 0"),
        ("af", "--method.name biases --method.heads 0 --method.ffn_units 0 --method.trains biases"),
    ):
        read(preset, *flags.split())


def test_a_file_that_says_a_name_alone_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("corpus: a.txt\nmethod:\n  name: lora\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'lora' \(.*mine.yaml, line 3\); it must be bert, full"):
        read("bert", "--config", str(path))


def test_a_presets_name_that_no_longer_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--method.trains", "adapter", "--method.bottleneck_size", "64")
    parse_config(FinetuneConfig, "finetune", flags)
    assert "warning: --method.name is 'full', and what trains is bottleneck." in capsys.readouterr().out
    parse_config(FinetuneConfig, "finetune", (*flags, "--method.name", "bottleneck"))
    assert capsys.readouterr().out == ""


def test_a_stored_run_of_a_wrong_name_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From before names were looked at, or a sweep's trial, whose sizes the space changed."""
    values = to_dict(read("bert"))
    values["method"]["name"] = "lora"
    stored = from_dict(PretrainConfig, values)
    assert stored.method.name == "lora"
    (tmp_path / "config.yaml").write_text(dump_yaml(stored), encoding="utf-8")
    assert read("af", "--config", str(tmp_path / "config.yaml")) == stored
    assert "warning: --method.name is 'lora', and what trains is bert." in capsys.readouterr().out
