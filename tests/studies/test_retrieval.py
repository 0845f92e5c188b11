"""Search by vectors: the figures are scikit-learn's; a malformed folder is one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from domext_ray.config.jobs import RetrievalConfig
from domext_ray.errors import BaseModelError, ConfigError, CorpusError
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.studies.retrieval import retrieval
from domext_ray.studies.retrieval.collection import CORPUS, QUERIES, read_collection
from domext_ray.studies.retrieval.report import write_retrieval
from domext_ray.studies.retrieval.retrieval import NDCG, evaluate_retrieval, score_rankings, search

DOCUMENTS = {"d1": "the cold river", "d2": "blood and heart disease", "d3": "a book of the school", "d4": "cell gene"}
QUESTIONS = {"q1": "river water", "q2": "heart", "q3": "not judged", "q4": "cell protein"}
TEST = "qrels/test.tsv"
JUDGEMENTS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\nq2\td4\t1\nq4\td4\t1\nq4\td1\t0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small collection; one document has a title, one judgement is 0, one query has none."""
    place = tmp_path / "collection"
    (place / "qrels").mkdir(parents=True)
    lines = [{"_id": name, "title": "Rivers" if name == "d1" else "", "text": text} for name, text in DOCUMENTS.items()]
    (place / CORPUS).write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    asked = [{"_id": name, "text": text} for name, text in QUESTIONS.items()]
    (place / QUERIES).write_text("".join(json.dumps(each) + "\n" for each in asked), encoding="utf-8")
    (place / TEST).write_text(JUDGEMENTS, encoding="utf-8")
    return place


def test_a_collection_is_read(folder: Path) -> None:
    found = read_collection(folder, "test")
    assert found.documents[3] == "Rivers the cold river" and found.document_ids == ["d4", "d3", "d2", "d1"]
    assert found.query_ids == ["q1", "q2", "q4"] and found.judgements == [{3: 1}, {2: 2, 0: 1}, {0: 1, 3: 0}]
    assert found.own_places == [-1, -1, -1]


def test_figures_are_scikit_learns() -> None:
    random = np.random.default_rng(0)
    gains = random.choice(4, p=[0.7, 0.1, 0.1, 0.1], size=(30, 40))
    gains[:, 0] = 1  # every query has a relevant document
    scores = random.normal(size=gains.shape)
    rankings = np.argsort(-scores, axis=1)
    score = score_rankings(rankings, [dict(enumerate(each.tolist())) for each in gains], [-1] * 30)
    expected = ndcg_score(gains, scores, k=10)
    assert score.get(NDCG) == pytest.approx(expected, abs=1e-12)
    found = np.take_along_axis(gains > 0, rankings, 1)
    for k in (1, 10, 100):
        assert score.get(f"recall_at_{k}") == pytest.approx((found[:, :k].sum(1) / found.sum(1)).mean())


def test_a_query_does_not_find_itself_and_one_without_a_relevant_document_scores_nothing(folder: Path) -> None:
    for name, more in (
        (QUERIES, '{"_id": "d2", "text": "blood and heart disease"}\n'),
        (TEST, "d2\td1\t1\nq3\td1\t0\n"),
    ):
        (folder / name).write_text((folder / name).read_text() + more)
    found = read_collection(folder, "test")
    assert found.query_ids == ["q1", "q2", "q3", "q4", "d2"] and found.own_places == [-1, -1, -1, -1, 2]
    rankings = np.array([[3, 0], [2, 0], [3, 1], [0, 3], [2, 3]])
    assert score_rankings(rankings, found.judgements, found.own_places).get("recall_at_1") == (1 + 0.5 + 0 + 1 + 1) / 5


def test_search_in_blocks_is_a_sort_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(retrieval, "BLOCK_DOCUMENTS", 7)
    random = np.random.default_rng(0)
    queries, documents = random.normal(size=(9, 8)).astype(np.float32), random.normal(size=(30, 8)).astype(np.float32)
    documents[20] = documents[3]  # of equal ones, the first
    expected = np.argsort(-(queries @ documents.T), axis=1, kind="stable")
    assert np.array_equal(search(queries, documents, 10), expected[:, :10])
    assert np.array_equal(search(queries, documents, 100), expected)


def test_models_are_compared(folder: Path, tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path) -> None:
    models = f"bert={tiny_base_folder},roberta={tiny_roberta_folder}"
    config = RetrievalConfig(models=models, data=str(folder), output=str(tmp_path / "out"), batch_size=2)
    collection, found = evaluate_retrieval(config)
    text = write_retrieval(config, collection, found)
    for said in ("3 queries, 4 documents", "| model | nDCG@10 (%) |", "| bert |", "points above bert"):
        assert said in text
    embed = TextEmbedding(open_model(str(tiny_base_folder)).load(), normalize=True, max_length=256)
    order = np.argsort(-(embed(collection.queries) @ embed(collection.documents).T), axis=1)
    assert found[0].score.get("recall_at_1") == pytest.approx(
        np.mean([order[0, 0] == 3, (order[1, 0] in (0, 2)) / 2, order[2, 0] == 0])
    )
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["queries"] == 3 and results["models"]["roberta"]["gained"].keys() == {*retrieval.FIGURES}
    difference = results["models"]["roberta"]["gained"][NDCG]["difference"]
    assert difference == pytest.approx(found[1].score.get(NDCG) - found[0].score.get(NDCG))


def test_a_malformed_folder_is_one_sentence(folder: Path) -> None:
    kept = {name: (folder / name).read_bytes() for name in (CORPUS, QUERIES, TEST)}
    spoilt: list[tuple[str, Any, str]] = [  # a file, what it is replaced by or what is added, and what is said
        (QUERIES, None, "has no queries.jsonl; give a folder in BEIR's layout"),
        (TEST, None, "has no qrels/test.tsv"),
        (CORPUS, b"", "corpus.jsonl is empty"),
        (CORPUS, "{\n", r"corpus.jsonl:5 is no JSON"),
        (CORPUS, "[1]\n", r'corpus.jsonl:5 is no object with "_id" and "text"'),
        (CORPUS, '{"_id": 1, "text": "a"}\n', "corpus.jsonl:5 has .* no string"),
        (CORPUS, '{"_id": "d1", "text": "a"}\n', "the id 'd1' a second time"),
        (QUERIES, b"\xff\xfe", "queries.jsonl is not UTF-8"),
        (TEST, "q1 d1 1\n", "test.tsv:7 has 1 fields between tabs"),
        (TEST, "q9\td1\t1\n", "test.tsv:7 names the query 'q9'"),
        (TEST, "q1\td9\t1\n", "test.tsv:7 names the document 'd9'"),
        (TEST, "q1\td1\tx\n", "test.tsv:7 has the judgement 'x'"),
        (TEST, b"a\tb\tc\nq1\td1\t0\n", "judges no document relevant"),
    ]
    for name, content, message in spoilt:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else kept[name] + content.encode())
        with pytest.raises(CorpusError, match=message) as raised:
            read_collection(folder, "test")
        assert "\n" not in str(raised.value)
        (folder / name).write_bytes(kept[name])


def test_options_outside_their_rules_are_refused(folder: Path) -> None:
    config = RetrievalConfig(models=("general-mini",), data=str(folder))
    for values in ({"models": ""}, {"models": "a,a"}, {"data": ""}, {"split": "../x"}, {"pooling": "max"}):
        with pytest.raises(ConfigError, match=f"--{[*values][0]} is "):
            replace(config, **values)
    with pytest.raises(BaseModelError, match="--models '?/no/such"):
        evaluate_retrieval(replace(config, models=("x=/no/such",)))
