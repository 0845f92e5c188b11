"""What a model is: one value without tensors that counts parameters, builds the model, and loads what was trained.

Enters: a base or the sizes of an encoder, a method, and what an objective asks for. A spec is made when a run is
planned, is completed when its tokenizer is there, and travels to whoever needs the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from domext_ray.config.extensions.table import EXTENSIONS
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, RunOptions, ShapeConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.base import Base
from domext_ray.model.budget import ParameterCounts, solve_budget
from domext_ray.model.build import (
    Extensions,
    attach_extensions,
    describe_method,
    prepare_for_device,
    store_base,
    trainable_names,
)
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining
from domext_ray.text.vocabulary.extension import base_token_ids, load_extension
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

CPU, META = torch.device("cpu"), torch.device("meta")
FP32 = EngineConfig(precision="fp32")
UNKNOWN_WORD = (0,)
"""The pieces of a new word that is still to be learned."""


@dataclass(frozen=True)
class ModelSpec:
    """An augmented model before its first step.

    A method that does not fit the base is a ConfigError.
    """

    base: Base | None  # None: random weights of `sizes`
    method: MethodConfig
    sizes: ShapeConfig = field(default_factory=ShapeConfig)
    vocab_size: int = 0  # words that the tokenizer has, the new ones not counted; 0: the base's
    new_words: Sequence[Sequence[int]] = ()  # the base's pieces of every extension word, for `method.word_init`
    next_sentence: bool = False  # it also predicts whether the second text follows the first, so it needs a pooler
    causal: bool = False  # tokens attend to those before them only
    reads_words: bool = True  # the objective reads the MLM head; else nothing of it trains
    pad_token_id: int = 0  # where there is no base
    earlier: Extensions = field(default_factory=Extensions)  # of the run that this one goes on from; they stay
    dropout: float = 0.0  # of hidden states
    attention_dropout: float | None = None  # None: as `dropout`
    seed: int = 0  # of everything that starts at random
    shape: DomextConfig = field(init=False, repr=False, compare=False)  # of the model; whoever changes it copies it

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self._describe())

    @classmethod
    def of(
        cls, config: RunOptions, base: Base | None, earlier: Extensions | None = None, num_new_words: int = 0
    ) -> ModelSpec:
        """Return the model of a run whose tokenizer is not there yet.

        `earlier` are extensions of the run that this one goes on from, or of its own checkpoint.
        """
        objective, train = config.objective, config.train
        return cls(
            base,
            config.method,
            config.shape,
            vocab_size=0 if base else config.vocab.size,
            new_words=(UNKNOWN_WORD,) * num_new_words,
            next_sentence=objective.next_sentence,
            causal=objective.is_causal,
            reads_words=objective.reads_words,
            earlier=earlier or Extensions(),
            dropout=train.dropout,
            attention_dropout=train.attention_dropout_prob,
            seed=config.seed,
        )

    def with_tokenizer(self, folder: Path) -> ModelSpec:
        """Return the model whose words are those of a run's tokenizer."""
        tokenizer, extension = load_tokenizer(folder), load_extension(folder)
        new_words: list[list[int]] = []
        if extension is not None:
            assert self.base is not None, "extension words stand beside a base"
            new_words = base_token_ids(self.base.tokenizer, extension.words)
        num_words = max(tokenizer.get_vocab().values()) + 1 - len(new_words)
        return replace(self, vocab_size=num_words, new_words=new_words, pad_token_id=cast(int, tokenizer.pad_token_id))

    def solve(self) -> ModelSpec:
        """Return the model with the sizes that its method's trainable budget asks for."""
        if self.base is None:
            return self
        heads, width = self.base.config.num_attention_heads, self.base.config.hidden_size

        def count(method: MethodConfig) -> ParameterCounts:
            return replace(self, method=method).counts

        return replace(self, method=solve_budget(self.method, count, num_heads=heads, hidden_size=width))

    @property
    def base_sha256(self) -> str:
        """The hash of the base's tensors; "none" without a base."""
        return self.base.sha256 if self.base else "none"

    @property
    def begins_as_base(self) -> bool:
        """Whether it predicts before its first step what its base does, which new words and modules would change."""
        method, has_head = self.method, self.base is not None and self.base.has_mlm_head
        return has_head and method.init == "zero" and not (self.new_words or method.module_hidden_size)

    @cached_property
    def counts(self) -> ParameterCounts:
        """How many parameters it has, and trains, counted on a model without values."""
        model = self.build(META)
        params = dict(model.named_parameters())
        sizes = {name: param.numel() for name, param in params.items()}
        trained = [name for name, param in params.items() if param.requires_grad]
        kinds = {
            type(extension).__name__: sum(sizes[name] for name in trained if extension.parameters.search(name))
            for extension in EXTENSIONS
        }
        encoder = sum(size for name, size in sizes.items() if name.startswith("bert."))
        return ParameterCounts(sum(sizes.values()), sum(sizes[name] for name in trained), encoder, kinds)

    def build(self, device: torch.device = CPU) -> DomextForMaskedLM:
        """Make the model, with `requires_grad` set by the method's rule; torch's own generator is left as it was.

        On the device `meta` it has no values.
        """
        make, config = DomextForPreTraining if self.next_sentence else DomextForMaskedLM, copy.deepcopy(self.shape)
        if device.type == "meta":
            with device, initialization.no_init_weights():
                model = make(config)
                cast(PreTrainedModel, model).tie_weights()  # the initialisation would have
                attach_extensions(cast(nn.Module, model), self.method)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(self.seed)  # torch.manual_seed would also reseed every GPU
                model = make(config)
                after_model = torch.random.get_rng_state()
            self._start_from_base(model)
            with torch.random.fork_rng(devices=[]):
                torch.random.set_rng_state(after_model)
                attach_extensions(cast(nn.Module, model), self.method)
        heads = self.base.heads if self.base else ()
        names = trainable_names(model, self.method, heads, reads_words=self.reads_words)
        for name, param in model.named_parameters():
            param.requires_grad_(name in names)
        return model

    def load(self, tensors: Mapping[str, Tensor], source: object) -> DomextForMaskedLM:
        """Build the model and put over it what was trained, all of it; `source` is where that is from, for messages."""
        model = self.build()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        missing = {name for name, param in model.named_parameters() if param.requires_grad} - tensors.keys()
        if wrong := missing | {name for name, tensor in tensors.items() if tensor.shape != shapes.get(name)}:
            raise RunError(f"{source} does not fit the model that config.yaml describes (first at {min(wrong)}).")
        model.load_state_dict(tensors, strict=False)
        return model

    def _describe(self) -> DomextConfig:
        """The configuration of the model."""
        base, sizes = self.base, self.sizes
        if base is None:
            config = DomextConfig(
                vocab_size=self.vocab_size,
                pad_token_id=self.pad_token_id,
                num_hidden_layers=sizes.num_hidden_layers,
                hidden_size=sizes.hidden_size,
                num_attention_heads=sizes.num_attention_heads,
                intermediate_size=sizes.intermediate_size,
                max_position_embeddings=sizes.max_position_embeddings,
            )
        else:
            config = copy.deepcopy(base.config)
        describe_method(config, self.method, self.earlier)
        config.causal = self.causal
        config.extension_vocab_size = len(self.new_words)
        config.vocab_size += len(self.new_words)
        if self.next_sentence:
            if config.type_vocab_size < 2:
                raise ConfigError(
                    f"--objective.next_sentence is True; the base {base.id if base else 'none'!r} has "
                    f"{config.type_vocab_size} segment type and pairs need two, so it must be false."
                )
            config.has_pooler = True
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = self.dropout
        if self.attention_dropout is not None:
            config.attention_probs_dropout_prob = self.attention_dropout
        return config

    def _start_from_base(self, model: DomextForMaskedLM) -> None:
        """Put the base into a model; without one, positions may start from sinusoids."""
        if self.base is not None:
            model.load_state_dict(self.base.tensors, strict=False)
            if self.method.word_init == "subword_mean" and self.new_words:
                _start_from_pieces(model, self.new_words)
        elif self.sizes.position_init == "sinusoidal" and model.bert.embeddings.position_embeddings is not None:
            _start_from_sinusoids(model.bert.embeddings.position_embeddings.weight, self.shape.initializer_range)


