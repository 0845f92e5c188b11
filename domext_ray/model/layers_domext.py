"""Layers of the augmented BERT: the base's modules under Hugging Face's names, and the extensions beside them.

This file is exported as it is: it imports torch and transformers only. The base is frozen while extensions train, so
the two never share a matmul: joining their weights would compute the base's weight gradients only to throw them away.
Shapes: B rows, N tokens, d hidden size, h heads of size d_k = d / h, i extra heads, a extra FFN units, V words of the
base, E new words, h' and f' width and FFN units of an extension module.

AF Adapter section 3.2: extra heads are attended on their own, and `concat(base, extra) [W_O ⊥ W'_O]` is the sum of
two projections; likewise `GELU(x [W_1 : W'_1]) [W_2 ⊥ W'_2]`. Domain heads and units return their term of that sum.

exBERT section 3: `H_out = T_ofs(H)·σ(w(H)) + T_ext(H)·(1 - σ(w(H)))`, T_ofs the layer above, T_ext a smaller
transformer layer of the same kind, w a d -> 1 layer. New words have embeddings of their own, tied to their output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_domext import DomextConfig


def attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend without a fused kernel; the only implementation that returns attention weights.

    Args:
        module: says whether this is training.
        query: [B, heads, N, d_k].
        key: [B, heads, N, d_k].
        value: [B, heads, N, d_k].
        attention_mask: additive, broadcast to [B, heads, N, N], or None.
        scaling: factor of the scores.
        dropout: probability for the weights.
        **kwargs: what other implementations take.

    Returns:
        Context [B, N, heads, d_k] and weights [B, heads, N, N].
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(nn.functional.softmax(scores, dim=-1), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Linear(nn.Linear):
    """Linear layer whose weight may be stored in another dtype than it computes in (a frozen base kept in bf16)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the inputs' dtype or in autocast's."""
        weight = self.weight
        if weight.dtype != inputs.dtype and not torch.is_autocast_enabled(inputs.device.type):
            weight = weight.to(inputs.dtype)
        return nn.functional.linear(inputs, weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in its own dtype, so that the residual stream stays fp32 under autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., d] -> [..., d], in the dtype of this module's parameters."""
        return super().forward(inputs.to(self.weight.dtype))


class HeadGroup(nn.Module):
    """Some attention heads: projections to queries, keys and values, and attention, up to the output projection.

    Args:
        config: the model's configuration.
        num_heads: heads of this group.
        head_size: their size; 0: that of the base's heads.
    """

    is_causal = False

    def __init__(self, config: DomextConfig, num_heads: int, head_size: int = 0) -> None:
        super().__init__()
        self.config = config
        self.head_size = head_size or config.hidden_size // config.num_attention_heads
        self.query = Linear(config.hidden_size, num_heads * self.head_size)
        self.key = Linear(config.hidden_size, num_heads * self.head_size)
        self.value = Linear(config.hidden_size, num_heads * self.head_size)

    def attend(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this group's heads.

        Args:
            hidden_states: [B, N, d].
            attention_mask: as the attention implementation wants it, or None when nothing is padded.
            **kwargs: for the attention implementation.

        Returns:
            Context [B, N, heads · d_k], and attention weights where the implementation has them.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_size)
        query = self.query(hidden_states).view(shape).transpose(1, 2)
        key = self.key(hidden_states).view(shape).transpose(1, 2)
        value = self.value(hidden_states).view(shape).transpose(1, 2)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        context, weights = interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.head_size**-0.5,
            **kwargs,
        )
        return context.reshape(*hidden_states.shape[:-1], -1), weights


class SelfAttention(HeadGroup):
    """The base's heads (`attention.self`)."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config, config.num_attention_heads)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """See `HeadGroup.attend`."""
        return self.attend(hidden_states, attention_mask, **kwargs)


class ExtensionOutput(Linear):
    """Output projection of an extension: a class of its own, because it alone decides whether step 0 is the base."""


class DomainHeads(HeadGroup):
    """Extra heads of one domain, with rows W'_O and a bias b'_O of their own; returns [B, N, d]."""

    def __init__(self, config: DomextConfig, num_heads: int) -> None:
        super().__init__(config, num_heads)
        self.output = ExtensionOutput(num_heads * self.head_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Return this domain's term of the attention output."""
        return self.output(self.attend(hidden_states, attention_mask, **kwargs)[0])


