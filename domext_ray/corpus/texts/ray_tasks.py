"""Read tasks -> what a function makes of each, on Ray Data, in canonical order; only results reach the driver."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray.data

from domext_ray.corpus.texts.sources import ReadTask, Sources
from domext_ray.corpus.texts.work_folder import KeptParts
from domext_ray.errors import DomextError, find_storage_error
from domext_ray.progress import StatusLine, Watch
from domext_ray.runtime.ray_cluster import describe_waiting


def run_tasks(
    function: Callable[[int, ReadTask, bytes], dict[str, Any]],
    sources: Sources,
    verb: str,
    kept: KeptParts,
    plans: Sequence[bytes] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a function over (number, read task, plan) of all tasks on Ray Data, showing progress.

    Args:
        function: what a task does; it is pickled, and what it returns becomes JSON, but for bytes.
        sources: the tasks.
        verb: what the progress line calls the work.
        kept: where results are kept; those that are there already are taken over.
        plans: one a task, given to it as it is; without them every task gets `b""`.

    Yields:
        The results, in the order of the tasks.

    Raises:
        DomextError: a task met a user's mistake, could not write, or was killed again and again.
    """
    configure_ray_data()
    kept.forget_tries()

    def call(items: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        number, task, plan = int(items["number"][0]), pickle.loads(items["task"][0]), items["plan"][0]
        try:
            result, fault = kept.read(number, plan)
            is_kept = result is not None
            if result is None:
                kept.count_try(number, task.files[0].path)
                result = function(number, task, plan)
                kept.write(number, plan, result)
        except DomextError as error:  # a value: Ray Data drops the cause of an exception on its way to the driver
            return {"result": [pickle.dumps(error)]}
        except OSError as error:  # of writing: what goes wrong with reading is the corpus' mistake
            storage = find_storage_error(error, error.filename or kept.folder)
            if storage is None:
                raise
            return {"result": [pickle.dumps(storage)]}
        return {"result": [pickle.dumps((result, is_kept, fault))]}

    items = [
        {"number": number, "task": pickle.dumps(task), "plan": plans[number] if plans else b""}
        for number, task in enumerate(sources.tasks)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(call, batch_size=1, num_cpus=1)
    del items
    progress = _Progress(sources, verb)
    num_kept = 0
    rows = iter(dataset.iter_rows())
    try:
        with Watch(verb, describe_waiting) as watch:
            for number, row in enumerate(rows):
                watch.patience.note_move()
                found = pickle.loads(row["result"])
                if isinstance(found, DomextError):
                    raise found
                result, is_kept, fault = found
                num_kept += is_kept
                if fault:
                    progress.line.keep(f"{verb}: {fault}; that part is made anew")
                progress.show(number + 1)
                yield result
    finally:
        del rows, dataset  # ends the tasks that are still running
    if num_kept:
        progress.line.keep(f"{verb}: {num_kept} of {len(sources.tasks)} parts were finished before")
    progress.finish()


def configure_ray_data() -> None:
    """Make Ray Data keep the order of its blocks, and leave progress and logs to us."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)


class _Progress:
    """Share, MB, MB/s, time left."""

    def __init__(self, sources: Sources, verb: str) -> None:
        self.sizes = np.cumsum([each.num_bytes for each in sources.tasks]) / 1e6
        self.verb, self.line = verb, StatusLine()

    def show(self, num_done: int) -> None:
        done, total = self.sizes[num_done - 1], self.sizes[-1]
        rate = max(done, 1e-6) / self.line.seconds
        left = (total - done) / rate
        self.line.show(f"{self.verb}: {done:,.0f} of {total:,.0f} MB, {rate:.1f} MB/s, {left:,.0f} s left")

    def finish(self) -> None:
        self.line.keep(f"{self.verb}: {self.sizes[-1]:,.0f} MB in {self.line.seconds:.1f} s")
