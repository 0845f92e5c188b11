"""Which extensions a model carries and what trains, and the names that say a method."""

from __future__ import annotations

from dataclasses import dataclass

from domext_ray.config.extensions.options import MethodOptions
from domext_ray.config.extensions.table import ADAPTER_PARTS, EXTENSIONS, MAIN_SIZES, name_options
from domext_ray.config.options.declare import option_group, read_layer_range, require

_ADDS = ("extensions", "adapter", "all")
_SCALED = tuple(extension for extension in EXTENSIONS if extension.scaled)


@option_group
class MethodConfig(MethodOptions):
    """Which extensions the model carries and which parameters train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.active_adapters or not self.has_adapter or self.adapter in self.active_adapters,
            "active_adapters",
            self.active_adapters,
            f"a list that has {self.adapter!r}, which trains",
        )
        require(
            (self.top_layers > 0) == (self.trains == "top_layers"),
            "top_layers",
            self.top_layers,
            "above 0 with --method.trains top_layers"
            if self.trains == "top_layers"
            else "0, or --method.trains top_layers",
        )
        adds = any(getattr(self, size) for size in MAIN_SIZES)
        require(
            self.trains in _ADDS or not adds,
            "trains",
            self.trains,
            "extensions, adapter or all where there are extensions (heads, FFN units, bottlenecks, modules, LoRA, …)",
        )
        require(
            self.trains != "adapter" or self.has_adapter,
            "trains",
            self.trains,
            f"extensions when there is no adapter; or give one ({name_options(ADAPTER_PARTS)})",
        )
        require(
            not self.trainable_budget or self.is_sized,
            "trainable_budget",
            self.trainable_budget,
            f"0 for a method that has no size to solve (give one of {name_options(_SCALED)} a start, and "
            "--method.trains extensions or adapter)",
        )

    @property
    def has_adapter(self) -> bool:
        """Whether the model gets an adapter: extra heads, FFN units, bottlenecks or shifts of words."""
        return any(part.is_in(self) for part in ADAPTER_PARTS)

    @property
    def is_merged(self) -> bool:
        """Whether an export has something of it in the base's matrices."""
        return any(extension.is_in(self) for extension in EXTENSIONS if extension.is_merged)

    @property
    def keeps_base(self) -> bool:
        """Whether the base's parameters stay as they are, each in its own matrix."""
        return self.trains in ("extensions", "adapter") and not self.train_heads and not self.is_merged

    def refuse_scale(self, *, has_words: bool, has_modules: bool = False) -> str:
        """Say with what a run's extensions have no scale, at whose 0 its base is; empty: they have one.

        `has_modules`: there are gated modules of an earlier run.
        """
        if has_words:
            return "with new words (--vocab.size, --vocab.words), which have no scale"
        if has_modules or self.module_hidden_size:
            return "with gated modules (--method.module_hidden_size), which have no scale"
        if self.trains not in ("extensions", "adapter"):
            return f"with --method.trains {self.trains}, which changes the base itself"
        return "with --method.train_heads, which changes the base itself" if self.train_heads else ""

    @property
    def is_sized(self) -> bool:
        """Whether the method has a size from which the number of its trainable parameters follows."""
        return self.trains in ("extensions", "adapter") and any(extension.is_in(self) for extension in _SCALED)

    @property
    def layer_range(self) -> tuple[int, int] | None:
        """First and last layer of the adapter; None: all."""
        return read_layer_range(self.layers) if self.layers else None


_BESIDE = ("word_rows",)
"""Sizes that a method of any name may have beside its own."""


@dataclass(frozen=True)
class KnownMethod:
    """What a method of a known name is made of."""

    sizes: tuple[str, ...] = ()  # one of these is above 0; all others but `_BESIDE` are 0
    trains: tuple[str, ...] = _ADDS  # what may train
    is_words: bool = False  # new words alone are such a method, too

    def fits(self, method: MethodConfig, has_words: bool) -> bool:
        """Whether a method, with new words or without, is one of this name."""
        given = {size for size in MAIN_SIZES if getattr(method, size)}
        has_part = bool(given & set(self.sizes)) or not self.sizes or (self.is_words and has_words)
        return method.trains in self.trains and given <= {*self.sizes, *_BESIDE} and has_part

    def __str__(self) -> str:
        parts = [f"--method.{name} above 0" for name in self.sizes] + (["new words"] if self.is_words else [])
        trains = "" if self.trains == _ADDS else f"--method.trains {self.trains[0]}"
        return " and ".join(phrase for phrase in (" or ".join(parts), trains, "no other size") if phrase)


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
