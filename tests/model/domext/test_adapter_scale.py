"""An adapter's scale: 0 is the base, 1 the model as it was, and between them all that it adds is multiplied."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODERN, VOCAB, make_model, make_rows
from torch import Tensor, nn

from domext_ray.model.domext.layers_domext import DeltaProjection, NormShift
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.domext.words_domext import HeadShift, WordShift

IDS, MASK = make_rows()
LAYOUTS: dict[str, dict[str, Any]] = {"BERT": {}, "ModernBERT": MODERN}
KINDS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 1},
    "FFN units": {"ffn_units": 6},
    "bottlenecks": {"bottleneck_size": 4},
    "bottlenecks without shifts of LayerNorms": {"bottleneck_size": 4, "layer_norms": False},
    "parallel bottlenecks, LayerNorm inside": {
        "bottleneck_size": 4,
        "bottleneck_parallel": True,
        "bottleneck_layer_norm": True,
    },
    "shifts of all words": {"word_rows": VOCAB},
    "shifts of some words and of the MLM head": {"word_rows": VOCAB - 10, "word_head": True},
    "all of it": {"heads": 1, "ffn_units": 6, "bottleneck_size": 4, "word_rows": VOCAB, "word_head": True},
}
ALL = KINDS["all of it"]
each_kind = pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in KINDS.values() for layout in LAYOUTS.values()]
)


def score(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS, MASK, **options).logits
    return logits


def multiply(model: nn.Module, name: str, scale: float) -> Any:
    """A copy of a model without scales, in whose tensors one adapter's is: what it adds is linear in these."""
    made = copy.deepcopy(model)
    for key, module in made.named_modules():
        if f".adapters.{name}" in key and isinstance(module, (DeltaProjection, HeadShift, NormShift, WordShift)):
            for param in module.parameters(recurse=False):
                param.data *= scale
    return made


@each_kind
def test_a_scale_multiplies_all_that_an_adapter_adds(kind: dict[str, Any], layout: dict[str, Any]) -> None:
    model = make_model(moved=0.2, adapters={"law": kind}, **layout)
    whole, half = score(model), score(multiply(model, "law", 0.5))
    base = make_model(adapters={}, **layout)
    base.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "adapters" not in name})
    assert not torch.allclose(whole, score(base), atol=1e-2)
    model.set_adapter_scale("law", 0.5)
    torch.testing.assert_close(score(model), half, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(score(model, adapter_names=["law"] * 3), half, atol=2e-5, rtol=1e-5)
    model.set_adapter_scale("law", 0)
    assert torch.equal(score(model), score(base)), "bit for bit"
    assert torch.equal(score(model, adapter_names=["law"] * 3), score(base))
    model.set_adapter_scale("law", 1)
    assert torch.equal(score(model), whole), "bit for bit"


def test_adapters_have_scales_of_their_own() -> None:
    """Whether they are summed, or each row has one."""
    model = make_model(moved=0.2, adapters={"law": ALL, "art": {"heads": 2, "bottleneck_size": 3}})
    expected = multiply(multiply(model, "law", 0.3), "art", 1.5)
    base = score(model, adapter_names=["__base__"] * 3)
    model.set_adapter_scale("law", 0.3)
    model.set_adapter_scale("art", 1.5)
    torch.testing.assert_close(score(model), score(expected), atol=5e-5, rtol=1e-4)
    names = ["law", "__base__", "art"]
    torch.testing.assert_close(
        score(model, adapter_names=names), score(expected, adapter_names=names), atol=5e-5, rtol=1e-4
    )
    model.set_adapter_scale("law", 0.0)
    torch.testing.assert_close(score(model, adapter_names=names)[:2], base[:2], atol=2e-5, rtol=1e-5)


def test_a_scale_is_saved_with_the_model_and_copied_with_an_adapter(tmp_path: Path) -> None:
    model = make_model(moved=0.2, adapters={"law": ALL})
    model.set_adapter_scale("law", 0.5)
    model.save_pretrained(tmp_path)
    loaded: Any = DomextForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(score(loaded.eval()), score(model))
    loaded.set_adapter_scale("law", 1.0)
    model.set_adapter_scale("law", 1.0)
    assert torch.equal(score(loaded), score(model)), "nothing of it is lost"
    model.attach_adapter("art", heads=1, scale=0.5)
    assert [adapter.scale for adapter in model.config.adapters.values()] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "name", "scale", "sentence"),
    [
        ({}, "art", 0.5, "names 'art'; the model has \\['law'\\]"),
        ({}, "law", -0.5, "the adapter 'law' has scale -0.5; it must be a number of 0 or more"),
        ({}, "law", float("nan"), "has scale nan; it must be a number of 0 or more"),
        ({}, "law", float("inf"), "has scale inf; it must be a number of 0 or more"),
        ({"extension_vocab_size": 5}, "law", 0.7, "scale is 0.7; it must be 1 in a model with new words"),
        (
            {"module_hidden_size": 8, "module_ffn_size": 6},
            "law",
            0.0,
            "scale is 0.0; it must be 1 in a model with gated modules, which have no scale",
        ),
    ],
)
def test_what_has_no_scale_is_refused(values: dict[str, Any], name: str, scale: float, sentence: str) -> None:
    model = make_model(adapters={"law": {"heads": 1}}, **values)
    with pytest.raises(ValueError, match=sentence):
        model.set_adapter_scale(name, scale)
    model.set_adapter_scale("law", 1.0)
    assert model.config.adapters["law"].scale == 1.0
