"""Models of this project's own code, without a checkpoint: 2 layers, 32 wide, 4 heads, 90 words, 24 positions."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM

VOCAB, LENGTH, WIDTH = 90, 12, 32
ADAPTERS = {"law": {"heads": 1, "ffn_units": 6}, "art": {"heads": 2, "ffn_units": 0}}
MODERN: dict[str, Any] = {
    **{"position_rule": "rotary", "norm_place": "pre", "norm_bias": False, "gated_ffn": True, "type_vocab_size": 0},
    **{"local_window": 2, "local_layers": [1]},
}
"""ModernBERT's layout, of whose two layers the second is local."""


def make_config(**values: Any) -> DomextConfig:
    """A configuration without dropout, with two adapters."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 24}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    own = {"vocab_size": VOCAB, "initializer_range": 0.2, "adapters": ADAPTERS, **sizes, **dropout, **values}
    return DomextConfig(hidden_size=WIDTH, **own)


def make_model(model_class: Any = DomextForMaskedLM, moved: float = 0.0, **values: Any) -> Any:
    """A model of such a configuration, all of whose tensors are `moved` off their start."""
    torch.manual_seed(0)
    model = model_class(make_config(**values)).eval()
    with torch.no_grad():
        for param in model.parameters() if moved else ():
            param.add_(moved * torch.randn_like(param))
    return model


def make_rows() -> tuple[Tensor, Tensor]:
    """Rows of 12, 8 and 5 tokens, and their mask; what stands behind a row's end are tokens, too."""
    ids = torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(LENGTH) < torch.tensor([[LENGTH], [8], [5]])).long()


def attend_in_turn(query: Tensor, key: Tensor, value: Tensor, *places: Any, scale: float, window_size: Any) -> Tensor:
    """What torch's kernel for GPUs computes, on a CPU: sequences in turn."""
    ends, ends_of_keys, longest, longest_key = places
    assert ends is ends_of_keys and ends.dtype == torch.int32 and longest == longest_key == int(ends.diff().max())
    assert ends[-1] == len(query) and query.shape[-1] % 8 == 0
    contexts = []
    for first, end in itertools.pairwise(ends.tolist()):
        queries, keys, values = (tensor[first:end].transpose(0, 1) for tensor in (query, key, value))
        distance = torch.arange(end - first) - torch.arange(end - first)[:, None]
        before, behind = ((distance.abs().max() if size < 0 else size) for size in window_size)
        seen = (distance >= -before) & (distance <= behind)
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, seen, scale=scale)
        contexts.append(attended.transpose(0, 1))
    return torch.cat(contexts)
