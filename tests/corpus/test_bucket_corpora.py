"""A corpus that is prepared in a bucket: the disk's, byte for byte, and whole or told."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import WORDS, write_corpus
from object_store import BUCKET

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, RunConfig, VocabConfig
from domext_ray.errors import CorpusError
from domext_ray.inputs import run_vocabulary
from domext_ray.storage import Place, Where, find_cache
from domext_ray.text.corpus import manifest as manifests
from domext_ray.text.corpus.manifest import Manifest, read_manifest, take_numbered
from domext_ray.text.corpus.overlap import read_hashes
from domext_ray.text.corpus.shards import prepare_corpus

PREPARE = PrepareConfig(shard_bytes=4096, held_out_frac=0.1, min_document_chars=5)


def prepare(text: Path, base: Path, where: Where) -> Manifest:
    return prepare_corpus(str(text), PREPARE, base, 32, Place(where))


def take_all(corpus: Manifest) -> list[list[int]]:
    manifests._map_shard.cache_clear()  # what this process has opened
    numbers = np.arange(corpus.num_rows("train"))
    return list(take_numbered(corpus.shards("train"), numbers).column("input_ids").to_pylist())


def test_it_is_the_disks_and_what_is_damaged_there_is_told(
    local_ray: None, objects: str, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_corpus(tmp_path / "text.txt", 200)
    places = (tmp_path / "corpora", f"{BUCKET}/{tmp_path.name}/corpora")
    on_disk, in_bucket = (prepare(text, tiny_base_folder, place) for place in places)
    assert len(on_disk.train) > 2 and in_bucket.train == on_disk.train and in_bucket.held_out == on_disk.held_out
    names, others = (
        # What a disk knows of its own shards is written once they have been there for a while.
        [name for name in manifest.folder.list_files() if not name.startswith("attempts/") and name != manifests.HASHES]
        for manifest in (on_disk, in_bucket)
    )
    assert names == others
    assert all((on_disk.folder / name).read_bytes() == (in_bucket.folder / name).read_bytes() for name in names)
    for own, other in zip(
        *(vars(read_hashes(manifest.folder)).values() for manifest in (on_disk, in_bucket)), strict=True
    ):
        np.testing.assert_array_equal(own, other)

    before = {name: (in_bucket.folder / name).info() for name in names}
    shutil.rmtree(find_cache(), ignore_errors=True)
    assert prepare(text, tiny_base_folder, places[1]) == in_bucket
    assert before == {name: (in_bucket.folder / name).info() for name in names}
    assert not list(find_cache().rglob("*.arrow")), "to find it no shard is read"
    rows = take_all(on_disk)
    assert take_all(in_bucket) == rows and len(list(find_cache().rglob("*.arrow"))) == len(in_bucket.train)

    shard = Place(in_bucket.shards("train")[1].path)
    content = shard.read_bytes()
    shard.put(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(CorpusError, match=f"the shard {shard} is not what its manifest says"):
        take_all(read_manifest(in_bucket.folder))
    shard.delete()
    assert prepare(text, tiny_base_folder, places[1]) == in_bucket
    assert f"the shard {shard} is missing; the corpus is prepared anew" in capsys.readouterr().err
    assert take_all(in_bucket) == rows


def test_a_learned_vocabulary_lies_in_the_bucket(
    local_ray: None, objects: str, tiny_base_folder: Path, tmp_path: Path
) -> None:
    """Its words are counted in parts that lie there, too, until it is learned."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the amygdala and the thalamus of a zebra and the {word}.\n" for word in WORDS))
    run = f"{BUCKET}/{tmp_path.name}/runs"

    def learn(folder: str) -> Place:
        config = PretrainConfig(
            base=str(tiny_base_folder),
            corpus=str(text),
            vocab=VocabConfig(size=3, whole_words=True),
            run=RunConfig(dir=folder, name="words"),
        )
        vocabulary = run_vocabulary(config)
        assert vocabulary is not None and {*vocabulary.words} == {"amygdala", "thalamus", "zebra"}
        return Place(folder) / "words"

    on_disk, in_bucket = learn(str(tmp_path / "runs")), learn(run)
    assert on_disk.list_files() == in_bucket.list_files() and "extension.json" in in_bucket.list_names()
    for name in on_disk.list_files():
        assert (on_disk / name).read_bytes() == (in_bucket / name).read_bytes()
    assert not [entry for entry in (Place(run) / ".corpora").list_names() if not entry.startswith(".hashes-")]
