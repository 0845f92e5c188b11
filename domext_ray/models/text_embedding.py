"""Texts -> vectors of a frozen encoder: for normalisation, for retrieval, and for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from domext_ray.config.pretrain import SettledConfig
from domext_ray.config.shared import LongTexts, Pooling, PoolingChoice
from domext_ray.export.vector_layout import read_pooling
from domext_ray.model.domext.modeling_domext import DomextModel
from domext_ray.models.source import SourceKind, open_model
from domext_ray.models.start import StartModel, build_encoder
from domext_ray.runs.run_directory import read_config
from domext_ray.runtime.device import autocast
from domext_ray.storage import Place
from domext_ray.text.corpus.batching import find_sequences
from domext_ray.training.losses import pool_states
from domext_ray.training.objective import to_tensors
from domext_ray.training.step import move_batch

BATCH_TEXTS = 64
MAX_LENGTH = 64
"""Tokens of a text at most, for short texts such as standard terms."""


def choose_pooling(model: str, asked: PoolingChoice) -> Pooling:
    """Return how a model makes vectors: as asked, or as its run or export says; the mean where nothing does."""
    if asked != "auto":
        return asked
    source = open_model(model)
    if source.kind == SourceKind.RUN:
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
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        is_cut = np.zeros(len(texts), dtype=bool)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            vectors[places], is_cut[places] = self._embed([texts[i] for i in places])
        return vectors, is_cut

    def _embed(self, texts: list[str]) -> tuple[np.ndarray, list[bool]]:
        has_windows = self.long_texts == "windows"
        batch = self.start.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_overflowing_tokens=has_windows,
            return_tensors="pt",
        )
        rows = zip(*(batch[name].split(self.batch_size) for name in ("input_ids", "attention_mask")), strict=True)
        vectors = torch.cat([self._run(*some) for some in rows])
        if has_windows:  # the tokens of all windows weigh the same
            windows = torch.nn.functional.one_hot(batch["overflow_to_sample_mapping"], len(texts))
            shares = (windows * batch["attention_mask"].sum(-1, keepdim=True)).T.float()
            vectors = (shares / shares.sum(-1, keepdim=True)) @ vectors
        is_cut = [not has_windows and bool(encoding.overflowing) for encoding in batch.encodings[: len(texts)]]
        return (torch.nn.functional.normalize(vectors) if self.normalize else vectors).numpy(), is_cut

    @torch.no_grad()
    def _run(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the pooled states of padded rows, fp32 [rows, d]."""
        device = torch.device(self.device)
        sequences = to_tensors(find_sequences(mask.numpy() > 0))
        given = move_batch({"input_ids": ids, "attention_mask": mask} | sequences, device)
        with autocast(device):
            encoded = self._encoder(**given, output_hidden_states=bool(self.layers))
        states = encoded.last_hidden_state
        if self.layers:  # number 0 is the embeddings' output
            states = torch.stack([encoded.hidden_states[layer] for layer in self.layers]).mean(0)
        return pool_states(states.float(), given["attention_mask"], self.pooling).cpu()
