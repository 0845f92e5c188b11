"""A trained model becomes a Hugging Face folder that needs torch and transformers only.

Enters: a model, its tokenizer and the facts for its card; or a run directory, from whose newest checkpoint the model is
rebuilt. Leaves: one folder with safetensors, config.json, the tokenizer, and README.md, the model card. An augmented
model brings its code files as they are (`auto_map`):
`AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)` loads it. A model without extensions is a plain
BERT or RoBERTa again, which needs no code of ours.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray import model as model_room
from domext_ray.config import PretrainConfig, from_dict
from domext_ray.corpus.vocab import fingerprint_tokenizer, load_tokenizer
from domext_ray.errors import RunError
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.graft import (
    Base,
    ParameterCounts,
    build_model,
    count_parameters,
    describe_plain,
    detach,
    load_base,
    name_plain,
)
from domext_ray.model.modeling_domext import DomextForMaskedLM
from domext_ray.training.checkpoint import Checkpoint, find_latest, load_checkpoint

CODE_FILES = ("configuration_domext.py", "layers_domext.py", "modeling_domext.py")
AUTO_MAP = {
    "AutoConfig": "configuration_domext.DomextConfig",
    "AutoModel": "modeling_domext.DomextModel",
    "AutoModelForMaskedLM": "modeling_domext.DomextForMaskedLM",
    "AutoModelForTokenClassification": "modeling_domext.DomextForTokenClassification",
    "AutoModelForSequenceClassification": "modeling_domext.DomextForSequenceClassification",
}


@dataclass(frozen=True)
class CardFacts:
    """What the model card says about a model.

    Args:
        name: the model's name.
        config: the run that made it.
        base_sha256: hash of the base's tensors; "none" without a base.
        license: licence identifier of the base's card; "unknown" where it names none.
        counts: parameters.
        num_steps: optimiser steps made.
        summary: content of the run's summary.json, for the figures before and after; empty: no figures.
    """

    name: str
    config: PretrainConfig
    base_sha256: str
    license: str
    counts: ParameterCounts
    num_steps: int
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def base_name(self) -> str:
        """The base's id; of a folder only the last part, which tells nothing about the machine."""
        base = self.config.base
        return Path(base).name if Path(base).is_dir() else base


