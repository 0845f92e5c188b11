"""Documents that texts have in common are counted exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_shards import PREPARE, VOCABULARY, prepare_lines, read_numbers, write_lines
from transformers import BertTokenizer

from domext_ray.errors import CorpusError
from domext_ray.text.corpus import overlap
from domext_ray.text.corpus.overlap import DocumentHashes, count_common, find_overlaps, read_hashes


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


def test_a_prepared_corpus_keeps_the_hashes_of_its_documents(local_ray: None, tmp_path: Path) -> None:
    tokenizer_dir = tmp_path / "tokenizer"
    BertTokenizer(vocab={token: i for i, token in enumerate(VOCABULARY)}).save_pretrained(tokenizer_dir)
    first = write_lines(tmp_path / "first.txt", [*range(300), *range(50)])
    second = write_lines(tmp_path / "second.txt", [*range(200, 400)])
    for held_out_by in ("document", "block"):
        prepare = replace(PREPARE, held_out_by=held_out_by)
        manifests = [prepare_lines(text, tokenizer_dir, tmp_path / "cache", prepare) for text in (first, second)]
        hashes = [read_hashes(manifest.folder) for manifest in manifests]
        own, other = hashes
        assert (len(own), len(other)) == (300, 200)
        lines = [{split: {*read_numbers(manifest, split)} for split in ("train", "held_out")} for manifest in manifests]
        for split in ("train", "held_out"):
            assert len(getattr(own, split)) == len(lines[0][split])
            for another in ("train", "held_out"):
                common = lines[0][split] & lines[1][another]
                assert count_common(getattr(own, split), getattr(other, another)) == len(common)
        for path in Path(manifests[0].folder).glob("documents-*.npy"):
            path.unlink()
        prepare_lines(first, tokenizer_dir, tmp_path / "cache", prepare)  # which finds the corpus not whole
        again = read_hashes(manifests[0].folder)
        assert np.array_equal(again.train, own.train) and np.array_equal(again.held_out, own.held_out)
    (manifests[1].folder / "documents-train.npy").put(b"\x93NUMPY")
    with pytest.raises(CorpusError, match="has no sound hashes of its documents"):
        read_hashes(manifests[1].folder)
