"""What every kind of extension says of itself, so that nobody else has to know it by name.

Configuration, model, budgets, cards and export formats go through `table.EXTENSIONS` and ask. Nothing here
imports torch: a command line's mistakes are told before that is loaded. The modules that compute are in `model/domext`,
because exports carry them along.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import NonNegativeInt

from domext_ray.options.declare import FolderName, Identifier, LayerRange, ShareOrZero, filled, option_group

if TYPE_CHECKING:
    from torch import nn

Format = Literal["bank", "adapterhub", "peft"]
"""What can hold an extension beside a Hugging Face folder, which holds all."""


@option_group
class TrainedPart:
    """Which parameters train, and whose extensions they are; the options of every kind stand beside these.

    trains: extensions: what the method adds, beside a frozen base; adapter: of that, the parts of `adapter` only; all:
    every parameter; top_layers: the last `top_layers` layers; layer_norms, biases: those of the whole encoder.
    """

    # what the method is called: names the run, unless --run.name does
    name: Annotated[FolderName, filled("a name")] = "af"
    # what trains; extensions and adapter: beside a frozen base
    trains: Literal["extensions", "adapter", "all", "top_layers", "layer_norms", "biases"] = "extensions"
    top_layers: NonNegativeInt = 0  # layers that train with --method.trains top_layers
    adapter: Identifier = "domain"  # name of the adapter that heads, FFN units and bottlenecks belong to
    layers: LayerRange = ""  # layers that have these, counted from 0, such as 6-11; empty: all
    init: Literal["zero", "paper"] = "zero"  # the adapter's start; zero: step 0 is the base; paper: the papers' own
    # adapters that take part, separated by commas; empty: all, those of --init_from too
    active_adapters: tuple[Identifier, ...] = ()
    # trainable share of base and extension, from which sizes are solved; 0: sizes as given
    trainable_budget: ShareOrZero = 0.0
    train_heads: bool = False  # the base's pooler and MLM and NSP heads train too (as in exBERT's public code)


class Shape(Protocol):
    """An augmented model's shape; see `model.domext.configuration_domext.DomextConfig`."""

    extension_vocab_size: int
    module_hidden_size: int
    module_ffn_size: int
    gated_ffn: bool

    @property
    def adapters(self) -> Mapping[str, Any]:
        """The adapters by name."""


OptionsT = TypeVar("OptionsT", bound=TrainedPart)


class Extension(ABC, Generic[OptionsT]):
    """One kind of extension; `OptionsT` are its options, which are a part of `MethodConfig`.

    Class attributes:
        sizes: options that are whole numbers, all above 0 where a method has it and all 0 where not.
        scaled: those of `sizes` that a budget changes by steps of 1.
        parameters: finds its parameters by their names in a model.
        formats: what can hold it beside a Hugging Face folder.
        tunes_tasks: fine-tuning may add it for the task.
        is_merged: an export has it in the base's matrices instead of beside them.
        paper: who it is from, as a model card says it.
        citation: a BibTeX entry.
    """

    sizes: ClassVar[tuple[str, ...]] = ()
    scaled: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[re.Pattern[str]]
    formats: ClassVar[tuple[Format, ...]] = ()
    tunes_tasks: ClassVar[bool] = False
    is_merged: ClassVar[bool] = False
    paper: ClassVar[str] = ""
    citation: ClassVar[str]

    def is_in(self, method: OptionsT) -> bool:
        """Whether a method has it; new words are an option of the vocabulary, and in no method."""
        return any(getattr(method, size) for size in self.sizes)

    def check(self, method: OptionsT) -> None:
        """Refuse options outside their rules.

        Raises:
            OptionError: one is.
        """

    def trains(self, name: str, method: OptionsT) -> bool:
        """Whether a parameter of it, given by its name, trains where not everything does."""
        return method.trains == "extensions" and self.is_in(method)

    def resize(self, method: OptionsT, factor: float, num_heads: int) -> dict[str, int]:
        """Return its sizes multiplied by a factor, for a budget; none vanishes.

        Args:
            method: has its sizes.
            factor: 0 or more.
            num_heads: the base's attention heads.
        """
        present = [size for size in self.scaled if getattr(method, size)]
        return {size: max(1, round(getattr(method, size) * factor)) for size in present}

    def attach(self, model: nn.Module, method: OptionsT) -> None:
        """Add to a model with its base's weights what its configuration does not describe."""

    def merge(self, model: nn.Module) -> None:
        """Move what `attach` added into the base's matrices."""

    @abstractmethod
    def describe(self, shape: Shape, method: OptionsT) -> str:
        """Say on a model's card what it has of it; empty: nothing."""

    @abstractmethod
    def find(self, shape: Shape, parameters: Collection[str], adapter: str = "") -> str:
        """Name what a model has of it, for a sentence that refuses the model; empty: nothing.

        Args:
            shape: the model's configuration.
            parameters: names of all its parameters.
            adapter: whose parts are meant, where parts belong to an adapter.
        """


class AdapterPart(Extension[OptionsT]):
    """A part of an adapter: several adapters may have it, each of another size.

    Class attributes:
        label: what a table calls its size.
        found: what a refusal calls as many of it, where that is not so many extra `label` per layer.
        in_layers: it is in layers, those that the adapter has.
    """

    label: ClassVar[str]
    found: ClassVar[str] = ""
    in_layers: ClassVar[bool] = True

    @property
    def size(self) -> str:
        """Name of the option, and of the value of an `AdapterConfig`, that says how large it is."""
        return self.sizes[0]

    def get_values(self, method: OptionsT) -> dict[str, Any]:
        """Return its values of the `AdapterConfig` that a method adds."""
        return {self.size: getattr(method, self.size)}

    @abstractmethod
    def describe_part(self, adapter: Any) -> str:
        """Say what it adds to a layer, or to the model, without the paper's name; called where the adapter has it."""

    def describe(self, shape: Shape, method: OptionsT) -> str:
        """See `Extension.describe`; a card names parts by adapter (`describe_part`)."""
        adapters = (each for each in shape.adapters.values() if getattr(each, self.size))
        return "; ".join(map(self.describe_part, adapters))

    def trains(self, name: str, method: OptionsT) -> bool:
        """Whether a parameter is of the method's own adapter; an earlier run's may have the same name."""
        is_own = self.is_in(method) and f".adapters.{method.adapter}." in name
        return is_own and method.trains in ("extensions", "adapter")

    def find(self, shape: Shape, parameters: Collection[str], adapter: str = "") -> str:
        """See `Extension.find`."""
        number = getattr(shape.adapters[adapter], self.size) if adapter in shape.adapters else 0
        found = self.found.format(number) or f"{number} extra {self.label} per layer"
        return f"{found} in the adapter {adapter!r}" if number else ""
