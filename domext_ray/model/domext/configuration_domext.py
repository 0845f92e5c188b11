"""Configuration of the augmented BERT: an encoder of BERT's family and the extensions that it carries.

This file is exported as it is: it imports torch and transformers only. One configuration describes a plain encoder (no
extension; BERT's layout where nothing else is said, see `LAYOUT_DEFAULTS`) and the same encoder with extra attention
heads and FFN units (AF Adapter) and bottlenecks (Houlsby) per named adapter, with its shifts of the base's words, with
new words in a table of their own, and with a gated extension module beside every layer (exBERT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

OWN_FIELDS = "domext"
"""Key of an export's config.json: values for this code alone, in the place of those at the top, for others."""
BOTTLENECK_CHOICES = {
    "bottleneck_activation": ("gelu", "relu", "tanh"),
    "bottleneck_place": ("both", "attention", "output"),
}
"""What the words in an adapter's description may be; the first is what it is when left out."""


@dataclass(frozen=True)
class AdapterConfig:
    """What one adapter adds to the base's words and to the layers that have it; one of its sizes at least is above 0.

    Source: the variants of bottlenecks, Houlsby et al. section 3.6.
    """

    heads: int = 0  # extra attention heads per layer (AF Adapter)
    ffn_units: int = 0  # extra FFN units per layer (AF Adapter)
    bottleneck_size: int = 0  # width m of the bottlenecks (Houlsby et al.)
    layer_norms: bool = True  # the bottlenecks shift their sublayers' LayerNorms
    bottleneck_activation: str = "gelu"  # gelu, relu or tanh, between a bottleneck's two matrices
    bottleneck_layer_norm: bool = False  # a bottleneck normalises what it reads, with a LayerNorm of its own
    bottleneck_place: str = "both"  # both sublayers have a bottleneck, or attention alone, or the FFN alone ("output")
    bottleneck_parallel: bool = False  # a bottleneck reads its sublayer's input instead of its output
    word_rows: int = 0  # rows of the base's word table, and of the output tied to it, that the adapter shifts
    word_head: bool = False  # it shifts the MLM head's transform, too
    router_words: int = 0  # words of the base, the first ones, that its router knows; 0: it has no router
    router_threshold: float = 0.0  # log-odds from which its router gives it a row
    first_layer: int = 0  # first layer that has the parts of layers, from 0
    last_layer: int = 0  # last such layer
    scale: float = 1.0  # factor of all that it adds, 0 or more; 1: as it was trained, 0: the base


