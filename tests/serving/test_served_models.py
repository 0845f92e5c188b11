"""Fine-tuned models are served with the answers that `domext predict` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finetuned_models import BOTTLENECK, CPU, fit
from local_service import Served

from domext_ray.adapters.bank import AdapterBank
from domext_ray.downstream.finetune.export import export_stages
from domext_ray.downstream.start.model import StartModel, load_start_model
from domext_ray.inference.predictors import load_task_model

TEXTS = [
    "the drug and the doctor, and heart disease " * 9,  # of a tagger more than a row
    "the patient was given a drug for the heart",
    "the sun and the wind",
    "cat",
]
ENDPOINTS = {"ner": "entities", **dict.fromkeys(("classification", "multilabel", "regression"), "classify")}
FAMILIES = list(ENDPOINTS)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return load_start_model(str(tiny_base_folder))


def export(start: StartModel, family: str, method: Any, folder: Path) -> Path:
    task, fitted = fit(start, family, method)
    export_stages(start, task, fitted, folder)
    return folder


def check_answers(served: Served, name: str, family: str, model: str) -> None:
    """Compare a model's answers with its predictions, all but the last digits of probabilities."""
    predictor = load_task_model(model, CPU)
    expected = predictor.predict(predictor.make_examples([{"text": each} for each in TEXTS])).records
    answers = served.ask(ENDPOINTS[family], TEXTS, name, **({} if family == "ner" else {"truncate": True}))
    for answer, record in zip(answers, expected, strict=True):
        answer.pop("truncated", None)
        assert answer.pop("adapter") == name and answer.keys() == record.keys()
        for field, value in record.items():
            if field == "entities":
                scores = [[each.pop("score") for each in found] for found in (answer[field], value)]
                assert scores[0] == pytest.approx(scores[1], abs=1e-5) and answer[field] == value
            elif field in ("probabilities", "value"):
                assert answer[field] == pytest.approx(value, abs=1e-5)
            else:
                assert answer[field] == value
    assert any(any(each.values()) for each in expected)


def test_adapters_of_a_bank_answer_as_predict_does(start: StartModel, tmp_path: Path) -> None:
    bank = AdapterBank.create(tmp_path / "bank", start.id)
    for family in FAMILIES:
        bank.add_finetuned(family, export(start, family, BOTTLENECK, tmp_path / family))
    served = Served(bank)
    with served.client:
        for family in FAMILIES:
            check_answers(served, family, family, f"{bank.folder}:{family}")
