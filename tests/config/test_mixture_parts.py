"""Parts of a mixture: one form for all ways to write them, exact shares, and a sentence for what is none."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from given_options import parse_config

from domext_ray.config.options.build import dump_yaml, from_dict, identity_of
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import ConfigError

PARTS = {"pubmed": {"corpus": "pubmed/*.txt", "weight": {0: 1, 0.5: 3}}, "guidelines": {"corpus": "guidelines.txt"}}


def make(parts: dict[str, Any] = PARTS, **more: Any) -> PretrainConfig:
    return from_dict(PretrainConfig, {"mixture": {"parts": parts}, **more})


def test_shares_are_exact_and_sum_to_1() -> None:
    config = make(replay={"corpus": "general.txt", "frac": 0.1})
    assert [part.name for part in config.parts] == ["general", "guidelines", "pubmed"]
    assert [part.keep for part in config.parts] == [True, False, False]
    tenth = Fraction(1, 10)
    assert config.part_shares == [
        (Fraction(0), (3 * tenth, tenth, 3 * tenth, 3 * tenth)),
        (Fraction(1, 2), (Fraction(9, 50), tenth, Fraction(9, 50), Fraction(27, 50))),
    ]
    assert make({}).part_shares == [(Fraction(0), (Fraction(1),))]


def test_an_identity_survives_json_and_yaml_and_does_not_depend_on_how_it_is_written(tmp_path: Path) -> None:
    config = make()
    assert json.loads(json.dumps(identity_of(config))) == identity_of(config)
    assert identity_of(make({**{name: PARTS[name] for name in reversed(PARTS)}})) == identity_of(config)
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(config))
    assert parse_config(PretrainConfig, args=["--config", str(path)]) == config
    text = "{guidelines: {corpus: guidelines.txt}, pubmed: {corpus: pubmed/*.txt, weight: {0: 1.0, '0.5': 3}}}"
    assert parse_config(PretrainConfig, args=["--mixture.parts", text]) == config


def test_a_run_without_parts_is_what_it_was() -> None:
    assert identity_of(PretrainConfig())["mixture"] == {"weight": 1.0}


def test_what_is_no_part_is_one_sentence() -> None:
    for part, says in (
        ({"corpus": ""}, "--mixture.parts.more.corpus is ''; it must be at least one file or folder"),
        ({"corpus": "x", "wieght": 2}, "--mixture.parts.more is 'wieght'; it must be of corpus, weight, keep"),
        ({"corpus": "x", "weight": -1}, "--mixture.parts.more.weight is -1; it must be from 0 to 1,000,000"),
        ({"corpus": "x", "weight": 0}, "--mixture.parts.more.weight is 0; it must be above 0 somewhere"),
        ({"corpus": "x", "weight": {0: 0, 0.5: 0}}, "must be above 0 somewhere"),
        ({"corpus": "x", "weight": {0.5: 1}}, "ascending from 0 to below 1"),
        ({"corpus": "x", "weight": {0: 1, 1: 2}}, "ascending from 0 to below 1"),
        ({"corpus": "x", "weight": {0: 1, 0.6: 2, 0.5: 3}}, "ascending from 0 to below 1"),
        ({"corpus": "x", "weight": {0: 1, "half": 2}}, "ascending from 0 to below 1"),
        ({"corpus": "x", "weight": {}}, "ascending from 0 to below 1"),
        ({"corpus": "x", "keep": "yes"}, "--mixture.parts.more.keep is 'yes'; it must be true or false"),
        ("x", "it must be options of a part, such as {corpus: more.txt, weight: 2}"),
    ):
        with pytest.raises(ConfigError) as error:
            make({"more": part})
        assert says in str(error.value) and "\n" not in str(error.value)
    for name in ("domain", "general", "a b", "", "a/b"):
        with pytest.raises(ConfigError, match="names of letters, digits, _ and -, other than domain and general"):
            make({name: {"corpus": "x"}})
