"""LoRA through peft: updates of low rank in the base's matrices, and their merging into these.

peft wraps a matrix: it is called `….query.base_layer.weight` then, its update `….query.lora_A.default.weight` and
`….query.lora_B.default.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from domext_ray.config.extensions.base import Extension, Paper
from domext_ray.config.extensions.options import MethodOptions, Target

if TYPE_CHECKING:
    from torch import nn

_PLACES: dict[Target, str] = {
    "query": r"attention\.self\.query",
    "key": r"attention\.self\.key",
    "value": r"attention\.self\.value",
    "attention_output": r"attention\.output\.dense",
    "intermediate": r"intermediate\.dense",
    "output": r"output\.dense",
}
_GATES = r"intermediate\.gate"


class Lora(Extension):
    """LoRA (Hu et al. 2022)."""

    sizes = scaled = ("lora_rank",)
    parameters = re.compile(r"\.lora_[AB]\.")
    formats = ("peft",)
    is_merged = True
    paper = Paper(
        "LoRA",
        """@inproceedings{hu2022lora,
  title = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean and
    Wang, Lu and Chen, Weizhu},
  booktitle = {Proceedings of ICLR},
  year = {2022}
}""",
    )

    def attach(self, model: nn.Module, method: MethodOptions) -> None:
        """Wrap the matrices that LoRA updates; the updates start at zero."""
        if method.lora_rank:
            from peft import inject_adapter_in_model
            from peft.tuners.lora import LoraLayer

            inject_adapter_in_model(build_lora_config(method, gated=cast(Any, model.config).gated_ffn), model)
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    # Under autocast it would widen what autocast narrows again at once: four passes for nothing.
                    module.cast_input_dtype_enabled = False

    def merge(self, model: nn.Module) -> None:
        """Add the updates to the matrices and take the wrappers away; a model without LoRA stays as it is."""
        from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                model.set_submodule(name, module.get_base_layer())

    def scale(self, model: nn.Module, method: MethodOptions, scale: float) -> None:
        from peft.tuners.lora import LoraLayer

        for module in model.modules() if method.lora_rank else ():
            if isinstance(module, LoraLayer):
                module.set_scale("default", scale)

    def describe(self, shape: Any, method: MethodOptions) -> str:
        rank, targets = method.lora_rank, ",".join(method.lora_targets)
        return f"LoRA's updates of rank {rank} ({targets})" if rank else ""

    def find(self, shape: Any, parameters: Collection[str], adapter: str = "") -> str:
        return "LoRA" if any(self.parameters.search(name) for name in parameters) else ""


def build_lora_config(method: MethodOptions, *, gated: bool = False) -> Any:
    """Return peft's `LoraConfig` of a method: its targets are the base's matrices, never those of an extension.

    With `gated` the FFN's gates are updated with "intermediate".
    """
    from peft import LoraConfig  # loads slowly, and only LoRA needs it

    targets = [_PLACES[target] for target in method.lora_targets]
    if gated and "intermediate" in method.lora_targets:
        targets.append(_GATES)
    places = "|".join(targets)
    return LoraConfig(
        r=method.lora_rank,
        lora_alpha=method.lora_alpha or 2 * method.lora_rank,
        target_modules=rf".*encoder\.layer\.\d+\.({places})",
        lora_dropout=0.0,
        bias="none",
    )
