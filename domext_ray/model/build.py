"""What a method adds to a base's configuration and model; which parameters train; the base back, bit for bit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from domext_ray.config.extensions.table import ADAPTER_PARTS, EXTENSIONS, is_extension
from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.model.base import HEADS, MLM_HEAD, POOLER
from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig, is_adapter_name
from domext_ray.model.domext.layers_domext import VARLEN, AdapterPlace, DeltaProjection, ExtensionModule, NormShift
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.domext.words_domext import HeadShift, PredictionHead, WordShift
from domext_ray.model.layouts import find_layout
from domext_ray.runtime.device import has_bf16

_LAYER_NORM = re.compile(r"bert\..*LayerNorm\.(weight|bias)")
_BIAS = re.compile(r"bert\.(embeddings|encoder)\..*bias")
_BASE_LAYER = ".base_layer."  # within the name of a matrix that peft has wrapped


@dataclass(frozen=True)
class Extensions:
    """The extensions of a model, new words apart: what a run that goes on from another one must make too."""

    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)
    module_hidden_size: int = 0
    module_ffn_size: int = 0


def describe_extensions(config: DomextConfig) -> Extensions:
    """Return the extensions that a model carries."""
    return Extensions(config.adapters, config.module_hidden_size, config.module_ffn_size)


def has_router(config: DomextConfig) -> bool:
    """Whether an adapter of a shape has a router."""
    return any(adapter.router_words for adapter in config.adapters.values())


def describe_method(
    config: DomextConfig, method: MethodConfig, earlier: Extensions, option: str = "--init_from"
) -> None:
    """Describe in a configuration what a model has already and what a method adds.

    `option` named what the model goes on from, for messages.
    """
    if method.top_layers > config.num_hidden_layers:
        raise ConfigError(
            f"--method.top_layers is {method.top_layers}; the encoder has {config.num_hidden_layers} layers."
        )
    if method.trains == "biases" and not config.has_biases:
        raise ConfigError("--method.trains is biases; the base's layers have none, so it must be another rule.")
    _add_adapters(config, method, earlier, option)
    _add_modules(config, method, earlier, option)


def _add_adapters(config: DomextConfig, method: MethodConfig, earlier: Extensions, option: str) -> None:
    adapters = dict(earlier.adapters)
    if method.has_adapter:
        last = config.num_hidden_layers - 1
        first, end = method.layer_range or (0, last)
        if not is_adapter_name(method.adapter):
            raise ConfigError(
                f"--method.adapter is {method.adapter!r}; it must be none of torch's words (such as keys or forward), "
                "and not start with __."
            )
        if end > last:
            raise ConfigError(f"--method.layers is {method.layers!r}; the encoder has the layers 0 to {last}.")
        values = {name: value for part in ADAPTER_PARTS for name, value in part.get_values(method).items()}
        values["word_rows"] = min(method.word_rows, config.base_vocab_size)
        own = AdapterConfig(**values, first_layer=first, last_layer=end)
        known = adapters.get(method.adapter, own)
        own = replace(own, router_words=known.router_words, router_threshold=known.router_threshold)
        if known != own:
            parts = ", ".join(f"{name} {value}" for name, value in asdict(known).items() if name != "scale")
            raise ConfigError(
                f"--method.adapter {method.adapter!r} is the name of an adapter of {option} that has other parts "
                f"({parts}); give another name, or these parts to train it further."
            )
        adapters[method.adapter] = own
    config.adapters = dict(sorted(adapters.items()))
    config.adapter_init, config.bottleneck_std = method.init, method.bottleneck_std
    unknown = [name for name in method.active_adapters if name not in adapters]
    if unknown:
        names = ", ".join(sorted(adapters)) or "no adapter"
        raise ConfigError(f"--method.active_adapters names {unknown[0]!r}; the model has {names}.")
    config.active_adapters = list(method.active_adapters) or None


def _add_modules(config: DomextConfig, method: MethodConfig, earlier: Extensions, option: str) -> None:
    sizes = method.module_hidden_size, method.module_ffn_size
    before = earlier.module_hidden_size, earlier.module_ffn_size
    method.check_heads(config.num_attention_heads)
    if sizes[0] and before[0] and sizes != before:
        raise ConfigError(
            f"--method.module_hidden_size {sizes[0]} and --method.module_ffn_size {sizes[1]} differ from the modules "
            f"of {option}, {before[0]} and {before[1]}; give those to train them further, or 0 to add none."
        )
    config.module_hidden_size, config.module_ffn_size = sizes if sizes[0] else before
    config.gate_bias = method.gate_bias


def trainable_names(
    model: DomextForMaskedLM, method: MethodConfig, heads: Collection[str], *, reads_words: bool = True
) -> set[str]:
    """Return the names of the parameters that a method trains (`MethodConfig.trains`).

    "extensions": those that the method describes, and the new words; of an earlier run's adapters and modules only
    those that it describes again. "adapter": of that, the method's adapter. "top_layers", "layer_norms", "biases":
    these parts of the encoder. With each of them the heads that the base does not bring (`method.train_heads`: all
    heads, and the pooler if something reads it), never the base's word embeddings, which the MLM head shares. "all":
    everything that has a gradient; the pooler has none under masked-language modelling alone, and nothing of the MLM
    head has one without `reads_words`.

    `heads` are those of `HEADS` that the base brings.
    """
    unread = (*(() if model.predicts_next_sentence else (POOLER,)), *(() if reads_words else (MLM_HEAD,)))
    names = {name for name, _ in model.named_parameters() if not name.startswith(unread)}
    if method.trains == "all":
        return names
    trained = HEADS if method.train_heads else tuple(head for head in HEADS if head not in heads)
    first_layer = cast(DomextConfig, model.config).num_hidden_layers - method.top_layers
    return {
        name
        for name in names
        if (
            any(extension.parameters.search(name) and extension.trains(name, method) for extension in EXTENSIONS)
            if is_extension(name)
            else name.startswith(trained) or trains_base(name, method, first_layer)
        )
    }


def trains_base(name: str, method: MethodConfig, first_layer: int) -> bool:
    """Whether a method that trains parts of the base trains this parameter; top layers count from `first_layer`."""
    if method.trains == "top_layers":
        return name.startswith("bert.encoder.layer.") and int(name.split(".")[3]) >= first_layer
    if method.trains == "layer_norms":
        return _LAYER_NORM.fullmatch(name) is not None
    return method.trains == "biases" and _BIAS.fullmatch(name) is not None


def store_base(model: DomextForMaskedLM, dtype: torch.dtype) -> None:
    """Store what frozen products read in another dtype, as autocast would at each; LayerNorms stay fp32."""
    for module in cast(nn.Module, model).modules():
        for param in module.parameters(recurse=False):
            if not param.requires_grad and (param.ndim >= 2 or isinstance(module, nn.Linear)):
                param.data = param.data.to(dtype)


def prepare_for_device(model: DomextForMaskedLM, device: torch.device, *, bf16: bool) -> None:
    """Have a model compute as its device is fastest: attention by `pick_attention`, and on a card `fill_products`."""
    model.set_attn_implementation(pick_attention(device, bf16=bf16))
    if device.type == "cuda":
        fill_products(model)


def fill_products(model: nn.Module) -> None:
    """Have products of odd widths computed with zeros beside them: an exBERT module's heads, scores of words."""
    for module in model.modules():
        if isinstance(module, (ExtensionModule, PredictionHead)):
            module.fill_products()


