"""Spaces: points that respect conditions, configurations that jobs take, and mistakes in one sentence."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import optuna
import pytest
import yaml

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import TrainConfig
from domext_ray.config.sweep import BudgetConfig, SearchConfig, SweepConfig
from domext_ray.errors import ConfigError, OptionError
from domext_ray.studies.sweep.space import configure, describe_point, name_preparation, read_space

TEXT = """
kind: {choice: {af: {method.heads: 1, method.ffn_units: 0}, words: {method.heads: 0, vocab.size: 40}}}
vocab.min_frequency: {choice: [2, 5], if: {kind: words}}
method.bottleneck_size: {int: [4, 16], step: 4, if: {kind: [af, words]}}
optim.lr: {log: [1e-4, 1e-2]}
train.dropout: {float: [0.0, 0.3]}
finetune.grid.lr: {choice: ["1e-4", "3e-4"]}
"""


def test_the_text_of_a_sweep_is_that_of_its_tasks() -> None:
    """The made set and its text go together, and neither goes with a user's own; rungs share a budget."""
    config = make_config(TEXT, search=SearchConfig(rungs=3, reduction=4, scheduler="asha"))
    assert config.search.shares == [1 / 16, 1 / 4, 1.0]
    assert (make_config(TEXT).corpus, make_config(TEXT).tasks) == ("repair-notes", ("repair_notes",))
    with pytest.raises(OptionError, match=r"'notes.txt'; it must be repair-notes, or --tasks and --data yours\.$"):
        make_config(TEXT, corpus="notes.txt")
    with pytest.raises(OptionError, match=r"'repair-notes'; it must be a text of the field of --tasks\.$"):
        make_config(TEXT, tasks=("ner",), data="clinic")


def make_config(space: Any, **options: Any) -> SweepConfig:
    values = yaml.safe_load(space) if isinstance(space, str) else space
    return SweepConfig(space=values, method=MethodConfig(heads=1, ffn_units=8), **options)


def test_points_hold_to_ranges_and_conditions() -> None:
    space = read_space(yaml.safe_load(TEXT))
    points, again, others = (list(islice(space.sample(seed), 300)) for seed in (0, 0, 1))
    assert points == again != others
    assert {("vocab.min_frequency" in point) == (point["kind"] == "words") for point in points} == {True}
    assert {point["method.bottleneck_size"] for point in points} == {4, 8, 12, 16}
    assert all(1e-4 <= point["optim.lr"] <= 1e-2 and 0.0 <= point["train.dropout"] <= 0.3 for point in points)
    below = sum(point["optim.lr"] < 1e-3 for point in points)
    assert 110 < below < 190, "log-uniform: half of them are below the geometric mean"
    assert 110 < Counter(point["finetune.grid.lr"] for point in points)["1e-4"] < 190


def test_optuna_suggests_the_same_space() -> None:
    space = read_space(yaml.safe_load(TEXT))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(60):
        trial = study.ask()
        assert space.suggest(trial) == trial.params
        assert ("vocab.min_frequency" in trial.params) == (trial.params["kind"] == "words")
        assert trial.params["method.bottleneck_size"] in (4, 8, 12, 16)
        study.tell(trial, 0.0)


def test_a_grid_has_every_point_once_and_conditions_cut_it() -> None:
    space = read_space(
        yaml.safe_load(
            """
            size: {choice: {none: {method.heads: 0}, one: {method.heads: 1}, two: {method.heads: 2}}}
            seed: {choice: [0, 1, 2], if: {size: [none, two]}}
            """
        )
    )
    points = space.list_grid()
    assert len(points) == 3 + 1 + 3 and len({str(point) for point in points}) == 7
    assert {"size": "one"} in points
    with pytest.raises(ConfigError, match=r"space\.optim\.lr is a range; it must be a choice"):
        read_space({"optim.lr": {"log": [1e-4, 1e-3]}}).list_grid()


def test_a_point_becomes_configurations() -> None:
    config = make_config(TEXT, train=TrainConfig(seq_length=64))
    space = read_space(config.space)
    point = {"kind": "words", "vocab.min_frequency": 2, "method.bottleneck_size": 8, "optim.lr": 3e-4}
    made = configure(config, space, {**point, "train.dropout": 0.2, "finetune.grid.lr": "3e-4"})
    assert (made.pretrain.method.heads, made.pretrain.vocab.size, made.pretrain.vocab.min_frequency) == (0, 40, 2)
    assert made.pretrain.method.ffn_units == 8 and made.pretrain.method.bottleneck_size == 8
    assert made.pretrain.optim.lr == 3e-4 and made.pretrain.train.dropout == 0.2
    assert made.pretrain.train.seq_length == 64, "what the space does not have stays the sweep's"
    assert made.finetune.grid.lr == (3e-4,)
    assert describe_point({"method.heads": 1, "optim.lr": 0.00123456}) == "method.heads 1, optim.lr 0.00123"


