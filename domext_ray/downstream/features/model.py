"""The feature-based use of an encoder: stored outputs of its layers -> BiLSTM -> a task's head.

Enters: features [B, N, K, d], the outputs of K layers of a frozen encoder. Leaves: the task's logits, from the same
head as in fine-tuning, with a BiLSTM in the encoder's place. BERT section 5.3 (the last four layers concatenated, a
BiLSTM of two layers and width 768); ELMo section 3.2 (learned weighted mean).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from domext_ray.config.finetune import FeaturesConfig, FinetuneConfig
from domext_ray.downstream.start.model import StartModel, describe_task_model
from domext_ray.downstream.tasks.task import Task
from domext_ray.errors import ConfigError
from domext_ray.model.domext import heads_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextPreTrainedModel


class ScalarMix(nn.Module):
    """γ · Σ softmax(w)_k h_k over K layers; it starts as their mean.

    Args:
        num_states: K.

    Source: Peters et al., "Deep Contextualized Word Representations", NAACL 2018, equation 1.
    """

    def __init__(self, num_states: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_states))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, states: Tensor) -> Tensor:
        """[B, N, K, d] -> [B, N, d]."""
        return self.scale * torch.einsum("bnkd,k->bnd", states, self.weights.softmax(0))


class FeatureEncoder(nn.Module):
    """What stands in the encoder's place: features are combined and read by a BiLSTM.

    Args:
        feature_shape: K and d of the features.
        features: how they are combined, and the BiLSTM's size.
        dropout: before the BiLSTM and between its layers, 0 to 1.
    """

    def __init__(self, feature_shape: tuple[int, int], features: FeaturesConfig, dropout: float) -> None:
        super().__init__()
        num_states, width = feature_shape
        self.mix = ScalarMix(num_states) if features.combine == "mix" else None
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            width if features.combine == "mix" else num_states * width,
            features.hidden_size // 2,
            num_layers=features.num_layers,
            dropout=dropout if features.num_layers > 1 else 0.0,
            batch_first=True,
            bidirectional=True,
        )

    def combine(self, features: Tensor) -> Tensor:
        """[B, N, K, d] -> [B, N, K·d], or [B, N, d] of a mean."""
        return features.flatten(2) if self.mix is None else self.mix(features)

    def forward(
        self, input_ids: Tensor | None = None, *, features: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> BaseModelOutputWithPooling:
        """Read rows in both directions, the backward one from the last token and not from padding.

        Args:
            input_ids: not read, as whatever else an encoder takes: the features know it.
            features: [B, N, K, d]; of choices [B / C, C, N, K, d].
            attention_mask: [B, N], 1 for tokens, then 0 for padding; None: nothing is padded.

        Returns:
            Last hidden states [B, N, hidden size], 0 in padding.
        """
        if features.ndim == 5:
            features = features.flatten(0, 1)
        states = self.dropout(self.combine(features))
        num_rows, num_tokens = states.shape[:2]
        # Rows are packed without padding too: autocast treats packed rows otherwise, and a row must not depend on
        # whether its neighbours are as long.
        lengths = torch.full((num_rows,), num_tokens)
        if attention_mask is not None:
            lengths = attention_mask.ne(0).sum(dim=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
        read, _lengths = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=num_tokens
        )
        return BaseModelOutputWithPooling(last_hidden_state=read)


def build_feature_model(start: StartModel, task: Task, config: FinetuneConfig, *, seed: int) -> DomextPreTrainedModel:
    """Make a task's head over features of a start model; all of it trains.

    Args:
        start: the encoder, of which nothing but its shape is taken.
        task: the task.
        config: the features' layers and the BiLSTM's size.
        seed: of the start of BiLSTM and head.

    Raises:
        ConfigError: the encoder has no such layer, or the task's rows are longer than its positions.
    """
    layers = config.features.layer_numbers
    described = describe_task_model(start, task, config.method, config.optim.dropout)
    check_layers(start, config.features)
    feature_shape = len(layers), int(described.hidden_size)
    _shrink(described, config.features.hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model: Any = getattr(heads_domext, task.head)(described)
        model.bert = FeatureEncoder(feature_shape, config.features, config.optim.dropout)
    return model


def check_layers(start: StartModel, features: FeaturesConfig) -> None:
    """Raise ConfigError unless the encoder has the layers whose outputs are features."""
    last = features.layer_numbers[-1]
    if last > start.config.num_hidden_layers:
        raise ConfigError(
            f"--features.layers is {features.layers!r}; {start.id!r} has {start.config.num_hidden_layers} layers, so "
            f"layer {last} is none of them."
        )


def _shrink(config: DomextConfig, hidden_size: int) -> None:
    """Leave of a model's configuration what its head reads: the head's class makes an encoder, which goes at once."""
    config.hidden_size, config.num_attention_heads, config.num_hidden_layers = hidden_size, 1, 0
    config.vocab_size, config.extension_vocab_size, config.pad_token_id = 1, 0, 0
    config.max_position_embeddings, config.position_rule = 1, "absolute"
    config.domains, config.active_domains = {}, None
    config.module_hidden_size = config.module_ffn_size = config.head_bilstm = 0
    config.has_pooler = config.causal = False  # a head that needs a pooler makes one, on [CLS]
