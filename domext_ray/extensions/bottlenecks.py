"""Houlsby's adapters: a bottleneck after each sublayer, and shifts of the LayerNorms behind (Houlsby et al. 2.1)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from domext_ray.extensions.base import AdapterPart, TrainedPart
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


class Bottlenecks(AdapterPart[BottleneckOptions]):
    """Houlsby's adapters, 2·m·d + d + m parameters each; see `layers_domext.Bottleneck`."""

    sizes = scaled = ("bottleneck_size",)
    parameters = re.compile(r"\.output\.adapters\.")
    formats = ("bank", "adapterhub")
    tunes_tasks = True
    label = "bottleneck"
    found = "bottlenecks of width {}"
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
        """See `AdapterPart.get_values`."""
        variants = {f"bottleneck_{name}": getattr(method, f"bottleneck_{name}") for name in _VARIANTS}
        return {"bottleneck_size": method.bottleneck_size, "layer_norms": method.bottleneck_norms, **variants}

    def describe_part(self, adapter: Any) -> str:
        """See `AdapterPart.describe_part`."""
        both = adapter.bottleneck_place == "both"
        number = "two" if both else {"attention": "an attention", "output": "an FFN"}[adapter.bottleneck_place]
        kinds = [
            "parallel" if adapter.bottleneck_parallel else "",
            adapter.bottleneck_activation if adapter.bottleneck_activation != "gelu" else "",
            "normalised" if adapter.bottleneck_layer_norm else "",
        ]
        words = " ".join([number, *filter(None, kinds), "bottlenecks" if both else "bottleneck"])
        norms = " and shifts of the LayerNorms" if adapter.layer_norms else ""
        return f"{words} of width {adapter.bottleneck_size:,}{norms}"
