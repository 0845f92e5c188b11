"""What training makes small: a model and its losses as one module.

Enters: a batch's fields by name. Leaves: sums of losses, which whoever trains divides by their counts over the global
batch. BERT section 3.1: masked words, and whether the second text follows the first; Hinton et al. 2015: the base's
predictions, which the model keeps to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domext_ray.model.build import bypass_extensions
from domext_ray.training.objective import NO_LABEL, DistillRows, pad_batch


class Objective(nn.Module):
    """Model and loss as one module, so that DeepSpeed, autocast and the compiler see the whole forward pass.

    Its forward takes a batch's fields by name and returns first the sums of its losses (fp32 scalars; 0 for one that
    there is not), each of which the engine divides by its count over the global batch, then what else is looked at.

    Args:
        model: the model.
        device: where it is.
        bf16: run the forward pass under torch's autocast.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.device_type = device.type
        self.bf16 = bf16
        self.loss_weights: tuple[float, ...] = (1.0,)
        """A weight for each of its losses' means."""
        self.num_watched = 0
        """Sums that its last output has, [num_watched]: added up over the global batch, and nothing more."""

    def make_empty(self) -> Any:
        """Return a batch of which nothing counts: its gradient is 0 wherever there is one."""
        empty = pad_batch([np.zeros(8)], [np.zeros(8)], [np.zeros(8, dtype=bool)], pad_id=0)
        if getattr(self.model, "predicts_next_sentence", False):
            return replace(empty, next_sentence_labels=torch.full((1,), NO_LABEL))
        return empty


class MaskedLoss(Objective):
    """Pre-training: masked words; with pairs whether the second text follows the first; what is kept of the base.

    On rows of general text the model keeps to its base's predictions: KL(base || model) over the base's words, at the
    predicted positions (Hinton et al. 2015, with a temperature of 1); or it learns their masked words, as elsewhere.

    Args:
        model: the model.
        device: where it is.
        bf16: run the forward pass under torch's autocast.
        distill_weight: weight of the distillation term.
        teacher: the base: the model itself, which then predicts without its extensions, or a frozen copy; None: general
            text is learned.
        num_words: words of the base.
        num_parts: parts of a mixture, whose losses are watched; 0: there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        bf16: bool,
        distill_weight: float = 1.0,
        teacher: nn.Module | None = None,
        num_words: int = 0,
        num_parts: int = 0,
    ) -> None:
        super().__init__(model, device, bf16=bf16)
        self.num_watched = num_parts
        self.loss_weights = (1.0, 1.0, distill_weight)
        self.teaches_itself = teacher is model
        self.teacher = None if self.teaches_itself else teacher
        self.num_words = num_words

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        masked_positions: Tensor,
        labels: Tensor,
        weights: Tensor,
        next_sentence_labels: Tensor | None,
        distill_rows: DistillRows | None = None,
        kinds: Tensor | None = None,
        parts: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return sums of losses (fp32): words', pairs', distilled; exact predictions, in eval mode; losses by part."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        rows |= {} if document_ids is None else {"document_ids": document_ids}
        asked = self._ask_base(rows, distill_rows) if self.training else None
        with torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            # A base's configuration may ask for all hidden states, which nobody reads here.
            rows |= {"masked_positions": masked_positions, "token_indices": token_indices}
            outputs = self.model(**rows, output_hidden_states=False)
        logits = outputs[0] if kinds is None else _keep_kinds(outputs[0], labels, kinds)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        loss_sum = (losses * weights).sum()
        nothing = torch.zeros_like(labels[0])
        order_loss_sum, distill_loss_sum, num_in_order = torch.zeros_like(loss_sum), torch.zeros_like(loss_sum), nothing
        if next_sentence_labels is not None:
            order = outputs.seq_relationship_logits
            order_loss_sum = F.cross_entropy(order.float(), next_sentence_labels, reduction="sum")
            num_in_order = (order.argmax(-1) == next_sentence_labels).sum()
        if distill_rows is not None and asked is not None:
            distill_loss_sum = (self._compare(logits, asked, distill_rows) * distill_rows.weights).sum()
        elif distill_rows is not None:
            distill_loss_sum = (losses.index_select(0, distill_rows.prediction_indices) * distill_rows.weights).sum()
        watched = nothing if parts is None else self._sum_by_part(losses.detach(), parts)
        if self.training:  # nobody looks at the predictions, and they cost a pass over [P, V]
            return loss_sum, order_loss_sum, distill_loss_sum, nothing, nothing, watched
        num_correct = ((logits.argmax(-1) == labels) & (weights > 0)).sum()
        return loss_sum, order_loss_sum, distill_loss_sum, num_correct, num_in_order, watched

    def _sum_by_part(self, losses: Tensor, parts: Tensor) -> Tensor:
        """Sums of losses [P] by part, [num_parts]; without atomic additions, whose order is not fixed."""
        is_own = parts == torch.arange(self.num_watched, device=parts.device).unsqueeze(1)
        return torch.where(is_own, losses, 0.0).sum(1)

    def _ask_base(self, rows: Mapping[str, Tensor | None], asked: DistillRows | None) -> Tensor | None:
        """Return the base's log-probabilities at the asked positions, fp32 [P', V]; None where it is not asked."""
        if asked is None or (self.teacher is None and not self.teaches_itself):
            return None
        teacher = self.model if self.teacher is None else self.teacher
        own = {name: None if each is None else each.index_select(0, asked.rows) for name, each in rows.items()}
        bypass = bypass_extensions(teacher) if self.teaches_itself else contextlib.nullcontext()
        teacher.eval()
        with torch.no_grad(), bypass, torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.bf16):
            logits = teacher(**own, masked_positions=asked.positions)[0]
        teacher.train(self.teaches_itself)
        return logits[:, : self.num_words].float().log_softmax(-1)

    def _compare(self, logits: Tensor, base: Tensor, asked: DistillRows) -> Tensor:
        """KL(base || model) over the base's words, [P']."""
        own = logits.index_select(0, asked.prediction_indices)[:, : self.num_words].float().log_softmax(-1)
        return F.kl_div(own, base, reduction="none", log_target=True).sum(-1)


def _keep_kinds(logits: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
    """Leave out the entries [P, V] that are of another kind than the label; rows without an entry are of kind 0."""
    kinds = F.pad(kinds, (0, logits.shape[-1] - len(kinds)))
    return logits.masked_fill(kinds != kinds[labels][:, None], -torch.inf)
