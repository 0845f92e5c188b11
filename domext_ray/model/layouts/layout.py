"""What a layout of bases says of itself: how its config.json is read, what its tensors are called, and the way back.

Enters: a checkpoint's configuration and the names of its tensors. Leaves: a `DomextConfig`, and BERT's names, under
which the model of this library has every base; and from these the architecture of transformers that computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from domext_ray.extensions.base import Format
from domext_ray.model.domext.configuration_domext import DomextConfig

SHARED_FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps pad_token_id"
).split()
"""Sizes of every base, as `DomextConfig` and transformers' BERT call them."""
LAYER = "#"
"""Stands for a layer's number in `Layout.names`."""
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""TensorFlow's names, in old checkpoints."""


class Layout:
    """One architecture of transformers.

    Class attributes:
        config_class: its configuration.
        family: how the names of its classes begin, such as "Bert" of BertForMaskedLM.
        prefix: how its encoder's tensors begin; a checkpoint of the encoder alone leaves that out.
        names: start of its tensors' names -> start of BERT's, `LAYER` for the layer's number. Several of BERT's names
            stand for matrices that one tensor holds one below another, in this order.
        fields: name in `DomextConfig` -> name in its configuration, of the values that both have.
        fixed: values of `DomextConfig` by which a model is known to be of this layout.
        has_plain_heads: its heads for tasks have the tensors of heads_domext.py.
        formats: formats of adapters alone that can be written for it: those whose library knows the layers by BERT's
            names.
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    family: ClassVar[str]
    prefix: ClassVar[str]
    names: ClassVar[Mapping[str, str | tuple[str, ...]]]
    fields: ClassVar[Mapping[str, str]] = {name: name for name in SHARED_FIELDS}
    fixed: ClassVar[Mapping[str, Any]] = {}
    has_plain_heads: ClassVar[bool] = False
    formats: ClassVar[tuple[Format, ...]] = ()

    def refuse(self, found: PreTrainedConfig) -> str:
        """Say what a base must not be, as the end of a sentence that begins with its name; empty: it is taken."""
        is_relative = getattr(found, "position_embedding_type", None) not in (None, "absolute")
        if getattr(found, "is_decoder", False) or is_relative:
            return "is a decoder or has relative positions; give a plain encoder"
        return ""

    def describe(self, found: PreTrainedConfig) -> DomextConfig:
        """Return the shape of a base.

        Args:
            found: its configuration, with this architecture's default for what config.json leaves out.
        """
        values = {own: getattr(found, theirs) for own, theirs in self.fields.items()}
        values = {name: value for name, value in values.items() if value is not None}
        return DomextConfig(**{**values, **self.fixed, **self.describe_more(found)})

    def describe_more(self, found: PreTrainedConfig) -> dict[str, Any]:
        """Return values of `DomextConfig` that are no copies of one of its configuration's."""
        return {}

    def restore(self, config: DomextConfig, architecture: str) -> PreTrainedConfig:
        """Return the configuration of transformers' own model that a model without extensions is.

        Args:
            config: of this layout.
            architecture: its class without the family, such as "ForMaskedLM".
        """
        values = {theirs: getattr(config, own) for own, theirs in self.fields.items()}
        values = {name: value for name, value in values.items() if value is not None}
        values |= self.restore_more(config)
        return self.config_class(**values, architectures=[f"{self.family}{architecture}"])

    def restore_more(self, config: DomextConfig) -> dict[str, Any]:
        """Return the values of its configuration that `describe_more` has read."""
        return {}

    def is_of(self, config: DomextConfig) -> bool:
        """Whether a model is of this layout, or of one that `fixed` describes in more detail."""
        return all(getattr(config, name) == value for name, value in self.fixed.items())

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
    match = re.match(re.escape(old).replace(re.escape(LAYER), r"(\d+)"), name)
    if match is None:
        return ""
    return new.replace(LAYER, match[1] if LAYER in old else "") + name[match.end() :]
