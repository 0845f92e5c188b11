"""The model card: what a model is, how it was made and how good it is, as README.md of its folder.

Enters: `CardFacts`. Leaves: Markdown with the YAML header of the Hugging Face hub.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.model.counts import ParameterCounts
from domext_ray.model.graft import Extensions
from domext_ray.options.places import hide_places

_STANDING = "The terms of the base and of the text hold; the code is Apache-2.0."
_OWN_SENTENCES = re.compile(
    r"(The base's card names the licence `[^`]*`|No licence is known for the weights)[.;]|"
    r"[Tt]he terms of the base and of the text hold[.;] [Tt]he code is Apache-2\.0\."
)
"""What this project's cards say of themselves, now and before, and a card of a next model says anew."""


@dataclass(frozen=True)
class Terms:
    """On which terms a base may be used, and so what grows from it.

    Args:
        license: identifier in the header of its card; "unknown" where it names none.
        name: the licence's name, where the identifier is "other".
        text: what its card says under "Terms"; one paragraph.
    """

    license: str = "unknown"
    name: str = ""
    text: str = ""

    @property
    def header(self) -> dict[str, str]:
        """Return the fields of a card's header."""
        return {"license": self.license, **({"license_name": self.name} if self.name else {})}

    def describe(self) -> str:
        """Return what a card of something that was made from the base says under "Terms"."""
        if self.license == "unknown":
            known = "No licence is known for the weights."
        else:
            known = f"The base's card names the licence `{self.name or self.license}`."
        return " ".join(each for each in (self.text, known, _STANDING) if each)


def read_terms(folder: Path) -> Terms:
    """Return the terms that the card of a base, or of an export, names.

    Args:
        folder: the base; its README.md is the card.
    """
    path = folder / "README.md"
    header = read_header(path)
    license, name = header.get("license"), header.get("license_name")
    content = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    section = re.search(r"^## Terms\b[^\n]*\n(.*?)(?=^#|^```|\Z)", content, re.DOTALL | re.MULTILINE)
    text = _OWN_SENTENCES.sub("", " ".join(section[1].split())) if section else ""
    return Terms(
        license if isinstance(license, str) else "unknown", name if isinstance(name, str) else "", text.strip()
    )


@dataclass(frozen=True)
class CardFacts:
    """What the model card says about a model.

    Args:
        name: the model's name.
        config: the run that made it.
        base_sha256: hash of the base's tensors; "none" without a base.
        terms: those of the base's card.
        counts: parameters.
        num_new_words: words of the extension vocabulary.
        extensions: domains and modules of the model.
        num_steps: optimiser steps made.
        summary: content of the run's summary.json, for the figures before and after; empty: no figures.
    """

    name: str
    config: PretrainConfig
    base_sha256: str
    terms: Terms
    counts: ParameterCounts
    num_new_words: int
    extensions: Extensions
    num_steps: int
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def base_name(self) -> str:
        """The base's id; of a folder only the last part, which tells nothing about the machine."""
        base = self.config.base
        folder = Path(base).expanduser()
        return folder.resolve().name if folder.is_dir() else hide_places(base)

    @property
    def has_extension(self) -> bool:
        """Whether the model is more than a plain BERT or RoBERTa, or another, so that its folder brings code."""
        parts = self.num_new_words or self.extensions.domains or self.extensions.module_hidden_size
        return bool(parts or self.config.objective.is_left_to_right)


def read_header(path: Path) -> dict[str, Any]:
    """Return the YAML header of a model card; empty where there is none.

    Args:
        path: a README.md.
    """
    if not path.is_file():
        return {}
    parts = path.read_text(encoding="utf-8", errors="replace").split("---", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        header = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}


def build_card(facts: CardFacts) -> str:
    """Return the model card: a YAML header, then what the model is, how it was made, how to load and cite it.

    Args:
        facts: what to say.
    """
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "fill-mask", **facts.terms.header}
    if facts.config.base != "none":
        header["base_model"] = facts.base_name
    header["tags"] = ["domext", "domain-adaptation", "masked-lm", "bert", facts.config.method.name]
    sections = [
        f"# {facts.name}",
        _describe_model(facts),
        _describe_figures(facts.summary),
        _describe_making(facts),
        _LOADING if facts.has_extension else _PLAIN_LOADING,
        _describe_sources(facts),
    ]
    head = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(each for each in sections if each) + "\n"


