"""What every kind of extension says of itself, so that nobody else has to know it by name.

Configuration, model, budgets, cards and export formats go through `table.EXTENSIONS` and ask. Nothing here
imports torch: a command line's mistakes are told before that is loaded. The modules that compute are in `model/domext`,
because exports carry them along.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from domext_ray.config.extensions.options import MethodOptions

if TYPE_CHECKING:
    from torch import nn

Format = Literal["bank", "adapterhub", "peft"]
"""What can hold an extension beside a Hugging Face folder, which holds all."""


@dataclass(frozen=True)
class Paper:
    """Where an extension is from."""

    name: str  # of the method, as a model card says it
    bibtex: str


class Extension:
    """One kind of extension. `shape` is a model's `DomextConfig`.

    Class attributes:
        sizes: options that are whole numbers, all above 0 where a method has it and all 0 where not; without any it
            trains wherever extensions do.
        scaled: those of `sizes` that a budget changes by steps of 1.
        scaled_by_heads: those that stay a multiple of the base's attention heads.
        parameters: finds its parameters by their names in a model.
        formats: what can hold it beside a Hugging Face folder.
        is_merged: an export has it in the base's matrices instead of beside them.
        paper: where it is from; None: it is this project's own.
    """

    sizes: ClassVar[tuple[str, ...]] = ()
    scaled: ClassVar[tuple[str, ...]] = ()
    scaled_by_heads: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[re.Pattern[str]]
    formats: ClassVar[tuple[Format, ...]] = ()
    is_merged: ClassVar[bool] = False
    paper: ClassVar[Paper | None] = None

    def is_in(self, method: MethodOptions) -> bool:
        """Whether a method has it."""
        return not self.sizes or any(getattr(method, size) for size in self.sizes)

    def trains(self, name: str, method: MethodOptions) -> bool:
        """Whether a parameter of it, given by its name, trains where not everything does."""
        return method.trains == "extensions" and self.is_in(method)

    def resize(self, method: MethodOptions, factor: float, num_heads: int) -> dict[str, int]:
        """Return its sizes multiplied by a factor of 0 or more, for a budget; none vanishes."""
        steps = dict.fromkeys(self.scaled, 1) | dict.fromkeys(self.scaled_by_heads, num_heads)
        present = {size: step for size, step in steps.items() if getattr(method, size)}
        return {size: max(1, round(getattr(method, size) * factor / step)) * step for size, step in present.items()}

    def attach(self, model: nn.Module, method: MethodOptions) -> None:
        """Add to a model with its base's weights what its configuration does not describe."""

    def merge(self, model: nn.Module) -> None:
        """Move what `attach` added into the base's matrices."""

    def scale(self, model: nn.Module, method: MethodOptions, scale: float) -> None:
        """Multiply by `scale`, 0 or more, what a method adds of it; 1 is the start. ValueError: it has no scale."""

    def describe(self, shape: Any, method: MethodOptions) -> str:
        """Say on a model's card what it has of it; empty: nothing."""
        raise NotImplementedError

    def find_papers(self, shape: Any) -> tuple[Paper | None, ...]:
        """Return where what a model has of it is from."""
        return (self.paper,)

    def find(self, shape: Any, parameters: Collection[str], adapter: str = "") -> str:
        """Name what a model has of it, for a sentence that refuses the model; empty: nothing.

        `adapter` says whose parts are meant, where parts belong to an adapter.
        """
        raise NotImplementedError


class AdapterPart(Extension):
    """A part of an adapter: several adapters may have it, each of another size.

    Class attributes:
        label: what a table calls its size.
        found: what a refusal calls as many of it, where that is not so many extra `label` per layer.
        in_layers: it is in layers, those that the adapter has.
        values: the option of each value of an `AdapterConfig` beside the size, which is called as its option.
    """

    label: ClassVar[str]
    found: ClassVar[str] = ""
    in_layers: ClassVar[bool] = True
    values: ClassVar[Mapping[str, str]] = {}

    @property
    def size(self) -> str:
        """Name of the option, and of the value of an `AdapterConfig`, that says how large it is."""
        return self.sizes[0]

    def get_values(self, method: MethodOptions) -> dict[str, Any]:
        """Return its values of the `AdapterConfig` that a method adds."""
        return {name: getattr(method, option) for name, option in {self.size: self.size, **self.values}.items()}

    def scale(self, model: nn.Module, method: MethodOptions, scale: float) -> None:
        if self.is_in(method):  # all parts of an adapter have one scale
            cast(Any, model).set_adapter_scale(method.adapter, scale)

    def describe_part(self, adapter: Any) -> str:
        """Say what it adds to a layer, or to the model, without the paper's name; called where the adapter has it."""
        raise NotImplementedError

    def find_paper(self, adapter: Any) -> Paper | None:
        """Return where it is from in an adapter that has it."""
        return self.paper

    def find_papers(self, shape: Any) -> tuple[Paper | None, ...]:
        return tuple(map(self.find_paper, self._list_adapters(shape)))

    def describe(self, shape: Any, method: MethodOptions) -> str:
        return "; ".join(map(self.describe_part, self._list_adapters(shape)))

    def _list_adapters(self, shape: Any) -> list[Any]:
        return [adapter for adapter in shape.adapters.values() if getattr(adapter, self.size)]

    def trains(self, name: str, method: MethodOptions) -> bool:
        is_own = self.is_in(method) and f".adapters.{method.adapter}." in name  # an earlier run's may have the name
        return is_own and method.trains in ("extensions", "adapter")

    def find(self, shape: Any, parameters: Collection[str], adapter: str = "") -> str:
        number = getattr(shape.adapters[adapter], self.size) if adapter in shape.adapters else 0
        found = self.found.format(number) or f"{number} extra {self.label} per layer"
        return f"{found} in the adapter {adapter!r}" if number else ""
