"""The augmented encoder as transformers models: encoder, masked LM, pre-training; heads_domext.py has the tasks' heads.

This file is exported as it is: it imports torch and transformers only. Base parameters have Hugging Face BERT's names;
extensions stand under `adapters.<name>` (heads, units and bottlenecks) and `extension` (modules and new words). In
masked-LM training the vocabulary projection runs on the predicted positions only (`masked_positions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import (
    and_masks,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    packed_sequence_mask_function,
    sliding_window_bidirectional_overlay,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from .configuration_domext import DomextConfig, check_active, check_scale, complete_adapter
from .layers_domext import (
    VARLEN,
    AdapterPlace,
    BottleneckInput,
    BottleneckOutput,
    DeltaProjection,
    Encoder,
    Gate,
    NormShift,
    Padding,
    Pooler,
    compute_cos_sin,
    take_tokens,
    to_autocast_dtype,
)
from .routers_domext import ROUTER_PAIRS, Router, Routers, choose_adapters
from .words_domext import Embeddings, HeadShift, PredictionHead, PreTrainingHeads, WordShift

BASE_NAME = "__base__"
"""The name in `adapter_names` of a row that uses no adapter of its own."""
AUTO = "auto"
"""`adapter_names` of a batch whose rows the adapters' routers send."""
MAX_OUTPUT_FRAC = 0.5
"""Share of a batch's tokens up to which the last layer leaves the others out; above it, picking them saves little."""
_NO_ROUTER = "a run with general text (--replay.corpus) fits one."


class DomextPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by all heads."""

    config_class = DomextConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Embeddings", "Layer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The loss is this batch's mean; without this, transformers' Trainer would expect a sum over accumulation steps.
    accepts_loss_kwargs = False
    _input_embed_layer = "word_embeddings"

    def get_input_embeddings(self) -> nn.Module:
        """Return the words as the model reads them: `get_input_embeddings()(input_ids)` are the rows' `inputs_embeds`.

        `weight` is [V + E, d]. Where adapters shift words, or there are new ones, it is computed of several tables, by
        whose names they train; else the module is the base's table.
        """
        embeddings = self._embeddings
        return embeddings.words if embeddings.has_more_words else embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the base's word embedding table; shifts and new words stay."""
        embeddings = self._embeddings
        if value in (embeddings.words, embeddings.word_embeddings):
            return
        if not embeddings.has_more_words:
            super().set_input_embeddings(value)
            return
        self._check_base_rows(value)
        embeddings.word_embeddings.weight = value.weight  # type: ignore[assignment]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize the word embeddings as transformers does; to the words that there are, it changes nothing.

        Raises:
            ValueError: new words, whose ids come last, or shifted ones would go.
        """
        embeddings = self._embeddings
        if not embeddings.has_more_words:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        multiple = pad_to_multiple_of or 1
        size = -(-(self.config.vocab_size if new_num_tokens is None else new_num_tokens) // multiple) * multiple
        if size != self.config.vocab_size:
            self._make_resizable(size)
            table = embeddings.word_embeddings.weight
            is_trained = table.requires_grad
            super().resize_token_embeddings(size, mean_resizing=mean_resizing)
            table.requires_grad_(is_trained)  # it would train where shifts do
        return cast(nn.Embedding, embeddings.words)

    def _make_resizable(self, size: int) -> None:
        """Have adapters that shift all words list them, for a table of more words; refuse one that lacks some."""
        num_words, num_new = self.config.vocab_size, self.config.extension_vocab_size
        if num_new:
            raise ValueError(
                f"the model has {num_words} words, of which the last {num_new} are an extension's, in a table of their "
                f"own; resizing it to {size} would lose them. "
                "Append words in a training run that goes on from this model's (--vocab.words, --init_from)."
            )
        shifts = cast(dict[str, WordShift], self._embeddings.adapters)
        for name, shift in shifts.items():
            if size <= (last := num_words - 1 if shift.rows is None else int(shift.rows[-1])):
                raise ValueError(
                    f"the adapter {name!r} shifts words up to the id {last}; resizing the table to {size} would lose "
                    f"some. Give {last + 1} or more."
                )
        for shift in shifts.values():
            if shift.rows is None:
                shift.rows = torch.arange(num_words, device=shift.weight.device)

    def _get_resized_embeddings(self, old_embeddings: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the base's table in the place of all words."""
        is_all = old_embeddings is self._embeddings.words
        table = self._embeddings.word_embeddings if is_all else old_embeddings
        return super()._get_resized_embeddings(table, *args, **kwargs)

    def _check_base_rows(self, module: nn.Module) -> None:
        weight, expected = getattr(module, "weight", None), self.config.base_vocab_size
        rows = len(weight) if isinstance(weight, nn.Parameter) else "no"
        if rows != expected:
            raise ValueError(
                f"the table has {rows} rows; it must have the base's {expected}. Shifts of words and new words have "
                "tables of their own, which stay."
            )

    @property
    def _embeddings(self) -> Embeddings:
        return cast(DomextModel, self.base_model).embeddings

    def set_active_adapters(self, names: Sequence[str] | None) -> None:
        """Say which adapters take part in the forward pass; None: all of them; []: none, which is the base.

        Raises:
            ValueError: there is no adapter of a name, or none at all: new words and gated modules always take part.
        """
        if names is not None and not self.config.adapters:
            raise ValueError("the model has no adapters to choose from; for the base's own scores load the base.")
        check_active(list(names or ()), self.config.adapters)
        self.config.active_adapters = None if names is None else list(names)

    def set_adapter_scale(self, name: str, scale: float) -> None:
        """Say how much of an adapter takes part: all that it adds, shifts of LayerNorms and words too, times `scale`.

        It is saved with the model.

        Args:
            name: the adapter.
            scale: 1: as it was trained; 0: the base, bit for bit, as far as this adapter goes; 0 or more.

        Raises:
            ValueError: there is no such adapter, the scale is none, or the model has new words or gated modules.
        """
        config = self.config
        check_active([name], config.adapters)
        found = "new words" if config.extension_vocab_size else "gated modules" if config.module_hidden_size else ""
        if found and scale != 1:
            raise ValueError(f"scale is {scale}; it must be 1 in a model with {found}, which have no scale.")
        check_scale(name, float(scale))
        config.adapters = {**config.adapters, name: replace(config.adapters[name], scale=float(scale))}

    @torch.no_grad()
    def attach_adapter(self, name: str, **description: Any) -> None:
        """Add an adapter at its start, on the device and in the dtype of the model; it becomes active.

        Args:
            name: letters, digits and underscores.
            **description: sizes and layers, as in `DomextConfig.adapters`.

        Raises:
            ValueError: the name is taken, or the description does not fit the model.
        """
        config = self.config
        if name in config.adapters:
            raise ValueError(f"the model has an adapter {name!r} already; detach it or give another name.")
        adapter = complete_adapter(name, description, config.num_hidden_layers)
        config.adapters = dict(sorted({**config.adapters, name: adapter}.items()))
        if config.active_adapters is not None:
            config.active_adapters = [*config.active_adapters, name]
        for place in self._adapter_places():
            self._attach(place, name)

    def detach_adapter(self, name: str) -> None:
        """Take an adapter out of the model; ValueError: there is none of that name."""
        config = self.config
        check_active([name], config.adapters)
        config.adapters = {other: adapter for other, adapter in config.adapters.items() if other != name}
        if config.active_adapters is not None:
            config.active_adapters = [other for other in config.active_adapters if other != name]
        for place in self._adapter_places():
            place.detach_adapter(name)

    def _adapter_places(self) -> list[AdapterPlace]:
        return [module for module in self.modules() if isinstance(module, AdapterPlace)]

    def _attach(self, place: AdapterPlace, name: str) -> None:
        """Bring an adapter's part in a place to its start, on the device and in the dtype of the model."""
        if (part := place.attach_adapter(name)) is not None:
            like = self._embeddings.LayerNorm.weight
            part.to(like.device, like.dtype).train(self.training)
            for module in part.modules():
                self._init_weights(module)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        is_delta = isinstance(module, DeltaProjection) and self.config.adapter_init == "zero"
        if is_delta or isinstance(module, (HeadShift, NormShift, WordShift)):
            for param in module.parameters():
                init.zeros_(param)
        elif isinstance(module, PredictionHead):
            init.zeros_(module.bias)
        elif isinstance(module, Gate):
            init.constant_(module.bias, self.config.gate_bias)
        elif isinstance(module, (BottleneckInput, BottleneckOutput)) and self.config.adapter_init == "paper":
            std = self.config.bottleneck_std
            init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            init.zeros_(module.bias)