def _describe_model(facts: CardFacts) -> str:
    method, objective = facts.config.method, _describe_objective(facts.config)
    extensions, parts = facts.extensions, []
    if facts.num_new_words:
        parts.append(f"{facts.num_new_words:,} new words with embeddings of their own")
    if extensions.module_hidden_size:
        parts.append(
            f"beside each layer a gated extension module of width {extensions.module_hidden_size:,} with "
            f"{extensions.module_ffn_size:,} FFN units (exBERT)"
        )
    parts += [_describe_domain(name, domain) for name, domain in extensions.domains.items()]
    start = "random weights" if facts.config.base == "none" else f"`{facts.base_name}`"
    if not parts:
        return f"A BERT of which {_describe_trained(method)} trained by {objective}, from {start}."
    if method.trains == "all":
        return f"{start}, and {'; '.join(parts)}; every parameter was trained on domain text by {objective}."
    frozen = "every parameter but its heads' frozen" if method.train_heads else "every parameter frozen"
    text = f"{start} with {frozen}, and {'; '.join(parts)}; trained on domain text by {objective}."
    if method.trains == "domain" or len(extensions.domains) > 1:
        text += f" This run trained the domain `{method.domain}`."
    if method.lora_rank:
        return f"{text} LoRA's updates of rank {method.lora_rank} ({method.lora_targets}) are merged into the base."
    if facts.config.init_from:
        return text
    return f"{text} Taking the extension away gives the base back bit for bit."


def _describe_domain(name: str, domain: dict[str, Any]) -> str:
    """Say what a domain adds, and to which layers."""
    parts = []
    if domain["heads"]:
        parts.append(f"{domain['heads']} extra attention head(s)")
    if domain["ffn_units"]:
        parts.append(f"{domain['ffn_units']:,} extra FFN units")
    if domain["heads"] or domain["ffn_units"]:
        parts[-1] += " (AF Adapter)"
    if domain["bottleneck_size"]:
        norms = " and shifts of the LayerNorms" if domain["layer_norms"] else ""
        parts.append(f"{_describe_bottlenecks(domain)} of width {domain['bottleneck_size']:,}{norms} (Houlsby)")
    return (
        f"for the domain `{name}`, in each of the layers {domain['first_layer']} to {domain['last_layer']} "
        f"{' and '.join(parts)}"
    )


def _describe_bottlenecks(domain: dict[str, Any]) -> str:
    """Say how many bottlenecks a layer has and in what they differ from the paper's main ones."""
    both = domain["bottleneck_place"] == "both"
    number = "two" if both else {"attention": "an attention", "output": "an FFN"}[domain["bottleneck_place"]]
    kinds = [
        "parallel" if domain["bottleneck_parallel"] else "",
        domain["bottleneck_activation"] if domain["bottleneck_activation"] != "gelu" else "",
        "normalised" if domain["bottleneck_layer_norm"] else "",
    ]
    return " ".join([number, *filter(None, kinds), "bottlenecks" if both else "bottleneck"])


def _describe_trained(method: MethodConfig) -> str:
    """Say which parameters of a model without extensions were trained, with the verb."""
    if method.lora_rank:
        return f"LoRA's updates of rank {method.lora_rank} ({method.lora_targets}), merged here, were"
    return {
        "top_layers": f"the top {method.top_layers} layer(s) were",
        "layer_norms": "the LayerNorms were",
        "biases": "the biases were",
    }.get(method.trains, "every parameter was")


def _describe_objective(config: PretrainConfig) -> str:
    if config.objective.is_left_to_right:
        return "predicting the next token from those before it"
    return "masked-language modelling" + (" and next-sentence prediction" if config.objective.next_sentence else "")


def _describe_masking(config: PretrainConfig) -> str:
    objective = config.objective
    if objective.is_left_to_right:
        return "none; a token attends to those before it only"
    return f"{objective.mask_prob:.0%} of {'whole words' if objective.whole_word else 'tokens'}"


def _describe_figures(summary: dict[str, Any]) -> str:
    if not summary:
        return ""
    pairs = {
        "Held-out domain text, masked-LM loss (nats a token)": (summary["domain"]["mlm_loss"], "{:.3f}"),
        "Held-out domain text, masked tokens predicted": (summary["domain"]["mlm_accuracy"], "{:.1%}"),
        "Held-out domain text, masked words (bits a character)": (summary["domain"]["bits_per_character"], "{:.3f}"),
        "General sentences, masked words predicted": (summary["general"]["mlm_accuracy"], "{:.1%}"),
    }
    rows = [
        f"| {name} | {_format(pair['before'], form)} | {_format(pair['after'], form)} |"
        for name, (pair, form) in pairs.items()
    ]
    return "\n".join(["## Before and after", "", "| | before | after |", "|---|---:|---:|", *rows])


