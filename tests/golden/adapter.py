"""What the golden runs ask of the package: the one file here that knows its names, and follows renames.

Whoever renames an option, a module or a figure changes this file and no golden file. Commands are written with the
newest names; `RENAMED` says what this checkout calls them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from domext_ray.commands.job import configure
from domext_ray.commands.main import find_job, main
from domext_ray.config.pretrain import SettledConfig
from domext_ray.families.sets import load_labelled
from domext_ray.finetuning.finetuned import make_set_task
from domext_ray.inference import predict as predicting
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.pretraining import pipeline
from domext_ray.pretraining.inputs import get_or_prepare_inputs
from domext_ray.pretraining.plan import load_run_base
from domext_ray.report import report
from domext_ray.runs.run_directory import resolve_paths, resolve_schedule
from domext_ray.storage import Place
from domext_ray.text.corpus import stream
from domext_ray.text.corpus.manifest import SPLITS, read_manifest, take_rows
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.engine import join_alone
from domext_ray.training.phases import BatchMaker, make_phases
from domext_ray.training.router import get_or_train_routers
from domext_ray.training.run import Run
from domext_ray.training.worker import PretrainWorker

PACKAGE = str(Path(pipeline.__file__).parents[1])
"""Where the package is; sentences name its presets."""
RENAMED: dict[str, str] = {}
"""Options of the commands here, and their names in this checkout."""
RENAMED_VERBS = {
    **{"prepare": "prepare corpus", "vocab": "build vocab", "export": "export hf"},
    **{"forgetting": "evaluate forgetting", "evaluate_retrieval": "evaluate retrieval"},
    **{"compare_runs": "compare runs"},
}
"""Verbs of the commands here, and their names in this checkout."""
RENAMED_FIGURES: dict[str, str] = {}
"""Names in metrics.jsonl of this checkout, and in the golden files."""
NO_FIGURES = ("time/", "throughput/", "memory/", "data/wait")
"""Beginnings of figures that no two machines share."""


class Ended(NamedTuple):
    """How a command ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def translate(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command with this checkout's options."""
    verb, *words = shlex.split(command) if isinstance(command, str) else command
    return [*RENAMED_VERBS.get(verb, verb).split(), *(RENAMED.get(word, word) for word in words)]


def call(command: str | Sequence[str]) -> Ended:
    """Carry out a command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(translate(command))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Ended(code, out.getvalue(), err.getvalue())


def read_config(command: str | Sequence[str]) -> Any:
    """Return the configuration that a command means, as the program makes it."""
    job, words = find_job(translate(command))
    return configure(job, job.read(words))


# --- rows, batches, masks -------------------------------------------------------------------------------------------


def read_rows(cache_dir: Path) -> dict[str, Any]:
    """Return the rows of the one prepared corpus of a folder by split, as lists of plain values, and what was dropped.

    Rows of a corpus for pairs are what pairs are drawn from; see `read_batches`.
    """
    (folder,) = (path.parent for path in cache_dir.glob("*/manifest.json"))
    manifest = read_manifest(Place(folder))
    found: dict[str, Any] = {"dropped": manifest.dropped, "documents": manifest.num_documents}
    for split in SPLITS:
        rows = [(i, row) for i, record in enumerate(manifest.records(split)) for row in range(record.num_rows)]
        shards, numbers = (np.array(column) for column in zip(*rows, strict=True))
        table = take_rows(manifest.shards(split), shards, numbers)
        found[split] = [[name, table.column(name).to_pylist()] for name in sorted(table.column_names)]
    return found


def read_entries(folder: Path) -> list[tuple[int, str]]:
    """Return the entries of a run's tokenizer, by id."""
    return sorted((i, token) for token, i in load_tokenizer(folder / "tokenizer").get_vocab().items())


def read_batches(command: str, world_size: int, number: int) -> list[list[dict[str, Any]]]:
    """Return the first global batches of a run, read by some ranks: the rows of each, as training gets them.

    A row has its ids before masking ("ids") and behind it ("inputs"), the tokens that it predicts by position
    ("predicts"), and, where there are such, its next-sentence label ("follows") and whether it is kept text ("kept").
    """
    asked = read_config(command)
    config = resolve_schedule(SettledConfig.of(asked), resolve_paths(asked).run)
    inputs = get_or_prepare_inputs(config, load_run_base(config), resolve_paths(config))
    tokenizer = load_tokenizer(inputs.tokenizer.local())
    general = load_tokenizer(inputs.general_tokenizer.local()) if inputs.general_tokenizer else tokenizer
    maker = BatchMaker(config, make_phases(config, inputs.texts), tokenizer, general)
    with contextlib.ExitStack() as ends:
        ends.callback(setattr, stream, "ROWS_PER_TASK", stream.ROWS_PER_TASK)
        stream.ROWS_PER_TASK = 8 * number  # a task that reads no more than is asked for
        streams = [maker.make(0, rank=rank, world_size=world_size) for rank in range(world_size)]
        for made in streams:
            ends.callback(made.close)  # type: ignore[attr-defined]
        steps = ([batch for share in streams for batch in next(share)[0]] for _ in range(number))
        return [[row for batch in batches for row in _list_rows(batch)] for batches in steps]


def _list_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Take a micro batch apart; padding and filler are left out."""
    size, length = batch.input_ids.shape
    shown = torch.ones(size, length) if batch.attention_mask is None else batch.attention_mask
    predicts: list[dict[int, int]] = [{} for _ in range(size)]
    counts = batch.weights > 0
    if batch.kept_rows is not None:
        counts[batch.kept_rows.prediction_indices[batch.kept_rows.weights > 0]] = True
    for place, label in zip(batch.masked_positions[counts].tolist(), batch.labels[counts].tolist(), strict=True):
        predicts[place // length][place % length] = label
    kept = (
        set()
        if batch.kept_rows is None
        else set(batch.kept_rows.rows[batch.kept_rows.positions[batch.kept_rows.weights > 0] // length].tolist())
    )
    for i in range(size):
        inputs = batch.input_ids[i, : int(shown[i].sum())].tolist()
        row = {"ids": [predicts[i].get(j, token) for j, token in enumerate(inputs)], "inputs": inputs}
        row["predicts"] = sorted(predicts[i].items())
        if batch.token_type_ids is not None:
            row |= {"second": int(batch.token_type_ids[i].sum()), "follows": int(batch.next_sentence_labels[i])}
        yield row | ({"kept": i in kept} if batch.kept_rows is not None else {})


# --- models ---------------------------------------------------------------------------------------------------------


def train(command: str) -> Ended:
    """Carry out a training job whose one worker is this process: all of it but Ray Train's workers and the page."""

    def train_here(run: Run, note_evaluation: Any = None) -> None:
        join_alone()
        get_or_train_routers(run)
        worker = PretrainWorker(run, device=torch.device("cpu"))
        worker.run()
        worker.close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "pretrain", train_here)
        for name in ("write_report", "write_index"):  # pictures take a second
            patched.setattr(report, name, lambda *args, **kwargs: None)
        return call(command)


