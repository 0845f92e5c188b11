"""Read tasks of a corpus -> what a function makes of each (`runtime.tasks`), in canonical order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator

from domext_ray.runtime.tasks import Records, Result
from domext_ray.text.data.sources import ReadTask, Sources


def run_read_tasks(
    function: Callable[[int, ReadTask, bytes], Result],
    sources: Sources,
    verb: str,
    records: Records,
    find_plan: Callable[[int], bytes] = lambda number: b"",
) -> Iterator[Result]:
    """Run a function over (number, read task, plan) of all tasks on Ray, in order.

    The function is pickled. A plan is what a task is told of its documents. Results that `records` has are taken over.
    """
    from domext_ray.runtime.tasks import Task, run_tasks  # here, for most who import this file run no tasks: no Ray

    plans = map(find_plan, range(len(sources.tasks)))
    return run_tasks(
        lambda item: function(*item),
        (
            Task(i, (i, task, plan), task.num_bytes / 1e6, task.files[0].path, hashlib.sha256(plan).hexdigest())
            for i, (task, plan) in enumerate(zip(sources.tasks, plans, strict=True))
        ),
        records,
        verb=verb,
        total=sources.num_bytes / 1e6,
        unit="MB",
        remedy="free memory, or lower --prepare.shard_bytes or --prepare.max_document_chars",
    )


def configure_ray_data() -> None:
    """Make Ray Data keep the order of its blocks, and leave progress and logs to us."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.ERROR)
