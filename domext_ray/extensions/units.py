"""Extra FFN units per layer (AF Adapter section 3.2; FL-tuning has these alone)."""

from __future__ import annotations

import re
from typing import Any

from domext_ray.extensions.base import AdapterPart, TrainedPart
from domext_ray.extensions.heads import AF_ADAPTER
from domext_ray.options.declare import CountOrZero, option_group


@option_group
class UnitOptions(TrainedPart):
    """Options of extra FFN units."""

    ffn_units: CountOrZero = 1024  # extra FFN units per layer (AF Adapter's a)


class Units(AdapterPart[UnitOptions]):
    """Extra FFN units; see `layers_domext.AdapterUnits`."""

    sizes = scaled = ("ffn_units",)
    parameters = re.compile(r"\.layer\.\d+\.adapters\.")
    formats = ("bank",)
    label = "FFN units"
    paper = "AF Adapter"
    citation = AF_ADAPTER

    def describe_part(self, adapter: Any) -> str:
        """See `AdapterPart.describe_part`."""
        return f"{adapter.ffn_units:,} extra FFN units"
