"""Numbered blocks of an input -> their parts of the output, on a pool of Ray's processes (`runtime.tasks`).

Enters: blocks, and what makes of a block a file. Leaves, in the output folder:

    predictions/part-NNNNNN.*   one file a block, in the input's order
    .blocks/NNNNNN.json         what was counted in it; written last, so a block that has one is done

Each process loads its model once. A block travels as a few numbers and is read where it is worked on, so memory does
not grow with the input. A part depends on its block alone: a job that is killed goes on with the blocks that are
missing, and its output is that of a job that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from domext_ray.config.inference import InferenceScaleConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.runtime.cpu_kernels import PREDICTION
from domext_ray.runtime.device import prepare_device
from domext_ray.runtime.ray_cluster import describe_nodes, list_nodes
from domext_ray.runtime.records import Records
from domext_ray.runtime.tasks import Function, Pool, Task, run_tasks
from domext_ray.storage import Place, new_file

PARTS, RECORDS = "predictions", ".blocks"
BlockRecord: TypeAlias = dict[str, Any]
"""What the work counted in a block, as JSON; "bytes" of its part and "lines" of its rows are added."""


class NumberedBlock(Protocol):
    """A part of an input."""

    @property
    def number(self) -> int:
        """Its place in the input, from 0."""

    @property
    def num_rows(self) -> int:
        """How much work it is."""


Work: TypeAlias = Callable[[Any, Path], BlockRecord]
"""Writes what comes of a block to a path, and says what it counted; the path may be left without a file."""
MakeWork: TypeAlias = Callable[[torch.device], Work]
"""Called once in each process: loads the model on the device."""


class BlockFolder:
    """The files of an output's blocks.

    Args:
        folder: the output.
        suffix: ending of the parts' names, such as ".parquet".
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix
        self.records = Records(Place(folder) / RECORDS, find_fault=self._find_fault)

    def make(self) -> None:
        """Make the folders, and remove what a killed job has left half written."""
        for each in (self.folder / PARTS, self.folder / RECORDS):
            each.mkdir(parents=True, exist_ok=True)
            for left in each.glob(".*"):
                left.unlink(missing_ok=True)

    def find_part(self, number: int) -> Path:
        """Return the file of a block."""
        return self.folder / PARTS / f"part-{number:06d}{self.suffix}"

    def _find_fault(self, record: BlockRecord) -> str:
        part, size = self.find_part(record["number"]), record["bytes"]
        is_whole = not size or (part.is_file() and part.stat().st_size == size)
        return "" if is_whole else f"{part} is not whole"

    def is_done(self, number: int) -> bool:
        """Whether a block's record, and the part that it speaks of, are there and whole."""
        return self.records.read(number)[0] is not None

    def read(self, number: int) -> BlockRecord:
        """Return the record of a block that is done.

        Raises:
            RunError: it is not there.
        """
        record, fault = self.records.read(number)
        if record is None:
            found = fault or f"{self.find_part(number)} was written on another node and is not there on this one"
            raise RunError(f"{found}; run the same command again, with an --output that all nodes share.")
        return record

    def make_part(self, block: NumberedBlock, work: Work) -> BlockRecord:
        """Make a block's part, and return its record.

        Raises:
            RunError: the GPU's memory is too small.
            StorageError: the disk is full, may not be written or fails.
        """
        with new_file(self.find_part(block.number)) as temporary:
            try:
                record = work(block, temporary)
            except torch.OutOfMemoryError:
                raise RunError("the GPU's memory is too small for a batch; lower --batch_tokens.") from None
            size = temporary.stat().st_size if temporary.exists() else 0
            return record | {"number": block.number, "lines": block.num_rows, "bytes": size}


def run_blocks(
    blocks: Sequence[NumberedBlock],
    make: MakeWork,
    folder: BlockFolder,
    scale: InferenceScaleConfig,
    verb: str = "predicting",
) -> int:
    """Work on all blocks that are not done, showing rows per second and the time left; Ray is initialised.

    Args:
        blocks: the whole input.
        make: loads the model in each process; it is pickled.
        folder: where the parts go; see `BlockFolder.make`.
        scale: processes, and what each of them gets; `use_gpu` is settled.
        verb: what the progress line calls the work.

    Returns:
        Rows that were worked on now; those of blocks that were done before are not counted.

    Raises:
        DomextError: a block met a user's mistake, or the disk refuses.
    """
    missing = [each for each in blocks if not folder.is_done(each.number)]
    if not missing:
        return 0
    total, now = (sum(each.num_rows for each in those) for those in (blocks, missing))
    workers, cpus = plan_workers(scale, len(missing))

    def make_function() -> Function:
        work = make(prepare_device(scale.uses_gpu, cpus, PREDICTION))
        return lambda block: folder.make_part(block, work)

    done = run_tasks(
        Pool(make_function, workers, cpus, float(scale.uses_gpu)),
        (Task(each.number, each, each.num_rows, f"block {each.number:,} of --input") for each in missing),
        folder.records,
        verb=verb,
        total=total,
        unit="rows",
        remedy="lower --batch_tokens or --scale.workers",
        before=total - now,
    )
    return sum(record["lines"] for record in done)


def plan_workers(scale: InferenceScaleConfig, most: int) -> tuple[int, float]:
    """Return how many actors there are and the CPUs of each.

    Args:
        scale: what was asked for; 0 is as many as fit.
        most: more would have nothing to do.

    Raises:
        ConfigError: they do not fit on the nodes that there are.
    """
    nodes = list_nodes()
    share = scale.cpus or 1.0
    room = sum(each.hold(share, with_gpu=scale.uses_gpu) for each in nodes)
    if scale.cpus and not room:
        raise ConfigError(f"--scale.cpus is {scale.cpus:g}; there are {describe_nodes(nodes)}.")
    if scale.workers > max(room, 1):
        raise ConfigError(
            f"--scale.workers is {scale.workers}; there is room for {room} with {share:g} CPUs each "
            f"({describe_nodes(nodes)}); lower it or --scale.cpus."
        )
    return min(scale.workers or max(room, 1), most), share
