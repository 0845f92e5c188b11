"""exBERT end to end: new words and modules, pairs, a second stage that is killed and goes on, exports that load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_processes import kill_job, start_job
from pretrain_jobs import LONG_EVALUATIONS, check_mistake, run_job, train_here, wait_for_step, write_command
from safetensors.torch import load_file

from domext_ray.runs.events import EventReader
from domext_ray.storage import Place
from domext_ray.text.vocabulary.extension import load_extension
from domext_ray.training.checkpoint import find_latest

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]  # the matrix (test_methods.py) has the same, by the engine
NUM_STEPS = 12


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of six sentences, a line each, with words that the tiny base cuts into letters."""
    random = np.random.default_rng(1)
    words = "the a house tree river small old sees finds near under cortex thalamus neuron synapse axon".split()
    lines = [" ".join(" ".join(random.choice(words, 8)) + "." for _ in range(6)) for _ in range(700)]
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_command(base: Path, corpus: Path, runs: Path, name: str, *flags: str) -> list[str]:
    options = f"--train.max_steps {NUM_STEPS} --train.seq_length 48 --train.save_every 3 --train.evaluate_every 6"
    options += " --method.module_hidden_size 12 --method.module_ffn_size 20 --train.dropout 0.1"
    return write_command("exbert", base, corpus, runs, name, f"{options} --objective.next_sentence true", *flags)


def build_second(base: Path, corpus: Path, first: Path, name: str, *flags: str) -> list[str]:
    words = ("--vocab.size", "0", "--vocab.words", str(first / "tokenizer"))
    stage = ("--init_from", str(first), "--method.trains", "all", "--train.long_seq_length", "96")
    return build_command(base, corpus, first.parent, name, *words, *stage, "--train.long_frac", "0.25", *flags)


