"""A trained model becomes a Hugging Face folder that needs torch and transformers only.

Enters: a run directory, from whose newest checkpoint the model is rebuilt. Leaves: one folder with safetensors,
config.json, the tokenizer, and README.md, the model card. An augmented model brings its code files as they are
(`auto_map`): `AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)` loads it. A model without
extensions is one of transformers' own again, which needs no code of ours.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import RunError
from domext_ray.export.card import build_card
from domext_ray.export.folder import HUGGINGFACE, ExportRecord, check_target, new_export
from domext_ray.export.vector_layout import write_vector_layout
from domext_ray.files import read_json
from domext_ray.model import domext as code_room
from domext_ray.model.base import POOLER
from domext_ray.model.build import detach, merge_extensions, name_plain, scale_extensions
from domext_ray.model.domext.configuration_domext import OWN_FIELDS, DomextConfig
from domext_ray.model.domext.heads_domext import PooledHeadModel
from domext_ray.model.layouts import find_layout
from domext_ray.progress import quiet_libraries
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import check_fit, fingerprint_tokenizer, load_tokenizer
from domext_ray.training.start import RebuiltRun, rebuild_run

CODE_FILES = tuple(sorted(path.name for path in Path(code_room.__path__[0]).glob("*_domext.py")))
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


def export_run(run_dir: Place, folder: Place, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Place:
    """Rebuild the model of a run's newest checkpoint, export it as a Hugging Face folder, and return that.

    The run's summary.json, where training has ended, gives the card its figures; `scale` is that of `scale_extensions`.
    """
    check_target(folder, HUGGINGFACE)
    run, path = rebuild_run(run_dir), run_dir / "summary.json"
    summary = (
        read_json(path, "delete it: the card is then without figures", {"train.steps": int}) if path.is_file() else {}
    )
    if summary and summary["train"]["steps"] != run.step:  # they would be another model's figures
        summary = {}
    model = cast(nn.Module, run.model)
    if scale != 1:
        scale_extensions(model, run.config.method, scale)
    merge_extensions(model)
    export_model(run, folder, dtype, summary, scale)
    return folder


def export_model(
    run: RebuiltRun,
    folder: Place,
    dtype: torch.dtype = torch.float32,
    summary: Mapping[str, Any] | None = None,
    scale: float = 1.0,
) -> None:
    """Write a run's model, its LoRA merged; `summary` and `scale` are told on its card. See `export_run`."""
    config, record = cast(DomextConfig, run.model.config), ExportRecord.of(HUGGINGFACE, run)
    with new_export(folder, record, run.spec.base.folder if run.spec.base else None) as temporary:
        save_tokenizer(run.tokenizer, temporary, config.vocab_size)
        save_model(run.model, temporary, dtype)
        write_vector_layout(temporary, config, run.config.objective.pooling)
        (temporary / "README.md").write_text(build_card(run, summary or {}, scale), encoding="utf-8")


def save_with_code(model: Any, folder: Path) -> None:
    """Save a model of this library with the code that it needs; its configuration gets the auto_map.

    AutoTokenizer reads config.json, too, and asks whether it may run code where it does not know `model_type`. So the
    one that stands there is that of the base's layout. Whoever loads the model as such, without its code, would leave
    its extensions out in silence: the activation, under the name that the layout reads, turns that into an error.
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


def is_plain(model: Any) -> bool:
    """Whether transformers has this model, with the same tensors, so that its folder needs no code of ours."""
    config, kind = model.config, type(model).__name__
    is_known = kind not in HEAD_AUTO_CLASSES or (kind in PLAIN_HEADS and find_layout(config).has_plain_heads)
    return is_known and not config.has_extension and not config.head_bilstm


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a model as transformers' own where that has it, or else with the code that it needs."""
    if not is_plain(model):
        save_with_code(copy.deepcopy(model).to("cpu", dtype), folder)
        return
    own, layout, kind = model.config, find_layout(model.config), type(model).__name__
    config = layout.restore(own, kind.removeprefix("Domext") if layout.has_plain_heads else "ForMaskedLM")
    names = name_plain(model)
    if kind in HEAD_AUTO_CLASSES:
        for field in ("id2label", "label2id", "problem_type", "task_thresholds", "classifier_dropout"):
            setattr(config, field, getattr(own, field))
        if isinstance(model, PooledHeadModel):
            names = {name: f"bert.{plain}" if name.startswith("pooler.") else plain for name, plain in names.items()}
        else:
            names = {name: plain for name, plain in names.items() if not name.startswith(POOLER)}
    config.dtype = dtype
    config.save_pretrained(folder)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in detach(model, names).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, num_rows: int) -> None:
    """Save the tokenizer of a model whose table has `num_rows`; refuse one that then loads as another."""
    check_fit(tokenizer, num_rows, "the model that is exported")
    tokenizer.save_pretrained(folder)
    # transformers has replaced pre-tokenizers by the model type's own when loading; such an export would be wrong.
    if fingerprint_tokenizer(load_tokenizer(folder)) != fingerprint_tokenizer(tokenizer):
        raise RunError(
            "the tokenizer does not survive saving and loading by transformers, so this model cannot be exported; "
            "save the base's tokenizer as a tokenizer.json that AutoTokenizer reads unchanged."
        )
