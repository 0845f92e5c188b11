"""Rows of text and a model -> a folder of predictions (`domext predict`).

Enters: a `PredictConfig`. Leaves: what parts.py says in --output, and of a labelled split scores.json (figures, a
report by label) and errors.html (what went wrong), or of a benchmark's test file what its server takes. summary.json
says how often each label was predicted, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from domext_ray.config.inference import FILL_MASK, PredictConfig
from domext_ray.config.options.build import identity_of_run
from domext_ray.errors import ConfigError
from domext_ray.inference.input_plan import InputPlan, plan_input
from domext_ray.inference.input_rows import TEXT_FIELD, InputRow
from domext_ray.inference.labelled_input import LabelledInput, plan_labelled
from domext_ray.inference.parts import (
    PARTS,
    SUMMARY,
    BlockPlan,
    BlockRecord,
    Work,
    describe_losses,
    gather_counts,
    hash_ids,
    is_blank,
    measure_rate,
    resolve_output,
    run_block_job,
    split_malformed,
    write_lines,
)
from domext_ray.inference.predictors import PlannedModel, Predictor, find_model, load_predictor
from domext_ray.inference.split_scores import format_scores, score_split
from domext_ray.inference.submission import SubmissionInput, plan_submission, write_submission
from domext_ray.models.source import Graphs, open_model
from domext_ray.runtime.ray_cluster import resolve_gpu
from domext_ray.storage import Place, write_json

MAX_LABELS = 20
"""Labels that the last table shows; the summary has all of them."""


@dataclass(frozen=True)
class PredictPlan(BlockPlan[PredictConfig]):
    """A prediction, checked."""

    verb: ClassVar[str] = "predicting"
    product: ClassVar[str] = "predictions"

    model: PlannedModel

    def describe_model(self) -> str:
        """Return its task and hash."""
        return f"{self.model.task}, sha256 {self.model.sha256[:12]}"

    def load(self, device: torch.device) -> Work:
        """Load the model; return what makes a part of a block."""
        predictor = load_predictor(self.model, self.config, device)
        reader, config = self.input.make_reader(), self.config
        return lambda block, path: predict_block(reader(block), predictor, config, path)

    def finish(self, num_rows: int, seconds: float) -> dict[str, Any]:
        """Write malformed.jsonl, what is asked for of a labelled split or a submission, and the summary."""
        counts, labels = gather_counts(self), Counter[str]()
        for record in self.read_records():
            labels.update(record["labels"])
        summary = {
            "model": self.config.model,
            "task": self.model.task,
            **counts,
            "labels": dict(sorted(labels.items(), key=lambda item: (-item[1], item[0]))),
            **measure_rate(num_rows, seconds),
        }
        if isinstance(self.input, LabelledInput):
            predictions = [*self._read_all("predictions")]
            summary["scores"] = score_split(self.model.source, self.input, predictions, self.folder)
        if isinstance(self.input, SubmissionInput):
            summary["submission"] = write_submission(self.input, [*self._read_all("records")], self.folder).name
        write_json(self.folder / SUMMARY, summary)
        return summary

    def _read_all(self, name: str) -> Iterator[Any]:
        """Yield what all blocks have under a name, in order."""
        for record in self.read_records():
            yield from record[name]

    def format_summary(self, summary: Mapping[str, Any]) -> str:
        """Return the table that a job ends with."""
        lines = [
            f"rows       {summary['rows']:,}",
            f"seconds    {summary['seconds']:,.1f}",
            f"rows/s     {summary['rows_per_second']:,.1f}",
            *(f"{name:<10} {number:,}" for name, number in list(summary["labels"].items())[:MAX_LABELS]),
        ]
        if len(summary["labels"]) > MAX_LABELS:
            lines.append(f"           and {len(summary['labels']) - MAX_LABELS:,} more labels in {SUMMARY}")
        lines += describe_losses(summary, self.folder, "their predictions are empty")
        if "submission" in summary:
            lines.append(f"submission: {self.folder / summary['submission']}")
        if "scores" in summary:
            lines.append(format_scores(summary["scores"]))
        return "\n".join([*lines, f"predictions: {self.folder / PARTS}"])


def run_prediction(config: PredictConfig) -> Place:
    """Predict all rows of an input, and return the output's folder.

    With `dry_run` everything is checked and nothing is predicted or written.
    """
    plan = plan_prediction(config)
    for note in getattr(plan.input, "notes", ()):
        print(f"note: {note}")
    return run_block_job(plan)


def plan_prediction(config: PredictConfig) -> PredictPlan:
    """Check a prediction and everything that it reads."""
    source = open_model(config.model)
    if isinstance(source, Graphs):
        if config.scale.use_gpu is True:
            raise ConfigError(
                f"--scale.use_gpu is True; {config.model!r} is an ONNX folder, so it must be auto or false."
            )
        config = replace(config, scale=replace(config.scale, use_gpu=False))
    config = resolve_gpu(config)
    model = find_model(source, config)
    rows = _plan_rows(config, model)
    identity = {**identity_of_run(config), "task": model.task, "model_sha256": model.sha256}
    return PredictPlan(config, rows, *resolve_output(config, identity, rows), model)


def _plan_rows(config: PredictConfig, model: PlannedModel) -> InputPlan | LabelledInput | SubmissionInput:
    """Cut what --input names into blocks: files, a split of the labelled set that --task names, or a test file."""
    if config.submission:
        return plan_submission(config.submission, config.input, model.task, model.labels, config.block_rows)
    if config.task in ("", FILL_MASK):
        return plan_input(config.input, model.name_fields(config.field), config.block_rows)
    if model.task == FILL_MASK:
        raise ConfigError(
            f"--task is {config.task!r}; {config.model!r} fills masks, so it must be {FILL_MASK} or empty."
        )
    plan = plan_labelled(
        config.task, config.input, config.split, config.block_rows, strict=config.strict, marks=model.marks
    )
    family = plan.description.task
    if family != model.task:
        raise ConfigError(f"--task {config.task!r} is {family}; the task of {config.model!r} is {model.task}.")
    if model.has_pairs:
        plan.require_pairs()
    return plan


def predict_block(rows: Sequence[InputRow], predictor: Predictor, config: PredictConfig, path: Path) -> BlockRecord:
    """Predict a block's rows and write its part; rows without text have empty predictions, malformed ones none.

    In the record "labels" says how often each was predicted, "malformed" has file, line and reason of each, "ids" what
    `hash_ids` returns, and "cases" how many examples were odd; "predictions" are scored, if the set is labelled, and
    "records" are for a submission.
    """
    kept, examples, malformed = split_malformed(
        rows,
        lambda row: row.example or predictor.make_example(row.values, config.field),
        is_strict=config.strict,
        answers_all=bool(config.submission),
    )
    found = predictor.predict(examples)
    made, empty = iter(found.records), make_empty(predictor.schema)
    predicted = [empty if is_blank(row) else next(made) for row in kept]
    write_part(list(_merge(kept, predicted, config)), predictor.schema, config, path)
    labels = Counter(label for record in predicted for label in predictor.count_labels(record))
    num_empty = len(kept) - len(examples)
    return {
        "rows": len(kept),
        "empty": num_empty,
        "labels": dict(labels),
        "malformed": malformed,
        "ids": hash_ids(kept),
        "cases": predictor.take_cases(),
        "predictions": found.predictions if any(row.example is not None for row in rows) else [],
        "records": predicted if config.submission else [],
    }


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
            write_lines(file, records)
        return
    columns = {"id": pa.string(), **({"text": pa.string()} if config.keep_text else {}), **schema}
    pq.write_table(pa.Table.from_pylist(records, schema=pa.schema(columns.items())), path)
