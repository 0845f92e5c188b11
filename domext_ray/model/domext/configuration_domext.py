"""Configuration of the augmented BERT: an encoder of BERT's family and the extensions that it carries.

This file is exported as it is: it imports torch and transformers only. One configuration describes a plain encoder (no
extension; BERT's layout where nothing else is said, see `LAYOUT_DEFAULTS`) and the same encoder with extra attention
heads and FFN units (AF Adapter) and bottlenecks (Houlsby) per named adapter, with its shifts of the base's words, with
new words in a table of their own, and with a gated extension module beside every layer (exBERT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

OWN_FIELDS = "domext"
"""Key of an export's config.json: values for this code alone, in the place of those at the top, for others."""
LAYOUT_DEFAULTS: dict[str, Any] = {
    "norm_place": "post",
    "gated_ffn": False,
    "attention_bias": True,
    "ffn_bias": True,
    "norm_bias": True,
    "head_bias": True,
    "rope_theta": 10_000.0,
    "local_rope_theta": 10_000.0,
    "local_window": 0,
    "local_layers": [],
}
"""Values that describe a layout beside BERT's sizes; these are BERT's own, and config.json leaves them out."""
_SIZES = ("heads", "ffn_units", "bottleneck_size", "word_rows")
BOTTLENECK_CHOICES = {
    "bottleneck_activation": ("gelu", "relu", "tanh"),
    "bottleneck_place": ("both", "attention", "output"),
}
"""What the words in an adapter's description may be; the first is what it is when left out."""


@dataclass(frozen=True)
class AdapterConfig:
    """What one adapter adds to the base's words and to the layers that have it; one of its sizes at least is above 0.

    Args:
        heads: extra attention heads per layer (AF Adapter).
        ffn_units: extra FFN units per layer (AF Adapter).
        bottleneck_size: width m of the bottlenecks (Houlsby et al.).
        layer_norms: the bottlenecks shift their sublayers' LayerNorms.
        bottleneck_activation: gelu, relu or tanh, between a bottleneck's two matrices.
        bottleneck_layer_norm: a bottleneck normalises what it reads, with a LayerNorm of its own.
        bottleneck_place: both sublayers have a bottleneck, or attention alone, or the FFN alone ("output").
        bottleneck_parallel: a bottleneck reads its sublayer's input instead of its output.
        word_rows: rows of the base's word table, and of the output tied to it, that the adapter shifts.
        word_head: it shifts the MLM head's transform, too.
        router_words: words of the base, the first ones, that its router knows; 0: it has no router.
        router_threshold: log-odds from which its router gives it a row.
        first_layer: first layer that has the parts of layers, from 0.
        last_layer: last such layer.

    Source: the variants of bottlenecks, Houlsby et al. section 3.6.
    """

    heads: int = 0
    ffn_units: int = 0
    bottleneck_size: int = 0
    layer_norms: bool = True
    bottleneck_activation: str = "gelu"
    bottleneck_layer_norm: bool = False
    bottleneck_place: str = "both"
    bottleneck_parallel: bool = False
    word_rows: int = 0
    word_head: bool = False
    router_words: int = 0
    router_threshold: float = 0.0
    first_layer: int = 0
    last_layer: int = 0


