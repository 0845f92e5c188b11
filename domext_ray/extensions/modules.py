"""exBERT's gated extension modules: a smaller transformer layer beside each of the base's (exBERT section 3)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from domext_ray.extensions.base import Extension, Shape, TrainedPart
from domext_ray.options.declare import CountOrZero, option_group, require

EXBERT = """@inproceedings{tai2020exbert,
  title = {{exBERT}: Extending Pre-trained Models with Domain-specific Vocabulary Under Constrained Training Resources},
  author = {Tai, Wen and Kung, H. T. and Dong, Xin and Comiter, Marcus and Kuo, Chang-Fu},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2020},
  year = {2020}
}"""


@option_group
class ModuleOptions(TrainedPart):
    """Options of gated modules."""

    # width h' of a gated extension module beside each layer (exBERT: 252); 0: no modules
    module_hidden_size: CountOrZero = 0
    module_ffn_size: CountOrZero = 0  # FFN units f' of such a module (exBERT: 1024)
    # start of the gates' bias; the base's share starts near sigmoid(gate_bias), 0 in the paper
    gate_bias: Annotated[float, Field(ge=-100.0, le=100.0)] = 2.0


class Modules(Extension[ModuleOptions]):
    """Gated extension modules; see `layers_domext.ExtensionModule`."""

    sizes = ("module_hidden_size", "module_ffn_size")
    scaled = ("module_ffn_size",)
    parameters = re.compile(r"\.layer\.\d+\.extension\.")
    paper = "exBERT"
    citation = EXBERT

    def check(self, method: ModuleOptions) -> None:
        """See `Extension.check`."""
        width, units = method.module_hidden_size, method.module_ffn_size
        rule = f"{'above 0' if width else '0'} when --method.module_hidden_size is {width}"
        require((units > 0) == (width > 0), "module_ffn_size", units, rule)

    def check_heads(self, method: ModuleOptions, num_heads: int) -> None:
        """Refuse a width that the base's attention heads do not divide.

        Raises:
            OptionError: they do not.
        """
        width = method.module_hidden_size
        rule = f"divisible by the encoder's {num_heads} attention heads"
        require(width % num_heads == 0, "method.module_hidden_size", width, rule)

    def resize(self, method: ModuleOptions, factor: float, num_heads: int) -> dict[str, int]:
        """See `Extension.resize`; the width stays a multiple of the number of heads."""
        if not method.module_hidden_size:
            return {}
        width = max(1, round(method.module_hidden_size * factor / num_heads)) * num_heads
        return {**super().resize(method, factor, num_heads), "module_hidden_size": width}

    def describe(self, shape: Shape, method: ModuleOptions) -> str:
        """See `Extension.describe`."""
        if not shape.module_hidden_size:
            return ""
        return (
            f"beside each layer a gated extension module of width {shape.module_hidden_size:,} with "
            f"{shape.module_ffn_size:,} FFN units (exBERT)"
        )

    def find(self, shape: Shape, parameters: Collection[str], adapter: str = "") -> str:
        """See `Extension.find`."""
        width = shape.module_hidden_size
        return f"extension modules of width {width}" if width else ""
