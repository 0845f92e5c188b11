"""One encoder that serves many adapters of a bank at once, each row of a batch with its own.

Enters: an `AdapterBank`, and batches whose rows name their adapters. Leaves: for each row the logits of its adapter's
own head, from one pass through the encoder (Houlsby et al. section 1: one model in memory, a few parameters a task).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from domext_ray.adapters.bank import AdapterBank
from domext_ray.adapters.entry import (
    HEAD_PREFIX,
    MASKED_LM,
    SEQUENCES,
    WORD_HEAD,
    configure_adapter,
    fill_parameters,
    put_domain,
)
from domext_ray.errors import RunError
from domext_ray.model.base import MLM_HEAD
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.layers_domext import Pooler
from domext_ray.model.domext.modeling_domext import AUTO, NO_DOMAIN, DomextModel
from domext_ray.model.domext.words_domext import PreTrainingHeads


class _Head(nn.Module):
    """What one adapter has above the encoder; parameters are called as in the adapter's own model.

    Args:
        config: the adapter's.
        architecture: a key of `ARCHITECTURES`.
        encoder: its word embeddings are the projection to the vocabulary.
    """

    def __init__(self, config: DomextConfig, architecture: str, encoder: DomextModel) -> None:
        super().__init__()
        self.architecture = architecture
        # In a list, for they are the encoder's modules and not this one's.
        self.word_shifts = [encoder.embeddings.domains if config.domains else None]
        self.pooler = Pooler(config) if architecture == SEQUENCES and not config.has_pooler else None
        if architecture == MASKED_LM:
            self.cls = PreTrainingHeads(config, next_sentence=False)
            self.cls.predictions.decoder.weight = encoder.embeddings.word_embeddings.weight
            self.cls.predictions.decoder.bias = self.cls.predictions.bias
        else:
            self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 2))

    def list_own(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not the encoder's."""
        return {name: param for name, param in self.named_parameters() if not name.endswith(".decoder.weight")}

    def forward(self, hidden_states: Tensor, pooled: Tensor | None) -> Tensor:
        """Score rows: [R, N, d] and the base's pooled [R, d] -> [R, N, V], [R, N, classes] or [R, classes]."""
        if self.architecture == MASKED_LM:
            return self.cls(hidden_states, self.word_shifts[0])
        if self.architecture == SEQUENCES:
            hidden_states = cast(Tensor, pooled) if self.pooler is None else self.pooler(hidden_states)
        return self.classifier(hidden_states)


@dataclass(frozen=True)
class MixedStates:
    """What one pass makes of rows with different adapters; `AdapterServer.encode` returns it.

    Args:
        last_hidden_state: [B, N, d].
        pooler_output: the base's, [B, d]; None: it has no pooler.
        heads: each row's; None: the base, where it has no masked-LM head.
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None
    heads: tuple[_Head | None, ...]

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

        Raises:
            RunError: a row has no head.
        """
        rows_by_head: dict[_Head, list[int]] = {}
        for row in range(len(self.heads)) if rows is None else rows:
            head = self.heads[row]
            if head is None:
                raise RunError(f"adapter_names has {NO_DOMAIN!r}, and the base has no masked-LM head of its own.")
            rows_by_head.setdefault(head, []).append(row)
        logits: dict[int, Tensor] = {}
        for head, own in rows_by_head.items():
            if head.architecture == MASKED_LM and positions:
                logits.update(self._score_words(head, own, positions))
            else:
                logits.update(zip(own, self._score_rows(head, own), strict=True))
        return logits

    def _score_rows(self, head: _Head, rows: list[int]) -> Tensor:
        index = torch.tensor(rows, device=self.last_hidden_state.device)
        return head(self.last_hidden_state[index], None if self.pooler_output is None else self.pooler_output[index])

    def _score_words(self, head: _Head, rows: list[int], positions: Mapping[int, Tensor]) -> dict[int, Tensor]:
        states = self.last_hidden_state
        chosen = [states[row][positions[row].to(states.device)] if row in positions else states[row] for row in rows]
        scores = head(torch.cat(chosen), None)
        return dict(zip(rows, scores.split([len(each) for each in chosen]), strict=True))


