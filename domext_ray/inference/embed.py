"""Rows of text and a model -> a vector for each (`domext embed`).

Enters: an `EmbedConfig`. Leaves what parts.py says in --output, each row of a part with its id and its vector; with
`--format npy` vectors.npy, float32 [rows, d], and ids.jsonl, the rows' ids, in the place of the parts. A row without
text has no vector: null, or nan.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.options.build import identity_of_run
from domext_ray.config.shared import Pooling
from domext_ray.errors import name_file
from domext_ray.inference.input_plan import plan_input
from domext_ray.inference.input_rows import FieldNames, InputRow, check_text
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
from domext_ray.models.bank import AdapterBank
from domext_ray.models.source import BankAdapter, open_model
from domext_ray.models.start import StartModel, pick_tensors, take_tensors
from domext_ray.models.text_embedding import TextEmbedding, choose_pooling
from domext_ray.runtime.ray_cluster import resolve_gpu
from domext_ray.storage import Place, new_file, write_json
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

VECTORS, IDS = "vectors.npy", "ids.jsonl"


@dataclass(frozen=True)
class EmbedPlan(BlockPlan[EmbedConfig]):
    """Vectors to be made, checked."""

    verb: ClassVar[str] = "embedding"
    product: ClassVar[str] = "vectors"

    width: int  # numbers of a vector

    @property
    def suffix(self) -> str:
        """Ending of the parts' names; an array is joined from such parts."""
        return ".parquet"

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do; an array has taken the place of its parts."""
        if self.config.format == "npy":
            return all((self.folder / name).is_file() for name in (SUMMARY, VECTORS, IDS))
        return super().is_complete

    def describe(self) -> str:
        """Return what a dry run prints; also how much there will be."""
        return f"{super().describe()}\nvectors    {self.input.num_rows * self.width * 4 / 1e9:.2f} GB at most"

    def describe_model(self) -> str:
        """Return the width of its vectors."""
        return f"{self.width} numbers a vector"

    def load(self, device: torch.device) -> Work:
        """Load the model; return what makes a part of a block."""
        reader, config = self.input.make_reader(), self.config
        embed = load_embedding(config, device.type)
        return lambda block, path: embed_block(reader(block), embed, config, path)

    def finish(self, num_rows: int, seconds: float) -> dict[str, Any]:
        """Write malformed.jsonl, the .npy that is asked for, and the summary."""
        counts = gather_counts(self)
        if self.config.format == "npy":
            write_npy(self, counts["rows"])
        summary = {"model": self.config.model, "width": self.width, **counts, **measure_rate(num_rows, seconds)}
        write_json(self.folder / SUMMARY, summary)
        if self.config.format == "npy":
            shutil.rmtree(self.folder / PARTS)
        return summary

    def format_summary(self, summary: Mapping[str, Any]) -> str:
        """Return the sentences that a job ends with."""
        said = f"{summary['rows']:,} vectors, {summary['rows_per_second']:,.1f} rows/s now: {self.folder}"
        return "\n".join([said, *describe_losses(summary, self.folder, "they have no vector")])


def run_embedding(config: EmbedConfig) -> Place:
    """Make the vectors of all rows of an input, and return the output's folder.

    With `dry_run` everything is checked and nothing is made or written.
    """
    return run_block_job(plan_embedding(config))


def plan_embedding(config: EmbedConfig) -> EmbedPlan:
    """Check what is asked for, and everything that it reads."""
    config = resolve_gpu(config)
    embed = load_embedding(config, "cpu")
    config.check_layers(embed.start.config.num_hidden_layers)
    rows = plan_input(config.input, FieldNames(config.field), config.block_rows)
    identity = {**identity_of_run(config), "pooling": embed.pooling, "model_sha256": embed.start.sha256}
    return EmbedPlan(config, rows, *resolve_output(config, identity, rows), embed.width)


def load_embedding(config: EmbedConfig, device: str) -> TextEmbedding:
    """Load what makes vectors on a device, "cpu" or "cuda"."""
    start, pooling = _load_encoder(config)
    return TextEmbedding(
        start,
        pooling,
        config.layer_numbers,
        normalize=config.normalize,
        max_length=config.max_length,
        batch_size=config.batch_size,
        device=device,
        long_texts=config.long_texts,
    )


def _load_encoder(config: EmbedConfig) -> tuple[StartModel, Pooling]:
    """The encoder and its pooling; of a bank's adapter without its head, and pooled as its run did."""
    source = open_model(config.model)
    if not isinstance(source, BankAdapter):
        return source.load(), choose_pooling(config.model, config.pooling)
    bank, name = AdapterBank.open(source.bank), source.adapter
    model: Any = bank.load(name)
    tokenizer = load_tokenizer(bank.base.folder)
    start = StartModel(config.model, "adapter", model.config, pick_tensors(take_tensors(model)), tokenizer)
    return start, bank.describe(name).pooling if config.pooling == "auto" else config.pooling


def embed_block(rows: Sequence[InputRow], embed: TextEmbedding, config: EmbedConfig, path: Path) -> BlockRecord:
    """Make the vectors of a block's rows and write its part; rows without text have none, malformed ones no row.

    In the record "malformed" has file, line and reason of each, "ids" what `hash_ids` returns, and "cases" how many
    texts were cut.
    """
    kept, texts, malformed = split_malformed(
        rows, lambda row: check_text(row.values, shown=config.field), is_strict=config.strict
    )
    has_text = np.array([not is_blank(row) for row in kept], dtype=bool)
    vectors = np.full((len(kept), embed.width), np.nan, dtype=np.float32)
    vectors[has_text], is_cut = embed.embed(texts)
    columns = {"id": pa.array([row.id for row in kept], pa.string()), "vector": _to_arrow(vectors, has_text)}
    pq.write_table(pa.table(columns), path)
    what = f"texts have more than {embed.longest} tokens, and their vectors leave out the rest"
    cases = {what: int(is_cut.sum())} if is_cut.any() else {}
    counts = {"rows": len(kept), "empty": int((~has_text).sum()), "malformed": malformed}
    return {**counts, "ids": hash_ids(kept), "cases": cases}


def _to_arrow(vectors: np.ndarray, is_valid: np.ndarray) -> pa.FixedSizeListArray:
    values = pa.array(vectors.reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(values, vectors.shape[1], mask=pa.array(~is_valid))


def write_npy(plan: EmbedPlan, num_rows: int) -> None:
    """Join the parts as one array, a part in memory at a time, and their ids as JSON, a line each."""
    with (
        new_file(plan.folder / VECTORS) as vectors,
        vectors.open("wb") as file,
        new_file(plan.folder / IDS) as ids,
        ids.open("w", encoding="utf-8") as id_file,
    ):
        header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, plan.width)}
        np.lib.format.write_array_header_1_0(file, header)
        for table in _read_parts(plan):
            column = table.column("vector").combine_chunks()
            rows = np.full((table.num_rows, plan.width), np.nan, dtype="<f4")
            has_vector = column.is_valid().to_numpy(zero_copy_only=False)
            rows[has_vector] = column.flatten().to_numpy().reshape(-1, plan.width)
            with name_file(plan.folder / VECTORS):
                file.write(rows.tobytes())
            write_lines(id_file, table.column("id").to_pylist())


def _read_parts(plan: EmbedPlan) -> Iterator[pa.Table]:
    for block in plan.input.blocks:
        yield pq.read_table(plan.blocks.find_part(block.number))
