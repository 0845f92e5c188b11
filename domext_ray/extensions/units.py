"""Extra FFN units per layer (AF Adapter section 3.2; FL-tuning has these alone)."""

from __future__ import annotations

from typing import Any

from domext_ray.extensions.anatomy import DomainPart, Shape, TrainedPart
from domext_ray.extensions.heads import AF_ADAPTER
from domext_ray.options.declare import CountOrZero, option_group


@option_group
class UnitOptions(TrainedPart):
    """Options of extra FFN units."""

    ffn_units: CountOrZero = 1024  # extra FFN units per layer (AF Adapter's a)


class Units(DomainPart[UnitOptions]):
    """Extra FFN units; see `layers_domext.DomainUnits`."""

    sizes = scaled = ("ffn_units",)
    formats = ("bank",)
    label = "FFN units"
    paper = "AF Adapter"
    citation = AF_ADAPTER

    def count_in_layer(self, shape: Shape, domain: Any) -> int:
        """Count 2·d·a + a + d parameters, and d·a + a of gates where the base's units have these.

        Source: AF Adapter section 3.2.
        """
        width, units = shape.hidden_size, domain.ffn_units
        inputs = (1 + shape.gated_ffn) * (width * units + units)
        return inputs + width * units + width if units else 0

    def describe_part(self, domain: Any) -> str:
        """See `DomainPart.describe_part`."""
        return f"{domain.ffn_units:,} extra FFN units"
