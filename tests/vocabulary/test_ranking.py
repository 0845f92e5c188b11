"""Which words are new, and which are worth most: against greedy matching by `tokenizers`, and the rounds' own rule."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from domext_ray.config.pretrain import VocabConfig
from domext_ray.text.vocabulary.family import TokenizerFamily, tokenizer_family
from domext_ray.text.vocabulary.ranking import (
    Ranking,
    choose_alphabet,
    learn_pieces,
    rank_candidates,
    rank_new_entries,
)

LETTERS = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]


def make_words(seed: int, num_words: int) -> dict[str, int]:
    """Words of a few stems and endings, the most frequent first."""
    draw = random.Random(seed)
    stems = ["".join(draw.choices("abcd", k=draw.randrange(2, 5))) for _ in range(8)]
    ends = ["".join(draw.choices("abcd", k=draw.randrange(0, 4))) for _ in range(6)]
    words = {draw.choice(stems) + draw.choice(ends): draw.randrange(1, 60) for _ in range(num_words)}
    return dict(sorted(words.items(), key=lambda item: (-item[1], item[0])))


def make_family(entries: Iterable[str]) -> TokenizerFamily:
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(["[UNK]", *entries]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer_family(tokenizer.to_str())


SPLIT = make_family([]).split


def rank(words: dict[str, int], known: set[str], min_frequency: int, whole_words: bool = False) -> Ranking:
    vocab = VocabConfig(size=10, min_frequency=min_frequency, whole_words=whole_words)
    return rank_new_entries(words, make_family([]), known, vocab)


def count_tokens(words: dict[str, int], entries: set[str]) -> int:
    return sum(count * len(SPLIT(word, entries) or "??") for word, count in words.items())


def test_words_are_split_as_by_wordpiece() -> None:
    for seed in range(5):
        draw = random.Random(seed)
        entries = {"".join(draw.choices("abc", k=draw.randrange(1, 4))) for _ in range(12)}
        entries |= {"##" + "".join(draw.choices("abc", k=draw.randrange(1, 4))) for _ in range(12)}
        vocabulary = {entry: i for i, entry in enumerate(["[UNK]", *sorted(entries)])}
        oracle = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        letters = ["abcd" if draw.random() < 0.1 else "abc" for _ in range(400)]
        words = ["".join(draw.choices(alphabet, k=draw.randrange(1, 12))) for alphabet in letters]
        results = [SPLIT(word, entries) for word in words]
        assert [pieces or ["[UNK]"] for pieces in results] == [oracle.encode(word).tokens for word in words], seed
        assert any(results) and not all(results)


def test_the_inside_of_a_word_and_a_missing_entry() -> None:
    entries = {"tha", "##lam", "##us", "##lamus", "thalamus"}
    assert SPLIT("thalamus", entries) == ["thalamus"]
    assert SPLIT("thalamus", entries, without="thalamus") == ["tha", "##lamus"]
    assert SPLIT("##lamus", entries, without="##lamus") == ["##lam", "##us"]
    assert SPLIT("##tha", entries) == []


def rank_one_by_one(words: dict[str, int], known: set[str], candidates: set[str]) -> list[str]:
    """Remove what costs the fewest tokens, count the words of the text anew, and so on."""
    left, removed = set(candidates), []
    while left:
        total = {entry: count_tokens(words, (known | left) - {entry}) for entry in sorted(left)}
        removed.append(min(total, key=lambda entry: total[entry]))
        left.remove(removed[-1])
    return removed[::-1]


def test_the_rounds_save_about_as_much_as_the_best_removal_at_each_step() -> None:
    for seed in range(4):
        words, known = make_words(seed, 40), {*LETTERS, "ab", "##cd"}
        ranking = rank(words, known, 2)
        assert ranking.entries and set(ranking.entries).isdisjoint(known)
        best = rank_one_by_one(words, known, set(ranking.entries))
        before = count_tokens(words, known)
        saved = [
            [before - count_tokens(words, known | set(order[:size])) for size in range(1, len(order) + 1)]
            for order in (ranking.entries, best)
        ]
        assert sum(saved[0]) > 0.93 * sum(saved[1]), seed
        assert saved[0][-1] == saved[1][-1] > 0


def test_an_entry_is_worth_its_occurrences_times_the_pieces_saved() -> None:
    words = {"abcd": 10, "abef": 9, "ghijkl": 7, "gh": 40, "zz": 3}
    entries = rank_candidates(words, LETTERS, ["abcd", "ghijkl", "gh", "zz", "##xy", "qq"], SPLIT)
    assert entries == ["gh", "abcd", "ghijkl", "zz"], "40, 30, 7 x 4 beside gh, 3; two are in no word"
    words["ghijkl"] = 9
    entries = rank_candidates(words, LETTERS, ["abcd", "ghijkl", "gh", "zz"], SPLIT)
    assert entries == ["gh", "ghijkl", "abcd", "zz"], "9 x 4 are more than 30"


def test_more_words_save_more_tokens() -> None:
    words, known = make_words(9, 60), set(LETTERS)
    for whole_words in (False, True):
        ranking = rank(words, known, 1, whole_words)
        totals = [count_tokens(words, known | set(ranking.entries[:size])) for size in range(len(ranking.entries) + 1)]
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] == sum(words.values()), "every word is one token in the end"
    assert set(ranking.entries) == set(words) - known


def test_the_frequency_bound_holds() -> None:
    words = {"abab": 50, "cdcd": 4}
    for whole_words in (False, True):
        ranking = rank(words, set(LETTERS), 5, whole_words)
        assert "abab" in ranking.entries and not any("c" in entry for entry in ranking.entries)


def test_unreachable_pieces_are_dropped() -> None:
    """The trainer learns `thal`, `thalam` … on the way to `thalamus`; where only that occurs, nothing produces them."""
    assert len(learn_pieces({"thalamus": 50}, 2, 100) - {*LETTERS}) > 5
    assert rank({"thalamus": 50}, set(LETTERS), 2).entries == ["thalamus"]


def test_characters_that_the_base_cannot_spell() -> None:
    words = {"αβ": 30, "a": 20, "γ": 9, "xδ": 4}
    alphabet = choose_alphabet(words, set(LETTERS), SPLIT, 5)
    assert alphabet == ["##β", "α", "γ"]
    ranking = rank(words, set(LETTERS), 5)
    assert list(ranking.alphabet) == alphabet
    assert "αβ" in ranking.entries and "γ" not in ranking.entries
    assert choose_alphabet({"aδ": 8, "a": 10_000_000}, set(LETTERS), SPLIT, 5) == [], "eight in ten million are too few"
    whole = rank(words, set(LETTERS), 5, True)
    assert whole.alphabet == [] and whole.entries == ["αβ", "γ"]


def test_words_are_fed_by_scaled_counts() -> None:
    counts = {"abcabc": 4000, "dede": 40, "fafa": 4}
    total = sum(counts.values())
    assert learn_pieces(counts, 5, 100) >= {"abcabc", "dede"}
    assert "fafa" not in learn_pieces(counts, 5, 100)
    assert learn_pieces(counts, 20, 100, max_fed=total // 20) >= {"abcabc", "dede"}
    quarter = learn_pieces(counts, 20, 100, max_fed=total // 4)
    assert "fafa" not in quarter
    assert quarter == learn_pieces(dict(reversed(counts.items())), 20, 100, max_fed=total // 4)
    assert learn_pieces({}, 1, 10) == set()


def test_the_ranking_does_not_depend_on_the_order_of_hash_tables() -> None:
    words = make_words(4, 60)
    code = (
        "import json, sys; from test_ranking import rank\n"
        "words, known = json.load(sys.stdin)\n"
        "print(rank(words, set(known), 2))"
    )
    python_path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps([words, LETTERS]),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "Ranking(" in outputs.pop()
