"""Layouts of bases: what a checkpoint of each architecture calls its parts, and how it comes back.

Enters: a checkpoint's configuration and the names of its tensors. Leaves: a `DomextConfig`, and BERT's names, under
which the model of this library has every base; and from these the architecture of transformers that computes the same.
README.md beside this file says how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from domext_ray.config.extensions.base import Format
from domext_ray.model.domext.configuration_domext import DomextConfig

SHARED_FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps pad_token_id"
).split()
"""Sizes of every base, as `DomextConfig` and transformers' BERT call them."""
_NUMBER = "#"  # stands for a layer's number in `Layout.names`
_LAYER = "bert.encoder.layer.#."
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # of TensorFlow
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def _share(renamed: Mapping[str, str], absent: tuple[str, ...] = ()) -> dict[str, str]:
    """The shared fields that a configuration has, with its names for those that it calls otherwise."""
    return {name: renamed.get(name, name) for name in SHARED_FIELDS if name not in absent}


class Layout:
    """One architecture of transformers."""

    config_class: ClassVar[type[PreTrainedConfig]]
    family: ClassVar[str]  # how the names of its classes begin, such as "Bert" of BertForMaskedLM
    prefix: ClassVar[str]  # how its encoder's tensors begin; a checkpoint of the encoder alone leaves that out
    # Start of its tensors' names -> start of BERT's, "#" for the layer's number. Several of BERT's names stand for
    # matrices that one tensor holds one below another, in this order.
    names: ClassVar[Mapping[str, str | tuple[str, ...]]]
    fields: ClassVar[Mapping[str, str]] = _share({})  # name in `DomextConfig` -> name in its configuration
    fixed: ClassVar[Mapping[str, Any]] = {}  # values of `DomextConfig` by which a model is known to be of this layout
    has_plain_heads: ClassVar[bool] = False  # its heads for tasks have the tensors of heads_domext.py
    # Formats of adapters alone that can be written for it: those whose library knows the layers by BERT's names.
    formats: ClassVar[tuple[Format, ...]] = ()

    def refuse(self, found: PreTrainedConfig) -> str:
        """Say what a base must not be, as the end of a sentence that begins with its name; empty: it is taken."""
        is_relative = getattr(found, "position_embedding_type", None) not in (None, "absolute")
        if getattr(found, "is_decoder", False) or is_relative:
            return "is a decoder or has relative positions; give a plain encoder"
        return ""

    def describe(self, found: PreTrainedConfig) -> DomextConfig:
        """Return the shape of a base, given its configuration with the architecture's defaults."""
        values = {own: getattr(found, theirs) for own, theirs in self.fields.items()}
        values = {name: value for name, value in values.items() if value is not None}
        return DomextConfig(**{**values, **self.fixed, **self.describe_more(found)})

    def describe_more(self, found: PreTrainedConfig) -> dict[str, Any]:
        """Return values of `DomextConfig` that are no copies of one of its configuration's."""
        return {}

    def restore(self, config: DomextConfig, architecture: str) -> PreTrainedConfig:
        """Return the configuration of transformers' own model that a model without extensions is.

        `architecture` is its class without the family, such as "ForMaskedLM".
        """
        values = {theirs: getattr(config, own) for own, theirs in self.fields.items()}
        values = {name: value for name, value in values.items() if value is not None}
        values |= self.restore_more(config)
        return self.config_class(**values, architectures=[f"{self.family}{architecture}"])

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        """Return the values of its configuration that `describe_more` has read."""
        return {}

    def name_internal(self, name: str) -> tuple[str, ...]:
        """Return BERT's name, or names, of a checkpoint's tensor; none for one that no masked LM uses."""
        for old, new in _OLD_NAMES.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name.endswith(("position_ids", "token_type_ids")):
            return ()
        for candidate in (name, self.prefix + name):
            for theirs, own in self.names.items():
                starts = (own,) if isinstance(own, str) else own
                found = tuple(_rename(candidate, theirs, start) for start in starts)
                if found[0]:
                    return found
        return ()

    def name_plain(self, name: str) -> str:
        """Return this architecture's name of a tensor by BERT's name; one that it does not have keeps that."""
        for theirs, own in self.names.items():
            for start in (own,) if isinstance(own, str) else own:
                if found := _rename(name, start, theirs):
                    return found
        return name


def _rename(name: str, old: str, new: str) -> str:
    """Return a name with another start, the layer's number kept; empty, if it does not start with `old`."""
    match = re.match(re.escape(old).replace(re.escape(_NUMBER), r"(\d+)"), name)
    if match is None:
        return ""
    return new.replace(_NUMBER, match[1] if _NUMBER in old else "") + name[match.end() :]


class Bert(Layout):
    """BERT: every other layout's tensors get its names."""

    config_class = BertConfig
    family = "Bert"
    prefix = "bert."
    names = {
        start: start
        for start in ("bert.embeddings.", "bert.encoder.", "bert.pooler.", "cls.predictions.", "cls.seq_relationship.")
    }
    has_plain_heads = True
    formats = ("adapterhub", "peft")


