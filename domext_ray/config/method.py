"""Which extensions a model carries and what trains, and the names that say a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from domext_ray.options.fields import MANY, check_folder_name, require, require_at_most, require_one_of

TRAINS = ("extensions", "domain", "all", "top_layers", "layer_norms", "biases")


LORA_TARGETS = ("query", "key", "value", "attention_output", "intermediate", "output")


@dataclass(frozen=True)
class MethodConfig:
    """Which extensions the model carries and which parameters train.

    trains: extensions: what the method adds, beside a frozen base; domain: of that, the parts of `domain` only; all:
    every parameter; top_layers: the last `top_layers` layers; layer_norms, biases: those of the whole encoder.
    """

    name: str = "af"  # what the method is called: names the run, unless --run.name does
    trains: Literal["extensions", "domain", "all", "top_layers", "layer_norms", "biases"] = (
        "extensions"  # what trains; extensions and domain: beside a frozen base
    )
    top_layers: int = 0  # layers that train with --method.trains top_layers
    domain: str = "domain"  # name of the domain that heads, FFN units and bottlenecks belong to
    layers: str = ""  # layers that have these, counted from 0, such as 6-11; empty: all
    heads: int = 1  # extra attention heads a layer (AF Adapter's i)
    ffn_units: int = 1024  # extra FFN units a layer (AF Adapter's a)
    bottleneck_size: int = 0  # width m of two bottlenecks a layer (Houlsby: 64); 0: none
    bottleneck_norms: bool = True  # bottlenecks shift their sublayers' LayerNorms (the base's own stay as they are)
    bottleneck_std: float = 0.01  # standard deviation of bottlenecks' weights with --method.init paper
    bottleneck_activation: Literal["gelu", "relu", "tanh"] = "gelu"  # between a bottleneck's two matrices
    bottleneck_layer_norm: bool = False  # a bottleneck normalises what it reads, with a LayerNorm of its own
    bottleneck_place: Literal["both", "attention", "output"] = "both"  # sublayers that have one; output: the FFN
    bottleneck_parallel: bool = False  # a bottleneck reads its sublayer's input instead of its output
    init: Literal["zero", "paper"] = "zero"  # the domain's start; zero: step 0 is the base; paper: the papers' own
    module_hidden_size: int = 0  # width h' of a gated extension module beside each layer (exBERT: 252); 0: no modules
    module_ffn_size: int = 0  # FFN units f' of such a module (exBERT: 1024)
    gate_bias: float = 2.0  # start of the gates' bias; the base's share starts near sigmoid(gate_bias), 0 in the paper
    word_init: Literal["random", "subword_mean"] = "random"  # new words' embeddings; or the mean of the base's pieces
    lora_rank: int = 0  # rank of LoRA's updates of the base's matrices (peft); 0: none
    lora_alpha: int = 0  # LoRA's scale times its rank; 0: twice the rank
    lora_targets: str = "query,value"  # of query,key,value,attention_output,intermediate,output
    active_domains: str = ""  # domains that take part, separated by commas; empty: all, those of --init_from too
    trainable_budget: float = (
        0.0  # trainable share of base and extension, from which sizes are solved; 0: sizes as given
    )
    train_heads: bool = False  # the base's pooler and MLM and NSP heads train too (as in exBERT's public code)

    def __post_init__(self) -> None:
        check_folder_name("method.name", self.name)
        require_one_of(self.trains, "method.trains", TRAINS)
        require_one_of(self.init, "method.init", ("zero", "paper"))
        require_one_of(self.word_init, "method.word_init", ("random", "subword_mean"))
        for name in ("heads", "ffn_units", "bottleneck_size", "module_hidden_size", "lora_rank", "lora_alpha"):
            require(getattr(self, name) >= 0, f"method.{name}", getattr(self, name), "0 or more")
        require_at_most(self, "method.", heads=1000, ffn_units=MANY, bottleneck_size=MANY, module_hidden_size=MANY)
        require_at_most(self, "method.", module_ffn_size=MANY, lora_rank=MANY, lora_alpha=MANY)
        require(abs(self.gate_bias) <= 100.0, "method.gate_bias", self.gate_bias, "from -100 to 100")
        require(self.domain.isidentifier(), "method.domain", self.domain, "letters, digits and underscores")
        require(
            (self.module_ffn_size > 0) == (self.module_hidden_size > 0) and self.module_ffn_size >= 0,
            "method.module_ffn_size",
            self.module_ffn_size,
            f"{'above 0' if self.module_hidden_size else '0'} when --method.module_hidden_size is "
            f"{self.module_hidden_size}",
        )
        self._check_bottlenecks()
        require(
            0.0 <= self.trainable_budget < 1.0, "method.trainable_budget", self.trainable_budget, "from 0 to below 1"
        )
        for target in self.lora_target_names:
            require_one_of(target, "method.lora_targets", LORA_TARGETS)
        for name in self.active_domain_names:
            require(name.isidentifier(), "method.active_domains", self.active_domains, "names separated by commas")
        require(
            not self.active_domains or not self.has_domain or self.domain in self.active_domain_names,
            "method.active_domains",
            self.active_domains,
            f"a list that has {self.domain!r}, which trains",
        )
        if self.layers:
            _parse_layers(self.layers)
        self._check_what_trains()

    def _check_bottlenecks(self) -> None:
        require(0.0 < self.bottleneck_std <= 1.0, "method.bottleneck_std", self.bottleneck_std, "above 0, at most 1")
        require_one_of(self.bottleneck_activation, "method.bottleneck_activation", ("gelu", "relu", "tanh"))
        require_one_of(self.bottleneck_place, "method.bottleneck_place", ("both", "attention", "output"))
        for name in ("activation", "layer_norm", "place", "parallel"):
            option, value = f"bottleneck_{name}", getattr(self, f"bottleneck_{name}")
            plain = getattr(MethodConfig, option)
            rule = f"{str(plain).lower()} without bottlenecks (--method.bottleneck_size 0)"
            require(self.bottleneck_size > 0 or value == plain, f"method.{option}", value, rule)

    def _check_what_trains(self) -> None:
        """Refuse parts that clash: an extension that would not train, and LoRA of matrices that train themselves."""
        require(
            (self.top_layers > 0) == (self.trains == "top_layers") and self.top_layers >= 0,
            "method.top_layers",
            self.top_layers,
            "above 0 with --method.trains top_layers"
            if self.trains == "top_layers"
            else "0, or --method.trains top_layers",
        )
        adds = self.has_domain or self.module_hidden_size > 0
        require(
            self.trains in ("extensions", "domain", "all") or not adds,
            "method.trains",
            self.trains,
            "extensions, domain or all when there are heads, FFN units, bottlenecks or modules",
        )
        require(
            self.trains == "extensions" or not self.lora_rank,
            "method.trains",
            self.trains,
            f"extensions with --method.lora_rank {self.lora_rank}",
        )
        require(
            self.trains != "domain" or self.has_domain,
            "method.trains",
            self.trains,
            "extensions when there is no domain; or give one (--method.heads, ffn_units or bottleneck_size)",
        )
        require(
            not self.trainable_budget or self.is_sized,
            "method.trainable_budget",
            self.trainable_budget,
            "0 for a method that has no size to solve (give --method.ffn_units, bottleneck_size, module_hidden_size or "
            "lora_rank a start, and --method.trains extensions or domain)",
        )

    @property
    def has_domain(self) -> bool:
        """Whether layers get extra heads, FFN units or bottlenecks."""
        return self.heads + self.ffn_units + self.bottleneck_size > 0

    @property
    def is_sized(self) -> bool:
        """Whether the method has a size from which the number of its trainable parameters follows."""
        parts = self.ffn_units + self.bottleneck_size + self.module_hidden_size + self.lora_rank
        return self.trains in ("extensions", "domain") and parts > 0

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """First and last layer of the domain; None: all."""
        return _parse_layers(self.layers) if self.layers else None

    @property
    def lora_target_names(self) -> tuple[str, ...]:
        """Matrices that LoRA updates."""
        return tuple(each.strip() for each in self.lora_targets.split(","))

    @property
    def active_domain_names(self) -> tuple[str, ...]:
        """Domains that take part; empty: all."""
        return tuple(each.strip() for each in self.active_domains.split(",")) if self.active_domains else ()


def _parse_layers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    last = last or first
    is_range = first.strip().isdigit() and last.strip().isdigit() and int(first) <= int(last)
    require(is_range, "method.layers", text, "a layer, or the first and the last one, such as 6-11")
    return int(first), int(last)


_SIZES = ("heads", "ffn_units", "bottleneck_size", "module_hidden_size", "lora_rank")


_ADDS = ("extensions", "domain", "all")


@dataclass(frozen=True)
class KnownMethod:
    """What a method of a known name is made of.

    Args:
        sizes: fields of `MethodConfig`, one of which is above 0; all others are 0.
        trains: what may train.
        is_words: new words alone are such a method too.
    """

    sizes: tuple[str, ...] = ()
    trains: tuple[str, ...] = _ADDS
    is_words: bool = False

    def fits(self, method: MethodConfig, has_words: bool) -> bool:
        """Whether a method, with new words or without, is one of this name."""
        given = {name for name in _SIZES if getattr(method, name)}
        has_part = bool(given) or not self.sizes or (self.is_words and has_words)
        return method.trains in self.trains and given <= set(self.sizes) and has_part

    def __str__(self) -> str:
        parts = [f"--method.{name} above 0" for name in self.sizes] + (["new words"] if self.is_words else [])
        trains = "" if self.trains == _ADDS else f"--method.trains {self.trains[0]}"
        return " and ".join(each for each in (" or ".join(parts), trains, "no other size") if each)


_FULL = KnownMethod(trains=("all",))


KNOWN_METHODS = {
    "af": KnownMethod(("heads", "ffn_units")),
    "fl_tuning": KnownMethod(("ffn_units",)),
    "bottleneck": KnownMethod(("bottleneck_size",)),
    "exbert": KnownMethod(("module_hidden_size",), is_words=True),
    "lora": KnownMethod(("lora_rank",), ("extensions",)),
    "bert": _FULL,
    "full": _FULL,
    **{name: KnownMethod(trains=(name,)) for name in ("top_layers", "layer_norms", "biases")},
}


"""The names that say a method; all others are of one's own."""


def list_names(method: MethodConfig, has_words: bool) -> list[str]:
    """Return the known names that a method, with new words or without, may be called."""
    return [name for name, known in KNOWN_METHODS.items() if known.fits(method, has_words)]
