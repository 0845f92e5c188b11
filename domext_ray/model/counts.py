"""How many parameters an augmented model has and a method trains, in closed form: no model is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from domext_ray.config.method import MethodConfig
from domext_ray.model.base import MLM_HEAD, NEXT_SENTENCE_HEAD, POOLER
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.lora import count_lora_parameters


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


def count_bottleneck_parameters(hidden_size: int, bottleneck_size: int) -> int:
    """Count the parameters of one bottleneck without its shift of a LayerNorm or its own LayerNorm, 2·d each.

    Source: Houlsby et al. section 2.1: 2·m·d + d + m.
    """
    return 2 * bottleneck_size * hidden_size + hidden_size + bottleneck_size


def count_domain_parameters(config: DomextConfig, domain: dict[str, Any]) -> int:
    """Count the parameters of one domain over all its layers.

    Args:
        config: the model.
        domain: a complete description, as in `DomextConfig.domains`.

    Source: AF Adapter section 3.2: in a layer, an extra head adds 4·d·d_k + 3·d_k parameters, b'_O adds d once a
    domain, and a units add 2·d·a + a + d. In each sublayer that has a bottleneck `count_bottleneck_parameters`, and
    2·d for each of its LayerNorms.
    """
    d = config.hidden_size
    head_size = d // config.num_attention_heads
    num_heads, units, size = domain["heads"], domain["ffn_units"], domain["bottleneck_size"]
    a_layer = num_heads * (4 * d * head_size + 3 * head_size) + (d if num_heads else 0)
    a_layer += 2 * d * units + units + d if units else 0
    if size:
        num_norms = domain["layer_norms"] + domain["bottleneck_layer_norm"]
        num_places = 2 if domain["bottleneck_place"] == "both" else 1
        a_layer += num_places * (count_bottleneck_parameters(d, size) + num_norms * 2 * d)
    return (domain["last_layer"] - domain["first_layer"] + 1) * a_layer


def count_parameters(
    config: DomextConfig, method: MethodConfig, heads: Collection[str], *, next_sentence: bool = False
) -> ParameterCounts:
    """Count parameters in closed form.

    Args:
        config: the augmented model.
        method: the rule that says what trains, and LoRA's size.
        heads: those of `HEADS` that the base brings; fresh ones train.
        next_sentence: the model predicts the order of two texts.

    Source: `count_domain_parameters`, `count_module_parameters`, `count_lora_parameters`; a new word adds d + 1.
    """
    d, layers, ffn = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    embeddings = (config.base_vocab_size + config.max_position_embeddings + config.type_vocab_size) * d + 2 * d
    layer = 4 * (d * d + d) + 2 * d * ffn + ffn + d + 4 * d
    pooler = d * d + d if config.has_pooler else 0
    head = d * d + d + 2 * d + config.base_vocab_size
    order = 2 * d + 2 if next_sentence else 0
    new_words = config.extension_vocab_size * d
    new_biases = config.extension_vocab_size
    domains = {name: count_domain_parameters(config, domain) for name, domain in config.domains.items()}
    modules = 0
    if config.module_hidden_size:
        modules = layers * (count_module_parameters(d, config.module_hidden_size, config.module_ffn_size) + d + 1)
    lora = count_lora_parameters(config, method)
    encoder = embeddings + layers * layer + pooler + sum(domains.values()) + modules + new_words + lora
    total = encoder + head + new_biases + order
    own_domain = domains[method.domain] if method.has_domain else 0
    trainable = {
        "extensions": own_domain + (modules if method.module_hidden_size else 0) + new_words + new_biases + lora,
        "domain": own_domain,
        "top_layers": method.top_layers * layer,
        "layer_norms": (2 * layers + 1) * 2 * d,
        "biases": d + layers * (7 * d + ffn),
        "all": total if next_sentence else total - pooler,
    }[method.trains]
    if method.trains != "all":
        sizes = {MLM_HEAD: head, NEXT_SENTENCE_HEAD: order, POOLER: pooler if next_sentence else 0}
        trainable += sum(size for part, size in sizes.items() if part not in heads or method.train_heads)
    return ParameterCounts(total, trainable, encoder, layers, d)
