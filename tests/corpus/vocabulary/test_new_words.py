"""Which words are new, and which are worth most: against greedy matching by `tokenizers` and a plain elimination."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models

from domext_ray.corpus.vocabulary.new_words import (
    choose_alphabet,
    find_longest,
    learn_pieces,
    rank_entries,
    split_greedily,
)

LETTERS = [*string.ascii_lowercase, *(f"##{each}" for each in string.ascii_lowercase)]


def make_words(seed: int, num_words: int) -> dict[str, int]:
    """Words of a few stems and endings, the most frequent first."""
    draw = random.Random(seed)
    stems = ["".join(draw.choices("abcd", k=draw.randrange(2, 5))) for _ in range(8)]
    ends = ["".join(draw.choices("abcd", k=draw.randrange(0, 4))) for _ in range(6)]
    words = {draw.choice(stems) + draw.choice(ends): draw.randrange(1, 60) for _ in range(num_words)}
    return dict(sorted(words.items(), key=lambda item: (-item[1], item[0])))


def count_tokens(words: dict[str, int], entries: set[str]) -> int:
    longest = find_longest(entries)
    return sum(count * len(split_greedily(word, entries, longest) or "??") for word, count in words.items())


@pytest.mark.parametrize("seed", range(5))
def test_words_are_split_as_by_wordpiece(seed: int) -> None:
    draw = random.Random(seed)
    entries = {"".join(draw.choices("abc", k=draw.randrange(1, 4))) for _ in range(12)}
    entries |= {"##" + "".join(draw.choices("abc", k=draw.randrange(1, 4))) for _ in range(12)}
    vocabulary = {each: i for i, each in enumerate(["[UNK]", *sorted(entries)])}
    oracle = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words = [
        "".join(draw.choices("abcd" if draw.random() < 0.1 else "abc", k=draw.randrange(1, 12))) for _ in range(400)
    ]
    results = [split_greedily(each, entries, find_longest(entries)) for each in words]
    assert [each or ["[UNK]"] for each in results] == [oracle.encode(each).tokens for each in words]
    assert any(results) and not all(results)


def test_the_inside_of_a_word_and_a_missing_entry() -> None:
    entries = {"tha", "##lam", "##us", "##lamus", "thalamus"}
    assert split_greedily("thalamus", entries, 8) == ["thalamus"]
    assert split_greedily("thalamus", entries, 8, without="thalamus") == ["tha", "##lamus"]
    assert split_greedily("##lamus", entries, 8, without="##lamus") == ["##lam", "##us"]
    assert split_greedily("##tha", entries, 8) is None


def rank_plainly(words: dict[str, int], known: set[str], candidates: set[str]) -> list[str]:
    """The elimination's rule, everything computed anew in each step."""
    left, removed = set(candidates), []
    while left:
        entries = known | left
        longest = find_longest(entries)
        usage = dict.fromkeys(left, 0)
        for word, count in words.items():
            for piece in split_greedily(word, entries, longest) or []:
                if piece in left:
                    usage[piece] += count
        costs = {each: usage[each] * (len(split_greedily(each, entries, longest, each) or "??") - 1) for each in left}
        removed.append(min(sorted(left, reverse=True), key=lambda each: costs[each]))
        left.remove(removed[-1])
    return removed[::-1]


@pytest.mark.parametrize("seed", range(6))
def test_the_ranking_is_that_of_a_plain_elimination(seed: int) -> None:
    words = make_words(seed, 40)
    known = {*LETTERS, "ab", "##cd"}
    ranking = rank_entries([*words], [*words.values()], known, 10, 2, False)
    assert ranking.entries and set(ranking.entries).isdisjoint({*known, *ranking.unreachable})
    assert list(ranking.entries) == rank_plainly(words, known, set(ranking.entries))


@pytest.mark.parametrize("whole_words", [False, True])
def test_more_words_save_more_tokens(whole_words: bool) -> None:
    words = make_words(9, 60)
    known = set(LETTERS)
    ranking = rank_entries([*words], [*words.values()], known, 10, 1, whole_words)
    totals = [count_tokens(words, known | set(ranking.entries[:size])) for size in range(len(ranking.entries) + 1)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] == sum(words.values()), "every word is one token in the end"
    if whole_words:
        assert set(ranking.entries) == set(words) - known and not ranking.unreachable


def test_the_frequency_bound_holds() -> None:
    words = {"abab": 50, "cdcd": 4}
    for whole_words in (False, True):
        ranking = rank_entries([*words], [*words.values()], set(LETTERS), 10, 5, whole_words)
        assert "abab" in ranking.entries and not any("c" in each for each in ranking.entries)


def test_unreachable_pieces_are_dropped() -> None:
    """The trainer learns `thal`, `thalam` … on the way to `thalamus`; where only that occurs, nothing produces them."""
    ranking = rank_entries(["thalamus"], [50], set(LETTERS), 10, 2, False)
    assert ranking.entries == ("thalamus",)
    assert len(ranking.unreachable) >= 5 and all("thalamus".find(each.strip("#")) >= 0 for each in ranking.unreachable)


def test_characters_that_the_base_cannot_spell() -> None:
    words = {"αβ": 30, "a": 20, "γ": 9, "xδ": 4}
    alphabet = choose_alphabet([*words], [*words.values()], set(LETTERS), 5)
    assert alphabet == ["##β", "α", "γ"]
    ranking = rank_entries([*words], [*words.values()], set(LETTERS), 10, 5, False)
    assert list(ranking.alphabet) == alphabet
    assert "αβ" in ranking.entries and "γ" not in ranking.entries
    assert choose_alphabet(["aδ", "a"], [8, 10_000_000], set(LETTERS), 5) == [], "eight in ten million are too few"
    whole = rank_entries([*words], [*words.values()], set(LETTERS), 10, 5, True)
    assert whole.alphabet == () and whole.entries == ("αβ", "γ")


def test_words_are_fed_by_scaled_counts() -> None:
    counts = {"abcabc": 4000, "dede": 40, "fafa": 4}
    assert learn_pieces(counts, 1.0, 5, 100) >= {"abcabc", "dede"}
    assert "fafa" not in learn_pieces(counts, 1.0, 5, 100)
    assert learn_pieces(counts, 0.05, 20, 100) >= {"abcabc", "dede"}
    assert "fafa" not in learn_pieces(counts, 0.25, 20, 100)
    assert learn_pieces(counts, 0.25, 20, 100) == learn_pieces(dict(reversed(counts.items())), 0.25, 20, 100)
    assert learn_pieces({}, 1.0, 1, 10) == set()


def test_the_ranking_does_not_depend_on_the_order_of_hash_tables() -> None:
    words = make_words(4, 60)
    code = (
        "import json, sys; from domext_ray.corpus.vocabulary.new_words import rank_entries\n"
        "words, known = json.load(sys.stdin)\n"
        "print(rank_entries([*words], [*words.values()], set(known), 10, 2, False))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([words, LETTERS]),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "Ranking(" in outputs.pop()
