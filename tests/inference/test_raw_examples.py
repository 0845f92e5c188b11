"""Raw text becomes examples: words with exact places, and one sentence about a record that is none."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from finetuned_models import make_raw

from domext_ray.errors import CorpusError
from domext_ray.families.readers.examples import Choice, Entity, LabelledText, MarkedText, RawSentence, TaggedSentence
from domext_ray.families.readers.words import INVISIBLE, WordMarks, cut_words
from domext_ray.inference.examples import make_example

DOCTOR = "\U0001f469\u200d\u2695\ufe0f"


def test_words_are_cut_at_white_space_and_punctuation() -> None:
    for text, words in (
        ("Zidovudine-induced (AZT), 5mg.", "Zidovudine|-|induced|(|AZT|)|,|5mg|."),
        ("心脏病abc患者12岁。", "心|脏|病|abc|患|者|12|岁|。"),
        (f"heart\U0001f600disease\n{DOCTOR} 1\ufe0f\u20e3", f"heart|\U0001f600|disease|{DOCTOR}|1\ufe0f\u20e3"),
        ("e\u0301tude \u0301x", "e\u0301tude|\u0301x"),
        ("\u3000カタ\u00a0y\u00adz\x07", "カタ|y\u00adz|\x07"),
        ("\U00020000\U00020000a", "\U00020000|\U00020000|a"),
        ("\ufeffAn \u00adalloy\u200d, \u2060 \u200e心\u200b岁", "An|alloy|,|心|岁"),
        ("\U0001f3f4\U000e0067\U000e0062\U000e007f ", "\U0001f3f4\U000e0067\U000e0062\U000e007f"),
        (" \t\n", ""),
    ):
        assert "|".join(cut_words(text)[0]) == words


def test_words_are_joined_by_what_the_model_learned() -> None:
    state = WordMarks(inner=("-",), trailing=("%",)).to_json()
    for given, expected in ((state, ("an", "X-12", "of", "5%")), ({}, ("an", "X", "-", "12", "of", "5", "%"))):
        assert make_example("ner", {"text": "an X-12 of 5%"}, "row 1", given).words == expected  # type: ignore[union-attr]


def test_no_character_that_shows_is_lost_and_words_begin_and_end_with_one() -> None:
    generator = random.Random(0)
    signs = "ab1 .,-\n\u3000心\u0301\u200d\ufe0f\U0001f600\U0001f469\u2695\u3042\uac00\x07\u00ad\ufeff\u0645_é\x1c\x85"
    for _ in range(300):
        text = "".join(generator.choices(signs, k=generator.randrange(1, 40)))
        words, offsets = cut_words(text)
        assert [text[start:end] for start, end in offsets] == list(words)
        assert list(offsets) == sorted(offsets)
        assert not any(word[0] in INVISIBLE or word[-1] in INVISIBLE for word in words)
        shown, kept = ("".join(each for each in whole if each not in INVISIBLE) for whole in (text, "".join(words)))
        assert kept == shown


def test_every_family_reads_its_fields() -> None:
    (sentence,) = make_raw("ner", [{"id": 7, "text": " a cat.", "other": 1}])
    assert sentence == RawSentence(
        "7", "record 1", ("a", "cat", "."), ("O",) * 3, "", " a cat.", ((1, 2), (3, 6), (6, 7))
    )
    (words,) = make_raw("ner", [{"tokens": ["a", "cat"]}])
    assert words == TaggedSentence("record 1", "record 1", ("a", "cat"), ("O", "O"))
    assert make_raw("ner", [{"tokens": ["a", "cat"], "document": 7, "doc_id": "x"}]) == [words], "rows stand alone"
    pairs = make_raw(
        "classification", [{"text": "a", "pair": "b"}, {"sentence1": "a", "sentence2": "b"}, {"text": "a"}]
    )
    assert [(each.text, each.pair) for each in pairs if isinstance(each, LabelledText)] == [
        ("a", "b"),
        ("a", "b"),
        ("a", None),
    ]
    assert make_raw("regression", [{"text_a": "a", "text_b": "b"}])[0] == LabelledText(
        "record 1", "record 1", "a", "b", ""
    )
    (choice,) = make_raw("multiple_choice", [{"sent1": "c", "sent2": "s", "ending0": "x", "ending1": "y"}])
    assert choice == Choice("record 1", "record 1", "c", "s", ("x", "y"), 0)
    (choice,) = make_raw("multiple_choice", [{"context": "c", "options": None, "ending0": "x", "ending1": "y"}])
    assert choice == Choice("record 1", "record 1", "c", "", ("x", "y"), 0)
    assert make_raw("multiple_choice", [{"context": "c", "options": ["x", "y", "z"]}])[0].options[2] == "z"  # type: ignore[union-attr]


def test_arguments_of_a_relation_are_marked_or_placed() -> None:
    expected = MarkedText("record 1", "record 1", "the drug cures it", Entity(4, 8, ""), Entity(15, 17, ""), "")
    placed = {"text": "the drug cures it", "head": {"start": 4, "end": 8}, "tail": {"start": 15, "end": 17}}
    marked = {"text": "the << drug >> cures [[ it ]]"}
    mailed = {**marked, "subject": "Re: drugs"}  # a field of another meaning beside the marks
    for record in (marked, {"sentence": "the <<drug>> cures [[it]]"}, placed, mailed):
        assert make_raw("relation", [record]) == [expected]
    (gene,) = make_raw("relation", [{"text": "@GENE$ of @DISEASE$"}], {"marks": [["@GENE$"], ["@DISEASE$"]]})
    assert gene == MarkedText(
        "record 1", "record 1", "@GENE$ of @DISEASE$", Entity(0, 6, "GENE"), Entity(10, 19, "DISEASE"), ""
    )


def test_a_cell_may_spell_a_list_and_nan_is_nothing() -> None:
    (sentence,) = make_raw("ner", [{"tokens": "['a' 'cat']", "text": math.nan, "id": math.nan}])
    assert isinstance(sentence, TaggedSentence) and (sentence.id, sentence.words) == ("record 1", ("a", "cat"))
    (choice,) = make_raw("multiple_choice", [{"context": "c", "options": "['x', 'y']"}])
    assert isinstance(choice, Choice) and choice.options == ("x", "y")
    (pair,) = make_raw("classification", [{"text": "a", "pair": math.nan}])
    assert isinstance(pair, LabelledText) and pair.pair is None


def test_a_model_of_pairs_takes_no_single_text() -> None:
    (pair,) = make_raw("classification", [{"text": "a", "sentence2": "b"}], {"has_pairs": True})
    assert isinstance(pair, LabelledText) and pair.pair == "b"
    for family in ("classification", "multilabel", "regression"):
        with pytest.raises(
            CorpusError, match=r"has no field 'pair' or .* the model has learned from pairs of texts\.$"
        ):
            make_example(family, {"text": "a", "hypothesis": "b"}, "in.jsonl:2", {"has_pairs": True})


def test_a_record_that_is_none_is_named() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("ner", {"txt": "a"}, "has no field 'text'; ner needs one."),
        ("ner", {"text": " "}, "has an empty 'text'."),
        ("ner", {"text": 5}, "has no text as 'text' (5)."),
        ("nested_ner", {"text": ["a", "b"]}, "has no text as 'text' (['a', 'b'])."),
        ("qa", {"question": "a", "context": ["a", "b"]}, "has no text as 'context' (['a', 'b'])."),
        ("ner", {"tokens": ["a", " "]}, "has an empty word."),
        ("ner", {"tokens": "a cat"}, "has 'a cat' as 'tokens'; it must be a list of words."),
        ("classification", {"text": "\ud83d"}, "has half a surrogate pair in 'text' ("),
        ("classification", {"text": "a", "pair": 5}, "has no text as 'pair' (5)."),
        ("classification", "a", "is str; it must be an object with the fields of classification."),
        ("qa", {"question": "a"}, "has no field 'context'; qa needs one."),
        ("multiple_choice", {"context": "c", "options": ["x"]}, "has \"['x']\" as 'options'; give 2 texts or more."),
        ("multiple_choice", {"context": "c", "stem": 5, "options": ["x", "y"]}, "has no text as 'stem' (5)."),
        ("multiple_choice", {"context": "c", "stem": ["x"], "options": ["x", "y"]}, "has no text as 'stem' (['x'])."),
        ("relation", {"text": "a << b >> c"}, "has no [[ ]] around an argument; mark each argument once, or give"),
        ("relation", {"text": "ab", "head": {"start": 0, "end": 3}, "tail": 1}, "places among the 2 characters"),
    ]
    for family, record, reason in cases:
        with pytest.raises(CorpusError) as caught:
            make_example(family, record, "in.jsonl:2")
        assert str(caught.value).startswith("in.jsonl:2 ") and reason in str(caught.value)
