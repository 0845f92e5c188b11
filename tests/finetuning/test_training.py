"""A training of a task against a bare PyTorch loop, its determinism, what it leaves alone, and its restoring."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from finetuned_models import BOTTLENECK, CPU, FP32, FULL, draw_set

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig, GridConfig
from domext_ray.errors import BaseModelError, ConfigError, TrainingError
from domext_ray.families.classification import ClassificationTask
from domext_ray.families.losses import LossOptions, set_loss
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import LabelledSet, LabelledText
from domext_ray.families.task import Task, TaskOptions
from domext_ray.finetuning.finetuned import make_set_task
from domext_ray.finetuning.training import (
    CPU_TOKENS,
    Fitted,
    Point,
    collate_passes,
    draw_batches,
    fit_task,
    plan_epoch,
    restore_task,
)
from domext_ray.model.domext.configuration_domext import complete_adapter
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel, build_task_model, describe_task_model
from domext_ray.models.task_model import TaskModel
from domext_ray.text.vocabulary.extension import BaseVocabulary, extend_tokenizer
from domext_ray.text.vocabulary.family import tokenizer_family

CONFIG = FinetuneConfig(
    method=FULL,
    engine=FP32,
    optim=FinetuneOptimConfig(dropout=0.0, warmup_frac=0.25, max_grad_norm=0.5, head_lr=2e-3, eps=1e-6),
)
POINT = Point(lr=1e-3, batch_size=8, epochs=1.0, seed=5)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def make_texts(split: str, num_texts: int, seed: int) -> tuple[LabelledText, ...]:
    """Short texts that are of class "animal" if they have one of two words."""
    generator, texts = np.random.default_rng(seed), []
    for i in range(num_texts):
        words = [str(each) for each in generator.choice(WORDS[:60], int(generator.integers(3, 12)))]
        label, own = [("weather", ["sun", "wind"]), ("animal", ["cat", "dog"])][int(generator.integers(2))]
        words[int(generator.integers(len(words)))] = str(generator.choice(own))
        texts.append(LabelledText(f"{split}{i}", f"{split}:{i}", " ".join(words), None, label))
    return tuple(texts)


@pytest.fixture(scope="module")
def task(start: StartModel) -> ClassificationTask:
    data = LabelledSet(
        "made", make_texts("train", 60, 0), make_texts("dev", 40, 1), make_texts("test", 40, 2), ("weather", "animal")
    )
    return ClassificationTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))


def ignore(_: dict[str, Any]) -> None:
    """Nobody looks."""


def train_bare(
    start: StartModel, task: ClassificationTask, epochs: int = 1, planned: int = 1
) -> dict[str, torch.Tensor]:
    """The same training without the engine: mean cross-entropy, AdamW, linear warm-up and decay, clipping.

    It ends after `epochs` of those that its rate was `planned` for.
    """
    model = build_task_model(start, task, FULL, dropout=0.0, seed=POINT.seed).train()
    rows = task.encode(task.data.train, is_training=True)
    batches = [each for epoch in range(epochs) for each in plan_epoch(len(rows), POINT.batch_size, POINT.seed, epoch)]
    num_steps = len(batches) // epochs * planned
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    is_head = {name: not name.startswith("bert.") or ".pooler." in name for name in trained}
    groups = [
        {"params": [each], "peak": 2e-3 if is_head[name] else 1e-3, "weight_decay": 0.01 if each.ndim > 1 else 0.0}
        for name, each in trained.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, eps=1e-6)
    for step, places in enumerate(batches):
        warmup, horizon = round(0.25 * num_steps), num_steps + 1
        share = (step + 1) / warmup if step < warmup else (horizon - step) / (horizon - warmup)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        batch = task.collate([rows[i] for i in places])
        logits = model(**batch.inputs).logits
        torch.nn.functional.cross_entropy(logits, batch.targets["labels"]).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in trained.items()}


def test_a_training_equals_a_bare_loop(start: StartModel, task: ClassificationTask) -> None:
    fitted = fit_task(start, task, CONFIG, POINT, CPU, ignore)
    expected = train_bare(start, task)
    assert fitted.tensors.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(fitted.tensors[name], each, atol=2e-5, rtol=1e-4, msg=name)


class ScriptedTask(ClassificationTask):
    """Its figures on dev are given; a threshold tells at which of them it was tuned."""

    def __init__(self, task: ClassificationTask, figures: Sequence[float]) -> None:
        super().__init__(task.data, task.tokenizer, task.options)
        self.figures, self.num_tuned = list(figures), 0

    def fit_thresholds(self, examples: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        self.num_tuned += 1
        self.thresholds = {"tuned": self.num_tuned}
        return self.thresholds

    def score(self, examples: Sequence[Any], predictions: Sequence[Any]) -> Score:
        score = super().score(examples, predictions)
        return score if not hasattr(self, "figures") else replace(score, values={"accuracy": self.figures.pop(0)})


def fit_scripted(
    start: StartModel, task: ClassificationTask, patience: int, figures: Sequence[float], batch_size: int = 60
) -> Fitted:
    config = replace(CONFIG, grid=GridConfig(patience=patience))
    point = replace(POINT, epochs=6.0, batch_size=batch_size)
    return fit_task(start, ScriptedTask(task, figures), config, point, CPU, ignore)


def test_patience_stops_and_keeps_the_best_epoch(start: StartModel, task: ClassificationTask) -> None:
    """The rate falls as if all epochs were made; of equal figures the first counts."""
    fitted = fit_scripted(start, task, 2, [0.3, 0.5, 0.4, 0.5], POINT.batch_size)
    assert (fitted.last_epoch, fitted.best_epoch, fitted.steps) == (4.0, 2.0, 32)
    assert fitted.thresholds == fitted.task.thresholds == {"tuned": 2}
    expected = train_bare(start, task, epochs=2, planned=6)
    for name, each in expected.items():
        torch.testing.assert_close(fitted.tensors[name], each, atol=2e-5, rtol=1e-4, msg=name)
        assert torch.equal(dict(fitted.model.named_parameters())[name], fitted.tensors[name]), name
    kept, fitted.dev_predictions = fitted.dev_predictions, None
    assert kept == fitted.predict(task.data.dev)


def test_patience_counts_epochs(start: StartModel, task: ClassificationTask) -> None:
    for patience, figures, last, best in (
        (0, [0.5, 0.4, 0.3, 0.2, 0.1, 0.0], 6.0, 6.0),
        (1, [0.5, 0.4], 2.0, 1.0),
        (5, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 6.0, 1.0),
        (9, [0.1, 0.2, 0.9, 0.2, 0.1, 0.1], 6.0, 3.0),
        (1, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 6.0, 6.0),
    ):
        fitted = fit_scripted(start, task, patience, figures)
        assert (fitted.last_epoch, fitted.best_epoch, len(fitted.dev_scores)) == (last, best, len(figures)), figures


def test_patience_needs_dev_after_every_epoch() -> None:
    with pytest.raises(ConfigError, match=r"--score_every_epoch is False; it must be true with --grid\.patience"):
        GridConfig(patience=1, score_every_epoch=False)


def test_weights_and_smoothing_are_of_the_whole_batch(start: StartModel, task: ClassificationTask) -> None:
    """Micro batches change nothing, also where they have other classes than each other."""
    weighed = ClassificationTask(task.data, start.tokenizer, task.options)
    set_loss(weighed, LossOptions("balanced", 0.1))
    whole, parts, usual, usual_parts = (
        fit_task(start, each, replace(CONFIG, grid=GridConfig(micro_batch_size=size)), POINT, CPU, ignore).tensors
        for each, size in ((weighed, 0), (weighed, 3), (task, 0), (task, 3))
    )
    for name in whole:
        for found, expected in ((parts, whole), (usual_parts, usual)):
            torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=1e-4, msg=name)
    assert not torch.allclose(whole["classifier.weight"], usual["classifier.weight"], atol=1e-4)


def test_passes_of_a_step_are_bounded(task: ClassificationTask) -> None:
    rows = task.encode(task.data.train, is_training=True) * 20
    passes = collate_passes(task, rows, CPU)
    assert sum(each.num_targets for each in passes) == len(rows)
    assert max(each.inputs["input_ids"].numel() for each in passes) <= CPU_TOKENS < sum(row.length for row in rows)
    assert {len(each.inputs["input_ids"]) for each in collate_passes(task, rows[:9], CPU, 4)} == {4, 1}


def test_it_learns(start: StartModel, task: ClassificationTask) -> None:
    records: list[dict[str, Any]] = []
    point = replace(POINT, lr=3e-3, epochs=8.0)
    fitted = fit_task(start, task, CONFIG, point, CPU, records.append)
    assert fitted.dev_scores[-1] > 0.9 > task.score(task.data.dev, task.predict_baseline(task.data.dev)).get("accuracy")
    assert [each["epoch"] for each in records if "dev" in each] == [float(i) for i in range(1, 9)]
    assert records[-1]["step"] == records[-1]["steps"] == 64


def count_optimizers() -> int:
    gc.collect()
    return sum(isinstance(each, torch.optim.Optimizer) for each in gc.get_objects())


def test_what_only_predicts_has_no_optimizer(start: StartModel, task: ClassificationTask) -> None:
    """AdamW's moments are twice a model's size."""
    before = count_optimizers()
    fitted = fit_task(start, task, CONFIG, POINT, CPU, ignore)
    assert count_optimizers() == before, "one that has been trained needs none either"
    restored = restore_task(start, task, CONFIG, POINT, CPU, fitted.tensors, fitted.thresholds)
    assert count_optimizers() == before
    assert restored.predict(task.data.test) == fitted.predict(task.data.test)
    for name, each in restored.model.named_parameters():
        assert torch.equal(each, dict(fitted.model.named_parameters())[name]), name


class ThresholdTask(ClassificationTask):
    """Counts its passes over dev, and shows in its predictions whether the threshold was tuned."""

    num_batches = 0

    def read_outputs(self, outputs: Any) -> tuple[torch.Tensor, ...]:
        self.num_batches += 1
        return super().read_outputs(outputs)

    def decide(self, example: Any, prediction: Any) -> Any:
        return {"label": "weather"} if self.thresholds else prediction

    def fit_thresholds(self, examples: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        self.thresholds = {"threshold": 1.0}
        return self.thresholds


def test_dev_is_run_once_an_epoch_where_a_threshold_is_tuned(start: StartModel, task: ClassificationTask) -> None:
    tuned = ThresholdTask(task.data, start.tokenizer, task.options)
    fitted = fit_task(start, tuned, CONFIG, replace(POINT, epochs=2.0), CPU, ignore)
    assert len(fitted.dev_scores) == 2 and tuned.num_batches == 2
    assert fitted.predict(task.data.dev) == [{"label": "weather"}] * len(task.data.dev), "as the tuned threshold has it"


def test_the_seed_decides_everything(start: StartModel, task: ClassificationTask) -> None:
    config = replace(CONFIG, optim=replace(CONFIG.optim, dropout=0.3))
    first, second, other = (
        fit_task(start, task, config, replace(POINT, seed=seed), CPU, ignore).tensors for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith("dense.weight"))


def drop_words(share: float, new_share: float = 0.0, seed: int = POINT.seed) -> Point:
    return replace(POINT, word_dropout=share, new_word_dropout=new_share, seed=seed)


def read_epochs(start: StartModel, task: Task, point: Point, number: int = 3) -> list[list[str]]:
    """The rows of each of the first epochs as texts, sorted."""
    rows = task.encode(task.data.train, is_training=True)
    batches = draw_batches(start, task, point, rows)
    epoch_steps = math.ceil(len(rows) / POINT.batch_size)
    epochs = ([row for _ in range(epoch_steps) for row in next(batches)] for _ in range(number))
    return [sorted(" ".join(start.tokenizer.convert_ids_to_tokens(row.input_ids)) for row in each) for each in epochs]


def test_each_epoch_may_read_without_some_words(start: StartModel, task: ClassificationTask) -> None:
    whole, dropped, again, other = (
        read_epochs(start, task, drop_words(share, seed=seed))
        for share, seed in ((0.0, 5), (0.4, 5), (0.4, 5), (0.4, 6))
    )
    assert dropped == again and whole[0] == whole[1] == whole[2]
    epochs = [whole[0], *dropped, *other]
    assert len({str(each) for each in epochs}) == 7, "no two are read alike"
    texts = [sorted(row.replace(" ##", "") for row in each) for each in epochs]
    assert all(each == texts[0] for each in texts), "all of every text is read"
    read = " ".join(dropped[0])
    both = [each for each in WORDS[:60] if f" {each} " in read and f" {' ##'.join(each)} " in read]
    assert both, "in one epoch some examples are read with a word that others are read without"


def test_new_words_are_dropped_at_a_chance_of_their_own(start: StartModel, task: ClassificationTask) -> None:
    """Here the last third of the vocabulary stands for new words."""
    config = copy.deepcopy(start.config)
    config.extension_vocab_size = config.vocab_size // 3
    entries = start.tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    known, new = {*entries[: config.base_vocab_size]}, {*entries[config.base_vocab_size :]}
    extended = replace(start, config=config)
    (whole,), (dropped,) = (read_epochs(extended, task, drop_words(0.0, share), 1) for share in (0.0, 0.9))
    before, after = (" ".join(each).split() for each in (whole, dropped))
    assert 0 < sum(each in new for each in after) < sum(each in new for each in before) / 2
    assert {*before} & known <= {*after}


def test_dev_is_scored_without_dropout(start: StartModel, task: ClassificationTask) -> None:
    config = replace(CONFIG, optim=replace(CONFIG.optim, dropout=0.5))
    fitted = fit_task(start, task, config, POINT, CPU, ignore)
    assert fitted.dev_predictions == TaskModel.predict(fitted, task.data.dev)


def test_a_task_knows_which_words_are_the_bases(start: StartModel) -> None:
    known = BaseVocabulary("base", tokenizer_family(start.tokenizer), start.tokenizer, start.tokenizer.get_vocab(), "")
    config = copy.deepcopy(start.config)
    config.vocab_size, config.extension_vocab_size = config.vocab_size + 2, 2
    extended = replace(start, config=config, tokenizer=extend_tokenizer(known, ["@", "#"]))
    data = replace(draw_set("relation"), family="relation")
    marks = [make_set_task(FinetuneConfig(), each, data).state["written"] for each in (start, extended)]
    assert marks[0] == marks[1], "arguments are marked by words that the base was trained with"


def test_dev_is_read_as_ever(start: StartModel, task: ClassificationTask) -> None:
    few, whole = (fit_task(start, task, CONFIG, drop_words(share), CPU, ignore) for share in (0.4, 0.0))
    assert few.steps == whole.steps and few.tokens > whole.tokens
    assert not torch.equal(few.tensors["classifier.weight"], whole.tensors["classifier.weight"])
    assert few.predict(task.data.dev) == TaskModel.predict(few, task.data.dev)
    again = fit_task(start, task, CONFIG, drop_words(0.4), CPU, ignore)
    assert all(torch.equal(each, again.tensors[name]) for name, each in few.tensors.items())


def test_a_loss_that_is_not_finite_ends_the_training(start: StartModel, task: ClassificationTask) -> None:
    broken = dict(start.tensors)
    broken["bert.embeddings.LayerNorm.weight"] = torch.full_like(broken["bert.embeddings.LayerNorm.weight"], torch.nan)
    with pytest.raises(TrainingError, match=r"step 1 .*lower --grid\.lr"):
        fit_task(replace(start, tensors=broken), task, CONFIG, POINT, CPU, ignore)


def test_examples_of_which_none_can_be_learned_end_the_training(start: StartModel, task: ClassificationTask) -> None:
    with pytest.raises(TrainingError, match="no training example of "):
        next(draw_batches(start, task, POINT, []))


def test_rows_longer_than_the_position_table_are_refused(start: StartModel, task: ClassificationTask) -> None:
    long = ClassificationTask(task.data, start.tokenizer, TaskOptions(max_length=256))
    with pytest.raises(ConfigError, match=r"--labelled\.max_length is 256; .* at most 128"):
        build_task_model(start, long, FULL, dropout=0.0, seed=0)


def test_a_model_that_cannot_be_had_is_named(tiny_base_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--model_step is 3"):
        open_model(str(tiny_base_folder)).load(step=3)
    with pytest.raises(BaseModelError, match="nowhere/at/all"):
        open_model("nowhere/at/all").load()


def test_a_bilstm_between_encoder_and_head_trains(start: StartModel, task: ClassificationTask) -> None:
    """And a part of an epoch is a part of its batches."""
    fitted = fit_task(start, task, replace(CONFIG, head_bilstm=6), replace(POINT, epochs=0.25), CPU, ignore)
    assert fitted.steps == 2
    assert fitted.tensors["bilstm.lstm.weight_hh_l0_reverse"].shape == (24, 6)


def test_adapters_that_a_model_leaves_out_stay_left_out(start: StartModel, task: ClassificationTask) -> None:
    config = copy.deepcopy(start.config)
    config.adapters = {name: complete_adapter(name, {"ffn_units": 4}, 2) for name in ("clinic", "law")}
    config.active_adapters = ["law"]
    active = describe_task_model(replace(start, config=config), task, replace(BOTTLENECK, adapter="task"), 0.0)
    assert active.active_adapters == ["law", "task"] and set(active.adapters) == {"clinic", "law", "task"}
    assert describe_task_model(start, task, FULL, 0.0).active_adapters is None
