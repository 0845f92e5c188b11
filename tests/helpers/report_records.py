"""What a run writes, for the tests that read it: a summary, a record per step, and a run directory that holds both."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place

ABOUT: dict[str, Any] = {
    "started": "2026-05-04T09:30:00+00:00",
    "command": "domext pretrain af --corpus '*.txt'",
    "commit": "0123456789ab+",
    "versions": {"python": "3.11.7", "domext_ray": "0.1.0", "torch": "2.13.0"},
    "machine": "2 nodes of 8 CPUs and 1 GPU (EPYC, H100)",
    "base_sha256": "ab" * 32,
    "parameters": {
        "total": 8_421_376,
        "trainable": 2_632_704,
        "trainable_frac": 0.3214,
        "kinds": {"heads": 528_384, "units": 2_104_320},
    },
    "corpus": {
        "sources": "notes.jsonl",
        "documents": 900,
        "dropped": {"duplicate": 41, "too_short": 2},
        "rows": 640,
        "tokens": 80_000,
        "held_out_rows": 30,
        "phases": [[0, 30, 40], [30, 9_223_372_036_854_775_807, 10]],
    },
}
SUMMARY: dict[str, Any] = {
    "parameters": {"total": 8_421_376, "trainable": 2_632_704, "trainable_frac": 0.3214},
    "domain": {
        "mlm_loss": {"before": 4.8, "after": 3.6},
        "mlm_accuracy": {"before": 0.29, "after": 0.418},
        "bits_per_character": {"before": 1.9, "after": 1.71},
    },
    "general": {"mlm_accuracy": {"before": 0.386, "after": 0.367}},
    "corpus": {"unknown": {"domain": {"tokens": 0.0, "characters": 0.0, "words": []}}},
    "train": {
        "steps": 60,
        "tokens": 245_760,
        "tokens_per_second": 8990.4,
        "data_wait_frac": 0.0041,
        "wall_seconds": 90.0,
        "peak_memory_mb": 1234.5,
    },
    "evaluation": {"domain_tokens": 5000, "domain_characters": 9000, "general_words": 3940},
}


def make_records(num_steps: int = 60, *, eval_every: int = 20) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        record: dict[str, Any] = {"step": step}
        if step:
            record |= {
                "train/mlm_loss": 3.5 + math.exp(-step / 20),
                "train/lr": 1e-3 * (1 - step / num_steps),
                "throughput/tokens_per_second": 9000.0,
                "train/tokens": 4096 * step,
                "data/wait_seconds": 0.00615,
                "time/seconds": 1.5 * step,
            }
        if step % eval_every == 0:
            record |= {
                "eval/domain_mlm_loss": 4.8 - step / 50,
                "eval/domain_mlm_accuracy": 0.29 + step / 500,
                "eval/domain_bits_per_character": 1.9 - step / 300,
                "eval/general_mlm_accuracy": 0.386 - step / 3000,
                "eval/domain_tokens": 5000,
                "eval/domain_characters": 9000,
                "eval/general_words": 3940,
            }
        records.append(record)
    return records


def make_run(run_dir: Path, records: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run_dir / "summary.json").write_text(json.dumps(summary or SUMMARY))
    write_origin(run_dir, ABOUT)
    (run_dir / "config.yaml").write_text("base: general-mini\ncorpus: '<notes & letters>/*.txt'\n")
    os.utime(run_dir / "metrics.jsonl", (1.8e9, 1.8e9))
    return run_dir


def write_origin(run_dir: Path, about: Mapping[str, Any]) -> None:
    """Write run.json of a run that has begun; `about` is what `summary.read_origin` is to return."""
    origin = {name: value for name, value in about.items() if name != "versions"}
    versions = [{"from_step": 0, **about["versions"]}]
    write_run(Place(run_dir), identity={}, order={}, versions=versions, origin=origin)
