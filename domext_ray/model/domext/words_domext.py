"""Words in and out: embeddings, the masked-LM head tied to them, new words, and shifts of the base's words.

This file is exported as it is: it imports torch and transformers only. Shapes: B rows, N tokens, d hidden size,
V words of the base, E new words, K words that an adapter shifts.

exBERT section 3: new words have embeddings of their own, tied to their output.

An adapter adds ΔE to rows of the base's word table E, and `x ΔE^T + Δb` to the scores of these words, so that
input and output stay tied; ΔE and Δb are 0 at the start. The MLM head's transform can be shifted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_domext import AdapterConfig, DomextConfig
from .layers_domext import (
    AdapterPlace,
    Delta,
    DeltaProjection,
    Filling,
    Linear,
    NormShift,
    add_deltas,
    apply_scale,
    make_norm,
    select_adapters,
    take_rows,
)


class WordShift(nn.Module):
    """What an adapter adds to K rows of the base's word table (`rows`; None: all), and to the scores of these words."""

    rows: Tensor | None

    def __init__(self, config: DomextConfig, adapter: AdapterConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(adapter.word_rows, config.hidden_size))
        is_whole = adapter.word_rows == config.base_vocab_size
        self.register_buffer("rows", None if is_whole else torch.arange(adapter.word_rows))

    def forward(
        self,
        input_ids: Tensor | None = None,
        states: Tensor | None = None,
        table: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Return the shifts of words, those of states' scores, or a whole table that is shifted.

        Args:
            input_ids: int64 [...], words, of which those without a shift get zeros; gives [..., d].
            states: [..., d], what the output projection reads; gives [..., K].
            table: [K, d], the base's; gives [K, d].
            scale: of the shifts of a table.
        """
        if states is not None:
            return nn.functional.linear(states, self.weight)
        if table is not None:
            return table + apply_scale(self.weight, scale)
        assert input_ids is not None
        last = len(self.weight) - 1
        if self.rows is None:
            indices, is_shifted = input_ids.clamp_max(last), input_ids <= last
        else:
            indices = torch.searchsorted(self.rows, input_ids).clamp_max(last)
            is_shifted = self.rows[indices] == input_ids
        return nn.functional.embedding(indices, self.weight) * is_shifted[..., None]


class WordEmbeddings(nn.Embedding):
    """The base's word table, which reads words as the model does: with the adapters' shifts, and the new ones.

    These stand beside it in `embeddings`, where checkpoints have them.
    """

    def __init__(self, config: DomextConfig, embeddings: Embeddings) -> None:
        super().__init__(config.base_vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self._owner = (embeddings,)  # in a tuple, for it is no part of this module

    def forward(self, input_ids: Tensor, adapter_rows: dict[str, Tensor] | None = None) -> Tensor:
        """[B, N] -> [B, N, d]; `adapter_rows`: see `select_adapters`."""
        (embeddings,) = self._owner
        deltas = embeddings.compute_deltas(adapter_rows, input_ids)
        if embeddings.extension is None:
            return add_deltas(super().forward(input_ids), deltas)
        new_ids = input_ids - self.num_embeddings
        is_new = new_ids >= 0
        known = add_deltas(super().forward(input_ids.masked_fill(is_new, embeddings.config.pad_token_id)), deltas)
        new = embeddings.extension(new_ids.clamp_min(0))
        return torch.where(is_new[..., None], new, known.to(new.dtype))


class WordTable(nn.Module):
    """All words as the model reads them, where it has shifts or new words: what it gives out as its embeddings.

    It has no parameters; `weight` is computed of those of its `embeddings`, whose forward pass calls it.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__()
        self._owner = (embeddings,)  # as above

    def forward(self, input_ids: Tensor, adapter_rows: dict[str, Tensor] | None = None) -> Tensor:
        """[...] -> [..., d], of the active adapters; with `adapter_rows`, [B, N] -> [B, N, d]."""
        words = self._owner[0].word_embeddings
        return words(input_ids) if adapter_rows is None else words(input_ids, adapter_rows)

    @property
    def num_embeddings(self) -> int:
        """Words of the base and new ones, V + E."""
        (embeddings,) = self._owner
        num_new = 0 if embeddings.extension is None else embeddings.extension.num_embeddings
        return embeddings.word_embeddings.num_embeddings + num_new

    @property
    def embedding_dim(self) -> int:
        """Their size d."""
        return self._owner[0].word_embeddings.embedding_dim

    @property
    def weight(self) -> Tensor:
        """All words, [V + E, d]; gradients go to the tables and shifts that it is made of."""
        words = self._owner[0].word_embeddings
        return words(torch.arange(self.num_embeddings, device=words.weight.device))


class Embeddings(AdapterPlace):
    """Word, position and segment embeddings as far as a layout has them, summed and normalised; words with shifts."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        num_new = config.extension_vocab_size
        self.word_embeddings = WordEmbeddings(config, self)
        self.words = WordTable(self)
        self.extension = nn.Embedding(num_new, config.hidden_size) if num_new else None
        width, num_types = config.hidden_size, config.type_vocab_size
        num_positions = config.max_position_embeddings
        self.position_embeddings = nn.Embedding(num_positions, width) if config.has_position_table else None
        self.token_type_embeddings = nn.Embedding(num_types, width) if num_types else None
        self.LayerNorm = make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.attach_adapters()

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make an adapter's shifts of words."""
        return WordShift(self.config, adapter) if adapter.word_rows else None

    @property
    def has_more_words(self) -> bool:
        """Whether the model reads other words than the base's table has."""
        return self.extension is not None or bool(self.adapters)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        adapter_rows: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return [B, N, d]; `inputs_embeds` are words as `words` returns them, with their shifts."""
        words = self.words(input_ids, adapter_rows) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            longest = self.config.max_row_length
            if words.shape[1] > longest:
                raise ValueError(f"a row has {words.shape[1]} tokens; the model has positions for {longest}.")
        # Summed in the LayerNorm's dtype: tables stored in bf16 are rounded once, not again at every addition.
        embedded = words.to(self.LayerNorm.weight.dtype)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
            embedded = embedded + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = self._count_positions(input_ids, words)
            embedded = embedded + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embedded))

    def _count_positions(self, input_ids: Tensor | None, words: Tensor) -> Tensor:
        if self.config.position_rule == "absolute":
            return torch.arange(words.shape[1], device=words.device)[None]
        pad = self.config.pad_token_id
        if input_ids is None:  # as in transformers: padding cannot be seen in embeddings
            return torch.arange(pad + 1, words.shape[1] + pad + 1, device=words.device)[None]
        is_token = input_ids.ne(pad).int()
        return (torch.cumsum(is_token, dim=1).type_as(is_token) * is_token).long() + pad


class HeadShift(nn.Module):
    """What an adapter adds to the MLM head: biases of the words that it shifts, and, if asked for, the transform's."""

    def __init__(self, config: DomextConfig, adapter: AdapterConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(adapter.word_rows))
        self.dense = DeltaProjection(config.hidden_size, config.hidden_size) if adapter.word_head else None
        self.norm = NormShift(config) if adapter.word_head else None

    def forward(self, scores: Tensor, scale: float = 1.0) -> Tensor:
        """Add the shifts of the biases, times a scale, to scores [..., K]."""
        return scores + apply_scale(self.bias.to(scores.dtype), scale)


class PredictionTransform(nn.Module):
    """Dense, activation and LayerNorm before the vocabulary projection."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.activation = ACT2FN[config.mlm_head_act or config.hidden_act]
        self.LayerNorm = make_norm(config)

    def forward(self, hidden_states: Tensor, shifts: Sequence[tuple[HeadShift, Tensor | None, float]] = ()) -> Tensor:
        """[B, ..., d] -> [B, ..., d]; `shifts` are of adapters that shift the transform: see `select_adapters`."""
        deltas = [
            Delta(rows, apply_scale(cast(nn.Module, shift.dense)(take_rows(hidden_states, rows)), scale))
            for shift, rows, scale in shifts
        ]
        transformed = self.activation(add_deltas(self.dense(hidden_states), deltas))
        norms = [(cast(NormShift, shift.norm), rows, scale) for shift, rows, scale in shifts]
        return self.LayerNorm(transformed, shifts=norms)


def compute_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the losses, fp32 [P], of scores [P, V] and the words that are right, int64 [P]."""
    return nn.functional.cross_entropy(scores.float(), labels, reduction="none")


WORD_MULTIPLE = 64
"""What the number of scores is made a multiple of where a card computes them."""


class PredictionHead(AdapterPlace):
    """MLM head: transform, then projections that are tied to the word embeddings; [B, ..., d] -> [B, ..., V + E]."""

    is_filled = False
    compute_losses: Callable[[Tensor, Tensor], Tensor] = staticmethod(compute_losses)
    """What training makes of the scores; a run on a card may put a kernel in its place."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        num_words, num_new = config.base_vocab_size, config.extension_vocab_size
        self.transform = PredictionTransform(config)
        self.decoder = Linear(config.hidden_size, num_words)
        self.bias = nn.Parameter(torch.zeros(num_words))
        self.extension = Linear(config.hidden_size, num_new) if num_new else None
        self.attach_adapters()

    def make_part(self, adapter: AdapterConfig) -> nn.Module | None:
        """Make what an adapter that shifts words adds to the head."""
        return HeadShift(self.config, adapter) if adapter.word_rows else None

    def fill_products(self) -> None:
        """Widen the products of the scores to a multiple that a card likes; what is behind the words scores -inf."""
        self.is_filled = True
        for linear in (self.decoder, self.extension):
            if linear is not None and (missing := -linear.out_features % WORD_MULTIPLE):
                linear.filling = Filling(0, linear.out_features, missing, -torch.inf)

    def forward(
        self,
        hidden_states: Tensor,
        word_shifts: Mapping[str, Any] | nn.ModuleDict | None = None,
        adapter_rows: dict[str, Tensor] | None = None,
        *,
        keeps_filling: bool = False,
    ) -> Tensor:
        """Score the base's words, then the new ones.

        Args:
            hidden_states: [B, ..., d].
            word_shifts: those of the word table, by adapter.
            adapter_rows: see `select_adapters`.
            keeps_filling: there may be scores of -inf behind the words, which spares a loss a pass over all.
        """
        words = [] if word_shifts is None else select_adapters(self.config, word_shifts, adapter_rows)
        heads = select_adapters(self.config, self.adapters, adapter_rows)
        transformed = self.transform(hidden_states, [entry for entry in heads if entry[0].dense is not None])
        # A shift of all words and rows joins the projection; others are sums of their own.
        whole = {shift: scale for shift, rows, scale in words if rows is None and shift.rows is None}
        logits = self.decoder(transformed, [*whole.items()])
        if self.is_filled and (words or self.extension is not None or not keeps_filling):
            logits = logits[..., : self.decoder.out_features]
        for (shift, rows, scale), (head, _, _) in zip(words, heads, strict=True):
            if shift in whole:
                logits = head(logits, scale)
                continue
            scores = apply_scale(head(shift(states=take_rows(transformed, rows))).to(logits.dtype), scale)
            if shift.rows is not None:
                spread = scores.new_zeros(*scores.shape[:-1], logits.shape[-1])
                scores = spread.index_copy(-1, shift.rows, scores)
            logits = add_deltas(logits, [Delta(rows, scores)])
        if self.extension is None:
            return logits
        scores = self.extension(transformed)[..., : self.extension.out_features]
        return torch.cat([logits, scores], dim=-1)


class PreTrainingHeads(nn.Module):
    """Holder that gives BERT's heads their Hugging Face names: `cls.predictions`, and `cls.seq_relationship` (NSP)."""

    def __init__(self, config: DomextConfig, *, next_sentence: bool) -> None:
        super().__init__()
        self.predictions = PredictionHead(config)
        self.seq_relationship = Linear(config.hidden_size, 2) if next_sentence else None
