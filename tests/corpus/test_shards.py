"""Files -> shards on a real Ray: canonical, de-duplicated, split by content, and nothing half-written."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from changed_files import TOUCHED, watch_hashing
from row_files import SPECIALS, save_wordpiece, write_rows

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import AccessError, CorpusError
from domext_ray.runtime import tasks
from domext_ray.storage import Place
from domext_ray.text.corpus import overlap, shards
from domext_ray.text.corpus.index import HELD_OUT, TRAIN, DocumentIndex
from domext_ray.text.corpus.manifest import Manifest, Split, find_shard_fault, read_manifest
from domext_ray.text.corpus.overlap import DocumentHashes, count_common, find_overlaps, read_hashes
from domext_ray.text.corpus.rows import SCHEMA, load_jieba
from domext_ray.text.corpus.shards import prepare_corpus
from domext_ray.text.data.sources import resolve_sources
from domext_ray.text.data.split import describe_split, hold_out_blocks, resolve_held_out_by

pytestmark = pytest.mark.usefixtures("local_ray")
Prepared = tuple[Path, Path, Manifest]
PREPARE = PrepareConfig(shard_bytes=4096, held_out_frac=0.1, min_document_chars=5)
VOCABULARY = [*SPECIALS, "line", "says", ".", *(f"{i}" for i in range(10)), *(f"##{i}" for i in range(10))]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wordpiece(tmp_path_factory.mktemp("tokenizer"), VOCABULARY)


def write_lines(path: Path, numbers: list[int]) -> Path:
    path.write_text("".join(f"line {i} says {i * i}.\n" for i in numbers))
    return path


def prepare_lines(
    path: Path, tokenizer_dir: Path, cache: Path, prepare: PrepareConfig = PREPARE, seq_length: int = 32
) -> Manifest:
    return prepare_corpus(str(path), prepare, tokenizer_dir, seq_length, Place(cache))


def read_rows(manifest: Manifest, split: Split) -> list[list[int]]:
    tables = [pa.ipc.open_file(str(manifest.folder / record.path)).read_all() for record in manifest.records(split)]
    return [row for table in tables for row in table.column("input_ids").to_pylist()]


def read_numbers(manifest: Manifest, split: Split) -> list[int]:
    """The numbers of the lines that a split holds, in order."""
    text = " ".join(VOCABULARY[i] for row in read_rows(manifest, split) for i in row).replace(" ##", "")
    return [int(line.split()[1]) for line in text.replace("[SEP]", "").replace("[CLS]", "").split(".") if line.split()]


@pytest.fixture(scope="module")
def prepared(local_ray: None, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A text of 800 different lines among 1,100, its cache folder and its manifest."""
    folder = tmp_path_factory.mktemp("prepared")
    path = write_lines(folder / "text.txt", [*range(700), *range(100, 400), *range(700, 800)])
    with path.open("ab") as file:
        file.write(b"line \xff says 1.\nno\n\n")
    return path, folder / "cache", prepare_lines(path, tokenizer_dir, folder / "cache")


@pytest.fixture
def copied(prepared: Prepared, tmp_path: Path) -> Manifest:
    """The same corpus in a folder of its own, to be damaged."""
    folder = tmp_path / "copied"
    shutil.copytree(prepared[2].folder, folder)
    return read_manifest(Place(folder))


def test_every_document_comes_once_in_order_on_one_side(prepared: Prepared) -> None:
    manifest = prepared[2]
    train, held_out = read_numbers(manifest, "train"), read_numbers(manifest, "held_out")
    assert len(manifest.train) > 3
    assert train == sorted(train) and held_out == sorted(held_out)
    assert sorted(train + held_out) == list(range(800))
    assert manifest.num_documents == 800
    assert manifest.dropped == {"duplicate": 300, "bad_utf8": 1, "too_short": 1, "blank": 1}
    assert len(held_out) == 80 and manifest.settings["held_out_by"] == "block"
    # Chosen one by one, a tenth of their neighbours would be held out, too.
    assert sum(second - first == 1 for first, second in itertools.pairwise(held_out)) == 80 - 4


