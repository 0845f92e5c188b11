"""Texts -> vectors of a frozen encoder: for normalisation, for retrieval, and for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from domext_ray.config.pretrain import SettledConfig
from domext_ray.config.shared import LongTexts, Pooling, PoolingChoice
from domext_ray.export.vector_layout import read_pooling
from domext_ray.families.rows import Row, pad_rows, run_by_length
from domext_ray.model.domext.modeling_domext import DomextModel
from domext_ray.models.source import Run, open_model
from domext_ray.models.start import StartModel, build_encoder
from domext_ray.runs.run_directory import read_config
from domext_ray.runtime.device import autocast
from domext_ray.storage import Place
from domext_ray.training.losses import pool_states
from domext_ray.training.step import move_batch

BATCH_TEXTS = 64
MAX_LENGTH = 64
"""Tokens of a text at most, for short texts such as standard terms."""


def choose_pooling(model: str, asked: PoolingChoice) -> Pooling:
    """Return how a model makes vectors: as asked, or as its run or export says; the mean where nothing does."""
    if asked != "auto":
        return asked
    source = open_model(model)
    if isinstance(source, Run):
        return read_config(Place(source.folder), SettledConfig).objective.pooling
    return read_pooling(source.folder)


@dataclass(frozen=True)
class TextEmbedding:
    """An encoder's states, pooled over a text's tokens; it is not trained."""

    start: StartModel
    pooling: Pooling = "mean"
    layers: tuple[int, ...] = ()  # those whose states are averaged first, 0 for the embeddings; empty: the last one
    normalize: bool = False  # make every vector one of length 1
    max_length: int = MAX_LENGTH
    batch_size: int = BATCH_TEXTS  # rows of a forward pass
    device: str = "cpu"
    long_texts: LongTexts = "cut"  # windows: a text's vector is the mean of those of its windows, weighed by tokens

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.start.config.hidden_size

    @property
    def longest(self) -> int:
        """Tokens of a text at most, [CLS] and [SEP] included: `max_length`, or the model's longest row."""
        return min(self.max_length, self.start.config.max_row_length)

    @cached_property
    def _encoder(self) -> DomextModel:
        return build_encoder(self.start, torch.device(self.device))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoder"}  # its tensors are the start's

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [texts, d]."""
        return self.embed(texts)[0]

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return float32 [texts, d], and bool [texts]: which texts are longer than `longest`, and were cut there."""
        if not texts:
            return np.zeros((0, self.width), dtype=np.float32), np.zeros(0, dtype=bool)
        has_windows = self.long_texts == "windows"
        encoded = self.start.tokenizer(
            [*texts], truncation=True, max_length=self.longest, return_overflowing_tokens=has_windows
        )
        owners = encoded["overflow_to_sample_mapping"] if has_windows else range(len(texts))
        rows = [Row(*own) for own in zip(owners, map(np.array, encoded["input_ids"]), strict=True)]
        found = np.stack(run_by_length(rows, self._run, max_rows=self.batch_size))
        if has_windows:  # the tokens of all windows weigh the same
            weights = np.zeros((len(texts), len(rows)), dtype=np.float32)
            weights[owners, range(len(rows))] = [row.length for row in rows]
            found = (weights / weights.sum(axis=-1, keepdims=True)) @ found
        is_cut = np.array([not has_windows and bool(own.overflowing) for own in encoded.encodings[: len(texts)]])
        if self.normalize:
            found = torch.nn.functional.normalize(torch.from_numpy(found)).numpy()
        return found, is_cut

    @torch.no_grad()
    def _run(self, rows: list[Row]) -> np.ndarray:
        """Return the pooled states of a batch's rows, float32 [rows, d]."""
        device = torch.device(self.device)
        given = move_batch(pad_rows(rows, self.start.tokenizer.pad_token_id), device)
        with autocast(device):
            encoded = self._encoder(**given, output_hidden_states=bool(self.layers))
        states = encoded.last_hidden_state
        if self.layers:  # number 0 is the embeddings' output
            states = torch.stack([encoded.hidden_states[layer] for layer in self.layers]).mean(0)
        return pool_states(states.float(), given["attention_mask"], self.pooling).cpu().numpy()
