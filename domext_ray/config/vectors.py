"""Options of the objectives that teach a model to make a vector of a text: denoise and contrast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from domext_ray.options.fields import require, require_one_of

Pooling = Literal["mean", "cls"]
"""How the states of a text's tokens become its vector (see model/pooling.py)."""
PoolingChoice = Literal["auto", "mean", "cls"]
"""The same where models are asked for vectors; auto: as each model was trained."""
Views = Literal["dropout", "crop"]
"""What two views of a row are (see training/views.py)."""


@dataclass(frozen=True)
class VectorOptions:
    """A text's vector, and how it is learned without labels.

    denoise: words are deleted, and from the vector of what is left a small decoder writes the row again (TSDAE, Wang et
    al. 2021, arXiv 2104.06979); an export leaves the decoder out. contrast: of a group of rows, a row's first view is
    nearest to its own second view (InfoNCE within a batch; SimCSE, Gao et al. 2021, arXiv 2104.08821). With
    `prepare.pair` the views are two texts of the row, such as title and body.
    """

    pooling: Pooling = "mean"  # a text's vector, for sentence-transformers: its tokens' mean, or the first one's
    delete_prob: float = 0.6  # denoise: share of words that are deleted
    decoder_layers: int = 1  # denoise: layers of the decoder
    views: Views = "dropout"  # contrast: a row twice under other dropout, or two stretches of it
    contrast_rows: int = 16  # contrast: rows of a group; a divisor of the rows of a forward pass
    temperature: float = 0.05  # contrast: what cosines are divided by

    def check_vectors(self) -> None:
        """Refuse values outside their rules.

        Raises:
            OptionError: one is.
        """
        require_one_of(self.pooling, "objective.pooling", get_args(Pooling))
        require_one_of(self.views, "objective.views", get_args(Views))
        require(0.0 < self.delete_prob < 1.0, "objective.delete_prob", self.delete_prob, "between 0 and 1")
        require(1 <= self.decoder_layers <= 100, "objective.decoder_layers", self.decoder_layers, "from 1 to 100")
        require(2 <= self.contrast_rows <= 2**16, "objective.contrast_rows", self.contrast_rows, "from 2 to 65536")
        require(0.0 < self.temperature <= 10.0, "objective.temperature", self.temperature, "above 0, at most 10")
