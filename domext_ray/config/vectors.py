"""Options of the objectives that teach a model to make a vector of a text: tsdae and infonce."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from domext_ray.options.declare import Share, option_group

Pooling = Literal["mean", "cls"]
"""How the states of a text's tokens become its vector (see model/pooling.py)."""
PoolingChoice = Literal["auto", "mean", "cls"]
"""The same where models are asked for vectors; auto: as each model was trained."""
Views = Literal["dropout", "crop"]
"""What two views of a row are (see corpus/views.py)."""


@option_group
class VectorOptions:
    """A text's vector, and how it is learned without labels.

    tsdae: words are deleted, and from the vector of what is left a small decoder writes the row again (TSDAE, Wang et
    al. 2021, arXiv 2104.06979); an export leaves the decoder out. infonce: of a group of rows, a row's first view is
    nearest to its own second view (InfoNCE within a batch; SimCSE, Gao et al. 2021, arXiv 2104.08821). With
    `prepare.pair` the views are two texts of the row, such as title and body.
    """

    pooling: Pooling = "mean"  # a text's vector, for sentence-transformers: its tokens' mean, or the first one's
    delete_prob: Share = 0.6  # tsdae: share of words that are deleted
    decoder_layers: Annotated[int, Field(ge=1, le=100)] = 1  # tsdae: layers of the decoder
    views: Views = "dropout"  # infonce: a row twice under other dropout, or two stretches of it
    # infonce: rows of a group; a divisor of the rows of a forward pass
    group_rows: Annotated[int, Field(ge=2, le=2**16)] = 16
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 0.05  # infonce: what cosines are divided by
