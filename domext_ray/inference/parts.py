"""What `domext predict` and `domext embed` share: rows in blocks -> an output folder that the same command completes.

Enters: a `BlockPlan`, and what each process does with a block. Leaves, in --output:

    predictions/part-NNNNNN.*   one file a block, a row per input row, in the input's order
    malformed.jsonl             rows that could not be read: file, line and reason
    summary.json                rows and seconds; written last
    config.yaml, run.json       what the output was made from
    sources.json                its files, each with what its content is known by
    .blocks/NNNNNN.json         what was counted in a block; written after its part, so a block that has one is done

Each process of a pool (`runtime.tasks`) loads its model once. A block travels as a few numbers and is read where it is
worked on, so memory does not grow with the input. A part depends on its block alone: a job that is killed goes on with
the blocks that are missing, and its output is that of a job that was not. Another model, another input or other options
are refused, since parts of two jobs would make no whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TextIO, TypeAlias, TypeVar

import numpy as np
import pyarrow.parquet as pq
import torch

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.inference import InferenceScaleConfig, PredictConfig
from domext_ray.errors import ConfigError, CorpusError, RunError
from domext_ray.inference.input_plan import Block, InputPlan
from domext_ray.inference.input_rows import ID_FIELD, TEXT_FIELD, InputRow, RowError
from domext_ray.inference.labelled_input import LabelledInput
from domext_ray.inference.submission import SubmissionInput
from domext_ray.runs.run_directory import RUN, check_identity, lock_run, read_identity, write_config, write_run
from domext_ray.runtime.device import PREDICTION, prepare_device
from domext_ray.runtime.ray_cluster import (
    check_shared_storage,
    describe_hold,
    describe_nodes,
    list_nodes,
    resolve_gpu,
    start_ray,
)
from domext_ray.runtime.records import Records
from domext_ray.runtime.tasks import Function, Pool, Task, run_tasks
from domext_ray.storage import Place, new_file
from domext_ray.text.data.sources import SOURCES, require_files, write_files

PARTS, RECORDS, SUMMARY, MALFORMED = "predictions", ".blocks", "summary.json", "malformed.jsonl"
BlockRecord: TypeAlias = dict[str, Any]
"""What the work counted in a block, as JSON; "bytes" of its part and "lines" of its rows are added."""
Work: TypeAlias = Callable[[Block, Path], BlockRecord]
"""Writes what comes of a block to a path, and says what it counted; the path may be left without a file."""

_ID_BYTES = 8
"""Of an id's hash."""
ConfigT = TypeVar("ConfigT", PredictConfig, EmbedConfig)


class BlockFolder:
    """The files of an output's blocks; `suffix` is the ending of the parts' names, such as ".parquet"."""

    def __init__(self, folder: Place, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix
        self.records = Records(folder / RECORDS, find_fault=self._find_fault)

    def make(self) -> None:
        """Make the folders, and remove what a killed job has left half written."""
        for folder in ((self.folder / name).local() for name in (PARTS, RECORDS)):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".*"):
                left.unlink(missing_ok=True)

    def find_part(self, number: int) -> Place:
        """Return the file of a block."""
        return self.folder / PARTS / f"part-{number:06d}{self.suffix}"

    def _find_fault(self, record: BlockRecord) -> str:
        part, size = self.find_part(record["number"]), record["bytes"]
        info = part.info()
        return "" if not size or (info and info.size == size) else f"{part} is not whole"

    def remove(self, number: int) -> None:
        """Remove a block's record and its part."""
        self.records.find(number).delete()
        self.find_part(number).delete()

    def is_done(self, number: int) -> bool:
        """Whether a block's record, and the part that it speaks of, are there and whole."""
        return self.records.read(number)[0] is not None

    def read(self, number: int) -> BlockRecord:
        """Return the record of a block that is done."""
        record, fault = self.records.read(number)
        if record is None:
            found = fault or f"{self.find_part(number)} was written on another node and is not there on this one"
            raise RunError(f"{found}; run the same command again, with an --output that all nodes share.")
        return record

    def read_ids(self, number: int) -> list[str]:
        """Return the ids of the rows of a block's part, in order."""
        part = self.find_part(number)
        if self.suffix == ".parquet":
            return pq.read_table(part, columns=[ID_FIELD]).column(ID_FIELD).to_pylist()
        return [json.loads(line)[ID_FIELD] for line in part.read_bytes().splitlines()]

    def make_part(self, block: Block, work: Work) -> BlockRecord:
        """Make a block's part, and return its record."""
        with new_file(self.find_part(block.number)) as temporary:
            try:
                record = work(block, temporary)
            except torch.OutOfMemoryError:
                raise RunError("the GPU's memory is too small for a batch; lower --batch_tokens.") from None
            size = temporary.stat().st_size if temporary.exists() else 0
            return record | {"number": block.number, "lines": block.num_rows, "bytes": size}