def pick_attention(device: torch.device, *, bf16: bool) -> str:
    """Return the attention implementation that is fastest: without padding where a card can, else the fused one.

    For bf16 on a CPU torch's fused kernel takes three times as long as products and a softmax in turn, above all
    backward.
    """
    if device.type == "cpu":
        return "eager" if bf16 else "sdpa"
    return VARLEN if bf16 and has_bf16(device) else "sdpa"


def checkpoint_activations(model: nn.Module) -> None:
    """Have each layer's activations computed again in the backward pass; transformers is renaming its method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()  # type: ignore[operator]


@contextlib.contextmanager
def bypass_extensions(model: nn.Module) -> Iterator[None]:
    """Let a model without LoRA predict as its frozen base does while the block runs; new words score as before."""
    config, layers = cast(DomextConfig, model.config), cast(Any, model).bert.encoder.layer
    active, modules = config.active_adapters, [layer.extension for layer in layers]
    config.active_adapters = []
    for layer in layers:
        layer.extension = None
    try:
        yield
    finally:
        config.active_adapters = active
        for layer, module in zip(layers, modules, strict=True):
            layer.extension = module


def count_base_layers(config: DomextConfig) -> int:
    """Return how many of the first layers compute, while the model trains, what they do in its base alone."""
    adapters = config.adapters.values()
    has_dropout = config.hidden_dropout_prob or config.attention_probs_dropout_prob
    has_more_words = config.extension_vocab_size or any(adapter.word_rows for adapter in adapters)
    if has_dropout or has_more_words or config.module_hidden_size:
        return 0
    return min((adapter.first_layer for adapter in adapters), default=0)


def attach_extensions(model: nn.Module, method: MethodConfig) -> None:
    """Add the extensions that wrap the base's matrices, such as LoRA, to a model that has its base's weights."""
    for extension in EXTENSIONS:
        extension.attach(model, method)


def merge_extensions(model: nn.Module) -> None:
    """Move the extensions that wrap the base's matrices, such as LoRA, into these; others stay."""
    for extension in EXTENSIONS:
        extension.merge(model)