class AdapterServer(nn.Module):
    """One encoder with the domains of many adapters, and their heads; `serve_adapters` makes one.

    `.to(device)` moves it; adapters that come later follow. It is in `eval` mode and computes no gradients. Adapters
    may come and go while other threads call it: each batch sees all of an adapter or nothing of it.

    Args:
        bank: where its base and adapters come from.
    """

    def __init__(self, bank: AdapterBank) -> None:
        super().__init__()
        self.bank = bank
        self._lock = threading.Lock()
        config = copy.deepcopy(bank.base.config)
        tensors = bank.base.tensors
        with torch.random.fork_rng(devices=[]):
            self.encoder = DomextModel(config)
            self.base_head = _Head(config, MASKED_LM, self.encoder) if bank.base.has_mlm_head else None
        own = {name.removeprefix("bert."): each for name, each in tensors.items() if name.startswith("bert.")}
        self.encoder.load_state_dict(own)
        if self.base_head is not None:
            words = {name: each for name, each in tensors.items() if name.startswith(MLM_HEAD)}
            fill_parameters(self.base_head.list_own(), words, bank.folder)
        self.heads = nn.ModuleDict()
        self.eval().requires_grad_(False)

    def names(self) -> list[str]:
        """Return the adapters that are served, sorted."""
        return sorted(self.heads)

    def attach(self, name: str) -> None:
        """Serve one more adapter.

        Raises:
            RunError: it is served already, there is no such adapter, or it is damaged.
        """
        entry, tensors = self.bank.read_adapter(name)
        folder = self.bank.find_folder(name)
        own = {key.removeprefix(HEAD_PREFIX): tensors.pop(key) for key in list(tensors) if key.startswith(HEAD_PREFIX)}
        shifts = {key: tensors.pop(key) for key in list(tensors) if key.startswith(WORD_HEAD)}
        head = self.base_head if entry.architecture == MASKED_LM and not own and not shifts else None
        if head is None:
            config = configure_adapter(self.bank.base, entry)
            if shifts:
                config.domains = {name: entry.domain}
                own |= {key.replace(".domains.", f".domains.{name}."): each for key, each in shifts.items()}
                own = {key: each for key, each in self.bank.base.tensors.items() if key.startswith(MLM_HEAD)} | own
            with torch.random.fork_rng(devices=[]):
                head = _Head(config, entry.architecture, self.encoder)
            fill_parameters(head.list_own(), own, folder)
            head.to(self.encoder.device, self.encoder.dtype).eval().requires_grad_(False)
        with self._lock:
            put_domain(self.encoder, name, entry, tensors, folder)
            self.encoder.requires_grad_(False)
            self.heads[name] = head

    def drop(self, name: str) -> None:
        """Serve an adapter no longer.

        Raises:
            RunError: it is not served.
        """
        with self._lock:
            if name not in self.heads:
                raise RunError(self._describe_missing(name))
            del self.heads[name]
            self.encoder.drop_domain(name)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        adapter_names: Sequence[str],
        token_type_ids: Tensor | None = None,
        threshold: float | None = None,
    ) -> list[Tensor]:
        """Score a batch whose rows use different adapters, with one pass through the encoder.

        Args:
            input_ids: int64 [B, N], on the encoder's device, as the others.
            attention_mask: [B, N], 1 for tokens and 0 for padding; None: nothing is padded.
            adapter_names: B names, one a row; "__base__" is the base itself with its masked-LM head. "auto": the
                adapters' routers choose (`DomextModel.route`).
            token_type_ids: int64 [B, N]; None: all 0.
            threshold: of the routers, with "auto"; None: each adapter's own.

        Returns:
            For each row the logits of its own head: [N, V] of a masked LM, [N, classes] or [classes].

        Raises:
            RunError: a name is not served, there are more or fewer names than rows, or no adapter has a router.
        """
        states = self.encode(
            input_ids,
            attention_mask,
            adapter_names=adapter_names,
            token_type_ids=token_type_ids,
            threshold=threshold,
            needs_heads=True,
        )
        logits = states.score()
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
        needs_heads: bool = False,
    ) -> MixedStates:
        """Encode a batch whose rows use different adapters; heads score it later, all of it or some rows.

        Args:
            input_ids: as in `forward`, like the others.
            attention_mask: as in `forward`.
            adapter_names: as in `forward`.
            token_type_ids: as in `forward`.
            threshold: as in `forward`.
            needs_heads: refuse "__base__" where the base has no masked-LM head, before anything is computed.

        Raises:
            RunError: as in `forward`.
        """
        with self._lock:
            if adapter_names == AUTO:
                adapter_names = self._route(input_ids, threshold)
            heads = self._find_heads(adapter_names, len(input_ids), needs_heads=needs_heads)
            encoded = self.encoder(
                input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                adapter_names=list(adapter_names),
            )
        return MixedStates(encoded.last_hidden_state, encoded.pooler_output, heads)

    def _route(self, input_ids: Tensor, threshold: float | None) -> list[str]:
        try:
            return self.encoder.route(input_ids, threshold)
        except ValueError as error:
            raise RunError(f"adapter_names is {AUTO!r}, and {error}") from error

    def _find_heads(
        self, adapter_names: Sequence[str], num_rows: int, *, needs_heads: bool
    ) -> tuple[_Head | None, ...]:
        """Return each row's head; adapters that have the base's share it."""
        if len(adapter_names) != num_rows:
            raise RunError(f"adapter_names has {len(adapter_names)} names; the batch has {num_rows} rows.")
        for name in dict.fromkeys(adapter_names):
            if name == NO_DOMAIN and self.base_head is None and needs_heads:
                raise RunError(f"adapter_names has {NO_DOMAIN!r}, and the base has no masked-LM head of its own.")
            if name != NO_DOMAIN and name not in self.heads:
                raise RunError(self._describe_missing(name))
        heads = [self.base_head if name == NO_DOMAIN else self.heads[name] for name in adapter_names]
        return tuple(cast("_Head | None", each) for each in heads)

    def _describe_missing(self, name: str) -> str:
        return f"no adapter {name!r} is served here; served are {', '.join(self.names()) or 'none'}."


def serve_adapters(bank: AdapterBank, names: Sequence[str] | None = None) -> AdapterServer:
    """Load adapters of a bank into one encoder.

    Args:
        bank: where they are.
        names: the adapters; None: all of them.

    Raises:
        RunError: there is no such adapter, or it is damaged.
    """
    server = AdapterServer(bank)
    for name in bank.names() if names is None else names:
        server.attach(name)
    return server
