"""Files -> shards on a real Ray: canonical, de-duplicated, split by content, and nothing half-written."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import BertTokenizer

from domext_ray.config import PrepareConfig
from domext_ray.corpus import shards
from domext_ray.corpus.manifest import Manifest, Split, read_manifest, take_numbered, verify_shards
from domext_ray.corpus.rows import load_jieba
from domext_ray.corpus.shards import prepare_corpus
from domext_ray.corpus.sources import resolve_sources
from domext_ray.errors import CorpusError

PREPARE = PrepareConfig(shard_bytes=4096, held_out_frac=0.1, min_document_chars=5)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "line", "says", ".", *(f"{i}" for i in range(10))]
VOCABULARY += [f"##{i}" for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    BertTokenizer(vocab={token: i for i, token in enumerate(VOCABULARY)}).save_pretrained(folder)
    return folder


def write_lines(path: Path, numbers: list[int]) -> Path:
    path.write_text("".join(f"line {i} says {i * i}.\n" for i in numbers))
    return path


def prepare_lines(
    path: Path, tokenizer_dir: Path, cache: Path, prepare: PrepareConfig = PREPARE, seq_length: int = 32
) -> Manifest:
    return prepare_corpus(str(path), prepare, tokenizer_dir, seq_length, cache)


def read_rows(manifest: Manifest, split: Split) -> list[list[int]]:
    tables = [pa.ipc.open_file(str(manifest.folder / each.path)).read_all() for each in manifest.records(split)]
    return [row for table in tables for row in table.column("input_ids").to_pylist()]


def read_numbers(manifest: Manifest, split: Split) -> list[int]:
    """The numbers of the lines that a split holds, in order."""
    text = " ".join(VOCABULARY[i] for row in read_rows(manifest, split) for i in row).replace(" ##", "")
    return [int(each.split()[1]) for each in text.replace("[SEP]", "").replace("[CLS]", "").split(".") if each.split()]


@pytest.fixture(scope="module")
def prepared(
    local_ray: None, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Manifest]:
    """A text of 800 different lines among 1,100, its cache folder and its manifest."""
    folder = tmp_path_factory.mktemp("prepared")
    path = write_lines(folder / "text.txt", [*range(700), *range(100, 400), *range(700, 800)])
    with path.open("ab") as file:
        file.write(b"line \xff says 1.\nno\n\n")
    return path, folder / "cache", prepare_lines(path, tokenizer_dir, folder / "cache")


@pytest.fixture
def copied(prepared: tuple[Path, Path, Manifest], tmp_path: Path) -> Manifest:
    """The same corpus in a folder of its own, to be damaged."""
    folder = tmp_path / "copied"
    shutil.copytree(prepared[2].folder, folder)
    return read_manifest(folder)


def test_every_document_comes_once_in_order_on_one_side(prepared: tuple[Path, Path, Manifest]) -> None:
    manifest = prepared[2]
    train, held_out = read_numbers(manifest, "train"), read_numbers(manifest, "held_out")
    assert len(manifest.train) > 3
    assert train == sorted(train) and held_out == sorted(held_out)
    assert sorted(train + held_out) == list(range(800))
    assert 40 < len(held_out) < 130
    assert manifest.num_documents == 800
    assert manifest.dropped == {"duplicate": 300, "bad_utf8": 1, "too_short": 1, "blank": 1}


def test_the_manifest_counts_what_the_shards_hold(prepared: tuple[Path, Path, Manifest]) -> None:
    manifest = prepared[2]
    verify_shards(manifest)
    for split in shards.SPLITS:
        rows = read_rows(manifest, split)
        assert manifest.num_rows(split) == len(rows)
        assert manifest.num_tokens(split) == sum(map(len, rows))
        assert max(map(len, rows)) <= 32
        for record in manifest.records(split):
            table = pa.ipc.open_file(str(manifest.folder / record.path)).read_all()
            assert table.schema == shards.SCHEMA and table.num_rows == record.num_rows
            lengths = [pa.compute.list_value_length(table.column(name)).to_pylist() for name in table.schema.names]
            assert lengths[0] == lengths[1]
    starts = pa.ipc.open_file(str(manifest.folder / manifest.train[0].path)).read_all().column("word_starts")
    continues = [VOCABULARY[i].startswith("##") for i in read_rows(manifest, "train")[0]]
    assert starts[0].as_py() == [not each for each in continues]
    assert manifest.settings["held_out_frac"] == 0.1 and "cache_dir" not in manifest.settings


def test_the_second_time_it_is_found(
    prepared: tuple[Path, Path, Manifest], tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache, manifest = prepared
    monkeypatch.setattr(shards, "_build", None)  # building again would fail
    assert prepare_lines(path, tokenizer_dir, cache) == manifest
    moved = replace(PREPARE, cache_dir="/somewhere/else")
    assert prepare_lines(path, tokenizer_dir, cache, moved) == manifest
    assert [each.name for each in cache.iterdir()] == [manifest.folder.name]


def test_rows_depend_on_content_and_settings_alone(
    prepared: tuple[Path, Path, Manifest], tokenizer_dir: Path, tmp_path: Path
) -> None:
    """A second preparation of a copy elsewhere makes the same files; another row length another folder."""
    path, _, manifest = prepared
    copy = tmp_path / "renamed.txt"
    shutil.copy(path, copy)
    again = prepare_lines(copy, tokenizer_dir, tmp_path / "cache")
    assert again.folder.name == manifest.folder.name
    assert (again.train, again.held_out) == (manifest.train, manifest.held_out)
    longer = prepare_lines(copy, tokenizer_dir, tmp_path / "cache", seq_length=48)
    assert longer.folder != again.folder
    assert read_numbers(longer, "held_out") == read_numbers(again, "held_out")


def test_held_out_documents_do_not_depend_on_place_or_neighbours(
    prepared: tuple[Path, Path, Manifest], tokenizer_dir: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "text.txt", [*range(999, 599, -1), *range(200)])
    other = prepare_lines(path, tokenizer_dir, tmp_path / "cache")
    held_out = set(read_numbers(prepared[2], "held_out"))
    shared = {*range(600, 800), *range(200)}
    assert set(read_numbers(other, "held_out")) & shared == held_out & shared


def test_documents_of_any_size_of_task_split_alike(local_ray: None, tokenizer_dir: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", list(range(400)))
    found = [
        prepare_lines(path, tokenizer_dir, tmp_path / "cache", replace(PREPARE, shard_bytes=size))
        for size in (1024, 2**20)
    ]
    assert len(found[0].train) > len(found[1].train) == 1
    for split in shards.SPLITS:
        assert read_numbers(found[0], split) == read_numbers(found[1], split)


def test_choose_documents_keeps_the_first_of_equals() -> None:
    rng = np.random.default_rng(0)
    distinct = rng.integers(0, 256, (500, 16), dtype=np.uint8)
    distinct[:50, :8] = distinct[50:100, :8]  # equal in the half that sorts first
    drawn = rng.integers(0, 500, 3000)
    keep, is_held_out = shards._choose_documents(distinct[drawn].tobytes(), 0.3)
    firsts = np.zeros(3000, dtype=bool)
    firsts[np.unique(drawn, return_index=True)[1]] = True
    np.testing.assert_array_equal(keep, firsts)
    for i in range(500):
        assert len(set(is_held_out[drawn == i])) <= 1
    assert 0.2 < is_held_out.mean() < 0.4
    assert shards._choose_documents(b"", 0.3)[0].shape == (0,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \nno\n", r"has no usable document \(dropped: 2 blank, 1 too_short\)"),
        (b"\xff\xff\n" * 3, r"has no usable document \(dropped: 3 bad_utf8\)"),
        (b"only one line is here\n", "has 1 usable documents, so the (held-out|training) split is empty"),
        (b"same line all over again\n" * 50, "has 1 usable documents, so the (held-out|training) split is empty"),
    ],
)
def test_a_corpus_without_use_leaves_nothing(
    local_ray: None, tokenizer_dir: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        prepare_lines(tmp_path / "text.txt", tokenizer_dir, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_error_within_a_task_reaches_the_driver_as_one_sentence(
    local_ray: None, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """A gzip file that breaks off is found out by the task that reads it, while others are at work."""
    import gzip

    for number in range(6):
        write_lines(tmp_path / f"{number}.txt", list(range(number * 200, number * 200 + 200)))
    broken = gzip.compress("".join(f"line {i} says {i * 7}.\n" for i in range(3000)).encode())[:-500]
    (tmp_path / "3.txt.gz").write_bytes(broken)
    with pytest.raises(CorpusError, match="3.txt.gz cannot be read to its end") as caught:
        prepare_corpus(f"{tmp_path}/*.txt*", PREPARE, tokenizer_dir, 32, tmp_path / "cache")
    assert "\n" not in str(caught.value) and "ray" not in str(caught.value).lower()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_changes_between_the_passes_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", list(range(10)))
    (task,) = resolve_sources(str(path), PREPARE).tasks
    assert len(list(shards._divide(task, PREPARE, bytes([1] * 10), []))) == 10
    for number in (9, 11):
        with pytest.raises(CorpusError, match="changed while it was read"):
            list(shards._divide(task, PREPARE, bytes([1] * number), []))


def test_a_folder_left_without_a_manifest_is_made_again(local_ray: None, tokenizer_dir: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.txt", list(range(100)))
    first = prepare_lines(path, tokenizer_dir, tmp_path / "cache")
    (first.folder / "manifest.json").unlink()
    assert prepare_lines(path, tokenizer_dir, tmp_path / "cache") == first
    verify_shards(first)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_shard_is_named(copied: Manifest, damage: str) -> None:
    record = copied.train[1]
    path = copied.folder / record.path
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(CorpusError, match=f"the shard .*{record.path} is"):
        verify_shards(copied)


def test_a_damaged_text_is_named(copied: Manifest) -> None:
    path = copied.folder / copied.texts[0].path
    path.write_bytes(path.read_bytes().replace(b"line", b"lime", 1))
    with pytest.raises(CorpusError, match=f"the text .*{path.name} is not what its manifest says"):
        verify_shards(copied)


def read_texts(manifest: Manifest) -> list[str]:
    paths = [manifest.folder / each.path for each in manifest.texts]
    return [json.loads(line)["text"] for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_held_out_documents_are_kept_as_text(prepared: tuple[Path, Path, Manifest]) -> None:
    manifest = prepared[2]
    texts = read_texts(manifest)
    assert [int(each.split()[1]) for each in texts] == read_numbers(manifest, "held_out")
    assert texts[0].startswith("line ") and texts[0].endswith(".")
    for record in manifest.texts:
        content = (manifest.folder / record.path).read_bytes()
        assert (record.num_bytes, record.num_documents) == (len(content), content.count(b"\n"))


def test_kept_texts_do_not_depend_on_tokenizer_or_rows(
    prepared: tuple[Path, Path, Manifest], tokenizer_dir: Path, tmp_path: Path
) -> None:
    path, _, manifest = prepared
    other_dir = tmp_path / "tokenizer"
    BertTokenizer(vocab={each: i for i, each in enumerate([*VOCABULARY, "extra"])}).save_pretrained(other_dir)
    for folder, seq_length in ((other_dir, 32), (tokenizer_dir, 48)):
        other = prepare_corpus(str(path), PREPARE, folder, seq_length, tmp_path / "cache")
        assert other.fingerprint != manifest.fingerprint and other.texts == manifest.texts


@pytest.mark.parametrize("character", ["a", '"', "山", "\U0001f600"])
def test_kept_text_is_bounded(tmp_path: Path, character: str) -> None:
    whole = [character * 1000 + str(i) for i in range(200)]
    record = shards._write_texts(tmp_path / "text.jsonl", whole)
    assert record is not None and record.num_bytes == (tmp_path / "text.jsonl").stat().st_size
    assert shards.TEXT_BYTES - 5000 < record.num_bytes <= shards.TEXT_BYTES
    lines = (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == whole[: record.num_documents]
    record = shards._write_texts(tmp_path / "text.jsonl", [character * 100_000, "rest"])
    assert record is not None and 8000 < record.num_bytes <= shards.TEXT_BYTES
    assert shards._write_texts(tmp_path / "none.jsonl", []) is None and not (tmp_path / "none.jsonl").exists()


def test_rows_are_read_by_number(prepared: tuple[Path, Path, Manifest]) -> None:
    """Rows of several shards and batches, repeated ones too, in the order asked for."""
    manifest = prepared[2]
    rows, sizes = read_rows(manifest, "train"), [each.num_rows for each in manifest.train]
    numbers = np.random.default_rng(0).integers(0, len(rows), 300)
    table = take_numbered(manifest.paths("train"), sizes, numbers)
    assert table.column("input_ids").to_pylist() == [rows[i] for i in numbers]
    assert table.column("row_id").to_pylist() == numbers.tolist()


def test_manifests_that_cannot_be_used(copied: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="has no manifest.json"):
        read_manifest(tmp_path / "nowhere")
    path = copied.folder / "manifest.json"
    record = json.loads(path.read_text())
    for content, message in [
        (json.dumps({**record, "format": 99}), "has format 99"),
        (json.dumps({name: value for name, value in record.items() if name != "train"}), "is damaged"),
        (json.dumps({name: value for name, value in record.items() if name != "texts"}), "is damaged"),
        (path.read_text()[:-30], "is damaged"),
        ("[]", "is damaged"),
    ]:
        path.write_text(content)
        with pytest.raises(CorpusError, match=message):
            read_manifest(copied.folder)


def write_text(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def without_jieba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "jieba":
            raise ModuleNotFoundError("No module named 'jieba'")
        return original(name, *args, **options)

    load_jieba.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    yield
    load_jieba.cache_clear()


CHINESE_LINES = [f"第{i}号患者口服降压药，血压平稳。高血压病人可以口服党参吗？" for i in range(200)]


def test_chinese_text_without_jieba_is_refused(
    tmp_path: Path, tokenizer_dir: Path, local_ray: None, without_jieba: None
) -> None:
    path = write_text(tmp_path / "zh.txt", CHINESE_LINES)
    with pytest.raises(CorpusError, match=r'pip install "domext_ray\[chinese\]", or set --prepare.chinese_words false'):
        prepare_corpus(str(path), PREPARE, tokenizer_dir, 32, tmp_path / "cache")
    plain = replace(PREPARE, chinese_words=False)
    manifest = prepare_corpus(str(path), plain, tokenizer_dir, 32, tmp_path / "cache")
    assert json.loads((manifest.folder / "manifest.json").read_text())["chinese_words"] is False


def test_a_few_chinese_characters_need_no_jieba(
    tmp_path: Path, tokenizer_dir: Path, local_ray: None, without_jieba: None
) -> None:
    path = write_text(
        tmp_path / "en.txt",
        [*(f"line {i} says {i * i}." for i in range(300)), "a house is called 房子 in Chinese text"],
    )
    manifest = prepare_corpus(str(path), PREPARE, tokenizer_dir, 32, tmp_path / "cache")
    record = json.loads((manifest.folder / "manifest.json").read_text())
    assert record["chinese_words"] is False and 0 < record["han_frac"] < 0.01


def test_chinese_words_share_a_start(tmp_path: Path, tokenizer_dir: Path, local_ray: None) -> None:
    pytest.importorskip("jieba")
    manifest = prepare_corpus(
        str(write_text(tmp_path / "zh.txt", CHINESE_LINES)), PREPARE, tokenizer_dir, 32, tmp_path / "cache"
    )
    tables = [pa.ipc.open_file(str(manifest.folder / each.path)).read_all() for each in manifest.train]
    starts = [each for table in tables for row in table.column("word_starts").to_pylist() for each in row]
    assert 0.4 < np.mean(starts) < 0.8
