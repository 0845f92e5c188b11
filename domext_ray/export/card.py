"""The model card: what a model is, how it was made and how good it is, as README.md of its folder.

Enters: a run's model, or what another card tells. Leaves: Markdown with the header of the Hugging Face hub. What every
card says is in `assets/card.md`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from jinja2 import Environment, FileSystemLoader

from domext_ray.config.extensions.base import AdapterPart
from domext_ray.config.extensions.table import ADAPTER_PARTS, EXTENSIONS
from domext_ray.config.options.submitted import hide_places
from domext_ray.config.pretrain import SettledConfig
from domext_ray.files import ASSETS, split_paths
from domext_ray.model.build import has_router
from domext_ray.model.domext.configuration_domext import AdapterConfig, DomextConfig
from domext_ray.report.figures import list_columns, list_figures
from domext_ray.report.tables import format_markdown
from domext_ray.text.data.names import SHIPPED_BASE
from domext_ray.training.router import describe_router
from domext_ray.training.start import RebuiltRun

_BERT = """@inproceedings{devlin2019bert,
  title = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019}
}"""


@dataclass(frozen=True)
class Terms:
    """On which terms a base may be used, and so what grows from it."""

    license: str = "unknown"  # identifier in the header of its card, if it names one
    name: str = ""  # the licence's, where the identifier is "other"
    text: str = ""  # what its card says under "Terms"; one paragraph

    def describe(self) -> str:
        """Return what a card of something that was made from the base says under "Terms"."""
        named = f"The base's card names the licence `{self.name or self.license}`."
        known = "No licence is known for the weights." if self.license == "unknown" else named
        standing = "What was trained on other text is under the terms of that text, too. The code is Apache-2.0."
        return " ".join(filter(None, (self.text, known, standing)))


def read_terms(folder: Path) -> Terms:
    """Return the terms that the README.md of a base, or of an export, names; one with a broken header names none."""
    path, header = folder / "README.md", {}
    if not path.is_file():
        return Terms()
    with contextlib.suppress(ValueError, yaml.YAMLError):
        header = metadata_load(path) or {}
    license, name = (value if isinstance(value, str) else "" for value in map(header.get, ("license", "license_name")))
    terms = Terms(license or "unknown", name)
    content = path.read_text(encoding="utf-8", errors="replace")
    section = re.search(r"^## Terms\b[^\n]*\n(.*?)(?=^#|^```|\Z)", content, re.DOTALL | re.MULTILINE)
    text = " ".join(section[1].split()).removesuffix(terms.describe()) if section else ""
    return Terms(terms.license, terms.name, text.strip())


def name_base(base: str) -> str:
    """Return a base's id; of a folder only the last part, which tells nothing about the machine."""
    folder = Path(base).expanduser()
    return folder.resolve().name if folder.is_dir() else hide_places(base)


def render_card(
    title: str,
    base: str,
    terms: Terms,
    header: Mapping[str, Any],
    results: Iterable[EvalResult] = (),
    *,
    relation: str = "finetune",
    **values: Any,
) -> str:
    """Return a card; results whose value is no number are left out.

    `base` is a hub id, which the header names, a folder, or a name of this project's. `header` has fields of
    `ModelCardData`, and `values` what else `assets/card.md` asks for; a section that lacks its value is left out.
    """
    more: dict[str, Any] = {}
    if base not in ("none", SHIPPED_BASE) and not Path(base).expanduser().exists():
        more |= {"base_model": base, "base_model_relation": relation}
    if measured := [result for result in results if math.isfinite(result.metric_value)]:
        rounded = [replace(result, metric_value=round(result.metric_value, 4)) for result in measured]
        more |= {"model_name": title, "eval_results": rounded}
    data = ModelCardData(license=terms.license, license_name=terms.name or None, **header, **more)
    loader = FileSystemLoader(ASSETS)
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template("card.md").render(
        data=data.to_yaml(), title=title, terms=terms.describe(), **values
    )


def build_card(run: RebuiltRun, summary: Mapping[str, Any], scale: float = 1.0) -> str:
    """Return the card of a pre-trained model, with the figures of its summary.json, at a scale of 1; empty: none."""
    config, shape = run.config, cast(DomextConfig, run.model.config)
    makes_vectors = config.objective.makes_vectors
    rows, results = _list_figures(summary if scale == 1 else {})
    header = [name for name in list_columns(summary) if name != "change"]
    facts = [fact for fact in {**_list_facts(run, summary), "Scale": describe_scale(scale)}.items() if all(fact)]
    hub = [match[1] for path in split_paths(config.corpus) if (match := re.match(r"hf://([^:@]+)", path))]
    kind = "sentence-similarity" if makes_vectors else "masked-lm"
    used = [
        paper
        for extension in EXTENSIONS
        if extension.describe(shape, config.method)
        for paper in extension.find_papers(shape)
    ]
    cited = dict.fromkeys(paper.bibtex for paper in used if paper)  # two parts may be one paper's
    return render_card(
        run.name,
        config.base,
        read_terms(run.spec.base.folder) if run.spec.base else Terms(),
        {
            "library_name": "sentence-transformers" if makes_vectors else "transformers",
            "pipeline_tag": "sentence-similarity" if makes_vectors else "fill-mask",
            "datasets": [name.partition("@")[0] for name in hub] or None,
            "tags": ["domext", "domain-adaptation", kind, "bert", config.method.name],
        },
        results,
        sections=[
            f"A BERT for text of one domain, trained by {_describe_objective(config)}.",
            rows and f"## Before and after\n\n{format_markdown(header, rows)}",
            f"## How it was made\n\n{format_markdown(('', ''), facts, num_texts=2)}",
        ],
        vectors=makes_vectors,
        auto_class="AutoModelForMaskedLM",
        trusts=shape.has_extension,
        routes=has_router(shape),
        bibtex="\n\n".join([*cited, _BERT]),
        use="Meant for: predicting masked words, embedding text, and as the start of fine-tuning, on text like the one "
        "that it was\ntrained on. Whoever uses it checks it on text of their own first; the figures above are of one "
        "run.\n\nNot meant for: generating text, facts that nobody checks, or decisions about people.",
    )


