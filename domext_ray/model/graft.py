"""A base -> the augmented model; which parameters train; how many there are; the base back, bit for bit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import BertConfig, PreTrainedConfig, RobertaConfig

from domext_ray.config import MethodConfig, ShapeConfig
from domext_ray.errors import BaseModelError, ConfigError
from domext_ray.model.base import HEADS, MLM_HEAD, NEXT_SENTENCE_HEAD, POOLER, ROBERTA_HEAD, SHARED_FIELDS, Base
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.modeling_domext import DomextForMaskedLM, DomextForPreTraining

_EXTENSION = re.compile(r"\.(domains|extension)\.")


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of an augmented model, in closed form.

    Args:
        total: all of them, the MLM head included, tied ones once.
        trainable: those that the method trains.
        encoder: base and extensions, pooler in, MLM head out: the denominator of the papers' shares.
        num_hidden_layers: layers.
        hidden_size: width d.
    """

    total: int
    trainable: int
    encoder: int
    num_hidden_layers: int
    hidden_size: int

    @property
    def trainable_frac(self) -> float:
        """Trainable share of base + extension; of everything, where more than these trains."""
        return self.trainable / (self.encoder if self.trainable <= self.encoder else self.total)


def describe_shape(
    base: Base | None,
    shape: ShapeConfig,
    method: MethodConfig,
    *,
    vocab_size: int,
    num_new_words: int = 0,
    next_sentence: bool = False,
    pad_token_id: int = 0,
) -> DomextConfig:
    """Return the configuration of the augmented model.

    Args:
        base: the base, or None for random weights of `shape`.
        shape: encoder to make when there is no base.
        method: its extensions are added to the base.
        vocab_size: rows of the word embedding table when there is no base.
        num_new_words: extension words beside the base's.
        next_sentence: the model also predicts whether the second text follows the first, so it needs a pooler.
        pad_token_id: id of [PAD] when there is no base.

    Raises:
        ConfigError: an extension module does not fit the base's number of heads, or the base has one segment type
            and `next_sentence` needs two.
    """
    if base is None:
        config = DomextConfig(
            vocab_size=vocab_size,
            pad_token_id=pad_token_id,
            num_hidden_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position_embeddings,
        )
    else:
        config = DomextConfig(**_own_values(base.config))
    if method.has_domain:
        config.domains = {method.domain: {"heads": method.heads, "ffn_units": method.ffn_units}}
        config.domain_init = method.init
    if method.module_hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"--method.module_hidden_size is {method.module_hidden_size}; it must be divisible by the encoder's "
            f"{config.num_attention_heads} attention heads."
        )
    config.module_hidden_size, config.module_ffn_size = method.module_hidden_size, method.module_ffn_size
    config.gate_bias = method.gate_bias
    config.extension_vocab_size = num_new_words
    config.vocab_size += num_new_words
    if next_sentence:
        if config.type_vocab_size < 2:
            raise ConfigError(
                f"--objective.next_sentence is True; the base {base.id if base else 'none'!r} has "
                f"{config.type_vocab_size} segment type and pairs need two, so it must be false."
            )
        config.has_pooler = True
    return config


def _own_values(config: DomextConfig) -> dict[str, Any]:
    values = config.to_dict()
    return {name: value for name, value in values.items() if name not in ("transformers_version", "model_type")}


