"""ELECTRA, a discriminator or a generator as an encoder: BERT's layers, and the generator's masked-LM head."""

from __future__ import annotations

from typing import Any

from transformers import ElectraConfig, PreTrainedConfig

from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.layouts.layout import Layout


class Electra(Layout):
    """ELECTRA whose word embeddings are as wide as its layers; a discriminator has no masked-LM head."""

    config_class = ElectraConfig
    family = "Electra"
    prefix = "electra."
    names = {
        "electra.embeddings.": "bert.embeddings.",
        "electra.encoder.": "bert.encoder.",
        "generator_predictions.dense.": "cls.predictions.transform.dense.",
        "generator_predictions.LayerNorm.": "cls.predictions.transform.LayerNorm.",
        "generator_lm_head.weight": "cls.predictions.decoder.weight",
        "generator_lm_head.bias": "cls.predictions.bias",
    }
    fixed = {"position_rule": "absolute", "mlm_head_act": "gelu"}
    formats = ("peft",)

    def refuse(self, found: PreTrainedConfig) -> str:
        """See `Layout.refuse`."""
        sizes = getattr(found, "embedding_size", 0), getattr(found, "hidden_size", 0)
        if sizes[0] != sizes[1]:
            return (
                f"has word embeddings of width {sizes[0]} under layers of width {sizes[1]}; give one that has the same"
            )
        return super().refuse(found)

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        """See `Layout.restore_more`."""
        return {"embedding_size": config.hidden_size}
