"""ModernBERT, and those that share its layout, such as Ettin's encoders and mmBERT.

Norms before the sublayers, rotary positions of two bases, attention that is local in most layers, a gated FFN, and
projections that are stored as one matrix. Source: Warner et al., arXiv:2412.13663 (2024), section 2.1.
"""

from __future__ import annotations

from typing import Any

from transformers import ModernBertConfig, PreTrainedConfig

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.layouts.layout import Layout

_LAYER = "bert.encoder.layer.#."
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


class ModernBert(Layout):
    """ModernBERT; of its dropouts, that of the FFN is taken for all sublayers' outputs."""

    config_class = ModernBertConfig
    family = "ModernBert"
    prefix = "model."
    names = {
        "model.embeddings.tok_embeddings.": "bert.embeddings.word_embeddings.",
        "model.embeddings.norm.": "bert.embeddings.LayerNorm.",
        "model.layers.#.attn_norm.": f"{_LAYER}attention.output.LayerNorm.",
        "model.layers.#.attn.Wqkv.": tuple(f"{_LAYER}attention.self.{each}." for each in ("query", "key", "value")),
        "model.layers.#.attn.Wo.": f"{_LAYER}attention.output.dense.",
        "model.layers.#.mlp_norm.": f"{_LAYER}output.LayerNorm.",
        "model.layers.#.mlp.Wi.": (f"{_LAYER}intermediate.dense.", f"{_LAYER}intermediate.gate."),
        "model.layers.#.mlp.Wo.": f"{_LAYER}output.dense.",
        "model.final_norm.": "bert.encoder.LayerNorm.",
        "head.dense.": "cls.predictions.transform.dense.",
        "head.norm.": "cls.predictions.transform.LayerNorm.",
        "decoder.weight": "cls.predictions.decoder.weight",
        "decoder.bias": "cls.predictions.bias",
    }
    fields = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_activation",
        "mlm_head_act": "classifier_activation",
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
        "layer_norm_eps": "norm_eps",
        "pad_token_id": "pad_token_id",
        "attention_bias": "attention_bias",
        "ffn_bias": "mlp_bias",
        "norm_bias": "norm_bias",
        "head_bias": "classifier_bias",
    }
    fixed = {"norm_place": "pre", "position_rule": "rotary", "gated_ffn": True, "type_vocab_size": 0}

    def refuse(self, found: PreTrainedConfig) -> str:
        """See `Layout.refuse`."""
        scaled = [kind for kind, each in _read_rotations(found).items() if each.get("rope_type") != "default"]
        if scaled:
            return f"scales its rotary positions (rope_parameters of {scaled[0]}); give a base that does not"
        if not getattr(found, "decoder_bias", True):
            return "has no bias in its output projection (decoder_bias); give a base that has one"
        return super().refuse(found)

    def describe_more(self, found: PreTrainedConfig) -> dict[str, Any]:
        """See `Layout.describe_more`."""
        thetas = {kind: float(each["rope_theta"]) for kind, each in _read_rotations(found).items()}
        kinds = getattr(found, "layer_types", None) or []
        return {
            "rope_theta": thetas[_GLOBAL],
            "local_rope_theta": thetas[_LOCAL],
            "local_window": getattr(found, "local_attention", 0) // 2,
            "local_layers": [index for index, kind in enumerate(kinds) if kind == _LOCAL],
        }

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        """See `Layout.restore_more`; ids of special tokens are the tokenizer's to say."""
        thetas = {_GLOBAL: config.rope_theta, _LOCAL: config.local_rope_theta}
        return {
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            "local_attention": 2 * config.local_window,
            "layer_types": [
                _LOCAL if index in config.local_layers else _GLOBAL for index in range(config.num_hidden_layers)
            ],
            "embedding_dropout": config.hidden_dropout_prob,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        }


def _read_rotations(found: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    parameters = getattr(found, "rope_parameters", None) or {}
    return {kind: dict(parameters.get(kind) or {}) for kind in (_GLOBAL, _LOCAL)}
