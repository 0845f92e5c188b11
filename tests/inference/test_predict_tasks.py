"""Predictions of fine-tuned models from files, for every family; labelled splits are scored. Without Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import WORDS
from finetuned_models import make_raw
from labelled_fixtures import write_ner

from domext_ray.adapters.bank import AdapterBank
from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.downstream.finetune.export import export_stages
from domext_ray.downstream.finetune.exported import load_exported
from domext_ray.downstream.finetune.training import Point, fit_stages
from domext_ray.downstream.start.model import load_start_model
from domext_ray.downstream.tasks.families import make_task
from domext_ray.downstream.tasks.task import TaskOptions
from domext_ray.errors import ConfigError, CorpusError, DomextError
from domext_ray.files import read_json
from domext_ray.inference.labelled_input import plan_labelled
from domext_ray.inference.predict import PredictPlan, plan_prediction
from domext_ray.labelled.examples import (
    AnnotatedText,
    AnyExample,
    Choice,
    Entity,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    Relation,
    TaggedSentence,
)
from domext_ray.labelled.readers.sets import load_set
from domext_ray.labelled.set_description import find_set
from domext_ray.labelled.set_families import FAMILIES

FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
CPU = torch.device("cpu")
TERMS = tuple(f"{first} {second}" for first in WORDS[:4] for second in WORDS[4:8])
LABELS = {"relation": ("none", "treats"), "classification": ("a", "b"), "multilabel": ("a", "b")}
LABELS |= {"ner": ("Drug",), "nested_ner": ("Drug", "Organ"), "relation_extraction": ("treats",)}
CUT = ("classification", "multilabel", "regression")
"""Families that do not read a text in windows."""
RAW: dict[str, dict[str, Any]] = {
    "relation": {"text": "the << drug >> and the [[ heart ]] disease"},
    "qa": {"question": "where is it", "context": "the dog is at home and the cat is out " * 6},
    "multiple_choice": {"context": "the dog", "options": ["run", "write", "read"]},
}


def make_labelled(family: str, i: int) -> AnyExample:
    own, text = (str(i), f"t:{i}"), f"the {WORDS[i]} drug and heart"
    drug, heart = (
        Entity(4 + len(WORDS[i]) + 1, 4 + len(WORDS[i]) + 5, "Drug"),
        Entity(len(text) - 5, len(text), "Organ"),
    )
    match family:
        case "ner":
            return TaggedSentence(*own, tuple(text.split()), ("O", "O", "B-Drug", "O", "O"))
        case "nested_ner":
            return AnnotatedText(*own, text, (drug, heart))
        case "relation_extraction":
            return AnnotatedText(*own, text, (drug, heart), (Relation(drug, heart, "treats"),))
        case "relation":
            return MarkedText(*own, text, replace(drug, label=""), replace(heart, label=""), ("none", "treats")[i % 2])
        case "classification":
            return LabelledText(*own, text, None, "ab"[i % 2])
        case "multilabel":
            return MultiLabelText(*own, text, None, ("a", "b")[i % 2 :])
        case "regression":
            return LabelledText(*own, text, None, "", float(i))
        case "qa":
            return Question(*own, "what is it", text, (replace(drug, label=""),) if i % 3 else ())
        case "multiple_choice":
            return Choice(*own, text, "", ("cat", "heart disease", "sun"), i % 3)
        case _:
            return Mention(*own, f"{WORDS[i]} {WORDS[5]}", (TERMS[i % len(TERMS)],))


def export_model(
    base: Path, family: str, data: LabelledSet, folder: Path, epochs: float = 1.0, method: MethodConfig = FULL
) -> Path:
    """Fine-tune for some steps, and export."""
    start = load_start_model(str(base))
    task = make_task(family, data, start.tokenizer, TaskOptions(max_length=40, stride=10), "")
    config = FinetuneConfig(
        method=method, engine=EngineConfig(precision="fp32"), optim=FinetuneOptimConfig(dropout=0.0)
    )
    fitted = fit_stages(start, task, config, Point(3e-3, 8, epochs, 0), CPU, lambda _: None)
    export_stages(start, task, fitted, folder)
    return folder


def work_on(config: PredictConfig) -> PredictPlan:
    """What the pool's actors do."""
    plan = plan_prediction(config)
    plan.blocks.make()
    work = plan.load(CPU)
    for each in plan.input.blocks:
        plan.blocks.records.write(each.number, plan.blocks.make_part(each, work))
    return plan


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_predicts_rows_of_files(family: str, tiny_base_folder: Path, tmp_path: Path) -> None:
    splits = [tuple(make_labelled(family, i) for i in range(size)) for size in (16, 6, 0)]
    names = {"negative_label": "none"} if family == "relation" else {}
    catalogue = TERMS if family == "normalization" else ()
    data = LabelledSet("made", *splits, LABELS.get(family, ()), catalogue=catalogue, **names)
    model = export_model(tiny_base_folder, family, data, tmp_path / "export")
    long = {"text": "the water drug and heart of it " * 12, "id": 5}
    rows = [RAW.get(family, {"text": "the water drug and heart"}), {**long, **RAW.get(family, {})}, {"note": 1}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*rows, {"text": " "}]))
    places = {"model": str(model), "input": str(tmp_path / "in.jsonl")}
    lines = work_on(PredictConfig(**places, output=str(tmp_path / "lines"), format="jsonl", keep_text=True))
    (part,) = (lines.folder / "predictions").iterdir()
    found = [json.loads(line) for line in part.read_text().splitlines()]
    assert [each["id"] for each in found] == ["in.jsonl:1", "5", "in.jsonl:4"]
    (malformed,) = lines.blocks.read(0)["malformed"]
    assert malformed["line"] == 3 and malformed["reason"].startswith("the row has ")
    cut = {"texts have more than 40 tokens and are cut, of a pair the longer one first": 1}
    cases = lines.blocks.read(0)["cases"]
    if family == "normalization":
        assert cases.keys() == cut.keys(), "asked about with every term, and cut each time"
    elif family != "relation_extraction":  # asked about pairs of what the model finds
        assert cases == (cut if family in CUT else {})
    own = load_exported(model, CPU)
    records = own.predict(make_raw(family, rows[:2], own.description.marks)).records
    assert [{name: each[name] for name in records[0]} for each in found[:2]] == records
    assert all(each in (None, []) for name, each in found[2].items() if name in records[0] and name != "text")
    table = work_on(PredictConfig(**places, output=str(tmp_path / "table")))
    (part,) = (table.folder / "predictions").iterdir()
    stored = pq.read_table(part).to_pylist()
    assert stored == [{name: each[name] for name in ("id", *records[0])} for each in found]


