"""Numbered blocks of an input -> their parts of the output, on a pool of Ray Data's actors.

Enters: blocks, and what makes of a block a file. Leaves, in the output folder:

    predictions/part-NNNNNN.*   one file a block, in the input's order
    .blocks/NNNNNN.json         what was counted in it; written last, so a block that has one is done

Each actor loads its model once. A block travels as a few numbers and is read where it is worked on, and only counts
come back, so memory does not grow with the input. A part depends on its block alone: a job that is killed goes on with
the blocks that are missing, and its output is that of a job that was not.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import ray.data
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, WorkerCrashedError

from domext_ray.config.inference import InferenceScaleConfig
from domext_ray.corpus.texts.ray_tasks import configure_ray_data
from domext_ray.errors import ConfigError, DomextError, RunError, find_storage_error
from domext_ray.files import read_json
from domext_ray.progress import StatusLine, Watch, format_seconds
from domext_ray.runtime.cpu_kernels import PREDICTION, settle_kernels
from domext_ray.runtime.ray_cluster import describe_nodes, describe_waiting, list_nodes
from domext_ray.storage import new_file, write_json

PARTS, RECORDS = "predictions", ".blocks"
BlockRecord: TypeAlias = dict[str, Any]
"""What the work counted in a block, as JSON; "bytes" of its part and "lines" of its rows are added."""


MOST_DEATHS = 3
"""Workers that may die in one start: a node that goes away is no reason to stop, a text that kills its worker is."""


class WorkerDiedError(RunError):
    """A process of the pool died."""


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
"""Called once in each actor: loads the model on the device."""


class BlockFolder:
    """The files of an output's blocks.

    Args:
        folder: the output.
        suffix: ending of the parts' names, such as ".parquet".
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix

    def make(self) -> None:
        """Make the folders, and remove what a killed job has left half written."""
        for each in (self.folder / PARTS, self.folder / RECORDS):
            each.mkdir(parents=True, exist_ok=True)
            for left in each.glob(".*"):
                left.unlink(missing_ok=True)

    def find_part(self, number: int) -> Path:
        """Return the file of a block."""
        return self.folder / PARTS / f"part-{number:06d}{self.suffix}"

    def find_record(self, number: int) -> Path:
        """Return the record of a block."""
        return self.folder / RECORDS / f"{number:06d}.json"

    def is_done(self, number: int) -> bool:
        """Whether a block's record, and the part that it speaks of, are there."""
        record, part = self.find_record(number), self.find_part(number)
        if not record.is_file():
            return False
        size = self.read(number)["bytes"]
        return part.is_file() and part.stat().st_size == size if size else True

    def read(self, number: int) -> BlockRecord:
        """Return the record of a block that is done.

        Raises:
            RunError: it is damaged.
        """
        remedy = "delete it: the same command predicts that block again"
        return read_json(self.find_record(number), remedy, {"lines": int, "bytes": int})

    def write(self, block: NumberedBlock, work: Work) -> BlockRecord:
        """Make a block's part, and then its record, which is returned.

        Raises:
            StorageError: the disk is full, may not be written or fails.
        """
        part = self.find_part(block.number)
        with new_file(part) as temporary:
            record = work(block, temporary)
            record["lines"] = block.num_rows
            record["bytes"] = temporary.stat().st_size if temporary.exists() else 0
        write_json(self.find_record(block.number), record)
        return record


