"""What else an exported folder needs to predict, and folders that are none; see test_predict_tasks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finetuned_models import CPU, FULL, export_fitted, fit

from domext_ray.errors import RunError
from domext_ray.finetuning.export import RECALL_ENCODER, export_stages
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.storage import Place


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def check_alone(start: StartModel, family: str, folder: Path, embeds: bool = False) -> None:
    task, fitted = fit(start, family, FULL, embeds)
    export_stages(start, task, fitted, Place(folder))
    expected = task.run({name: each.predict for name, each in fitted.items()}, task.data.test)
    assert load_exported(folder, CPU).predict(task.data.test).predictions == expected


@pytest.mark.slow
def test_the_encoder_that_recalls_terms_travels(start: StartModel, tmp_path: Path) -> None:
    check_alone(start, "normalization", tmp_path / "export", embeds=True)
    assert (tmp_path / "export" / RECALL_ENCODER / "config.json").is_file()


@pytest.mark.slow
def test_a_model_on_roberta_predicts_alone(tiny_roberta_folder: Path, tmp_path: Path) -> None:
    for family in ("ner", "qa"):
        check_alone(open_model(str(tiny_roberta_folder)).load(), family, tmp_path / family)


def test_a_folder_that_is_no_such_export_is_refused(start: StartModel, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no fine-tuned model; give the export of a fine-tuning run"):
        load_exported(tmp_path, CPU)
    (tmp_path / "trainings").mkdir()
    with pytest.raises(RunError, match="export is missing: the run has not ended"):
        load_exported(tmp_path, CPU)
    export_fitted(start, "classification", tmp_path / "export")
    assert load_exported(tmp_path, CPU).description.family == "classification", "a run has its export"
    path = tmp_path / "export" / "task.json"
    values = json.loads(path.read_text())
    for change, reason in (
        ({"format": 2}, "has format 2, which a later version of domext_ray reads; this version reads format 1"),
        ({"task": values["task"] | {"labels": ["weather", "wind"]}}, "differs from its sha256"),
        ({"stages": {"model": "../../elsewhere"}}, r"is damaged \(a stage's folder is '../../elsewhere'\)"),
        ({"stages": {}}, "has the models none; export the model again"),
        ({"stages": {"model": "other"}}, "other holds no fine-tuned model, and task.json says that it does"),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(RunError, match=reason):
            load_exported(tmp_path, CPU)
    path.write_text("{")
    with pytest.raises(RunError, match="is not valid JSON"):
        load_exported(tmp_path, CPU)
