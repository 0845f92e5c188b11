"""Rows of text and a model -> a folder of predictions (`domext predict`).

Enters: a `PredictConfig`. Leaves, in --output:

    predictions/part-NNNNNN.*   one row per input row, in the input's order
    scores.json, errors.html    of a labelled split: figures, a report by label, and what went wrong
    malformed.jsonl             rows that could not be read: file, line and reason
    summary.json                rows, seconds, and how often each label was predicted; written last
    config.yaml, identity.json  what the predictions were made from
    .blocks/                    what is done, for a job that goes on

The same command goes on with the blocks that are missing (blocks.py). Another model, another input or other options are
refused, since parts of two jobs would make no whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from domext_ray.config.identity import identity_of
from domext_ray.config.inference import FILL_MASK, PredictConfig
from domext_ray.errors import ConfigError, CorpusError, RunError
from domext_ray.files import new_file, write_json
from domext_ray.inference.blocks import PARTS, RECORDS, BlockFolder, BlockRecord, Work, run_blocks
from domext_ray.inference.input_plan import InputPlan, plan_input
from domext_ray.inference.input_rows import TEXT_FIELD, InputRow, RowError
from domext_ray.inference.labelled_input import LabelledInput, plan_labelled
from domext_ray.inference.predictors import ModelPlace, Predictor, find_model, load_predictor
from domext_ray.inference.split_scores import format_scores, score_split
from domext_ray.inference.task_predictor import TaskPredictor
from domext_ray.runs.run_directory import IDENTITY, check_identity, hold_run, write_config, write_identity
from domext_ray.runtime.ray_cluster import settle_gpu, start_ray
from domext_ray.training.pretrain import check_shared_storage

SUMMARY, MALFORMED = "summary.json", "malformed.jsonl"
MOST_LABELS = 20
"""Labels that the last table shows; the summary has all of them."""


@dataclass(frozen=True)
class PredictPlan:
    """A prediction, checked.

    Args:
        config: what was asked for, its devices settled as far as they are known.
        model: the model.
        input: the rows.
        folder: the output.
        identity: what makes it this prediction.
    """

    config: PredictConfig
    model: ModelPlace
    input: InputPlan | LabelledInput
    folder: Path
    identity: dict[str, Any]

    @property
    def blocks(self) -> BlockFolder:
        """The files of the blocks."""
        return BlockFolder(self.folder, f".{self.config.format}")


def run_prediction(config: PredictConfig) -> Path:
    """Predict all rows of an input.

    Args:
        config: what, with what, where to; with `dry_run` everything is checked and nothing is predicted or written.

    Returns:
        The output's folder.

    Raises:
        DomextError: any mistake of the user's.
    """
    plan = plan_prediction(config)
    for note in [plan.model.note, *getattr(plan.input, "notes", ())]:
        if note:
            print(f"note: {note}")
    if config.dry_run:
        print(describe_plan(plan))
        return plan.folder
    if (plan.folder / SUMMARY).is_file() and all(plan.blocks.is_done(each.number) for each in plan.input.blocks):
        print(f"the predictions in {plan.folder} are complete; nothing is left to do.")
        return plan.folder
    start_ray()
    plan = replace(plan, config=settle_gpu(plan.config))
    with _name_output(), hold_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_identity(plan.folder, plan.identity)
        check_shared_storage(plan.folder)
        plan.blocks.make()
        started = time.perf_counter()
        num_rows = run_blocks(plan.input.blocks, PredictWork(plan), plan.blocks, plan.config.scale)
        summary = finish_prediction(plan, num_rows, time.perf_counter() - started)
    print(format_summary(summary, plan.folder))
    return plan.folder


def plan_prediction(config: PredictConfig) -> PredictPlan:
    """Check a prediction and everything that it reads.

    Raises:
        DomextError: any mistake of the user's.
    """
    config = settle_gpu(config)
    folder = Path(config.output).expanduser().resolve()
    model = find_model(config)
    plan = _plan_rows(config, model)
    identity = {**identity_of(config), "task": model.task, "model_sha256": model.sha256, "input_sha256": plan.sha256}
    with _name_output():
        check_identity(folder, identity, PredictConfig)
    if (folder / PARTS).exists() and not (folder / IDENTITY).exists():
        raise RunError(f"{folder} holds {PARTS} of something else; give another --output.")
    return PredictPlan(config, model, plan, folder, identity)


@contextlib.contextmanager
def _name_output() -> Iterator[None]:
    """Let messages about a run's directory speak of --output."""
    try:
        yield
    except RunError as error:
        if type(error) is not RunError:
            raise
        said = str(error).replace("--run.name", "--output").replace("--run.dir", "--output")
        raise RunError(said.replace("the run directory", "the output")) from error