@dataclass(frozen=True)
class BlockPlan(ABC, Generic[ConfigT]):
    """A job on blocks, checked."""

    verb: ClassVar[str]  # what the progress line calls the work
    product: ClassVar[str]  # what comes of it

    config: ConfigT  # its devices settled as far as they are known
    input: InputPlan | LabelledInput | SubmissionInput
    folder: Place  # the output
    identity: dict[str, Any]  # what makes it this job

    @property
    def suffix(self) -> str:
        """Ending of the parts' names."""
        return f".{self.config.format}"

    @property
    def blocks(self) -> BlockFolder:
        """The files of the blocks."""
        return BlockFolder(self.folder, self.suffix)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return (self.folder / SUMMARY).is_file() and all(
            self.blocks.is_done(block.number) for block in self.input.blocks
        )

    def read_records(self) -> Iterator[BlockRecord]:
        """Yield what was counted in each block, in order; all blocks are done."""
        yield from (self.blocks.read(block.number) for block in self.input.blocks)

    def describe(self) -> str:
        """Return what a dry run prints."""
        blocks, config = self.input.blocks, self.config
        done = len(blocks) if self.is_complete else sum(self.blocks.is_done(block.number) for block in blocks)
        return "\n".join(
            [
                f"model      {config.model} ({self.describe_model()})",
                f"input      {self.input.describe()}",
                f"blocks     {len(blocks):,} of up to {config.block_rows:,} rows; {done:,} are done",
                f"output     {self.folder}",
            ]
        )

    @abstractmethod
    def describe_model(self) -> str:
        """Return what a dry run says of the model."""

    @abstractmethod
    def load(self, device: torch.device) -> Work:
        """Load the model, once in each process; return what makes a part of a block."""

    @abstractmethod
    def finish(self, num_rows: int, seconds: float) -> dict[str, Any]:
        """Write the summary of all blocks, which are done, and return it.

        `num_rows` and `seconds` are of this start alone.
        """

    @abstractmethod
    def format_summary(self, summary: Mapping[str, Any]) -> str:
        """Return what a job ends with."""


def resolve_output(
    config: PredictConfig | EmbedConfig, identity: dict[str, Any], rows: InputPlan | LabelledInput | SubmissionInput
) -> tuple[Place, dict[str, Any]]:
    """Return the folder of an output, which is empty or the job's own, and what makes it this job."""
    folder = Place(config.output).resolve()
    with _name_output():
        known = (read_identity(folder) or {}).get("input_sha256")
        identity = {**identity, "input_sha256": known if known == rows.former_sha256 else rows.sha256}
        if known not in (None, identity["input_sha256"]):
            require_files(
                folder,
                rows.list_files,
                f"so that --input {config.input!r} is not what the run directory {folder} was made with; bring that "
                "back, or give another --output",
            )
        check_identity(folder, identity)
    if (folder / PARTS).exists() and not (folder / RUN).exists():
        raise RunError(f"{folder} holds {PARTS} of something else; give another --output.")
    return folder, identity


