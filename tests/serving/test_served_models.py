"""Fine-tuned models are served with the answers that `domext predict` writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finetuned_models import BOTTLENECK, CPU, FULL, OPTIONS, export_fitted, make_raw
from local_service import Served

from domext_ray.config.inference import PredictConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.config.serve import ServeConfig
from domext_ray.errors import BaseModelError, ConfigError, DomextError, RunError
from domext_ray.export.model_folder import save_model
from domext_ray.families.readers.examples import LabelledSet, LabelledText, TaggedSentence
from domext_ray.inference.predictors import TaskPredictor, find_model, load_predictor, open_task
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.models.bank import AdapterBank
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel
from domext_ray.runs.run_directory import write_config
from domext_ray.serving.engine import Engine, ServedRow
from domext_ray.serving.served_model import find_single_model, open_served
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

TEXTS = [
    "the drug and the doctor, and heart disease " * 9,  # of a tagger more than a row
    "the patient was given a drug for the heart",
    "the sun and the wind",
    "cat",
]
ENDPOINTS = {"ner": "entities", **dict.fromkeys(("classification", "multilabel", "regression"), "classify")}
FAMILIES = list(ENDPOINTS)
EXBERT = MethodConfig(name="exbert", heads=0, ffn_units=0, module_hidden_size=8, module_ffn_size=8)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def check_answers(served: Served, name: str, family: str, model: str) -> None:
    """Compare a model's answers with its predictions, all but the last digits of probabilities."""
    predictor = open_task(open_model(model)).load(CPU)
    expected = predictor.predict(make_raw(family, [{"text": text} for text in TEXTS])).records
    answers = served.ask(ENDPOINTS[family], TEXTS, name, **({} if family == "ner" else {"truncate": True}))
    for answer, record in zip(answers, expected, strict=True):
        answer.pop("truncated", None)
        assert answer.pop("adapter") == name and answer.keys() == record.keys()
        for field, value in record.items():
            if field == "entities":
                scores = [[entity.pop("score") for entity in found] for found in (answer[field], value)]
                assert scores[0] == pytest.approx(scores[1], abs=1e-5) and answer[field] == value
            elif field in ("probabilities", "value"):
                assert answer[field] == pytest.approx(value, abs=1e-5)
            else:
                assert answer[field] == value
    found = (prediction.get(name) for prediction in expected for name in ("labels", "entities", "label", "value"))
    assert any(found)


@pytest.mark.parametrize(
    ("family", "method", "head_bilstm"), [("ner", FULL, 0), ("multilabel", FULL, 0), ("classification", BOTTLENECK, 6)]
)
def test_a_whole_model_answers_as_predict_does(
    family: str, method: MethodConfig, head_bilstm: int, start: StartModel, tmp_path: Path
) -> None:
    folder = export_fitted(start, family, tmp_path / "tuned" / "export", method, head_bilstm=head_bilstm)
    model = find_single_model(str(folder))
    assert model.name == "tuned"
    served = Served(model)
    with served.client:
        check_answers(served, "tuned", family, str(folder))
        fitted = open_task(open_model(str(folder))).load(CPU).stages["model"]
        batch = served.service.catalogue.tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = fitted.model.bert(batch).last_hidden_state[0]
        (vector,) = served.ask("embed", TEXTS[1])
        assert vector["embedding"] == pytest.approx(states.mean(0).tolist(), abs=1e-5)


def test_a_model_that_reads_windows_takes_texts_of_any_length(start: StartModel, tmp_path: Path) -> None:
    options = replace(OPTIONS, long_texts="windows")
    folder = export_fitted(start, "classification", tmp_path / "tuned" / "export", options=options)
    served = Served(find_single_model(str(folder)))
    with served.client:
        (answer,) = served.ask("classify", "the sun and the wind and the cat " * 25, "tuned")
    text = make_raw("classification", [{"text": "the sun and the wind and the cat " * 25}])
    (record,) = open_task(open_model(str(folder))).load(CPU).predict(text).records
    assert "truncated" not in answer and answer["label"] == record["label"]
    assert answer["probabilities"] == pytest.approx(record["probabilities"], abs=1e-5)


def test_pairs_are_classified_as_predict_does(start: StartModel, tmp_path: Path) -> None:
    folder = export_fitted(start, "classification", tmp_path / "tuned" / "export")
    texts, pairs = [*TEXTS[1:], TEXTS[0]], [TEXTS[2], "dog", TEXTS[1], "dog"]
    rows = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
    expected = open_task(open_model(str(folder))).load(CPU).predict(make_raw("classification", rows)).records
    served = Served(find_single_model(str(folder)))
    with served.client:
        answers = served.ask("classify", texts, pairs=pairs, truncate=True)
        (alone,) = served.ask("classify", texts[0])
    for answer, record in zip(answers, expected, strict=True):
        assert answer["probabilities"] == pytest.approx(record["probabilities"], abs=1e-5)
    assert alone["probabilities"] != pytest.approx(answers[0]["probabilities"], abs=1e-3)
    assert ["truncated" in answer for answer in answers] == [False, False, False, True]