def build_model(
    base: Base | None,
    shape: ShapeConfig,
    method: MethodConfig,
    *,
    vocab_size: int,
    new_words: Sequence[Sequence[int]] = (),
    next_sentence: bool = False,
    pad_token_id: int = 0,
    dropout: float,
    seed: int,
) -> DomextForMaskedLM:
    """Make the augmented model, with `requires_grad` set by the method's rule.

    Args:
        base: the base, or None for random weights of `shape`.
        shape: encoder to make when there is no base.
        method: extensions, and the rule that says what trains.
        vocab_size: words that the tokenizer has, the new ones not counted.
        new_words: the base's pieces of every extension word, for `method.word_init`.
        next_sentence: make a `DomextForPreTraining`.
        pad_token_id: id of [PAD].
        dropout: of hidden states and attention weights.
        seed: of everything that starts at random; torch's own generator is left as it was.

    Raises:
        BaseModelError: the tokenizer has more entries than the base has rows.
    """
    config = describe_shape(
        base,
        shape,
        method,
        vocab_size=vocab_size,
        num_new_words=len(new_words),
        next_sentence=next_sentence,
        pad_token_id=pad_token_id,
    )
    if vocab_size > config.base_vocab_size:
        raise BaseModelError(
            f"the tokenizer has ids up to {vocab_size - 1}, the base {config.base_vocab_size} embeddings."
        )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        model = (DomextForPreTraining if next_sentence else DomextForMaskedLM)(config)
    if base is not None:
        missing, unexpected = model.load_state_dict(base.tensors, strict=False)
        assert not unexpected, unexpected
        assert all(is_extension(name) or name.startswith(HEADS) for name in missing), missing
        if method.word_init == "subword_mean" and new_words:
            _start_from_pieces(model, new_words)
    elif shape.position_init == "sinusoidal":
        _start_from_sinusoids(model.bert.embeddings.position_embeddings.weight, config.initializer_range)
    names = trainable_names(model, method, base.heads if base else ())
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
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


def is_extension(name: str) -> bool:
    """Whether a parameter belongs to an extension, by its name in the model."""
    return _EXTENSION.search(name) is not None


def trainable_names(model: DomextForMaskedLM, method: MethodConfig, heads: Collection[str]) -> set[str]:
    """Return the names of the parameters that a method trains.

    "extensions": these, and the heads that the base does not bring (`method.train_heads`: all heads, and the pooler
    if something reads it), never the base's word embeddings, which the MLM head shares. "all": everything that has a
    gradient; the pooler has none under masked-language modelling alone.

    Args:
        model: the augmented model.
        method: the rule.
        heads: those of `HEADS` that the base brings.
    """
    unread = () if model.predicts_next_sentence else (POOLER,)
    names = {name for name, _ in model.named_parameters() if not name.startswith(unread)}
    if method.trains == "all":
        return names
    trained = HEADS if method.train_heads else tuple(head for head in HEADS if head not in heads)
    return {name for name in names if is_extension(name) or name.startswith(trained)}


def store_base(model: DomextForMaskedLM, dtype: torch.dtype) -> None:
    """Store the frozen matrices in another dtype, for use under autocast; vectors (biases, LayerNorms) stay fp32."""
    for param in model.parameters():
        if not param.requires_grad and param.ndim >= 2:
            param.data = param.data.to(dtype)


def choose_attention(model: DomextForMaskedLM, device: torch.device, *, bf16: bool) -> None:
    """Set the attention implementation that trains fastest: the fused one, but for bf16 on a CPU.

    There torch's fused kernel, and above all its backward pass, takes three times as long as matrix products and a
    softmax in turn (`jobs/benchmark.py step --precision bf16` shows the whole step).
    """
    model.set_attn_implementation("eager" if bf16 and device.type == "cpu" else "sdpa")


def count_module_parameters(hidden_size: int, module_hidden_size: int, module_ffn_size: int) -> int:
    """Count the parameters of one extension module without its gate, which adds d + 1.

    Args:
        hidden_size: d.
        module_hidden_size: h'.
        module_ffn_size: f'.

    Source: exBERT section 3: attention 4·d·h' + 3·h' + d, FFN 2·d·f' + f' + d, two LayerNorms 4·d.
    """
    d, h, f = hidden_size, module_hidden_size, module_ffn_size
    return (4 * d * h + 3 * h + d) + (2 * d * f + f + d) + 4 * d


