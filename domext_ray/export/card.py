"""The model card: what a model is, how it was made and how good it is, as README.md of its folder.

Enters: `CardFacts`. Leaves: Markdown with the YAML header of the Hugging Face hub.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.extensions.anatomy import DomainPart
from domext_ray.extensions.table import DOMAIN_PARTS, EXTENSIONS
from domext_ray.files import split_paths
from domext_ray.model.base_folder import SHIPPED_BASE
from domext_ray.model.counts import ParameterCounts
from domext_ray.model.domext.configuration_domext import Domain, DomextConfig
from domext_ray.options.places import hide_places
from domext_ray.runs.losses import MLM, find_losses
from domext_ray.training.router import describe_router

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
        shape: the model's configuration.
        num_steps: optimiser steps made.
        summary: content of the run's summary.json, for the figures before and after; empty: no figures.
    """

    name: str
    config: PretrainConfig
    base_sha256: str
    terms: Terms
    counts: ParameterCounts
    shape: DomextConfig
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
        """Whether the model is more than a plain encoder, or another, so that its folder brings code."""
        return self.shape.has_extension


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
    makes_vectors = facts.config.objective.makes_vectors
    header: dict[str, Any] = {
        "library_name": "sentence-transformers" if makes_vectors else "transformers",
        "pipeline_tag": "sentence-similarity" if makes_vectors else "fill-mask",
        **facts.terms.header,
        **describe_base_model(facts.config.base),
    }
    hub = [each.removeprefix("hf://") for each in split_paths(facts.config.corpus) if each.startswith("hf://")]
    header |= {"datasets": [each.partition("@")[0] for each in hub]} if hub else {}
    kind = "sentence-similarity" if makes_vectors else "masked-lm"
    header["tags"] = ["domext", "domain-adaptation", kind, "bert", facts.config.method.name]
    if facts.summary and not makes_vectors:
        header["model-index"] = [{"name": facts.name, "results": _list_results(facts)}]
    sections = [
        f"# {facts.name}",
        _describe_model(facts),
        _describe_figures(facts),
        _describe_making(facts),
        *([_VECTOR_LOADING.format(", trust_remote_code=True" if facts.has_extension else "")] if makes_vectors else []),
        _LOADING if facts.has_extension else _PLAIN_LOADING,
        _USE,
        _describe_sources(facts),
    ]
    head = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(each for each in sections if each) + "\n"


def describe_base_model(base: str) -> dict[str, str]:
    """Return the header's fields of the model that another is made from; none unless it is the hub's.

    Args:
        base: a hub id, a folder, or a name of this project's.
    """
    is_hub_id = base not in ("none", SHIPPED_BASE) and not Path(base).expanduser().exists()
    return {"base_model": base, "base_model_relation": "finetune"} if is_hub_id else {}


def _list_results(facts: CardFacts) -> list[dict[str, Any]]:
    """Return the run's figures after training as the hub's evaluation results."""
    domain, general = facts.summary["domain"], facts.summary["general"]
    task = {"type": "fill-mask", "name": "Masked-language modelling"}
    figures = {
        ("domain", "Held-out text of the domain"): {
            ("loss", "Masked-LM loss (nats per token)"): domain["mlm_loss"]["after"],
            ("accuracy", "Masked tokens predicted"): domain["mlm_accuracy"]["after"],
        },
        ("general", "General sentences"): {
            ("accuracy", "Masked words predicted"): general["mlm_accuracy"]["after"],
        },
    }
    results = []
    for (kind, dataset), metrics in figures.items():
        measured = [
            {"type": metric, "name": name, "value": round(value, 4)}
            for (metric, name), value in metrics.items()
            if value is not None and math.isfinite(value)
        ]
        if measured:
            results.append({"task": task, "dataset": {"type": kind, "name": dataset}, "metrics": measured})
    return results


def _describe_model(facts: CardFacts) -> str:
    method, objective = facts.config.method, _describe_objective(facts.config)
    shape = facts.shape
    others = [each for each in EXTENSIONS if not isinstance(each, DomainPart)]
    parts = [each.describe(shape, method) for each in others if not each.is_merged]
    parts = [*filter(None, parts), *(_describe_domain(name, domain) for name, domain in shape.domains.items())]
    merged = " and ".join(filter(None, (each.describe(shape, method) for each in others if each.is_merged)))
    start = "random weights" if facts.config.base == "none" else f"`{facts.base_name}`"
    if not parts:
        return f"A BERT of which {_describe_trained(method, merged)} trained by {objective}, from {start}."
    if method.trains == "all":
        return f"{start}, and {'; '.join(parts)}; every parameter was trained on domain text by {objective}."
    frozen = "every parameter but its heads' frozen" if method.train_heads else "every parameter frozen"
    text = f"{start} with {frozen}, and {'; '.join(parts)}; trained on domain text by {objective}."
    if method.trains == "domain" or len(shape.domains) > 1:
        text += f" This run trained the domain `{method.domain}`."
    if merged:
        return f"{text} {merged} are merged into the base."
    if facts.config.init_from:
        return text
    return f"{text} Taking the extension away gives the base back bit for bit."


def _describe_domain(name: str, domain: Domain) -> str:
    """Say what a domain adds, and to which layers; a paper is named once, after its last part."""
    parts = [part for part in DOMAIN_PARTS if getattr(domain, part.size)]
    papers = [part.paper for part in parts]
    said = {True: list[str](), False: list[str]()}
    for index, part in enumerate(parts):
        paper = f" ({part.paper})" if part.paper and part.paper not in papers[index + 1 :] else ""
        said[part.in_layers].append(part.describe_part(domain) + paper)
    layers = f"in each of the layers {domain.first_layer} to {domain.last_layer} {' and '.join(said[True])}"
    return f"for the domain `{name}`, {' and '.join([*said[False], *([layers] if said[True] else [])])}"


