"""What is wrong is found, counted and shown, whatever a text holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuned_models import draw_example

from domext_ray.families.comparison import Compared, describe_classes, match_spans
from domext_ray.families.errors_page import write_errors_page
from domext_ray.families.family import Prediction, describe_entity
from domext_ray.families.metrics.metrics import score_classes, score_entities
from domext_ray.families.readers.examples import (
    AnnotatedText,
    Choice,
    Entity,
    LabelledText,
    Mention,
    Question,
    RawSentence,
    TaggedSentence,
)
from domext_ray.families.registry import FAMILIES
from domext_ray.storage import Place

TEXT = "Aspirin & <b>heart</b> \U0001f600 pain of $title"
GOLD = (Entity(0, 7, "Drug"), Entity(13, 18, "Organ"), Entity(25, 29, "Sign"))


def find(*entities: Entity) -> Prediction:
    return {"entities": [describe_entity(TEXT, each) for each in entities]}


def compare_spans(*predicted: Entity) -> Compared:
    return FAMILIES["nested_ner"].compare(AnnotatedText("7", "f:7", TEXT, GOLD), find(*predicted))


class Page(HTMLParser):
    """Reads a page; every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def test_spans_are_missed_spurious_or_wrong_in_label_or_boundary() -> None:
    drug, organ, sign = GOLD
    assert not compare_spans(*GOLD).mistakes
    found = compare_spans(Entity(0, 9, "Drug"), Entity(13, 18, "Sign"), Entity(30, 32, "Drug"))
    assert [(each.kind, each.gold, each.predicted) for each in found.mistakes] == [
        ("wrong boundary", "Drug", "Drug"),
        ("wrong label", "Organ", "Sign"),
        ("missed", "Sign", ""),
        ("spurious", "", "Drug"),
    ]
    assert found.mistakes[0].spans == (drug, Entity(0, 9, "Drug"))
    # Equal ends go before a longer stretch in common, and nobody is matched twice.
    assert match_spans([Entity(0, 5, "a"), Entity(0, 9, "a")], [Entity(0, 5, "b"), Entity(1, 9, "a")]) == [
        (Entity(0, 5, "a"), Entity(0, 5, "b")),
        (Entity(0, 9, "a"), Entity(1, 9, "a")),
    ]
    assert organ in found.gold and sign in found.gold


def test_the_report_has_the_figures_of_the_task() -> None:
    predictions = [[Entity(0, 9, "Drug")], [*GOLD], [Entity(13, 18, "Sign"), Entity(0, 7, "Drug"), Entity(1, 2, "New")]]
    compared = [compare_spans(*each) for each in predictions]
    report = describe_classes(compared, ["Drug", "Organ", "Sign"])
    score = score_entities([GOLD] * 3, predictions, ["Drug", "Organ", "Sign"]).values
    assert list(report["labels"]) == ["Drug", "Organ", "Sign", "New"]
    for label, figures in report["labels"].items():
        for name in ("precision", "recall", "f1"):
            assert figures[name] == pytest.approx(score[name]["per_label"][label])
    assert report["confusion"]["labels"] == ["Drug", "Organ", "Sign", "New", ""]
    assert report["confusion"]["rows"] == [
        [3, 0, 0, 0, 0],  # a wrong boundary is taken for the same one
        [0, 1, 1, 0, 1],
        [0, 0, 1, 0, 2],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0],
    ]
    assert report["mistakes"] == {"missed": 3, "spurious": 1, "wrong label": 1, "wrong boundary": 1}
    assert (report["examples"], report["wrong"]) == (3, 2)
    json.dumps(report)
    gold, predicted = ["a", "b", "b", "c"], ["a", "a", "b", "d"]
    texts = [LabelledText(str(i), "f", "t", None, label) for i, label in enumerate(gold)]
    compare = FAMILIES["classification"].compare
    pairs = [compare(text, {"label": label}) for text, label in zip(texts, predicted, strict=True)]
    report = describe_classes(pairs, ["a", "b", "c", "d"])
    values = score_classes(gold, predicted, ["a", "b", "c", "d"]).values
    assert {label: each["f1"] for label, each in report["labels"].items()} == pytest.approx(values["f1"]["per_label"])
    assert report["confusion"]["rows"] == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(("predicted", "f1"), [("b", 0.0), ("a", 1.0)])
@pytest.mark.filterwarnings("error")
def test_supports_are_counts_where_nothing_is_right_or_one_label_is_all(predicted: str, f1: float) -> None:
    texts = [LabelledText(str(i), "f", "t", None, "a") for i in range(12)]
    compared = [FAMILIES["classification"].compare(text, {"label": predicted}) for text in texts]
    row = describe_classes(compared, ["a"])["labels"]["a"]
    assert row == {"precision": f1, "recall": f1, "f1": f1, "support": 12, "predicted": 12 * f1}
    assert type(row["support"]) is int