def export_model(
    model: DomextForMaskedLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: CardFacts,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a model as a Hugging Face folder; an earlier export there is replaced when the new one is complete.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        folder: where to; made if missing.
        card: facts for README.md.
        dtype: how the tensors are stored.

    Returns:
        `folder`.

    Raises:
        RunError: `folder` holds something that is no export, or the disk refuses.
    """
    _check_target(folder)
    with _new_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        _check_tokenizer(tokenizer, temporary)
        config = cast(DomextConfig, model.config)
        if config.domains:
            _save_augmented(model, temporary, dtype)
        else:
            _save_plain(model, temporary, dtype)
        for path in temporary.glob("*.safetensors"):  # safetensors makes files that only their owner can read
            shutil.copymode(temporary / "config.json", path)
        (temporary / "README.md").write_text(build_card(card), encoding="utf-8")
    return folder


def _save_augmented(model: DomextForMaskedLM, folder: Path, dtype: torch.dtype) -> None:
    stored = copy.deepcopy(model)
    cast(nn.Module, stored).to(dtype)
    stored.config.auto_map = AUTO_MAP
    stored.save_pretrained(folder)
    for name in CODE_FILES:
        shutil.copyfile(Path(model_room.__path__[0], name), folder / name)


def _save_plain(model: DomextForMaskedLM, folder: Path, dtype: torch.dtype) -> None:
    """Save a model without extensions in the format of transformers' own BERT or RoBERTa."""
    config = describe_plain(cast(DomextConfig, model.config))
    config.dtype = dtype
    config.save_pretrained(folder)
    tensors = {name: each.to(dtype).contiguous() for name, each in detach(model, name_plain(model)).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def export_run(run_dir: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Rebuild the model of a run's newest checkpoint and export it.

    Args:
        run_dir: the run's directory (config.yaml, tokenizer/, checkpoints/; summary.json where training has ended).
        folder: where to.
        dtype: how the tensors are stored.

    Returns:
        `folder`.

    Raises:
        RunError: no run, no usable checkpoint, or one that was made with another base or model.
        BaseModelError: the base is not to be had.
    """
    _check_target(folder)
    config = _read_config(run_dir)
    latest = find_latest(run_dir / "checkpoints")
    if latest is None:
        raise RunError(f"{run_dir / 'checkpoints'} holds no usable checkpoint; run the training job again.")
    checkpoint = load_checkpoint(latest)
    base = None if config.base == "none" else load_base(config.base)
    _check_base(config, base, checkpoint, latest)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    model = build_model(
        base,
        config.shape,
        config.method,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        pad_token_id=tokenizer.pad_token_id,
        dropout=base.config.hidden_dropout_prob if base else DomextConfig().hidden_dropout_prob,
        seed=config.seed,
    )
    _load_tensors(model, checkpoint, latest)
    card = CardFacts(
        name=run_dir.resolve().name,
        config=config,
        base_sha256=checkpoint.record["base_sha256"],
        license=_read_license(base.folder) if base else "unknown",
        counts=count_parameters(
            cast(DomextConfig, model.config), config.method, base is not None and base.has_mlm_head
        ),
        num_steps=checkpoint.step,
        summary=_read_summary(run_dir / "summary.json", checkpoint.step),
    )
    return export_model(model, tokenizer, folder, card, dtype)


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; give the export a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_export(folder):
        raise RunError(f"{folder} holds files that are no export of this project; give another folder or empty it.")


def _is_export(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and config.get("model_type") in ("domext", "bert", "roberta")
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends without an error."""
    target = target.resolve()
    mark = uuid.uuid4().hex[:8]
    temporary, replaced = (target.with_name(f".{target.name}.{state}-{mark}") for state in ("incomplete", "replaced"))
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _flush(*temporary.rglob("*"), temporary)
        if target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
        _flush(target.parent)
    except OSError as error:
        if replaced.exists() and not target.exists():
            os.rename(replaced, target)
        raise RunError(f"the export cannot be written to {target} ({error.strerror or error}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def _flush(*paths: Path) -> None:
    """Bring files, and the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # transformers has replaced pre-tokenizers by the model type's own when loading; such an export would be wrong.
    if fingerprint_tokenizer(load_tokenizer(folder)) != fingerprint_tokenizer(tokenizer):
        raise RunError(
            "the tokenizer does not survive saving and loading by transformers, so this model cannot be exported; "
            "save the base's tokenizer as a tokenizer.json that AutoTokenizer reads unchanged."
        )


def _read_config(run_dir: Path) -> PretrainConfig:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise RunError(f"{run_dir} is no run directory: it has no config.yaml; give one that a training job made.")
    return from_dict(PretrainConfig, yaml.safe_load(path.read_text(encoding="utf-8")))


def _check_base(config: PretrainConfig, base: Base | None, checkpoint: Checkpoint, path: Path) -> None:
    found = base.sha256 if base else "none"
    expected = checkpoint.record["base_sha256"]
    if found != expected:
        raise RunError(
            f"{path} was made with a base of sha256 {expected[:12]}, and {config.base!r} now has {found[:12]}; "
            "bring the original base back."
        )


def _load_tensors(model: DomextForMaskedLM, checkpoint: Checkpoint, path: Path) -> None:
    """Put a checkpoint's tensors over the base's."""
    tensors: dict[str, Tensor] = {name: each.param for name, each in checkpoint.state.tensors.items()}
    tensors |= checkpoint.fixed
    own = dict(model.named_parameters())
    missing = {name for name, each in own.items() if each.requires_grad} - tensors.keys()
    unknown = tensors.keys() - model.state_dict().keys()
    misshapen = {name for name in tensors.keys() & own.keys() if tensors[name].shape != own[name].shape}
    wrong = sorted(missing | unknown | misshapen)
    if wrong:
        raise RunError(f"{path} does not fit the model that config.yaml describes (first at {wrong[0]}).")
    model.load_state_dict(tensors, strict=False)


def _read_summary(path: Path, step: int) -> dict[str, Any]:
    """The run's summary, unless it is of other steps than the checkpoint: it would be another model's figures."""
    if not path.exists():
        return {}
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary if summary["train"]["steps"] == step else {}


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


def _read_license(folder: Path) -> str:
    found = read_header(folder / "README.md").get("license")
    return found if isinstance(found, str) else "unknown"


def build_card(facts: CardFacts) -> str:
    """Return the model card: a YAML header, then what the model is, how it was made, how to load and cite it.

    Args:
        facts: what to say.
    """
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "fill-mask", "license": facts.license}
    if facts.config.base != "none":
        header["base_model"] = facts.base_name
    header["tags"] = ["domext", "domain-adaptation", "masked-lm", "bert", facts.config.method.name]
    sections = [
        f"# {facts.name}",
        _describe_model(facts),
        _describe_figures(facts.summary),
        _describe_making(facts),
        _LOADING if facts.config.method.name == "af" else _PLAIN_LOADING,
        _describe_sources(facts),
    ]
    head = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(each for each in sections if each) + "\n"


def _describe_model(facts: CardFacts) -> str:
    method = facts.config.method
    if method.name == "af":
        return (
            f"`{facts.base_name}` with every parameter frozen, and, for the domain `{method.domain}`, in each layer "
            f"{method.heads} extra attention head(s) and {method.ffn_units:,} extra FFN units, trained on domain text "
            "by masked-language modelling (AF Adapter). Taking the extension away gives the base back bit for bit."
        )
    start = "random weights" if facts.config.base == "none" else f"`{facts.base_name}`"
    return f"A BERT of which every parameter was trained by masked-language modelling, from {start}."


def _describe_figures(summary: dict[str, Any]) -> str:
    if not summary:
        return ""
    pairs = {
        "Held-out domain text, masked-LM loss (nats a token)": (summary["domain"]["mlm_loss"], "{:.3f}"),
        "Held-out domain text, masked tokens predicted": (summary["domain"]["mlm_accuracy"], "{:.1%}"),
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
        "Text": f"`{config.corpus}`",
        "Parameters": f"{counts.total:,}",
        "Trained": f"{counts.trainable:,} ({counts.trainable_frac:.2%} of base and extension)",
        "Optimiser steps": f"{facts.num_steps:,} of {config.train.global_batch_size} rows",
        "Tokens read": f"{facts.summary['train']['tokens']:,}" if facts.summary else "not recorded",
        "Longest row": f"{config.train.seq_length} tokens",
        "Masking": f"{config.objective.mask_prob:.0%} of {'whole words' if config.objective.whole_word else 'tokens'}",
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

torch and transformers are enough. The folder brings its own model code, hence `trust_remote_code=True`: read the three
`*_domext.py` files first if you did not make this folder yourself.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

folder = "PATH_OF_THIS_FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
```

`AutoModel`, `AutoModelForTokenClassification` and `AutoModelForSequenceClassification` load it in the same way."""

_BERT_ENTRY = """@inproceedings{devlin2019bert,
  title = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of NAACL-HLT},
  year = {2019}
}"""

_AF_ENTRY = """@misc{yan2022afadapter,
  title = {{AF} Adapter: Continual Pretraining for Building {Chinese} Biomedical Language Model},
  author = {Yan, Yongyu and Xue, Kui and Shi, Xiaoming and Ye, Qi and Liu, Jingping and Ruan, Tong},
  year = {2022},
  eprint = {2211.11363},
  archivePrefix = {arXiv}
}"""


def _describe_sources(facts: CardFacts) -> str:
    terms = (
        f"The base's card names the licence `{facts.license}`"
        if facts.license != "unknown"
        else "No licence is known for the weights"
    )
    entries = "\n\n".join([_AF_ENTRY, _BERT_ENTRY] if facts.config.method.name == "af" else [_BERT_ENTRY])
    return (
        f"## Terms and citation\n\n{terms}; the terms of the base and of the text hold. The code is Apache-2.0."
        f"\n\n```bibtex\n{entries}\n```"
    )