def build_base(
    base: Base, device: torch.device, engine: EngineConfig = FP32, *, causal: bool = False
) -> DomextForMaskedLM:
    """Make a model of the base alone, frozen, for the precision in which it is asked."""
    model = ModelSpec(
        base, MethodConfig(name="base", trains="layer_norms", heads=0, ffn_units=0), causal=causal
    ).build()
    cast(nn.Module, model).requires_grad_(False)
    prepare_for_device(model, device, bf16=engine.uses_bf16)
    cast(nn.Module, model).to(device)
    if engine.has_narrow_base:
        store_base(model, torch.bfloat16)
    return model


def _start_from_sinusoids(table: Tensor, scale: float) -> None:
    """Fill a learned position table with sinusoids of root mean square `scale` (Vaswani et al. 2017, section 3.5).

    From random positions a small model stays at word frequencies for millions of tokens, because "the next token" must
    be learned for every place on its own; between sinusoids it is one linear map.
    """
    places = torch.arange(table.shape[0], dtype=torch.float32)[:, None]
    width = table.shape[1] + table.shape[1] % 2
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / table.shape[1]))
    waves = torch.stack([torch.sin(places * rates), torch.cos(places * rates)], dim=-1).flatten(1)
    with torch.no_grad():
        table.copy_(waves[:, : table.shape[1]] * scale * math.sqrt(2.0))


def _start_from_pieces(model: DomextForMaskedLM, new_words: Sequence[Sequence[int]]) -> None:
    """Start each new word's embedding from the mean of the base's pieces of it."""
    extension, known = model.bert.embeddings.extension, model.bert.embeddings.word_embeddings.weight
    assert extension is not None
    with torch.no_grad():
        for row, pieces in enumerate(new_words):
            extension.weight[row] = known[torch.tensor(pieces)].float().mean(dim=0)
