"""Whether a job starts anything, whether its processes have GPUs, and how long they wait for these and for room."""

from __future__ import annotations

from typing import Literal

from domext_ray.config.options.declare import Main, Time, free, option_group, read_seconds

UseGpu = bool | Literal["auto"]
"""A GPU for each process, or not; auto until it is known how many GPUs there are."""
DryRun = bool | Literal["full"]
"""Whether a job only says what it would do; full: with all its options."""


@option_group
class GpuOptions:
    """The options of `--scale` that all jobs have which start processes."""

    # a GPU for each process; auto: where there are GPUs, or a cluster can bring them
    use_gpu: Main[UseGpu] = free("auto")
    # how long a job waits for GPUs, or for room for any of its tasks and processes, before it gives up
    wait: Time = free("10m")

    @property
    def wait_seconds(self) -> float:
        """The seconds of `wait`."""
        return read_seconds(self.wait)

    @property
    def uses_gpu(self) -> bool:
        """Whether each process has a GPU; `auto` has been settled (`ray_cluster.resolve_gpu`)."""
        assert self.use_gpu != "auto"
        return self.use_gpu