class DomextModel(DomextPreTrainedModel):
    """The encoder, with the base's pooler where it has one."""

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.router = Routers(config)
        self.pooler = Pooler(config) if config.has_pooler else None
        self.post_init()

    def set_router(self, name: str, table: Tensor, threshold: float) -> None:
        """Give an adapter a router, or another one; see `Router`.

        Args:
            name: the adapter.
            table: int32 [W + ROUTER_PAIRS], of W words of the base.
            threshold: log-odds from which a row is the adapter's.

        Raises:
            ValueError: there is no such adapter, or the table has another size.
        """
        check_active([name], self.config.adapters)
        num_words, most = len(table) - ROUTER_PAIRS, self.config.base_vocab_size
        if not 0 < num_words <= most:
            raise ValueError(
                f"a router's table has {len(table)} numbers; it must have one for each of up to {most} words and "
                f"{ROUTER_PAIRS} more."
            )
        self._describe_router(name, router_words=num_words, router_threshold=float(threshold))
        self._attach(self.router, name)
        cast(Router, self.router.adapters[name]).weight.copy_(table)

    def set_router_threshold(self, threshold: float, name: str | None = None) -> None:
        """Say from which log-odds on a row is an adapter's: higher leaves more rows to the base. It is saved.

        Args:
            threshold: see `route`.
            name: the adapter; None: every adapter that has a router.

        Raises:
            ValueError: no router is there.
        """
        names = self._list_routers() if name is None else [name]
        check_active(names, self.config.adapters)
        for adapter in names:
            if adapter not in self.router.adapters:
                raise ValueError(f"the adapter {adapter!r} has no router; {_NO_ROUTER}")
            self._describe_router(adapter, router_threshold=float(threshold))

    def _describe_router(self, name: str, **values: Any) -> None:
        adapters = self.config.adapters
        self.config.adapters = {**adapters, name: replace(adapters[name], **values)}

    def _list_routers(self) -> list[str]:
        if not self.router.adapters:
            raise ValueError(f"no adapter of the model has a router; {_NO_ROUTER}")
        return sorted(self.router.adapters)

    @torch.no_grad()
    def route(self, input_ids: Tensor, threshold: float | None = None) -> list[str]:
        """Find the adapter that each row belongs to, by the adapters' routers; it costs next to nothing.

        Args:
            input_ids: int64 [B, N]; padding, [MASK] and the like do not count.
            threshold: log-odds per word, from minus to plus infinity, from which a row is an adapter's; None: the
                adapters' own, `router_threshold` in their description.

        Returns:
            B names: of the adapters whose threshold a row reaches, the one that it exceeds most; "__base__" for a row
            that reaches none. Adapters without a router get no row.

        Raises:
            ValueError: no adapter has a router.
        """
        own = {name: self.config.adapters[name].router_threshold for name in self._list_routers()}
        limits = own if threshold is None else dict.fromkeys(own, threshold)
        return [name or BASE_NAME for name in choose_adapters(dict(self.router.adapters), limits, input_ids)]

    def name_rows(self, adapter_names: Sequence[str] | None, input_ids: Tensor | None) -> Sequence[str] | None:
        """Put the names that the routers find in the place of "auto"; other names stay as they are."""
        if adapter_names != AUTO:
            return adapter_names
        if input_ids is None:
            raise ValueError('adapter_names is "auto", and routers read input_ids; inputs_embeds are given.')
        return self.route(input_ids)

    def find_rows(self, adapter_names: Sequence[str] | None, num_rows: int) -> dict[str, Tensor] | None:
        """Return which rows use which adapter, by adapter; None without names."""
        if adapter_names is None:
            return None
        if len(adapter_names) != num_rows:
            raise ValueError(f"adapter_names has {len(adapter_names)} names; the batch has {num_rows} rows.")
        named = {i: name for i, name in enumerate(adapter_names) if name != BASE_NAME}
        check_active([*named.values()], self.config.adapters)
        active = self.config.active_adapters or ()
        used = dict.fromkeys([*named.values(), *(active if named else ())])
        rows = {name: [i for i, own in named.items() if own == name or name in active] for name in used}
        return {name: torch.tensor(indices).to(self.device, non_blocking=True) for name, indices in rows.items()}

    def _run_layers(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        output_indices: Tensor | None,
        token_indices: Tensor | None,
        sequences: dict[str, Any],
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Run the encoder over what the embeddings return, [B, N, d]; arguments and results are as in `Encoder`.

        `sequences` are for attention that needs neither masks nor padding; empty: it needs both.
        """
        config = self.config
        padding = Padding(token_indices, *embedded.shape[:2])
        masks = (None, None) if sequences else self._build_masks(embedded, attention_mask, document_ids)
        inputs: list[dict[str, Any]] = [{"attention_mask": mask} for mask in masks]
        if not config.has_position_table:
            if position_ids is None:
                position_ids = torch.arange(embedded.shape[1], device=embedded.device)[None]
            if sequences:
                position_ids = padding.unpad_input(position_ids.expand(embedded.shape[:2]))
            for values, theta in zip(inputs, (config.rope_theta, config.local_rope_theta), strict=True):
                values["cos_sin"] = compute_cos_sin(position_ids, config.head_size, theta)
                if module_size := config.module_hidden_size // config.num_attention_heads:
                    values["module_cos_sin"] = compute_cos_sin(position_ids, module_size, theta)
        if token_indices is None and not sequences:
            return self.encoder(embedded, *inputs, output_indices=output_indices, **kwargs)
        own = output_indices
        if token_indices is not None and output_indices is not None:
            own = torch.searchsorted(token_indices, output_indices)
        kwargs |= sequences or {"padding": padding}
        last, states, weights = self.encoder(padding.unpad_input(embedded), *inputs, output_indices=own, **kwargs)
        if output_indices is not None:
            return last, states, weights
        return padding.pad_input(last), states and tuple(map(padding.pad_input, states)), weights

    def _build_masks(
        self, embedded: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Any, Any]:
        """Return the masks of global and local layers, as the attention implementation wants them; None: sees all."""
        config, window, length = self.config, self.config.sliding_window, embedded.shape[1]
        embedded = to_autocast_dtype(embedded)  # the mask is added to the scores: of another dtype it would widen them
        values: dict[str, Any] = {"config": config, "inputs_embeds": embedded, "attention_mask": attention_mask}
        own = None if document_ids is None else packed_sequence_mask_function(document_ids)
        everywhere: Any = None
        nearby: Any = None
        asks = attention_mask is not None and attention_mask.dim() == 2 and own is None
        is_fused = config._attn_implementation in ("sdpa", VARLEN)
        if asks and is_fused:
            # transformers would ask whether anything is hidden, for which a GPU's host waits.
            everywhere, values["attention_mask"] = cast(Tensor, attention_mask).bool()[:, None, None], None
            if config.causal:
                everywhere = everywhere & everywhere.new_ones(length, length).tril()
        elif config.causal:
            everywhere = create_causal_mask(**values, past_key_values=None, and_mask_function=own)
        elif attention_mask is not None or own is not None:
            everywhere = create_bidirectional_mask(**values, and_mask_function=own)
        if window is None:
            return everywhere, None
        if config.causal:
            overlay = sliding_window_bidirectional_overlay(window)
            both = overlay if own is None else and_masks(overlay, own)
            nearby = create_causal_mask(**values, past_key_values=None, and_mask_function=both)
        else:
            nearby = create_bidirectional_sliding_window_mask(**values, and_mask_function=own)
        if values["attention_mask"] is not attention_mask:
            nearby = everywhere if nearby is None else nearby & everywhere
        if nearby is not None and attention_mask is not None and is_fused:
            # Padding far from every token would see nothing, and a softmax over nothing is nan.
            nearby = nearby | torch.eye(length, dtype=torch.bool, device=embedded.device)
        return everywhere, nearby

    def _count_positions(self, document_ids: Tensor) -> Tensor:
        """Positions of tokens in their documents, [B, N]."""
        if "flash" in (self.config._attn_implementation or ""):
            raise ValueError('document_ids need attn_implementation "sdpa", "eager" or "flex_attention".')
        indices = torch.arange(document_ids.shape[1], device=document_ids.device)
        begins = torch.nn.functional.pad(document_ids.diff(dim=1) != 0, (1, 0), value=True)
        positions = indices - torch.where(begins, indices, 0).cummax(1).values
        return positions + (self.config.pad_token_id + 1 if self.config.position_rule == "roberta" else 0)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        pool: bool = True,
        adapter_names: Sequence[str] | None = None,
        document_ids: Tensor | None = None,
        output_indices: Tensor | None = None,
        token_indices: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
        max_length: int = 0,
        first_layer: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode rows.

        Args:
            input_ids: int64 [B, N]; None with `inputs_embeds`.
            attention_mask: [B, N], 1 for tokens and 0 for padding; None when nothing is padded, which is faster.
            token_type_ids: int64 [B, N]; None: all 0. A layout without segment types does not read them.
            position_ids: int64 [B, N]; None: by the configuration's rule.
            inputs_embeds: float [B, N, d], in the place of `input_ids`: words as `get_input_embeddings()` returns them.
                As in transformers, positions by roberta's rule then count padding, too: pad on the right.
            output_hidden_states: also return the embeddings and every layer's output.
            output_attentions: also return the base heads' weights (attn_implementation="eager" only).
            pool: run the pooler, if the model has one.
            adapter_names: for each row the adapter that it uses, beside those that `config.active_adapters` lists, or
                "__base__" for none at all, as in peft: one batch serves many adapters. "auto": the adapters' routers
                choose (`route`). None: all rows use the active adapters.
            document_ids: int64 [B, N], which of its row's documents each token is of, neighbours together. A document
                does not see another, and its positions are its own. None: a row is one document.
            output_indices: int64 [P], in the flattened [B·N]: the last layer computes the states of these tokens only.
                It goes without `pool`, `output_hidden_states` and `adapter_names`. None: all tokens.
            token_indices: int64 [T], ascending, in the flattened [B·N]: at least all tokens that `attention_mask`
                shows. The layers leave the others out, whose states are then 0. It goes without `output_hidden_states`
                and `adapter_names`. None: padding is computed, too.
            cu_seq_lens: int32 [S + 1], read by attn_implementation "varlen": where sequences begin among the
                `token_indices`, or in the flattened [B·N], and where the last ends. They are rows, or documents, and
                stretches of padding. None, `adapter_names`, or attention dropout in training: "varlen" is "sdpa".
            max_length: tokens of the longest sequence.
            first_layer: run the layers from this one on; `inputs_embeds` are then what it reads.
            **kwargs: for the attention implementation; `num_layers`: run the first ones only; `end_layer`: run those
                before this one, and return what it reads.

        Returns:
            Last hidden states [B, N, d], or [P, d] with `output_indices`; pooled first token [B, d] if the model has a
            pooler; what was asked for.

        Raises:
            ValueError: a row is longer than the position table, or the arguments contradict each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        if first_layer and inputs_embeds is None:
            raise ValueError(f"first_layer is {first_layer}; give what that layer reads as inputs_embeds.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError('output_attentions needs attn_implementation="eager": fused attention keeps no weights.')
        given = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        if document_ids is not None and position_ids is None:
            position_ids = self._count_positions(document_ids)
        adapter_names = self.name_rows(adapter_names, input_ids)
        if inputs_embeds is not None and adapter_names is not None and self.embeddings.adapters:
            raise ValueError(
                "adapter_names says whose shifts of words each row has, and inputs_embeds are words already; give "
                "input_ids, or choose the adapters of all rows by set_active_adapters."
            )
        chosen = output_indices is not None or token_indices is not None
        if chosen and (output_hidden_states or adapter_names is not None or (pool and output_indices is not None)):
            raise ValueError(
                "output_indices and token_indices go without output_hidden_states and adapter_names, and "
                "output_indices without pool."
            )
        adapter_rows = self.find_rows(adapter_names, given.shape[0])
        if first_layer:
            embedded = given
        else:
            embedded = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, adapter_rows)
        sequences: dict[str, Any] = {"cu_seq_lens": cu_seq_lens, "max_length": max_length}
        is_dropped = self.training and self.config.attention_probs_dropout_prob > 0
        is_varlen = self.config._attn_implementation == VARLEN and not is_dropped
        last, states, weights = self._run_layers(
            embedded,
            attention_mask,
            position_ids,
            document_ids,
            output_indices,
            token_indices,
            sequences if is_varlen and cu_seq_lens is not None and adapter_rows is None else {},
            output_hidden_states=bool(output_hidden_states),
            output_attentions=bool(output_attentions),
            adapter_rows=adapter_rows,
            first_layer=first_layer,
            **kwargs,
        )
        return BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=self.pooler(last, attention_mask) if pool and self.pooler is not None else None,
            hidden_states=states,
            attentions=weights,
        )


class DomextEncoderModel(DomextPreTrainedModel):
    """A model around the encoder, `bert`."""

    bert: DomextModel

    @property
    def embeddings(self) -> Embeddings:
        """The encoder's, for peft, which looks for `embeddings.word_embeddings` to learn a prompt."""
        return self.bert.embeddings


class DomextForMaskedLM(DomextEncoderModel):
    """The encoder with BERT's masked-language-modelling head."""

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    _keys_to_ignore_on_load_unexpected = [r"cls\.seq_relationship\."]  # an export that was pre-trained with NSP
    predicts_next_sentence = False

    def __init__(self, config: DomextConfig) -> None:
        super().__init__(config)
        if config.extension_vocab_size:
            new_words = {"cls.predictions.extension.weight": "bert.embeddings.extension.weight"}
            self._tied_weights_keys = {**self._tied_weights_keys, **new_words}
        self.bert = DomextModel(config)
        self.cls = PreTrainingHeads(config, next_sentence=self.predicts_next_sentence)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the projection to the base's vocabulary: without shifts and new words, whose parts are beside it."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the projection to the base's vocabulary."""
        if self.config.extension_vocab_size:
            self._check_base_rows(new_embeddings)
        self.cls.predictions.decoder = new_embeddings  # type: ignore[assignment]
        self.cls.predictions.bias = new_embeddings.bias  # type: ignore[assignment]

    def encode(
        self,
        input_ids: Tensor | None,
        masked_positions: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        *,
        pool: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, tuple[Any, ...]]:
        """Encode rows; return also what `cls.predictions` reads to score words at all positions, or at some."""
        adapter_names = self.bert.name_rows(adapter_names, input_ids)
        output_indices = None
        given = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if masked_positions is not None and given is not None and adapter_names is None and not pool:
            keeps = kwargs.get("output_hidden_states")
            is_few = len(masked_positions) <= MAX_OUTPUT_FRAC * given.shape[0] * given.shape[1]
            if is_few and not (self.config.output_hidden_states if keeps is None else keeps):
                output_indices = masked_positions
        encoded = self.bert(input_ids, pool=pool, adapter_names=adapter_names, output_indices=output_indices, **kwargs)
        states = encoded.last_hidden_state
        adapter_rows = self.bert.find_rows(adapter_names, states.shape[0])
        if masked_positions is not None and output_indices is None:
            if adapter_rows is not None:  # from rows of the batch to those of the positions
                rows = masked_positions // states.shape[1]
                adapter_rows = {name: torch.isin(rows, used).nonzero().flatten() for name, used in adapter_rows.items()}
            states = take_tokens(states, masked_positions)
        return encoded, (states, self.bert.embeddings.adapters, adapter_rows)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Score the vocabulary at every position, or at some; other arguments are as in `DomextModel`.

        `masked_positions`, int64 [P] in the flattened [B·N], are those of which logits [P, V + E] are asked for;
        without them they are [B, N, V + E]. `labels`, int64 [P] or [B, N], give the mean loss; -100 is ignored.
        """
        encoded, states = self.encode(
            input_ids,
            masked_positions,
            adapter_names,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.cls.predictions(*states)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )


class DomextForPreTraining(DomextForMaskedLM):
    """The encoder with BERT's two pre-training heads: masked words, and whether the second text follows the first."""

    predicts_next_sentence = True

    def __init__(self, config: DomextConfig) -> None:
        if not config.has_pooler:
            raise ValueError("has_pooler is False; next-sentence prediction reads the pooled first token.")
        super().__init__(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        masked_positions: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BertForPreTrainingOutput:
        """Score the vocabulary and the order of two texts; arguments are as in `DomextForMaskedLM`.

        `next_sentence_label`, int64 [B], is 0 where the second text follows the first and 1 where it is from elsewhere.
        """
        encoded, states = self.encode(
            input_ids,
            masked_positions,
            adapter_names,
            pool=True,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            **kwargs,
        )
        logits = self.cls.predictions(*states)
        assert self.cls.seq_relationship is not None
        order = self.cls.seq_relationship(encoded.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
            loss = loss + nn.functional.cross_entropy(order.float(), next_sentence_label.view(-1))
        return BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=logits,
            seq_relationship_logits=order,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
