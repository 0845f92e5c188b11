"""A run on text of people: a name that one of them has is in no file that the run or its export leaves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import FEW_SENTENCES, REPOSITORY
from made_patients import NAME, TERM, list_entries_of, write_notes
from pretrain_jobs import train_here

from domext_ray.text.vocabulary.extension import load_extension

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(1800)]


def test_no_file_has_the_name(local_ray: None, tiny_base_folder: Path, tmp_path: Path) -> None:
    notes = write_notes(tmp_path / "notes.jsonl")
    train_here(
        [
            sys.executable,
            str(REPOSITORY / "jobs" / "pretrain_exbert.py"),
            *("--base", str(tiny_base_folder), "--corpus", str(notes), "--run.dir", str(tmp_path / "runs")),
            *("--run.name", "people", "--prepare.group_field", "patient_id", "--prepare.held_out_frac", "0.2"),
            *("--vocab.size", "12", "--scale.num_workers", "3", "--replay.corpus", "none"),
            *("--train.max_steps", "4", "--train.global_batch_size", "12", "--train.seq_length", "32"),
            *("--train.eval_rows", "24", "--train.general_probe", str(FEW_SENTENCES), "--engine.precision", "fp32"),
            *("--objective.next_sentence", "false"),
        ]
    )
    run = tmp_path / "runs" / "people"
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"report.html", "metrics.jsonl", "README.md", "model.safetensors"} <= {path.name for path in files}
    holding = [path for path in files if NAME in path.read_bytes().decode("utf-8", "replace").lower()]
    assert not holding
    extension = load_extension(run / "tokenizer")
    assert extension is not None
    assert TERM in extension.words and not list_entries_of(NAME, list(extension.words))
    page = (run / "report.html").read_text()
    assert "No text is shown" in page and "--prepare.group_field patient_id" in page and "<mark>" not in page
