"""A fine-tuning run's trained models again, with their task: the directory's files -> what predicts.

Enters: trainings/ (tensors and thresholds), and of a run that has ended also config.yaml, run.json and
summary.json. Leaves: the models of every stage, checked to start from the same tensors and the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from domext_ray.config.finetune import DROPOUTS, FinetuneConfig
from domext_ray.config.options.declare import require
from domext_ray.errors import RunError, name_file
from domext_ray.families.losses import LossOptions, set_loss
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.registry import FAMILIES
from domext_ray.families.sets import load_labelled
from domext_ray.families.task import StagedTask, TaskOptions
from domext_ray.files import Kind, read_json
from domext_ray.finetuning.training import Fitted, Point, restore_task
from domext_ray.finetuning.word_dropout import DROPPING, name_model
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.runs.run_directory import CONFIG, RUN, TRAININGS, describe_other, read_config, read_identity
from domext_ray.runtime.trials import Ledger, Outcome, Trial
from domext_ray.storage import Place
from domext_ray.text.data.sources import require_files

_SUMMARY: dict[str, Kind] = {
    **{name: dict for name in ("best.point", "restarts.dev", "parameters", "set", "model", "train", "dev", "test")},
    **{"metric": str, "trainings": list, "failed": list},
}


def open_ledger(trainings: Place) -> Ledger:
    """Return the records of a run's trainings, given their folder."""
    return Ledger(trainings, "delete it: the same command trains this point of the grid again")


def make_set_task(config: FinetuneConfig, start: StartModel, data: LabelledSet) -> StagedTask:
    """Make the task of a configuration's set for the tokenizer of its start model."""
    labelled = config.labelled
    for name in DROPOUTS:
        kind, shares = name_model(start.tokenizer), getattr(config.grid, name)
        is_fit = kind in DROPPING or not any(shares)
        require(is_fit, f"grid.{name}", shares, f"0 with a tokenizer that is a {kind} model")
    family = FAMILIES[data.family]
    family.check_long_texts("labelled.long_texts", labelled.long_texts)
    options = TaskOptions(labelled.max_length, labelled.stride, labelled.context, labelled.long_texts)
    metric = labelled.metric or data.metric
    embed = TextEmbedding(start) if labelled.embedding_recall else None
    base_words = start.config.base_vocab_size
    task = family(data, start.tokenizer, options, metric=metric, embed=embed, base_words=base_words)
    if labelled.long_texts == "windows":
        task.limits.append(
            f"Texts above {labelled.max_length} tokens are read in windows, whose outputs `domext predict` and `domext "
            "serve` average; transformers reads one row."
        )
    set_loss(task, LossOptions(labelled.class_weights, config.optim.label_smoothing))
    if any(config.grid.new_word_dropout) and not start.config.extension_vocab_size:
        task.keep_note(f"{start.name} has no new words, so --grid.new_word_dropout changes nothing.")
    return task


def restore_stages(
    start: StartModel,
    task: StagedTask,
    config: FinetuneConfig,
    trainings: Place,
    training: Outcome,
    device: torch.device,
) -> dict[str, Fitted]:
    """Make the models of one training again, by the name of their stage."""
    point, thresholds = Point(**training.config), training.reached["thresholds"]
    return {
        name: restore_task(
            start,
            stage,
            config,
            point,
            device,
            load_file(trainings / point.key / f"{name}.safetensors"),
            thresholds[name],
        )
        for name, stage in task.stages.items()
    }


@dataclass(frozen=True)
class FinetunedModel:
    """The best training of a fine-tuning run."""

    folder: Place  # the run's directory
    config: FinetuneConfig
    start: StartModel
    task: StagedTask
    fitted: dict[str, Fitted]  # the trained model of every stage
    summary: dict[str, Any]  # content of summary.json


def rebuild_finetuned(folder: Place, device: torch.device, *, data: str = "", model: str = "") -> FinetunedModel:
    """Make the best model of a fine-tuning run that has ended again, to predict with it.

    `data` and `model` say where its labelled files and its start model are now; empty: where they were.
    """
    config, identity, summary = _read_run(folder)
    config = replace(config, data=data or config.data, model=model or config.model)
    labelled = load_labelled(config)
    start = open_model(config.model).load(step=config.model_step, keep_head=config.keep_head)
    for option, found in (("data_sha256", labelled.sha256), ("model_sha256", start.sha256)):
        if identity[option] != found:
            option = option.removesuffix("_sha256")
            given = f"--{option} {getattr(config, option)!r} is not what {folder} was trained with"
            advice = f"give --{option} where that is"
            if option == "data":
                require_files(folder, lambda: labelled.files, f"so that {given}; {advice}")
            raise RunError(f"{given}: it has other {'examples' if option == 'data' else 'weights'}; {advice}.")
    task = make_set_task(config, start, labelled)
    if differing := describe_other({name: identity.get(name) for name in task.identity}, task.identity):
        raise RunError(f"{folder} was trained otherwise ({'; '.join(differing)}); train again with another --run.name.")
    point = Point(**summary["best"]["point"])
    try:
        with name_file(folder / TRAININGS):
            best = open_ledger(folder / TRAININGS).read(Trial(point.key, summary["best"]["point"]))
            fitted = restore_stages(start, task, config, folder / TRAININGS, best, device)
    except (OSError, IndexError) as error:
        raise RunError(
            f"{folder / TRAININGS} lacks the best training's tensors ({point.key}); run it again elsewhere."
        ) from error
    return FinetunedModel(folder, config, start, task, fitted, summary)


def _read_run(folder: Place) -> tuple[FinetuneConfig, Mapping[str, Any], dict[str, Any]]:
    if (folder / "checkpoints").is_dir():
        raise RunError(f"{folder} is a run of pre-training; give the directory of a fine-tuning run.")
    if not all((folder / name).is_file() for name in ("summary.json", RUN, CONFIG)):
        raise RunError(f"{folder} is no fine-tuning run that has ended; finish it with its own command.")
    summary = read_finetune_summary(folder)
    identity = read_identity(folder, {"data_sha256": str, "model_sha256": str})
    assert identity is not None
    return read_config(folder, FinetuneConfig), identity, summary


def read_finetune_summary(folder: Place) -> dict[str, Any]:
    """Read the summary.json of a fine-tuning run that has ended."""
    remedy = "delete it and run the job again, which writes it anew"
    return read_json(folder / "summary.json", remedy, _SUMMARY)
