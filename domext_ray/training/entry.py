"""What Ray Train's processes begin with: its controller, which decides on restarts, and each rank of a run.

The controller reads this file when it starts, and the ranks start after it. So torch, transformers and the model are
imported by a rank alone, within `train_worker`: in both processes, one after the other, they would take seconds twice.
"""

from __future__ import annotations

import pickle
import platform
from typing import Any

from ray.exceptions import RayError
from ray.train import UserCallback

from domext_ray.errors import ConfigError, TrainingError, find_user_error
from domext_ray.runs.events import notify_driver
from domext_ray.storage import Where


class RunFailures(UserCallback):
    """Runs where Ray Train decides on restarts: a user's mistake ends the run, and a restart is said on the terminal.

    Args:
        run_dir: the run's directory.
        max_failures: deaths of workers after which the run ends; machines that were taken back do not count.
    """

    def __init__(self, run_dir: Where, max_failures: int) -> None:
        self.run_dir, self.max_failures, self.num_failures = run_dir, max_failures, 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Decide what a failed worker means; Ray Train never tries again after an error of this callback.

        Raises:
            DomextError: the user's mistake, or that workers died too often (memory, a lost node).
        """
        errors = {rank: getattr(each, "health_check_failure", None) or each for rank, each in worker_exceptions.items()}
        for error in errors.values():
            if (mistake := find_user_error(error)) is not None:
                raise mistake
        is_taken = any(getattr(each, "preempted", False) for each in errors.values())  # a spot machine, given back
        self.num_failures += not is_taken
        rank, ends = min(errors), self.num_failures > self.max_failures
        reason = (str(errors[rank]).strip() or type(errors[rank]).__name__).splitlines()[0]
        count = f"failure {self.num_failures} of at most {self.max_failures}"
        told = f"{count}; the job gives up" if ends else f"{count} (--train.max_failures); all workers start again"
        if is_taken:
            told = "its machine was taken back; all workers start again"
        notify_driver(self.run_dir, f"worker {rank} failed ({reason}): {told}.")
        if ends and all(isinstance(each, RayError) for each in errors.values()):  # others are defects of the code
            raise TrainingError(
                f"workers died more than --train.max_failures ({self.max_failures}) times, the last time worker {rank} "
                f"({' '.join(str(errors[rank]).split())}); the same command goes on from the newest checkpoint."
            )


def train_worker(settings: dict[str, Any]) -> None:
    """One rank of a run, as Ray Train starts it.

    It raises whatever is wrong, user's mistakes too: a rank that returned would leave the others waiting in
    `ray.train.report`, which knows no limit.
    """
    import ray.train.torch
    import torch

    from domext_ray.runtime.cpu_kernels import TRAINING
    from domext_ray.runtime.device import prepare_device
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
    )
    worker.run()
    worker.close()