def run_block_job(plan: BlockPlan[Any]) -> Place:
    """Work on the blocks that are missing, or of a dry run say what would be done; return the output's folder."""
    if plan.config.dry_run:
        print(plan.describe())
        return plan.folder
    if plan.is_complete:
        print(f"the {plan.product} in {plan.folder} are complete; nothing is left to do.")
        return plan.folder
    start_ray(plan.config.scale.wait_seconds)
    plan = replace(plan, config=resolve_gpu(plan.config))
    with _name_output(), lock_run(plan.folder):
        write_config(plan.folder, plan.config)
        write_run(plan.folder, identity=plan.identity)
        write_files(plan.folder, plan.input.list_files())
        check_shared_storage(plan.folder)
        plan.blocks.make()
        started = time.perf_counter()
        num_rows = _run_blocks(plan)
        summary = plan.finish(num_rows, time.perf_counter() - started)
    print(plan.format_summary(summary))
    return plan.folder


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


def _run_blocks(plan: BlockPlan[Any]) -> int:
    """Work on all blocks that are not done, and return their rows."""
    folder, scale = plan.blocks, plan.config.scale
    missing = [block for block in plan.input.blocks if not folder.is_done(block.number)]
    if not missing:
        return 0
    total, now = plan.input.num_rows, sum(block.num_rows for block in missing)
    workers, cpus = _plan_workers(scale, len(missing))

    def make_function() -> Function:
        work = plan.load(prepare_device(scale.uses_gpu, cpus, PREDICTION))
        return lambda block: folder.make_part(block, work)

    done = run_tasks(
        Pool(make_function, workers, cpus, float(scale.uses_gpu)),
        (Task(block.number, block, block.num_rows, f"block {block.number:,} of --input") for block in missing),
        folder.records,
        verb=plan.verb,
        total=total,
        unit="rows",
        remedy="lower --batch_tokens or --scale.workers",
        before=total - now,
    )
    num_rows = sum(record["lines"] for record in done)
    try:
        plan.input.require_unchanged()
    except CorpusError:
        for block in missing:  # it may be put back as it was
            folder.remove(block.number)
        raise
    return num_rows


def _plan_workers(scale: InferenceScaleConfig, most: int) -> tuple[int, float]:
    """Return how many processes there are, as many as fit unless they are given, and the CPUs of each."""
    nodes = list_nodes()
    share = scale.cpus or 1.0
    room = sum(node.hold(share, with_gpu=scale.uses_gpu) for node in nodes)
    if scale.cpus and not room:
        raise ConfigError(f"--scale.cpus is {scale.cpus:g}; there are {describe_nodes(nodes)}{describe_hold()}.")
    if scale.workers > max(room, 1):
        raise ConfigError(
            f"--scale.workers is {scale.workers}; there is room for {room} with {share:g} CPUs each "
            f"({describe_nodes(nodes)}{describe_hold()}); lower it or --scale.cpus."
        )
    return min(scale.workers or max(room, 1), most), share


def split_malformed(
    rows: Sequence[InputRow], make_example: Callable[[InputRow], Any], *, is_strict: bool, answers_all: bool = False
) -> tuple[list[InputRow], list[Any], list[dict[str, Any]]]:
    """Separate a block's rows that can be used from those that cannot.

    `make_example` raises a RowError for a row with text that cannot be used. Return the rows that can, the examples of
    those that are not blank, and file, line and reason of the others; if `is_strict`, or every row must have an answer
    (`answers_all`), the first malformed row is a CorpusError.
    """
    kept, examples, malformed = list[InputRow](), list[Any](), list[dict[str, Any]]()
    for row in rows:
        try:
            if row.fault:
                raise RowError(row.fault)
            if not is_blank(row):
                examples.append(make_example(row))
            kept.append(row)
        except RowError as error:
            if is_strict or answers_all:
                remedy = "mend it: a submission answers every row" if answers_all else "mend it, or leave out --strict"
                raise CorpusError(f"{row.path}:{row.line}: the row {error}; {remedy}.") from error
            malformed.append({"file": row.path, "line": row.line, "reason": f"the row {error}"})
    return kept, examples, malformed