def _list_facts(run: RebuiltRun, summary: Mapping[str, Any]) -> dict[str, str]:
    """Return how a model was made, by name; what it does not have is empty."""
    config, counts = run.config, run.spec.counts
    method, shape = config.method, cast(DomextConfig, run.model.config)
    said = {
        extension: extension.describe(shape, method)
        for extension in EXTENSIONS
        if not isinstance(extension, AdapterPart)
    }
    added = [text for extension, text in said.items() if text and not extension.is_merged]
    added += [_describe_adapter(name, adapter) for name, adapter in shape.adapters.items()]
    merged = " and ".join(text for extension, text in said.items() if text and extension.is_merged)
    trained = {
        "all": "every parameter",
        "top_layers": f"the top {method.top_layers} layer(s)",
        "layer_norms": "the LayerNorms",
        "biases": "the biases",
    }.get(method.trains, f"the adapter `{method.adapter}`" if len(shape.adapters) > 1 else "the extension")
    trained += " and the heads" if method.train_heads else ""
    is_reversible = added and method.trains != "all" and not (method.train_heads or merged or config.init_from)
    return {
        "Base": "none (random weights)" if config.base == "none" else f"`{name_base(config.base)}`",
        "Base's sha256 (fp32 tensors and their names)": f"`{run.spec.base_sha256}`",
        "Added to the base": "; ".join(added),
        "Merged into the base": merged,
        "Without what was added": "the base again, bit for bit" if is_reversible else "",
        "Text": f"`{hide_places(config.corpus)}`",
        "Parameters": f"{counts.total:,}",
        "Trained": f"{trained}: {counts.trainable:,} ({counts.trainable_frac:.2%} of base and extension)",
        "Optimiser steps": f"{run.step:,} of {config.train.global_batch_size} rows",
        "Tokens read": f"{summary['train']['tokens']:,}" if summary else "not recorded",
        "Longest row": f"{max(config.train.seq_length, config.train.long_seq_length)} tokens",
        "Masking": _describe_masking(config),
        "Router": describe_router(config, summary.get("router")),
        "Peak learning rate": f"{config.optim.lr:g}",
        "Seed": f"{config.seed}",
    }


def describe_scale(scale: float) -> str:
    """Say by what all is multiplied that was added to a base; empty: it is as it was trained."""
    return "" if scale == 1 else f"{scale:g} (1: as it was trained, 0: the base)"


def _describe_adapter(name: str, adapter: AdapterConfig) -> str:
    """Say what an adapter adds, to which layers, and after which papers."""
    parts = [part for part in ADAPTER_PARTS if getattr(adapter, part.size)]
    added = [part.describe_part(adapter) for part in parts if not part.in_layers]
    layers = " and ".join(part.describe_part(adapter) for part in parts if part.in_layers)
    added += [f"in each of the layers {adapter.first_layer} to {adapter.last_layer} {layers}"] if layers else []
    papers = ", ".join(dict.fromkeys(paper.name for part in parts if (paper := part.find_paper(adapter))))
    return f"as the adapter `{name}`, {' and '.join(added)}" + (f" ({papers})" if papers else "")


def _describe_objective(config: SettledConfig) -> str:
    if config.objective.is_causal:
        return "predicting the next token from those before it"
    if config.objective.makes_vectors:
        told = "two texts that belong together" if config.prepare.pair else "the same text"
        return f"telling vectors of {told} from those of others (InfoNCE within a batch)"
    text = "masked-language modelling" + (" and next-sentence prediction" if config.objective.next_sentence else "")
    if config.replay.corpus:
        kept = ", keeping to the base's predictions on it" if config.objective.keep == "kl" else ""
        written = " written by the base" if config.replay.is_written else ""
        text += f", with {config.replay.frac:.0%} of general text{written}{kept}"
    further = ", ".join(part.name for part in config.mixture.list_parts())
    return f"{text}, also on {further}" if further else text


def _describe_masking(config: SettledConfig) -> str:
    objective = config.objective
    if objective.is_causal:
        return "none; a token attends to those before it only"
    if objective.makes_vectors:
        pooled = {"mean": "the mean of its tokens' states", "cls": "its first token's state"}[objective.pooling]
        return f"none; a text's vector is {pooled}"
    return f"{objective.mask_prob:.0%} of {'whole words' if objective.whole_word else 'tokens'}"


def _list_figures(summary: Mapping[str, Any]) -> tuple[list[list[str]], list[EvalResult]]:
    """Return the table of what was measured before and after, and the hub's evaluation results."""
    rows, results = [], []
    for name, figure in (list_figures(summary) if summary else {}).items():
        if figure.is_measured:
            start = [figure.before, *([figure.untrained] if "of_base" in summary else [])]
            values = [*start, figure.after, *([figure.routed] if "routed" in summary else [])]
            rows.append([figure.help, *map(figure.show, values)])
        if "mlm_loss" in summary["domain"] and "bits" not in name and figure.after is not None:
            text, _, metric = figure.help.partition(", ")
            result = EvalResult(
                task_type="fill-mask",
                task_name="Masked-language modelling",
                dataset_type="general" if name == "general" else "domain",
                dataset_name=text,
                metric_type="loss" if name == "loss" else "accuracy",
                metric_name=metric,
                metric_value=figure.after,
            )
            results.append(result)
    return rows, results
