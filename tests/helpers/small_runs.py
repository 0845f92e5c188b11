"""Small runs whose one worker is this process: their configurations, and attempts at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from conftest import FEW_SENTENCES

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig, OptimConfig, PretrainConfig, RunConfig, TrainConfig
from domext_ray.model.spec import ModelSpec
from domext_ray.runs.attempts import supersede
from domext_ray.storage import Place
from domext_ray.training.checkpoint import find_latest, list_steps
from domext_ray.training.engine import join_alone
from domext_ray.training.metrics import read_metrics
from domext_ray.training.run import Run
from domext_ray.training.worker import PretrainWorker

Begin = Callable[..., PretrainWorker]


def make_train(max_steps: int = 16, **values: Any) -> TrainConfig:
    """Steps of four short rows, with checkpoints at every fifth."""
    small = {"global_batch_size": 4, "seq_length": 32, "eval_rows": 4, "evaluate_every": 100, "save_every": 5}
    return TrainConfig(**{"max_steps": max_steps, **small, "general_probe": str(FEW_SENTENCES), **values})


def make_config(base: Path, corpus: Path, **parts: Any) -> PretrainConfig:
    """A run beside its corpus, of eight FFN units a layer, in fp32, unless a part says something else."""
    train = parts.pop("train", make_train())
    usual = {
        "method": MethodConfig(heads=0, ffn_units=8),
        "optim": OptimConfig(decay_steps=train.max_steps, warmup_steps=1),
        "run": RunConfig(name="run", dir=str(corpus.parent / "runs"), trackers=()),
        "engine": EngineConfig(precision="fp32"),
    }
    return PretrainConfig(base=str(base), corpus=str(corpus), train=train, **{**usual, **parts})


def hold(run: Run, folder: Path) -> Run:
    """The run in another directory, as the attempt has it that works on it."""
    return replace(run, paths=replace(run.paths, run=supersede(Place(folder))))


@contextmanager
def attempts() -> Iterator[Begin]:
    """Gives the worker of a new attempt at a run in a directory, with some parts of its configuration replaced."""
    join_alone()
    workers: list[PretrainWorker] = []

    def begin(run: Run, folder: Path, **parts: Any) -> PretrainWorker:
        folder.mkdir(exist_ok=True)
        config = replace(run.config, **parts)
        spec = ModelSpec.of(config, run.spec.base, run.spec.earlier).with_tokenizer(run.inputs.tokenizer.local())
        made = replace(hold(run, folder), config=config, spec=spec)
        workers.append(PretrainWorker(made, device=torch.device("cpu")))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.close()


def train_in_cuts(run: Run, folder: Path, *cuts: int) -> PretrainWorker:
    """Train up to each of some steps in an attempt of its own; return the last worker."""
    with attempts() as begin:
        for cut in cuts:
            worker = begin(run, folder)
            worker.run(cut)
    return worker


def read_records(run: Path) -> list[dict[str, Any]]:
    """What a run has recorded, step by step."""
    return read_metrics(Place(run / "metrics.jsonl"))


def list_saved(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return list_steps(Place(run / "checkpoints"))


def find_saved(run: Path, **settings: Any) -> Any:
    """A run's newest checkpoint."""
    return find_latest(Place(run / "checkpoints"), **settings)
