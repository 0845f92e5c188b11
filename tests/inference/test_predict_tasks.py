"""Predictions of fine-tuned models from files, for every family; labelled splits are scored. Without Ray."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from changed_files import REPLACED
from finetuned_models import BOTTLENECK, CPU, FULL, OPTIONS, draw_set, export_fitted, fit, make_raw
from labelled_fixtures import write, write_ner

from domext_ray.config.inference import PredictConfig
from domext_ray.errors import ConfigError, CorpusError, DomextError
from domext_ray.families.described_sets import find_set
from domext_ray.families.readers.examples import LabelledSet, LabelledText, TaggedSentence
from domext_ray.families.registry import FAMILIES
from domext_ray.families.sets import load_set
from domext_ray.families.task_description import describe_task
from domext_ray.files import read_json
from domext_ray.finetuning.export import export_stages
from domext_ray.inference.labelled_input import plan_labelled
from domext_ray.inference.predict import PredictPlan, plan_prediction
from domext_ray.models.bank import AdapterBank
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.storage import Place
from domext_ray.text.data.sources import describe_changes

CUT = ("classification", "multilabel", "regression")
"""Families that do not read a text in windows."""
RAW: dict[str, dict[str, Any]] = {
    "relation": {"text": "the << drug >> and the [[ heart ]] disease"},
    "qa": {"question": "where is it", "context": "the dog is at home and the cat is out " * 6},
    "multiple_choice": {"context": "the dog", "options": ["run", "write", "read"]},
}
UNUSUAL = [
    {"text": "the drug and the doctor, and heart\U0001f600disease e\u0301 \u5fc3\u810f\u75c5 " * 9},
    {"text": "sun"},
]


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def work_on(config: PredictConfig) -> PredictPlan:
    """What the pool's actors do."""
    plan = plan_prediction(config)
    plan.blocks.make()
    work = plan.load(CPU)
    for each in plan.input.blocks:
        plan.blocks.records.write(each.number, plan.blocks.make_part(each, work))
    return plan


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_predicts_rows_of_files(family: str, start: StartModel, tmp_path: Path) -> None:
    """The exported folder alone predicts what the run that wrote it did, also of raw texts."""
    method = (FULL, BOTTLENECK)[[*FAMILIES].index(family) % 2]
    task, fitted = fit(start, family, method)
    result = task.evaluate({name: each.predict for name, each in fitted.items()})
    export_stages(start, task, fitted, Place(tmp_path / "written"))
    model = (tmp_path / "written").rename(tmp_path / "export")
    own = load_exported(model, CPU)
    assert own.description == describe_task(task)
    found = own.predict(task.data.test)
    assert found.predictions == result["test"].predictions
    assert own.task.score(task.data.test, found.predictions).values == result["test"].score.values
    of_run = replace(own, task=task, stages=fitted)
    raw = make_raw(family, [RAW[family]] if family in RAW else UNUSUAL, own.description.state)
    assert (found, own.predict(raw)) == (of_run.predict(task.data.test), of_run.predict(raw))
    assert own.predict([]).records == []
    json.dumps([found.records, own.description.to_json()], allow_nan=False)
    long = {"text": "the water drug and heart of it " * 12, "id": 5}
    rows = [RAW.get(family, {"text": "the water drug and heart"}), {**long, **RAW.get(family, {})}, {"note": 1}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*rows, {"text": " "}]))
    places = {"model": str(model), "input": str(tmp_path / "in.jsonl")}
    lines = work_on(PredictConfig(**places, output=str(tmp_path / "lines"), format="jsonl", keep_text=True))
    (part,) = Path(lines.folder / "predictions").iterdir()
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
    records = own.predict(make_raw(family, rows[:2], own.description.state)).records
    assert [{name: each[name] for name in records[0]} for each in found[:2]] == records
    assert all(each in (None, []) for name, each in found[2].items() if name in records[0] and name != "text")
    table = work_on(PredictConfig(**places, output=str(tmp_path / "table")))
    (part,) = Path(table.folder / "predictions").iterdir()
    stored = pq.read_table(part).to_pylist()
    assert stored == [{name: each[name] for name in ("id", *records[0])} for each in found]


