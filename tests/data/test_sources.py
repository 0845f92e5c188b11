"""Files -> documents: what a range, an encoding or a format must not change; what first rows tell before Ray starts."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from changed_files import watch_hashing
from labelled_fixtures import dump_parquet
from object_store import BUCKET
from row_files import read_texts, write_kinds

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.storage import Place
from domext_ray.text.data import documents as reading
from domext_ray.text.data import folders, sources
from domext_ray.text.data.documents import clean_text
from domext_ray.text.data.files import SourceFile, find_files
from domext_ray.text.data.sample import PLACE_BYTES, PLACES, check_corpus, read_sample
from domext_ray.text.data.sources import ReadTask, Sources, cut_tasks, resolve_sources


def read_spec(spec: str | Path, **options: Any) -> tuple[list[str], Counter[str]]:
    documents, dropped = read_texts(spec, PrepareConfig(**{"min_document_chars": 1, **options}))
    return documents, dropped.counts


def read_ranges(path: Path, prepare: PrepareConfig, step: int) -> list[str]:
    """Documents of byte ranges of `step` bytes, shorter than an option allows."""
    file = SourceFile(str(path), "text", path.stat().st_size)
    tasks = [ReadTask((file,), i, min(i + step, file.size)) for i in range(0, file.size, step)]
    return read_texts(Sources(str(path), tuple(tasks)), prepare)[0]


TEXTS = {
    "plain": b"one\ntwo two\n\n\nthree\nfour 4\n\nfive",
    "crlf": b"one\r\ntwo two\r\n\r\nthree\r\n \r\nfour\r\n",
    "newline at the end": b"a\nbb\n\nccc\n",
    "blank at both ends": b"\n\na\nb\n\n\n",
    "multi-byte": "äöü 漢字。\n\n文字化け𝒳𝒴\nnaïve\n".encode(),
    "one line": b"no newline at all",
    "giant": b"short\n" + b"abcdefghij " * 9 + b"\nnext\n\n" + "漢字𝒳é".encode() * 11 + b"\n\nlast\n",
}


@pytest.mark.parametrize("document", ["line", "blank_line"])
def test_byte_ranges_read_what_the_whole_file_reads(tmp_path: Path, document: str) -> None:
    """Every width of range, so that a boundary falls on every byte: newlines, blank lines, halves of characters."""
    path = tmp_path / "text.txt"
    prepare = PrepareConfig(document=document, min_document_chars=1, max_document_chars=6)
    for name, content in TEXTS.items():
        path.write_bytes(content)
        whole = read_ranges(path, prepare, 10**6)
        assert whole
        for step in range(1, len(content) + 1):
            assert read_ranges(path, prepare, step) == whole, (name, step)


def test_documents_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXTS["plain"])
    assert read_spec(path)[0] == ["one", "two two", "three", "four 4", "five"]
    for document, expected in {
        "blank_line": ["one two two", "three four 4", "five"],
        "file": ["one two two three four 4 five"],
    }.items():
        assert read_spec(path, document=document)[0] == expected


def test_a_large_file_becomes_ranges_and_small_files_join(tmp_path: Path) -> None:
    lines = [f"line number {i} of a file" for i in range(400)]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.txt").write_text("the second file has this line\n")
    (tmp_path / "c.txt").write_text("the third file has this line\n")
    prepare = PrepareConfig(shard_bytes=1024)
    resolved = resolve_sources(str(tmp_path), prepare)
    assert [len(task.files) for task in resolved.tasks] == [1] * (len(resolved.tasks) - 1) + [2]
    assert len(resolved.tasks) > 5 and max(task.num_bytes for task in resolved.tasks) <= 1024
    assert read_texts(resolved, prepare)[0] == [*lines, "the second file has this line", "the third file has this line"]


def test_tasks_grow_with_a_corpus_and_small_ones_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line number {i} of a file" for i in range(4000)]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    prepare = PrepareConfig(shard_bytes=1024)
    many = resolve_sources(str(tmp_path), prepare)
    monkeypatch.setattr(sources, "MOST_TASKS", 20)
    few = resolve_sources(str(tmp_path), prepare)
    assert len(many.tasks) > 90 and len(few.tasks) == 20 and few.fingerprint == many.fingerprint
    assert read_texts(few, prepare)[0] == read_texts(many, prepare)[0] == lines
    large = PrepareConfig(shard_bytes=16_384)
    assert resolve_sources(str(tmp_path), large) == resolve_sources(str(tmp_path), large)
    assert max(task.num_bytes for task in resolve_sources(str(tmp_path), large).tasks) == 16_384


def test_a_terabyte_has_a_few_thousand_tasks_of_bounded_size() -> None:
    tasks = [*cut_tasks([SourceFile("terabyte.txt", "text", 10**12)], PrepareConfig())]
    assert len(tasks) == sources.MOST_TASKS and max(task.num_bytes for task in tasks) < 250 * 10**6


@pytest.mark.parametrize("document", ["line", "blank_line"])
def test_nothing_of_a_giant_document_is_lost(tmp_path: Path, document: str) -> None:
    """It is cut; a paragraph of many lines, too."""
    path, lines = tmp_path / "giant.txt", "\n".join(f"w{i:03d}" for i in range(300))
    for text in ("é漢x𝒳" * 500, lines)[: 2 if document == "blank_line" else 1]:
        path.write_text(f"before\n\n{text}\n\nafter\n", encoding="utf-8")
        documents = read_spec(path, document=document, max_document_chars=50)[0]
        assert (documents[0], documents[-1]) == ("before", "after") and max(map(len, documents)) <= 50
        assert "".join(documents[1:-1]).replace(" ", "") == text.replace("\n", "")


def test_a_range_without_a_blank_line_stops_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without blank lines is one document of its first range; the others must not read to the file's end."""
    path = tmp_path / "flat.txt"
    path.write_bytes(b"line\n" * 1000)
    reads = 0

    original = reading.read_lines

    def count_lines(*args: Any, **options: Any) -> Iterator[tuple[int, int, bytes]]:
        nonlocal reads
        for line in original(*args, **options):
            reads += 1
            yield line

    monkeypatch.setattr(reading, "read_lines", count_lines)
    documents = read_ranges(path, PrepareConfig(document="blank_line", min_document_chars=1), 500)
    assert len(documents) == 1
    assert reads < 1000 + 10 * 102


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "separators.txt"
    path.write_text("one\u2028still one\u0085still\x0bone\rone\nsecond line", encoding="utf-8", newline="")
    assert read_spec(path)[0] == ["one still one still one one", "second line"]


