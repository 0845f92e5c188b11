"""LoRA through peft: updates of low rank in the base's matrices, and their merging into these.

Enters: a model with its base's weights. Leaves: the same model, whose matrices peft has wrapped: a matrix is called
`….query.base_layer.weight` then, its update `….query.lora_A.default.weight` and `….query.lora_B.default.weight`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from domext_ray.config.method import MethodConfig

_PLACES = {
    "query": r"attention\.self\.query",
    "key": r"attention\.self\.key",
    "value": r"attention\.self\.value",
    "attention_output": r"attention\.output\.dense",
    "intermediate": r"intermediate\.dense",
    "output": r"output\.dense",
}
_BASE_LAYER = ".base_layer."


def build_lora_config(method: MethodConfig) -> Any:
    """Return peft's `LoraConfig` of a method: its targets are the base's matrices, never those of an extension."""
    from peft import LoraConfig  # loads slowly, and only LoRA needs it

    places = "|".join(_PLACES[each] for each in method.lora_target_names)
    return LoraConfig(
        r=method.lora_rank,
        lora_alpha=method.lora_alpha or 2 * method.lora_rank,
        target_modules=rf".*encoder\.layer\.\d+\.({places})",
        lora_dropout=0.0,
        bias="none",
    )


def inject_lora(model: nn.Module, method: MethodConfig) -> None:
    """Wrap the matrices that LoRA updates; the updates start at zero."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(build_lora_config(method), model)


def merge_lora(model: nn.Module) -> None:
    """Add LoRA's updates to the matrices and take the wrappers away; a model without LoRA stays as it is."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())


def name_unwrapped(name: str) -> str:
    """Return the name that a parameter has without LoRA's wrappers."""
    return name.replace(_BASE_LAYER, ".")


def count_lora_parameters(config: PreTrainedConfig, method: MethodConfig) -> int:
    """Count LoRA's parameters in closed form: rank · (inputs + outputs) a matrix."""
    d, ffn = config.hidden_size, config.intermediate_size
    widths = {"intermediate": d + ffn, "output": d + ffn}
    a_layer = sum(widths.get(each, 2 * d) for each in set(method.lora_target_names))
    return config.num_hidden_layers * method.lora_rank * a_layer if method.lora_rank else 0
