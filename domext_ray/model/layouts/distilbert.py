"""DistilBERT: BERT's layers under other names, without segment types and pooler."""

from __future__ import annotations

from transformers import DistilBertConfig

from domext_ray.model.layouts.layout import SHARED_FIELDS, Layout

_LAYER = "bert.encoder.layer.#."
_RENAMED = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}


class DistilBert(Layout):
    """DistilBERT."""

    config_class = DistilBertConfig
    family = "DistilBert"
    prefix = "distilbert."
    names = {
        "distilbert.embeddings.": "bert.embeddings.",
        "distilbert.transformer.layer.#.attention.q_lin.": f"{_LAYER}attention.self.query.",
        "distilbert.transformer.layer.#.attention.k_lin.": f"{_LAYER}attention.self.key.",
        "distilbert.transformer.layer.#.attention.v_lin.": f"{_LAYER}attention.self.value.",
        "distilbert.transformer.layer.#.attention.out_lin.": f"{_LAYER}attention.output.dense.",
        "distilbert.transformer.layer.#.sa_layer_norm.": f"{_LAYER}attention.output.LayerNorm.",
        "distilbert.transformer.layer.#.ffn.lin1.": f"{_LAYER}intermediate.dense.",
        "distilbert.transformer.layer.#.ffn.lin2.": f"{_LAYER}output.dense.",
        "distilbert.transformer.layer.#.output_layer_norm.": f"{_LAYER}output.LayerNorm.",
        "vocab_transform.": "cls.predictions.transform.dense.",
        "vocab_layer_norm.": "cls.predictions.transform.LayerNorm.",
        "vocab_projector.weight": "cls.predictions.decoder.weight",
        "vocab_projector.bias": "cls.predictions.bias",
    }
    fields = {
        name: _RENAMED.get(name, name) for name in SHARED_FIELDS if name not in ("type_vocab_size", "layer_norm_eps")
    }
    fixed = {"position_rule": "absolute", "type_vocab_size": 0, "layer_norm_eps": 1e-12}
