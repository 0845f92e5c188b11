"""The Ray Train worker loop and its driver function.

Enters: a `PretrainTask` (configuration, run directory, prepared corpus). Leaves, in the run directory: metrics.jsonl,
TensorBoard events and checkpoints. A worker that dies is started again by Ray Train; a job that dies is started again
by its user; both go on from the newest checkpoint that verifies.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

from domext_ray.config import PretrainConfig, resolve_warmup_steps
from domext_ray.corpus.manifest import read_manifest
from domext_ray.corpus.stream import Prefetch, stream_batches
from domext_ray.corpus.vocab import load_tokenizer
from domext_ray.errors import ConfigError, DomextError, RunError, TrainingError, find_user_error
from domext_ray.model.base import Base, load_base
from domext_ray.model.configuration_domext import DomextConfig
from domext_ray.model.graft import Extensions, choose_attention, describe_extensions, store_base
from domext_ray.training.checkpoint import find_latest, load_checkpoint, save_checkpoint
from domext_ray.training.engine import Engine, StepFigures
from domext_ray.training.evaluate import build_evaluations, evaluate, evaluate_characters
from domext_ray.training.metrics import MetricsLog, RunProgress, check_attempt, write_text
from domext_ray.training.objective import MaskedBatch, Masker
from domext_ray.training.phases import make_phases
from domext_ray.training.start import apply_start, build_run_model, load_start, pick_fixed

OBJECT_STORE_BYTES = 512 * 2**20
COLLECTIVE_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class PretrainTask:
    """Everything that a worker needs to know.

    Args:
        config: configuration with `optim.decay_steps` resolved.
        run_dir: the run's directory, on storage that all workers see.
        corpus_dirs: folders of the prepared corpora's manifests, one a length phase.
        tokenizer_dir: the run's tokenizer.
        base_sha256: hash of the base's tensors, or "none".
        init_from: directory of the run whose parameters this one starts from, if any.
        earlier: extensions that the model has beside the method's own, from that run.
        attempt: this attempt's id; a worker of an older attempt stops before it writes.
    """

    config: PretrainConfig
    run_dir: Path
    corpus_dirs: tuple[Path, ...]
    tokenizer_dir: Path
    base_sha256: str
    init_from: Path | None = None
    earlier: Extensions | None = None
    attempt: str = ""


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
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if len(nodes) < 2:
        return
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
        _Worker(task).run()
    except DomextError as error:
        write_text(reason, str(error))


class _Worker:
    """The state of one rank: model, engine, data position and, on rank 0, the metrics."""

    def __init__(self, task: PretrainTask) -> None:
        context = ray.train.get_context()
        self.task, self.config = task, task.config
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        if not self.config.scale.use_gpu:
            fair = (os.cpu_count() or 1) // context.get_local_world_size()
            torch.set_num_threads(max(1, int(self.config.scale.cpus_per_worker or fair)))
        self.manifest = read_manifest(task.corpus_dirs[0])
        self.tokenizer = load_tokenizer(task.tokenizer_dir)
        latest = find_latest(task.run_dir / "checkpoints")
        self.checkpoint = None if latest is None else load_checkpoint(latest)
        self.step = 0 if self.checkpoint is None else self.checkpoint.step
        self.seconds = 0.0 if self.checkpoint is None else float(self.checkpoint.cursor["seconds"])
        self.tokens = 0 if self.checkpoint is None else int(self.checkpoint.cursor["tokens"])
        self.phases = make_phases(self.config, [self.manifest, *map(read_manifest, task.corpus_dirs[1:])])
        self.masker = Masker(self.tokenizer, self.config.objective, self.config.seed)
        # Reading starts now: its first batches are there when the model is.
        self.batches = Prefetch(self._masked_batches(self.step))
        self.base = None if self.config.base == "none" else _load_checked_base(task)
        self.engine = self._build_engine()
        self.evaluations = build_evaluations(self.config, self.manifest, self.tokenizer)

    def _build_engine(self) -> Engine:
        config = self.config
        model = build_run_model(config, self.base, self.task.tokenizer_dir, config.train.dropout, self.task.earlier)
        self.extensions = describe_extensions(cast(DomextConfig, model.config))
        self.fixed: dict[str, torch.Tensor] = {}
        if self.checkpoint is not None:
            self.fixed = self.checkpoint.fixed
            model.load_state_dict(self.fixed, strict=False)
        elif self.task.init_from is not None:
            start = load_start(self.task.init_from)
            apply_start(model, start, self.task.init_from)
            self.fixed = pick_fixed(model, start)
        dtype = config.engine.base_dtype
        if dtype == "bf16" or (dtype == "auto" and config.scale.use_gpu and config.engine.precision == "bf16"):
            store_base(model, torch.bfloat16)
        device = ray.train.torch.get_device() if config.scale.use_gpu else torch.device("cpu")
        choose_attention(model, device, bf16=config.engine.precision == "bf16")
        return Engine(
            cast(nn.Module, model).to(device),
            engine=config.engine,
            optim=config.optim,
            warmup_steps=resolve_warmup_steps(config),
            micro_batch_size=self.phases[0].micro_batch_size,
            accumulation_steps=config.train.global_batch_size // self.world_size // self.phases[0].micro_batch_size,
            seed=config.seed,
            device=device,
            state=None if self.checkpoint is None else self.checkpoint.state,
        )

    def run(self) -> None:
        """Train from the current step to the first limit."""
        train = self.config.train
        log = None
        if self.rank == 0:
            log = MetricsLog(self.task.run_dir, self.task.attempt, self.step, tensorboard=self.config.run.tensorboard)
        if self.step == 0:
            self._record(log, {"step": 0, **self._evaluate()})
        done = self._is_done()
        while not done:
            record = self._train_step()
            done = self._is_done()
            if done or self.step % train.eval_every == 0:
                record |= self._evaluate()
            self._record(log, record)
            if done or self.step % train.checkpoint_every == 0:
                self._save()
            if done or self.step % train.checkpoint_every == 0 or self.step % train.eval_every == 0:
                ray.train.report(record)
        self.batches.close()
        if log is not None:
            log.close()

    def _is_done(self) -> bool:
        """Whether a limit is reached; rank 0's clock decides for all."""
        train = self.config.train
        if train.max_seconds:
            seconds = torch.tensor([self.seconds], dtype=torch.float64, device=self.engine.device)
            dist.broadcast(seconds, src=0)
            self.seconds = seconds.item()
        return (
            self.step >= train.max_steps or 0 < train.max_tokens <= self.tokens or 0 < train.max_seconds <= self.seconds
        )

    def _masked_batches(self, step: int) -> Iterator[tuple[list[MaskedBatch], int]]:
        """Micro batches of this rank's share, and the tokens in them, from a step on."""
        for phase in self.phases:
            if step >= phase.end_step:
                continue
            epoch, batch = divmod(step - phase.first_step, phase.plan.batches_per_epoch)
            stream = stream_batches(
                phase.manifest, phase.plan, rank=self.rank, world_size=self.world_size, epoch=epoch, batch=batch
            )
            for each in stream:
                masked = self.masker.mask(each.rows, each.epoch)
                yield self.masker.collate(masked, phase.micro_batch_size, phase.pad_to), int(masked.lengths.sum())
                step += 1
                if step >= phase.end_step:
                    break

    def _train_step(self) -> dict[str, Any]:
        started = time.perf_counter()
        micro_batches, num_tokens = next(self.batches)
        waited = time.perf_counter() - started
        num_masked = sum(each.num_masked for each in micro_batches)
        num_pairs = sum(each.num_pairs for each in micro_batches)
        counts = torch.tensor([num_masked, num_tokens, num_pairs], dtype=torch.int64, device=self.engine.device)
        dist.all_reduce(counts)
        num_masked, num_tokens, num_pairs = counts.tolist()
        figures = self.engine.train_step(micro_batches, num_masked, self.step, num_pairs)
        if not figures.finite and self.config.optim.on_non_finite == "stop":
            raise TrainingError(
                f"step {self.step + 1} has a loss of {figures.loss} and a gradient norm of {figures.grad_norm}; lower "
                "--optim.lr, or set --optim.on_non_finite skip (the same command goes on from the last checkpoint)."
            )
        seconds = time.perf_counter() - started
        self.step, self.seconds, self.tokens = self.step + 1, self.seconds + seconds, self.tokens + num_tokens
        record = _describe_step(self.step, figures, num_masked, num_tokens, seconds, waited, self.seconds, self.tokens)
        return record | ({"train/next_sentence_loss": figures.next_sentence_loss} if num_pairs else {})

    def _evaluate(self) -> dict[str, Any]:
        domain = evaluate(self.engine, self.evaluations.domain)
        general = evaluate(self.engine, self.evaluations.general)
        record = {
            "eval/domain_mlm_loss": domain.loss,
            "eval/domain_mlm_accuracy": domain.accuracy,
            "eval/domain_tokens": domain.num_tokens,
            "eval/domain_bits_per_character": evaluate_characters(self.engine, self.evaluations.characters),
            "eval/domain_characters": self.evaluations.characters.num_chars,
            "eval/general_mlm_accuracy": general.accuracy if general.num_tokens else None,
            "eval/general_words": general.num_tokens,
        }
        if domain.num_pairs:
            record["eval/domain_next_sentence_accuracy"] = domain.next_sentence_accuracy
        return record

    def _record(self, log: MetricsLog | None, record: dict[str, Any]) -> None:
        if log is not None:
            log.write(record)

    def _save(self) -> None:
        state = self.engine.gather_state()
        if self.rank != 0 or state is None:
            return
        check_attempt(self.task.run_dir, self.task.attempt)
        save_checkpoint(
            self.task.run_dir / "checkpoints",
            self.step,
            state,
            self.fixed,
            cursor={"seconds": self.seconds, "tokens": self.tokens},
            record={
                "base": self.config.base,
                "base_sha256": self.task.base_sha256,
                "corpus_fingerprint": self.manifest.fingerprint,
                "tokenizer_fingerprint": self.manifest.tokenizer_fingerprint,
                "extensions": asdict(self.extensions),
            },
            keep=self.config.run.keep_checkpoints,
        )


def _load_checked_base(task: PretrainTask) -> Base:
    base = load_base(task.config.base, next_sentence=task.config.objective.next_sentence)
    if base.sha256 != task.base_sha256:
        raise RunError(
            f"the base {task.config.base!r} on this node has sha256 {base.sha256[:12]}, the run was made with "
            f"{task.base_sha256[:12]}; give all nodes the same base."
        )
    return base


def _describe_step(
    step: int,
    figures: StepFigures,
    num_masked: int,
    num_tokens: int,
    seconds: float,
    waited: float,
    total_seconds: float,
    total_tokens: int,
) -> dict[str, Any]:
    return {
        "step": step,
        "train/mlm_loss": figures.loss,
        "train/lr": figures.learning_rate,
        "train/grad_norm": figures.grad_norm,
        "train/masked_tokens": num_masked,
        "train/tokens": total_tokens,
        "train/skipped": int(figures.skipped),
        "throughput/tokens_per_second": num_tokens / seconds,
        "data/wait_seconds": waited,
        "time/step_seconds": seconds,
        "time/seconds": total_seconds,
    }
