"""Houlsby's adapters: a bottleneck after each sublayer, and shifts of the LayerNorms behind (Houlsby et al. 2.1)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from domext_ray.extensions.anatomy import DomainPart, Shape, TrainedPart
from domext_ray.options.declare import CountOrZero, option_group, require

_VARIANTS = ("activation", "layer_norm", "place", "parallel")


@option_group
class BottleneckOptions(TrainedPart):
    """Options of bottlenecks; the variants are those of Houlsby et al. section 3.6."""

    bottleneck_size: CountOrZero = 0  # width m of two bottlenecks per layer (Houlsby: 64); 0: none
    bottleneck_norms: bool = True  # bottlenecks shift their sublayers' LayerNorms (the base's own do not change)
    # standard deviation of bottlenecks' weights with --method.init paper
    bottleneck_std: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    bottleneck_activation: Literal["gelu", "relu", "tanh"] = "gelu"  # between a bottleneck's two matrices
    bottleneck_layer_norm: bool = False  # a bottleneck normalises what it reads, with a LayerNorm of its own
    bottleneck_place: Literal["both", "attention", "output"] = "both"  # sublayers that have one; output: the FFN
    bottleneck_parallel: bool = False  # a bottleneck reads its sublayer's input instead of its output


class Bottlenecks(DomainPart[BottleneckOptions]):
    """Houlsby's adapters; see `layers_domext.Bottleneck`."""

    sizes = scaled = ("bottleneck_size",)
    formats = ("bank", "adapterhub")
    tunes_tasks = True
    label = "bottleneck"
    paper = "Houlsby"
    citation = """@inproceedings{houlsby2019adapters,
  title = {Parameter-Efficient Transfer Learning for {NLP}},
  author = {Houlsby, Neil and Giurgiu, Andrei and Jastrzebski, Stanislaw and Morrone, Bruna and de Laroussilhe, Quentin
    and Gesmundo, Andrea and Attariyan, Mona and Gelly, Sylvain},
  booktitle = {Proceedings of ICML},
  year = {2019}
}"""

    def check(self, method: BottleneckOptions) -> None:
        """See `Extension.check`."""
        for name in _VARIANTS:
            option, value = f"bottleneck_{name}", getattr(method, f"bottleneck_{name}")
            plain = getattr(BottleneckOptions, option)
            rule = f"{str(plain).lower()} without bottlenecks (--method.bottleneck_size 0)"
            require(method.bottleneck_size > 0 or value == plain, option, value, rule)

    def get_values(self, method: BottleneckOptions) -> dict[str, Any]:
        """See `DomainPart.get_values`."""
        variants = {f"bottleneck_{name}": getattr(method, f"bottleneck_{name}") for name in _VARIANTS}
        return {"bottleneck_size": method.bottleneck_size, "layer_norms": method.bottleneck_norms, **variants}

    def count_in_layer(self, shape: Shape, domain: Any) -> int:
        """Count 2·m·d + d + m parameters per bottleneck, and 2·d for each of its LayerNorms.

        Source: Houlsby et al. section 2.1.
        """
        width, size = shape.hidden_size, domain.bottleneck_size
        if not size:
            return 0
        num_norms = domain.layer_norms + domain.bottleneck_layer_norm
        num_places = 2 if domain.bottleneck_place == "both" else 1
        return num_places * (count_bottleneck_parameters(width, size) + num_norms * 2 * width)

    def count_in_domain(self, shape: Shape, domain: Any) -> int:
        """See `DomainPart.count_in_domain`; where no LayerNorm is, none is shifted."""
        lacks_norm = shape.has_pre_norm and domain.first_layer == 0 and domain.bottleneck_place != "output"
        unshifted = 2 * shape.hidden_size if lacks_norm and domain.bottleneck_size and domain.layer_norms else 0
        return super().count_in_domain(shape, domain) - unshifted

    def describe_part(self, domain: Any) -> str:
        """See `DomainPart.describe_part`."""
        both = domain.bottleneck_place == "both"
        number = "two" if both else {"attention": "an attention", "output": "an FFN"}[domain.bottleneck_place]
        kinds = [
            "parallel" if domain.bottleneck_parallel else "",
            domain.bottleneck_activation if domain.bottleneck_activation != "gelu" else "",
            "normalised" if domain.bottleneck_layer_norm else "",
        ]
        words = " ".join([number, *filter(None, kinds), "bottlenecks" if both else "bottleneck"])
        norms = " and shifts of the LayerNorms" if domain.layer_norms else ""
        return f"{words} of width {domain.bottleneck_size:,}{norms}"

    def find(self, shape: Shape, parameters: Collection[str], domain: str = "") -> str:
        """See `Extension.find`."""
        size = shape.domains[domain].bottleneck_size if domain in shape.domains else 0
        return f"bottlenecks of width {size} in the domain {domain!r}" if size else ""


def count_bottleneck_parameters(hidden_size: int, bottleneck_size: int) -> int:
    """Count the parameters of one bottleneck without its shift of a LayerNorm or its own LayerNorm, 2·d each.

    Source: Houlsby et al. section 2.1: 2·m·d + d + m.
    """
    return 2 * bottleneck_size * hidden_size + hidden_size + bottleneck_size