def test_a_model_of_pairs_answers_no_single_text(start: StartModel, tmp_path: Path) -> None:
    pairs = [LabelledText(str(i), "t:1", text, "the sun", "ab"[i % 2]) for i, text in enumerate(TEXTS)]
    data = LabelledSet("made", tuple(pairs), tuple(pairs), (), ("a", "b"))
    folder = export_fitted(start, "classification", tmp_path / "tuned" / "export", data=data, epochs=1.0)
    served = Served(find_single_model(str(folder)))
    with served.client:
        answer = served.post("classify", TEXTS[2], "tuned")
    assert answer.status_code == 422
    assert "a text has no field 'pair' or 'sentence2' or 'text2' or 'text_b'; the model has learned from" in answer.text


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of Ray Serve's own settings
@pytest.mark.parametrize(
    ("method", "base_folder"),
    [
        (FULL, "tiny_base_folder"),
        (BOTTLENECK, "tiny_base_folder"),
        (EXBERT, "tiny_base_folder"),
        (BOTTLENECK, "tiny_roberta_folder"),  # byte-level BPE
    ],
    ids=["full", "bottleneck", "exbert", "roberta"],
)
def test_an_export_fills_masks_as_predict_does(
    method: MethodConfig, base_folder: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from domext_ray.serving.serve import place_bank

    base = load_base(str(request.getfixturevalue(base_folder)))
    model: Any = ModelSpec(base, method).build()
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    tokenizer = load_tokenizer(base.folder)
    folder = tmp_path / "clinic" / "export"
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    save_model(model, folder)
    special = tokenizer.sep_token  # in a text it is text
    texts = [
        *(f"[MASK] {text} [MASK]" for text in TEXTS[1:]),
        f"a {special} b [MASK]",
        f"{tokenizer.mask_token}{special}",
    ]
    config = PredictConfig(model=str(folder), input="texts", output="filled")
    predictor = load_predictor(find_model(open_model(config.model), config), config, CPU)
    expected = predictor.predict([predictor.make_example({"text": text}, "text") for text in texts]).records
    with place_bank(ServeConfig(model=config.model)) as placed:
        assert bool(placed.bank) == (method is FULL), "an export without extension is a base"
        name = "__base__" if placed.bank else "clinic"
        served = Served(open_served(placed))
        with served.client:
            for answer, record in zip(served.ask("fill-mask", texts, name), expected, strict=True):
                for mask, other in zip(answer["masks"], record["masks"], strict=True):
                    assert [fill["token"] for fill in mask["fills"]] == [fill["token"] for fill in other["fills"]]
                    scores = [[fill["probability"] for fill in own["fills"]] for own in (mask, other)]
                    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_a_whole_model_is_alone(start: StartModel, tmp_path: Path) -> None:
    served = Served(find_single_model(str(export_fitted(start, "classification", tmp_path / "tuned"))))
    with served.client:
        listed = served.client.get("/v1/adapters").json()
        assert [row["labels"] for row in listed["adapters"]] == [["weather", "animal"]] and listed["base"] is None
        for name in ("__base__", "other"):
            answer = served.post("classify", "cat", name)
            assert answer.status_code == 404 and answer.json()["error"].endswith("give one of tuned.")
        answer = served.post("fill-mask", "a [MASK]", "tuned")
        assert answer.status_code == 422 and answer.json()["error"].endswith("those that do are none.")
        assert served.ask("classify", "cat")[0]["adapter"] == "tuned"


def test_adapters_of_one_bank_cut_a_text_as_their_own_sets_do(start: StartModel, tmp_path: Path) -> None:
    bank, text = AdapterBank.create(tmp_path / "bank", start.id), "the cat-dog, and"
    words = {"whole": ["the", "cat-dog", ",", "and"], "parts": ["the", "cat", "-", "dog", ",", "and"]}
    for name, own in words.items():  # whose every word is an entity
        sentence = TaggedSentence("1", "t:1", tuple(own), ("B-Drug",) * len(own))
        data = LabelledSet("made", (sentence,) * 32, (sentence,), (), ("Drug",))
        bank.add_run(name, export_fitted(start, "ner", tmp_path / name, BOTTLENECK, data=data, epochs=4.0))
    served = Served(bank)
    with served.client:
        answers = served.ask("entities", [text] * 4, ["whole", "parts", "parts", "whole"])
    for answer in answers:
        assert [entity["text"] for entity in answer["entities"]] == words[answer["adapter"]]
    for name, own in words.items():
        predictor = TaskPredictor(open_task(open_model(f"{tmp_path / 'bank'}:{name}")).load(CPU))
        (record,) = predictor.predict([predictor.make_example({"text": text}, "text")]).records
        assert [entity["text"] for entity in record["entities"]] == own


def test_vectors_and_labels_share_a_pass(start: StartModel, tmp_path: Path) -> None:
    model = find_single_model(str(export_fitted(start, "classification", tmp_path / "tuned")))
    engine, ids = Engine(model, CPU), np.array([2, 7, 8, 9, 3])
    rows = [
        ServedRow("tuned", model.sha256, ids[:size], None, wants)
        for size, wants in ((5, "mean"), (3, "labels"), (4, "cls"), (5, "labels"))
    ]
    together = engine.run(rows)
    for row, outcome in zip(rows, together, strict=True):
        (alone,) = engine.run([row])
        assert isinstance(alone, tuple) and isinstance(outcome, tuple)
        np.testing.assert_allclose(outcome[0], alone[0], atol=1e-5)
    (changed,) = engine.run([ServedRow("tuned", "another", ids, None, "labels")])
    assert isinstance(changed, tuple) is False and "is another one now" in str(changed)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of Ray Serve's own settings
def test_the_job_says_what_it_serves_or_why_not(
    start: StartModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from domext_ray.serving.serve import run_serving

    export_fitted(start, "multilabel", tmp_path / "notes" / "export")
    (tmp_path / "notes" / "trainings").mkdir()  # as of a run
    run_serving(ServeConfig(model=str(tmp_path / "notes"), dry_run=True))
    said = capsys.readouterr().out
    assert "one model, without a base beside it" in said and "notes " in said and "multilabel: weather, animal" in said
    export_fitted(start, "nested_ner", tmp_path / "nested", BOTTLENECK)
    (tmp_path / "unfinished" / "trainings").mkdir(parents=True)
    for folder, sentence in (
        ("nested", "was fine-tuned for nested_ner, and requests ask for ner, classification, multilabel, regression"),
        ("unfinished", "export is missing: the run has not ended, or was made with --export false"),
    ):
        with pytest.raises(RunError, match=sentence):
            run_serving(ServeConfig(model=str(tmp_path / folder), dry_run=True))


def refuse(config: ServeConfig, kind: type[DomextError]) -> str:
    from domext_ray.serving.serve import run_serving

    with pytest.raises(kind) as error:
        run_serving(config)
    return str(error.value)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of Ray Serve's own settings
def test_a_refusal_names_what_was_given_and_no_bank_of_its_own(
    tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from domext_ray.serving import serve

    monkeypatch.setattr(serve, "start_ray", lambda *_: None)
    monkeypatch.setattr(serve, "_check_serve", lambda *_: None)
    monkeypatch.setattr(serve, "run_on_each_node", lambda sees, path, own: [("node-2", not sees(path))])
    model = str(tiny_base_folder)
    said = refuse(ServeConfig(model=model), ConfigError)
    assert said.startswith(f"--model is {model!r}, which becomes a bank on this machine alone, and node node-2 does")
    assert said.endswith("make a bank on storage that all nodes share (domext bank), and give it as --bank.")
    bank = AdapterBank.create(tmp_path / "bank", model)
    assert f"{bank.folder} is not visible on node node-2; give --bank a folder" in refuse(
        ServeConfig(bank=str(bank.folder)), ConfigError
    )
    (tmp_path / "empty").mkdir()
    assert refuse(ServeConfig(model=str(tmp_path / "empty")), BaseModelError).startswith("--model '")
    write_config(
        Place(tmp_path / "clinic"), PretrainConfig(base="gone/away", method=MethodConfig(name="b", bottleneck_size=4))
    )
    said = refuse(ServeConfig(model=str(tmp_path / "clinic")), BaseModelError)
    assert said.startswith(f"{tmp_path}/clinic: the base 'gone/away' is no folder here and could not be fetched")


def test_adapters_of_a_bank_answer_as_predict_does(start: StartModel, tmp_path: Path) -> None:
    bank = AdapterBank.create(tmp_path / "bank", start.id)
    for family in FAMILIES:
        bank.add_run(family, export_fitted(start, family, tmp_path / family, BOTTLENECK))
    served = Served(bank)
    with served.client:
        for family in FAMILIES:
            check_answers(served, family, family, f"{bank.folder}:{family}")