def test_a_labelled_split_is_scored(tiny_base_folder: Path, tmp_path: Path) -> None:
    folder = write_ner(tmp_path / "ner")
    data = load_set(*find_set("ner", str(folder)))
    model = export_model(tiny_base_folder, "ner", data, tmp_path / "export", epochs=6.0)
    places = {"model": str(model), "task": "ner", "input": str(folder), "output": str(tmp_path / "out")}
    plan = work_on(PredictConfig(**places, block_rows=7, keep_text=True))
    summary = plan.finish(plan.input.num_rows, 1.0)
    own = load_exported(model, CPU)
    expected = own.task.score(data.test, own.predict(data.test).predictions)
    assert 0.0 < expected.get("f1.micro") == summary["scores"]["value"]
    assert summary["rows"] == len(data.test) == plan.input.num_rows
    assert f"f1.micro: {summary['scores']['value']:.4f}" in plan.format_summary(summary)
    report = summary["scores"]["report"]
    assert read_json(plan.folder / "scores.json", "")["report"] == report
    assert report["examples"] == len(data.test)
    assert all(f"{label} " in plan.format_summary(summary) for label in data.labels)
    assert "<html" in (plan.folder / "errors.html").read_text(encoding="utf-8")
    parts = sorted((plan.folder / "predictions").iterdir())
    ids = [each["id"] for part in parts for each in pq.read_table(part).to_pylist()]
    assert ids == [each.id for each in data.test]
    other = tmp_path / "other"
    other.mkdir()
    (other / "test.csv").write_text("text,label\na,b\n")
    with pytest.raises(ConfigError, match="--task 'classification' is classification; the task of .* is ner"):
        plan_prediction(PredictConfig(**{**places, "task": "classification", "input": str(other)}))


def test_an_adapter_of_a_bank_does_its_task(tiny_base_folder: Path, tmp_path: Path) -> None:
    splits = [tuple(make_labelled("classification", i) for i in range(size)) for size in (16, 6, 0)]
    data = LabelledSet("made", *splits, LABELS["classification"])
    method = MethodConfig(name="task", trains="extensions", heads=0, ffn_units=0, bottleneck_size=4)
    model = export_model(tiny_base_folder, "classification", data, tmp_path / "export", method=method)
    bank = AdapterBank.create(tmp_path / "bank", str(tiny_base_folder))
    bank.add_run("clinic", model)
    (tmp_path / "in.txt").write_text("the water drug and heart\nthe drug\n")
    places = {"input": str(tmp_path / "in.txt"), "format": "jsonl"}
    found = []
    for i, each in enumerate((str(model), f"{tmp_path / 'bank'}:clinic")):
        plan = work_on(PredictConfig(model=each, output=str(tmp_path / f"out{i}"), **places))
        assert plan.model.task == "classification"
        found.append(plan.blocks.find_part(0).read_text())
    assert found[0] == found[1] and found[0].count("probabilities") == 2
    with pytest.raises(ConfigError, match="fills no masks"):
        plan_prediction(PredictConfig(model=f"{tmp_path / 'bank'}:clinic", task="fill_mask", output="out", **places))


def test_a_test_file_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\na b,x\nc,\nd e,y\n")
    found = plan_labelled("classification", str(tmp_path), "test", 1, strict=False)
    assert found.num_rows == 2 and len(found.blocks) == 2
    assert [each.id for each in found.make_reader()(found.blocks[1])] == ["2"]
    assert "has no label" in found.notes[0]
    with pytest.raises(CorpusError, match="has no label; mend it, or leave out --strict"):
        plan_labelled("classification", str(tmp_path), "test", 1, strict=True)
    with pytest.raises(CorpusError, match=r"has no example in dev \(it has test\)"):
        plan_labelled("classification", str(tmp_path), "dev", 1, strict=False)
    with pytest.raises(DomextError, match="--input is empty"):
        plan_labelled("classification", "", "dev", 1, strict=False)