def test_every_family_has_its_mistakes() -> None:
    question = Question("1", "f", "who", "a cat sat", (Entity(2, 5, ""),))
    choice = Choice("1", "f", "the cat", "can", ("run", "write"), 0)
    cat = {"answer": "cat", "start": 2, "end": 5}
    cases: list[tuple[str, Any, Any, list[str]]] = [
        ("qa", question, cat, []),
        ("qa", question, {"answer": "a cat", "start": 0, "end": 5}, []),  # SQuAD leaves articles out
        ("qa", question, {"answer": "cat sat", "start": 2, "end": 9}, ["wrong boundary"]),
        ("qa", question, {"answer": "sat", "start": 6, "end": 9}, ["wrong"]),
        ("qa", question, {"answer": None}, ["missed"]),
        ("qa", Question("2", "f", "who", "a cat", ()), cat, ["spurious"]),
        ("multiple_choice", choice, {"answer": 0}, []),
        ("multiple_choice", choice, {"answer": 1}, ["wrong"]),
        (
            "normalization",
            Mention("1", "f", "pain", ("ache", "hurt")),
            {"terms": ["ache", "harm"]},
            ["missed", "spurious"],
        ),
        ("ner", TaggedSentence("1", "f", ("a", "cat"), ("O", "B-x")), {"tags": ["O", "O"]}, ["missed"]),
        (
            "ner",
            RawSentence("1", "f", ("a", "cat"), ("O", "B-x"), "", " a  cat", ((1, 2), (4, 7))),
            {"tags": ["O", "B-x"]},
            [],
        ),
        (
            "relation_extraction",
            draw_example("relation_extraction", 0, np.random.default_rng(0)),
            {"relations": []},
            ["missed"],
        ),
        ("regression", LabelledText("1", "f", "a", "b", "", 2.0), {"value": 1.5}, []),
    ]
    for family, example, prediction, kinds in cases:
        found = FAMILIES[family].compare(example, prediction)
        assert [each.kind for each in found.mistakes] == kinds, example


def write(path: Path, family: str, examples: list[Any], predictions: list[Any], **options: Any) -> str:
    compared = [FAMILIES[family].compare(*pair) for pair in zip(examples, predictions, strict=True)]
    write_errors_page(Place(path), compared, title="clinic on <notes>", **options)
    page = path.read_text(encoding="utf-8")
    Page(page)
    assert not re.search(r"""(src|href)=["']?(http|//)""", page), "it needs no network"
    return page


def test_the_page_shows_texts_as_they_are(tmp_path: Path) -> None:
    text = AnnotatedText('"><script>alert(1)</script>', "f:7", TEXT, GOLD)
    found = find(Entity(0, 9, "Drug"), Entity(13, 18, "<Sign>"))
    page = write(
        tmp_path / "errors.html", "nested_ner", [text], [found], labels=["Drug"], scores=[("f1.micro", "0.000")]
    )
    assert "<script>alert" not in page and "<b>heart" not in page and "$title" in page
    shown = "".join(Page(page).texts)
    assert "Aspirin ✗ Drug" not in shown and "1 of 1 examples (100.0%) are predicted wrongly; all are shown" in shown
    assert "Aspirin" in shown and "\U0001f600" in shown and "✗ <Sign>" in shown
    assert {"missed", "wrong boundary", "wrong label"} <= set(Page(page).texts)


def test_long_texts_are_cut_around_their_mistakes_and_most_of_many_are_left_out(tmp_path: Path) -> None:
    long = "x " * 2000 + "heart" + " y" * 2000
    gold = (Entity(4000, 4005, "Organ"),)
    texts = [AnnotatedText(str(i), f"f:{i}", long, gold) for i in range(50)]
    page = write(tmp_path / "errors.html", "nested_ner", texts, [find()] * 50, max_errors=5)
    assert page.count("<article") == 5 and len(page) < 40_000
    shown = "".join(Page(page).texts)
    assert "50 of 50 examples (100.0%) are predicted wrongly; 5 of them are shown below." in shown
    assert "… " in shown and "heart✗ Organ" in shown
    assert [int(each) for each in re.findall(r">(\d+) · f:", page)] == [0, 10, 20, 30, 40]


def test_gold_outside_of_a_long_text_shows_its_end(tmp_path: Path) -> None:
    text = AnnotatedText("1", "f:1", "x " * 400 + "the end", (), misplaced=(Entity(9000, 9005, "Organ"),))
    assert "x the end</p>" in write(tmp_path / "errors.html", "nested_ner", [text], [find()])


def test_a_page_without_mistakes_says_so(tmp_path: Path) -> None:
    page = write(tmp_path / "errors.html", "nested_ner", [AnnotatedText("1", "f", TEXT, GOLD)], [find(*GOLD)])
    assert "None of 1 examples is predicted wrongly." in page and "<article" not in page
    values = [LabelledText(str(i), "f", "t", None, "", float(i)) for i in range(4)]
    page = write(tmp_path / "values.html", "regression", values, [{"value": each} for each in (0.0, 3.0, 2.5, 3.0)])
    assert "Farthest off" in page and re.findall(r">(\d) · f<", page) == ["1", "2"]


def test_a_page_of_a_set_of_people_quotes_nothing(tmp_path: Path) -> None:
    example = LabelledText("1", "f:1", "the words of one", None, "yes")
    compared = [FAMILIES["classification"].compare(example, {"label": "no"})]
    report = write_errors_page(Place(tmp_path / "private.html"), compared, title="made", is_private=True)
    page = (tmp_path / "private.html").read_text()
    assert report["wrong"] == 1 and "the words" not in page and "No example is shown" in page
    write_errors_page(Place(tmp_path / "open.html"), compared, title="made")
    page = (tmp_path / "open.html").read_text()
    assert "the words" in page and "No example is shown" not in page
