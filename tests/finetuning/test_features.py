"""Features of a frozen encoder: what a BiLSTM reads, what trains, and that it learns, predicts and is exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from finetuned_models import CPU, FP32
from torch import Tensor

from domext_ray.config.finetune import FULL, FeaturesConfig, FinetuneConfig, FinetuneOptimConfig, LabelledConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.errors import ConfigError
from domext_ray.families.choices import ChoiceTask
from domext_ray.families.readers.examples import Choice, LabelledSet, TaggedSentence
from domext_ray.families.tagging import TokenClassificationTask
from domext_ray.families.task import Task, TaskOptions
from domext_ray.finetuning.export import CardFigures, save_fitted
from domext_ray.finetuning.training import Fitted, Point, fit_task, make_model, restore_task
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import DomextForTokenClassification, StateBiLSTM
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel, build_encoder

CONFIG = FinetuneConfig(
    engine=FP32,
    features=FeaturesConfig(layers="1-2", hidden_size=64),
    labelled=LabelledConfig(max_length=32, stride=8),
)
ANIMALS = ("cat", "dog", "bird", "horse")


def make_sentences(split: str, num_sentences: int, seed: int) -> tuple[TaggedSentence, ...]:
    """Sentences in which animals are entities, and the word before them decides of which type."""
    generator = np.random.default_rng(seed)
    sentences = []
    for i in range(num_sentences):
        words = [str(each) for each in generator.choice(WORDS[:60], int(generator.integers(3, 7)))]
        tags = ["O"] * len(words)
        place = int(generator.integers(1, len(words)))
        is_small = bool(generator.integers(2))
        words[place - 1], words[place] = "small" if is_small else "good", str(generator.choice(ANIMALS))
        tags[place] = "B-Small" if is_small else "B-Good"
        sentences.append(TaggedSentence(f"{split}{i}", f"{split}:{i}", tuple(words), tuple(tags)))
    return tuple(sentences)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


@pytest.fixture(scope="module")
def task(start: StartModel) -> TokenClassificationTask:
    splits = [
        make_sentences(split, size, seed) for seed, (split, size) in enumerate((("a", 160), ("b", 40), ("c", 40)))
    ]
    data = LabelledSet("made", splits[0], splits[1], splits[2], ("Good", "Small"))
    return TokenClassificationTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))


def record_inputs(model: Any) -> list[Tensor]:
    """What the BiLSTM is given from now on: its layers' states, side by side."""
    found: list[Tensor] = []
    model.bilstm.register_forward_pre_hook(lambda _, given: found.append(torch.stack(given[0])))
    return found


def test_the_bilstm_reads_the_encoders_layers(start: StartModel, task: Task) -> None:
    """In training as in prediction: nothing is dropped within the encoder, and nothing of it gets a gradient."""
    batch = task.collate(task.encode(task.data.train, is_training=True)[:16])
    model = make_model(start, task, replace(CONFIG, features=FeaturesConfig(layers="0-2", hidden_size=64)), 1).train()
    found = record_inputs(model)
    task.compute_loss_sum(model(**batch.inputs), batch.targets).backward()
    with torch.no_grad():
        states = build_encoder(start, CPU)(**batch.inputs, output_hidden_states=True).hidden_states
    assert torch.equal(found[0], torch.stack(states))
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    assert trained == {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"bilstm", "classifier"}


def test_the_bilstm_has_the_papers_size(start: StartModel, task: Task) -> None:
    config = replace(CONFIG, features=FeaturesConfig(layers="1-2"))
    model, again, other = (make_model(start, task, config, seed) for seed in (1, 1, 2))
    lstm = model.bilstm.lstm
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.dropout) == (64, 384, 2, config.optim.dropout)
    same, differ = again.state_dict(), other.state_dict()
    assert all(torch.equal(same[name], each) for name, each in model.state_dict().items())
    assert not torch.equal(differ["bilstm.lstm.weight_ih_l0"], same["bilstm.lstm.weight_ih_l0"])


def make_bilstm(*, head_mix: bool) -> StateBiLSTM:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    return StateBiLSTM(DomextConfig(head_bilstm=6, head_layers=[1, 2, 3], head_mix=head_mix, **shape), 0.0).eval()


@torch.no_grad()
def test_padding_changes_no_state() -> None:
    for head_mix in (False, True):
        bilstm = make_bilstm(head_mix=head_mix)
        rows = [torch.randn(3, 1, length, 8) for length in (7, 4, 1)]
        padded = torch.full((3, 3, 7, 8), 100.0)  # what is in padding must not matter, whatever it is
        mask = torch.zeros(3, 7, dtype=torch.int64)
        for i, row in enumerate(rows):
            padded[:, i, : row.shape[2]], mask[i, : row.shape[2]] = row[:, 0], 1
        together = bilstm(list(padded), mask)
        assert together.shape == (3, 7, 8)
        for i, row in enumerate(rows):
            torch.testing.assert_close(together[i, : row.shape[2]], bilstm(list(row))[0])


