"""Text that its tokenizer cannot read: counted by token and by character, told, warned of, refused."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import save_roberta, save_xlm_roberta
from row_files import SPECIALS, save_wordpiece, write_rows

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.files import ASSETS
from domext_ray.storage import Place
from domext_ray.text.corpus.manifest import read_manifest
from domext_ray.text.corpus.rows import TokenCounts, tokenize_sentences
from domext_ray.text.corpus.shards import make_settings, prepare_corpus
from domext_ray.text.corpus.unknown import (
    check_sample,
    describe_unknown,
    find_unknown,
    warn_of_split_words,
    warn_of_unknown,
)
from domext_ray.text.data.sample import check_corpus
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

WORDS = ["the", "kidney", "of", "a", "patient", ".", "a", "##b", *"0123456789", *(f"##{i}" for i in range(10))]
PREPARE = PrepareConfig(min_document_chars=5, held_out_frac=0.1, shard_bytes=4096)
KNOWN, GREEK, LONG = "the kidney of a patient", "ο ασθενής έχει νεφρού", "acgt" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [*SPECIALS, *dict.fromkeys(WORDS)]
    return save_wordpiece(tmp_path_factory.mktemp("tokenizer"), names, do_lower_case=False)


def count(folder: Path, *sentences: str) -> dict[str, Any]:
    counts = TokenCounts()
    settings = make_settings(load_tokenizer(folder), PREPARE, 32)
    deque(tokenize_sentences(sentences, settings, counts), maxlen=0)
    return counts.pack()


def write(path: Path, *parts: tuple[str, int]) -> Path:
    lines = (f"{text} {i} ." for text, number in parts for i in range(number))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def check(path: Path, folder: Path, prepare: PrepareConfig = PREPARE) -> None:
    settings = make_settings(load_tokenizer(folder), prepare, 32)
    check_sample(check_corpus(str(path), prepare), settings, warns=True)


def test_tokens_and_the_characters_they_stand_for_are_counted(folder: Path, tmp_path: Path) -> None:
    cases: list[tuple[tuple[str, ...], tuple[int, int, int, int], list[str]]] = [
        ((KNOWN,), (5, 0, 19, 0), []),
        ((GREEK, GREEK), (8, 8, 36, 36), ["έχει", "ασθενής", "νεφρού", "ο"]),
        (("the Kidney of Kidney the",), (5, 2, 20, 12), ["Kidney"]),  # a cased tokenizer over small letters
        (("a → b ☃ a", "a☃a"), (6, 4, 8, 6), ["a☃a", "b", "→", "☃"]),  # BERT cuts at no such sign
        ((LONG, "the"), (2, 1, 163, 160), [LONG[:40]]),  # whatever its letters
        (("ab", "aba"), (3, 1, 5, 3), ["aba"]),
    ]
    for sentences, numbers, words in cases:
        found = count(folder, *sentences)
        assert tuple(found[name] for name in ("num_tokens", "num_unknown", "num_chars", "unknown_chars")) == numbers
        assert sorted(found["words"]) == sorted(words), sentences
    assert count(folder, "Kidney → Kidney")["words"] == {"Kidney": 2, "→": 1}, "the most frequent comes first"
    assert not count(save_roberta(tmp_path / "bytes"), GREEK, LONG)["num_unknown"], "all is bytes"
    found = count(save_xlm_roberta(tmp_path / "unigram"), "the kidney ☃☃", "the")  # which sees whole sentences
    assert found["num_unknown"] == 1 and found["words"] == {"☃☃": 1} and found["unknown_chars"] == 2


def test_what_is_told_of_a_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advice = "give a --base that was made for such text, or new words for it"
    refused = [
        (
            (GREEK, 60),
            r"of the tokens of --corpus '.*text.txt' \(.*% of its characters\) are unknown to the tokenizer, "
            rf"such as 'έχει', .* predict unknown tokens; {advice} .*, or train on it .* --prepare.unknown allow\.$",
        ),
        ((f"{KNOWN} {LONG}", 60), r"^1\d\.\d% of the tokens .* \(8\d\.\d% of its characters\) .* no word of more th"),
        (("The Kidney Of A Patient", 60), 'such as .*; .* is known, so write "do_lower_case": true into the token'),
    ]
    for part, message in refused:
        path = write(tmp_path / "text.txt", part)
        with pytest.raises(CorpusError, match=message):
            check(path, folder)
        check(path, folder, replace(PREPARE, unknown="allow"))
        assert "warning: " in capsys.readouterr().err, "it is told all the same"
    check(write(tmp_path / "text.txt", (KNOWN, 60), (GREEK, 5)), folder)
    told = capsys.readouterr().err
    assert told.startswith("warning: ") and "% of its characters) are unknown to the tokenizer, such as" in told
    check(write(tmp_path / "text.txt", (KNOWN, 60)), folder)
    assert not capsys.readouterr().err


def test_a_sample_refuses_what_is_beyond_doubt(folder: Path, tmp_path: Path) -> None:
    """A sample that is a part of a text may have more of what is unknown than all of it has."""
    for num_unknown, is_refused in ((80, False), (400, True)):
        path = write(tmp_path / "text.txt", *[(KNOWN, 100), (GREEK, num_unknown)] * 250)
        assert path.stat().st_size > 32 * 2**15
        if is_refused:
            with pytest.raises(CorpusError, match="of the tokens of a sample of --corpus"):
                check(path, folder)
        else:
            check(path, folder)


def test_names_are_not_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"{text} {i} .", "who": i} for i in range(30) for text in (KNOWN, "the Kidney of a Patient")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepare = replace(PREPARE, group_field="who")
    check(path, folder, prepare)
    told = capsys.readouterr().err
    assert "are unknown to the tokenizer; in small letters it is known" in told and "idney" not in told
    counts = count(folder, "the Kidney")
    assert find_unknown(counts, prepare)["words"] == [] and find_unknown(counts, PREPARE)["words"] == ["Kidney"]
    assert describe_unknown(find_unknown(counts, prepare)) == "50.00% of the tokens, 66.67% of the characters"
    assert describe_unknown(find_unknown(count(folder, "the"), PREPARE)) == "nothing"
    assert describe_unknown(find_unknown({}, PREPARE)) == "", "0.1.0 did not count"
    settings = make_settings(load_tokenizer(folder), PREPARE, 32)
    warn_of_unknown("package-docs:9", counts, settings, PREPARE)
    assert not capsys.readouterr().err, "nobody chose that text"
    warn_of_unknown("x", count(folder, "the"), make_settings(load_tokenizer(folder), prepare, 32), prepare)
    assert not capsys.readouterr().err


def test_all_of_a_text_is_counted_as_it_is_prepared(
    local_ray: None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample sees the beginnings of 32 places: what it does not see is refused by the count, or allowed."""
    path = tmp_path / "text.txt"
    lines = [[f"{text} {i} ." for i in range(number)] for text, number in ((KNOWN, 400), (GREEK, 500))] * 30
    path.write_text("\n".join(line for block in lines for line in block), encoding="utf-8")
    cache = tmp_path / "cache"
    unseen = replace(PREPARE, shard_bytes=2**16)
    says = r"^2\d\.\d% of the tokens of --corpus .* \(45\.0% of its characters\) are unknown"
    with pytest.raises(CorpusError, match=says):
        prepare_corpus(str(path), unseen, folder, 32, Place(cache))
    assert not list(cache.glob("*/manifest.json"))
    manifest = prepare_corpus(str(path), replace(unseen, unknown="allow"), folder, 32, Place(cache))
    distinct = dict.fromkeys(line for block in lines for line in block)
    assert manifest.unknown == count(folder, *distinct) == read_manifest(manifest.folder).unknown
    assert "% of the tokens" in capsys.readouterr().err
    with pytest.raises(CorpusError, match="are unknown"):  # found prepared, without leave
        prepare_corpus(str(path), unseen, folder, 32, Place(cache))


@pytest.mark.parametrize(
    ("sentence", "number", "pieces"),
    [
        ("Der Patient klagte gestern über starke Schmerzen und wurde wegen der Leberwerte aufgenommen", 100, "2.3"),
        ("Der Patient klagte gestern über starke Schmerzen und wurde wegen der Leberwerte aufgenommen", 30, ""),
        ("The patient complained of severe pain and was admitted because of raised liver enzymes", 100, ""),
        ("病人昨天说腹部剧烈疼痛，因为肝功能异常入院治疗。", 100, ""),
    ],
)
def test_text_of_another_language_is_told(
    sentence: str, number: int, pieces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = check_corpus(str(write(tmp_path / "corpus.txt", (sentence, number))), PREPARE)
    everyday = (ASSETS / "general_probe.txt").read_text(encoding="utf-8").splitlines()
    warn_of_split_words(sample, load_tokenizer(ASSETS / "general-mini"), everyday)
    told = capsys.readouterr().err
    assert bool(told) == bool(pieces)
    assert f"into {pieces} pieces on average (of everyday English 1.0)" in told or not pieces, told
