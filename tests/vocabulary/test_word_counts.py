"""Word counts: those of the text itself, whatever the number of tasks, in bounded memory."""

from __future__ import annotations

import random
import re
from collections import Counter
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
from domext_ray.text.vocabulary.word_counts import forget_rarest, keep_counts

PREPARE = PrepareConfig(min_document_chars=5)
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
    documents = [content for task in sources.tasks for content in read_documents(task, PREPARE, Dropped())]
    for options in ({}, {"do_lower_case": False}, {"tokenize_chinese_chars": False}):
        tokenizer = Tokenizer.from_str(serialise(**options))
        expected: Counter[str] = Counter()
        for document in documents:
            words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(document))
            expected.update(word for word, _ in words)
        found = count(text, serialise(**options))
        assert found == expected, options
        assert [*found] == sorted(expected, key=lambda word: (-expected[word], word))
        assert expected["丘脑是大脑" if "tokenize_chinese_chars" in options else "丘"]


def test_counts_do_not_depend_on_the_tasks(local_ray: None, text: Path) -> None:
    small = replace(PREPARE, shard_bytes=4096)
    assert len(resolve_sources(str(text), small).tasks) > 5
    assert [*count(text, serialise()).items()] == [*count(text, serialise(), small).items()]


def test_counting_goes_on_with_its_finished_parts(
    local_ray: None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(PREPARE, shard_bytes=4096)
    sources = resolve_sources(str(text), small)
    whole = count(text, serialise(), small)

    num_shown = 0

    def interrupt(self: object, size: float, *, is_kept: bool) -> None:
        nonlocal num_shown
        num_shown += 1
        if num_shown == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tasks._Progress, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt), keep_counts(sources, small, serialise(), Place(tmp_path / "cache")):
            pass
    (work,) = (tmp_path / "cache").glob("[!.]*")
    assert len(list(work.glob("parts/*.json"))) >= 3
    with pytest.raises(KeyboardInterrupt), keep_counts(sources, small, serialise(), Place(tmp_path / "cache")) as again:
        raise KeyboardInterrupt  # while the words are ranked
    assert again == whole
    num_kept = re.search(r"^counting words: (\d+) parts were finished before", capsys.readouterr().err, re.M)
    assert num_kept and int(num_kept[1]) >= 3
    with keep_counts(sources, small, serialise(), Place(tmp_path / "cache")) as again:
        assert again == whole
    assert f"{len(sources.tasks)} parts were finished before" in capsys.readouterr().err
    assert list((tmp_path / "cache").glob("[!.]*")) == []


def test_words_beyond_the_limit_are_left_out(local_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(f"short {'x' * 100} {'y' * 101} {'y' * 101} {'z' * 300}.\n")
    assert count(path, serialise()) == {"short": 1, "x" * 100: 1, ".": 1}


def test_the_rarest_words_are_forgotten() -> None:
    totals = Counter({"a": 9, "b": 5, "c": 2, "d": 2, "e": 1})
    assert forget_rarest(totals, 5) == 0 and len(totals) == 5
    assert forget_rarest(totals, 4) == 5
    assert totals == {"a": 9, "b": 5}


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