def read_records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first(local_ray: None, tiny_base_folder: Path, corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first stage: the base is frozen."""
    runs = tmp_path_factory.mktemp("runs")
    train_here(build_command(tiny_base_folder, corpus_file, runs, "first", "--vocab.size", "8"))
    return runs / "first"


@pytest.fixture(scope="module")
def second(first: Path, tiny_base_folder: Path, corpus_file: Path) -> Path:
    """A second stage with a phase of long rows."""
    train_here(build_second(tiny_base_folder, corpus_file, first, "second"))
    return first.parent / "second"


def test_the_first_stage_learns_words_and_both_objectives(first: Path, tiny_base_folder: Path) -> None:
    extension = load_extension(first / "tokenizer")
    assert extension is not None and "thalamus" in extension.words and len(extension.words) <= 8
    records = read_records(first)
    assert all(record["train/next_sentence_loss"] > 0 for record in records if "train/mlm_loss" in record)
    evaluated = [record for record in records if "eval/domain_mlm_loss" in record]
    assert 0 <= evaluated[-1]["eval/domain_next_sentence_accuracy"] <= 1
    assert evaluated[-1]["eval/domain_bits_per_character"] < evaluated[0]["eval/domain_bits_per_character"]
    exported, base = (
        load_file(first / "export" / "model.safetensors"),
        load_file(tiny_base_folder / "model.safetensors"),
    )
    changed = [name for name in base if not bool((exported[name] == base[name]).all())]
    assert changed == [], "the base is as it was"


LOAD_BOTH = """
import json, sys
import torch, transformers as tf
folder = sys.argv[1]
torch.set_num_threads(1)
tokenizer = tf.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
text = "The thalamus sees a cortex."
batch = tokenizer(text, "An axon near the house.", return_tensors="pt")
words = tf.AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
both = tf.AutoModelForPreTraining.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    logits, outputs = words(**batch).logits, both(**batch)
assert torch.equal(logits, outputs.prediction_logits)
print(json.dumps({
    "tokens": tokenizer.tokenize(text), "shape": list(logits.shape), "vocab": len(tokenizer),
    "order": outputs.seq_relationship_logits.tolist(), "modules": sorted({each.split(".")[0] for each in sys.modules}),
}))
"""


def test_the_export_loads_alone_with_its_new_words(second: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_BOTH, str(second / "export")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert "thalamus" in found["tokens"] and found["shape"][-1] == found["vocab"]
    assert np.shape(found["order"]) == (1, 2) and "domext_ray" not in found["modules"]


def test_the_second_stage_goes_on_from_the_first_and_changes_the_base(first: Path, second: Path) -> None:
    said = [event.text for event in EventReader(Place(second), from_start=True).read()]
    newest = find_latest(Place(first / "checkpoints"))
    assert newest is not None and f"starting from step {newest.step}: {newest.path}" in said
    last = [record for record in read_records(first) if "eval/domain_mlm_loss" in record][-1]
    start = read_records(second)[0]
    assert start["step"] == 0
    for name in ("eval/domain_mlm_loss", "eval/domain_bits_per_character", "eval/general_mlm_accuracy"):
        assert start[name] == pytest.approx(last[name], abs=1e-6), name
    before, after = (load_file(run / "export" / "model.safetensors") for run in (first, second))
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not bool((before[name] == after[name]).all())
    tokens = [record["train/tokens"] for record in read_records(second) if "train/mlm_loss" in record]
    assert tokens[-1] - tokens[-2] > 1.4 * tokens[0], "the last quarter of the steps has long rows"


def test_a_killed_second_stage_ends_as_the_undisturbed_one(
    first: Path, second: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    command = build_second(tiny_base_folder, corpus_file, first, "killed")
    process = start_job([*command, *LONG_EVALUATIONS])
    run = first.parent / "killed"
    wait_for_step(run, 10, process)  # in the phase of long rows, after a checkpoint at its first step
    kill_job(process)
    run_job(command)
    losses = [
        [
            (record["train/mlm_loss"], record["train/next_sentence_loss"])
            for record in read_records(path)
            if "train/lr" in record
        ]
        for path in (second, run)
    ]
    assert len(losses[0]) == NUM_STEPS and losses[0] == losses[1]


def test_a_task_bottleneck_trains_over_the_frozen_adapter(
    first: Path, tiny_base_folder: Path, corpus_file: Path
) -> None:
    flags = ("--init_from", str(first), "--vocab.size", "0", "--vocab.words", str(first / "tokenizer"))
    task = ("--method.module_hidden_size", "0", "--method.module_ffn_size", "0", "--method.bottleneck_size", "4")
    task = (*task, "--method.trains", "adapter", "--method.adapter", "task", "--train.max_steps", "3")
    run_job(build_command(tiny_base_folder, corpus_file, first.parent, "task", *flags, *task))
    before, after = (load_file(first.parent / name / "export" / "model.safetensors") for name in ("first", "task"))
    changed = {name for name, tensor in before.items() if not bool((after[name] == tensor).all())}
    assert all(name.startswith(("cls.seq_relationship.", "bert.pooler.")) for name in changed), "heads of no base train"
    added = after.keys() - before.keys()
    assert added and all(".adapters.task." in name for name in added)
    assert any(bool(after[name].any()) for name in added if ".up.weight" in name)


MISTAKES = {
    ("--init_from", "/no/such/run"): "/no/such/run",
    ("--base", "general-mini"): "was trained on a base of sha256",
    ("--method.module_hidden_size", "13"): "--method.module_hidden_size is 13",
    ("--method.module_ffn_size", "0"): "--method.module_ffn_size is 0",
    ("--vocab.words", "/no/such/words.txt"): "/no/such/words.txt",
}


def test_a_mistake_is_one_sentence(first: Path, tiny_base_folder: Path, corpus_file: Path) -> None:
    for flags, message in MISTAKES.items():
        command = build_second(tiny_base_folder, corpus_file, first, "bad", "--dry_run", "true", *flags)
        check_mistake(command, message)
        assert not (first.parent / "bad").exists()


def test_words_may_only_be_appended(first: Path, tiny_base_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("zebrafish\n", encoding="utf-8")
    other = build_second(tiny_base_folder, corpus_file, first, "other", "--vocab.words", str(words))
    check_mistake(other, "may only be appended")
    assert not (first.parent / "other").exists()


def test_a_word_is_appended_and_a_limit_ends_a_run(
    first: Path, tiny_base_folder: Path, corpus_file: Path, tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("zebrafish\n", encoding="utf-8")
    flags = ("--vocab.words", str(words), "--vocab.extend", str(first / "tokenizer"), "--train.max_tokens", "600")
    appended = build_second(tiny_base_folder, corpus_file, first, "appended", *flags)
    run_job(appended)
    tokens = [record["train/tokens"] for record in read_records(first.parent / "appended") if "train/lr" in record]
    assert tokens[-2] < 600 <= tokens[-1], "the limit ended the run"
    assert "nothing is left to do" in run_job(appended).stdout
    extension = load_extension(first.parent / "appended" / "tokenizer")
    assert extension is not None and extension.words[-1] == "zebrafish"


def test_lines_of_one_sentence_make_no_pairs(local_ray: None, tiny_base_folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "lines.txt"
    corpus.write_text("".join(f"the old house number {i} sees a river\n" for i in range(400)), encoding="utf-8")
    command = build_command(tiny_base_folder, corpus, tmp_path / "runs", "lines", "--vocab.size", "0")
    check_mistake(command, "next-sentence prediction needs two or more; set --prepare.document")
    assert not (tmp_path / "runs" / "lines").exists()
