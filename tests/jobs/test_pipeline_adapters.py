"""Bottlenecks end to end: a budget of parameters, and a second adapter beside the first one, which stands alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_corpus
from pretrain_jobs import check_mistake, run_job, write_command
from safetensors.torch import load_file
from torch import Tensor

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]  # the matrix (test_methods.py) has the same, by the engine
SECOND = ".adapters.second."


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    options = "--train.max_steps 6 --train.seq_length 48 --train.save_every 3 --train.evaluate_every 6"
    options += " --method.bottleneck_size 6 --optim.lr 1e-2 --optim.decay_steps 20"
    return write_command("bottleneck", base, corpus, runs, name, options, *flags)


def read_export(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def test_a_second_adapter_trains_beside_the_frozen_first(tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus_file = write_corpus(tmp_path / "corpus.txt", 1500)
    first = ("--method.adapter", "first", "--method.trainable_budget", "0.0989")
    run_job(build_command(tiny_base_folder, corpus_file, tmp_path, "one", *first))
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["parameters"]["trainable_frac"] == pytest.approx(
        0.0989, rel=0.01
    )
    second = ("--method.adapter", "second", "--method.layers", "1", "--method.heads", "1")
    second = (*second, "--init_from", str(tmp_path / "one"))
    command = build_command(tiny_base_folder, corpus_file, tmp_path, "two", *second)
    run_job(command)
    one, two = (read_export(tmp_path / name) for name in ("one", "two"))
    base = load_file(tiny_base_folder / "model.safetensors")
    assert all(torch.equal(two[name], tensor) for name, tensor in base.items())
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())
    added = {name for name in two if SECOND in name}
    assert two.keys() - one.keys() == added and all(".layer.1." in name for name in added)
    assert any(two[name].any() for name in added if ".up." in name)

    taken = ("--init_from", str(tmp_path / "one"), "--method.adapter", "first")
    three = build_command(tiny_base_folder, corpus_file, tmp_path, "three", *taken)
    check_mistake(three, "is the name of an adapter of --init_from")

    # The second run stands on its own: it goes on, and exports, when the first is gone.
    shutil.rmtree(tmp_path / "one" / "export")
    run_job([*command, "--train.max_steps", "9"])
    later = read_export(tmp_path / "two")
    assert all(torch.equal(later[name], tensor) for name, tensor in one.items())
    assert any(not torch.equal(later[name], two[name]) for name in added)
