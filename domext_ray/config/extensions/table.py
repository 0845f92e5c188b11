"""The kinds of extensions: what is added to a base. A new one is a class, a row in `EXTENSIONS`, and its options."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

from domext_ray.config.extensions.base import AdapterPart, Extension, Format, Paper
from domext_ray.config.extensions.options import BOTTLENECK_VARIANTS, MethodOptions, Target

if TYPE_CHECKING:
    from torch import nn

_AF_ADAPTER = Paper(
    "AF Adapter",
    """@misc{yan2022afadapter,
  title = {{AF} Adapter: Continual Pretraining for Building {Chinese} Biomedical Language Model},
  author = {Yan, Yongyu and Xue, Kui and Shi, Xiaoming and Ye, Qi and Liu, Jingping and Ruan, Tong},
  year = {2022},
  eprint = {2211.11363},
  archivePrefix = {arXiv}
}""",
)
_FL_TUNING = Paper(
    "FL-Tuning",
    """@misc{liu2022fltuning,
  title = {{FL}-Tuning: Layer Tuning for Feed-Forward Network in {Transformer}},
  author = {Liu, Jingping and Song, Yuqiu and Xue, Kui and Sun, Hongli and Wang, Chao and Chen, Lihan and Jiang, Haiyun
    and Liang, Jiaqing and Ruan, Tong},
  year = {2022},
  eprint = {2206.15312},
  archivePrefix = {arXiv}
}""",
)
_EXBERT = Paper(
    "exBERT",
    """@inproceedings{tai2020exbert,
  title = {{exBERT}: Extending Pre-trained Models with Domain-specific Vocabulary Under Constrained Training Resources},
  author = {Tai, Wen and Kung, H. T. and Dong, Xin and Comiter, Marcus and Kuo, Chang-Fu},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2020},
  year = {2020}
}""",
)

_LORA_PLACES: dict[Target, str] = {
    "query": r"attention\.self\.query",
    "key": r"attention\.self\.key",
    "value": r"attention\.self\.value",
    "attention_output": r"attention\.output\.dense",
    "intermediate": r"intermediate\.dense",
    "output": r"output\.dense",
}
_LORA_GATES = r"intermediate\.gate"


class NewWords(Extension):
    """exBERT's new words: embeddings of their own behind the base's table, tied to their rows of the output.

    Which ones there are is an option of the vocabulary. See `words_domext.Embeddings`.
    """

    parameters = re.compile(r"^(bert\.embeddings|cls\.predictions)\.extension\.")
    paper = _EXBERT

    def describe(self, shape: Any, method: MethodOptions) -> str:
        number = shape.extension_vocab_size
        return f"{number:,} new words with embeddings of their own" if number else ""

    def find(self, shape: Any, parameters: Collection[str], adapter: str = "") -> str:
        return f"{shape.extension_vocab_size} new words" if shape.extension_vocab_size else ""


class Modules(Extension):
    """exBERT's gated modules, a smaller layer beside each layer (section 3); see `layers_domext.ExtensionModule`."""

    sizes = ("module_hidden_size", "module_ffn_size")
    scaled = ("module_ffn_size",)
    scaled_by_heads = ("module_hidden_size",)
    parameters = re.compile(r"\.layer\.\d+\.extension\.")
    paper = _EXBERT

    def describe(self, shape: Any, method: MethodOptions) -> str:
        if not shape.module_hidden_size:
            return ""
        return (
            f"beside each layer a gated extension module of width {shape.module_hidden_size:,} with "
            f"{shape.module_ffn_size:,} FFN units (exBERT)"
        )

    def find(self, shape: Any, parameters: Collection[str], adapter: str = "") -> str:
        width = shape.module_hidden_size
        return f"extension modules of width {width}" if width else ""


class WordShifts(AdapterPart):
    """Shifts of the base's words, in the word table, the tied output and its biases; see `words_domext.WordShift`.

    What a frozen base lacks most in a new domain is words, more than layers: the rows of its word table say what a word
    means, and the tied output when to expect it.
    """

    sizes = ("word_rows",)
    parameters = re.compile(r"^(bert\.embeddings|cls\.predictions)\.adapters\.")
    formats = ("bank",)
    label = "word rows"
    found = "shifts of {:,} words"
    in_layers = False
    values = {"word_head": "word_head"}

    def describe_part(self, adapter: Any) -> str:
        head = " and of the MLM head's transform" if adapter.word_head else ""
        return f"shifts of {adapter.word_rows:,} words' embeddings{head}"


class Heads(AdapterPart):
    """Extra attention heads of the base's size (AF Adapter section 3.2); see `layers_domext.AdapterHeads`."""

    sizes = ("heads",)
    parameters = re.compile(r"\.attention\.adapters\.")
    formats = ("bank",)
    label = "heads"
    paper = _AF_ADAPTER

    def describe_part(self, adapter: Any) -> str:
        return f"{adapter.heads} extra attention head(s)"


