"""The model of a finished or stopped run, rebuilt from a checkpoint: its base, with what was trained put over it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import RunError
from domext_ray.model.base import Base, load_base, name_base
from domext_ray.model.build import Extensions
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest
from domext_ray.training.router import attach_routers
from domext_ray.training.start import build_run_model, changed_tensors, read_run_config
from domext_ray.vocabulary.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RebuiltRun:
    """The model of one of a run's checkpoints, and what it was made from."""

    name: str  # the run's
    config: PretrainConfig
    base: Base | None  # None for random weights
    model: DomextForMaskedLM  # LoRA's updates beside the base's matrices
    tokenizer: PreTrainedTokenizerBase
    step: int  # optimiser steps made
    extensions: Extensions  # of the model, as the checkpoint describes them
    checkpoint_sha256: str  # what the checkpoint's tensors are recognised by

    @property
    def base_sha256(self) -> str:
        """The hash of the base's tensors; "none" without a base."""
        return self.base.sha256 if self.base else "none"


def rebuild_run(run_dir: Place, step: int = 0) -> RebuiltRun:
    """Rebuild the model of one of a run's checkpoints.

    Args:
        run_dir: the run's directory (config.yaml, tokenizer/, checkpoints/).
        step: the checkpoint's step; 0: the newest.

    Raises:
        RunError: no run, no usable checkpoint, or one that was made with another base or model.
        BaseModelError: the base is not to be had.
    """
    config = read_run_config(run_dir)
    checkpoint = find_latest(run_dir / "checkpoints", step)
    if checkpoint is None:
        asked = f" of step {step}" if step else ""
        raise RunError(f"{run_dir / 'checkpoints'} holds no usable checkpoint{asked}; run the training job again.")
    with name_base(f"{run_dir}: the base"):
        base = None if config.base == "none" else load_base(config.base, next_sentence=config.objective.next_sentence)
    path, expected, found = checkpoint.path, checkpoint.run_info["base_sha256"], base.sha256 if base else "none"
    if found != expected:
        raise RunError(
            f"{path} was made with a base of sha256 {expected[:12]}, and {config.base!r} now has {found[:12]}; "
            "bring the original base back."
        )
    dropout = base.config.hidden_dropout_prob if base else DomextConfig().hidden_dropout_prob
    extensions = checkpoint.extensions
    tokenizer_dir = (run_dir / "tokenizer").local()
    model = build_run_model(config, base, tokenizer_dir, dropout, extensions)
    tensors = changed_tensors(checkpoint)
    shapes = {name: each.shape for name, each in model.state_dict().items()}
    missing = {name for name, each in model.named_parameters() if each.requires_grad} - tensors.keys()
    if wrong := missing | {name for name, each in tensors.items() if each.shape != shapes.get(name)}:
        raise RunError(f"{path} does not fit the model that config.yaml describes (first at {min(wrong)}).")
    model.load_state_dict(tensors, strict=False)
    attach_routers(model, run_dir)
    tokenizer, sha256 = load_tokenizer(tokenizer_dir), checkpoint.tensors_sha256
    return RebuiltRun(run_dir.name, config, base, model, tokenizer, checkpoint.step, extensions, sha256)
