"""A run's model, as its first step finds it and as a checkpoint has it.

exBERT's second stage trains every parameter, going on from a first stage that trained the extension alone (section
3.3); BERT's second phase goes on with longer rows. Either is a run of its own with `--init_from RUN`: it starts from
the newest checkpoint of RUN, with fresh moments and a schedule of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import RunOptions, SettledConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.model.base import Base, load_base, name_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.domext.words_domext import WordShift
from domext_ray.model.spec import ModelSpec
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import find_frequent_words
from domext_ray.text.vocabulary.extension import check_appended, load_extension
from domext_ray.text.vocabulary.tokenizer import fingerprint_tokenizer, load_tokenizer
from domext_ray.training.checkpoint import Checkpoint, find_latest, wait_for_checkpoint
from domext_ray.training.router import attach_routers
from domext_ray.training.run import Run, Start

NEW_WORD_TENSORS = ("bert.embeddings.extension.weight", "cls.predictions.extension.bias")


def find_start(config: RunOptions, base: Base | None, run_dir: Place, stored: Mapping[str, Any]) -> Start:
    """Find the checkpoint of an earlier run, on the same base, that a run starts from (`init_from`).

    A run that has checkpoints of its own, in `run_dir`, does not look at the earlier one again: `stored`, the identity
    that it began with, says what it started from.
    """
    earlier, base_sha256 = Place(config.init_from).resolve(), base.sha256 if base else "none"
    own = find_latest(run_dir / "checkpoints", hashes=False, provisional=True)
    if own is not None and "init_sha256" in stored:
        return Start(earlier, own, str(stored["init_sha256"]))
    if not earlier.is_dir():
        raise ConfigError(f"--init_from is {config.init_from!r}, which does not exist; give the directory of a run.")
    try:
        read_config(earlier, SettledConfig)
    except RunError as error:
        raise RunError(f"--init_from {str(earlier)!r}: {error}") from error
    latest = find_latest(earlier / "checkpoints")
    if latest is None:
        raise RunError(f"--init_from {str(earlier)!r} holds no usable checkpoint; finish that run first.")
    record = latest.run_info
    if record["base_sha256"] != base_sha256:
        raise RunError(
            f"--init_from {str(earlier)!r} was trained on a base of sha256 {record['base_sha256'][:12]}, and --base is "
            f"{base_sha256[:12]}; give the base of that run ({record['base']!r})."
        )
    return Start(earlier, latest, latest.tensors_sha256)


def check_vocabulary(start: Start, tokenizer_dir: Path) -> None:
    """Refuse new words that are not those of the earlier run, or these and more: an id must mean the same in both."""
    run_dir, own_dir = start.run_dir, (start.run_dir / "tokenizer").local()
    old, new = load_extension(own_dir), load_extension(tokenizer_dir)
    if old is not None and new is None:
        raise RunError(
            f"--init_from {str(run_dir)!r} has {len(old.words):,} new words and this run has none; give its vocabulary "
            f"as --vocab.words {str(own_dir)!r}."
        )
    if old is not None and new is not None:
        check_appended(old, new)
    elif new is None and fingerprint_tokenizer(load_tokenizer(own_dir)) != fingerprint_tokenizer(
        load_tokenizer(tokenizer_dir)
    ):
        raise RunError(f"--init_from {str(run_dir)!r} was made with another tokenizer; give the base of that run.")


def apply_start(model: DomextForMaskedLM, start: Checkpoint, run_dir: Place) -> None:
    """Put an earlier run's parameters into a model; rows of new words that were appended since keep their start."""
    own = _name_tensors(model)
    with torch.no_grad():
        for name, value in start.changed.items():
            param = own.get(name)
            if param is not None and name in NEW_WORD_TENSORS and param.shape[0] > value.shape[0]:
                param[: value.shape[0]].copy_(value)
            elif param is None or param.shape != value.shape:
                raise RunError(
                    f"--init_from {str(run_dir)!r} has a trained tensor {name} of shape {tuple(value.shape)}, and the "
                    f"model here has {tuple(param.shape) if param is not None else 'none'}; give the extensions of "
                    "that run (--method.*, --vocab.*)."
                )
            else:
                param.copy_(value)