def test_the_manifest_counts_what_the_shards_hold(prepared: Prepared) -> None:
    manifest = prepared[2]
    assert not find_shard_fault(manifest)
    for split in shards.SPLITS:
        rows = read_rows(manifest, split)
        assert manifest.num_rows(split) == len(rows)
        assert manifest.num_tokens(split) == sum(map(len, rows))
        assert max(map(len, rows)) <= 32
        for record in manifest.records(split):
            table = pa.ipc.open_file(str(manifest.folder / record.path)).read_all()
            assert table.schema == SCHEMA and table.num_rows == record.num_rows
            lengths = [pc.list_value_length(table.column(name)).to_pylist() for name in table.schema.names]
            assert lengths[0] == lengths[1]
    expected = np.bincount(np.concatenate(read_rows(manifest, "train")), minlength=50)
    for size in (50, 9):
        assert manifest.token_counts(size).tolist() == expected[:size].tolist()
    starts = pa.ipc.open_file(str(manifest.folder / manifest.train[0].path)).read_all().column("word_starts")
    continues = [VOCABULARY[i].startswith("##") for i in read_rows(manifest, "train")[0]]
    assert starts[0].as_py() == [not is_continued for is_continued in continues]
    assert manifest.settings["held_out_frac"] == 0.1 and "cache_dir" not in manifest.settings


