"""BERT, and RoBERTa with those that share its layout: XLM-R and CamemBERT."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig, PreTrainedConfig, RobertaConfig

from domext_ray.model.layouts.layout import Layout


class Bert(Layout):
    """BERT: every other layout's tensors get its names."""

    config_class = BertConfig
    family = "Bert"
    prefix = "bert."
    names = {
        each: each
        for each in ("bert.embeddings.", "bert.encoder.", "bert.pooler.", "cls.predictions.", "cls.seq_relationship.")
    }
    has_plain_heads = True
    formats = ("adapterhub", "peft")


class Roberta(Layout):
    """RoBERTa: other names, other positions, and a masked-LM head that is GELU whatever `hidden_act` is."""

    config_class = RobertaConfig
    family = "Roberta"
    prefix = "roberta."
    names = {
        "roberta.embeddings.": "bert.embeddings.",
        "roberta.encoder.": "bert.encoder.",
        "roberta.pooler.": "bert.pooler.",
        "lm_head.dense.": "cls.predictions.transform.dense.",
        "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
        "lm_head.decoder.": "cls.predictions.decoder.",
        "lm_head.bias": "cls.predictions.bias",
    }
    fixed = {"position_rule": "roberta"}
    formats = ("adapterhub", "peft")

    def describe_more(self, found: PreTrainedConfig) -> dict[str, Any]:
        """See `Layout.describe_more`."""
        return {"mlm_head_act": "gelu"}
