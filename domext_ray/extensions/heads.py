"""Extra attention heads per layer, with rows of the output projection of their own (AF Adapter section 3.2)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from domext_ray.extensions.anatomy import DomainPart, Shape, TrainedPart
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


class Heads(DomainPart[HeadOptions]):
    """Extra attention heads of the base's size; see `layers_domext.DomainHeads`."""

    sizes = ("heads",)
    formats = ("bank",)
    label = "heads"
    paper = "AF Adapter"
    citation = AF_ADAPTER

    def count_in_layer(self, shape: Shape, domain: Any) -> int:
        """Count 4·d·d_k + 3·d_k parameters per head, and d of the bias b'_O.

        Source: AF Adapter section 3.2.
        """
        width = shape.hidden_size
        head_size = width // shape.num_attention_heads
        return domain.heads * (4 * width * head_size + 3 * head_size) + (width if domain.heads else 0)

    def describe_part(self, domain: Any) -> str:
        """See `DomainPart.describe_part`."""
        return f"{domain.heads} extra attention head(s)"
