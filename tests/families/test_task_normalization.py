"""Normalisation in two steps: what is recalled, how candidates are ranked and chosen, and what errors cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from brief_training import make_head, predict, train_briefly
from made_data import write_mentions
from transformers import PreTrainedTokenizerBase

from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description
from domext_ray.families.family import Prediction
from domext_ray.families.normalization import (
    DIFFERENT,
    RANKING,
    SAME,
    NormalizationTask,
    RecallOptions,
    TermRecall,
)
from domext_ray.families.readers.examples import LabelledSet, LabelledText, Mention
from domext_ray.families.sets import load_set
from domext_ray.families.task import Predict, TaskOptions

OPTIONS = TaskOptions(max_length=48)
TERMS = ("pain of the heart", "pain of the back", "wound of the hand", "cold hands", "winter cough", "night cough")


def make_mention(number: int, text: str, *places: int) -> Mention:
    return Mention(f"m{number}", f"made:{number}", text, tuple(TERMS[i] for i in places))


TRAIN = (
    make_mention(0, "heart pain", 0),
    make_mention(1, "hurting heart", 0),
    make_mention(2, "hand wound", 2),
    make_mention(3, "heart pain and night cough", 0, 5),
)
DEV = (make_mention(4, "back pain", 1), make_mention(5, "hand wound, winter cough", 2, 4))
TEST = (make_mention(6, "cough at night", 5),)


@pytest.fixture
def data() -> LabelledSet:
    return LabelledSet("complaints", TRAIN, DEV, TEST, catalogue=TERMS)


def rate(probability: float) -> Prediction:
    """What the second step says of a pair."""
    return {"probabilities": {SAME: probability}}


def list_terms(predictions: Sequence[Prediction]) -> list[list[str]]:
    return [each["terms"] for each in predictions]


def know_all(examples: Sequence[Mention]) -> Predict:
    """A perfect second step."""
    terms = {each.text: each.terms for each in examples}

    def predict(pairs: Sequence[LabelledText]) -> list[Prediction]:
        return [rate(0.9 if each.pair in terms[each.text] else 0.2) for each in pairs]

    return predict


def make_task(
    data: LabelledSet, bert: PreTrainedTokenizerBase, num_candidates: int = 6, num_negatives: int = 2
) -> NormalizationTask:
    class Recalling(NormalizationTask):
        step_options = RecallOptions(num_candidates=num_candidates, num_negatives=num_negatives)

    return Recalling(data, bert, OPTIONS)


def test_an_encoder_is_given_if_and_only_if_candidates_were_recalled_with_one(
    data: LabelledSet, bert: PreTrainedTokenizerBase
) -> None:
    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.ones((len(texts), 2), np.float32)

    for learned, used, says in (
        (embed, None, "by embeddings too, and there is no encoder that makes them"),
        (None, embed, "without embeddings, and an encoder is given that makes them"),
    ):
        state = NormalizationTask(data, bert, OPTIONS, embed=learned).state_dict()
        with pytest.raises(ValueError, match=says):
            NormalizationTask(data, bert, OPTIONS, embed=used, state=state)


def test_ngrams_recall_what_looks_alike() -> None:
    recall = TermRecall(TERMS, RecallOptions(num_candidates=3))
    found = recall.find(["PAIN of the hart", "coughing in winter", "cold hand"])
    assert [each[0] for each in found] == ["pain of the heart", "winter cough", "cold hands"]
    assert all(len(each) == 3 for each in found)
    assert recall.find([]) == []
    # Nothing in common with any: the catalogue's order, so that a run can be repeated.
    assert recall.find(["漢字"]) == [list(TERMS[:3])]


def test_chinese_terms_are_recalled_by_characters() -> None:
    terms = ("左侧腕部骨折", "右侧腕部骨折", "肺部感染")
    assert TermRecall(terms, RecallOptions(num_candidates=1)).find(["右腕骨折", "肺里感染"]) == [[terms[1]], [terms[2]]]


def test_embeddings_recall_what_means_alike() -> None:
    """Words without a letter in common are found through embeddings, and n-grams still count."""
    groups = {"pain of the heart": 0, "pain of the back": 1, "wound of the hand": 2, "xyz": 1}

    def embed(texts: list[str]) -> np.ndarray:
        vectors = np.full((len(texts), 4), 0.1)
        for i, text in enumerate(texts):
            vectors[i, groups.get(text, 3)] = 5.0
        return vectors

    assert TermRecall(TERMS, RecallOptions(1)).find(["xyz"]) == [["pain of the heart"]]
    assert TermRecall(TERMS, RecallOptions(1), embed).find(["xyz"])[0] == ["pain of the back"]
    assert TermRecall(TERMS, RecallOptions(1), embed).find(["wound of the hand"])[0] == ["wound of the hand"]


def test_fused_scores_follow_the_ranks() -> None:
    """Of three terms, that one wins which both rankings put high, by the sum of 1 / (60 + rank)."""
    terms = ("aaab", "aabb", "bbba")
    similarity = {"aaab": 0.1, "aabb": 0.8, "bbba": 0.9, "aaaa": 1.0}

    def embed(texts: list[str]) -> np.ndarray:
        return np.array([[similarity[t], math.sqrt(1 - similarity[t] ** 2)] for t in texts])

    # n-grams: aaab, aabb, bbbb; embeddings the other way round: 1/61 + 1/63 beats 2/62, the first of equals is first.
    assert TermRecall(terms, RecallOptions(3), embed).find(["aaaa"]) == [["aaab", "bbba", "aabb"]]


def test_perfect_ranking_makes_a_perfect_chain(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    task = make_task(data, bert)
    assert list(task.stages) == [RANKING]
    result = task.evaluate({RANKING: know_all([*DEV, *TEST])})
    assert list_terms(result["dev"].predictions) == [["pain of the back"], ["winter cough", "wound of the hand"]]
    for split in ("dev", "test"):
        assert result[split].score.get("f1.micro") == result[split].score.get("accuracy") == 1.0
        assert result[split].steps["recall"].get("recall.micro") == 1.0
        assert result[split].steps[RANKING].get("recall.at_5") == 1.0
    assert 0.2 < task.thresholds["threshold"] <= 0.9
    assert task.score_baselines("dev")["majority"].get("f1.micro") == 0.0  # the heart, in training
    assert task.score_baselines("dev")["recall"].get("accuracy") == 0.5


def test_what_is_not_recalled_cannot_be_chosen(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    result = make_task(data, bert, num_candidates=1).evaluate({RANKING: know_all([*DEV, *TEST])})
    assert result["dev"].steps["recall"].get("recall.micro") == 2 / 3
    assert result["dev"].score.get("recall.micro") == 2 / 3
    assert result["dev"].score.get("precision.micro") == 1.0


def test_ranking_that_knows_nothing_leaves_the_order_of_recall(
    data: LabelledSet, bert: PreTrainedTokenizerBase
) -> None:
    task = make_task(data, bert)

    def indifferent(pairs: Sequence[LabelledText]) -> list[Prediction]:
        return [rate(0.5)] * len(pairs)

    result = task.evaluate({RANKING: indifferent})
    assert list_terms(result["dev"].predictions) == list_terms(task.predict_baselines(DEV)["recall"])


def test_the_threshold_is_tuned_on_dev(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    """Dev's second terms have 0.3, wrong ones less: a half would miss them, and test is decided by what dev said."""
    task = make_task(data, bert)
    dev = know_all(DEV)

    def predict(pairs: Sequence[LabelledText]) -> list[Prediction]:
        if pairs[0].text in {each.text for each in TEST}:
            return [rate(0.31 if each.pair in ("night cough", "winter cough") else 0.1) for each in pairs]
        return [rate(0.3 if each["probabilities"][SAME] >= 0.9 else 0.05) for each in dev(pairs)]

    found = task.run({RANKING: predict}, DEV)
    assert found[1]["terms"] == ["winter cough"]
    assert task.score(DEV, found).get("f1.micro") < 1.0
    thresholds = task.fit_thresholds(DEV, found)
    assert thresholds["threshold"] == pytest.approx(0.3)
    assert task.score(DEV, task.decide_all(DEV, found)).get("f1.micro") == 1.0
    chosen = task.run({RANKING: predict}, TEST)
    assert sorted(chosen[0]["terms"]) == ["night cough", "winter cough"]
    task.set_thresholds({"threshold": 0.5})
    assert len(task.run({RANKING: predict}, TEST)[0]["terms"]) == 1


