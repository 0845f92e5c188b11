"""A model becomes a folder that onnxruntime runs: no torch, no transformers, no code of ours.

Enters: a fine-tuning run or its export, a pre-training run, or an export or a base that fills masks. Leaves: a folder

    model.onnx, tokenizer.json   what a program needs (`export.onnx_graph` says inputs and outputs)
    labels.json                  of a task: labels in the order of the logits, and the thresholds that dev chose
    README.md                    the card, with such a program
    task.json and the like       what `domext predict` reads
    int8/                        asked for: such a folder again, its matrices in int8

A task of several models has a folder for each in it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.config.jobs import ExportConfig
from domext_ray.errors import ConfigError
from domext_ray.export.card import Terms, describe_scale, read_terms, render_card
from domext_ray.export.folder import ONNX, ExportRecord, new_export
from domext_ray.export.model_folder import save_tokenizer
from domext_ray.export.onnx_graph import GRAPH, INT8, quantize_graph, require_onnx, write_graph
from domext_ray.families.task_description import WHOLE_TASK
from domext_ray.families.task_file import read_task_file, write_task_file
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.models.exported import find_export, open_exported
from domext_ray.models.masked_lm import build_masked_lm
from domext_ray.models.source import BaseModel, Export, FinetunedRun, Run, Source, open_model
from domext_ray.runs.run_directory import name_run
from domext_ray.storage import Place, write_json

LABELS_FILE = "labels.json"
_WITHOUT_LABELS = ("MaskedLM", "QuestionAnswering", "MultipleChoice")
"""Heads whose program reads no labels.json."""
_INT8_CARD = (
    "\n\nIts matrices are int8, and products of them are computed so (dynamic quantisation): check its figures on "
    "examples of\nyour own.\n\n## Loading"
)


def export_onnx(config: ExportConfig) -> Place:
    """Write a model's graphs, one per stage of its task, and return the folder."""
    require_onnx()
    run = Path(config.run)
    if "://" in config.run:
        raise ConfigError(f"--run is {config.run!r}; with --format onnx it must be on a disk: copy its export there.")
    source = open_model(config.run, "--run")
    source.require(Run, FinetunedRun, Export, BaseModel)
    if config.scale != 1 and not isinstance(source, Run):
        raise ConfigError(
            f"--scale is {config.scale:g}; it must be 1 unless --run is a pre-training run's directory "
            f"({config.run!r} is not)."
        )
    if not config.output and not isinstance(source, Run | FinetunedRun):
        raise ConfigError(f"--output is empty; it must be a folder, for --run {config.run!r} is no run's directory.")
    folder = Place(config.output or run / config.folder_name)
    with new_export(folder, ExportRecord(ONNX), run) as temporary:
        if source.does_task:
            _export_task(source, config, temporary)
        else:
            start = source.load(scale=config.scale)
            _write(build_masked_lm(start, "--run"), start.tokenizer, start.terms, config, temporary)
        if config.int8:
            _write_int8(temporary)
    return folder


def _export_task(source: Source, config: ExportConfig, folder: Path) -> None:
    export = find_export(source)
    content = read_task_file(export)
    if content.description.state.get("embedding_recall"):
        raise ConfigError(
            f"--run {config.run!r} recalls terms by the vectors of a second model, which has no graph; "
            "take --format huggingface."
        )
    exported = open_exported(source).load(torch.device("cpu"))
    for name, stage in exported.stages.items():
        place, own = folder / content.stages[name], stage.model.config
        place.mkdir(exist_ok=True)
        _write(stage.model, exported.tokenizer, read_terms(export / content.stages[name]), config, place)
        labels = [own.id2label[index] for index in sorted(own.id2label)]
        tuned = {**content.description.thresholds.get(WHOLE_TASK, {}), **stage.task.thresholds}
        write_json(Place(place / LABELS_FILE), {"labels": labels, "thresholds": tuned})
    write_task_file(folder, content)


def _write(model: Any, tokenizer: PreTrainedTokenizerBase, terms: Terms, config: ExportConfig, folder: Path) -> None:
    """Write graph, tokenizer and card of one model."""
    own, name = cast(DomextConfig, model.config), name_run(Path(config.run))
    own.active_adapters = _choose_adapters(own, config, is_masked_lm=isinstance(model, DomextForMaskedLM))
    save_tokenizer(tokenizer, folder, own.vocab_size)
    write_graph(model, folder / GRAPH)
    head = type(model).__name__.removeprefix("DomextFor")
    held = " and ".join(f"`{adapter}`" for adapter in own.active_adapters)
    scaled = f" Scale: {said}." if (said := describe_scale(config.scale)) else ""
    card = render_card(
        f"{name}, for onnxruntime",
        config.run,
        terms,
        {"library_name": "onnx", "tags": ["domext", "onnx"]},
        sections=[f"Rows of at most {own.max_row_length:,} tokens. Adapters in the graph: {held or 'none'}.{scaled}"],
        graph={
            "head": head,
            "mask": tokenizer.mask_token,
            "reads_labels": head not in _WITHOUT_LABELS,
            "takes_several": own.problem_type == "multi_label_classification",
        },
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _choose_adapters(own: DomextConfig, config: ExportConfig, *, is_masked_lm: bool) -> list[str]:
    """Return the adapters of the graph: that is decided here, for no row can choose."""
    known = ", ".join(own.adapters) or "none"
    if config.adapter:
        asked = config.adapter.split(",")
        for name in asked:
            if name not in own.adapters:
                raise ConfigError(f"--adapter names {name!r}; the model's adapters are: {known}.")
        return asked
    active = [*(own.adapters if own.active_adapters is None else own.active_adapters)]
    if is_masked_lm and any(own.adapters[name].router_words for name in active):
        raise ConfigError(
            f"--adapter is empty, and the model has a router, by which a row may have an adapter ({known}) or none; "
            "a graph has the same adapters for all rows, so --adapter must name them."
        )
    if len(active) > 1:
        raise ConfigError(f"--adapter is empty; the model has several adapters ({known}), so it must name the graph's.")
    return active


def _write_int8(folder: Path) -> None:
    """Copy a folder of graphs into `INT8`, each graph with its matrices in int8."""
    target, graphs = folder / INT8, sorted(folder.rglob(GRAPH))
    shutil.copytree(folder, target, ignore=lambda _, names: [name for name in names if name.startswith(GRAPH)])
    for graph in graphs:
        place = target / graph.relative_to(folder)
        quantize_graph(graph, place)
        card = place.with_name("README.md")
        card.write_text(card.read_text(encoding="utf-8").replace("\n\n## Loading", _INT8_CARD, 1), encoding="utf-8")
