"""Task heads on the encoder: tokens, rows, marked pairs, spans, answers and choices.

This file is exported as it is: it imports torch and transformers only. Every head calls the encoder `bert` and passes
it what it does not read itself, so `position_ids`, `adapter_names` and the like are as in `DomextModel`. transformers'
Trainer leaves out columns that a forward pass does not name, hence `token_type_ids` in each. With
`config.head_bilstm` a BiLSTM reads the encoder's states before the head does, those of `config.head_layers` where these
are given. Shapes: B rows, N tokens, d hidden size, C choices, T types, m size of a span's query and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import ModelOutput, can_return_tuple

from .configuration_domext import DomextConfig
from .layers_domext import Linear, Pooler
from .modeling_domext import DomextEncoderModel, DomextModel
from .routers_domext import Routers  # noqa: F401 - this and the next one: transformers 5.5 copies what a file itself
from .words_domext import Embeddings  # noqa: F401 - imports, and then misses what these do

SPAN_SIZE = 64
"""m: size of the query and the key by which a span's first and last token are scored."""


class ScalarMix(nn.Module):
    """γ · Σ softmax(w)_k h_k over K states; it starts as their mean.

    Source: Peters et al., "Deep Contextualized Word Representations", NAACL 2018, equation 1.
    """

    def __init__(self, num_states: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_states))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """K times [..., d] -> [..., d]."""
        return self.scale * torch.einsum("...dk,k->...d", torch.stack(list(states), dim=-1), self.weights.softmax(0))