def is_blank(row: InputRow) -> bool:
    """Whether a row's text is nothing but white space: there is nothing to compute."""
    if row.example is not None:
        return False
    text = row.values.get(TEXT_FIELD)
    return isinstance(text, str) and not text.strip()


def hash_ids(rows: Sequence[InputRow]) -> bytes:
    """Return eight bytes for each row of a block that has an id of its own, in order: all ids fill too much memory."""
    own = (row.id.encode("utf-8", "surrogatepass") for row in rows if row.has_id)
    return b"".join(hashlib.blake2b(given, digest_size=_ID_BYTES).digest() for given in own)


def _find_repeated(plan: BlockPlan[Any]) -> dict[str, Any]:
    """Return "first", the first id that an earlier row has, and "rows", how many rows have such ids; empty: none."""
    hashes = np.frombuffer(b"".join(record.get("ids", b"") for record in plan.read_records()), dtype="<u8")
    firsts = np.unique(hashes, return_index=True)[1]
    if len(firsts) == len(hashes):
        return {}
    is_repeated = np.ones(len(hashes), dtype=bool)
    is_repeated[firsts] = False
    wanted = hashes[np.argmax(is_repeated)].tobytes()
    for block in plan.input.blocks:
        for given in plan.blocks.read_ids(block.number):
            if hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES).digest() == wanted:
                return {"first": given, "rows": int(is_repeated.sum())}
    return {}


def gather_counts(plan: BlockPlan[Any]) -> dict[str, Any]:
    """Write malformed.jsonl; return the counts of all blocks.

    These are "rows", "empty", "malformed", "first_malformed" and "cases", and of ids that several rows have
    "repeated_ids" ("first", and "rows" without the first of each).

    If no row at all can be used that is refused, and the output is as if the job had not been.
    """
    counts, cases, first = Counter[str](), Counter[str](), ""
    with new_file(plan.folder / MALFORMED) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in plan.read_records():
            counts.update({"rows": record["rows"], "empty": record["empty"], "malformed": len(record["malformed"])})
            cases.update(record["cases"])
            for fault in record["malformed"][:1]:
                first = first or f"{fault['file']}:{fault['line']}: {fault['reason']}"
            write_lines(file, record["malformed"])
    if not counts["rows"] and counts["malformed"]:
        for name in (PARTS, RECORDS, RUN, SOURCES, MALFORMED):
            (plan.folder / name).delete()
        raise CorpusError(
            f"none of the {counts['malformed']:,} rows of --input {plan.config.input!r} can be used ({first}); set "
            "--field, or mend the file."
        )
    repeated = _find_repeated(plan)
    named = {"repeated_ids": repeated} if repeated else {}
    return {**counts, "first_malformed": first, "cases": dict(cases), **named}


def measure_rate(num_rows: int, seconds: float) -> dict[str, Any]:
    """Return the summary's part on one start."""
    return {"rows_now": num_rows, "seconds": round(seconds, 3), "rows_per_second": round(num_rows / seconds, 3)}


def write_lines(file: TextIO, records: Sequence[Any]) -> None:
    """Write values as JSON, a line each."""
    for record in records:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def describe_losses(summary: Mapping[str, Any], folder: Place, lacking: str) -> list[str]:
    """Return the sentences about rows without text, malformed ones, ids of several, and what was cut or is odd.

    `lacking` is what follows "rows have no text, so ".
    """
    lines = [f"{summary['empty']:,} rows have no text, so {lacking}."] if summary["empty"] else []
    if summary["malformed"]:
        lines.append(
            f"{summary['malformed']:,} rows are malformed and left out; {folder / MALFORMED} names them, the first is "
            f"{summary['first_malformed']}."
        )
    if repeated := summary.get("repeated_ids"):
        rows = "1 row has" if repeated["rows"] == 1 else f"{repeated['rows']:,} rows have"
        lines.append(
            f"{rows} an id that an earlier row has, the first is {repeated['first']!r}: only the order, which is the "
            f"input's, tells them apart; give each row its own id, or take the field {ID_FIELD!r} out, so that file "
            "and line are the id."
        )
    return lines + [f"{number:,} {what}." for what, number in summary["cases"].items()]