def test_clean_text() -> None:
    for raw, clean in (
        ("  a\t b\u00a0\u3000c \n", "a b c"),
        ("e\u0301", "é"),
        ("a\x00b\u200bc\ufeffd\ud800e", "ab cde"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("soft\u00adhyphen", "softhyphen"),
        ("bell\x07 ok", "bell ok"),
    ):
        assert clean_text(raw) == clean_text(clean) == clean


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"body": "first text"}),
        "{not json",
        json.dumps({"other": 1}),
        json.dumps(["a list"]),
        "",
        json.dumps({"body": 5}),
        json.dumps({"body": "a lone surrogate \ud800 here\nand a second line"}),
        "[" * 100_000,
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"body": "\xff"}\n')
    documents, dropped = read_spec(path, field="body")
    assert documents == ["first text", "a lone surrogate here and a second line"]
    assert dropped == {"bad_json": 2, "no_field": 2, "not_text": 1, "bad_utf8": 1}


def test_every_kind_of_file_has_the_same_documents(tmp_path: Path) -> None:
    texts = ["first text", "second text", None, "third text"]
    for path in write_kinds(tmp_path, [{"body": text, "number": i} for i, text in enumerate(texts)]):
        assert read_spec(path, field="body")[0] == ["first text", "second text", "third text"], path


