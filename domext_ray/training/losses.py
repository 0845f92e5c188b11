"""What training makes small: a model and its losses as one module.

Enters: a batch. Leaves: sums of losses by name, which whoever trains divides by their counts over the global
batch. BERT section 3.1: masked words, and whether the second text follows the first; Hinton et al. 2015: the base's
predictions, which the model keeps to on general text. Or what teaches a model to make a vector of a row, InfoNCE: rows
that are compared with each other are neighbours in the canonical order, and in one forward pass of one rank, so the
loss of a global batch depends neither on the number of workers nor on the micro batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from domext_ray.config.pretrain import ObjectiveConfig, RunOptions
from domext_ray.config.shared import Pooling
from domext_ray.model.base import Base
from domext_ray.model.build import bypass_extensions, count_base_layers
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import build_base
from domext_ray.text.corpus.views import pad_views
from domext_ray.training.objective import (
    KEEP_LOSS,
    LOSS,
    NEXT_SENTENCE_LOSS,
    NO_LABEL,
    PART_LOSSES,
    KeptRows,
    MaskedBatch,
    ViewBatch,
    pad_batch,
    to_batch,
)

_BOUNDS = "token_indices", "cu_seq_lens", "max_length"
MAX_SCORES = 2**28
"""Scores of words that stand at once, [P, V]: 1 GiB in fp32, of which a forward and backward pass holds several."""


class Loss(nn.Module):
    """Model and loss as one module, so that DeepSpeed, autocast and the compiler see the whole forward pass.

    Its forward takes a batch on `device`. In training it returns the sums of its losses by name, fp32 scalars: the
    trainer divides each by its count over the global batch, and takes one that a batch lacks for 0. With `bf16` it runs
    under torch's autocast.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.device_type = device.type
        self.bf16 = bf16
        self.loss_weights = {LOSS: 1.0}
        """Its losses, with a weight for the mean of each."""
        self.num_parts = 0
        """Sums that its output of `PART_LOSSES` has, [num_parts]: added up over the global batch, and nothing more."""

    def autocast(self) -> torch.autocast:
        """Run what is computed meanwhile in bf16, if that was asked for."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16)

    def make_empty(self) -> Any:
        """Return a batch of which nothing counts: its gradient is 0 wherever there is one."""
        empty = pad_batch([np.zeros(8)], [np.zeros(8)], [np.zeros(8, dtype=bool)], pad_id=0)
        if getattr(self.model, "predicts_next_sentence", False):
            return replace(empty, next_sentence_labels=torch.full((1,), NO_LABEL))
        return empty


class MaskedLoss(Loss):
    """Pre-training: masked words; with pairs whether the second text follows the first; what is kept of the base.

    On rows of general text the model keeps to its base's predictions: KL(base || model) over the base's words, at the
    predicted positions (Hinton et al. 2015, with a temperature of 1); or it learns their masked words, as elsewhere.

    `teacher` is the base, which has `num_words`: the model itself, which then predicts without its extensions, or a
    frozen copy; None: general text is learned.

    A vocabulary of 250,000 words has gigabytes of scores: they are computed in chunks of positions, and again in the
    backward pass. `num_chunks` is the same on all ranks, for at ZeRO-3 each chunk gathers the head.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        bf16: bool,
        keep_weight: float = 1.0,
        teacher: nn.Module | None = None,
        num_words: int = 0,
        num_parts: int = 0,
        num_chunks: int = 1,
    ) -> None:
        super().__init__(model, device, bf16=bf16)
        self.num_parts = num_parts
        self.num_chunks = num_chunks
        self.loss_weights = {LOSS: 1.0, NEXT_SENTENCE_LOSS: 1.0, KEEP_LOSS: keep_weight}
        self.teaches_itself = teacher is model
        self.teacher = None if self.teaches_itself else teacher
        self.num_shared_layers = count_base_layers(cast(Any, model).config) if self.teaches_itself else 0
        self.num_words = num_words

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor] | Tensor:
        """Return sums of losses by name, those by part too; in eval mode the fields of `evaluate.Scores` of each row.

        These are float64, [B, 5] of pairs, else [B, 3].
        """
        rows: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        rows |= {"token_type_ids": batch.token_type_ids, "document_ids": batch.document_ids}
        bounds = {name: getattr(batch, name) for name in _BOUNDS}
        kept_rows = batch.kept_rows if self.training else None
        asked = None
        if kept_rows is not None:
            if self.num_shared_layers:
                rows = self._run_shared_layers(rows, bounds)
            asked = self._ask_base(rows, kept_rows)
        model = cast(Any, self.model)
        with self.autocast():
            # A base's configuration may ask for all hidden states, which nobody reads here.
            asks = {"pool": model.predicts_next_sentence, "output_hidden_states": False}
            encoded, (states, *_) = model.encode(**rows, **bounds, masked_positions=batch.masked_positions, **asks)
            order = model.cls.seq_relationship(encoded.pooler_output) if model.predicts_next_sentence else None
        kept = None if asked is None or kept_rows is None else kept_rows.prediction_indices
        losses, predicted, divergences = self._score_chunks(states, batch.labels, batch.kinds, asked, kept)
        if not self.training:
            row_of = batch.masked_positions // batch.input_ids.shape[1]
            scores = _score_rows(losses, predicted == batch.labels, batch.weights, row_of, len(batch.input_ids))
            if batch.next_sentence_labels is None:
                return scores
            assert order is not None
            is_right = order.argmax(-1) == batch.next_sentence_labels
            return torch.cat([scores, torch.stack([is_right, batch.next_sentence_labels != NO_LABEL], 1).double()], 1)
        sums = {LOSS: (losses * batch.weights).sum()}
        if batch.next_sentence_labels is not None:
            assert order is not None
            sums[NEXT_SENTENCE_LOSS] = F.cross_entropy(order.float(), batch.next_sentence_labels, reduction="sum")
        if kept_rows is not None:
            kept_losses = divergences
            if asked is None:
                kept_losses = losses.index_select(0, kept_rows.prediction_indices)
            sums[KEEP_LOSS] = (kept_losses * kept_rows.weights).sum()
        if batch.parts is not None:
            sums[PART_LOSSES] = _sum_rows(losses.detach(), batch.parts, self.num_parts)
        return sums

    @contextlib.contextmanager
    def _as_base(self) -> Iterator[Any]:
        """The base, which predicts without dropout, gradients and, where it is the model itself, its extensions."""
        teacher = self.model if self.teacher is None else self.teacher
        bypass = bypass_extensions(teacher) if self.teaches_itself else contextlib.nullcontext()
        teacher.eval()
        with torch.no_grad(), bypass, self.autocast():
            yield teacher
        teacher.train(self.teaches_itself)

    def _run_shared_layers(self, rows: Mapping[str, Any], bounds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the layers that model and base share once for both; return rows as the next layer reads them."""
        end = self.num_shared_layers
        with torch.no_grad(), self.autocast():
            encoder = cast(Any, self.model).bert
            encoded = encoder(**rows, **bounds, pool=False, output_hidden_states=False, end_layer=end)
        words = dict.fromkeys(("input_ids", "token_type_ids"))
        return {**rows, **words, "inputs_embeds": encoded.last_hidden_state, "first_layer": end}

    def _ask_base(self, rows: Mapping[str, Any], asked: KeptRows) -> Tensor | None:
        """Return the base's states at the asked positions, [P', d]; None where it is not asked."""
        if self.teacher is None and not self.teaches_itself:
            return None
        own = {
            name: value.index_select(0, asked.rows) if isinstance(value, Tensor) else value
            for name, value in rows.items()
        }
        own |= {name: getattr(asked, name) for name in _BOUNDS}
        with self._as_base() as teacher:
            states: Tensor = teacher.encode(**own, masked_positions=asked.positions, output_hidden_states=False)[1][0]
        return states

    def _score_chunks(
        self, states: Tensor, labels: Tensor, kinds: Tensor | None, asked: Tensor | None, kept: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what `_score` does; the scores of one chunk stand at a time."""
        if self.num_chunks == 1:
            return self._score(states, labels, kinds, asked, kept)

        def cut(*rows: Tensor) -> Iterable[tuple[Tensor, ...]]:
            return zip(*(tensor.tensor_split(self.num_chunks) for tensor in rows), strict=True)

        score = functools.partial(checkpoint, self._score, use_reentrant=False, preserve_rng_state=False)
        parts = [score(*chunk, kinds) for chunk in cut(states, labels)]
        losses, predicted, divergences = map(torch.cat, zip(*parts, strict=True))
        if asked is not None and kept is not None:
            rows = cut(states.index_select(0, kept), labels.index_select(0, kept), asked)
            divergences = torch.cat([score(own, words, None, theirs)[2] for own, words, theirs in rows])
        return losses, predicted, divergences

    def _score(
        self,
        states: Tensor,
        labels: Tensor,
        kinds: Tensor | None,
        asked: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses [P], what is predicted [P] (in eval mode), divergences [P'] at some positions (None: all)."""
        with self.autocast():
            logits = _score_words(self.model, states)
        if kinds is not None:
            logits = _keep_kinds(logits, labels, kinds)
        losses = cast(Any, self.model).cls.predictions.compute_losses(logits, labels)
        # In training nobody looks at the predictions, and they cost a pass over [P, V].
        predicted = labels if self.training else logits.argmax(-1)
        if asked is None:
            return losses, predicted, losses[:0]
        own = logits if kept is None else logits.index_select(0, kept)
        own = own[:, : self.num_words].float().log_softmax(-1)
        with self._as_base() as teacher:
            theirs = _score_words(teacher, asked)[:, : self.num_words].float().log_softmax(-1)
        return losses, predicted, F.kl_div(own, theirs, reduction="none", log_target=True).sum(-1)


def _score_words(model: Any, states: Tensor) -> Tensor:
    """Return the scores of a model's words, [P, V], of states [P, d]; on a card some of -inf may stand behind them."""
    scores: Tensor = model.cls.predictions(states, model.bert.embeddings.adapters, keeps_filling=True)
    return scores


def _score_rows(losses: Tensor, is_exact: Tensor, weights: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return losses, exact predictions and predicted tokens of rows, float64 [B, 3], from those of positions [P]."""
    figures = losses * weights, is_exact & (weights > 0), weights > 0
    return torch.stack([_sum_rows(figure, rows, num_rows).double() for figure in figures], dim=1)


def _sum_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Add up values [P] by the row of each, to [num_rows]; without atomic additions, whose order is not fixed."""
    is_own = rows == torch.arange(num_rows, device=rows.device).unsqueeze(1)
    return torch.where(is_own, values, 0).sum(1)


def _keep_kinds(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Leave out the entries [P, V] that are of another kind than the label; rows without an entry are of kind 0."""
    kinds = F.pad(kinds, (0, logits.shape[-1] - len(kinds)))
    return logits.masked_fill(kinds != kinds[labels][:, None], -torch.inf)


def pool_states(states: Tensor, attention_mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return a vector for each row, fp32 [B, d], of states [B, N, d].

    "mean" is of all tokens, the special ones included; "cls" is the first token's state (Reimers and Gurevych 2019,
    "Sentence-BERT", section 3; as in sentence-transformers). The mask is [B, N], 0 for padding.
    """
    if pooling == "cls":
        return states[:, 0].float()
    if attention_mask is None:
        return states.float().mean(1)
    weights = attention_mask[..., None].float()
    return (states.float() * weights).sum(1) / weights.sum(1)


class InfoNCELoss(Loss):
    """InfoNCE: among the second views of its group, a row's own is nearest to its first view."""

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool, objective: ObjectiveConfig) -> None:
        super().__init__(model, device, bf16=bf16)
        self.objective = objective

    def make_empty(self) -> ViewBatch:
        """See `Loss.make_empty`."""
        rows = [np.zeros(8, dtype=np.int64)]
        return cast(ViewBatch, to_batch(pad_views(rows, rows, pad_id=0)).without_weight())

    def forward(self, batch: ViewBatch) -> dict[str, Tensor] | Tensor:
        """Return what `MaskedLoss` does, for rows in the place of words."""
        with self.autocast():
            encoder = cast(Any, self.model).bert
            masks = {name: getattr(batch, name) for name in ("attention_mask", "cu_seq_lens", "max_length")}
            states = encoder(batch.input_ids, pool=False, **masks).last_hidden_state
            vectors = pool_states(states, batch.attention_mask, self.objective.pooling)
        with torch.autocast(self.device_type, enabled=False):
            first, second = F.normalize(vectors).chunk(2)
            own = torch.arange(len(first), device=first.device)
            groups = own // self.objective.group_rows
            scores = ((first @ second.T) / self.objective.temperature).float()
            scores = scores.masked_fill(groups[:, None] != groups, -torch.inf)
        losses = F.cross_entropy(scores, own, reduction="none")
        if not self.training:
            return _score_rows(losses, scores.argmax(-1) == own, batch.weights, own, len(own))
        return {LOSS: (losses * batch.weights).sum()}


def make_loss(
    config: RunOptions,
    base: Base | None,
    model: nn.Module,
    fixed: Collection[str],
    device: torch.device,
    rows: Sequence[int],
) -> Callable[..., Loss]:
    """Return the loss of a run, for the engine to put around its model.

    A frozen base in the model costs nothing beside one more forward pass of the general rows. A method that changes the
    base, or wraps its matrices (LoRA), needs a copy; so does a run whose base an earlier one changed (`fixed`
    names the tensors). `rows` are those of a forward pass, by length phase.
    """
    if config.objective.makes_vectors:
        return functools.partial(InfoNCELoss, objective=config.objective)
    num_parts = len(config.texts) if config.parts else 0
    num_chunks = count_chunks(config, cast(Any, model).config.vocab_size, rows)
    loss = functools.partial(
        MaskedLoss, keep_weight=config.objective.keep_weight, num_parts=num_parts, num_chunks=num_chunks
    )
    if base is None or not needs_teacher(config):
        return loss
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    teacher = cast(DomextForMaskedLM, model)
    if not config.method.keeps_base or base.tensors.keys() & {*trained, *fixed}:
        teacher = build_base(base, device, config.engine, causal=config.objective.is_causal)
    return functools.partial(loss, teacher=cast(nn.Module, teacher), num_words=base.config.vocab_size)


def count_chunks(config: RunOptions, num_words: int, rows: Sequence[int]) -> int:
    """Return in how many chunks of positions a run scores `num_words` words (`MaskedLoss`); `rows`: see `make_loss`."""
    share = 1.0 if config.objective.is_causal else config.objective.mask_prob
    most = max(size * length for size, length in zip(rows, config.train.lengths, strict=True))
    return max(1, math.ceil(share * most * num_words / MAX_SCORES))


def needs_teacher(config: RunOptions) -> bool:
    """Whether the base is asked what it predicts."""
    return config.has_general_text and config.objective.keep == "kl"
