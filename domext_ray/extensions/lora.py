"""LoRA through peft: updates of low rank in the base's matrices, and their merging into these.

peft wraps a matrix: it is called `….query.base_layer.weight` then, its update `….query.lora_A.default.weight` and
`….query.lora_B.default.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from domext_ray.extensions.base import Extension, Shape, TrainedPart
from domext_ray.options.declare import DIFFERENT, SOME, CountOrZero, option_group, require

if TYPE_CHECKING:
    from torch import nn

Target = Literal["query", "key", "value", "attention_output", "intermediate", "output"]
_PLACES: dict[Target, str] = {
    "query": r"attention\.self\.query",
    "key": r"attention\.self\.key",
    "value": r"attention\.self\.value",
    "attention_output": r"attention\.output\.dense",
    "intermediate": r"intermediate\.dense",
    "output": r"output\.dense",
}
_GATES = r"intermediate\.gate"


@option_group
class LoraOptions(TrainedPart):
    """Options of LoRA."""

    lora_rank: CountOrZero = 0  # rank of LoRA's updates of the base's matrices (peft); 0: none
    lora_alpha: CountOrZero = 0  # LoRA's scale times its rank; 0: twice the rank
    # of query, key, value, attention_output, intermediate, output
    lora_targets: Annotated[tuple[Target, ...], SOME, DIFFERENT] = ("query", "value")


class Lora(Extension[LoraOptions]):
    """LoRA (Hu et al. 2022)."""

    sizes = scaled = ("lora_rank",)
    parameters = re.compile(r"\.lora_[AB]\.")
    formats = ("peft",)
    is_merged = True
    paper = "LoRA"
    citation = """@inproceedings{hu2022lora,
  title = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean and
    Wang, Lu and Chen, Weizhu},
  booktitle = {Proceedings of ICLR},
  year = {2022}
}"""

    def check(self, method: LoraOptions) -> None:
        """See `Extension.check`; LoRA trains beside a frozen base only."""
        rule = f"extensions with --method.lora_rank {method.lora_rank}"
        require(method.trains == "extensions" or not method.lora_rank, "trains", method.trains, rule)

    def attach(self, model: nn.Module, method: LoraOptions) -> None:
        """Wrap the matrices that LoRA updates; the updates start at zero."""
        if method.lora_rank:
            from peft import inject_adapter_in_model

            gated = cast("Shape", model.config).gated_ffn
            inject_adapter_in_model(build_lora_config(method, gated=gated), model)

    def merge(self, model: nn.Module) -> None:
        """Add the updates to the matrices and take the wrappers away; a model without LoRA stays as it is."""
        from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                model.set_submodule(name, module.get_base_layer())

    def describe(self, shape: Shape, method: LoraOptions) -> str:
        """See `Extension.describe`."""
        return (
            f"LoRA's updates of rank {method.lora_rank} ({','.join(method.lora_targets)})" if method.lora_rank else ""
        )

    def find(self, shape: Shape, parameters: Collection[str], adapter: str = "") -> str:
        """See `Extension.find`."""
        return "LoRA" if any(self.parameters.search(name) for name in parameters) else ""


def build_lora_config(method: LoraOptions, *, gated: bool = False) -> Any:
    """Return peft's `LoraConfig` of a method: its targets are the base's matrices, never those of an extension.

    Args:
        method: says which matrices.
        gated: the base's FFN has gates; they are updated with "intermediate".
    """
    from peft import LoraConfig  # loads slowly, and only LoRA needs it

    targets = [_PLACES[each] for each in method.lora_targets]
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