def _plan_rows(config: PredictConfig, model: ModelPlace) -> InputPlan | LabelledInput:
    """Cut what --input names into blocks: files, or a split of the labelled set that --task names.

    Raises:
        ConfigError: the set is one of another family than the model.
    """
    if config.task in ("", FILL_MASK):
        return plan_input(config.input, model.name_fields(config.field), config.block_rows)
    if model.task == FILL_MASK:
        raise ConfigError(
            f"--task is {config.task!r}; {config.model!r} fills masks, so it must be {FILL_MASK} or empty."
        )
    plan = plan_labelled(config.task, config.input, config.split, config.block_rows, strict=config.strict)
    if plan.family != model.task:
        raise ConfigError(f"--task {config.task!r} is {plan.family}; the task of {config.model!r} is {model.task}.")
    return plan


class PredictWork:
    """What each actor is sent: it loads the model there.

    Args:
        plan: the prediction.
    """

    def __init__(self, plan: PredictPlan) -> None:
        self.plan = plan

    def __call__(self, device: torch.device) -> Work:
        """Load the model; return what makes a part of a block."""
        predictor = load_predictor(self.plan.model, self.plan.config, device)
        reader, config = self.plan.input.make_reader(), self.plan.config

        def work(block: Any, path: Path) -> BlockRecord:
            return predict_block(reader(block), predictor, config, path)

        return work


def predict_block(rows: Sequence[InputRow], predictor: Predictor, config: PredictConfig, path: Path) -> BlockRecord:
    """Predict a block's rows and write its part.

    Args:
        rows: the block's; those without text have empty predictions, those that are malformed none.
        predictor: the model.
        config: the format and what is written.
        path: the part.

    Returns:
        "rows", "empty", "labels" (how often each was predicted), "malformed" (file, line and reason of each), and of a
        labelled set "plain": the predictions for `read_prediction`.

    Raises:
        CorpusError: a row is malformed, and `strict` is set.
    """
    kept, examples, malformed = _sort_out(rows, predictor, config)
    plain: list[Any] = []
    if any(each.example is not None for each in rows):
        records, plain = cast(TaskPredictor, predictor).predict_labelled(examples)
    else:
        records = predictor.predict(examples)
    made, empty = iter(records), make_empty(predictor.schema)
    predicted = [empty if is_blank(each) else next(made) for each in kept]
    write_part(list(_merge(kept, predicted, config)), predictor.schema, config, path)
    labels = Counter(label for each in predicted for label in predictor.count_labels(each))
    num_empty = len(kept) - len(examples)
    return {"rows": len(kept), "empty": num_empty, "labels": dict(labels), "malformed": malformed, "plain": plain}


def _sort_out(
    rows: Sequence[InputRow], predictor: Predictor, config: PredictConfig
) -> tuple[list[InputRow], list[Any], list[dict[str, Any]]]:
    """Return the rows that can be used, the examples of those with text, and what is wrong with the others."""
    kept, examples, malformed = list[InputRow](), list[Any](), list[dict[str, Any]]()
    for row in rows:
        try:
            if row.fault:
                raise RowError(row.fault)
            if not is_blank(row):
                examples.append(row.example or predictor.make_example(row.values, config.field))
            kept.append(row)
        except RowError as error:
            if config.strict:
                raise CorpusError(f"{row.path}:{row.line}: the row {error}; mend it, or leave out --strict.") from error
            malformed.append({"file": row.path, "line": row.line, "reason": f"the row {error}"})
    return kept, examples, malformed


def is_blank(row: InputRow) -> bool:
    """Whether a row's text is nothing but white space: there is nothing to predict."""
    if row.example is not None:
        return False
    text = row.values.get(TEXT_FIELD)
    return isinstance(text, str) and not text.strip()


