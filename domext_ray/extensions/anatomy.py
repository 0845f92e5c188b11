"""What every kind of extension says of itself, so that nobody else has to know it by name.

Configuration, model, counts, budgets, cards and export formats go through `table.EXTENSIONS` and ask. Nothing here
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

    trains: extensions: what the method adds, beside a frozen base; domain: of that, the parts of `domain` only; all:
    every parameter; top_layers: the last `top_layers` layers; layer_norms, biases: those of the whole encoder.
    """

    # what the method is called: names the run, unless --run.name does
    name: Annotated[FolderName, filled("a name")] = "af"
    # what trains; extensions and domain: beside a frozen base
    trains: Literal["extensions", "domain", "all", "top_layers", "layer_norms", "biases"] = "extensions"
    top_layers: NonNegativeInt = 0  # layers that train with --method.trains top_layers
    domain: Identifier = "domain"  # name of the domain that heads, FFN units and bottlenecks belong to
    layers: LayerRange = ""  # layers that have these, counted from 0, such as 6-11; empty: all
    init: Literal["zero", "paper"] = "zero"  # the domain's start; zero: step 0 is the base; paper: the papers' own
    # domains that take part, separated by commas; empty: all, those of --init_from too
    active_domains: tuple[Identifier, ...] = ()
    # trainable share of base and extension, from which sizes are solved; 0: sizes as given
    trainable_budget: ShareOrZero = 0.0
    train_heads: bool = False  # the base's pooler and MLM and NSP heads train too (as in exBERT's public code)


class DomainSizes(Protocol):
    """A domain of a model; see `model.domext.configuration_domext.Domain`."""

    @property
    def first_layer(self) -> int:
        """First layer that has it."""

    @property
    def last_layer(self) -> int:
        """Last layer that has it."""


class Shape(Protocol):
    """An augmented model's shape; see `model.domext.configuration_domext.DomextConfig`."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    extension_vocab_size: int
    module_hidden_size: int
    module_ffn_size: int
    gated_ffn: bool

    @property
    def has_pre_norm(self) -> bool:
        """Whether LayerNorms stand before the sublayers; then the first layer's attention has none."""

    @property
    def domains(self) -> Mapping[str, Any]:
        """The domains by name."""


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

    @abstractmethod
    def count(self, shape: Shape, method: OptionsT) -> int:
        """Count its parameters in the encoder of a model, those of an earlier run too, in closed form."""

    def count_in_head(self, shape: Shape) -> int:
        """Count its parameters in the masked-LM head."""
        return 0

    def count_trainable(self, shape: Shape, method: OptionsT) -> int:
        """Count those of its parameters that train when extensions do."""
        return self.count(shape, method) + self.count_in_head(shape) if self.is_in(method) else 0

    def count_trainable_in_head(self, shape: Shape, method: OptionsT) -> int:
        """Count those of `count_trainable` that are in the MLM head."""
        return 0

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
    def find(self, shape: Shape, parameters: Collection[str], domain: str = "") -> str:
        """Name what a model has of it, for a sentence that refuses the model; empty: nothing.

        Args:
            shape: the model's configuration.
            parameters: names of all its parameters.
            domain: whose parts are meant, where parts belong to a domain.
        """


class DomainPart(Extension[OptionsT]):
    """A part of a domain: several domains may have it, each of another size.

    Class attributes:
        label: what a table calls its size.
        in_layers: it is in layers, those that the domain has.
    """

    label: ClassVar[str]
    in_layers: ClassVar[bool] = True
    parameters = re.compile(r"\.domains\.")

    @property
    def size(self) -> str:
        """Name of the option, and of the value of a `Domain`, that says how large it is."""
        return self.sizes[0]

    def get_values(self, method: OptionsT) -> dict[str, Any]:
        """Return its values of the `Domain` that a method adds."""
        return {self.size: getattr(method, self.size)}

    @abstractmethod
    def count_in_layer(self, shape: Shape, domain: Any) -> int:
        """Count its parameters in one layer of a domain; 0 where the domain does not have it."""

    @abstractmethod
    def describe_part(self, domain: Any) -> str:
        """Say what it adds to a layer, or to the model, without the paper's name; called where the domain has it."""

    def describe(self, shape: Shape, method: OptionsT) -> str:
        """See `Extension.describe`; a card names parts by domain (`describe_part`)."""
        domains = (each for each in shape.domains.values() if getattr(each, self.size))
        return "; ".join(map(self.describe_part, domains))

    def count_in_domain(self, shape: Shape, domain: DomainSizes) -> int:
        """Count a domain's parameters of it in the encoder: by default, in all its layers."""
        return (domain.last_layer - domain.first_layer + 1) * self.count_in_layer(shape, domain)

    def count(self, shape: Shape, method: OptionsT) -> int:
        """See `Extension.count`."""
        return sum(self.count_in_domain(shape, domain) for domain in shape.domains.values())

    def count_trainable(self, shape: Shape, method: OptionsT) -> int:
        """Count those of the method's own domain."""
        return self.count_in_domain(shape, shape.domains[method.domain]) if self.is_in(method) else 0

    def trains(self, name: str, method: OptionsT) -> bool:
        """Whether a parameter is of the method's own domain; an earlier run's may have the same name."""
        is_own = self.is_in(method) and f".domains.{method.domain}." in name
        return is_own and method.trains in ("extensions", "domain")

    def find(self, shape: Shape, parameters: Collection[str], domain: str = "") -> str:
        """See `Extension.find`."""
        number = getattr(shape.domains[domain], self.size) if domain in shape.domains else 0
        return f"{number} extra {self.label} per layer in the domain {domain!r}" if number else ""