def test_windows_find_what_stands_behind_the_cut(start: StartModel, tmp_path: Path) -> None:
    """The word that decides stands where no cut text has it; what was trained with windows reads and predicts so."""
    draw = random.Random(0)
    texts = []
    for i in range(96):
        words = draw.choices(("the", "water", "dog", "good"), k=60)
        words[draw.randrange(44, 60)] = ("cat", "wind")[i % 2]
        texts.append(LabelledText(str(i), f"t:{i}", " ".join(words), None, ("animal", "weather")[i % 2]))
    data = LabelledSet("made", tuple(texts[:64]), tuple(texts[64:80]), tuple(texts[80:]), ("animal", "weather"))
    scores, models = {}, {}
    for how in ("cut", "windows"):
        options = replace(OPTIONS, long_texts=how)
        models[how] = export_fitted(start, "classification", tmp_path / how, epochs=12.0, data=data, options=options)
        own = load_exported(models[how], CPU)
        assert own.description.options.long_texts == how
        scores[how] = own.task.score(data.test, own.predict(data.test).predictions).get("accuracy")
        assert bool(own.take_cases()) == (how == "cut")
    assert scores["windows"] == 1.0 > scores["cut"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": each.text}) + "\n" for each in data.test))
    given = {"input": str(tmp_path / "in.jsonl"), "model": str(models["windows"])}
    plans = {
        how: work_on(PredictConfig(**given, long_texts=how, output=str(tmp_path / f"out-{how}")))
        for how in ("auto", "windows", "cut")
    }
    found = {how: plan.blocks.read(0)["labels"] for how, plan in plans.items()}
    assert found["auto"] == found["windows"] == {"animal": 8, "weather": 8} != found["cut"]
    assert [plan.blocks.read(0)["cases"] != {} for plan in plans.values()] == [False, False, True]
    tagger = export_fitted(start, "ner", tmp_path / "ner")
    with pytest.raises(ConfigError, match="long_texts is 'windows'; it must be left out with a task of the family ner"):
        plan_prediction(
            PredictConfig(**{**given, "model": str(tagger)}, long_texts="windows", output=str(tmp_path / "x"))
        )


def test_a_model_of_pairs_scores_no_single_texts_and_one_of_texts_tells_of_pairs(
    start: StartModel, tmp_path: Path
) -> None:
    singles = draw_set("multilabel")
    pairs = replace(
        singles,
        **{name: tuple(replace(own, pair="the sun") for own in found) for name, found in singles.splits.items()},
    )
    folder, rows = tmp_path / "set", [{"text": "the cat", "labels": ["animal"]}, {"text": "a wind", "labels": []}]
    folder.mkdir()
    paired = [{**row, "text_b": "the sun"} for row in rows]
    (tmp_path / "set.yaml").write_text("name: set\ntask: multilabel\ncolumns: {pair: [pair, text_b]}\n")
    of_pairs = str(export_fitted(start, "multilabel", tmp_path / "pairs", data=pairs))
    of_texts = str(export_fitted(start, "multilabel", tmp_path / "texts", data=singles))

    def plan(model: str, rows: list[dict[str, Any]], task: str) -> PredictPlan:
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        output.mkdir()
        return work_on(PredictConfig(model=model, task=task, input=str(folder), output=str(output)))

    for some in (rows, [paired[0], rows[1]]):
        with pytest.raises(
            CorpusError, match=r"[12] of 2 examples of test have no second text \(the first is .*test.js"
        ):
            plan(of_pairs, some, "multilabel")
    assert plan(of_pairs, paired, str(tmp_path / "set.yaml")).blocks.read(0)["cases"] == {}
    assert plan(of_texts, rows, "multilabel").blocks.read(0)["cases"] == {}
    cases = plan(of_texts, paired, str(tmp_path / "set.yaml")).blocks.read(0)["cases"]
    ((what, number),) = cases.items()
    assert number == 2 and what.startswith("rows have a second text, and the model has not learned from pairs alone")


def test_a_labelled_split_is_scored(start: StartModel, tmp_path: Path) -> None:
    folder = write_ner(tmp_path / "ner")
    data = load_set(find_set("ner", str(folder)))
    model = export_fitted(start, "ner", tmp_path / "export", epochs=6.0, data=data)
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
    parts = sorted(Path(plan.folder / "predictions").iterdir())
    ids = [each["id"] for part in parts for each in pq.read_table(part).to_pylist()]
    assert ids == [each.id for each in data.test]
    assert summary["scores"]["unknown_labels"] == {}
    strange = write(tmp_path / "strange" / "test.tsv", "heart\tB-Organ\n\ndrug\tB-Drug\n\nlung\tB-Organ\n").parent
    plan = work_on(PredictConfig(**{**places, "input": str(strange), "output": str(tmp_path / "scored")}))
    summary = plan.finish(plan.input.num_rows, 1.0)
    assert read_json(plan.folder / "scores.json", "")["unknown_labels"] == {"Organ": 2}
    assert "2 of 3 labels can never be right: the model does not know Organ.\n" in plan.format_summary(summary)
    other = tmp_path / "other"
    other.mkdir()
    (other / "test.csv").write_text("text,label\na,b\n")
    with pytest.raises(ConfigError, match="--task 'classification' is classification; the task of .* is ner"):
        plan_prediction(PredictConfig(**{**places, "task": "classification", "input": str(other)}))


def test_choices_of_two_and_of_three_options_are_predicted_beside_each_other(start: StartModel, tmp_path: Path) -> None:
    model = load_exported(export_fitted(start, "multiple_choice", tmp_path / "export"), CPU)
    raw = [{"context": "the dog", "options": ["run", "write", "read"][:size]} for size in (3, 2, 3)]
    records = model.predict(make_raw("multiple_choice", raw)).records
    assert [len(record["probabilities"]) for record in records] == [3, 2, 3] and records[0] == records[2]


def test_a_page_of_a_set_with_groups_quotes_no_row(start: StartModel, tmp_path: Path) -> None:
    model = export_fitted(start, "classification", tmp_path / "export")
    for group, name in (("", "open"), ("group_field: who\n", "private")):
        rows = [{"text": "quoted words", "label": label, "who": label} for label in ("weather", "animal")]
        write(tmp_path / name / "test.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write(tmp_path / name / "set.yaml", f"task: classification\n{group}")
        places = {"model": str(model), "task": "classification", "input": str(tmp_path / name)}
        plan = work_on(PredictConfig(**places, output=str(tmp_path / f"{name} scores")))
        assert plan.finish(plan.input.num_rows, 1.0)["scores"]["report"]["wrong"] == 1
        page = (plan.folder / "errors.html").read_text(encoding="utf-8")
        assert ("quoted words" in page) == (not group) and ("No example is shown" in page) == bool(group)


def test_a_labelled_split_of_texts_is_cut_as_the_model_learned(start: StartModel, tmp_path: Path) -> None:
    """A model that takes every word for an entity."""
    sentence = TaggedSentence("1", "t:1", ("cat-dog", "the"), ("B-Drug",) * 2)
    data = LabelledSet("made", (sentence,) * 32, (sentence,), (), ("Drug",))
    model = export_fitted(start, "ner", tmp_path / "export", epochs=2.0, data=data)
    entities = [[0, 7, "Drug"], [8, 11, "Drug"], [11, 12, "Drug"]]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "set.yaml").write_text("task: ner\nreader: spans\n")
    (tmp_path / "texts" / "test.jsonl").write_text(json.dumps({"text": "cat-dog the.", "label": entities}))
    places = {"model": str(model), "task": "ner", "input": str(tmp_path / "texts"), "output": str(tmp_path / "out")}
    plan = work_on(PredictConfig(**places))
    assert plan.finish(plan.input.num_rows, 1.0)["scores"]["value"] == 1.0
    page = (plan.folder / "errors.html").read_text(encoding="utf-8")
    assert "None of 1 examples is predicted wrongly." in page


def test_an_adapter_of_a_bank_does_its_task(start: StartModel, tmp_path: Path) -> None:
    model = export_fitted(start, "classification", tmp_path / "export", BOTTLENECK)
    bank = AdapterBank.create(tmp_path / "bank", start.id)
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
    assert found.notes[0] == "Labels of test: x 1, y 1." and "has no label" in found.notes[1]
    with pytest.raises(CorpusError, match="has no label; mend it, or leave out --strict"):
        plan_labelled("classification", str(tmp_path), "test", 1, strict=True)
    with pytest.raises(CorpusError, match=r"has no example in dev \(it has test\)"):
        plan_labelled("classification", str(tmp_path), "dev", 1, strict=False)
    with pytest.raises(DomextError, match="--input is empty"):
        plan_labelled("classification", "", "dev", 1, strict=False)


def test_examples_that_change_are_named(tmp_path: Path) -> None:
    """Workers read them, too: the same number of others is not taken for them."""
    (tmp_path / "test.csv").write_text("text,label\na b,x\nd e,y\n")
    found = plan_labelled("classification", str(tmp_path), "test", 1, strict=False)
    before = found.list_files()
    assert [path for path, _ in before] == [str(tmp_path / "test.csv")]
    REPLACED["cp -p"](tmp_path / "test.csv", b"text,label\na b,x\nd f,y\n")
    with pytest.raises(CorpusError, match="changed while it was read; start again when nothing writes to it"):
        found.make_reader()
    other = plan_labelled("classification", str(tmp_path), "test", 1, strict=False)
    assert describe_changes(before, other.list_files()) == f"{tmp_path}/test.csv has changed"
