"""What trains in fine-tuning, and at which rate."""

from __future__ import annotations

import pytest
import torch

from domext_ray.config.finetune import FinetuneOptimConfig
from domext_ray.config.method import MethodConfig
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import DomextForSequenceClassification, DomextForTokenClassification
from domext_ray.models.rules import choose_trainables, scale_rates

ADAPTERS = {"clinic": {"heads": 1, "ffn_units": 8}, "task": {"bottleneck_size": 4}}


def make_model(head: type = DomextForTokenClassification) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return head(DomextConfig(vocab_size=60, extension_vocab_size=10, has_pooler=True, adapters=ADAPTERS, **sizes))


def make_method(trains: str, **values: object) -> MethodConfig:
    return MethodConfig(**{"name": "m", "trains": trains, "heads": 0, "ffn_units": 0, **values})  # type: ignore[arg-type]


def test_everything_trains_but_a_pooler_that_nobody_reads() -> None:
    model = make_model()
    names = {name for name, _ in model.named_parameters()}
    assert choose_trainables(model, make_method("all")) == {n for n in names if not n.startswith("bert.pooler.")}
    model = make_model(DomextForSequenceClassification)
    assert choose_trainables(model, make_method("all")) == {name for name, _ in model.named_parameters()}


def test_a_rule_trains_its_part_and_the_head() -> None:
    for method, own in (
        (make_method("extensions"), (".adapters.", ".extension.")),
        (make_method("adapter", adapter="task", bottleneck_size=4), (".adapters.task.",)),
        (make_method("layer_norms"), ("LayerNorm.",)),
        (make_method("top_layers", top_layers=1), ("encoder.layer.2.",)),
        (make_method("biases"), (".bias",)),
    ):
        names = choose_trainables(make_model(DomextForSequenceClassification), method)
        assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight"} <= names
        encoder = {each for each in names if each.startswith("bert.") and not each.startswith("bert.pooler.")}
        assert encoder and all(any(part in each for part in own) for each in encoder), method.trains
        assert any(".adapters." in each for each in encoder) == (method.trains in ("extensions", "adapter"))


def test_head_and_top_layers_have_rates_of_their_own() -> None:
    model = make_model(DomextForSequenceClassification)
    scales = scale_rates(model, FinetuneOptimConfig(head_lr=2e-4, top_layers=2, top_layers_lr=1e-5), lr=1e-4)
    assert scales["classifier.weight"] == scales["bert.pooler.dense.weight"] == pytest.approx(2.0)
    assert scales["bert.encoder.layer.1.output.dense.weight"] == pytest.approx(0.1)
    assert scales["bert.encoder.layer.2.attention.self.query.weight"] == pytest.approx(0.1)
    assert not any(".layer.0." in name or "embeddings" in name for name in scales)
    assert scale_rates(model, FinetuneOptimConfig(), lr=1e-4) == {}