def read_figures(run: Path) -> dict[str, list[float]]:
    """Return what a run recorded of its steps, by name: losses, norms, rates, evaluations; no times."""
    figures: dict[str, list[float]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for name, value in json.loads(line).items():
            if name != "step" and not name.startswith(NO_FIGURES):
                figures.setdefault(RENAMED_FIGURES.get(name, name), []).append(value)
    return figures


def predict(command: str) -> Path:
    """Carry out a prediction whose one worker is this process; return the output's folder."""
    plan = predicting.plan_prediction(read_config(command))
    plan.blocks.make()
    work = plan.load(torch.device("cpu"))
    for block in plan.input.blocks:
        plan.blocks.records.write(block.number, plan.blocks.make_part(block, work))
    summary = plan.finish(plan.input.num_rows, 1.0)
    plan.format_summary(summary)
    return Path(plan.folder)


def list_measures(results: dict[str, Any]) -> dict[str, Any]:
    """Return what results.json of a comparison of models says of each, without places, hashes and times."""
    models = {
        name: {key: value for key, value in own.items() if key != "sha256"} for name, own in results["models"].items()
    }
    return {"models": models}


# --- labelled sets and inputs ---------------------------------------------------------------------------------------


@functools.cache
def _load(model: str) -> StartModel:
    return open_model(model).load()


def encode_set(command: str) -> dict[str, list[Any]]:
    """Return the rows of a labelled set's training and dev examples, by stage and split, and what is noted of them.

    Every other example goes on with twice itself; four are a document. A row has the place of its example, ids, segment
    types and targets.
    """
    config = read_config(command)
    loaded = load_labelled(config)
    splits = {name: [_lengthen(i, e) for i, e in enumerate(getattr(loaded, name))] for name in ("train", "dev")}
    loaded = replace(loaded, **{name: tuple(examples) for name, examples in splits.items()})
    task = make_set_task(config, _load(config.model), loaded)
    found: dict[str, list[Any]] = {}
    for name, stage in task.stages.items():
        for split in splits:
            rows = stage.encode(getattr(stage.data, split), is_training=split == "train")
            found[f"{name}.{split}"] = [_describe_row(row) for row in rows]
        found.setdefault("notes", []).extend(stage.notes)
    return found


def _lengthen(i: int, example: Any) -> Any:
    if hasattr(example, "words"):
        copies = 1 + 2 * (i % 2)
        return replace(example, words=example.words * copies, tags=example.tags * copies, document=f"d{i // 4}")
    name = "text" if hasattr(example, "text") else "context"
    return replace(example, **{name: " ".join([getattr(example, name)] * 3)}) if i % 2 else example


def _describe_row(row: Any) -> list[Any]:
    types = None if row.token_type_ids is None else row.token_type_ids.tolist()
    return [row.example, row.input_ids.tolist(), types, {name: target.tolist() for name, target in row.targets.items()}]


def simplify(prediction: dict[str, Any]) -> Any:
    """Return what the golden file has of a prediction: what was scored or ranked, without what follows from it."""
    own = prediction
    if "candidates" in own and "entities" in own:
        names = ("start", "end", "label")
        entities = [{name: entity[name] for name in names} for entity in own["entities"]]
        spans = [[dict(zip(names, span, strict=True)), score] for *span, score in own["candidates"]]
        return {"entities": entities, "candidates": spans}
    if "relations" in own:
        return sorted(
            [relation["head"]["text"], relation["label"], relation["tail"]["text"]] for relation in own["relations"]
        )
    if "labels" in own:
        names = sorted(own["probabilities"])
        probabilities = [own["probabilities"][name] for name in names]
        return {"labels": sorted(own["labels"]), "probabilities": probabilities}
    if "null_score" in own:
        start, end = own["best"]
        none, score = own["null_score"], own["score"] + own["null_score"]
        return {"text": own["answer"] or "", "start": start, "end": end, "score": score, "null_score": none}
    return next(own[name] for name in ("tags", "terms", "label", "value", "answer") if name in own)