def _describe_trained(method: MethodConfig, merged: str) -> str:
    """Say which parameters of a model without extensions were trained, with the verb."""
    if merged:
        return f"{merged}, merged here, were"
    return {
        "top_layers": f"the top {method.top_layers} layer(s) were",
        "layer_norms": "the LayerNorms were",
        "biases": "the biases were",
    }.get(method.trains, "every parameter was")


_VECTOR_OBJECTIVES = {
    "denoise": "writing texts again from vectors of what is left of them (TSDAE)",
    "contrast": "telling vectors of the same text from those of others (InfoNCE within a batch)",
    "pairs": "telling vectors of two texts that belong together from those of others (InfoNCE within a batch)",
}
_VECTOR_FIGURES = {
    "denoise": ("nats per written token", "tokens written exactly"),
    "contrast": ("nats per row", "rows whose vector is nearest to their other view's"),
}
_POOLINGS = {"mean": "the mean of its tokens' states", "cls": "its first token's state"}


def _describe_objective(config: PretrainConfig) -> str:
    if config.objective.is_left_to_right:
        return "predicting the next token from those before it"
    if config.objective.makes_vectors:
        return _VECTOR_OBJECTIVES["pairs" if config.prepare.pair else config.objective.kind]
    text = "masked-language modelling" + (" and next-sentence prediction" if config.objective.next_sentence else "")
    kept = {"kl": ", keeping to the base's predictions on it", "replay": "", "none": ""}[config.objective.keep]
    written = " written by the base" if config.replay.is_written else ""
    text += f", with {config.replay.frac:.0%} of general text{written}{kept}" if config.replay.corpus else ""
    further = ", ".join(part.name for part in config.mixture.list_parts())
    return f"{text}, also on {further}" if further else text


def _describe_masking(config: PretrainConfig) -> str:
    objective = config.objective
    if objective.is_left_to_right:
        return "none; a token attends to those before it only"
    if objective.makes_vectors:
        return f"none; a text's vector is {_POOLINGS[objective.pooling]}"
    return f"{objective.mask_prob:.0%} of {'whole words' if objective.whole_word else 'tokens'}"


def _describe_figures(facts: CardFacts) -> str:
    summary, objective = facts.summary, facts.config.objective
    if not summary:
        return ""
    pairs: dict[str, tuple[dict[str, float | None], str]]
    if objective.makes_vectors:
        loss, share = _VECTOR_FIGURES[objective.kind]
        names = find_losses(summary["domain"]) or MLM
        pairs = {
            f"Held-out domain text, loss ({loss})": (summary["domain"][names.loss], "{:.3f}"),
            f"Held-out domain text, {share}": (summary["domain"][names.accuracy], "{:.1%}"),
        }
        return _format_figures(pairs)
    pairs = {
        "Held-out domain text, masked-LM loss (nats per token)": (summary["domain"]["mlm_loss"], "{:.3f}"),
        "Held-out domain text, masked tokens predicted": (summary["domain"]["mlm_accuracy"], "{:.1%}"),
        "Held-out domain text, masked words (bits per character)": (summary["domain"]["bits_per_character"], "{:.3f}"),
        **_list_word_bits(summary),
        "General sentences, masked words predicted": (summary["general"]["mlm_accuracy"], "{:.1%}"),
    }
    return _format_figures(pairs)


def _format_figures(pairs: dict[str, tuple[dict[str, float | None], str]]) -> str:
    rows = [
        f"| {name} | {_format(pair['before'], form)} | {_format(pair['after'], form)} |"
        for name, (pair, form) in pairs.items()
    ]
    return "\n".join(["## Before and after", "", "| | before | after |", "|---|---:|---:|", *rows])


def _list_word_bits(summary: dict[str, Any]) -> dict[str, tuple[dict[str, float | None], str]]:
    """The row of word bits; none where they were not measured."""
    bits = summary["domain"].get("word_bits_per_character")
    name = "Held-out domain text, words one at a time (word bits per character, which compare between vocabularies)"
    return {name: (bits, "{:.3f}")} if bits else {}


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
        "Router": describe_router(config, facts.summary.get("router")),
        "Peak learning rate": f"{config.optim.lr:g}",
        "Seed": f"{config.seed}",
    }
    table = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["## How it was made", "", "| | |", "|---|---|", *table])


_VECTOR_LOADING = """## Vectors of texts

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH_OF_THIS_FOLDER"{})
vectors = model.encode(["One text.", "Another text."], normalize_embeddings=True)
```"""

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

_USE = """## Use and limits

Meant for: predicting masked words, embedding text, and as the start of fine-tuning, on text like the one that it was
trained on. Whoever uses it checks it on text of their own first; the figures above are of one run.

Not meant for: generating text, facts that nobody checks, or decisions about people. It has the biases of its base and
of its text, and may repeat what that text says. Do not publish a model of private text without asking its owners."""

_BERT_ENTRY = """@inproceedings{devlin2019bert,
  title = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019}
}"""


def _describe_sources(facts: CardFacts) -> str:
    used = [each.citation for each in EXTENSIONS if each.describe(facts.shape, facts.config.method)] + [_BERT_ENTRY]
    entries = "\n\n".join(dict.fromkeys(filter(None, used)))  # two parts may be one paper's, and one may have none
    return f"## Terms\n\n{facts.terms.describe()}\n\n## Citation\n\n```bibtex\n{entries}\n```"
