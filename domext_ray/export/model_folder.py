"""A trained model becomes a Hugging Face folder that needs torch and transformers only.

Enters: a model, its tokenizer and the facts for its card; or a run directory, from whose newest checkpoint the model is
rebuilt. Leaves: one folder with safetensors, config.json, the tokenizer, and README.md, the model card. An augmented
model brings its code files as they are (`auto_map`):
`AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)` loads it. A model without extensions is one of
transformers' own again, which needs no code of ours.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.corpus.vocabulary.vocab import check_fit, fingerprint_tokenizer, load_tokenizer
from domext_ray.errors import RunError
from domext_ray.export.card import CardFacts, Terms, build_card, read_terms
from domext_ray.export.folder import HUGGINGFACE, ExportRecord, check_target, new_export
from domext_ray.export.vector_layout import write_vector_layout
from domext_ray.model import domext as code_room
from domext_ray.model.base import Base, load_base
from domext_ray.model.counts import count_parameters
from domext_ray.model.domext.configuration_domext import OWN_FIELDS, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.graft import Extensions, describe_plain, detach, merge_extensions, name_plain
from domext_ray.model.layouts.table import find_layout
from domext_ray.runtime.quiet import quiet_libraries
from domext_ray.storage import Place, Where
from domext_ray.training.checkpoint import Checkpoint, find_latest, load_checkpoint, read_tensors_sha256
from domext_ray.training.router import attach_routers
from domext_ray.training.start import build_run_model, changed_tensors, read_run_config

CODE_FILES = tuple(sorted(each.name for each in Path(code_room.__path__[0]).glob("*_domext.py")))
HEAD_AUTO_CLASSES = {
    "DomextForTokenClassification": "AutoModelForTokenClassification",
    "DomextForSpanClassification": "AutoModelForTokenClassification",
    "DomextForSequenceClassification": "AutoModelForSequenceClassification",
    "DomextForRelationClassification": "AutoModelForSequenceClassification",
    "DomextForQuestionAnswering": "AutoModelForQuestionAnswering",
    "DomextForMultipleChoice": "AutoModelForMultipleChoice",
}
"""A head of heads_domext.py -> the class of transformers that loads an export of it."""
PLAIN_HEADS = [head for head, auto in HEAD_AUTO_CLASSES.items() if auto.endswith(head.removeprefix("Domext"))]
"""Heads that transformers has, with the same tensors in layouts that have plain heads."""
AUTO_MAP = {
    "AutoConfig": "configuration_domext.DomextConfig",
    "AutoModel": "modeling_domext.DomextModel",
    "AutoModelForMaskedLM": "modeling_domext.DomextForMaskedLM",
    "AutoModelForPreTraining": "modeling_domext.DomextForPreTraining",
    **{HEAD_AUTO_CLASSES[head]: f"heads_domext.{head}" for head in PLAIN_HEADS},
}
_NEEDS_CODE = "none: give trust_remote_code=True, for this model brings its own code"


def map_head(name: str) -> dict[str, str]:
    """Return the auto_map of a model, given its class: transformers has none of its own for relations and spans."""
    return AUTO_MAP | ({HEAD_AUTO_CLASSES[name]: f"heads_domext.{name}"} if name in HEAD_AUTO_CLASSES else {})


def export_model(
    model: DomextForMaskedLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: Where,
    card: CardFacts,
    dtype: torch.dtype = torch.float32,
    made_from: ExportRecord | None = None,
) -> Where:
    """Write a model as a Hugging Face folder; an earlier export there is replaced when the new one is complete.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        folder: where to; made if missing.
        card: facts for README.md.
        dtype: how the tensors are stored.
        made_from: the checkpoint; None: the model was in memory.

    Returns:
        `folder`.

    Raises:
        RunError: `folder` holds something that is no export, or the disk refuses.
    """
    source, config = Path(card.config.base).expanduser(), cast(DomextConfig, model.config)
    with new_export(folder, made_from or ExportRecord(HUGGINGFACE, step=card.num_steps), source) as temporary:
        save_tokenizer(tokenizer, temporary, config.vocab_size)
        if config.has_extension:
            save_with_code(cast(nn.Module, copy.deepcopy(model)).to(dtype), temporary)
        else:
            save_plain(model, temporary, dtype)
        write_vector_layout(temporary, config, card.config.objective.pooling)
        (temporary / "README.md").write_text(build_card(card), encoding="utf-8")
    return folder


def save_with_code(model: Any, folder: Path) -> None:
    """Save a model with the code that it needs.

    AutoTokenizer reads config.json, too, and asks whether it may run code where it does not know `model_type`. So the
    one that stands there is that of the base's layout. Whoever loads the model as such, without its code, would leave
    its extensions out in silence: the activation, under the name that the layout reads, turns that into an error.

    Args:
        model: a model of this library; its configuration gets the auto_map.
        folder: where to.
    """
    model.config.auto_map = map_head(type(model).__name__)
    with quiet_libraries():
        model.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    layout = find_layout(model.config)
    activation, default = layout.fields["hidden_act"], layout.config_class()
    own = {name: values[name] for name in ("model_type", activation) if name in values}
    refused = [name for name, value in values.items() if value is None and getattr(default, name, None) is not None]
    own |= {name: values.pop(name) for name in refused}  # its checks would end AutoTokenizer, too
    values |= {"model_type": layout.config_class.model_type, activation: _NEEDS_CODE, OWN_FIELDS: own}
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in CODE_FILES:
        shutil.copyfile(Path(code_room.__path__[0], name), folder / name)


def save_plain(model: DomextForMaskedLM, folder: Path, dtype: torch.dtype) -> None:
    """Save a model without extensions in the format of transformers' own model of its layout."""
    config = describe_plain(cast(DomextConfig, model.config), next_sentence=model.predicts_next_sentence)
    save_tensors(config, detach(model, name_plain(model)), folder, dtype)


