"""Bottlenecks and LoRA end to end: a second adapter beside the first one, exports that load, a budget of parameters."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FEW_SENTENCES, REPOSITORY
from peft import PeftModel
from pretrain_jobs import check_mistake, run_job
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMaskedLM

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]  # the matrix (test_methods.py) has the same, by the engine
SECOND = ".adapters.second."
EXPORT_JOB = REPOSITORY / "jobs" / "export_hf.py"


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(2)
    words = "the a house tree river small old sees finds near under gene protein drug dose patient".split()
    lines = [" ".join(" ".join(random.choice(words, 8)) + "." for _ in range(4)) for _ in range(500)]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    return [
        sys.executable,
        str(REPOSITORY / "jobs" / "pretrain_bottleneck.py"),
        *("--base", str(base), "--corpus", str(corpus), "--run.dir", str(runs), "--run.name", name),
        *("--train.max_steps", "6", "--train.global_batch_size", "8", "--train.seq_length", "48"),
        *("--train.save_every", "3", "--train.evaluate_every", "6", "--train.eval_rows", "40"),
        *("--method.bottleneck_size", "6", "--optim.lr", "1e-2", "--optim.decay_steps", "20"),
        *("--engine.precision", "fp32", "--train.general_probe", str(FEW_SENTENCES), *flags),
    ]


def read_export(run: Path) -> dict[str, Tensor]:
    return load_file(run / "export" / "model.safetensors")


def test_a_second_adapter_trains_beside_the_frozen_first(
    tiny_base_folder: Path, corpus_file: Path, tmp_path: Path
) -> None:
    first = ("--method.adapter", "first", "--method.trainable_budget", "0.0989")
    run_job(build_command(tiny_base_folder, corpus_file, tmp_path, "one", *first))
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["parameters"]["trainable_frac"] == pytest.approx(
        0.0989, rel=0.01
    )
    second = ("--method.adapter", "second", "--method.layers", "1", "--method.heads", "1")
    second = (*second, "--init_from", str(tmp_path / "one"))
    command = build_command(tiny_base_folder, corpus_file, tmp_path, "two", *second)
    run_job(command)
    one, two, base = (
        read_export(tmp_path / "one"),
        read_export(tmp_path / "two"),
        load_file(tiny_base_folder / "model.safetensors"),
    )
    assert all(torch.equal(two[name], each) for name, each in base.items())
    assert all(torch.equal(two[name], each) for name, each in one.items())
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
    assert all(torch.equal(later[name], each) for name, each in one.items())
    assert any(not torch.equal(later[name], two[name]) for name in added)


def test_lora_is_exported_merged(tiny_base_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    lora = ("--method.bottleneck_size", "0", "--method.lora_rank", "4", "--method.lora_targets", "value,output")
    run_job(build_command(tiny_base_folder, corpus_file, tmp_path, "lora", *lora))
    base, merged = load_file(tiny_base_folder / "model.safetensors"), read_export(tmp_path / "lora")
    tensors = load_file(max((tmp_path / "lora" / "checkpoints").iterdir()) / "tensors.safetensors")
    expected = dict(base)
    for name, update in tensors.items():
        if ".lora_B." in name:
            matrix = name.replace(".lora_B.default.", ".")
            down = tensors[name.replace(".lora_B.", ".lora_A.")]
            expected[matrix] = base[matrix] + 2.0 * update @ down
            assert update.any()
    assert len(tensors) == 2 * 2 * 2 and merged.keys() == base.keys()
    for name, each in merged.items():
        torch.testing.assert_close(each, expected[name], atol=1e-6, rtol=0, msg=name)
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "lora" / "export").eval()
    assert plain.config.model_type == "bert"
    run_job([sys.executable, str(EXPORT_JOB), "--run", str(tmp_path / "lora"), "--format", "peft"])
    wrapped = PeftModel.from_pretrained(
        AutoModelForMaskedLM.from_pretrained(tiny_base_folder), tmp_path / "lora" / "peft"
    )
    ids = torch.randint(5, 200, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(ids).logits, plain(ids).logits, atol=1e-5, rtol=0)
    refused = run_job(
        [sys.executable, str(EXPORT_JOB), "--run", str(tmp_path / "lora"), "--format", "adapterhub"], expect=2
    )
    assert "has no adapter 'domain' to export" in refused.stderr
