"""Figures equal seqeval's, scikit-learn's, scipy's and SQuAD's written out; intervals cover; differences are found."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.metrics import precision_score as seqeval_precision
from seqeval.metrics import recall_score as seqeval_recall
from seqeval.scheme import IOB2
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, precision_recall_fscore_support

from domext_ray.families.metrics.answer_metrics import segment_cjk
from domext_ray.families.metrics.metrics import (
    score_answers,
    score_classes,
    score_entities,
    score_terms,
    score_triples,
    score_values,
)
from domext_ray.families.metrics.scores import Score, compare_scores
from domext_ray.families.readers.examples import Entity, read_tags

TAGS = ("O", "B-Drug", "I-Drug", "B-Gene", "I-Gene", "B-Cell", "I-Cell")
LABELS = ("none", "up", "down", "same")


def draw_tags(rng: np.random.Generator, num_sentences: int) -> list[list[str]]:
    """Random tags: I- often stands where strict IOB2 forbids it."""
    return [[str(each) for each in rng.choice(TAGS, size=rng.integers(1, 12))] for _ in range(num_sentences)]


def disturb(rng: np.random.Generator, values: list[str], choices: tuple[str, ...], frac: float) -> list[str]:
    return [str(rng.choice(choices)) if rng.random() < frac else each for each in values]


def test_tags_score_as_in_seqeval_strict() -> None:
    for seed in range(8):
        rng = np.random.default_rng(seed)
        gold = draw_tags(rng, 40)
        predicted = [disturb(rng, each, TAGS, 0.3) for each in gold]
        score = score_entities(*([*map(read_tags, side)] for side in (gold, predicted)), ("Drug", "Gene", "Cell"))
        functions = {"f1": seqeval_f1, "precision": seqeval_precision, "recall": seqeval_recall}
        for (name, function), average in itertools.product(functions.items(), ("micro", "macro")):
            expected = function(gold, predicted, average=average, mode="strict", scheme=IOB2, zero_division=0)
            assert score.get(f"{name}.{average}") == pytest.approx(expected, abs=1e-12)
        by_type = seqeval_f1(gold, predicted, average=None, mode="strict", scheme=IOB2, zero_division=0)
        per_label = score.values["f1"]["per_label"]
        assert [per_label[each] for each in ("Cell", "Drug", "Gene")] == pytest.approx(list(by_type))


def test_entities_need_boundaries_and_type() -> None:
    gold = [[Entity(0, 4, "A"), Entity(0, 2, "A"), Entity(6, 8, "B")], []]
    predicted = [[Entity(0, 4, "A"), Entity(0, 2, "B"), Entity(6, 9, "B"), Entity(0, 4, "A")], [Entity(0, 1, "C")]]
    score = score_entities(gold, predicted, ("A", "B", "D"))
    assert score.get("precision.micro") == 1 / 4
    assert score.get("recall.micro") == 1 / 3
    assert score.get("f1.per_label.A") == pytest.approx(2 / 3)
    assert score.values["f1"]["per_label"] == {"A": pytest.approx(2 / 3), "B": 0.0, "D": 0.0, "C": 0.0}
    assert score.get("f1.macro") == pytest.approx((2 / 3 + 0 + 0) / 3)  # D occurs nowhere
    nothing = score_entities(gold, [[], []], ("A", "B"))
    assert nothing.get("precision.micro") == nothing.get("f1.micro") == 0.0


def test_classes_score_as_in_scikit_learn() -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        gold = [str(each) for each in rng.choice(LABELS[: 2 + seed % 3], size=60)]
        predicted = disturb(rng, gold, LABELS, 0.5)
        score = score_classes(gold, predicted, LABELS, negative="none", positive="up")
        assert score.get("accuracy") == accuracy_score(gold, predicted)
        assert score.get("matthews") == pytest.approx(matthews_corrcoef(gold, predicted))
        kept = LABELS[1:]
        for average in ("micro", "macro"):
            labels = [each for each in kept if average == "micro" or each in {*gold, *predicted}]
            expected = precision_recall_fscore_support(gold, predicted, labels=labels, average=average, zero_division=0)
            found = [score.get(f"{name}.{average}") for name in ("precision", "recall", "f1")]
            assert found == pytest.approx(list(expected[:3]))
        by_label = f1_score(gold, predicted, labels=list(LABELS), average=None, zero_division=0)
        assert list(score.values["f1"]["per_label"].values()) == pytest.approx(list(by_label))
        binary = f1_score([each == "up" for each in gold], [each == "up" for each in predicted])
        assert score.get("f1.positive") == pytest.approx(binary)


def test_without_a_negative_class_micro_f1_is_accuracy_and_without_an_example_there_is_none() -> None:
    score = score_classes(["a", "b", "b"], ["a", "b", "a"], ("a", "b"))
    assert score.get("f1.micro") == pytest.approx(score.get("accuracy")) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no example"):
        score_classes([], [], ("a",))
    constant = score_classes(["a", "b", "b"], ["b", "b", "b"], ("a", "b"))
    assert constant.get("matthews") == 0.0


def test_values_score_as_in_scipy() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, size=80).astype(float)  # with ties
    predicted = gold + rng.normal(size=80).round(1)
    score = score_values(gold.tolist(), predicted.tolist())
    assert score.get("pearson") == pytest.approx(pearsonr(gold, predicted)[0])
    assert score.get("spearman") == pytest.approx(spearmanr(gold, predicted)[0])
    constant = score_values([1.0, 2.0, 4.0], [3.3, 3.3, 3.3])
    assert constant.values == {"pearson": 0.0, "spearman": 0.0}
    low, high = score.describe()["intervals"]["spearman"]
    assert low < score.get("spearman") < high


def literal_squad(answers: list[str], predicted: str) -> tuple[float, float]:
    """Evaluate-v2.0.py as its paper describes it."""

    def words(text: str) -> list[str]:
        letters = [each for each in text.lower() if each not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"]
        return [each for each in "".join(letters).split() if each not in ("a", "an", "the")]

    exacts, f1s = [], []
    for answer in [each for each in answers if words(each)] or [""]:
        own, found = words(answer), words(predicted)
        exacts.append(float(own == found))
        same = sum((Counter(own) & Counter(found)).values())
        if not own or not found:
            f1s.append(float(own == found))
        elif same == 0:
            f1s.append(0.0)
        else:
            precision, recall = same / len(found), same / len(own)
            f1s.append(2 * precision * recall / (precision + recall))
    return max(exacts), max(f1s)


def test_answers_score_as_in_squad() -> None:
    rng = np.random.default_rng(3)
    words = ["the", "A", "river,", "River", "two", "2", "hills.", "an", "bank", "-"]

    def draw() -> str:
        return " ".join(rng.choice(words, size=rng.integers(0, 5)))

    gold = [[draw() for _ in range(rng.integers(0, 4))] for _ in range(300)]
    gold = [[each for each in answers if each] for answers in gold]
    predicted = [draw() for _ in gold]
    score = score_answers(gold, predicted, "squad_v2")
    expected = np.array([literal_squad(*pair) for pair in zip(gold, predicted, strict=True)])
    assert [score.get("exact"), score.get("f1")] == pytest.approx(list(expected.mean(axis=0)))
    has_answer = np.array([bool(each) for each in gold])
    for name, kind in (("has_answer", has_answer), ("no_answer", ~has_answer)):
        found = [score.get(f"{name}.exact"), score.get(f"{name}.f1")]
        assert found == pytest.approx(list(expected[kind].mean(axis=0)))


def test_a_question_without_an_answer_wants_none() -> None:
    score = score_answers([[], [], ["the mill"]], ["", "mill", "mill"], "squad_v2")
    assert (score.get("exact"), score.get("no_answer.f1"), score.get("has_answer.exact")) == (2 / 3, 0.5, 1.0)
    assert "no_answer" not in score_answers([["mill"]], ["mill"], "squad_v2").values


def test_an_answer_of_articles_only_counts_in_the_first_squad() -> None:
    for rule, exact, f1 in (("squad_v1", 1.0, 0.0), ("squad_v2", 1.0, 1.0)):
        score = score_answers([["the"]], [""], rule)
        assert (score.get("exact"), score.get("f1")) == (exact, f1)
    assert score_answers([["the", "mill"]], ["The"], "squad_v1").get("exact") == 1.0
    assert score_answers([["the", "mill"]], ["The"], "squad_v2").get("exact") == 0.0


def test_answers_score_as_in_cmrc() -> None:
    for answers, predicted, exact, f1 in (
        (["红色的小船"], "红色的小船。", 1.0, 1.0),  # punctuation is dropped
        (["红色的小船"], "小船", 0.0, 4 / 7),  # the longest run: 2 of 2 and of 5
        (["红小船"], "红大船", 0.0, 2 / 6),  # a run of one, although two characters are shared
        (["ABC公司"], "abc公司", 1.0, 1.0),
        (["3.5 km的路"], "3.5 km", 0.0, 4 / 6),  # a number is one segment
        (["东岸", "西岸"], "西岸", 1.0, 1.0),
        ([], "", 1.0, 1.0),
        ([], "船", 0.0, 0.0),
    ):
        score = score_answers([answers], [predicted], "cmrc")
        assert score.get("exact") == exact
        assert score.get("f1") == pytest.approx(f1)


def test_english_in_chinese_is_cut_as_nltk_does() -> None:
    for text, segments in (
        ("她说it isn't a co-op。", "她|说|it|is|n't|a|coop"),
        ("Dr. Li cannot wait. He's gone.", "dr.|li|can|not|wait|.|he|'s|gone|."),
        ('J. K.的"old mill", 1,200 km (3.5%)', "j.|k|.|的|``|old|mill|''|,|1,200|km|(|3.5|%|)"),
        ("They'll go... we're in the U.S. now!", "they|'ll|go|...|we|'re|in|the|u.s.|now|!"),
        ('(It ends.) "So," he said', "(|it|ends|.|)|``|so|,|''|he|said"),
        ("the dogs' tails; cats wanna eat @ 5", "the|dogs|'|tails|;|cats|wan|na|eat|@|5"),
    ):
        assert segment_cjk(text) == segments.split("|")


def test_triples() -> None:
    gold = [{("a", "treats", "b"), ("c", "treats", "d")}, set()]
    score = score_triples(gold, [[("a", "treats", "b"), ("b", "treats", "a")], [("x", "y", "z")]])
    assert [score.get(f"{name}.micro") for name in ("f1", "precision", "recall")] == pytest.approx([0.4, 1 / 3, 0.5])
    assert score.values["f1"]["per_label"] == {"treats": 0.5, "y": 0.0}
    marked = score_triples(
        [{("《Iron》", "treats", "B"), ("x", "Y", "z")}], [[("iron", "treats", "b"), ("x", "y", "z")]]
    )
    assert marked.get("precision.micro") == marked.get("recall.micro") == 0.5  # a predicate keeps its case


def test_terms() -> None:
    gold = [{"flu"}, {"cough", "fever"}, {"ache"}]
    predicted = [["flu"], ["fever"], ["itch"]]
    ranked = [["flu", "cold"], ["fever", "flu", "rash", "itch", "cough"], ["itch", "ache"]]
    score = score_terms(gold, predicted, ranked=ranked)
    assert score.get("accuracy") == pytest.approx(1 / 3)
    assert score.get("f1.micro") == pytest.approx(2 * 2 / (3 + 4))
    assert score.values["recall"] == {"micro": 0.5, "at_1": 0.5, "at_5": 1.0}


def make_scores() -> list[Score]:
    rng = np.random.default_rng(5)
    gold = [str(each) for each in rng.choice(LABELS, size=50)]
    tags = draw_tags(rng, 50)
    return [
        score_classes(gold, disturb(rng, gold, LABELS, 0.4), LABELS, negative="none", positive="up"),
        score_entities(
            [*map(read_tags, tags)],
            [read_tags(disturb(rng, each, TAGS, 0.3)) for each in tags],
            ("Drug", "Gene", "Cell", "Never"),
        ),
        score_values(rng.normal(size=50).tolist(), rng.normal(size=50).tolist()),
        score_answers([[], ["a mill"]] * 25, ["mill", "", "", "old mill", "mill"] * 10, "squad_v2"),
        score_terms([{"a"}] * 50, [["a"], ["b"]] * 25, ranked=[["a", "b"]] * 50),
    ]


def test_every_score_describes_itself() -> None:
    for score in make_scores():
        described = pickle.loads(pickle.dumps(score)).describe(num_resamples=200, seed=1)
        assert described == score.describe(num_resamples=200, seed=1)
        assert described != score.describe(num_resamples=200, seed=2)
        assert described["examples"] == 50
        for path, (low, high) in described["intervals"].items():
            assert low <= score.get(path) <= high, path


def test_resampled_figures_are_those_of_the_resampled_examples() -> None:
    rng = np.random.default_rng(2)
    gold = [str(each) for each in rng.choice(LABELS, size=30)]
    predicted = disturb(rng, gold, LABELS, 0.5)
    drawn = rng.integers(30, size=30)
    counts = np.bincount(drawn, minlength=30)[None].astype(float)
    score = score_classes(gold, predicted, LABELS, negative="none")
    again = score_classes([gold[i] for i in drawn], [predicted[i] for i in drawn], LABELS, negative="none")
    figures = score.compute_drawn(counts)
    assert figures["f1"]["macro"][0] == pytest.approx(again.get("f1.macro"))
    assert figures["matthews"][0] == pytest.approx(again.get("matthews"))
    values = rng.integers(0, 9, size=30) * 1.0, rng.normal(size=30)
    correlations = score_values(*(each.tolist() for each in values)).compute_drawn(counts)
    assert correlations["pearson"][0] == pytest.approx(pearsonr(*(each[drawn] for each in values))[0])
    assert correlations["spearman"][0] == pytest.approx(spearmanr(*(each[drawn] for each in values))[0])


def test_the_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(11)
    truth, covered = 0.7, 0
    for seed in range(150):
        predicted = ["a" if is_right else "b" for is_right in rng.random(150) < truth]
        score = score_classes(["a"] * 150, predicted, ("a", "b"))
        low, high = score.describe(num_resamples=300, seed=seed)["intervals"]["accuracy"]
        covered += low <= truth <= high
    assert 0.90 <= covered / 150 <= 0.99


def test_a_real_difference_is_found_and_chance_is_not() -> None:
    rng = np.random.default_rng(4)
    gold = [str(each) for each in rng.choice(LABELS, size=800)]
    base = score_classes(gold, disturb(rng, gold, LABELS, 0.30), LABELS)
    equal = score_classes(gold, disturb(rng, gold, LABELS, 0.30), LABELS)
    worse = score_classes(gold, disturb(rng, gold, LABELS, 0.45), LABELS)
    found = compare_scores(base, worse, ["f1.macro"])["f1.macro"]
    assert found.value == pytest.approx(worse.get("f1.macro") - base.get("f1.macro"))
    assert found.low < found.value < found.high < 0 and found.p_value is None, "one restart tells no chance"
    assert not compare_scores(base, equal, ["f1.macro"])["f1.macro"].is_apart
    same = compare_scores(base, base, ["f1.macro"])["f1.macro"]
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="800 examples, the other 2"):
        compare_scores(base, score_classes(["up"] * 2, ["up"] * 2, LABELS), ["accuracy"])


def test_pairing_sees_what_separate_intervals_hide() -> None:
    """Two models that err on nearly the same examples."""
    gold, first = ["a"] * 400, ["a", "b"] * 200
    second = ["a" if i < 24 else each for i, each in enumerate(first)]
    a, b = score_classes(gold, first, ("a", "b")), score_classes(gold, second, ("a", "b"))
    assert a.describe()["intervals"]["accuracy"][1] > b.describe()["intervals"]["accuracy"][0]
    assert compare_scores(a, b, ["accuracy"])["accuracy"].low > 0


def test_false_alarms_are_as_rare_as_the_level_says() -> None:
    rng, alarms = np.random.default_rng(9), 0
    for seed in range(100):
        gold = ["a"] * 120
        a, b = (score_classes(gold, disturb(rng, gold, ("b",), 0.3), ("a", "b")) for _ in range(2))
        alarms += compare_scores(a, b, ["accuracy"], num_resamples=400, seed=seed)["accuracy"].is_apart
    assert alarms / 100 <= 0.12