class DomextConfig(PreTrainedConfig):
    """Shape of an augmented BERT; transformers makes a dataclass of it, whose fields are the keys of config.json."""

    model_type = "domext"

    vocab_size: int = 30522  # words, those of the extension included
    hidden_size: int = 768  # width d, a multiple of num_attention_heads
    num_hidden_layers: int = 12
    num_attention_heads: int = 12  # the base's heads h; an extra head has the same size, d / h
    intermediate_size: int = 3072  # the base's FFN units
    hidden_act: str = "gelu"  # of the FFN and of its extra units
    mlm_head_act: str | None = None  # None: hidden_act. RoBERTa's head is GELU whatever that is
    hidden_dropout_prob: float = 0.1  # of embeddings and of each sublayer's output
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512  # rows of the position table; tokens of a row, where positions are rotary
    type_vocab_size: int = 2  # segment types; 0: the layout has none, and token_type_ids are not read
    initializer_range: float = 0.02  # standard deviation of random weights
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    # "absolute" counts from 0 (BERT), "roberta" counts non-padding tokens from pad_token_id + 1, "rotary" rotates
    # queries and keys by their positions instead of adding a table's rows.
    position_rule: str = "absolute"
    has_pooler: bool = False  # the base has a pooler ([CLS] -> dense -> tanh)
    tie_word_embeddings: bool = True
    causal: bool = False  # a token attends to itself and to those before it only (BERT section 5.1, left to right)

    # Extensions. Of an adapter given as a mapping, what is left out is the default, and the last layer is the model's.
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)
    active_adapters: list[str] | None = None  # those that take part in the forward pass; None: all
    # "zero": every adapter's output starts at exactly 0, so that step 0 is the base. "paper": heads and units start at
    # random, as in AF Adapter's public code, and bottlenecks near the identity, as in Houlsby's.
    adapter_init: str = "zero"
    bottleneck_std: float = 0.01  # standard deviation of that start, truncated at twice it
    extension_vocab_size: int = 0  # new words; their ids come after the base's
    module_hidden_size: int = 0  # width h' of exBERT's modules, a multiple of num_attention_heads; 0: none
    module_ffn_size: int = 0  # their FFN units f'
    gate_bias: float = 0.0  # start of their gates' bias; a positive one favours the base

    # Heads for tasks.
    classifier_dropout: float | None = None  # before a classifier; None: hidden_dropout_prob
    head_bilstm: int = 0  # width per direction of a BiLSTM between encoder and head (BERT section 5.1); 0: none
    head_bilstm_layers: int = 1
    # Layers of a frozen encoder that the BiLSTM reads, one behind another (BERT section 5.3); 0: the embeddings.
    # Empty: the last layer's, of an encoder that may train.
    head_layers: Sequence[int] = ()
    head_mix: bool = False  # it reads their learned weighted mean instead (ELMo)

    # The layout beside BERT's sizes (`LAYOUT_DEFAULTS`); extensions always have biases.
    # "post": a LayerNorm behind every sublayer and its residual (BERT). "pre": before every sublayer, but for the first
    # layer's attention, which reads the normalised embeddings, and behind the last layer.
    norm_place: str = "post"
    gated_ffn: bool = False  # the FFN is `(act(x W) * x V) W_o` instead of `act(x W) W_o`
    attention_bias: bool = True
    ffn_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = True  # of the dense layer of the MLM head
    rope_theta: float = 10_000.0  # base of rotary positions' wavelengths in layers with global attention
    local_rope_theta: float = 10_000.0  # the same in layers with local attention
    local_window: int = 0  # tokens on either side that a token of a layer with local attention sees
    local_layers: Sequence[int] = ()  # layers with local attention, from 0

    def __post_init__(self, **kwargs: Any) -> None:
        # Sorted, as JSON keeps it: the order in which adapters are summed must survive saving.
        self.adapters = {
            name: complete_adapter(name, values, self.num_hidden_layers)
            for name, values in sorted((self.adapters or {}).items())
        }
        self.head_layers, self.local_layers = list(self.head_layers), list(self.local_layers)
        super().__post_init__(**kwargs)
        self._check_values()

    def _check_values(self) -> None:
        heads, modules, units = self.num_attention_heads, self.module_hidden_size, self.module_ffn_size
        if self.hidden_size % heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of num_attention_heads, {heads}."
            )
        num_new, num_words = self.extension_vocab_size, self.vocab_size
        if not 0 <= num_new < num_words:
            raise ValueError(f"extension_vocab_size is {num_new}; it must be from 0 to below vocab_size, {num_words}.")
        if modules < 0 or modules % heads:
            raise ValueError(
                f"module_hidden_size is {modules}; it must be 0 or a multiple of num_attention_heads, {heads}."
            )
        if (units > 0) != (modules > 0):
            raise ValueError(
                f"module_ffn_size is {units} and module_hidden_size {modules}; both or neither must be above 0."
            )
        if self.adapter_init not in ("zero", "paper"):
            raise ValueError(f"adapter_init is {self.adapter_init!r}; it must be zero or paper.")
        if not 0.0 < self.bottleneck_std <= 1.0:
            raise ValueError(f"bottleneck_std is {self.bottleneck_std}; it must be above 0 and at most 1.")
        if self.head_bilstm < 0:
            raise ValueError(f"head_bilstm is {self.head_bilstm}; it must be 0 or more.")
        if self.head_layers and not self.head_bilstm:
            raise ValueError(f"head_layers is {self.head_layers}; it must be empty without head_bilstm.")
        num_known = self.base_vocab_size
        for name, adapter in self.adapters.items():
            for key, value in (("word_rows", adapter.word_rows), ("router_words", adapter.router_words)):
                if not 0 <= value <= num_known:
                    raise ValueError(f"the adapter {name!r} has {key} {value}; the base has {num_known} words.")
        check_active(self.active_adapters, self.adapters)
        if self.position_rule not in ("absolute", "roberta", "rotary"):
            raise ValueError(f"position_rule is {self.position_rule!r}; it must be absolute, roberta or rotary.")
        if self.position_rule == "rotary" and self.head_size % 2:
            raise ValueError(f"the heads' size is {self.head_size}; it must be even where positions are rotary.")
        if self.norm_place not in ("post", "pre"):
            raise ValueError(f"norm_place is {self.norm_place!r}; it must be post or pre.")
        if self.local_window < 0:
            raise ValueError(f"local_window is {self.local_window}; it must be 0 or more.")
        last = self.num_hidden_layers - 1
        if not set(self.local_layers) <= set(range(last + 1)):
            raise ValueError(f"local_layers is {self.local_layers}; the model has the layers 0 to {last}.")

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json; of an export, with the values below `OWN_FIELDS` in the place of those at the top."""
        values, unused = super().get_config_dict(*args, **kwargs)
        own = values.pop(OWN_FIELDS, {})
        return values | own, unused

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON keeps them; those of a layout only where they are not BERT's."""
        values = {**super().to_dict(), "adapters": {name: asdict(adapter) for name, adapter in self.adapters.items()}}
        return {name: value for name, value in values.items() if value != LAYOUT_DEFAULTS.get(name, ...)}

    def describe_layout(self) -> dict[str, Any]:
        """Return those values of `LAYOUT_DEFAULTS` that are not BERT's."""
        found = {name: getattr(self, name) for name in LAYOUT_DEFAULTS}
        return {name: value for name, value in found.items() if value != LAYOUT_DEFAULTS[name]}

    @property
    def head_size(self) -> int:
        """Size of an attention head, d / h."""
        return self.hidden_size // self.num_attention_heads

    @property
    def has_position_table(self) -> bool:
        """Whether positions are rows of a table."""
        return self.position_rule != "rotary"

    @property
    def has_pre_norm(self) -> bool:
        """Whether sublayers read what a LayerNorm makes of the residual stream."""
        return self.norm_place == "pre"

    @property
    def has_biases(self) -> bool:
        """Whether the base's layers have any bias."""
        return self.attention_bias or self.ffn_bias or self.norm_bias

    @property
    def sliding_window(self) -> int | None:
        """`local_window` as transformers' masks ask for it; None: attention is global in all layers."""
        return self.local_window if self.local_layers else None

    @property
    def base_vocab_size(self) -> int:
        """Rows of the base's word embedding table, which is also the first new word's id."""
        return self.vocab_size - self.extension_vocab_size

    @property
    def has_extension(self) -> bool:
        """Whether it differs from a plain encoder: by adapters, new words, modules or causal reading."""
        return bool(self.adapters or self.extension_vocab_size or self.module_hidden_size or self.causal)

    @property
    def max_row_length(self) -> int:
        """Longest row of tokens that the positions serve."""
        if self.position_rule == "roberta":
            return self.max_position_embeddings - self.pad_token_id - 1
        return self.max_position_embeddings


