"""Rows of tokens -> what their adapters say of them: the part of the application that has the model, in every replica.

Enters: rows that name their adapter, and the hash of the adapter that they were made for. Leaves: for each row small
arrays. A row whose adapter is another one by now, or cannot be read, gets an error of its own; others do not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from domext_ray.errors import DomextError, RunError
from domext_ray.families.rows import pad_rows
from domext_ray.model.domext.modeling_domext import BASE_NAME
from domext_ray.models.mixed_adapters import MixedStates
from domext_ray.runtime.device import autocast
from domext_ray.serving.served_model import ServedModel
from domext_ray.training.losses import pool_states
from domext_ray.training.step import move_batch

Wants = Literal["words", "labels", "mean", "cls"]
"""What a row is for: the likeliest words at some places, the head's scores, or the text's vector."""


@dataclass(frozen=True)
class ServedRow:
    """A row of one adapter."""

    adapter: str  # its name; "__base__": the base
    sha256: str  # of its tensors; of the base: empty
    input_ids: np.ndarray  # int64 [N]
    token_type_ids: np.ndarray | None  # int64 [N]; None: all 0
    wants: Wants
    places: np.ndarray | None = None  # int64 [P], tokens whose words are wanted
    top_k: int = 0  # how many words at each
    segment_lengths: ClassVar[None] = None  # a row is one segment

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.input_ids)


Outcome = tuple[np.ndarray, ...] | Exception
"""Of a row. Words: probabilities float32 [P, k] and ids int64 [P, k], the likeliest first. Labels: logits float32
[N, classes] or [classes]. A vector: float32 [d]."""


class Engine:
    """The model, with the adapters that rows have named, in one encoder."""

    def __init__(self, served: ServedModel, device: torch.device) -> None:
        self._served, self._device = served, device
        self._server = served.load(device)
        self._attached: dict[str, str] = {}
        self._pad_id = int(self._server.encoder.config.pad_token_id or 0)

    @property
    def attached(self) -> dict[str, str]:
        """Hashes of the adapters that are in the encoder, by name."""
        return dict(self._attached)

    def _attach(self, name: str, sha256: str) -> None:
        """Have an adapter in the encoder; those that have left the bank, or have another hash, leave it."""
        if self._attached.get(name) == sha256:
            return
        for gone in {name, *(self._attached.keys() - self._served.names())} & self._attached.keys():
            del self._attached[gone]
            self._server.drop(gone)
        if self._served.hash_adapter(name) != sha256:
            raise RunError(f"the adapter {name!r} is another one now; ask again.")
        self._server.attach(name)
        self._attached[name] = sha256

    def run(self, rows: Sequence[ServedRow]) -> list[Outcome]:
        """Compute rows in one pass; the result of a row does not depend on the others but for rounding."""
        outcomes: list[Outcome] = [RunError("not computed")] * len(rows)
        sound: list[int] = []
        for place, row in enumerate(rows):
            try:
                if row.adapter != BASE_NAME:
                    self._attach(row.adapter, row.sha256)
                sound.append(place)
            except DomextError as error:
                outcomes[place] = error
        # One pass may name two adapters of one name, if one has replaced the other meanwhile: the later one is there.
        sound = [place for place in sound if self._has(rows[place])]
        for place, outcome in zip(sound, self._compute([rows[place] for place in sound]), strict=True):
            outcomes[place] = outcome
        return outcomes

    def _has(self, row: ServedRow) -> bool:
        return row.adapter == BASE_NAME or self._attached.get(row.adapter) == row.sha256

    @torch.inference_mode()
    def _compute(self, rows: Sequence[ServedRow]) -> list[Outcome]:
        if not rows:
            return []
        given = move_batch(pad_rows(rows, self._pad_id), self._device)
        ids, mask, types = given["input_ids"], given["attention_mask"], given["token_type_ids"]
        names = [row.adapter for row in rows]
        outcomes: dict[int, Outcome] = {}
        scored = [place for place, row in enumerate(rows) if row.wants in ("words", "labels")]
        places = {place: torch.from_numpy(row.places) for place, row in enumerate(rows) if row.places is not None}
        with autocast(self._device):
            states = self._server.encode(ids, mask, adapter_names=names, token_type_ids=types)
            outcomes |= self._pool(rows, states, mask)
            logits = states.score(scored, places)
        outcomes |= self._choose_words({place: logits[place] for place in places}, rows)
        for place in scored:
            if rows[place].wants == "labels":
                own = logits[place].float().cpu().numpy()
                outcomes[place] = (own[: rows[place].length] if own.ndim == 2 else own,)
        return [outcomes[place] for place in range(len(rows))]

    def _pool(self, rows: Sequence[ServedRow], states: MixedStates, mask: Tensor | None) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        for pooling in ("mean", "cls"):
            own = [place for place, row in enumerate(rows) if row.wants == pooling]
            if own:
                index = torch.tensor(own, device=self._device)
                kept = None if mask is None else mask[index]
                vectors = pool_states(states.last_hidden_state[index], kept, pooling).float().cpu().numpy()
                found |= {place: (vector,) for place, vector in zip(own, vectors, strict=True)}
        return found

    def _choose_words(self, logits: dict[int, Tensor], rows: Sequence[ServedRow]) -> dict[int, Outcome]:
        """Return the likeliest words of rows: one softmax for all of them, for there are many small ones."""
        if not logits:
            return {}
        sizes = [len(scores) for scores in logits.values()]
        probabilities = torch.cat(list(logits.values())).float().softmax(dim=-1)
        most = max(rows[place].top_k for place in logits)
        top = probabilities.topk(min(most, probabilities.shape[-1]))
        values, ids = (tensor.cpu().split(sizes) for tensor in (top.values, top.indices))
        return {
            place: (own.numpy()[:, : rows[place].top_k], numbers.numpy()[:, : rows[place].top_k])
            for place, own, numbers in zip(logits, values, ids, strict=True)
        }