def make_empty(schema: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Return the record of a row without text."""
    return {name: [] if pa.types.is_list(kind) else None for name, kind in schema.items()}


def _merge(
    rows: Sequence[InputRow], predicted: Sequence[Mapping[str, Any]], config: PredictConfig
) -> Iterator[dict[str, Any]]:
    for row, record in zip(rows, predicted, strict=True):
        text = {TEXT_FIELD: row.values.get(TEXT_FIELD)} if config.keep_text else {}
        yield {"id": row.id, **text, **record}


def write_part(
    records: list[dict[str, Any]], schema: Mapping[str, pa.DataType], config: PredictConfig, path: Path
) -> None:
    """Write records as JSON Lines or as Parquet, whose columns are the same in all parts."""
    if config.format == "jsonl":
        with path.open("w", encoding="utf-8") as file:
            _write_lines(file, records)
        return
    columns = {"id": pa.string(), **({"text": pa.string()} if config.keep_text else {}), **schema}
    pq.write_table(pa.Table.from_pylist(records, schema=pa.schema(columns.items())), path)


def finish_prediction(plan: PredictPlan, num_rows: int, seconds: float) -> dict[str, Any]:
    """Write malformed.jsonl and the summary of all blocks; return it.

    Args:
        plan: the prediction; all its blocks are done.
        num_rows: rows that were predicted by this start.
        seconds: that it took.

    Raises:
        CorpusError: no row at all could be read.
    """
    counts = _gather(plan)
    if not counts["rows"] and counts["malformed"]:
        _forget(plan.folder)
        raise CorpusError(
            f"none of the {counts['malformed']:,} rows of --input {plan.config.input!r} can be used "
            f"({counts['first_malformed']}); set --field, or mend the file."
        )
    summary = {
        "model": plan.config.model,
        "task": plan.model.task,
        **counts,
        "rows_now": num_rows,
        "seconds": round(seconds, 3),
        "rows_per_second": round(num_rows / seconds, 3),
    }
    if isinstance(plan.input, LabelledInput):
        summary["scores"] = score_split(plan.config.model, plan.input, _read_plain(plan), plan.folder)
    write_json(plan.folder / SUMMARY, summary)
    return summary


def _gather(plan: PredictPlan) -> dict[str, Any]:
    """Write malformed.jsonl, and return what all blocks counted, one block at a time."""
    counts, labels, first = Counter[str](), Counter[str](), ""
    with new_file(plan.folder / MALFORMED) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in (plan.blocks.read(each.number) for each in plan.input.blocks):
            counts.update({"rows": record["rows"], "empty": record["empty"], "malformed": len(record["malformed"])})
            labels.update(record["labels"])
            for each in record["malformed"][:1]:
                first = first or f"{each['file']}:{each['line']}: {each['reason']}"
            _write_lines(file, record["malformed"])
    ordered = dict(sorted(labels.items(), key=lambda each: (-each[1], each[0])))
    return {**counts, "first_malformed": first, "labels": ordered}


def _read_plain(plan: PredictPlan) -> Iterator[Any]:
    """Yield the predictions of all blocks as plain values, in order."""
    for each in plan.input.blocks:
        yield from plan.blocks.read(each.number)["plain"]


def _forget(folder: Path) -> None:
    """Leave nothing that would make the same output, with other options, look like another prediction."""
    for name in (PARTS, RECORDS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (IDENTITY, MALFORMED):
        (folder / name).unlink(missing_ok=True)


def _write_lines(file: TextIO, records: Sequence[Mapping[str, Any]]) -> None:
    for each in records:
        file.write(json.dumps(each, ensure_ascii=False) + "\n")


def describe_plan(plan: PredictPlan) -> str:
    """Return what a dry run prints."""
    blocks = plan.input.blocks
    done = sum(plan.blocks.is_done(each.number) for each in blocks)
    return "\n".join(
        [
            f"model      {plan.config.model} ({plan.model.task}, sha256 {plan.model.sha256[:12]})",
            f"input      {plan.input.describe()}",
            f"blocks     {len(blocks):,} of up to {plan.config.block_rows:,} rows; {done:,} are done",
            f"output     {plan.folder}",
        ]
    )


def format_summary(summary: Mapping[str, Any], folder: Path) -> str:
    """Return the table that a job ends with."""
    lines = [
        f"rows       {summary['rows']:,}",
        f"seconds    {summary['seconds']:,.1f}",
        f"rows/s     {summary['rows_per_second']:,.1f}",
        *(f"{name:<10} {number:,}" for name, number in list(summary["labels"].items())[:MOST_LABELS]),
    ]
    if len(summary["labels"]) > MOST_LABELS:
        lines.append(f"           and {len(summary['labels']) - MOST_LABELS:,} more labels in {SUMMARY}")
    if summary["empty"]:
        lines.append(f"{summary['empty']:,} rows have no text, so their predictions are empty.")
    if summary["malformed"]:
        lines.append(
            f"{summary['malformed']:,} rows are malformed and left out; {folder / MALFORMED} names them, the first is "
            f"{summary['first_malformed']}."
        )
    if "scores" in summary:
        lines.append(format_scores(summary["scores"]))
    return "\n".join([*lines, f"predictions: {folder / PARTS}"])