def is_adapter_name(name: str) -> bool:
    """Whether an adapter can be called so: torch keeps adapters by name beside its own attributes.

    Names that start with __ have a meaning in adapter_names.
    """
    return name.isidentifier() and not name.startswith("__") and not hasattr(nn.ModuleDict(), name)


def complete_adapter(name: str, values: AdapterConfig | Mapping[str, Any], num_hidden_layers: int) -> AdapterConfig:
    """Return an adapter with every value, of a model with so many layers.

    Raises:
        ValueError: the name is no identifier, a key or a word is unknown, a size is below 0, none is above, or a layer
            is not in the model.
    """
    if not is_adapter_name(name):
        raise ValueError(
            f"an adapter is called {name!r}; its name must be made of letters, digits and underscores, and be none of "
            "torch's words (such as keys or forward)."
        )
    given = asdict(values) if isinstance(values, AdapterConfig) else dict(values)
    keys = [attribute.name for attribute in fields(AdapterConfig)]
    if unknown := sorted(given.keys() - set(keys)):
        raise ValueError(f"the adapter {name!r} has the key {unknown[0]!r}; its keys are {', '.join(keys)}.")
    last = num_hidden_layers - 1
    adapter = replace(AdapterConfig(last_layer=last), **given)
    sizes = {size: getattr(adapter, size) for size in ("heads", "ffn_units", "bottleneck_size", "word_rows")}
    if min(sizes.values()) < 0 or not any(sizes.values()):
        said = ", ".join(f"{size} {value}" for size, value in sizes.items())
        raise ValueError(f"the adapter {name!r} has {said}; none may be below 0 and one must be above.")
    for key, words in BOTTLENECK_CHOICES.items():
        if (word := getattr(adapter, key)) not in words:
            raise ValueError(f"the adapter {name!r} has {key} {word!r}; it must be {', '.join(words)}.")
    check_scale(name, adapter.scale)
    if adapter.word_head and not adapter.word_rows:
        raise ValueError(f"the adapter {name!r} has word_head without word_rows.")
    first, end = adapter.first_layer, adapter.last_layer
    if not 0 <= first <= end <= last:
        raise ValueError(f"the adapter {name!r} has the layers {first} to {end}; the model has 0 to {last}.")
    return adapter


def check_scale(name: str, scale: float) -> None:
    """Raise ValueError if an adapter cannot be multiplied by a scale."""
    if not 0 <= scale < float("inf"):
        raise ValueError(f"the adapter {name!r} has scale {scale}; it must be a number of 0 or more.")


def check_active(names: list[str] | None, adapters: Mapping[str, AdapterConfig]) -> None:
    """Raise ValueError if a name to activate is no adapter of the model."""
    for name in names or []:
        if name not in adapters:
            raise ValueError(f"active_adapters names {name!r}; the model has {sorted(adapters) or 'no adapter'}.")


_BERT = vars(DomextConfig())
LAYOUT_DEFAULTS: dict[str, Any] = {
    name: _BERT[name]
    for name in (
        *("norm_place", "gated_ffn", "attention_bias", "ffn_bias", "norm_bias", "head_bias"),
        *("rope_theta", "local_rope_theta", "local_window", "local_layers"),
    )
}
"""Values that describe a layout beside BERT's sizes; these are BERT's own, and config.json leaves them out."""
