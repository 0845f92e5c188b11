"""One encoder that serves many adapters of a bank at once, each row of a batch with its own.

Enters: an `AdapterBank`, and batches whose rows name their adapters. Leaves: for each row the logits of its adapter's
own head, from one pass through the encoder (Houlsby et al. section 1: one model in memory, a few parameters a task).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from domext_ray.errors import RunError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import MASKED_LM, make_model, put_adapter


@dataclass(frozen=True)
class MixedStates:
    """What one pass makes of rows with different adapters; `AdapterServer.encode` returns it."""

    last_hidden_state: Tensor  # [B, N, d]
    attention_mask: Tensor | None  # [B, N]; None: nothing is padded
    heads: tuple[Any, ...]  # each row's model, over the shared encoder; None: the base, where it has no masked-LM head
    word_shifts: dict[str, nn.Module]  # those of the word table, by adapter, as they were in this pass
    head_states: Tensor | None = None  # [B, N, d] that heads read, where these are not the last states

    @torch.no_grad()
    def score(
        self, rows: Sequence[int] | None = None, positions: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Score rows with their own heads; rows that share a head share a call.

        Args:
            rows: their places in the batch; None: all.
            positions: int64 [P] by row: a masked LM scores these tokens alone. Rows left out: every token.

        Returns:
            By row [N or P, V] of a masked LM, [N, classes] or [classes].
        """
        rows_by_head: dict[Any, list[int]] = {}
        for row in range(len(self.heads)) if rows is None else rows:
            rows_by_head.setdefault(self.heads[row], []).append(row)
        if None in rows_by_head:
            raise RunError(f"adapter_names has {BASE_NAME!r}, and the base has no masked-LM head of its own.")
        logits: dict[int, Tensor] = {}
        for head, own in rows_by_head.items():
            logits.update(zip(own, self._score(head, own, positions), strict=True))
        return logits

    def _score(self, head: Any, rows: list[int], positions: Mapping[int, Tensor] | None) -> Iterable[Tensor]:
        states = self.last_hidden_state if self.head_states is None else self.head_states
        index = torch.tensor(rows).to(states.device, non_blocking=True)
        if hasattr(head, "cls"):
            shifts = self.word_shifts if head.cls.predictions.adapters else None
            if not positions:
                return head.cls.predictions(states[index], shifts)
            chosen = [states[row][positions[row]] if row in positions else states[row] for row in rows]
            return head.cls.predictions(torch.cat(chosen), shifts).split([len(part) for part in chosen])
        if not hasattr(head, "pooler"):
            return head.classifier(states[index])
        mask = None if self.attention_mask is None else self.attention_mask[index]
        return head.classifier((head.pooler or head.bert.pooler)(states[index], mask))


class AdapterServer(nn.Module):
    """One encoder with many adapters, and their heads; `serve_adapters` makes one.

    `.to(device)` moves it; adapters that come later follow. It is in `eval` mode and computes no gradients. Adapters
    may come and go while other threads call it: each batch sees all of an adapter or nothing of it. What cannot be done
    raises a RunError.
    """

    def __init__(self, bank: AdapterBank) -> None:
        super().__init__()
        self.bank = bank
        self._lock = threading.Lock()
        model = make_model(MASKED_LM, copy.deepcopy(bank.base.config), bank.base.tensors)
        self.encoder = model.bert
        self.base_head = model if bank.base.has_mlm_head else None
        self.heads = nn.ModuleDict()
        self.eval().requires_grad_(False)

    def names(self) -> list[str]:
        """Return the adapters that are served, sorted."""
        return sorted(self.heads)

    def attach(self, name: str) -> None:
        """Serve one more adapter of the bank."""
        entry, tensors = self.bank.read_adapter(name)
        head = self.base_head
        if entry.architecture != MASKED_LM or entry.adapter.word_rows or head is None:
            # Moved before they are the head's: the encoder below it is in use.
            device, dtype = self.encoder.device, self.encoder.dtype
            own = self.bank.base.tensors | tensors
            own = {key: tensor.to(device, dtype) for key, tensor in own.items() if not key.startswith("bert.")}
            head = make_model(entry.architecture, entry.configure(self.bank.base, name), own, self.encoder)
            head.requires_grad_(False)
        with self._lock:
            put_adapter(self.encoder, name, entry, tensors)
            self.encoder.requires_grad_(False)
            self.heads[name] = head

    def drop(self, name: str) -> None:
        """Serve an adapter no longer."""
        with self._lock:
            self._check_served([name])
            del self.heads[name]
            self.encoder.detach_adapter(name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> list[Tensor]:
        """Score a batch as `encode` takes it; for each row [N, V] of a masked LM, [N, classes] or [classes]."""
        logits = self.encode(input_ids, attention_mask, **options).score()
        return [logits[row] for row in range(len(logits))]

    @torch.no_grad()
    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        adapter_names: Sequence[str],
        token_type_ids: Tensor | None = None,
        threshold: float | None = None,
    ) -> MixedStates:
        """Encode a batch whose rows use different adapters; heads score it later, all of it or some rows.

        Args:
            input_ids: int64 [B, N], on the encoder's device, as the others.
            attention_mask: [B, N], 1 for tokens and 0 for padding; None: nothing is padded.
            adapter_names: B names, one a row; "__base__" is the base itself with its masked-LM head. "auto": the
                adapters' routers choose (`DomextModel.route`).
            token_type_ids: int64 [B, N]; None: all 0.
            threshold: of the routers, with "auto"; None: each adapter's own.
        """
        with self._lock:
            try:
                names = self.encoder.route(input_ids, threshold) if adapter_names == AUTO else list(adapter_names)
            except ValueError as error:
                raise RunError(f"adapter_names is {AUTO!r}, and {error}") from error
            if len(names) != len(input_ids):
                raise RunError(f"adapter_names has {len(names)} names; the batch has {len(input_ids)} rows.")
            self._check_served([name for name in names if name != BASE_NAME])
            heads = tuple(self.base_head if name == BASE_NAME else self.heads[name] for name in names)
            word_shifts = dict(self.encoder.embeddings.adapters)
            encoded = self.encoder(input_ids, attention_mask, token_type_ids, pool=False, adapter_names=names)
        return MixedStates(encoded.last_hidden_state, attention_mask, heads, word_shifts)

    def _check_served(self, names: Sequence[str]) -> None:
        if missing := [name for name in names if name not in self.heads]:
            served = ", ".join(self.names()) or "none"
            raise RunError(f"no adapter {missing[0]!r} is served here; served are {served}.")


def serve_adapters(bank: AdapterBank, names: Sequence[str] | None = None) -> AdapterServer:
    """Load adapters of a bank into one encoder: those of these names, or all; errors as in `AdapterBank`."""
    server = AdapterServer(bank)
    for name in bank.names() if names is None else names:
        server.attach(name)
    return server
