"""Tiny bases of the layouts beside BERT's and RoBERTa's own, made by transformers' own classes: a new one is a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from conftest import SHAPE, make_random_model, write_tokenizer


@dataclass(frozen=True)
class TinyLayout:
    """A layout's tiny base.

    Args:
        family: how the names of transformers' classes begin.
        values: of its configuration, beside the shape of every tiny base.
        renamed: what it calls that shape's values.
    """

    family: str
    values: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def describe(self, vocab_size: int, **values: Any) -> Any:
        """Return a configuration."""
        shape = {"vocab_size": vocab_size, "max_position_embeddings": 128, **SHAPE}
        own = {self.renamed.get(name, name): value for name, value in shape.items()}
        return getattr(transformers, f"{self.family}Config")(**{**own, **self.values, **values})

    def save(self, folder: Path, architecture: str = "ForMaskedLM", **values: Any) -> Path:
        """Save a base with random weights and a WordPiece tokenizer."""
        config = self.describe(write_tokenizer(folder), **values)
        model_class = getattr(transformers, f"{self.family}{architecture}")
        make_random_model(model_class, config).save_pretrained(folder)
        return folder


TINY_LAYOUTS = {
    "modernbert": TinyLayout(
        "ModernBert",
        {
            "local_attention": 8,
            "pad_token_id": 0,
            "norm_eps": 1e-3,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        },
    ),
    "distilbert": TinyLayout(
        "DistilBert",
        {"activation": "relu"},
        {
            "num_hidden_layers": "n_layers",
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        },
    ),
    "electra": TinyLayout("Electra", {"embedding_size": 32, "hidden_act": "relu"}),
    "camembert": TinyLayout("Camembert", {"pad_token_id": 0, "max_position_embeddings": 129, "type_vocab_size": 1}),
}
"""By `model_type`."""
