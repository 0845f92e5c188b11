"""Pre-training under Ray Train: the driver's function, and what starts its workers.

Enters: a `PretrainTask` (configuration, run directory, prepared corpus). Leaves, in the run directory: metrics.jsonl,
TensorBoard events and checkpoints. A worker that dies is started again by Ray Train; a job that dies is started again
by its user; both go on from the newest checkpoint that verifies.
"""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from domext_ray.config import PretrainConfig
from domext_ray.errors import ConfigError, DomextError, RunError, TrainingError, find_user_error
from domext_ray.training.metrics import RunProgress, write_text
from domext_ray.training.worker import PretrainTask, PretrainWorker

OBJECT_STORE_BYTES = 512 * 2**20
COLLECTIVE_TIMEOUT_SECONDS = 300


def start_ray() -> None:
    """Connect to the cluster that RAY_ADDRESS or the job server names, or start a local one on localhost.

    The local one has token authentication, no dashboard and a bounded object store.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "120")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, 1),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def pretrain(task: PretrainTask) -> None:
    """Train until a limit (`train.max_steps`, `max_tokens`, `max_seconds`), going on from the newest checkpoint.

    Ray is initialised.

    Args:
        task: what to train; its attempt id is set here.

    Raises:
        ConfigError: the cluster has fewer resources than the workers need.
        RunError: workers cannot see the run directory.
        TrainingError: a loss or gradient was not finite, or workers failed more than `train.max_failures` times.
    """
    config = task.config
    task = replace(task, attempt=uuid.uuid4().hex)
    resources = _reserve(config)
    check_shared_storage(task.run_dir)
    write_text(task.run_dir / "attempt.json", json.dumps({"attempt": task.attempt}))
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"task": task},
        scaling_config=ScalingConfig(
            num_workers=config.scale.num_workers, use_gpu=config.scale.use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=f"attempt-{task.attempt}",
            storage_path=str(task.run_dir / "ray"),
            failure_config=FailureConfig(max_failures=config.train.max_failures),
        ),
        torch_config=TorchConfig(
            backend="nccl" if config.scale.use_gpu else "gloo", timeout_s=COLLECTIVE_TIMEOUT_SECONDS
        ),
    )
    with RunProgress(task.run_dir / "metrics.jsonl", config.train):
        try:
            trainer.fit()
        except Exception as error:
            raise find_user_error(error) or error from None
    reason = task.run_dir / f"stopped-{task.attempt}.txt"
    if reason.exists():
        raise TrainingError(reason.read_text(encoding="utf-8"))


def _reserve(config: PretrainConfig) -> dict[str, float]:
    """Resources of one worker, checked against the cluster's."""
    available = ray.cluster_resources()
    num_workers, total_cpus = config.scale.num_workers, available.get("CPU", 0.0)
    # Reading tasks need a CPU share of their own, or a small machine would wait for ever.
    share = math.floor(100 * max(total_cpus - 0.5, 0.1) / num_workers) / 100
    cpus = config.scale.cpus_per_worker or min(share, 4.0 if config.scale.use_gpu else 1.0)
    if cpus * num_workers > total_cpus - 0.1:
        raise ConfigError(
            f"--scale.cpus_per_worker {cpus:g} for {num_workers} workers leaves no CPU of {total_cpus:g} "
            "for reading; lower it or --scale.num_workers, or add nodes."
        )
    if config.scale.use_gpu and available.get("GPU", 0.0) < num_workers:
        raise ConfigError(
            f"--scale.use_gpu true needs {num_workers} GPUs and the cluster has {available.get('GPU', 0.0):g}; "
            "lower --scale.num_workers or add nodes."
        )
    return {"CPU": cpus, **({"GPU": 1.0} if config.scale.use_gpu else {})}


def check_shared_storage(run_dir: Path) -> None:
    """Refuse a run directory that a node of the cluster does not see; Ray is initialised.

    Raises:
        RunError: naming the node.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU") and node["NodeID"] != own]
    marker = run_dir / f".shared-{uuid.uuid4().hex}"
    marker.touch()
    sees = ray.remote(num_cpus=0)(os.path.exists)
    try:
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            if not ray.get(sees.options(scheduling_strategy=here).remote(str(marker))):
                raise RunError(
                    f"the run directory {run_dir} is not visible on node {node['NodeManagerHostname']}; "
                    "give --run.dir a folder on storage that all nodes share."
                )
    finally:
        marker.unlink()


def train_worker(settings: dict[str, Any]) -> None:
    """One rank of a run, as Ray Train starts it."""
    task: PretrainTask = settings["task"]
    reason = task.run_dir / f"stopped-{task.attempt}.txt"
    if reason.exists():  # another rank met a user's mistake: a restart would only meet it again
        return
    try:
        context = ray.train.get_context()
        if not task.config.scale.use_gpu:
            fair = (os.cpu_count() or 1) // context.get_local_world_size()
            torch.set_num_threads(max(1, int(task.config.scale.cpus_per_worker or fair)))
        worker = PretrainWorker(
            task,
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            device=ray.train.torch.get_device() if task.config.scale.use_gpu else torch.device("cpu"),
            report=ray.train.report,
        )
        worker.run()
        worker.close()
    except DomextError as error:
        write_text(reason, str(error))