def count_parameters(
    config: DomextConfig, method: MethodConfig, heads: Collection[str], *, next_sentence: bool = False
) -> ParameterCounts:
    """Count parameters in closed form.

    Args:
        config: the augmented model.
        method: the rule that says what trains.
        heads: those of `HEADS` that the base brings; fresh ones train.
        next_sentence: the model predicts the order of two texts.

    Source: AF Adapter section 3.2. In a layer, an extra head adds 4·d·d_k + 3·d_k parameters, b'_O adds d once a
    domain, and a units add 2·d·a + a + d. exBERT's modules: `count_module_parameters`; a new word adds d + 1.
    """
    d, layers, ffn = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    head_size = d // config.num_attention_heads
    embeddings = (config.base_vocab_size + config.max_position_embeddings + config.type_vocab_size) * d + 2 * d
    layer = 4 * (d * d + d) + 2 * d * ffn + ffn + d + 4 * d
    pooler = d * d + d if config.has_pooler else 0
    head = d * d + d + 2 * d + config.base_vocab_size
    order = 2 * d + 2 if next_sentence else 0
    new_words = config.extension_vocab_size * d
    new_biases = config.extension_vocab_size
    extension = 0
    for domain in config.domains.values():
        num_heads, units = domain["heads"], domain["ffn_units"]
        extension += layers * (num_heads * (4 * d * head_size + 3 * head_size) + (d if num_heads else 0))
        extension += layers * (2 * d * units + units + d if units else 0)
    if config.module_hidden_size:
        module = count_module_parameters(d, config.module_hidden_size, config.module_ffn_size)
        extension += layers * (module + d + 1)
    encoder = embeddings + layers * layer + pooler + extension + new_words
    total = encoder + head + new_biases + order
    if method.trains == "all":
        return ParameterCounts(total, total if next_sentence else total - pooler, encoder, layers, d)
    sizes = {MLM_HEAD: head, NEXT_SENTENCE_HEAD: order, POOLER: pooler if next_sentence else 0}
    trained = sum(size for part, size in sizes.items() if part not in heads or method.train_heads)
    return ParameterCounts(total, extension + new_words + new_biases + trained, encoder, layers, d)


def detach(model: DomextForMaskedLM, original_names: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model without its extensions.

    Args:
        model: an augmented model whose base is stored in fp32 (a base that `store_base` rounded has lost its bits).
        original_names: `Base.original_names`, for just the base's tensors under its checkpoint's names; None: all but
            the extensions, under Hugging Face BERT's names.

    Returns:
        fp32 tensors that share memory with the model; tied copies are left out, as in `Base.tensors`.
    """
    params = dict(model.named_parameters())
    if original_names is None:
        original_names = {name: name for name in params if not is_extension(name)}
    assert all(params[name].dtype == torch.float32 for name in original_names), "the base is stored in fp32"
    return {original: params[name].detach() for name, original in original_names.items()}


def describe_plain(config: DomextConfig, *, next_sentence: bool = False) -> PreTrainedConfig:
    """Return the configuration of transformers' own BERT or RoBERTa that a model without extensions is."""
    assert not config.has_extension
    shared = {name: getattr(config, name) for name in SHARED_FIELDS}
    is_roberta = config.position_rule == "roberta"
    architecture = "RobertaForMaskedLM" if is_roberta else "BertForPreTraining" if next_sentence else "BertForMaskedLM"
    return (RobertaConfig if is_roberta else BertConfig)(**shared, architectures=[architecture])


def name_plain(model: DomextForMaskedLM) -> dict[str, str]:
    """Return the name that transformers' own BERT or RoBERTa gives to each parameter, by internal name."""
    config = cast(DomextConfig, model.config)
    names = {name: name for name, _ in model.named_parameters()}
    if config.position_rule != "roberta":
        return names
    heads = {internal: original for original, internal in ROBERTA_HEAD.items()}
    for name in names:
        prefix = next((each for each in heads if name.startswith(each)), "bert.")
        names[name] = heads.get(prefix, "roberta.") + name[len(prefix) :]
    return names
