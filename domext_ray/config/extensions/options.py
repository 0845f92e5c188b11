"""The options of a method: what trains, and how much there is of each kind of extension."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from domext_ray.config.options.declare import (
    DIFFERENT,
    SOME,
    CountOrZero,
    FolderName,
    Identifier,
    LayerRange,
    ShareOrZero,
    filled,
    option_group,
    require,
)

Target = Literal["query", "key", "value", "attention_output", "intermediate", "output"]
BOTTLENECK_VARIANTS = ("bottleneck_activation", "bottleneck_layer_norm", "bottleneck_place", "bottleneck_parallel")
"""Houlsby et al. section 3.6."""


@option_group
class MethodOptions:
    """Which parameters train, whose extensions they are, and the sizes of every kind.

    trains: extensions: what the method adds to a frozen base; adapter: only the parts of `adapter`; all: every
    parameter; top_layers: the last `top_layers` layers; layer_norms, biases: those of the whole encoder.
    """

    # name of the method, and of the run without --run.name
    name: Annotated[FolderName, filled("a name")] = "af"
    # what trains; with extensions and adapter the base is frozen
    trains: Literal["extensions", "adapter", "all", "top_layers", "layer_norms", "biases"] = "extensions"
    top_layers: NonNegativeInt = 0  # layers that train with --method.trains top_layers
    adapter: Identifier = "domain"  # name of the adapter of heads, FFN units, bottlenecks and word shifts
    layers: LayerRange = ""  # layers that have heads, units and bottlenecks, counted from 0, such as 6-11; empty: all
    init: Literal["zero", "paper"] = "zero"  # the adapter's start; zero: step 0 is the base; paper: the paper's start
    # active adapters, separated by commas; empty: all, also those of --init_from
    active_adapters: tuple[Identifier, ...] = ()
    # share of base and extension that trains, from which sizes are solved; 0: sizes as given
    trainable_budget: ShareOrZero = 0.0
    train_heads: bool = False  # the base's pooler and MLM and NSP heads train too (as in exBERT's public code)
    heads: Annotated[int, Field(ge=0, le=1000)] = 1  # extra attention heads per layer (AF Adapter's i)
    ffn_units: CountOrZero = 1024  # extra FFN units per layer (AF Adapter's a)
    word_rows: CountOrZero = 0  # words of the base, the text's most frequent, whose embeddings shift; 0: none
    word_head: bool = False  # the adapter shifts the MLM head's transform, too
    bottleneck_size: CountOrZero = 0  # width m of two bottlenecks per layer (Houlsby: 64); 0: none
    bottleneck_norms: bool = True  # bottlenecks shift their sublayers' LayerNorms (the base's own do not change)
    # standard deviation of bottlenecks' weights with --method.init paper
    bottleneck_std: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    bottleneck_activation: Literal["gelu", "relu", "tanh"] = "gelu"  # between a bottleneck's two matrices
    bottleneck_layer_norm: bool = False  # a bottleneck normalises its input with a separate LayerNorm
    bottleneck_place: Literal["both", "attention", "output"] = "both"  # sublayers that have one; output: the FFN
    bottleneck_parallel: bool = False  # a bottleneck reads its sublayer's input instead of its output
    # width h' of a gated extension module next to each layer (exBERT: 252); 0: no modules
    module_hidden_size: CountOrZero = 0
    module_ffn_size: CountOrZero = 0  # FFN units f' of such a module (exBERT: 1024)
    # initial bias of the gates (0 in the paper); the base's share starts near sigmoid(gate_bias)
    gate_bias: Annotated[float, Field(ge=-100.0, le=100.0)] = 2.0
    word_init: Literal["random", "subword_mean"] = "random"  # start of new words; or the mean of the base's pieces
    lora_rank: CountOrZero = 0  # rank of LoRA's updates of the base's matrices (peft); 0: none
    lora_alpha: CountOrZero = 0  # LoRA's scale times its rank; 0: twice the rank
    # matrices that LoRA updates: query, key, value, attention_output, intermediate, output
    lora_targets: Annotated[tuple[Target, ...], SOME, DIFFERENT] = ("query", "value")

    def __post_init__(self) -> None:
        width, units = self.module_hidden_size, self.module_ffn_size
        rule = f"{'above 0' if width else '0'} when --method.module_hidden_size is {width}"
        require((units > 0) == (width > 0), "module_ffn_size", units, rule)
        rule = "false without shifts of words (--method.word_rows 0)"
        require(self.word_rows > 0 or not self.word_head, "word_head", self.word_head, rule)
        for name in BOTTLENECK_VARIANTS:
            value, plain = getattr(self, name), getattr(MethodOptions, name)
            rule = f"{str(plain).lower()} without bottlenecks (--method.bottleneck_size 0)"
            require(self.bottleneck_size > 0 or value == plain, name, value, rule)
        rule = f"extensions or all with --method.module_hidden_size {width}"
        require(self.trains != "adapter" or not width, "trains", self.trains, rule)
        rule = f"extensions with --method.lora_rank {self.lora_rank}"
        require(self.trains == "extensions" or not self.lora_rank, "trains", self.trains, rule)

    def check_heads(self, num_heads: int) -> None:
        """Refuse a module's width that the base's attention heads do not divide."""
        width, rule = self.module_hidden_size, f"divisible by the encoder's {num_heads} attention heads"
        require(width % num_heads == 0, "method.module_hidden_size", width, rule)