class Roberta(Layout):
    """RoBERTa, XLM-R, CamemBERT: other names and positions, and an MLM head that is GELU whatever `hidden_act` is."""

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
        return {"mlm_head_act": "gelu"}


class DistilBert(Layout):
    """DistilBERT: BERT's layers under other names, without segment types and pooler."""

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
    fields = _share(
        {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        absent=("type_vocab_size", "layer_norm_eps"),
    )
    fixed = {"position_rule": "absolute", "type_vocab_size": 0, "layer_norm_eps": 1e-12}


class Electra(Layout):
    """ELECTRA, a discriminator or a generator, whose word embeddings are as wide as its layers.

    BERT's layers, and the generator's masked-LM head; a discriminator has none.
    """

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
        sizes = getattr(found, "embedding_size", 0), getattr(found, "hidden_size", 0)
        if sizes[0] != sizes[1]:
            return (
                f"has word embeddings of width {sizes[0]} under layers of width {sizes[1]}; give one that has the same"
            )
        return super().refuse(found)

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        return {"embedding_size": config.hidden_size}


class ModernBert(Layout):
    """ModernBERT, and those that share its layout, such as Ettin's encoders and mmBERT.

    Norms before the sublayers, rotary positions of two bases, attention that is local in most layers, a gated FFN, and
    projections that are stored as one matrix; of its dropouts, that of the FFN is taken for all sublayers' outputs.

    Source: Warner et al., arXiv:2412.13663 (2024), section 2.1.
    """

    config_class = ModernBertConfig
    family = "ModernBert"
    prefix = "model."
    names = {
        "model.embeddings.tok_embeddings.": "bert.embeddings.word_embeddings.",
        "model.embeddings.norm.": "bert.embeddings.LayerNorm.",
        "model.layers.#.attn_norm.": f"{_LAYER}attention.output.LayerNorm.",
        "model.layers.#.attn.Wqkv.": tuple(f"{_LAYER}attention.self.{name}." for name in ("query", "key", "value")),
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
        **_share(
            {
                "hidden_act": "hidden_activation",
                "hidden_dropout_prob": "mlp_dropout",
                "attention_probs_dropout_prob": "attention_dropout",
                "layer_norm_eps": "norm_eps",
            },
            absent=("type_vocab_size",),
        ),
        "mlm_head_act": "classifier_activation",
        "attention_bias": "attention_bias",
        "ffn_bias": "mlp_bias",
        "norm_bias": "norm_bias",
        "head_bias": "classifier_bias",
    }
    fixed = {"norm_place": "pre", "position_rule": "rotary", "gated_ffn": True, "type_vocab_size": 0}

    def refuse(self, found: PreTrainedConfig) -> str:
        scaled = [kind for kind, rotation in _read_rotations(found).items() if rotation.get("rope_type") != "default"]
        if scaled:
            return f"scales its rotary positions (rope_parameters of {scaled[0]}); give a base that does not"
        if not getattr(found, "decoder_bias", True):
            return "has no bias in its output projection (decoder_bias); give a base that has one"
        return super().refuse(found)

    def describe_more(self, found: PreTrainedConfig) -> dict[str, Any]:
        thetas = {kind: float(rotation["rope_theta"]) for kind, rotation in _read_rotations(found).items()}
        kinds = getattr(found, "layer_types", None) or []
        return {
            "rope_theta": thetas[_GLOBAL],
            "local_rope_theta": thetas[_LOCAL],
            "local_window": getattr(found, "local_attention", 0) // 2,
            "local_layers": [index for index, kind in enumerate(kinds) if kind == _LOCAL],
        }

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        thetas = {_GLOBAL: config.rope_theta, _LOCAL: config.local_rope_theta}
        return {
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            "local_attention": 2 * config.local_window,
            "layer_types": [
                _LOCAL if index in config.local_layers else _GLOBAL for index in range(config.num_hidden_layers)
            ],
            "embedding_dropout": config.hidden_dropout_prob,
            # ids of special tokens are the tokenizer's to say
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        }


def _read_rotations(found: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    parameters = getattr(found, "rope_parameters", None) or {}
    return {kind: dict(parameters.get(kind) or {}) for kind in (_GLOBAL, _LOCAL)}


LAYOUTS: dict[str, Layout] = {
    "bert": Bert(),
    "roberta": Roberta(),
    "xlm-roberta": Roberta(),
    "camembert": Roberta(),
    "modernbert": ModernBert(),
    "distilbert": DistilBert(),
    "electra": Electra(),
}
"""By `model_type` of a base's config.json."""


def find_layout(config: DomextConfig) -> Layout:
    """Return the layout of a model: of those whose `fixed` values it has, the one that says most."""
    fitting = (
        layout
        for layout in LAYOUTS.values()
        if all(getattr(config, name) == value for name, value in layout.fixed.items())
    )
    return max(fitting, key=lambda layout: len(layout.fixed))