def test_what_is_prepared_is_counted_once() -> None:
    config = make_config(
        """
        kind: {choice: {af: {method.heads: 1}, words: {vocab.size: 40}, more: {vocab.size: 80}}}
        train.seq_length: {choice: [32, 64], if: {kind: af}}
        optim.lr: {log: [1e-4, 1e-2]}
        """
    )
    space = read_space(config.space)
    points = space.list_preparations()
    assert len(points) == 4 and all("optim.lr" not in point for point in points)
    names = {name_preparation(configure(config, space, point).pretrain) for point in points}
    assert len(names) == 4
    drawn = {name_preparation(configure(config, space, point).pretrain) for point in islice(space.sample(0), 200)}
    assert drawn == names, "whatever a searcher draws was prepared"


def test_a_mistake_is_one_sentence() -> None:
    for space, says in (
        ({"method.headz": {"choice": [1]}}, "'method.headz', which is no option; did you mean method.heads?"),
        ({"train.max_steps": {"choice": [1]}}, "'train.max_steps', which the sweep decides itself"),
        ({"scale.num_workers": {"choice": [2]}}, "which the sweep decides itself"),
        ({"finetune.model": {"choice": ["x"]}}, "which the sweep decides itself"),
        ({"method.heads": [1, 2]}, "space.method.heads is [1, 2]; it must have one of choice, int"),
        ({"method.heads": {"choice": []}}, "space.method.heads.choice is []; it must be a list of values"),
        ({"method.heads": {"choice": [1], "step": 2}}, "space.method.heads has 'step'"),
        ({"optim.lr": {"log": [0, 1]}}, "space.optim.lr.log is [0, 1]; it must be above 0 and rising"),
        ({"optim.lr": {"float": [1, "x"]}}, "it must be the smallest and largest value"),
        ({"method.heads": {"int": [4, 1]}}, "it must be rising"),
        ({"a": {"choice": {"x": {"method.heads": 1}}}, "method.heads": {"choice": [1]}}, "both set method.heads"),
        ({"method.heads": {"choice": [1], "if": {"kind": "x"}}}, "it must be values of dimensions above it"),
        ({"kind": {"choice": {"x": {"method.headz": 1}}}}, "did you mean method.heads?"),
    ):
        with pytest.raises(ConfigError) as raised:
            read_space(space)
        assert says in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_value_out_of_its_range_is_refused() -> None:
    for point, says in (
        ({"method.heads": -1}, "--method.heads is -1"),
        ({"method.heads": "many"}, "many"),
        ({"optim.lr": 0.0}, "optim.lr"),
    ):
        space = {name: {"choice": [value]} for name, value in point.items()}
        with pytest.raises(ConfigError, match=says):
            configure(make_config(space), read_space(space), point)


def test_a_wrong_option_is_refused() -> None:
    for make, says in (
        (lambda: SearchConfig(objectives=("f2",)), r"--objectives is 'f2'; it must be one of f1"),
        (
            lambda: SearchConfig(objectives=("f1", "trainable"), scheduler="asha", rungs=2),
            r"--scheduler is 'asha'",
        ),
        (lambda: SearchConfig(scheduler="asha"), r"--rungs is 1; it must be 2 or more with asha"),
        (lambda: BudgetConfig(), r"--steps is 0"),
        (lambda: BudgetConfig(steps=3, tokens=5), r"--tokens is 5; it must be 0 beside --budget\.steps"),
        (lambda: make_config(TEXT, search=SearchConfig(axis="size")), r"--search\.axis is 'size'; .*of the space"),
        (lambda: make_config({}), r"--space is \{\}"),
        (lambda: make_config(TEXT, train=TrainConfig(max_steps=7)), r"--train\.max_steps is 7; .*--budget rules"),
        (
            lambda: make_config(TEXT, tasks=("ner", "rte"), data=("x",)),
            r"--data is 'x'; it must be as many as --tasks \(2\)",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            make()
