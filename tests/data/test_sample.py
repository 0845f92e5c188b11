"""What the first rows of a corpus tell before Ray starts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError
from domext_ray.text.data.files import find_files
from domext_ray.text.data.sample import PLACE_BYTES, PLACES, check_corpus, read_sample

PREPARE = PrepareConfig()
LINES = [f"Line number {i:06d} of a text, which is long enough to be one." for i in range(100)]


def test_rows_without_text_are_refused_where_the_beginning_tells(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = json.dumps({"text": LINES[0]}), json.dumps({"body": LINES[0], "id": 1})
    path.write_text(f"{bad}\n" * 30_000)
    with pytest.raises(CorpusError, match=r"without the field 'text'; the first is .*rows.jsonl:1 \(it has body, id\)"):
        check_corpus(str(path), PREPARE)
    path.write_text(f"{bad}\n" * 80 + f"{good}\n" * 20)  # all of it is seen
    with pytest.raises(CorpusError, match="80 of 100 rows"):
        check_corpus(str(path), PREPARE)
    path.write_text(f"{bad}\n" * 3000 + f"{good}\n" * 30_000)  # a bad beginning, and 9 % of the whole
    check_corpus(str(path), PREPARE)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for content, message in (
        (b"\n \nno\n", "has no usable document .dropped: 1 document under 20 characters"),
        (b"One line that is long enough.\n" * 9, "has 1 usable document .dropped: 8 documents equal to an earlier one"),
    ):
        (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            check_corpus(str(tmp_path / "text.txt"), PREPARE)


def test_little_text_beside_package_docs_is_enough(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(LINES[0])
    (tmp_path / "rows.jsonl").write_text('{"body": 1}')
    check_corpus(f"package-docs,{tmp_path}", PREPARE)


def test_a_file_that_is_named_twice_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES))
    check_corpus(f"{path},{path}", PREPARE)
    assert capsys.readouterr().err == f"note: --corpus names {path} more than once; it is read once.\n"


def test_few_rows_of_many_files_are_read(tmp_path: Path) -> None:
    """The first and the last file are among those that are looked at, and of a long one only the beginning is."""
    for i in range(100):
        (tmp_path / f"{i:03d}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    check_corpus(str(tmp_path), PREPARE)
    for name in ("000.jsonl", "099.jsonl"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(json.dumps([{"text": line} for line in LINES], indent=1))
        with pytest.raises(CorpusError, match=f"{name} is not JSON Lines"):
            check_corpus(str(tmp_path), PREPARE)
        (tmp_path / name).write_text(content)
    (tmp_path / "000.jsonl").write_text(content * 500 + "no JSON\n" * 50_000)
    check_corpus(f"{tmp_path}/000.jsonl", PREPARE)


def test_a_sample_is_of_places_all_over_a_corpus_and_says_its_share(tmp_path: Path) -> None:
    lines = [f"Line {i:07d} is one of a text that is longer than its sample is." for i in range(200_000)]
    (tmp_path / "long.txt").write_text("\n".join(lines))
    with gzip.open(tmp_path / "packed.txt.gz", "wt") as stream:
        stream.write("\n".join(lines[:20_000]))
    files = find_files(str(tmp_path))[0]
    sample = read_sample(files, PREPARE, to_end=True)
    found = [document for place in sample.places for document in place.documents]
    assert len(sample.places) == PLACES and found[0] == lines[0] and len(found) < 140_000
    numbers = [int(document[5:12]) for document in found]
    assert max(numbers) > 195_000 and len({number // 10_000 for number in numbers}) == 20
    packed = sample.places[-1]  # it cannot be cut: read to its end for its share, and kept in part
    assert packed.num_bytes == files[-1].size and packed.num_chars > 1.2e6 > 2 * sum(map(len, packed.documents))
    assert sample.frac == pytest.approx(PLACE_BYTES * (PLACES - 1) / sum(file.size for file in files), rel=0.05)
    glance = read_sample(files, PREPARE)
    assert len(glance.places) == PLACES and glance.frac < sample.frac / 7 and not glance.places[-1].num_bytes
    whole = check_corpus(str(tmp_path / "packed.txt.gz"), PREPARE, to_end=True)
    assert whole.frac == 1 and whole.places[0].num_chars == packed.num_chars