@torch.no_grad()
def test_layers_are_concatenated_or_mixed() -> None:
    states = list(torch.randn(3, 2, 5, 8))
    concatenated, mixed = make_bilstm(head_mix=False), make_bilstm(head_mix=True)
    expected = concatenated.dense(concatenated.lstm(torch.cat(states, dim=-1))[0])
    assert torch.equal(concatenated(states), expected)
    assert mixed.lstm.input_size == 8 and mixed.mix is not None
    torch.testing.assert_close(mixed.mix(states), torch.stack(states).mean(dim=0))  # weights start equal, with sum 1
    mixed.mix.weights.copy_(torch.tensor([0.0, 50.0, 0.0]))
    mixed.mix.scale.fill_(2.0)
    torch.testing.assert_close(mixed(states), mixed.dense(mixed.lstm(2 * states[1])[0]))


@pytest.fixture(scope="module", params=["concat", "mix"])
def fitted(request: pytest.FixtureRequest, start: StartModel, task: TokenClassificationTask) -> Fitted:
    config = replace(CONFIG, features=replace(CONFIG.features, combine=request.param))
    point = Point(lr=1e-2, batch_size=8, epochs=10.0, seed=3)
    fitted = fit_task(start, task, config, point, CPU, lambda _: None)
    restored = restore_task(start, task, config, point, CPU, fitted.tensors, fitted.thresholds)
    assert restored.predict(task.data.test) == fitted.predict(task.data.test)
    return fitted


def test_it_learns_beside_an_encoder_that_stays(fitted: Fitted, start: StartModel) -> None:
    task, dev = fitted.task, fitted.task.data.dev
    assert fitted.dev_scores[-1] > 0.85 > 0.7 > task.score(dev, task.predict_baseline(dev)).get(task.metric)
    after = dict(fitted.model.named_parameters())
    assert all(torch.equal(after[name], each) for name, each in start.tensors.items() if name in after)
    assert not any(name.startswith("bert.") for name in fitted.tensors)


def test_it_is_exported(fitted: Fitted, start: StartModel, tmp_path: Path) -> None:
    save_fitted(start, fitted, tmp_path / "export", CardFigures(fitted.task.data, ""))
    loaded: Any = DomextForTokenClassification.from_pretrained(tmp_path / "export")
    batch = fitted.task.collate(fitted.task.encode(fitted.task.data.test[:9], is_training=False))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch.inputs).logits, fitted.model.eval()(**batch.inputs).logits)
    again = open_model(str(tmp_path / "export")).load(keep_head=True)
    config = replace(CONFIG, features=replace(CONFIG.features, combine="mix" if loaded.config.head_mix else "concat"))
    with torch.no_grad():
        model = make_model(again, fitted.task, config, seed=9).eval()
        assert torch.equal(model(**batch.inputs).logits, loaded(**batch.inputs).logits)


def test_choices_are_scored_from_features(start: StartModel) -> None:
    """The pooler is a part of the head: it trains, though the encoder does not."""
    generator = np.random.default_rng(0)

    def draw(low: int, high: int) -> str:
        return " ".join(generator.choice(WORDS, int(generator.integers(low, high))))

    choices = tuple(Choice(f"{i}", f"a:{i}", draw(2, 6), "", tuple(draw(1, 8) for _ in "abc"), i % 3) for i in range(8))
    data = LabelledSet("made", choices, choices, ())
    task = ChoiceTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))
    config = replace(CONFIG, engine=EngineConfig(precision="bf16"))
    fitted = fit_task(start, task, config, Point(lr=1e-2, batch_size=4, epochs=12.0, seed=0), CPU, lambda _: None)
    assert task.score(choices, fitted.predict(choices)).get("accuracy") > 0.8  # learnt by heart: the majority is 3/8


def test_a_layer_that_is_not_there_is_named(start: StartModel, task: Task) -> None:
    config = replace(CONFIG, features=FeaturesConfig(layers="2-3"))
    with pytest.raises(ConfigError, match=r"--features\.layers goes up to 3; it must be at most 2, the layers of "):
        make_model(start, task, config, seed=0)


def test_what_does_not_go_with_features_is_refused() -> None:
    changes: list[tuple[str, Callable[[], Any], str]] = [
        ("method", lambda: replace(FULL, bottleneck_size=8, trains="extensions"), r"method\.trains is 'extensions'"),
        ("method", lambda: MethodConfig(trains="layer_norms", heads=0, ffn_units=0), r"method\.trains"),
        ("optim", lambda: FinetuneOptimConfig(top_layers=1, top_layers_lr=1e-3), r"optim\.top_layers is 1"),
        ("engine", lambda: EngineConfig(activation_checkpointing=True), r"engine\.activation_checkpointing"),
        ("head_bilstm", lambda: 6, r"head_bilstm is 6; it must be 0 with --features\.layers"),
    ]
    for name, make, message in changes:
        with pytest.raises(ConfigError, match=f"--{message}"):
            replace(CONFIG, **{name: make()})