class _Worker:
    """An actor of the pool: a model, and the blocks that it is given."""

    def __init__(self, make: MakeWork, folder: BlockFolder, threads: int, uses_gpu: bool) -> None:
        self.folder, self.error, self.work = folder, b"", None
        torch.set_num_threads(threads)
        try:
            settle_kernels(PREDICTION)
            self.work = make(torch.device("cuda", 0) if uses_gpu else torch.device("cpu"))
        except DomextError as error:  # a value: Ray Data drops the cause of an exception on its way to the driver
            self.error = pickle.dumps(error)

    def __call__(self, items: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        return {"result": [self._work_on(pickle.loads(each)) for each in items["block"]]}

    def _work_on(self, block: NumberedBlock) -> bytes:
        work = self.work
        if work is None:
            return self.error
        try:
            record = self.folder.write(block, work)
        except torch.OutOfMemoryError:
            return pickle.dumps(RunError("the GPU's memory is too small for a batch; lower --batch_tokens."))
        except DomextError as error:
            return pickle.dumps(error)
        except OSError as error:
            storage = find_storage_error(error, self.folder.find_part(block.number))
            if storage is None:
                raise
            return pickle.dumps(storage)
        return pickle.dumps(record["lines"])  # the rest is on the disk, and read a block at a time


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
        make: loads the model in each actor; it is pickled.
        folder: where the parts go; see `BlockFolder.make`.
        scale: actors, and what each of them gets; `use_gpu` is settled.
        verb: what the progress line calls the work.

    Returns:
        Rows that were worked on now; those of blocks that were done before are not counted.

    Raises:
        DomextError: a block met a user's mistake, or the disk refuses.
    """
    missing = [each for each in blocks if not folder.is_done(each.number)]
    progress = _Progress(verb, sum(each.num_rows for each in blocks), sum(each.num_rows for each in missing))
    deaths = 0
    while missing:
        workers, cpus = plan_workers(scale, len(missing))
        try:
            for num_rows in _run_pool(missing, make, folder, scale, workers, cpus, verb):
                progress.advance(num_rows)
            _check_seen(missing, folder)
        except WorkerDiedError as error:
            deaths += 1
            if deaths > MOST_DEATHS:
                raise
            progress.line.keep(f"{verb}: a worker died ({error.__cause__.__class__.__name__}); its block is done again")
        missing = [each for each in missing if not folder.is_done(each.number)]
        progress.done = progress.missing - sum(each.num_rows for each in missing)
    progress.finish()
    return progress.done


def _check_seen(blocks: Sequence[NumberedBlock], folder: BlockFolder) -> None:
    """Refuse to go on where what the workers have written is not to be seen here."""
    unseen = [each.number for each in blocks if not folder.is_done(each.number)]
    if unseen:
        raise RunError(
            f"{folder.find_part(unseen[0])} was written on another node and is not there on this one; give an --output "
            "that all nodes share."
        )


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


def _run_pool(
    missing: Sequence[NumberedBlock],
    make: MakeWork,
    folder: BlockFolder,
    scale: InferenceScaleConfig,
    workers: int,
    cpus: float,
    verb: str,
) -> Iterator[int]:
    """Yield the rows of blocks as they are done."""
    configure_ray_data()
    warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")  # what Ray names instead has no restarts
    items = [{"block": pickle.dumps(each)} for each in missing]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Worker,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        fn_constructor_args=(make, folder, max(1, int(cpus)), scale.uses_gpu),
        num_cpus=cpus,
        num_gpus=1 if scale.uses_gpu else 0,
        max_restarts=0,  # `run_blocks` does, and knows when to stop: Ray Data would restart an actor for ever
    )
    del items
    rows = iter(dataset.iter_rows())
    try:
        with Watch(verb, describe_waiting) as watch:
            for row in rows:
                watch.patience.note_move()
                found = pickle.loads(row["result"])
                if isinstance(found, DomextError):
                    raise found
                yield found
    except (ActorDiedError, ActorUnavailableError, WorkerCrashedError, OutOfMemoryError) as error:
        raise WorkerDiedError(
            f"workers of {verb} died again and again, as they do where they need more memory than there is; lower "
            "--batch_tokens or --scale.workers, and the same command goes on."
        ) from error
    finally:
        del rows, dataset  # ends the actors


class _Progress:
    """Rows, rows per second, time left.

    Args:
        verb: the work.
        total: rows of the input.
        missing: rows that are not done.
    """

    def __init__(self, verb: str, total: int, missing: int) -> None:
        self.verb, self.total, self.missing, self.done = verb, total, missing, 0
        self.line = StatusLine(is_due=False)
        if missing < total:
            self.line.keep(f"{verb}: {total - missing:,} of {total:,} rows were done before")

    def advance(self, num_rows: int) -> None:
        """Count finished rows."""
        self.done += num_rows
        rate = max(self.done, 1) / self.line.seconds
        left = format_seconds((self.missing - self.done) / rate)
        shown = self.total - self.missing + self.done
        self.line.show(f"{self.verb}: {shown:,} of {self.total:,} rows, {rate:,.0f} rows/s, {left} left")

    def finish(self) -> None:
        """Show the last line."""
        rate = self.done / self.line.seconds
        self.line.keep(f"{self.verb}: {self.done:,} rows in {format_seconds(self.line.seconds)}, {rate:,.0f} rows/s")
