"""A job whose objective makes vectors: two workers, resized in the middle, make one worker's steps; the export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_corpus
from pretrain_jobs import read_losses, train_here, write_command

from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]
NUM_STEPS = 16
TEXTS = ["the cold river", "blood and heart disease", "a book"]
OBJECTIVES = {
    "views": ("--objective.kind", "infonce", "--objective.views", "crop", "--objective.group_rows", "4"),
    "pairs": ("--objective.kind", "infonce", "--prepare.pair", "title,body", "--objective.group_rows", "4"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("texts") / "corpus.txt", 600)


def pair_up(corpus: Path) -> Path:
    """The same sentences as rows: a body, and its beginning as its title."""
    path = corpus.with_suffix(".jsonl")
    rows = ({"title": line[:20], "body": line} for line in corpus.read_text().splitlines())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    options = f"--train.max_steps {NUM_STEPS} --optim.decay_steps {NUM_STEPS} --optim.warmup_steps 2 --optim.lr 1e-2"
    options += " --train.global_batch_size 16 --train.micro_batch_size 4 --train.eval_rows 20 --train.save_every 4"
    return write_command("bottleneck", base, corpus, runs, name, f"{options} --train.evaluate_every 8", *flags)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_whole_job(kind: str, local_ray: None, tiny_base_folder: Path, corpus: Path, tmp_path: Path) -> None:
    objective, text = OBJECTIVES[kind], pair_up(corpus) if kind == "pairs" else corpus
    places = (tiny_base_folder, text, tmp_path)
    train_here(build_command(*places, "plain", *objective))
    name = "infonce_loss"
    losses = read_losses(tmp_path / "plain", NUM_STEPS, name)
    lines = [json.loads(line) for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    held_out = [line[f"eval/domain_{name}"] for line in lines if f"eval/domain_{name}" in line]
    assert len(held_out) == 3 and held_out[-1] < held_out[0]
    for max_steps, workers, stage in ((7, 2, 3), (NUM_STEPS, 4, 2)):
        scale = ("--scale.num_workers", str(workers), "--engine.zero_stage", str(stage))
        train_here(build_command(*places, "cut", *objective, *scale, "--train.max_steps", str(max_steps)))
    np.testing.assert_allclose(read_losses(tmp_path / "cut", NUM_STEPS, name), losses, atol=1e-4)
    shares = sorted(max((tmp_path / "cut" / "checkpoints").iterdir()).glob("tensors*.safetensors"))
    assert len(shares) == 4
    run, export = (open_model(str(tmp_path / "cut" / folder)).load() for folder in ("", "export"))
    assert all(torch.equal(run.tensors[name], tensor) for name, tensor in export.tensors.items())
    export.config.active_adapters = []
    base = TextEmbedding(open_model(str(tiny_base_folder)).load())
    assert np.array_equal(TextEmbedding(export)(TEXTS), base(TEXTS)), "taken off, the base's vectors bit for bit"
    assert not np.allclose(TextEmbedding(run)(TEXTS), base(TEXTS), atol=1e-3)