class DomextConfig(PreTrainedConfig):
    """Shape of an augmented BERT.

    Args:
        vocab_size: words, those of the extension included.
        extension_vocab_size: new words; their ids come after the base's.
        hidden_size: width d, a multiple of `num_attention_heads`.
        num_hidden_layers: layers L.
        num_attention_heads: the base's heads h; an extra head has the same size, d / h.
        intermediate_size: the base's FFN units.
        hidden_act: activation of the FFN and of its extra units.
        mlm_head_act: activation of the MLM head; None: `hidden_act`. RoBERTa's head is GELU whatever `hidden_act` is.
        hidden_dropout_prob: dropout of embeddings and of each sublayer's output, 0 to 1.
        attention_probs_dropout_prob: dropout of attention weights, 0 to 1.
        max_position_embeddings: rows of the position table; tokens of a row, where positions are rotary.
        type_vocab_size: segment types; 0: the layout has none, and `token_type_ids` are not read.
        initializer_range: standard deviation of random weights.
        layer_norm_eps: epsilon of every LayerNorm.
        pad_token_id: id of [PAD].
        position_rule: "absolute" counts from 0 (BERT), "roberta" counts non-padding tokens from pad_token_id + 1,
            "rotary" rotates queries and keys by their positions instead of adding a table's rows.
        has_pooler: the base has a pooler ([CLS] -> dense -> tanh).
        adapters: an `AdapterConfig`, or a mapping of some of its values, by name. What a mapping leaves out is the
            default, and the last layer is the model's.
        active_adapters: adapters that take part in the forward pass; None: all.
        module_hidden_size: width h' of the extension modules' attention, a multiple of `num_attention_heads`; 0: none.
        module_ffn_size: FFN units f' of the extension modules.
        gate_bias: start of the gates' bias; a positive one favours the base.
        causal: a token attends to itself and to those before it only (BERT section 5.1, left to right).
        head_bilstm: width of each direction of a BiLSTM between the encoder and a task's head (BERT section 5.1); 0:
            none.
        head_bilstm_layers: layers of that BiLSTM.
        head_layers: layers of a frozen encoder whose outputs the BiLSTM reads, one behind another (BERT section 5.3);
            0: the embeddings. Empty: the last layer's, of an encoder that may train.
        head_mix: the BiLSTM reads their learned weighted mean instead (ELMo).
        adapter_init: "zero" starts every adapter's output at exactly 0, so that step 0 is the base; "paper" uses the
            default initialisation for heads and units, as AF Adapter's public code does, and Houlsby's near-identity
            start for bottlenecks.
        bottleneck_std: standard deviation of that start, truncated at twice it.
        classifier_dropout: dropout before a classifier; None: `hidden_dropout_prob`.
        norm_place: "post": a LayerNorm behind every sublayer and its residual (BERT); "pre": before every sublayer,
            but for the first layer's attention, which reads the normalised embeddings, and behind the last layer.
        gated_ffn: the FFN is `(act(x W) * x V) W_o` instead of `act(x W) W_o`.
        attention_bias: the base's attention has biases. Extensions always have theirs.
        ffn_bias: its FFN has biases.
        norm_bias: its LayerNorms have biases.
        head_bias: the dense layer of its MLM head has a bias.
        rope_theta: base of rotary positions' wavelengths in layers with global attention.
        local_rope_theta: the same in layers with local attention.
        local_window: tokens on either side that a token of a layer with local attention sees.
        local_layers: layers with local attention, from 0.
    """

    model_type = "domext"

    def __init__(
        self,
        vocab_size: int = 30522,
        extension_vocab_size: int = 0,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_act: str = "gelu",
        mlm_head_act: str | None = None,
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pad_token_id: int = 0,
        position_rule: str = "absolute",
        has_pooler: bool = False,
        adapters: Mapping[str, AdapterConfig | Mapping[str, Any]] | None = None,
        active_adapters: list[str] | None = None,
        module_hidden_size: int = 0,
        module_ffn_size: int = 0,
        gate_bias: float = 0.0,
        causal: bool = False,
        head_bilstm: int = 0,
        head_bilstm_layers: int = 1,
        head_layers: Sequence[int] = (),
        head_mix: bool = False,
        adapter_init: str = "zero",
        bottleneck_std: float = 0.01,
        classifier_dropout: float | None = None,
        norm_place: str = "post",
        gated_ffn: bool = False,
        attention_bias: bool = True,
        ffn_bias: bool = True,
        norm_bias: bool = True,
        head_bias: bool = True,
        rope_theta: float = 10_000.0,
        local_rope_theta: float = 10_000.0,
        local_window: int = 0,
        local_layers: Sequence[int] = (),
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.extension_vocab_size = extension_vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.mlm_head_act = mlm_head_act
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.position_rule = position_rule
        self.has_pooler = has_pooler
        # Sorted, as JSON keeps it: the order in which adapters are summed must survive saving.
        self.adapters = {
            name: complete_adapter(name, values, num_hidden_layers) for name, values in sorted((adapters or {}).items())
        }
        self.active_adapters = active_adapters
        self.module_hidden_size = module_hidden_size
        self.module_ffn_size = module_ffn_size
        self.gate_bias = gate_bias
        self.causal = causal
        self.head_bilstm = head_bilstm
        self.head_bilstm_layers = head_bilstm_layers
        self.head_layers = list(head_layers)
        self.head_mix = head_mix
        self.adapter_init = adapter_init
        self.bottleneck_std = bottleneck_std
        self.classifier_dropout = classifier_dropout
        self.norm_place = norm_place
        self.gated_ffn = gated_ffn
        self.attention_bias = attention_bias
        self.ffn_bias = ffn_bias
        self.norm_bias = norm_bias
        self.head_bias = head_bias
        self.rope_theta = rope_theta
        self.local_rope_theta = local_rope_theta
        self.local_window = local_window
        self.local_layers = list(local_layers)
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**kwargs)
        self._check_values()

    def _check_values(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must be a multiple of num_attention_heads, "
                f"{self.num_attention_heads}."
            )
        if not 0 <= self.extension_vocab_size < self.vocab_size:
            raise ValueError(
                f"extension_vocab_size is {self.extension_vocab_size}; it must be from 0 to below vocab_size, "
                f"{self.vocab_size}."
            )
        if self.module_hidden_size < 0 or self.module_hidden_size % self.num_attention_heads:
            raise ValueError(
                f"module_hidden_size is {self.module_hidden_size}; it must be 0 or a multiple of num_attention_heads, "
                f"{self.num_attention_heads}."
            )
        if (self.module_ffn_size > 0) != (self.module_hidden_size > 0):
            raise ValueError(
                f"module_ffn_size is {self.module_ffn_size} and module_hidden_size {self.module_hidden_size}; "
                "both or neither must be above 0."
            )
        if self.adapter_init not in ("zero", "paper"):
            raise ValueError(f"adapter_init is {self.adapter_init!r}; it must be zero or paper.")
        if not 0.0 < self.bottleneck_std <= 1.0:
            raise ValueError(f"bottleneck_std is {self.bottleneck_std}; it must be above 0 and at most 1.")
        if self.head_bilstm < 0:
            raise ValueError(f"head_bilstm is {self.head_bilstm}; it must be 0 or more.")
        if self.head_layers and not self.head_bilstm:
            raise ValueError(f"head_layers is {self.head_layers}; it must be empty without head_bilstm.")
        for name, adapter in self.adapters.items():
            for key, value in (("word_rows", adapter.word_rows), ("router_words", adapter.router_words)):
                if not 0 <= value <= self.base_vocab_size:
                    raise ValueError(
                        f"the adapter {name!r} has {key} {value}; the base has {self.base_vocab_size} words."
                    )
        check_active(self.active_adapters, self.adapters)
        if self.position_rule not in ("absolute", "roberta", "rotary"):
            raise ValueError(f"position_rule is {self.position_rule!r}; it must be absolute, roberta or rotary.")
        if self.position_rule == "rotary" and self.head_size % 2:
            raise ValueError(f"the heads' size is {self.head_size}; it must be even where positions are rotary.")
        if self.norm_place not in ("post", "pre"):
            raise ValueError(f"norm_place is {self.norm_place!r}; it must be post or pre.")
        if self.local_window < 0:
            raise ValueError(f"local_window is {self.local_window}; it must be 0 or more.")
        if not set(self.local_layers) <= set(range(self.num_hidden_layers)):
            raise ValueError(
                f"local_layers is {self.local_layers}; the model has the layers 0 to {self.num_hidden_layers - 1}."
            )

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json; of an export, with the values below `OWN_FIELDS` in the place of those at the top."""
        values, unused = super().get_config_dict(*args, **kwargs)
        own = values.pop(OWN_FIELDS, {})
        return values | own, unused

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON keeps them; those of a layout only where they are not BERT's."""
        values = {**super().to_dict(), "adapters": {name: asdict(adapter) for name, adapter in self.adapters.items()}}
        return {name: each for name, each in values.items() if each != LAYOUT_DEFAULTS.get(name, ...)}

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


