"""Extra attention heads per layer, with rows of the output projection of their own (AF Adapter section 3.2)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from domext_ray.extensions.base import AdapterPart, TrainedPart
from domext_ray.options.declare import option_group

AF_ADAPTER = """@misc{yan2022afadapter,
  title = {{AF} Adapter: Continual Pretraining for Building {Chinese} Biomedical Language Model},
  author = {Yan, Yongyu and Xue, Kui and Shi, Xiaoming and Ye, Qi and Liu, Jingping and Ruan, Tong},
  year = {2022},
  eprint = {2211.11363},
  archivePrefix = {arXiv}
}"""


@option_group
class HeadOptions(TrainedPart):
    """Options of extra heads."""

    heads: Annotated[int, Field(ge=0, le=1000)] = 1  # extra attention heads per layer (AF Adapter's i)


class Heads(AdapterPart[HeadOptions]):
    """Extra attention heads of the base's size; see `layers_domext.AdapterHeads`."""

    sizes = ("heads",)
    parameters = re.compile(r"\.attention\.adapters\.")
    formats = ("bank",)
    label = "heads"
    paper = "AF Adapter"
    citation = AF_ADAPTER

    def describe_part(self, adapter: Any) -> str:
        """See `AdapterPart.describe_part`."""
        return f"{adapter.heads} extra attention head(s)"