def save_tensors(config: PreTrainedConfig, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """Save a model of transformers' own, given its configuration and its tensors."""
    config.dtype = dtype
    config.save_pretrained(folder)
    tensors = {name: each.to(dtype).contiguous() for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, num_rows: int) -> None:
    """Save the tokenizer of a model whose table has `num_rows`; refuse one that then loads as another.

    Raises:
        RunError: it does.
        CorpusError: it does not fit the table.
    """
    check_fit(tokenizer, num_rows, "the model that is exported")
    tokenizer.save_pretrained(folder)
    # transformers has replaced pre-tokenizers by the model type's own when loading; such an export would be wrong.
    if fingerprint_tokenizer(load_tokenizer(folder)) != fingerprint_tokenizer(tokenizer):
        raise RunError(
            "the tokenizer does not survive saving and loading by transformers, so this model cannot be exported; "
            "save the base's tokenizer as a tokenizer.json that AutoTokenizer reads unchanged."
        )


@dataclass(frozen=True)
class RebuiltRun:
    """The model of a run's newest checkpoint, and what it was made from.

    Args:
        config: the run's configuration.
        base: its base; None for random weights.
        model: the model, LoRA's updates beside the base's matrices.
        tokenizer: its tokenizer.
        checkpoint: where its tensors are from.
        checkpoint_sha256: sha256 of the file that holds them.
    """

    config: PretrainConfig
    base: Base | None
    model: DomextForMaskedLM
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint
    checkpoint_sha256: str


def rebuild_run(where: Where, step: int = 0) -> RebuiltRun:
    """Rebuild the model of one of a run's checkpoints.

    Args:
        where: the run's directory (config.yaml, tokenizer/, checkpoints/).
        step: the checkpoint's step; 0: the newest.

    Raises:
        RunError: no run, no usable checkpoint, or one that was made with another base or model.
        BaseModelError: the base is not to be had.
    """
    run_dir = Place(where)
    config = read_run_config(run_dir)
    latest = find_latest(run_dir / "checkpoints", step)
    if latest is None:
        asked = f" of step {step}" if step else ""
        raise RunError(f"{run_dir / 'checkpoints'} holds no usable checkpoint{asked}; run the training job again.")
    checkpoint = load_checkpoint(latest)
    base = None if config.base == "none" else load_base(config.base, next_sentence=config.objective.next_sentence)
    _check_base(config, base, checkpoint, latest)
    dropout = base.config.hidden_dropout_prob if base else DomextConfig().hidden_dropout_prob
    earlier = Extensions(**checkpoint.record.get("extensions", {}))
    tokenizer_dir = (run_dir / "tokenizer").local()
    model = build_run_model(config, base, tokenizer_dir, dropout, earlier)
    _load_tensors(model, checkpoint, latest)
    attach_routers(model, run_dir)
    tokenizer = load_tokenizer(tokenizer_dir)
    return RebuiltRun(config, base, model, tokenizer, checkpoint, read_tensors_sha256(latest))


def export_run(where: Where, folder: Where, dtype: torch.dtype = torch.float32) -> Where:
    """Rebuild the model of a run's newest checkpoint and export it as a Hugging Face folder.

    Args:
        where: the run's directory; its summary.json, where training has ended, gives the card its figures.
        folder: where to.
        dtype: how the tensors are stored.

    Returns:
        `folder`.

    Raises:
        RunError: see `rebuild_run`, or `folder` holds something that is no export.
        BaseModelError: the base is not to be had.
    """
    run_dir = Place(where)
    check_target(folder, HUGGINGFACE)
    run = rebuild_run(run_dir)
    merge_extensions(cast(nn.Module, run.model))
    shape = cast(DomextConfig, run.model.config)
    heads = run.base.heads if run.base else ()
    card = CardFacts(
        name=run_dir.name,
        config=run.config,
        base_sha256=run.checkpoint.record["base_sha256"],
        terms=read_terms(run.base.folder) if run.base else Terms(),
        counts=count_parameters(
            shape,
            run.config.method,
            heads,
            next_sentence=run.config.objective.next_sentence,
            reads_words=run.config.objective.reads_words,
        ),
        shape=shape,
        num_steps=run.checkpoint.step,
        summary=_read_summary(run_dir / "summary.json", run.checkpoint.step),
    )
    made_from = ExportRecord(HUGGINGFACE, card.name, run.checkpoint.step, run.checkpoint_sha256)
    return export_model(run.model, run.tokenizer, folder, card, dtype, made_from)


def _check_base(config: PretrainConfig, base: Base | None, checkpoint: Checkpoint, path: Place) -> None:
    found = base.sha256 if base else "none"
    expected = checkpoint.record["base_sha256"]
    if found != expected:
        raise RunError(
            f"{path} was made with a base of sha256 {expected[:12]}, and {config.base!r} now has {found[:12]}; "
            "bring the original base back."
        )


def _load_tensors(model: DomextForMaskedLM, checkpoint: Checkpoint, path: Place) -> None:
    """Put a checkpoint's tensors over the base's."""
    tensors = changed_tensors(checkpoint)
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    missing = {name for name, each in model.named_parameters() if each.requires_grad} - tensors.keys()
    wrong = sorted(missing | {name for name, each in tensors.items() if each.shape != shapes.get(name)})
    if wrong:
        raise RunError(f"{path} does not fit the model that config.yaml describes (first at {wrong[0]}).")
    model.load_state_dict(tensors, strict=False)


def _read_summary(path: Place, step: int) -> dict[str, Any]:
    """The run's summary, unless it is of other steps than the checkpoint: it would be another model's figures."""
    if not path.is_file():
        return {}
    summary = json.loads(path.read_text())
    return summary if summary["train"]["steps"] == step else {}