class Units(AdapterPart):
    """Extra FFN units (AF Adapter section 3.2; FL-Tuning has these alone); see `layers_domext.AdapterUnits`."""

    sizes = scaled = ("ffn_units",)
    parameters = re.compile(r"\.layer\.\d+\.adapters\.")
    formats = ("bank",)
    label = "FFN units"

    def find_paper(self, adapter: Any) -> Paper:
        return _AF_ADAPTER if adapter.heads else _FL_TUNING

    def describe_part(self, adapter: Any) -> str:
        return f"{adapter.ffn_units:,} extra FFN units"


class Bottlenecks(AdapterPart):
    """A bottleneck after each sublayer and shifts of the LayerNorms behind (Houlsby et al. 2.1).

    2·m·d + d + m parameters each; see `layers_domext.Bottleneck`.
    """

    sizes = scaled = ("bottleneck_size",)
    parameters = re.compile(r"\.output\.adapters\.")
    formats = ("bank", "adapterhub")
    label = "bottleneck"
    found = "bottlenecks of width {}"
    values = {"layer_norms": "bottleneck_norms", **{name: name for name in BOTTLENECK_VARIANTS}}
    paper = Paper(
        "Houlsby",
        """@inproceedings{houlsby2019adapters,
  title = {Parameter-Efficient Transfer Learning for {NLP}},
  author = {Houlsby, Neil and Giurgiu, Andrei and Jastrzebski, Stanislaw and Morrone, Bruna and de Laroussilhe, Quentin
    and Gesmundo, Andrea and Attariyan, Mona and Gelly, Sylvain},
  booktitle = {Proceedings of ICML},
  year = {2019}
}""",
    )

    def describe_part(self, adapter: Any) -> str:
        both = adapter.bottleneck_place == "both"
        number = "two" if both else {"attention": "an attention", "output": "an FFN"}[adapter.bottleneck_place]
        kinds = [
            "parallel" if adapter.bottleneck_parallel else "",
            adapter.bottleneck_activation if adapter.bottleneck_activation != "gelu" else "",
            "normalised" if adapter.bottleneck_layer_norm else "",
        ]
        words = " ".join([number, *filter(None, kinds), "bottlenecks" if both else "bottleneck"])
        norms = " and shifts of the LayerNorms" if adapter.layer_norms else ""
        return f"{words} of width {adapter.bottleneck_size:,}{norms}"


class Lora(Extension):
    """LoRA (Hu et al. 2022) through peft: updates of low rank in the base's matrices, and their merging into these.

    peft wraps a matrix: it is called `….query.base_layer.weight` then, its update `….query.lora_A.default.weight` and
    `….query.lora_B.default.weight`.
    """

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


EXTENSIONS: tuple[Extension, ...] = (
    NewWords(),
    Modules(),
    WordShifts(),
    Heads(),
    Units(),
    Bottlenecks(),
    Lora(),
)
"""In the order in which a card lists them."""

ADAPTER_PARTS = tuple(extension for extension in EXTENSIONS if isinstance(extension, AdapterPart))
SIZES = tuple(size for extension in EXTENSIONS for size in extension.sizes)
"""Options of all sizes: a method with all of them 0 adds nothing."""
MAIN_SIZES = tuple(extension.sizes[0] for extension in EXTENSIONS if extension.sizes)
"""The first of each kind: above 0 where a method has the kind."""


def is_extension(name: str) -> bool:
    """Whether a tensor belongs to an extension, by its name in the model; an adapter's router does, too."""
    return ".adapters." in name or any(extension.parameters.search(name) for extension in EXTENSIONS)


def find_others(format: Format, shape: Any, parameters: Collection[str], adapter: str = "") -> Iterator[str]:
    """Name what a model has that a format does not hold; see `Extension.find`."""
    for extension in EXTENSIONS:
        if format not in extension.formats and (found := extension.find(shape, parameters, adapter)):
            yield found


def name_options(extensions: tuple[Extension, ...]) -> str:
    """Return the sizes that a message asks for, such as "--method.heads, --method.ffn_units"."""
    return ", ".join(f"--method.{extension.sizes[0]}" for extension in extensions if extension.sizes)


def build_lora_config(method: MethodOptions, *, gated: bool = False) -> Any:
    """Return peft's `LoraConfig` of a method: its targets are the base's matrices, never those of an extension.

    With `gated` the FFN's gates are updated with "intermediate".
    """
    from peft import LoraConfig  # loads slowly, and only LoRA needs it

    targets = [_LORA_PLACES[target] for target in method.lora_targets]
    if gated and "intermediate" in method.lora_targets:
        targets.append(_LORA_GATES)
    places = "|".join(targets)
    return LoraConfig(
        r=method.lora_rank,
        lora_alpha=method.lora_alpha or 2 * method.lora_rank,
        target_modules=rf".*encoder\.layer\.\d+\.({places})",
        lora_dropout=0.0,
        bias="none",
    )
