"""How many parameters an augmented model has and a method trains, in closed form: no model is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from domext_ray.config.method import MethodConfig
from domext_ray.extensions.table import DOMAIN_PARTS, EXTENSIONS
from domext_ray.model.base import MLM_HEAD, NEXT_SENTENCE_HEAD, POOLER
from domext_ray.model.domext.configuration_domext import DomextConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of an augmented model, in closed form.

    Args:
        total: all of them, the MLM head included, tied ones once.
        trainable: those that the method trains.
        encoder: base and extensions, pooler in, MLM head out: the denominator of the papers' shares.
        num_hidden_layers: layers.
        hidden_size: width d.
        decoder: what trains beside the model and no export has, see `training.vectors.count_decoder`.
    """

    total: int
    trainable: int
    encoder: int
    num_hidden_layers: int
    hidden_size: int
    decoder: int = 0

    @property
    def trainable_frac(self) -> float:
        """Trainable share of base + extension; of everything, where more than these trains."""
        return self.trainable / (self.encoder if self.trainable <= self.encoder else self.total)


def count_parameters(
    config: DomextConfig,
    method: MethodConfig,
    heads: Collection[str],
    *,
    next_sentence: bool = False,
    reads_words: bool = True,
) -> ParameterCounts:
    """Count parameters in closed form.

    Args:
        config: the augmented model.
        method: the rule that says what trains, and its sizes.
        heads: those of `HEADS` that the base brings; fresh ones train.
        next_sentence: the model predicts the order of two texts.
        reads_words: the objective reads the MLM head; else nothing of it trains.
    """
    d, layers, ffn = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    num_positions = config.max_position_embeddings if config.has_position_table else 0
    norm, inner = d + d * config.norm_bias, ffn + ffn * config.gated_ffn
    biases = 4 * d * config.attention_bias + (inner + d) * config.ffn_bias
    embeddings = (config.base_vocab_size + num_positions + config.type_vocab_size) * d + norm
    layer = 4 * d * d + d * inner + d * ffn + biases + 2 * norm
    # With norms before the sublayers, the first layer has one less, and one stands behind the last layer.
    moved = norm if config.has_pre_norm else 0
    pooler = d * d + d if config.has_pooler else 0
    head = d * d + d * config.head_bias + norm + config.base_vocab_size
    order = 2 * d + 2 if next_sentence else 0
    encoder = embeddings + layers * layer + pooler + sum(each.count(config, method) for each in EXTENSIONS)
    head_extensions = sum(each.count_in_head(config) for each in EXTENSIONS)
    total = encoder + head + head_extensions + order
    trainable = {
        "extensions": sum(each.count_trainable(config, method) for each in EXTENSIONS),
        "domain": sum(part.count_trainable(config, method) for part in DOMAIN_PARTS),
        "top_layers": method.top_layers * layer - (moved if method.top_layers == layers else 0),
        "layer_norms": (2 * layers + 1) * norm,
        "biases": layers * biases + (2 * layers + 1) * d * config.norm_bias,
        "all": total if next_sentence else total - pooler,
    }[method.trains]
    if not reads_words:
        own = sum(each.count_trainable_in_head(config, method) for each in EXTENSIONS)
        unread = {"extensions": own, "domain": own, "all": head + head_extensions}
        return ParameterCounts(total, trainable - unread.get(method.trains, 0), encoder, layers, d)
    if method.trains != "all":
        sizes = {MLM_HEAD: head, NEXT_SENTENCE_HEAD: order, POOLER: pooler if next_sentence else 0}
        trainable += sum(size for part, size in sizes.items() if part not in heads or method.train_heads)
    return ParameterCounts(total, trainable, encoder, layers, d)