def scale_extensions(model: nn.Module, method: MethodConfig, scale: float) -> None:
    """Multiply what a method adds to a frozen base by a scale, 0 or more, until another one is set."""
    if rule := refuse_scale(model, method):
        raise ConfigError(f"--scale is {scale:g}; it must be 1 {rule}.")
    for extension in EXTENSIONS:
        extension.scale(model, method, scale)


def refuse_scale(model: nn.Module, method: MethodConfig) -> str:
    """Say with what a model has no scale for what a method adds to it; empty: it has one."""
    shape = cast(DomextConfig, model.config)
    return method.refuse_scale(has_words=shape.extension_vocab_size > 0, has_modules=shape.module_hidden_size > 0)


def fold_scales(model: nn.Module) -> None:
    """Multiply the scales of a model's adapters into their tensors, so that they are 1 again: training knows no others.

    What an adapter adds is linear in the tensors of its output projections and of its shifts.
    """
    adapters = cast(DomextConfig, model.config).adapters
    for place in model.modules():
        parts = place.adapters.items() if isinstance(place, AdapterPlace) else ()
        for module, scale in ((inner, adapters[name].scale) for name, part in parts for inner in part.modules()):
            if scale != 1 and isinstance(module, (DeltaProjection, HeadShift, NormShift, WordShift)):
                for param in module.parameters(recurse=False):
                    param.data *= scale
    for name in adapters:
        cast(Any, model).set_adapter_scale(name, 1.0)


def name_unwrapped(name: str) -> str:
    """Return the name that a parameter has without peft's wrappers."""
    return name.replace(_BASE_LAYER, ".")


def detach(model: DomextForMaskedLM, original_names: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Return the fp32 tensors of a model without its extensions.

    With `Base.original_names` these are just the base's, under its checkpoint's names; with None all but the
    extensions, under Hugging Face BERT's names. They share memory with the model, but for those that a checkpoint has
    in one; tied copies are left out. The model's base must be stored in fp32: one that `store_base` rounded has lost
    its bits.
    """
    params = {name_unwrapped(name): param for name, param in model.named_parameters()}
    if original_names is None:
        original_names = {name: name for name in params if not is_extension(name)}
    parts: dict[str, list[Tensor]] = {}
    for name, original in original_names.items():
        parts.setdefault(original, []).append(params[name].detach())
    return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}


def name_plain(model: DomextForMaskedLM) -> dict[str, str]:
    """Return the name that transformers' own model of this layout gives to each parameter, by internal name."""
    layout = find_layout(cast(DomextConfig, model.config))
    return {name: layout.name_plain(name) for name, _ in model.named_parameters()}
