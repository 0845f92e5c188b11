"""Texts -> vectors of a frozen encoder, by which normalisation recalls terms that look unlike a wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from domext_ray.downstream.start.model import StartModel, build_encoder
from domext_ray.model.domext.modeling_domext import DomextModel

BATCH_TEXTS = 64
MAX_LENGTH = 64
"""Tokens of a text at most; standard terms are short."""


@dataclass(frozen=True)
class MeanEmbedding:
    """The mean of an encoder's last states over a text's tokens, [CLS] and [SEP] included.

    Args:
        start: the encoder; it is not trained.
    """

    start: StartModel

    @cached_property
    def _encoder(self) -> DomextModel:
        return build_encoder(self.start, torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        return {"start": self.start}  # whose tensors are the encoder's

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, d]."""
        vectors = np.zeros((len(texts), self.start.config.hidden_size), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for first in range(0, len(order), BATCH_TEXTS):
            places = order[first : first + BATCH_TEXTS]
            batch = self.start.tokenizer(
                [texts[i] for i in places],
                padding=True,
                truncation=True,
                max_length=min(MAX_LENGTH, self.start.config.max_row_length),
                return_tensors="pt",
            )
            with torch.no_grad():
                states = self._encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            weights = batch["attention_mask"].float()[..., None]
            vectors[places] = ((states * weights).sum(dim=1) / weights.sum(dim=1)).numpy()
        return vectors
