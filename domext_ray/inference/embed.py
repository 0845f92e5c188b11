"""Rows of text and a model -> a vector for each (`domext embed`).

Enters: an `EmbedConfig`. Leaves, in --output:

    predictions/part-NNNNNN.parquet   id and vector, one row per input row, in the input's order
    vectors.npy, ids.jsonl            with --format npy, in their place: float32 [rows, d], and the rows' ids
    malformed.jsonl                   rows that could not be read: file, line and reason
    summary.json                      rows and seconds; written last
    config.yaml, identity.json        what the vectors were made from

The same command goes on with the blocks that are missing (blocks.py). A row without text has no vector: null, or nan.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.identity import identity_of
from domext_ray.downstream.start.model import load_start_model
from domext_ray.downstream.start.text_embedding import TextEmbedding, choose_pooling
from domext_ray.errors import ConfigError, CorpusError, RunError
from domext_ray.files import new_file, write_json
from domext_ray.inference.blocks import PARTS, RECORDS, BlockFolder, BlockRecord, Work, run_blocks
from domext_ray.inference.input_plan import Block, InputPlan, plan_input
from domext_ray.inference.input_rows import TEXT_FIELD, FieldNames, InputRow, RowReader
from domext_ray.inference.predict import MALFORMED, SUMMARY
from domext_ray.runs.run_directory import IDENTITY, check_identity, hold_run, write_config, write_identity
from domext_ray.runtime.ray_cluster import settle_gpu, start_ray

VECTORS, IDS = "vectors.npy", "ids.jsonl"


@dataclass(frozen=True)
class EmbedPlan:
    """Vectors to be made, checked.

    Args:
        config: what was asked for, its devices settled as far as they are known.
        width: numbers of a vector.
        input: the rows.
        folder: the output.
        identity: what makes them these vectors.
    """

    config: EmbedConfig
    width: int
    input: InputPlan
    folder: Path
    identity: dict[str, Any]

    @property
    def blocks(self) -> BlockFolder:
        """The files of the blocks."""
        return BlockFolder(self.folder, ".parquet")


def run_embedding(config: EmbedConfig) -> Path:
    """Make the vectors of all rows of an input.

    Args:
        config: what, with what, where to; with `dry_run` everything is checked and nothing is made or written.

    Returns:
        The output's folder.

    Raises:
        DomextError: any mistake of the user's.
    """
    plan = plan_embedding(config)
    if config.dry_run:
        print(f"input      {plan.input.num_rows:,} rows in {len(plan.input.files):,} files")
        print(f"vectors    {plan.width} numbers each, {plan.input.num_rows * plan.width * 4 / 1e9:.2f} GB")
        return plan.folder
    if (plan.folder / SUMMARY).is_file():
        print(f"the vectors in {plan.folder} are complete; nothing is left to do.")
        return plan.folder
    start_ray()
    plan = replace(plan, config=settle_gpu(plan.config))
    with hold_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_identity(plan.folder, plan.identity)
        plan.blocks.make()
        started = time.perf_counter()
        num_rows = run_blocks(plan.input.blocks, EmbedWork(plan), plan.blocks, plan.config.scale, "embedding")
        summary = finish_embedding(plan, num_rows, time.perf_counter() - started)
    print(f"{summary['rows']:,} vectors, {summary['rows_per_second']:,.1f} rows/s now: {plan.folder}")
    if summary["malformed"]:
        print(f"{summary['malformed']:,} rows are malformed and left out; {plan.folder / MALFORMED} names them.")
    return plan.folder


def plan_embedding(config: EmbedConfig) -> EmbedPlan:
    """Check what is asked for, and everything that it reads.

    Raises:
        DomextError: any mistake of the user's.
    """
    config = settle_gpu(config)
    folder = Path(config.output).expanduser().resolve()
    embed = load_embedding(config, "cpu")
    num_layers = embed.start.config.num_hidden_layers
    if max(config.layer_numbers, default=0) > num_layers:
        raise ConfigError(f"--layers is {config.layers!r}; {config.model!r} has {num_layers} layers.")
    plan = plan_input(config.input, FieldNames(config.field), config.block_rows)
    identity = {
        **identity_of(config),
        "pooling": embed.pooling,
        "model_sha256": embed.start.sha256,
        "input_sha256": plan.sha256,
    }
    try:
        check_identity(folder, identity, EmbedConfig)
    except RunError as error:
        said = str(error).replace("the run directory", "the output").replace("--run.name", "--output")
        raise RunError(said) from error
    if (folder / PARTS).exists() and not (folder / IDENTITY).exists():
        raise RunError(f"{folder} holds {PARTS} of something else; give another --output.")
    return EmbedPlan(config, embed.width, plan, folder, identity)


def load_embedding(config: EmbedConfig, device: str) -> TextEmbedding:
    """Load what makes vectors.

    Args:
        config: the model, and how.
        device: "cpu" or "cuda".

    Raises:
        BaseModelError: the model is not to be had.
        RunError: a run without a usable checkpoint.
    """
    return TextEmbedding(
        load_start_model(config.model),
        choose_pooling(config.model, config.pooling),
        config.layer_numbers,
        normalize=config.normalize,
        max_length=config.max_length,
        batch_size=config.batch_size,
        device=device,
    )


class EmbedWork:
    """What each actor is sent: it loads the model there.

    Args:
        plan: what is to be made.
    """

    def __init__(self, plan: EmbedPlan) -> None:
        self.config, self.input = plan.config, plan.input

    def __call__(self, device: torch.device) -> Work:
        """Load the model; return what makes a part of a block."""
        embed = load_embedding(self.config, device.type)
        reader = RowReader(self.input.files, self.input.names, self.input.fields)

        def work(block: Block, path: Path) -> BlockRecord:
            rows = [row for each in block.pieces for row in reader.read(each.file, each.first, each.count, each.byte)]
            return embed_block(rows, embed, path, is_strict=self.config.strict)

        return work


def embed_block(rows: Sequence[InputRow], embed: TextEmbedding, path: Path, *, is_strict: bool) -> BlockRecord:
    """Make the vectors of a block's rows and write its part.

    Args:
        rows: the block's; those without text have no vector, and those that are malformed no row.
        embed: the model.
        path: the part.
        is_strict: refuse the first malformed row.

    Returns:
        "rows", "empty", and "malformed" (file, line and reason of each).

    Raises:
        CorpusError: a row is malformed, and `is_strict`.
    """
    kept, texts, malformed = list[InputRow](), list[str](), list[dict[str, Any]]()
    for row in rows:
        fault = row.fault or find_fault(row)
        if fault and is_strict:
            raise CorpusError(f"{row.path}:{row.line}: the row {fault}; mend it, or leave out --strict.")
        if fault:
            malformed.append({"file": row.path, "line": row.line, "reason": f"the row {fault}"})
        else:
            kept.append(row)
            texts.append(row.values[TEXT_FIELD])
    has_text = np.array([bool(each.strip()) for each in texts], dtype=bool)
    vectors = np.full((len(kept), embed.width), np.nan, dtype=np.float32)
    vectors[has_text] = embed([each for each in texts if each.strip()])
    columns = {"id": pa.array([each.id for each in kept], pa.string()), "vector": _to_arrow(vectors, has_text)}
    pq.write_table(pa.table(columns), path)
    return {"rows": len(kept), "empty": int((~has_text).sum()), "malformed": malformed}


def find_fault(row: InputRow) -> str:
    """Say why a row has no text, as it follows "the row"; empty: it has one."""
    if TEXT_FIELD not in row.values:
        return "has no field that --field names"
    return "" if isinstance(row.values[TEXT_FIELD], str) else "has a text that is no string"


def _to_arrow(vectors: np.ndarray, is_valid: np.ndarray) -> pa.FixedSizeListArray:
    values = pa.array(vectors.reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(values, vectors.shape[1], mask=pa.array(~is_valid))


def finish_embedding(plan: EmbedPlan, num_rows: int, seconds: float) -> dict[str, Any]:
    """Write malformed.jsonl, the .npy that is asked for, and the summary, which is returned.

    Args:
        plan: what was made; all its blocks are done.
        num_rows: rows of which this start made vectors.
        seconds: that it took.

    Raises:
        CorpusError: no row at all could be read.
    """
    numbers = [each.number for each in plan.input.blocks]
    counts, first = dict.fromkeys(("rows", "empty", "malformed"), 0), ""
    with new_file(plan.folder / MALFORMED) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in map(plan.blocks.read, numbers):
            lost = record["malformed"]
            for name, number in (("rows", record["rows"]), ("empty", record["empty"]), ("malformed", len(lost))):
                counts[name] += number
            first = first or (f"{lost[0]['file']}:{lost[0]['line']}: {lost[0]['reason']}" if lost else "")
            file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in lost)
    if not counts["rows"]:
        for name in (PARTS, RECORDS):
            shutil.rmtree(plan.folder / name, ignore_errors=True)
        (plan.folder / IDENTITY).unlink()
        raise CorpusError(f"none of the rows of --input {plan.config.input!r} can be used ({first}); set --field.")
    if plan.config.format == "npy":
        write_npy(plan, numbers, counts["rows"])
    rate = round(num_rows / seconds, 3)
    summary = {"model": plan.config.model, "width": plan.width, **counts, "rows_now": num_rows}
    summary |= {"seconds": round(seconds, 3), "rows_per_second": rate}
    write_json(plan.folder / SUMMARY, summary)
    if plan.config.format == "npy":
        shutil.rmtree(plan.folder / PARTS)
    return summary


def write_npy(plan: EmbedPlan, numbers: Sequence[int], num_rows: int) -> None:
    """Join the parts as one array, a part in memory at a time, and their ids as JSON, a line each."""
    with new_file(plan.folder / IDS) as ids, new_file(plan.folder / VECTORS) as vectors:
        array = np.lib.format.open_memmap(vectors, mode="w+", dtype=np.float32, shape=(num_rows, plan.width))
        first = 0
        with ids.open("w", encoding="utf-8") as file:
            for table in _read_parts(plan, numbers):
                column, end = table.column("vector").combine_chunks(), first + table.num_rows
                has_vector = column.is_valid().to_numpy(zero_copy_only=False)
                array[first:end][~has_vector] = np.nan
                array[first:end][has_vector] = column.flatten().to_numpy().reshape(-1, plan.width)
                file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in table.column("id").to_pylist())
                first = end
        array.flush()


def _read_parts(plan: EmbedPlan, numbers: Sequence[int]) -> Iterator[pa.Table]:
    for number in numbers:
        yield pq.read_table(plan.blocks.find_part(number))
