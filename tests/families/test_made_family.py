"""A family takes one file: a made-up one is registered, and whatever a user does with it works."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from finetuned_models import CPU, finetune_here
from labelled_fixtures import dump_lines, write

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig, GridConfig, LabelledConfig, PlaceConfig
from domext_ray.families.comparison import Compared, compare_classes
from domext_ray.families.family import Prediction
from domext_ray.families.metrics.metrics import score_classes
from domext_ray.families.metrics.scores import Score
from domext_ray.families.readers.examples import Example
from domext_ray.families.readers.issues import SetRow
from domext_ray.families.registry import FAMILIES
from domext_ray.families.rows import Row
from domext_ray.families.state import NOTHING_LEARNED, State
from domext_ray.families.task import Task
from domext_ray.files import read_json
from domext_ray.inference.examples import make_example
from domext_ray.models.exported import load_exported
from domext_ray.storage import Place


@dataclass(frozen=True)
class Shout(Example):
    """A text that is said so loud, from 0 to 2."""

    text: str
    level: int

    @property
    def counted(self) -> tuple[str, ...]:
        return (f"(level {self.level})",)


class Shouting(Task):
    """How loud a text is said."""

    family = "shouting"
    readers = {"records": ("text", "level")}
    columns = {"id": ("id",), "text": ("text", "said"), "level": ("level",)}
    metrics = ("f1.*",)
    metric = "f1.macro"
    fields = {"level": pa.int64()}
    found = "level"
    head = "DomextForSequenceClassification"
    hub_task = "text-classification"
    nothing = {"level": 0}
    outputs = ("0", "1", "2")

    @classmethod
    def read(cls, row: SetRow) -> Shout:
        level = row.get("level") if row.is_labelled else 0
        if level not in (0, 1, 2):
            row.leave_out("has no level from 0 to 2", level)
        return Shout("", row.source, row.read_text("text"), level)

    @classmethod
    def compare(cls, example: Shout, prediction: Prediction, state: State = NOTHING_LEARNED) -> Compared:
        return compare_classes(example, example.text, str(example.level), str(prediction["level"]))

    def encode(self, examples: Any, *, is_training: bool) -> list[Row]:
        encoded = self.backend.encode_batch([example.text for example in examples])
        return [
            Row(i, np.array(own.ids, np.int64), None, {"level": np.array(example.level, np.int64)})
            for i, (example, own) in enumerate(zip(examples, encoded, strict=True))
        ]

    def compute_loss_sum(self, outputs: Any, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.float(), targets["level"], reduction="sum")

    def decode_row(self, example: Shout, output: np.ndarray) -> Prediction:
        return {"level": int(output.argmax())}

    def score(self, examples: Any, predictions: Any) -> Score:
        gold, found = [str(example.level) for example in examples], [str(own["level"]) for own in predictions]
        return score_classes(gold, found, self.head_labels)

    def predict_baseline(self, examples: Any) -> list[Prediction]:
        return [{"level": 0}] * len(examples)


def test_a_family_takes_one_file(tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, Shouting.family, Shouting)  # type: ignore[arg-type]
    words = ("cat", "drug", "water")
    rows: list[dict[str, Any]] = [{"said": f"the {words[i % 3]} and the sun", "level": i % 3} for i in range(24)]
    for split in ("train", "dev", "test"):
        write(tmp_path / "set" / f"{split}.jsonl", dump_lines([*rows, {"said": "the", "level": 7}]))
    run = finetune_here(
        FinetuneConfig(
            task="shouting",
            data=str(tmp_path / "set"),
            model=str(tiny_base_folder),
            run=PlaceConfig(name="loud", dir=str(tmp_path)),
            grid=GridConfig(lr=(5e-3,), epochs=(12.0,), batch_size=(8,), restarts=1),
            labelled=LabelledConfig(max_length=16, stride=0),
            optim=FinetuneOptimConfig(dropout=0.0),
        )
    )
    summary = read_json(Place(run) / "summary.json", "")
    assert summary["task"] == "shouting" and summary["metric"] == "f1.macro"
    assert summary["test"]["f1"]["macro"] == 1.0 > summary["baselines"]["test"]["majority"]["f1"]["macro"]
    assert summary["set"]["labels"]["(level 2)"] == {"train": 8, "dev": 8, "test": 8}
    assert any("it has no level from 0 to 2" in note for note in summary["notes"])
    exported = load_exported(run, CPU)
    raw = [make_example("shouting", {"said": row["said"]}, "row") for row in rows]
    found = exported.predict(raw)
    assert [own["level"] for own in found.records] == [row["level"] for row in rows]
    assert Shouting.list_found(found.records[1]) == ["1"]
    assert not any(exported.task.compare(*pair).mistakes for pair in zip(raw[::3], found.predictions[::3], strict=True))
    assert json.loads((run / "export" / "task.json").read_text())["task"]["family"] == "shouting"