def complete_adapter(name: str, values: AdapterConfig | Mapping[str, Any], num_hidden_layers: int) -> AdapterConfig:
    """Return an adapter with every value, of a model with so many layers.

    Raises:
        ValueError: the name is no identifier, a key or a word is unknown, a size is below 0, none is above, or a layer
            is not in the model.
    """
    # torch keeps adapters by name beside its own attributes; names that start with __ have a meaning in adapter_names.
    if not name.isidentifier() or name.startswith("__") or hasattr(nn.ModuleDict(), name):
        raise ValueError(
            f"an adapter is called {name!r}; its name must be made of letters, digits and underscores, and be none of "
            "torch's words (such as keys or forward)."
        )
    given = asdict(values) if isinstance(values, AdapterConfig) else dict(values)
    keys = [each.name for each in fields(AdapterConfig)]
    unknown = sorted(given.keys() - set(keys))
    if unknown:
        raise ValueError(f"the adapter {name!r} has the key {unknown[0]!r}; its keys are {', '.join(keys)}.")
    adapter = replace(AdapterConfig(last_layer=num_hidden_layers - 1), **given)
    _check_adapter(name, adapter, num_hidden_layers)
    return adapter


def _check_adapter(name: str, adapter: AdapterConfig, num_hidden_layers: int) -> None:
    sizes = {size: getattr(adapter, size) for size in _SIZES}
    if min(sizes.values()) < 0 or not any(sizes.values()):
        said = ", ".join(f"{size} {value}" for size, value in sizes.items())
        raise ValueError(f"the adapter {name!r} has {said}; none may be below 0 and one must be above.")
    for choice, words in BOTTLENECK_CHOICES.items():
        if getattr(adapter, choice) not in words:
            raise ValueError(
                f"the adapter {name!r} has {choice} {getattr(adapter, choice)!r}; it must be {', '.join(words)}."
            )
    if adapter.word_head and not adapter.word_rows:
        raise ValueError(f"the adapter {name!r} has word_head without word_rows.")
    if not 0 <= adapter.first_layer <= adapter.last_layer < num_hidden_layers:
        raise ValueError(
            f"the adapter {name!r} has the layers {adapter.first_layer} to {adapter.last_layer}; the model has 0 to "
            f"{num_hidden_layers - 1}."
        )


def check_active(names: list[str] | None, adapters: Mapping[str, AdapterConfig]) -> None:
    """Raise ValueError if a name to activate is no adapter of the model."""
    for name in names or []:
        if name not in adapters:
            raise ValueError(f"active_adapters names {name!r}; the model has {sorted(adapters) or 'no adapter'}.")