def test_globs_lists_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a1.txt", "a2.txt", "b1.txt", "deep/a3.txt", ".hidden/a4.txt", "a(5).txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"the file {name} says this\n")

    def names(spec: str) -> list[str]:
        files = [file for task in resolve_sources(spec, PrepareConfig()).tasks for file in task.files]
        return [Path(file.path).relative_to(tmp_path).as_posix() for file in files]

    assert names(f"{tmp_path}/a?.txt") == ["a1.txt", "a2.txt"]
    assert names(f"{tmp_path}/*1.txt") == ["a1.txt", "b1.txt"]
    assert names(f"{tmp_path}/[!b]1.txt") == ["a1.txt"]
    assert names(f"{tmp_path}/[ab]1.txt") == ["a1.txt", "b1.txt"]
    assert names(f"{tmp_path}/a(*).txt") == ["a(5).txt"]
    assert names(f"{tmp_path}/d*/**/*.txt") == ["deep/a3.txt"]
    folders.say.cache_clear()
    assert names(f"{tmp_path}/**/.*/a[34].txt") == names(f"{tmp_path}/**/a4.txt") == [".hidden/a4.txt"]
    assert ".hidden/a4.txt" in names(f"{tmp_path}/**") and names(f"{tmp_path}/.hidden/*") == [".hidden/a4.txt"]
    assert not capsys.readouterr().err
    assert names(f"{tmp_path}/**/a[34].txt") == [".hidden/a4.txt", "deep/a3.txt"]
    told = f"note: a glob names hidden files, which are read: {tmp_path}/.hidden/a4.txt; a folder leaves them out.\n"
    assert capsys.readouterr().err == told
    assert names(f"file://{tmp_path}/b1.txt, {tmp_path}/a1.txt") == ["b1.txt", "a1.txt"]
    assert names(str(tmp_path)) == ["a(5).txt", "a1.txt", "a2.txt", "b1.txt", "deep/a3.txt"]