class StateBiLSTM(nn.Module):
    """A BiLSTM over an encoder's states, and a projection back to their width.

    `dropout` is of what is read from a frozen encoder, and between the BiLSTM's layers.

    Source: BERT section 5.1 ("+ BiLSTM", over the last layer), section 5.3 (over several layers of a frozen encoder).
    """

    def __init__(self, config: DomextConfig, dropout: float) -> None:
        super().__init__()
        num_layers, num_states = config.head_bilstm_layers, max(1, len(config.head_layers))
        self.mix = ScalarMix(num_states) if config.head_mix else None
        self.dropout = nn.Dropout(dropout if config.head_layers else 0.0)
        self.lstm = nn.LSTM(
            config.hidden_size * (1 if config.head_mix else num_states),
            config.head_bilstm,
            num_layers=num_layers,
            dropout=dropout if num_layers > 1 else 0.0,
            batch_first=True,
            bidirectional=True,
        )
        self.dense = Linear(2 * config.head_bilstm, config.hidden_size)

    def forward(self, states: Sequence[Tensor], attention_mask: Tensor | None = None) -> Tensor:
        """Read K times [B, N, d] in both directions, the backward one from a row's last token, not from its padding."""
        inputs = self.dropout(torch.cat(list(states), dim=-1) if self.mix is None else self.mix(states))
        with torch.autocast(inputs.device.type, enabled=False):  # a GPU's makes LSTMs fp16
            read = self._read(inputs.to(self.lstm.weight_ih_l0.dtype), attention_mask)
        return self.dense(read)

    def _read(self, inputs: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is None:
            return self.lstm(inputs)[0]
        lengths = attention_mask.ne(0).sum(dim=1).clamp_min(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=inputs.shape[1])[0]


class DomextHeadModel(DomextEncoderModel):
    """What the heads share: they load an export of a masked LM and leave its vocabulary projection out.

    A head is what scores states and computes a loss; one that reads more has a forward pass of its own.
    """

    _keys_to_ignore_on_load_unexpected = [r"^cls\."]
    output_class: type[ModelOutput] = SequenceClassifierOutput

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.bert = DomextModel(config)
        self.num_labels = int(config.num_labels or 2)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.bilstm = StateBiLSTM(config, rate) if config.head_bilstm else None
        self.dropout = nn.Dropout(rate)

    def _encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, token_type_ids: Tensor | None, **kwargs: Any
    ) -> tuple[dict[str, Any], Tensor]:
        """Return what the encoder was asked for besides, and the states [B, N, d] that the head reads."""
        layers = self.config.head_layers
        if layers:
            kwargs["output_hidden_states"] = True
        encoded = self.bert(input_ids, attention_mask, token_type_ids, pool=False, **kwargs)
        asked: dict[str, Any] = {"hidden_states": encoded.hidden_states, "attentions": encoded.attentions}
        if self.bilstm is None:
            return asked, encoded.last_hidden_state
        states = [encoded.hidden_states[layer] for layer in layers] if layers else [encoded.last_hidden_state]
        return asked, self.bilstm(states, attention_mask)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Score rows; `labels`, see the class, give the mean loss. Other arguments are as in `DomextModel`."""
        asked, states = self._encode(input_ids, attention_mask, token_type_ids, **kwargs)
        logits = self._score(states, attention_mask)
        loss = None if labels is None else self._compute_loss(logits, labels)
        return self.output_class(loss=loss, logits=logits, **asked)

    def _score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class PooledHeadModel(DomextHeadModel):
    """A head on BERT's pooled [CLS]."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        # A base without a pooler gets a new one here: the classifier reads BERT's pooled [CLS].
        self.pooler = None if config.has_pooler else Pooler(config)

    def _pool(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        pooler = cast(Pooler, self.bert.pooler if self.pooler is None else self.pooler)
        return pooler(states, attention_mask)


class DomextForTokenClassification(DomextHeadModel):
    """The encoder with a classifier on every token; `labels` are int64 [B, N], -100 is ignored."""

    output_class = TokenClassifierOutput

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classifier(self.dropout(states))


class DomextForSequenceClassification(PooledHeadModel):
    """The encoder, BERT's pooler and a classifier or regressor on the whole row.

    The loss follows config.problem_type, as in transformers.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def _score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.classifier(self.dropout(self._pool(states, attention_mask)))

    def _compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem: str | None = self.config.problem_type
        if problem is None:
            is_class = labels.dtype in (torch.long, torch.int)
            single = "single_label_classification" if is_class else "multi_label_classification"
            problem = "regression" if self.num_labels == 1 else single
        if problem == "regression":
            return nn.functional.mse_loss(logits.squeeze(-1) if self.num_labels == 1 else logits, labels.float())
        if problem == "multi_label_classification":
            return nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        return super()._compute_loss(logits, labels)


class DomextForRelationClassification(DomextHeadModel):
    """The encoder and a classifier on [CLS] and the two marks that open a row's marked stretches.

    Source: Baldini Soares et al., "Matching the Blanks", ACL 2019 (entity start); the [CLS] state beside them and the
    tanh layer as in Wu and He, "Enriching Pre-trained Language Model with Entity Information", CIKM 2019.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.dense = nn.Linear(3 * config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        entity_positions: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify the relation between two marked stretches; other arguments are as in `DomextModel`.

        `entity_positions`, int64 [B, 2], are the indices of the first and the second stretch's opening mark; `labels`,
        int64 [B], give the mean loss.
        """
        if entity_positions is None:
            raise ValueError("give entity_positions: the places of the two opening marks of every row.")
        asked, states = self._encode(input_ids, attention_mask, token_type_ids, **kwargs)
        indices = torch.cat([torch.zeros_like(entity_positions[:, :1]), entity_positions], dim=1)  # [CLS] is first
        read = states.gather(1, indices[..., None].expand(-1, -1, states.shape[-1])).flatten(1)
        logits = self.classifier(self.dropout(torch.tanh(self.dense(read))))
        loss = None if labels is None else self._compute_loss(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, **asked)


class DomextForSpanClassification(DomextHeadModel):
    """The encoder and a score for every span of tokens and every type: entities that nest and overlap.

    s(i, j, type) = q_i·k_j / √m + (a_i,type + b_j,type) / 2, where q and k have rotary positions: one query and key for
    all types, so that a type costs 4m parameters. Spans above 0 are entities.

    Logits are [B, T, N, N] by type, first and last token; where the last comes before the first or one of them is
    padding, the lowest number of the dtype. `labels`, bool of their shape, are True where tokens i to j, both included,
    are an entity of the type, and give the mean loss over rows and types.

    Source: Su et al., "Global Pointer: Novel Efficient Span-based Approach for Named Entity Recognition",
    arXiv:2208.03054 (2022), Efficient GlobalPointer.
    """

    output_class = TokenClassifierOutput

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.span_dense = nn.Linear(config.hidden_size, 2 * SPAN_SIZE)
        self.type_dense = nn.Linear(2 * SPAN_SIZE, 2 * self.num_labels)
        self.post_init()

    def _score(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        projected = self.span_dense(self.dropout(states))
        query, key = rotate(projected[..., :SPAN_SIZE]), rotate(projected[..., SPAN_SIZE:])
        spans = torch.matmul(query, key.transpose(1, 2)) / SPAN_SIZE**0.5
        first, last = (self.type_dense(projected) / 2).transpose(1, 2).chunk(2, dim=1)
        logits = spans[:, None] + first[..., None] + last[:, :, None]
        is_span = torch.ones(spans.shape[1:], dtype=torch.bool, device=spans.device).triu()
        if attention_mask is not None:
            is_token = attention_mask.bool()
            is_span = (is_span & is_token[:, :, None] & is_token[:, None])[:, None]
        return logits.masked_fill(~is_span, torch.finfo(logits.dtype).min)

    def _compute_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return compute_zlpr(logits, labels).mean()


def rotate(states: Tensor) -> Tensor:
    """Rotate states [B, N, m] by their positions, so that a product of two knows how far apart they are; m is even.

    Source: Su et al., "RoFormer", arXiv:2104.09864 (2021), section 3.4.2, with pairs of neighbours.
    """
    size = states.shape[-1]
    positions = torch.arange(states.shape[1], device=states.device, dtype=torch.float32)
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=states.device, dtype=torch.float32) / size)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    even, odd = states[..., ::2], states[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def compute_zlpr(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of scores whose threshold is 0, for each row and type.

    log(1 + Σ_negative e^s) + log(1 + Σ_positive e^-s): unlike binary cross-entropy it does not need the few spans that
    are entities weighted against the many that are none.

    Args:
        logits: [B, T, N, N].
        labels: bool, as `logits`.

    Returns:
        fp32 [B, T], nats.

    Source: Su et al., "ZLPR: A Novel Loss for Multi-label Classification", arXiv:2208.02955 (2022).
    """
    scores, is_entity = logits.float().flatten(2), labels.bool().flatten(2)
    lowest = torch.finfo(scores.dtype).min
    zero = scores.new_zeros(*scores.shape[:2], 1)
    negative = torch.cat([scores.masked_fill(is_entity, lowest), zero], dim=-1)
    positive = torch.cat([(-scores).masked_fill(~is_entity, lowest), zero], dim=-1)
    return negative.logsumexp(-1) + positive.logsumexp(-1)


class DomextForQuestionAnswering(DomextHeadModel):
    """The encoder and a score for every token as the answer's first and as its last.

    Source: Devlin et al., "BERT", NAACL 2019, section 4.2; names as in transformers' BertForQuestionAnswering.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Score the answer's first and last token; other arguments are as in `DomextModel`.

        `start_positions` and `end_positions`, int64 [B], are the indices of the first and the last token, and give the
        mean loss; those outside the row are left out of it. `start_logits` and `end_logits` are [B, N].
        """
        asked, states = self._encode(input_ids, attention_mask, token_type_ids, **kwargs)
        start, end = self.qa_outputs(states).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            outside = start.shape[1]
            losses = [
                nn.functional.cross_entropy(logits, labels.view(-1).clamp(0, outside), ignore_index=outside)
                for logits, labels in ((start, start_positions), (end, end_positions))
            ]
            loss = (losses[0] + losses[1]) / 2
        return QuestionAnsweringModelOutput(loss, start.contiguous(), end.contiguous(), **asked)


class DomextForMultipleChoice(PooledHeadModel):
    """The encoder, BERT's pooler and one score for every choice.

    Source: Devlin et al., "BERT", NAACL 2019, section 4.4; names as in transformers' BertForMultipleChoice.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """Score choices [B, C]; the encoder sees each as a row of its own.

        `input_ids`, `attention_mask`, `token_type_ids` and `position_ids` are [B, C, N], `inputs_embeds` [B, C, N, d];
        `adapter_names` are B names. `labels`, int64 [B], is the right choice, and gives the mean loss.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None:
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        num_choices = given.shape[1]
        # A router reads all choices of an example as one row.
        own = self.bert.name_rows(adapter_names, None if input_ids is None else input_ids.flatten(1))
        names = None if own is None else [name for name in own for _ in range(num_choices)]
        rows = {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        rows |= {"input_ids": input_ids, "attention_mask": attention_mask}
        joined = {key: None if value is None else value.flatten(0, 1) for key, value in rows.items()}
        asked, states = self._encode(**joined, adapter_names=names, **kwargs)
        logits = self.classifier(self.dropout(self._pool(states, joined["attention_mask"]))).view(-1, num_choices)
        loss = None if labels is None else self._compute_loss(logits, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, **asked)
