"""Near-duplicates across the split: those that are planted are found, those that only look alike are not."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from row_files import write_rows

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.corpus.estimate import (
    RESEMBLANCE,
    SHINGLE_WORDS,
    NearDuplicates,
    count_near_duplicates,
    find_similar,
    require_both_splits,
)
from domext_ray.text.data.files import find_files
from domext_ray.text.data.sample import read_sample

WORDS = [f"word{i}" for i in range(500)]


def make_documents(number: int, length: int, seed: int = 0) -> list[list[str]]:
    """Documents of random words, which share next to no run of five."""
    draw = random.Random(seed)
    return [draw.choices(WORDS, k=length) for _ in range(number)]


def mend(words: list[str], number: int) -> str:
    """The same document with some of its words, far apart, replaced."""
    changed = list(words)
    for i in range(number):
        changed[10 + 20 * i] = "mended"
    return " ".join(changed)


def resemble(first: str, second: str) -> float:
    """Jaccard similarity of the sets of runs of words, as its definition has it."""
    sets = []
    for text in (first, second):
        words = text.lower().split()
        sets.append({" ".join(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def count(path: Path, prepare: PrepareConfig) -> NearDuplicates | None:
    return count_near_duplicates(read_sample(str(path), prepare, find_files(str(path))[0], to_end=True))


def test_similar_documents_are_those_of_the_definition() -> None:
    made = make_documents(40, 200)
    documents = [" ".join(words) for words in made]
    others = [mend(words, i % 8) for i, words in enumerate(made)]
    expected = {i for i, pair in enumerate(zip(documents, others, strict=True)) if resemble(*pair) >= RESEMBLANCE}
    assert 0 < len(expected) < 40
    assert find_similar(documents, reversed(others)) == expected
    assert find_similar(documents, []) == set()


def test_short_documents_resemble_only_themselves_and_chinese_is_read_by_character() -> None:
    assert find_similar(["No fever.", "No cough"], ["no fever", "No cough today", "cough no"]) == {0}
    assert find_similar(["* * *", "-----"], ["...", "-----"]) == {1}
    note = "患者三天前开始出现发热伴咳嗽无胸痛无呼吸困难既往体健否认药物过敏史"
    assert find_similar([note, note[::-1]], [note + "。", note[:10]]) == {0}


def test_a_planted_copy_is_counted_and_other_text_is_not(tmp_path: Path) -> None:
    path, clean = tmp_path / "notes.jsonl", tmp_path / "clean.jsonl"
    made = make_documents(1000, 100)
    rows, copies = ([{"text": change(words)} for words in made] for change in (" ".join, lambda words: mend(words, 2)))
    write_rows(clean, rows)
    write_rows(path, rows + copies)
    prepare = PrepareConfig(held_out_frac=0.1)
    found = count(path, prepare)
    assert found is not None and found.num_held_out + found.num_train == 2000
    # Split one by one, a held-out document's copy trains in nine of ten cases.
    assert found.num_similar == pytest.approx(0.9 * found.num_held_out, rel=0.05)
    found = count(clean, prepare)
    assert found is not None and found.num_similar == 0 and found.num_held_out > 50


def test_text_that_is_too_little_to_divide_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line of text\n\nand another line of text\n", encoding="utf-8")
    prepare = PrepareConfig(held_out_frac=0.01)
    assert count(path, prepare) is None


def test_a_text_for_one_split_alone_is_refused_by_its_sample(tmp_path: Path) -> None:
    """As its preparation would, but before Ray; of a part of a text nothing is said."""
    (tmp_path / "few.csv").write_text("text\nThis is the one note.\n")
    (tmp_path / "one.txt").write_text("This is the one file.\n" * 3)
    write_rows(tmp_path / "rows.jsonl", [{"text": f"This is note {i} of one of them.", "who": 7} for i in range(9)])
    for name, prepare, message in (
        ("few.csv", PrepareConfig(held_out_frac=0.001), "has 1 usable document, so the held-out split is empty"),
        ("one.txt", PrepareConfig(held_out_by="file"), "the documents are of 1 file; give two or more"),
        ("rows.jsonl", PrepareConfig(group_field="who"), "rows of 1 different 'who', .* so one of the two has none"),
    ):
        spec = str(tmp_path / name)
        sample = read_sample(spec, prepare, find_files(spec)[0])
        assert sample.is_whole
        with pytest.raises(CorpusError, match=message):
            require_both_splits(sample)
        part = replace(sample, places=[replace(sample.places[0], documents=sample.documents[:0])])
        require_both_splits(part)
