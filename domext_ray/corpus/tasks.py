"""Read tasks -> what a function makes of each, on Ray Data, in canonical order; only results reach the driver."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray.data

from domext_ray.corpus.sources import ReadTask, Sources
from domext_ray.errors import DomextError
from domext_ray.status_line import StatusLine


def run_tasks(
    function: Callable[[int, ReadTask, bytes], dict[str, Any]],
    sources: Sources,
    verb: str,
    plans: Sequence[bytes] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a function over (number, read task, plan) of all tasks on Ray Data, showing progress.

    Args:
        function: what a task does; it is pickled, and so is what it returns.
        sources: the tasks.
        verb: what the progress line calls the work.
        plans: one a task, given to it as it is; without them every task gets `b""`.

    Yields:
        The results, in the order of the tasks.

    Raises:
        DomextError: a task met a user's mistake.
    """
    configure_ray_data()

    def call(items: dict[str, np.ndarray]) -> dict[str, list[bytes]]:
        result: dict[str, Any] | DomextError
        try:
            result = function(int(items["number"][0]), pickle.loads(items["task"][0]), items["plan"][0])
        except DomextError as error:  # a value: Ray Data drops the cause of an exception on its way to the driver
            result = error
        return {"result": [pickle.dumps(result)]}

    items = [
        {"number": number, "task": pickle.dumps(task), "plan": plans[number] if plans else b""}
        for number, task in enumerate(sources.tasks)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(call, batch_size=1, num_cpus=1)
    del items
    progress = _Progress(sources, verb)
    rows = iter(dataset.iter_rows())
    try:
        for number, row in enumerate(rows):
            result = pickle.loads(row["result"])
            if isinstance(result, DomextError):
                raise result
            progress.show(number + 1)
            yield result
    finally:
        del rows, dataset  # ends the tasks that are still running
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