def test_one_candidate_has_nothing_to_tune(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    task = make_task(data, bert, num_candidates=1)
    found = task.run({RANKING: know_all(DEV)}, DEV)
    assert task.fit_thresholds(DEV, found)["threshold"] > 1.0
    assert [len(each) for each in list_terms(task.decide_all(DEV, found))] == [1, 1]


def test_training_pairs(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    pairs = make_task(data, bert).ranking_task.data
    assert pairs.labels == (DIFFERENT, SAME)
    of_last = [(each.pair, each.label) for each in pairs.train if each.id.startswith("m3/")]
    assert of_last[:2] == [(TERMS[0], SAME), (TERMS[5], SAME)]
    assert [label for _, label in of_last[2:]] == [DIFFERENT] * 2
    assert len(pairs.train) == 4 * 3 + 1  # each mention's terms and two wrong ones
    # Dev has what recall finds, nothing else: 6 candidates of 2 mentions.
    assert len(pairs.dev) == 12 and sum(each.label == SAME for each in pairs.dev) == 3
    assert len({each.id for each in pairs.train}) == len(pairs.train)


def test_the_ranking_task_predicts_probabilities(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    task = make_task(data, bert).ranking_task
    examples = task.data.train[:2]
    rows = task.encode(examples, is_training=False)
    found = task.decode(examples, rows, [(np.array([0.0, np.log(3.0)]),), (np.array([2.0, 2.0]),)])
    assert [each["probabilities"][SAME] for each in found] == pytest.approx([0.75, 0.5])
    assert task.metric == "f1.positive"
    gold = [{"label": each.label} for each in task.data.train]  # type: ignore[union-attr]
    assert task.score(task.data.train, gold).get("f1.positive") == 1.0
    assert task.score(task.data.train, task.predict_baseline(task.data.train)).get("f1.positive") == 0.0


def test_what_cannot_be_normalised(data: LabelledSet, bert: PreTrainedTokenizerBase) -> None:
    with pytest.raises(CorpusError, match="complaints has no catalogue"):
        NormalizationTask(dataclasses.replace(data, catalogue=()), bert, OPTIONS)
    strange = dataclasses.replace(data, test=(Mention("x", "made:7", "odd", ("not a term",)),))
    result = make_task(strange, bert).evaluate({RANKING: know_all([*DEV, *strange.test])})
    assert result["test"].score.get("recall.micro") == 0.0


def test_made_mentions_from_files(tmp_path: Path, bert: PreTrainedTokenizerBase) -> None:
    """Files in CHIP-CDN's layout: recall finds most terms, but seldom first, and perfect ranking does the rest."""
    for language in ("en", "zh"):
        folder = str(write_mentions(tmp_path / language, language, {"train": 60, "dev": 60, "test": 60}))
        data = load_set(find_description("normalization", folder), strict=True)
        task = NormalizationTask(data, bert, OPTIONS)
        result = task.evaluate({RANKING: know_all([*data.dev, *data.test])})  # type: ignore[list-item]
        for split in ("dev", "test"):
            recall = result[split].steps["recall"]
            assert recall.get("recall.micro") > 0.85 and recall.get("recall.at_1") < 0.7
            assert result[split].score.get("recall.micro") == recall.get("recall.micro")
            assert task.score_baselines(split)["majority"].get("f1.micro") == 0.0


def test_a_tiny_model_learns_to_rank(bert: PreTrainedTokenizerBase, data: LabelledSet) -> None:
    """After a few seconds its own training mentions are right."""
    task = make_task(dataclasses.replace(data, dev=TRAIN, test=()), bert)
    model = make_head(task.ranking_task, bert)
    train_briefly(task.ranking_task, model, steps=60, lr=2e-3)
    model.eval()
    rank = {RANKING: lambda pairs: predict(task.ranking_task, model, pairs)}
    assert task.score_baselines("dev")["majority"].get("f1.micro") < 0.8
    assert task.evaluate(rank, splits=("dev",))["dev"].score.get("f1.micro") > 0.8
