"""What Ray Train's processes begin with: its controller, and each rank of a run.

The controller reads this file when it starts, and the ranks start after it. So torch, transformers and the model are
imported by a rank alone, within `train_worker`: in both processes, one after the other, they would take seconds twice.
"""

from __future__ import annotations

import pickle
import platform
from typing import TYPE_CHECKING, Any

from domext_ray.errors import ConfigError
from domext_ray.runtime.ray_private import reach
from domext_ray.training.notices import Notices, end_heeding, heed_sigterm, is_told

if TYPE_CHECKING:
    from ray.train import ScalingConfig


def make_heeding_callback() -> Any:
    """Return what makes each worker heed SIGTERM: Ray Train calls it in the worker's main thread."""

    class Heeding(reach("ray.train.v2._internal.execution.callback:WorkerCallback")):  # type: ignore[misc]
        def after_init_train_context(self) -> None:
            heed_sigterm()

    return Heeding()


def make_plain_policy(scaling: ScalingConfig) -> Any:
    """Return Ray Train's policy for a fixed number of workers, less the process that asks an autoscaler for room."""

    class Plain(reach("ray.train.v2._internal.execution.scaling_policy:FixedScalingPolicy")):  # type: ignore[misc]
        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    return Plain(scaling)


def _is_taken() -> bool:
    import ray.train

    return ray.train.get_preemption_info() is not None


def train_worker(settings: dict[str, Any]) -> str:
    """One rank of a run, as Ray Train starts it; returns why it has ended (`training.notices`).

    It raises whatever is wrong, user's mistakes too: a rank that returned would leave the others waiting in
    `ray.train.report`, which knows no limit.
    """
    import ray.train.torch
    import torch

    from domext_ray.runtime.device import TRAINING, prepare_device
    from domext_ray.runtime.machine import count_cpus
    from domext_ray.training.run import Run
    from domext_ray.training.worker import PretrainWorker

    run: Run = pickle.loads(settings["run"])
    context, scale = ray.train.get_context(), run.config.scale
    if scale.uses_gpu and not torch.cuda.is_available():
        raise ConfigError(
            f"--scale.use_gpu is true, and torch {torch.__version__} finds no GPU on {platform.node()}, where Ray has "
            "one; install a build of torch with CUDA there, or give --scale.use_gpu false."
        )
    cpus = scale.cpus_per_worker or count_cpus() // context.get_local_world_size()
    device = prepare_device(scale.uses_gpu, cpus, TRAINING, uses_fp32=not run.config.engine.uses_bf16)
    worker = PretrainWorker(
        run,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=ray.train.torch.get_device() if scale.uses_gpu else device,
        report=ray.train.report,
        notices=Notices(is_told, _is_taken if settings["in_cluster"] else None),
    )
    worker.run()
    worker.close()
    end_heeding()
    return worker.end