def test_the_second_time_it_is_found(prepared: Prepared, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache, manifest = prepared
    monkeypatch.setattr(shards, "_build", None)  # building again would fail
    assert prepare_lines(path, tokenizer_dir, cache) == manifest
    for touch in TOUCHED.values():
        touch(path)
        touch(Path(manifest.shards("train")[0].path))
        assert prepare_lines(path, tokenizer_dir, cache) == manifest, "by its bytes"
    moved = replace(PREPARE, cache_dir="/somewhere/else")
    assert prepare_lines(path, tokenizer_dir, cache, moved) == manifest
    assert [entry.name for entry in cache.glob("[!.]*")] == [manifest.folder.name]


def test_rows_depend_on_content_and_settings_alone(prepared: Prepared, tokenizer_dir: Path, tmp_path: Path) -> None:
    """A copy elsewhere makes the same files; other rows or another tokenizer another folder, with the same texts."""
    path, _, manifest = prepared
    copy, other_dir = tmp_path / "renamed.txt", tmp_path / "tokenizer"
    shutil.copy(path, copy)
    again = prepare_lines(copy, tokenizer_dir, tmp_path / "cache")
    assert again.folder.name == manifest.folder.name
    assert (again.train, again.held_out) == (manifest.train, manifest.held_out)
    save_wordpiece(other_dir, [*VOCABULARY, "extra"])
    for folder, seq_length in ((tokenizer_dir, 48), (other_dir, 32)):
        other = prepare_lines(copy, folder, tmp_path / "cache", seq_length=seq_length)
        assert other.folder != again.folder and other.fingerprint != manifest.fingerprint
        assert other.texts == manifest.texts and read_numbers(other, "held_out") == read_numbers(again, "held_out")


def test_held_out_documents_do_not_depend_on_place_or_neighbours(
    prepared: Prepared, tokenizer_dir: Path, tmp_path: Path
) -> None:
    prepare = replace(PREPARE, held_out_by="document")
    path = write_lines(tmp_path / "text.txt", [*range(999, 599, -1), *range(200)])
    other = prepare_lines(path, tokenizer_dir, tmp_path / "cache", prepare)
    held_out = set(read_numbers(prepare_lines(prepared[0], tokenizer_dir, tmp_path / "cache", prepare), "held_out"))
    shared = {*range(600, 800), *range(200)}
    assert set(read_numbers(other, "held_out")) & shared == held_out & shared


@pytest.mark.parametrize("by", ["document", "block", "file", "group"])
def test_any_number_of_documents_at_a_time_are_chosen_alike(
    by: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of equals stays, whatever is worked through at a time, and into however many files it is divided."""
    rng = np.random.default_rng(0)
    distinct = rng.integers(0, 256, (500, 8), dtype=np.uint8)
    distinct[:50, :7] = distinct[50:100, :7]  # equal in the bytes that sort first
    drawn, groups = rng.integers(0, 500, 3000), rng.integers(0, 256, (40, 8), dtype=np.uint8)[np.arange(3000) // 75]
    files = [[("a", 700), ("b", 300)], [("b", 900)], [("c", 1100)]]
    found = []
    for chunk, bucket in ((2**22, 2**20), (70, 100), (1, 2999), (5000, 1)):
        monkeypatch.setattr("domext_ray.text.data.split.CHUNK", chunk)
        monkeypatch.setattr("domext_ray.text.corpus.index.BUCKET", bucket)
        folder = tmp_path / f"{chunk}-{bucket}"
        folder.mkdir()
        index = DocumentIndex(folder, by, 0.3)
        for first, end in ((0, 1000), (1000, 1000), (1000, 3000)):
            index.add(distinct[drawn[first:end]].tobytes(), groups[first:end].tobytes())
        index.choose(files)
        index.write_hashes(Place(folder))
        written = [(folder / f"documents-{part}.npy").read_bytes() for part in shards.SPLITS]
        found.append([index.uses.tobytes(), *written])
        assert len([*folder.glob("near-*")]) == {2**20: 0, 100: 32, 2999: 2, 1: 256}[bucket]
    assert all(made == found[0] for made in found)
    firsts = np.zeros(3000, dtype=bool)
    firsts[np.unique(drawn, return_index=True)[1]] = True
    np.testing.assert_array_equal(index.keep, firsts)
    assert 0.05 < (index.uses == HELD_OUT).sum() / firsts.sum() < 0.5
    assert index.count() == [3000 - firsts.sum(), (index.uses == TRAIN).sum(), (index.uses == HELD_OUT).sum()]
    for split, use in zip(shards.SPLITS, (TRAIN, HELD_OUT), strict=True):
        words = np.load(folder / f"documents-{split}.npy")
        np.testing.assert_array_equal(words, np.sort(index.hashes[index.uses == use].astype(np.uint64)))


def test_a_corpus_without_use_leaves_nothing(tokenizer_dir: Path, tmp_path: Path) -> None:
    for content, message in (
        (b"\n \nno\n", r"has no usable document \(dropped: 2 blank, 1 too_short\)"),
        (b"\xff\xff\n" * 3, r"3 of 3 rows of .*text.txt are not UTF-8 \(the first is .*text.txt:1\)"),
        (b"line 1 says 1.\n" * 50, "has 1 usable document, so the (held-out|training) split is empty"),
    ):
        (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            prepare_lines(tmp_path / "text.txt", tokenizer_dir, tmp_path / "cache")
        assert not (tmp_path / "cache").exists()


def test_an_error_within_a_task_reaches_the_driver_as_one_sentence(tokenizer_dir: Path, tmp_path: Path) -> None:
    """A gzip file that breaks off is found out by the task that reads it, while others are at work."""
    for number in range(6):
        write_lines(tmp_path / f"{number}.txt", list(range(number * 200, number * 200 + 200)))
    broken = gzip.compress("".join(f"line {i} says {i * 7}.\n" for i in range(3000)).encode())[:-500]
    (tmp_path / "3.txt.gz").write_bytes(broken)
    with pytest.raises(CorpusError, match="3.txt.gz cannot be read to its end") as caught:
        prepare_corpus(f"{tmp_path}/*.txt*", PREPARE, tokenizer_dir, 32, Place(tmp_path / "cache"))
    assert "\n" not in str(caught.value) and "ray" not in str(caught.value).lower()
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_between_the_passes_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", list(range(10)))
    (task,) = resolve_sources(str(path), PREPARE).tasks
    assert len(list(shards._divide(task, PREPARE, bytes([1] * 10), []))) == 10
    for number in (9, 11):
        with pytest.raises(CorpusError, match="changed while it was read"):
            list(shards._divide(task, PREPARE, bytes([1] * number), []))


def test_the_manifest_of_another_corpus_is_not_taken_for_this_ones(
    prepared: Prepared, tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = prepare_lines(write_lines(tmp_path / "text.txt", [*range(60)]), tokenizer_dir, tmp_path / "cache")
    (own.folder / "manifest.json").delete()
    assert prepare_lines(tmp_path / "text.txt", tokenizer_dir, tmp_path / "cache") == own, "without one it is made"
    own.folder.delete()
    shutil.copytree(prepared[2].folder, own.folder)
    again = prepare_lines(tmp_path / "text.txt", tokenizer_dir, tmp_path / "cache")
    assert sorted(read_numbers(again, "train") + read_numbers(again, "held_out")) == [*range(60)]
    assert "manifest.json is that of another corpus; the corpus is prepared anew" in capsys.readouterr().err


def read_files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The content and the inode of every file below a folder, but for what says who worked there."""
    # A task of an interrupted job may still be writing: its temporary file is about to have another name.
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    paths = [path for path in paths if path.parent.name != "attempts"]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_ino) for path in paths}


