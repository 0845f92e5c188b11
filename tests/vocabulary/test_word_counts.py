"""Word counts: those of the text itself, whatever the number of tasks, in bounded memory."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from row_files import SPECIALS, make_wordpiece
from tokenizers import Tokenizer

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.runtime import tasks
from domext_ray.storage import Place
from domext_ray.text.data.documents import read_documents
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.vocabulary import word_counts
from domext_ray.text.vocabulary.word_counts import keep_counts

PREPARE = PrepareConfig(min_document_chars=5)
SMALL = replace(PREPARE, shard_bytes=4096)
FRAGMENTS = (
    "The THE the Zoë zoe\u0308 thalamus Thalamus's co-operate 3.14 10µg α-synuclein naïve≠x ￥5 end. (x) [SEP] [UNK] "
    "##us 丘脑是大脑 a丘b İstanbul ſtraße ﬁbre e\u0301\u0323x 한국어 … “quoted” — x\u200dy \u00a0 ±5 °C fi\u00adbre "
    "\u0301lone"
).split(" ")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(3)
    lines = [" ".join(draw.choices(FRAGMENTS, k=draw.randrange(3, 30))) for _ in range(600)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def serialise(**options: bool) -> str:
    return make_wordpiece([*SPECIALS, "a"], **options).backend_tokenizer.to_str()


def count(spec: Path | str, tokenizer_json: str, prepare: PrepareConfig = PREPARE) -> dict[str, int]:
    cache = Path(spec).parent / "cache"
    with keep_counts(resolve_sources(str(spec), prepare), prepare, tokenizer_json, Place(cache)) as counts:
        return counts


def test_counts_are_those_of_the_text(local_ray: None, text: Path) -> None:
    sources = resolve_sources(str(text), PREPARE)
    assert len(resolve_sources(str(text), SMALL).tasks) > 5
    documents = [content for task in sources.tasks for content in read_documents(task, PREPARE, Dropped())]
    for options in ({}, {"do_lower_case": False}, {"tokenize_chinese_chars": False}):
        tokenizer = Tokenizer.from_str(serialise(**options))
        expected: Counter[str] = Counter()
        for document in documents:
            words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(document))
            expected.update(word for word, _ in words)
        for prepare in (PREPARE, SMALL):
            found = count(text, serialise(**options), prepare)
            assert found == expected, options
            assert [*found] == sorted(expected, key=lambda word: (-expected[word], word))
        assert expected["丘脑是大脑" if "tokenize_chinese_chars" in options else "丘"]


def test_counting_goes_on_with_its_finished_parts(
    local_ray: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources, whole, shown = resolve_sources(str(text), SMALL), count(text, serialise(), SMALL), itertools.count(1)

    def keep() -> AbstractContextManager[dict[str, int]]:
        return keep_counts(sources, SMALL, serialise(), Place(tmp_path / "cache"))

    def interrupt(*_: object, **__: object) -> None:
        if next(shown) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tasks._Progress, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt), keep():
            pass
    (work,) = (tmp_path / "cache").glob("[!.]*")
    assert len(list(work.glob("parts/*.json"))) >= 3
    with pytest.raises(KeyboardInterrupt), keep() as again:
        raise KeyboardInterrupt  # while the words are ranked
    assert again == whole
    num_kept = re.search(r"^counting words: (\d+) parts were finished before", capsys.readouterr().err, re.M)
    assert num_kept and int(num_kept[1]) >= 3
    with keep() as again:
        assert again == whole
    assert f"{len(sources.tasks)} parts were finished before" in capsys.readouterr().err
    assert list((tmp_path / "cache").glob("[!.]*")) == []


def test_words_beyond_the_limit_are_left_out(local_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(f"short {'x' * 100} {'y' * 101} {'y' * 101} {'z' * 300}.\n")
    assert count(path, serialise()) == {"short": 1, "x" * 100: 1, ".": 1}


def test_the_driver_keeps_a_bounded_number_of_words(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    lines = [f"often seldom{i} once{i}{' twice' * 2}{' often' * (i % 3)}" for i in range(400)]
    path.write_text("\n".join(lines))
    small = replace(PREPARE, shard_bytes=1024)
    monkeypatch.setattr(word_counts, "MAX_WORDS", 100)
    found = count(path, serialise(), small)
    assert len(found) <= 100 and [*found.items()][:2] == [("twice", 800), ("often", 400 + 399)]
    num_forgotten = sum(len(line.split()) for line in lines) - sum(found.values())
    assert f"{num_forgotten:,} occurrences of rare words were forgotten" in capsys.readouterr().err


def test_corpora_that_cannot_be_counted(local_ray: None, tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n\n")
    with pytest.raises(CorpusError, match="has no usable word"):
        count(tmp_path / "blank.txt", serialise())