class DomainUnits(nn.Module):
    """Extra FFN units of one domain: `GELU(x W'_1 + b'_1) W'_2 + b'_2`; [B, N, d] -> [B, N, d]."""

    def __init__(self, config: DomextConfig, num_units: int) -> None:
        super().__init__()
        self.input = Linear(config.hidden_size, num_units)
        self.output = ExtensionOutput(num_units, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return this domain's term of the FFN output."""
        return self.output(self.activation(self.input(hidden_states)))


def select_domains(config: DomextConfig, extensions: nn.ModuleDict) -> list[nn.Module]:
    """Return the extensions of the active domains, in the configuration's order."""
    active = config.domains if config.active_domains is None else config.active_domains
    return [extensions[name] for name in config.domains if name in active and name in extensions]


class SublayerOutput(nn.Module):
    """Output projection of a sublayer, then `LayerNorm(dropout(projection + extensions) + residual)`."""

    def __init__(self, config: DomextConfig, num_inputs: int) -> None:
        super().__init__()
        self.dense = Linear(num_inputs, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor, extensions: list[Tensor]) -> Tensor:
        """Join the base's term, the extensions' terms and the residual.

        Args:
            hidden_states: [B, N, num_inputs].
            residual: [B, N, d].
            extensions: terms [B, N, d]; exact zeros leave the base's result bit for bit.
        """
        projected = self.dense(hidden_states)
        for each in extensions:
            projected = projected + each
        return self.LayerNorm(self.dropout(projected) + residual)


class Attention(nn.Module):
    """Attention sublayer: the base's heads and those of the domains."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.config = config
        self.self = SelfAttention(config)
        self.output = SublayerOutput(config, config.hidden_size)
        heads = {name: DomainHeads(config, each["heads"]) for name, each in config.domains.items() if each["heads"]}
        self.domains = nn.ModuleDict(heads)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sublayer's output [B, N, d] and the base heads' attention weights, if any."""
        context, weights = self.self(hidden_states, attention_mask, **kwargs)
        terms = [each(hidden_states, attention_mask, **kwargs) for each in select_domains(self.config, self.domains)]
        return self.output(context, hidden_states, terms), weights


class Intermediate(nn.Module):
    """First FFN projection of the base, with its activation."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, intermediate_size]."""
        return self.activation(self.dense(hidden_states))


class Gate(nn.Linear):
    """`σ(w(H))`, the base's share of a layer's output, one number a token; [..., d] -> [..., 1] in 0 to 1."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Weigh the base's branch."""
        return torch.sigmoid(super().forward(hidden_states))


class ExtensionModule(nn.Module):
    """A smaller transformer layer beside the base's, and the gate that mixes the two (exBERT).

    Attention projects d -> h' -> d with the base's number of heads, the FFN d -> f' -> d; both LayerNorms have size d.
    The heads' size differs from the base's, so the two branches share the mask but not a kernel call.
    """

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        width, num_heads = config.module_hidden_size, config.num_attention_heads
        self.heads = HeadGroup(config, num_heads, width // num_heads)
        self.attention_output = SublayerOutput(config, width)
        self.intermediate = Linear(config.hidden_size, config.module_ffn_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = SublayerOutput(config, config.module_ffn_size)
        self.gate = Gate(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, base_output: Tensor, **kwargs: Any
    ) -> Tensor:
        """Mix the base's branch and this one.

        Args:
            hidden_states: [B, N, d], the layer's input.
            attention_mask: as in `HeadGroup.attend`.
            base_output: [B, N, d], what the base's layer made of `hidden_states`.
            **kwargs: for the attention implementation.

        Returns:
            [B, N, d].
        """
        context, _ = self.heads.attend(hidden_states, attention_mask, **kwargs)
        attended = self.attention_output(context, hidden_states, [])
        own_output = self.output(self.activation(self.intermediate(attended)), attended, [])
        return torch.lerp(own_output, base_output, self.gate(hidden_states).to(own_output.dtype))


class Layer(GradientCheckpointingLayer):
    """One encoder layer: attention, then FFN, each with the domains' terms; then the extension module, if any."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = SublayerOutput(config, config.intermediate_size)
        units = {
            name: DomainUnits(config, each["ffn_units"]) for name, each in config.domains.items() if each["ffn_units"]
        }
        self.domains = nn.ModuleDict(units)
        self.extension = ExtensionModule(config) if config.module_hidden_size else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, N, d] and the base heads' attention weights, if any."""
        attended, weights = self.attention(hidden_states, attention_mask, **kwargs)
        terms = [each(attended) for each in select_domains(self.config, self.domains)]
        output = self.output(self.intermediate(attended), attended, terms)
        if self.extension is not None:
            output = self.extension(hidden_states, attention_mask, output, **kwargs)
        return output, weights


class Embeddings(nn.Module):
    """Word, position and segment embeddings, summed and normalised."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.config = config
        num_words, num_new = config.base_vocab_size, config.extension_vocab_size
        self.word_embeddings = nn.Embedding(num_words, config.hidden_size, padding_idx=config.pad_token_id)
        self.extension = nn.Embedding(num_new, config.hidden_size) if num_new else None
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        """Return [B, N, d]; every argument is int64 [B, N] or None, `inputs_embeds` [B, N, d] or None."""
        words = self.embed_words(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            longest = self.config.max_row_length
            if words.shape[1] > longest:
                raise ValueError(f"a row has {words.shape[1]} tokens; the model has positions for {longest}.")
            position_ids = self._count_positions(input_ids, words)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        # Summed in the LayerNorm's dtype: tables stored in bf16 are rounded once, not again at every addition.
        embedded = words.to(self.LayerNorm.weight.dtype) + self.token_type_embeddings(token_type_ids)
        embedded = embedded + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embedded))

    def embed_words(self, input_ids: Tensor | None) -> Tensor:
        """Look words up in the base's table and in the new words'; int64 [B, N] -> [B, N, d]."""
        if self.extension is None:
            return self.word_embeddings(input_ids)
        assert input_ids is not None
        new_ids = input_ids - self.config.base_vocab_size
        is_new = new_ids >= 0
        known = self.word_embeddings(input_ids.masked_fill(is_new, self.config.pad_token_id))
        new = self.extension(new_ids.clamp_min(0))
        return torch.where(is_new[..., None], new, known.to(new.dtype))

    def _count_positions(self, input_ids: Tensor | None, words: Tensor) -> Tensor:
        if self.config.position_rule == "absolute":
            return torch.arange(words.shape[1], device=words.device)[None]
        pad = self.config.pad_token_id
        if input_ids is None:  # as in transformers: padding cannot be seen in embeddings
            return torch.arange(pad + 1, words.shape[1] + pad + 1, device=words.device)[None]
        is_token = input_ids.ne(pad).int()
        return (torch.cumsum(is_token, dim=1).type_as(is_token) * is_token).long() + pad


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        keep_states: bool = False,
        keep_weights: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Return the last hidden states [B, N, d]; all hidden states (L + 1) and attention weights (L) if kept."""
        states, weights = [hidden_states], []
        for layer in self.layer:
            hidden_states, attended = layer(hidden_states, attention_mask, **kwargs)
            if keep_states:
                states.append(hidden_states)
            if keep_weights:
                weights.append(attended)
        return hidden_states, tuple(states) if keep_states else None, tuple(weights) if keep_weights else None


class Pooler(nn.Module):
    """[CLS] -> dense -> tanh; [B, N, d] -> [B, d]."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Pool the first token."""
        return torch.tanh(self.dense(hidden_states[:, 0]))


class PredictionTransform(nn.Module):
    """Dense, activation and LayerNorm before the vocabulary projection."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.mlm_head_act or config.hidden_act]
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return self.LayerNorm(self.activation(self.dense(hidden_states)))


class PredictionHead(nn.Module):
    """MLM head: transform, then projections that are tied to the word embeddings; [..., d] -> [..., V + E]."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__()
        num_words, num_new = config.base_vocab_size, config.extension_vocab_size
        self.transform = PredictionTransform(config)
        self.decoder = Linear(config.hidden_size, num_words)
        self.bias = nn.Parameter(torch.zeros(num_words))
        self.extension = Linear(config.hidden_size, num_new) if num_new else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Score the base's words, then the new ones."""
        transformed = self.transform(hidden_states)
        logits = self.decoder(transformed)
        if self.extension is None:
            return logits
        return torch.cat([logits, self.extension(transformed)], dim=-1)


class PreTrainingHeads(nn.Module):
    """Holder that gives BERT's heads their Hugging Face names: `cls.predictions`, and `cls.seq_relationship` (NSP).

    Args:
        config: the model's configuration.
        next_sentence: with the next-sentence head.
    """

    def __init__(self, config: DomextConfig, *, next_sentence: bool) -> None:
        super().__init__()
        self.predictions = PredictionHead(config)
        self.seq_relationship = Linear(config.hidden_size, 2) if next_sentence else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Score the vocabulary; [..., d] -> [..., V + E]."""
        return self.predictions(hidden_states)
