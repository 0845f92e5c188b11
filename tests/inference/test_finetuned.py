"""The exported folder alone predicts what the run that wrote it predicted, for every family."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from finetuned_models import BOTTLENECK, CPU, FULL, fit, make_raw

from domext_ray.config.method import MethodConfig
from domext_ray.downstream.finetune.export import RECALL_ENCODER, export_stages
from domext_ray.downstream.finetune.exported import ExportedModel, load_exported
from domext_ray.downstream.start.model import StartModel, load_start_model
from domext_ray.downstream.tasks.description import describe_task
from domext_ray.downstream.tasks.stages import evaluate_stages
from domext_ray.downstream.tasks.task import StagedTask
from domext_ray.errors import RunError
from domext_ray.export.folder import FINE_TUNED, check_target
from domext_ray.labelled.set_families import FAMILIES

RAW: dict[str, list[dict[str, Any]]] = {
    "relation": [{"text": "the << drug >> and the [[ heart ]] disease"}],
    "qa": [{"question": "where is it", "context": "the dog is at home and the cat is in the garden " * 6}],
    "multiple_choice": [{"context": "the dog", "stem": "can", "options": ["run", "write", "read"]}],
}
USUAL_RAW = [
    {"text": "the drug and the doctor, and heart\U0001f600disease e\u0301 \u5fc3\u810f\u75c5 " * 9},
    {"text": "sun"},
]


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return load_start_model(str(tiny_base_folder))


def predict_all(fitted: ExportedModel, task: StagedTask) -> tuple[Any, Any]:
    family = fitted.description.family
    raw = make_raw(family, RAW.get(family, USUAL_RAW), fitted.description.marks)
    return fitted.predict(task.data.test), fitted.predict(raw)


def check_alone(start: StartModel, family: str, method: MethodConfig, folder: Path, embeds: bool = False) -> None:
    task, fitted = fit(start, family, method, embeds)
    result = evaluate_stages(task, {name: each.predict for name, each in fitted.items()})
    export_stages(start, task, fitted, folder / "written")
    moved = folder / "elsewhere"
    shutil.move(folder / "written", moved)
    alone = load_exported(moved, CPU)
    own = replace(alone, task=task, fitted=fitted)  # the run's, in memory
    assert alone.description.family == family and alone.description == describe_task(task)
    found = alone.predict(task.data.test)
    assert found.predictions == result.predictions["test"]
    assert alone.task.score(task.data.test, found.predictions).values == result.scores["test"].values
    assert predict_all(alone, task) == predict_all(own, task)
    json.dumps([found.records, alone.description.to_json()], allow_nan=False)
    assert alone.predict([]).records == []
    check_target(moved, FINE_TUNED)
    export_stages(start, task, fitted, moved)  # an export of the same kind makes way
    assert load_exported(moved, CPU).predict(task.data.test) == found


@pytest.mark.parametrize(
    ("family", "method"), [("ner", BOTTLENECK), ("relation_extraction", FULL)], ids=["ner", "relation_extraction"]
)
def test_a_folder_alone_predicts_what_its_run_did(
    family: str, method: MethodConfig, start: StartModel, tmp_path: Path
) -> None:
    check_alone(start, family, method, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FULL, BOTTLENECK], ids=["full", "bottleneck"])
@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "relation_extraction"])
def test_folders_of_all_families_do(family: str, method: MethodConfig, start: StartModel, tmp_path: Path) -> None:
    check_alone(start, family, method, tmp_path)


@pytest.mark.slow
def test_the_encoder_that_recalls_terms_travels(start: StartModel, tmp_path: Path) -> None:
    check_alone(start, "normalization", FULL, tmp_path, embeds=True)
    assert (tmp_path / "elsewhere" / RECALL_ENCODER / "config.json").is_file()


@pytest.mark.slow
def test_a_model_on_roberta_does(tiny_roberta_folder: Path, tmp_path: Path) -> None:
    for family in ("ner", "qa"):
        check_alone(load_start_model(str(tiny_roberta_folder)), family, FULL, tmp_path / family)


def test_a_folder_that_is_no_such_export_is_refused(start: StartModel, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no fine-tuned model; give the export of a fine-tuning run"):
        load_exported(tmp_path, CPU)
    (tmp_path / "trainings").mkdir()
    with pytest.raises(RunError, match="export is missing: the run has not ended"):
        load_exported(tmp_path, CPU)
    task, fitted = fit(start, "classification", FULL)
    export_stages(start, task, fitted, tmp_path / "export")
    assert load_exported(tmp_path, CPU).description.family == "classification", "a run has its export"
    path = tmp_path / "export" / "task.json"
    values = json.loads(path.read_text())
    for change, reason in (
        ({"format": 2}, "has format 2, and this version reads 1"),
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