def find_base_beside(config: RunOptions, spec: ModelSpec) -> Base | None:
    """Return the base that a run's model does not begin as, which is then asked itself what it predicts.

    None: the model begins as its base, the base fills no masks, or the run goes on from another one.
    """
    base = spec.base
    is_apart = base is not None and base.has_mlm_head and not (spec.begins_as_base or config.init_from)
    return base if is_apart and config.objective.kind == "masked" else None


def pick_fixed(model: DomextForMaskedLM, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of those tensors that do not train: checkpoints must carry what was changed of them."""
    own = _name_tensors(model)
    return {name: own[name].detach().cpu().clone() for name in names if not own[name].requires_grad}


def begin(run: Run, model: DomextForMaskedLM) -> dict[str, Tensor]:
    """Bring the model of a run that has no checkpoint of its own to where its first step starts.

    Returns the frozen tensors that differ from the base, by name, for checkpoints to carry.
    """
    adapter, changed = run.config.method.adapter, set[str]()
    if run.start is not None:
        start = wait_for_checkpoint(run.start.run_dir / "checkpoints", run.start.checkpoint)
        apply_start(model, start, run.start.run_dir)
        changed = {*start.changed}
    shifts = model.bert.embeddings.adapters
    if adapter in shifts and adapter not in run.spec.earlier.adapters:
        rows = cast(WordShift, shifts[adapter]).rows
        if rows is not None:  # it shifts some of the base's words: those that the corpus has most often
            size = cast(DomextConfig, model.config).base_vocab_size
            rows.copy_(torch.from_numpy(find_frequent_words(run.inputs.domain, size, len(rows))))
            changed.add(f"bert.embeddings.adapters.{adapter}.rows")
    return pick_fixed(model, changed)


@dataclass(frozen=True)
class RebuiltRun:
    """The model of one of a run's checkpoints, and what it was made from."""

    name: str  # the run's
    config: SettledConfig
    spec: ModelSpec  # its `earlier`: all extensions of the model, as the checkpoint describes them
    model: DomextForMaskedLM  # LoRA's updates beside the base's matrices
    tokenizer: PreTrainedTokenizerBase
    step: int  # optimiser steps made
    checkpoint_sha256: str  # what the checkpoint's tensors are recognised by


def rebuild_run(run_dir: Place, step: int = 0) -> RebuiltRun:
    """Rebuild the model of one of a run's checkpoints: its base, with what was trained put over it.

    Step 0 is the newest checkpoint.
    """
    config = read_config(run_dir, SettledConfig)
    checkpoint = find_latest(run_dir / "checkpoints", step)
    if checkpoint is None:
        asked = f" of step {step}" if step else ""
        raise RunError(
            f"{run_dir / 'checkpoints'} holds no usable checkpoint{asked}; repeat the command that trains this run."
        )
    with name_base(f"{run_dir}: the base"):
        base = None if config.base == "none" else load_base(config.base, next_sentence=config.objective.next_sentence)
    path, expected, found = checkpoint.path, checkpoint.run_info["base_sha256"], base.sha256 if base else "none"
    if found != expected:
        raise RunError(
            f"{path} was made with a base of sha256 {expected[:12]}, and {config.base!r} now has {found[:12]}; "
            "bring the original base back."
        )
    tokenizer_dir, own = (run_dir / "tokenizer").local(), base.config if base else DomextConfig()
    spec = ModelSpec.of(config, base, checkpoint.extensions).with_tokenizer(tokenizer_dir)
    spec = replace(spec, dropout=own.hidden_dropout_prob, attention_dropout=None)
    model = spec.load(checkpoint.changed, path)
    attach_routers(model, run_dir)
    tokenizer, sha256 = load_tokenizer(tokenizer_dir), checkpoint.tensors_sha256
    return RebuiltRun(run_dir.name, config, spec, model, tokenizer, checkpoint.step, sha256)


def _name_tensors(model: DomextForMaskedLM) -> dict[str, Tensor]:
    """The tensors that a checkpoint may hold: parameters, and which words are shifted."""
    module = cast(nn.Module, model)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