def list_contents(files: dict[str, tuple[bytes, int]]) -> dict[str, bytes]:
    return {name: content for name, (content, _) in files.items()}


def test_an_interrupted_preparation_goes_on_with_its_finished_parts(
    prepared: Prepared,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, _, manifest = prepared
    num_shown = Counter[str]()

    def interrupt(self: Any, size: float, *, is_kept: bool) -> None:
        num_shown[self.verb] += 1
        if num_shown["tokenising"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tasks._Progress, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_lines(path, tokenizer_dir, tmp_path / "cache")
    assert num_shown["reading"] > 3
    (work,) = (tmp_path / "cache").glob("[!.]*")
    assert work.name == manifest.folder.name and not (work / "manifest.json").exists()
    before = read_files(work)
    assert len([name for name in before if name.startswith("parts/rows/") and name.endswith(".json")]) >= 3

    again = prepare_lines(path, tokenizer_dir, tmp_path / "cache")
    after = read_files(Path(again.folder))
    assert list_contents(after) == list_contents(read_files(Path(manifest.folder)))
    finished = [f"{name}-{number:06d}.arrow" for name in ("train", "held_out") for number in range(3)]
    assert all(after[name] == before[name] for name in finished if name in before)  # the very files
    told = capsys.readouterr().err
    assert re.search(r"^reading: (\d+) parts were finished before$", told, re.MULTILINE)
    assert re.search(r"^tokenising: ([3-9]|\d\d) parts were finished before$", told, re.MULTILINE)
    assert [entry.name for entry in (tmp_path / "cache").glob("[!.]*")] == [manifest.folder.name]


def test_a_damaged_corpus_is_made_anew_where_it_is_not_whole(
    prepared: Prepared, tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _, manifest = prepared
    shard, whole = manifest.train[1].path, "manifest.json"
    anew = "the shard {} is not what its manifest says; the corpus is prepared anew|tokenising: the shard {}"
    for name, told in (
        (shard, anew),
        (whole, "{} is damaged"),
        ("parts/rows/000001.json", "{} is damaged; that part is made anew"),
    ):
        folder = tmp_path / Path(name).stem / manifest.folder.name
        shutil.copytree(manifest.folder, folder)
        before = read_files(folder)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        if name not in (shard, whole):
            (folder / whole).unlink()
        assert prepare_lines(path, tokenizer_dir, folder.parent).folder == folder
        after = read_files(folder)
        assert list_contents(after) == list_contents(before)
        assert before[manifest.train[2].path] == after[manifest.train[2].path], "the very file"
        said = capsys.readouterr().err
        assert all(sentence.format(folder / name) in said for sentence in told.split("|"))


def test_held_out_text_is_for_its_owner_only(prepared: Prepared) -> None:
    _, _, manifest = prepared
    assert Path(manifest.folder).stat().st_mode & 0o777 == 0o700
    assert {Path(manifest.folder, text.path).stat().st_mode & 0o777 for text in manifest.texts} == {0o600}


def test_another_users_corpus_is_refused_in_a_sentence(prepared: Prepared) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        folder = Path(name, "corpus")
        shutil.copytree(prepared[2].folder, folder)
        folder.chmod(0o700 if os.geteuid() == 0 else 0o000)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(AccessError, match="may be read by its owner only.*give another --prepare.cache_dir"):
                shards._find_prepared(Place(folder), "")
        finally:
            os.seteuid(user)
            folder.chmod(0o700)


def test_what_is_damaged_is_named(copied: Manifest) -> None:
    """A shard that is changed, cut off or gone, a text, and the table of counts; none of them is guessed."""
    shard, text, table = copied.train[1].path, copied.texts[0].path, "token_counts.npy"
    for name, change, says in (
        (shard, lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "shard {} is not what"),
        (shard, lambda content: content[: len(content) // 2], "shard {} is not what its manifest says"),
        (shard, None, "shard {} is missing"),
        (text, lambda content: content.replace(b"line", b"lime", 1), "text {} is not what its manifest says"),
        (table, lambda content: content[:-1] + b"?", "table {} is not what its manifest says"),
    ):
        path = Path(copied.folder, name)
        content = path.read_bytes()
        path.write_bytes(change(content)) if change else path.unlink()
        assert find_shard_fault(copied).startswith(f"the {says.format(path)}")
        path.write_bytes(content)
    assert not find_shard_fault(copied)
    Path(copied.folder, table).unlink()
    with pytest.raises(CorpusError, match="token_counts.npy is missing or damaged; delete its folder"):
        copied.token_counts(30)


def test_what_has_not_changed_is_not_read_again(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither text nor shards, by a second start or a second length; what has changed is, that file alone."""
    read = watch_hashing(monkeypatch)
    (tmp_path / "texts").mkdir()
    for name in "ab":
        write_lines(tmp_path / "texts" / f"{name}.txt", [*range(100)] if name == "a" else [*range(200, 300)])
    made = prepare_lines(tmp_path / "texts", tokenizer_dir, tmp_path / "cache")
    assert sorted(read) == ["a.txt", "b.txt"]  # shards are known from writing them
    prepare_lines(tmp_path / "texts", tokenizer_dir, tmp_path / "cache", seq_length=48)
    assert prepare_lines(tmp_path / "texts", tokenizer_dir, tmp_path / "cache") == made
    assert len(read) == 2
    shard = Path(made.shards("train")[0].path)
    content = shard.read_bytes()
    for path, text in ((shard, content[:-9] + b"?" + content[-8:]), (tmp_path / "texts" / "b.txt", b"")):
        path.write_bytes(text or path.read_bytes().replace(b"line 2", b"line 3"))
    assert find_shard_fault(made) == f"the shard {shard} is not what its manifest says"
    assert prepare_lines(tmp_path / "texts", tokenizer_dir, tmp_path / "cache").fingerprint != made.fingerprint
    assert read[2:] == [shard.name, "b.txt"]


def read_texts(manifest: Manifest) -> list[str]:
    paths = [manifest.folder / text.path for text in manifest.texts]
    return [json.loads(line)["text"] for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_held_out_documents_are_kept_as_text(prepared: Prepared) -> None:
    manifest = prepared[2]
    texts = read_texts(manifest)
    assert [int(text.split()[1]) for text in texts] == read_numbers(manifest, "held_out")
    assert texts[0].startswith("line ") and texts[0].endswith(".")
    for record in manifest.texts:
        content = (manifest.folder / record.path).read_bytes()
        assert record.num_rows == content.count(b"\n")


def test_kept_text_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    for character in ("a", '"', "山", "\U0001f600"):
        whole = [character * 1000 + str(i) for i in range(200)]
        record = shards._write_texts(Place(path), whole)
        assert record is not None and shards.TEXT_BYTES - 5000 < path.stat().st_size <= shards.TEXT_BYTES
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["text"] for line in lines] == whole[: record.num_rows]
        record = shards._write_texts(Place(path), [character * 100_000, "rest"])
        assert record is not None and 8000 < path.stat().st_size <= shards.TEXT_BYTES
    assert shards._write_texts(Place(tmp_path / "none.jsonl"), []) is None and not (tmp_path / "none.jsonl").exists()


def test_manifests_that_cannot_be_used(copied: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="has no manifest.json"):
        read_manifest(Place(tmp_path / "nowhere"))
    path = Path(copied.folder, "manifest.json")
    record = json.loads(path.read_text())
    later = "has format 99, which a later version .* reads format 3; delete its folder"
    for content, message in [
        (json.dumps({**record, "format": 99}), later),
        (json.dumps({name: value for name, value in record.items() if name != "texts"}), "is damaged"),
        (path.read_text().replace('"num_documents": 800', '"num_documents": 801'), "its sha256 is another"),
    ]:
        path.write_text(content)
        with pytest.raises(CorpusError, match=message):
            read_manifest(copied.folder)


def test_chinese_text_without_jieba_is_refused_and_a_few_characters_are_not(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)  # how Python notes that there is none
    load_jieba.cache_clear()
    lines = [f"第{i}号患者口服降压药，血压平稳。高血压病人可以口服党参吗？" for i in range(200)]
    (tmp_path / "zh.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(CorpusError, match=r'pip install "domext_ray\[chinese\]", or set --prepare.chinese_words false'):
        prepare_lines(tmp_path / "zh.txt", tokenizer_dir, tmp_path / "cache", replace(PREPARE, unknown="allow"))
    plain = replace(PREPARE, chinese_words=False, unknown="allow")
    few = write_lines(tmp_path / "en.txt", [*range(300)])
    few.write_text(few.read_text() + "a house is called 房子 in Chinese text\n", encoding="utf-8")
    for path, prepare, least, most in ((tmp_path / "zh.txt", plain, 0.5, 1.0), (few, PREPARE, 0.0, 0.01)):
        manifest = prepare_lines(path, tokenizer_dir, tmp_path / "cache", prepare)
        record = json.loads((manifest.folder / "manifest.json").read_text())
        assert record["chinese_words"] is False and least < record["han_frac"] < most


def test_lines_of_text_are_held_out_in_blocks_and_others_one_by_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.txt", [1, 2])
    (tmp_path / "b.jsonl").write_text('{"text": "line 1 says 1."}')
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("a.txt", {}, "block", "blocks of up to 64 neighbouring lines"),
        ("a.txt", {"held_out_by": "document"}, "document", "single lines, whose neighbours train"),
        ("a.txt", {"document": "blank_line"}, "document", "single paragraphs between blank lines"),
        ("a.txt", {"document": "file"}, "document", ""),
        ("b.jsonl", {}, "document", ""),
        ("b.jsonl", {"held_out_by": "file"}, "file", ""),
        ("*", {}, "block", "blocks of up to 64"),
    ]
    for spec, options, expected, told in cases:
        prepare = replace(PREPARE, **options)
        sources = resolve_sources(f"{tmp_path}/{spec}", prepare)
        held_out_by = resolve_held_out_by(sources.files, prepare)
        assert held_out_by == expected, spec
        split = describe_split(sources.files, prepare, held_out_by)
        assert told in split and bool(told) == bool(split)
    assert resolve_held_out_by(resolve_sources("package-docs:1", PREPARE).files, PREPARE) == "document"


def test_blocks_are_held_out_whole() -> None:
    """The share is exact, held-out lines stand in runs, and these come from all over the text."""
    for num_lines in (400, 40_000):
        keep = np.random.default_rng(0).random(num_lines) < 0.9
        is_held_out = np.zeros(num_lines, dtype=bool)
        hold_out_blocks(keep, 0.02, is_held_out)
        assert not (is_held_out & ~keep).any()
        assert is_held_out.sum() == round(keep.sum() * 0.02)
        runs = np.flatnonzero(np.diff(is_held_out[keep].astype(int)) == 1)
        assert len(runs) == (4 if num_lines == 400 else keep.sum() * 0.02 // 64)
        assert runs.max() - runs.min() > 0.5 * keep.sum()
    few = np.zeros(20, dtype=bool)
    hold_out_blocks(np.ones(20, dtype=bool), 0.02, few)
    assert few.sum() == 4


def test_whole_files_are_held_out(tokenizer_dir: Path, tmp_path: Path) -> None:
    """Some of the files in the order of their content's hash, whatever their names and however they are cut."""
    prepare = replace(PREPARE, held_out_by="file")
    for i, size in enumerate([20, 20, 20, 20, 20, 20, 20, 400]):
        write_lines(tmp_path / f"{i}.txt", list(range(1000 * i, 1000 * i + size)))
    manifest = prepare_lines(tmp_path / "*.txt", tokenizer_dir, tmp_path / "cache", prepare)
    held_out = read_numbers(manifest, "held_out")
    files = {number // 1000 for number in held_out}
    assert len(files) in (2, 3) and len(held_out) == 20 * len(files)
    assert not files & {number // 1000 for number in read_numbers(manifest, "train")}
    with pytest.raises(CorpusError, match="--prepare.held_out_by is 'file' and the documents are of 1 file"):
        prepare_lines(tmp_path / "7.txt", tokenizer_dir, tmp_path / "cache", prepare)


def test_rows_without_text_are_told(tokenizer_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was dropped is said with its first place, also where a range of the file begins below the first line."""
    path = tmp_path / "rows.jsonl"
    rows: list[Any] = [{"text": f"line {i} says {i * i}."} for i in range(400)]
    rows[300], rows[310:320] = {"text": None, "id": 1}, [{"body": "x"}] * 10
    write_rows(path, rows)
    for is_new in (True, False):
        manifest = prepare_lines(path, tokenizer_dir, tmp_path / "cache")
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("dropped", "warning"))]
        assert told == [
            f"dropped: 10 rows without the field 'text'; the first is {path}, line 55 from byte 8,192 on (it has body)",
            f"dropped: 1 row with null as 'text'; the first is {path}, line 45 from byte 8,192 on",
            f"warning: 11 of 400 rows of --corpus {str(path)!r} (2.8%) hold no text and are left out; "
            "set --prepare.field to the field that holds the text.",
        ], is_new
    assert manifest.dropped == {"no_field": 10, "null": 1} and len(manifest.train) > 3
    strict = replace(PREPARE, max_dropped_frac=0.02)
    with pytest.raises(CorpusError, match=r"11 of 400 rows .* with --prepare.max_dropped_frac 0.03"):
        prepare_lines(path, tokenizer_dir, tmp_path / "cache", strict)


def make_hashes(train: list[int], held_out: list[int]) -> DocumentHashes:
    return DocumentHashes(*(np.array(numbers, dtype=np.uint64) for numbers in (train, held_out)))


def test_common_values_are_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    first, second = (np.unique(random.integers(0, 900, size, dtype=np.uint64)) for size in (300, 700))
    expected = len({*first.tolist()} & {*second.tolist()})
    monkeypatch.setattr(overlap, "CHUNK", 7)
    assert count_common(first, second) == count_common(second, first) == expected > 50
    assert count_common(first, first[:0]) == 0


def test_what_spoils_held_out_figures_is_said_first() -> None:
    texts = [("--corpus", make_hashes([1, 2, 3], [7, 8])), ("--replay.corpus", make_hashes([2, 8, 9], [3, 4]))]
    assert find_overlaps(texts) == [
        "warning: 1 of 2 held-out documents of --replay.corpus are training documents of --corpus, too: figures on its "
        "held-out text look better than they are",
        "warning: 1 of 2 held-out documents of --corpus are training documents of --replay.corpus, too: figures on its "
        "held-out text look better than they are",
        "note: 3 of 5 documents of --replay.corpus are in --corpus, too",
    ]
    assert find_overlaps([texts[0], ("third", make_hashes([10], [11]))]) == []


def test_a_prepared_corpus_keeps_the_hashes_of_its_documents(tokenizer_dir: Path, tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.txt", [*range(300), *range(50)])
    second = write_lines(tmp_path / "second.txt", [*range(200, 400)])
    for held_out_by in ("document", "block"):
        prepare = replace(PREPARE, held_out_by=held_out_by)
        manifests = [prepare_lines(text, tokenizer_dir, tmp_path / "cache", prepare) for text in (first, second)]
        own, other = (read_hashes(manifest.folder) for manifest in manifests)
        assert (len(own), len(other)) == (300, 200)
        lines = [{split: {*read_numbers(manifest, split)} for split in shards.SPLITS} for manifest in manifests]
        for split, another in itertools.product(shards.SPLITS, shards.SPLITS):
            assert len(getattr(own, split)) == len(lines[0][split])
            common = count_common(getattr(own, split), getattr(other, another))
            assert common == len(lines[0][split] & lines[1][another])
        for path in Path(manifests[0].folder).glob("documents-*.npy"):
            path.unlink()
        prepare_lines(first, tokenizer_dir, tmp_path / "cache", prepare)  # which finds the corpus not whole
        again = read_hashes(manifests[0].folder)
        assert np.array_equal(again.train, own.train) and np.array_equal(again.held_out, own.held_out)
    (manifests[1].folder / "documents-train.npy").put(b"\x93NUMPY")
    with pytest.raises(CorpusError, match="has no sound hashes of its documents"):
        read_hashes(manifests[1].folder)
