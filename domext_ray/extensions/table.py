"""The kinds of extensions. A new one is a file beside this one, a row in the table, and its options in the class."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from domext_ray.extensions.base import AdapterPart, Extension, Format, Shape
from domext_ray.extensions.bottlenecks import BottleneckOptions, Bottlenecks
from domext_ray.extensions.heads import HeadOptions, Heads
from domext_ray.extensions.lora import Lora, LoraOptions
from domext_ray.extensions.modules import ModuleOptions, Modules
from domext_ray.extensions.units import UnitOptions, Units
from domext_ray.extensions.word_shifts import WordShiftOptions, WordShifts
from domext_ray.extensions.words import NewWords, WordOptions
from domext_ray.options.declare import option_group

EXTENSIONS: tuple[Extension[Any], ...] = (
    NewWords(),
    Modules(),
    WordShifts(),
    Heads(),
    Units(),
    Bottlenecks(),
    Lora(),
)
"""In the order in which a card lists them."""

ADAPTER_PARTS: tuple[AdapterPart[Any], ...] = tuple(each for each in EXTENSIONS if isinstance(each, AdapterPart))
SIZES = tuple(size for each in EXTENSIONS for size in each.sizes)
"""Options of all sizes: a method with all of them 0 adds nothing."""
MAIN_SIZES = tuple(each.sizes[0] for each in EXTENSIONS if each.sizes)
"""The first of each kind: above 0 where a method has the kind."""


@option_group
class ExtensionOptions(
    LoraOptions, WordOptions, ModuleOptions, BottleneckOptions, WordShiftOptions, UnitOptions, HeadOptions
):
    """The options of all kinds; `--help` and config.yaml have them from the last class to the first."""


def is_extension(name: str) -> bool:
    """Whether a tensor belongs to an extension, by its name in the model; an adapter's router does, too."""
    return ".adapters." in name or any(each.parameters.search(name) for each in EXTENSIONS)


def find_others(format: Format, shape: Shape, parameters: Collection[str], adapter: str = "") -> Iterator[str]:
    """Name what a model has that a format does not hold; see `Extension.find`."""
    for extension in EXTENSIONS:
        if format not in extension.formats and (found := extension.find(shape, parameters, adapter)):
            yield found


def name_options(extensions: tuple[Extension[Any], ...]) -> str:
    """Return the sizes that a message asks for, such as "--method.heads, --method.ffn_units"."""
    return ", ".join(f"--method.{each.sizes[0]}" for each in extensions if each.sizes)
