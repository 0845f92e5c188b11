"""A benchmark's own test file becomes the file that its server takes. Without Ray."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from finetuned_models import CATALOGUE, LABELS, draw_set, export_fitted
from test_predict_tasks import work_on

from domext_ray.config.inference import PredictConfig
from domext_ray.errors import ConfigError, CorpusError
from domext_ray.families.described_sets import list_shipped
from domext_ray.families.readers.examples import LabelledText
from domext_ray.inference.submission import SUBMISSIONS, check_submission, plan_submission, write_submission
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.storage import Place

TEXT = "the water drug and heart"


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def submit(start: StartModel, folder: Path, family: str, name: str, rows: list[Any], **values: Any) -> str:
    """Train for some steps, predict a test file, and return what the server is sent."""
    folder.mkdir()
    model = export_fitted(start, family, folder / "export", epochs=1.0, data=replace(draw_set(family), **values))
    if name.endswith(".tsv"):
        lines = ["\t".join(map(str, each)) for each in rows]
    else:
        lines = [json.dumps(each) for each in rows] if name.endswith("l") else [json.dumps(rows, indent=1)]
    test = folder / f"test{Path(name).suffix}"
    test.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = PredictConfig(
        model=str(model), input=str(test), output=str(folder / "out"), submission=name, block_rows=2, format="jsonl"
    )
    plan = work_on(config)
    summary = plan.finish(plan.input.num_rows, 1.0)
    assert summary["submission"] == name
    return (folder / "out" / name).read_text(encoding="utf-8")


def test_glue_gets_a_table_of_indices_and_words(start: StartModel, tmp_path: Path) -> None:
    labels = ("entailment", "not_entailment")
    pairs = tuple(LabelledText(str(i), f"t:{i}", TEXT, "a cat", labels[i % 2]) for i in range(8))
    rows = [("index", "question", "sentence"), *((i, f'what "is {i}', TEXT) for i in range(3))]
    own = {"train": pairs, "dev": pairs, "test": (), "labels": labels}
    made = submit(start, tmp_path / "qnli", "classification", "QNLI.tsv", rows, **own)
    lines = [line.split("\t") for line in made.splitlines()]
    assert lines[0] == ["index", "prediction"] and [each[0] for each in lines[1:]] == ["0", "1", "2"]
    assert {each[1] for each in lines[1:]} <= {*labels}
    values = tuple(LabelledText(str(i), f"t:{i}", TEXT, "a cat", "", float(i)) for i in range(8))
    rows = [("index", "genre", "sentence1", "sentence2"), (0, "news", TEXT, "a dog")]
    made = submit(start, tmp_path / "sts", "regression", "STS-B.tsv", rows, train=values, dev=values, test=())
    assert 0.0 <= float(made.splitlines()[1].split("\t")[1]) <= 5.0


def test_cblue_gets_the_rows_of_its_file_with_answers(start: StartModel, tmp_path: Path) -> None:
    asked = [{"id": f"s{i}", "query": f"{TEXT} {i}"} for i in range(3)]
    made = submit(start, tmp_path / "qic", "classification", "KUAKE-QIC_test.json", asked)
    found = json.loads(made)
    assert [{**each, "label": ""} for each in found] == [{**each, "label": ""} for each in asked]
    assert {each["label"] for each in found} <= {*LABELS["classification"]}
    texts = [{"text": TEXT}]
    made = submit(start, tmp_path / "cdn", "normalization", "CHIP-CDN_test.json", texts)
    assert json.loads(made)[0]["normalized_result"].split("##")[0] in CATALOGUE


@pytest.mark.parametrize(("name", "end"), [("CMeEE_test.json", 13), ("CMeEE-V2_test.json", 14)])
def test_cmeee_and_cmeie_get_their_own_fields(name: str, end: int, tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text(json.dumps([{"text": TEXT}]))
    entity = {"start": 10, "end": 14, "label": "dru", "text": "drug"}
    plan = plan_submission(name, str(tmp_path / "test.json"), "nested_ner", ("dru",), 8)
    path = write_submission(plan, [{"entities": [{**entity, "score": 0.5}]}], Place(tmp_path))
    expected = {"start_idx": 10, "end_idx": end, "type": "dru", "entity": "drug"}
    assert json.loads(path.read_text()) == [{"text": TEXT, "entities": [expected]}]
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    plan = plan_submission("CMeIE_test.jsonl", str(tmp_path / "test.jsonl"), "relation_extraction", (), 8)
    tail = {"start": 19, "end": 24, "label": "bod", "text": "heart"}
    relation = {"head": entity, "tail": tail, "label": "treats", "score": 0.5}
    path = write_submission(plan, [{"entities": [], "relations": [relation]}], Place(tmp_path))
    assert json.loads(path.read_text())["spo_list"] == [
        {
            "predicate": "treats",
            "subject": "drug",
            "subject_type": "dru",
            "object": {"@value": "heart"},
            "object_type": {"@value": "bod"},
        }
    ]


def test_what_no_server_takes_is_one_sentence(start: StartModel, tmp_path: Path) -> None:
    assert {own for own, _ in SUBMISSIONS.values()} <= {*list_shipped()}
    test = tmp_path / "test.tsv"
    for content, message in (
        ("index\tquestion\nx\twhat\n", "row 1 has no pair; QNLI.tsv needs a prediction of every row"),
        ("index\tquestion\tsentence\n0\twhat\t \n", "row 1 has no pair"),
        ("index\tquestion\tsentence\n", "no list of rows"),
        (
            "index\tquestion\tsentence\n0\twhat\ta\n2\twhat\tb\n",
            "row 2 has the index '2', and not 1; QNLI.tsv needs the",
        ),
    ):
        test.write_text(content)
        with pytest.raises(CorpusError, match=message):
            plan_submission("QNLI.tsv", str(test), "classification", ("entailment",), 8)
    with pytest.raises(ConfigError, match="which is classification; the model's task is ner"):
        plan_submission("QNLI.tsv", str(test), "ner", (), 8)
    with pytest.raises(ConfigError, match="whose labels are entailment, not_entailment; the model predicts 'yes'"):
        plan_submission("QNLI.tsv", str(test), "classification", ("yes",), 8)
    (tmp_path / "test.json").write_text("[{]")
    with pytest.raises(CorpusError, match=r"test.json is no JSON .*; give the benchmark's own test file"):
        plan_submission("KUAKE-QIC_test.json", str(tmp_path / "test.json"), "classification", (), 8)
    for name, task, message in (
        ("Qnli", "", "--submission is 'Qnli'; it must be one of CoLA.tsv, "),
        ("QNI.tsv", "", r"--submission is 'QNI.tsv'; did you mean QNLI.tsv"),
        ("QNLI.tsv", "ner", "--task is 'ner'; it must be empty with --submission"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_submission(name, task)