def test_files_are_hashed_when_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run, which cuts a corpus and reads some of it, does not."""
    read = watch_hashing(monkeypatch)
    (tmp_path / "a.txt").write_text("the first content\n")
    resolved = resolve_sources(str(tmp_path / "a.txt"), PrepareConfig(), Place(tmp_path / "corpora"))
    assert read_texts(resolved, PrepareConfig(min_document_chars=1))[0] == ["the first content"]
    assert not read and resolved.fingerprint and read == ["a.txt"]
    (remembered,) = (tmp_path / "corpora").iterdir()
    remembered.write_text(remembered.read_text()[:-9])  # a power cut's
    again = resolve_sources(str(tmp_path / "a.txt"), PrepareConfig(), Place(tmp_path / "corpora"))
    assert again.fingerprint == resolved.fingerprint and read == ["a.txt"] * 2


def test_bad_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.txt").touch()
    monkeypatch.chdir(tmp_path)
    for spec, message in (
        ("missing.txt", "names no file; give a file"),
        ("emtpy.txt", r"names no file; did you mean empty.txt\?"),
        ("missing/*.txt", "names no file"),
        ("empty.txt", "is empty"),
    ):
        with pytest.raises(CorpusError, match=message) as caught:
            resolve_sources(spec, PrepareConfig())
        assert spec.split("/")[0] in str(caught.value)


def test_of_a_saved_dataset_only_its_training_data_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.say.cache_clear()
    texts = [f"document {i} of a saved dataset" for i in range(50)]
    data = datasets.Dataset.from_dict({"text": texts})
    data.save_to_disk(tmp_path / "one")
    (tmp_path / "one" / "cache-123.arrow").write_bytes(b"left by a map, no part of the dataset")
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "one_split")
    datasets.DatasetDict({"train": data, "test": data.select(range(9))}).save_to_disk(tmp_path / "both")
    both, said = tmp_path / "both", list[str]()
    for name in ("one", "one_split", "both"):
        capsys.readouterr()
        assert read_spec(tmp_path / name)[0] == texts, name
        said.append(capsys.readouterr().err)
    note = (
        f"note: of {both} (splits: train, test) the split train alone is text; to read another, name its folder, such"
    )
    assert said == ["", "", f"{note} as {both}/test.\n"]
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "test_only")
    with pytest.raises(CorpusError, match="no split 'train'; name one of test"):
        read_spec(tmp_path / "test_only")


def test_s3(objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i} of the text\n" for i in range(300)).encode()
    notes = Place(f"{BUCKET}/sources/notes")
    (notes / "a.txt").put(text)
    (notes / "b.txt.gz").put(gzip.compress(text))
    (notes / "c.parquet").put(dump_parquet([{"text": "a document in a Parquet file"}]))
    lines = text.decode().splitlines()
    for spec in (f"{notes}/a.txt", f"{notes}/*.gz"):
        assert read_spec(spec, shard_bytes=1024)[0] == lines
    assert read_spec(str(notes), shard_bytes=1024)[0] == [*lines, *lines, "a document in a Parquet file"]
    with pytest.raises(CorpusError, match="names no file"):
        read_spec(f"{BUCKET}/other/a.txt")


USUAL = PrepareConfig()
LINES = [f"Line number {i:06d} of a text, which is long enough to be one." for i in range(100)]


def test_rows_without_text_are_refused_where_the_beginning_tells(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = json.dumps({"text": LINES[0]}), json.dumps({"body": LINES[0], "id": 1})
    path.write_text(f"{bad}\n" * 30_000)
    with pytest.raises(CorpusError, match=r"without the field 'text'; the first is .*rows.jsonl:1 \(it has body, id\)"):
        check_corpus(str(path), USUAL)
    path.write_text(f"{bad}\n" * 80 + f"{good}\n" * 20)  # all of it is seen
    with pytest.raises(CorpusError, match="80 of 100 rows"):
        check_corpus(str(path), USUAL)
    path.write_text(f"{bad}\n" * 3000 + f"{good}\n" * 30_000)  # a bad beginning, and 9 % of the whole
    check_corpus(str(path), USUAL)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for content, message in (
        (b"\n \nno\n", "has no usable document .dropped: 1 document under 20 characters"),
        (b"One line that is long enough.\n" * 9, "has 1 usable document .dropped: 8 documents equal to an earlier one"),
    ):
        (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            check_corpus(str(tmp_path / "text.txt"), USUAL)


def test_little_text_beside_package_docs_is_enough(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(LINES[0])
    (tmp_path / "rows.jsonl").write_text('{"body": 1}')
    check_corpus(f"package-docs,{tmp_path}", USUAL)


def test_a_file_that_is_named_twice_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES))
    check_corpus(f"{path},{path}", USUAL)
    assert capsys.readouterr().err == f"note: --corpus names {path} more than once; it is read once.\n"


def test_few_rows_of_many_files_are_read(tmp_path: Path) -> None:
    """The first and the last file are among those that are looked at, and of a long one only the beginning is."""
    for i in range(100):
        (tmp_path / f"{i:03d}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    check_corpus(str(tmp_path), USUAL)
    for name in ("000.jsonl", "099.jsonl"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(json.dumps([{"text": line} for line in LINES], indent=1))
        with pytest.raises(CorpusError, match=f"{name} is not JSON Lines"):
            check_corpus(str(tmp_path), USUAL)
        (tmp_path / name).write_text(content)
    (tmp_path / "000.jsonl").write_text(content * 500 + "no JSON\n" * 50_000)
    check_corpus(f"{tmp_path}/000.jsonl", USUAL)


def test_a_sample_is_of_places_all_over_a_corpus_and_says_its_share(tmp_path: Path) -> None:
    lines = [f"Line {i:07d} is one of a text that is longer than its sample is." for i in range(200_000)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    with gzip.open(tmp_path / "packed.txt.gz", "wt") as stream:
        stream.write("\n".join(lines[:20_000]))
    files = find_files(str(tmp_path))[0]
    sample = read_sample(str(tmp_path), USUAL, files, to_end=True)
    found = [document for place in sample.places for document in place.documents]
    assert len(sample.places) == PLACES and found[0] == lines[0] and len(found) < 140_000
    numbers = [int(document[5:12]) for document in found]
    assert max(numbers) > 195_000 and len({number // 10_000 for number in numbers}) == 20
    packed = sample.places[-1]  # it cannot be cut: read to its end for its share, and kept in part
    assert packed.num_bytes == files[-1].size and packed.num_chars > 1.2e6 > 2 * sum(map(len, packed.documents))
    assert sample.frac == pytest.approx(PLACE_BYTES * (PLACES - 1) / sum(file.size for file in files), rel=0.05)
    glance = read_sample(str(tmp_path), USUAL, files)
    assert len(glance.places) == PLACES and glance.frac < sample.frac / 7 and not glance.places[-1].num_bytes
    whole = check_corpus(str(tmp_path / "packed.txt.gz"), USUAL, to_end=True)
    assert whole.frac == 1 and whole.places[0].num_chars == packed.num_chars