def _format(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _describe_making(facts: CardFacts) -> str:
    config, counts = facts.config, facts.counts
    rows = {
        "Base": "none (random weights)" if config.base == "none" else f"`{facts.base_name}`",
        "Base's sha256 (fp32 tensors and their names)": f"`{facts.base_sha256}`",
        "Text": f"`{hide_places(config.corpus)}`",
        "Parameters": f"{counts.total:,}",
        "Trained": f"{counts.trainable:,} ({counts.trainable_frac:.2%} of base and extension)",
        "Optimiser steps": f"{facts.num_steps:,} of {config.train.global_batch_size} rows",
        "Tokens read": f"{facts.summary['train']['tokens']:,}" if facts.summary else "not recorded",
        "Longest row": f"{max(config.train.seq_length, config.train.long_seq_length)} tokens",
        "Masking": _describe_masking(config),
        "Peak learning rate": f"{config.optim.lr:g}",
        "Seed": f"{config.seed}",
    }
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["## How it was made", "", "| | |", "|---|---|", *table])


_PLAIN_LOADING = """## Loading

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

folder = "PATH_OF_THIS_FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForMaskedLM.from_pretrained(folder)
```"""

_LOADING = """## Loading

torch and transformers are enough. The folder brings its own model code, hence `trust_remote_code=True`: read the four
`*_domext.py` files first if you did not make this folder yourself.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

folder = "PATH_OF_THIS_FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
```

`AutoModel`, `AutoModelForPreTraining`, `AutoModelForTokenClassification`, `AutoModelForSequenceClassification`,
`AutoModelForQuestionAnswering` and `AutoModelForMultipleChoice` load it in the same way."""

_BERT_ENTRY = """@inproceedings{devlin2019bert,
  title = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019}
}"""

_EXBERT_ENTRY = """@inproceedings{tai2020exbert,
  title = {{exBERT}: Extending Pre-trained Models with Domain-specific Vocabulary Under Constrained Training Resources},
  author = {Tai, Wen and Kung, H. T. and Dong, Xin and Comiter, Marcus and Kuo, Chang-Fu},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2020},
  year = {2020}
}"""

_AF_ENTRY = """@misc{yan2022afadapter,
  title = {{AF} Adapter: Continual Pretraining for Building {Chinese} Biomedical Language Model},
  author = {Yan, Yongyu and Xue, Kui and Shi, Xiaoming and Ye, Qi and Liu, Jingping and Ruan, Tong},
  year = {2022},
  eprint = {2211.11363},
  archivePrefix = {arXiv}
}"""


_HOULSBY_ENTRY = """@inproceedings{houlsby2019adapters,
  title = {Parameter-Efficient Transfer Learning for {NLP}},
  author = {Houlsby, Neil and Giurgiu, Andrei and Jastrzebski, Stanislaw and Morrone, Bruna and de Laroussilhe, Quentin
    and Gesmundo, Andrea and Attariyan, Mona and Gelly, Sylvain},
  booktitle = {Proceedings of ICML},
  year = {2019}
}"""

_LORA_ENTRY = """@inproceedings{hu2022lora,
  title = {{LoRA}: Low-Rank Adaptation of Large Language Models},
  author = {Hu, Edward J. and Shen, Yelong and Wallis, Phillip and Allen-Zhu, Zeyuan and Li, Yuanzhi and Wang, Shean and
    Wang, Lu and Chen, Weizhu},
  booktitle = {Proceedings of ICLR},
  year = {2022}
}"""


def _describe_sources(facts: CardFacts) -> str:
    used = {
        _AF_ENTRY: any(each["heads"] or each["ffn_units"] for each in facts.extensions.domains.values()),
        _HOULSBY_ENTRY: any(each["bottleneck_size"] for each in facts.extensions.domains.values()),
        _EXBERT_ENTRY: facts.num_new_words > 0 or facts.extensions.module_hidden_size > 0,
        _LORA_ENTRY: facts.config.method.lora_rank > 0,
        _BERT_ENTRY: True,
    }
    entries = "\n\n".join(entry for entry, is_used in used.items() if is_used)
    return f"## Terms\n\n{facts.terms.describe()}\n\n## Citation\n\n```bibtex\n{entries}\n```"
