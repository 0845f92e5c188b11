"""The configuration: what it refuses, and what survives saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from domext_ray.model.domext.configuration_domext import DomextConfig


def test_saving_keeps_every_value(tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 48, "num_attention_heads": 3, "head_bilstm": 24}
    names = {"hidden_act": "relu", "mlm_head_act": "gelu", "position_rule": "roberta", "adapter_init": "paper"}
    law = {"bottleneck_size": 16, "bottleneck_activation": "tanh", "bottleneck_parallel": True}
    adapters = {"medicine": {"heads": 2, "ffn_units": 8}, "law": law, "art": {"heads": 1}}
    config = DomextConfig(
        **{**sizes, **names, "adapters": adapters, "active_adapters": ["law"]},
        pad_token_id=1,
        causal=True,
        tie_word_embeddings=False,
        id2label={0: "no", 1: "yes", 2: "maybe"},
    )
    config.save_pretrained(tmp_path)
    again = DomextConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == config.to_diff_dict() and list(again.adapters) == list(config.adapters)
    assert (again.pad_token_id, again.tie_word_embeddings, again.num_labels) == (1, False, 3)
    assert again.id2label == {0: "no", 1: "yes", 2: "maybe"}


def test_longest_row() -> None:
    for rule, pad, longest in (("absolute", 0, 512), ("roberta", 1, 510), ("rotary", 0, 512)):
        assert DomextConfig(position_rule=rule, pad_token_id=pad).max_row_length == longest, rule


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 7}, "hidden_size is 768; it must be a multiple of num_attention_heads, 7"),
    ({"position_rule": "learned"}, "position_rule is 'learned'"),
    ({"position_rule": "rotary", "num_attention_heads": 768}, "the heads' size is 1; it must be even"),
    ({"norm_place": "middle"}, "norm_place is 'middle'"),
    ({"local_window": -1}, "local_window is -1"),
    ({"local_layers": [12]}, "local_layers is .12.; the model has the layers 0 to 11"),
    ({"adapter_init": "ones"}, "adapter_init is 'ones'"),
    ({"adapters": {"a.b": {"heads": 1, "ffn_units": 1}}}, "is called 'a.b'"),
    ({"adapters": {"keys": {"heads": 1}}}, "is called 'keys'"),
    ({"adapters": {"__base__": {"heads": 1}}}, "is called '__base__'"),
    ({"adapters": {"law": {"heads": -1, "ffn_units": 1}}}, "none may be below 0"),
    ({"adapters": {"law": {"heads": 0}}}, "one must be above"),
    ({"adapters": {"law": {"bottleneck": 8}}}, "has the key 'bottleneck'"),
    (
        {"adapters": {"law": {"bottleneck_size": 8, "first_layer": 12}}},
        "the layers 12 to 11; the model has 0 to 11",
    ),
    ({"adapters": {"law": {"bottleneck_size": 8, "first_layer": 2, "last_layer": 1}}}, "the layers 2 to 1"),
    ({"adapters": {"law": {"bottleneck_size": 8, "bottleneck_activation": "selu"}}}, "gelu, relu, tanh"),
    ({"adapters": {"law": {"bottleneck_size": 8, "bottleneck_place": "ffn"}}}, "both, attention, output"),
    ({"head_bilstm": -1}, "head_bilstm is -1; it must be 0 or more"),
    ({"bottleneck_std": 0.0}, "must be above 0"),
    ({"active_adapters": ["law"]}, "active_adapters names 'law'; the model has no adapter"),
]


def test_a_value_outside_its_rule_is_refused() -> None:
    for values, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            DomextConfig(**values)
