"""What is made of a text is of its bytes: a corpus, a run that goes on, and what 0.1.0 made of a text in a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from changed_files import REPLACED, TOUCHED, watch_hashing
from conftest import WORDS, write_corpus
from object_store import BUCKET
from row_files import write_arrow
from safetensors.torch import load_file, save_file
from small_runs import make_config
from transformers import AutoTokenizer

from domext_ray.config.pretrain import (
    ObjectiveConfig,
    PrepareConfig,
    PretrainConfig,
    ReplayConfig,
    RunConfig,
    VocabConfig,
)
from domext_ray.errors import CorpusError, RunError
from domext_ray.pretraining.inputs import prepare_run, run_vocabulary
from domext_ray.pretraining.plan import resolve
from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place, Where, find_cache, hash_values, parse_json
from domext_ray.text.corpus import manifest as manifests
from domext_ray.text.corpus import shards
from domext_ray.text.corpus.manifest import (
    MANIFEST,
    Manifest,
    find_shard_fault,
    read_manifest,
    take_numbered,
    write_manifest,
)
from domext_ray.text.corpus.overlap import read_hashes
from domext_ray.text.corpus.shards import identify_corpus, prepare_corpus
from domext_ray.text.data.sources import SOURCES, resolve_sources
from domext_ray.text.vocabulary import learn as learning
from domext_ray.text.vocabulary import word_counts
from domext_ray.text.vocabulary.learn import learn_wordpiece
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.text.vocabulary.word_counts import keep_counts

PREPARE = PrepareConfig(held_out_frac=0.2, min_document_chars=5)
pytestmark = pytest.mark.usefixtures("local_ray")


def swap(content: bytes, old: str = "doctor", new: str = "church") -> bytes:
    """Another word of as many letters in the place of every one."""
    assert old.encode() in content and len(old) == len(new)
    return content.replace(old.encode(), new.encode())


def prepare(text: object, base: Path, where: Where) -> Manifest:
    return prepare_corpus(str(text), PREPARE, base, 32, Place(where))


def read_text(manifest: Manifest, base: Path) -> str:
    numbers = np.arange(manifest.num_rows("train"))
    rows = take_numbered(manifest.shards("train"), numbers)
    return " ".join(AutoTokenizer.from_pretrained(base).batch_decode(rows.column("input_ids").to_pylist()))


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
def test_rows_are_not_those_of_text_that_was_replaced(
    change: Callable[[Path, bytes], None], tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same size and time: marks in the place of names, say."""
    watch_hashing(monkeypatch)
    text = write_corpus(tmp_path / "text.txt", 80)
    before = prepare(text, tiny_base_folder, tmp_path / "corpora")
    assert "doctor" in read_text(before, tiny_base_folder)
    change(text, swap(text.read_bytes()))
    after = prepare(text, tiny_base_folder, tmp_path / "corpora")
    assert after.fingerprint != before.fingerprint and "doctor" not in read_text(after, tiny_base_folder)
    shard = Path(after.shards("train")[0].path)
    assert not find_shard_fault(after)
    change(shard, shard.read_bytes()[:-9] + b"?" + shard.read_bytes()[-8:])
    assert find_shard_fault(after) == f"the shard {shard} is not what its manifest says"


def test_rows_are_not_those_of_a_damaged_shard_that_was_read_before(
    tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is prepared anew at its place, within the process that has it mapped."""
    text = write_corpus(tmp_path / "text.txt", 80)
    made = prepare(text, tiny_base_folder, tmp_path / "corpora")
    shard, numbers = Path(made.shards("train")[0].path), np.arange(made.num_rows("train"))
    rows = take_numbered(made.shards("train"), numbers)
    backwards = pa.ipc.open_file(shard).read_all().take(pa.array(numbers[::-1]))
    shard.unlink()
    write_arrow(shard, backwards)
    assert take_numbered(made.shards("train"), numbers) != rows
    assert prepare(text, tiny_base_folder, tmp_path / "corpora") == made
    assert "is not what its manifest says" in capsys.readouterr().err
    assert take_numbered(made.shards("train"), numbers) == rows


def learn(text: Path, base: Path, folder: Path) -> None:
    learn_wordpiece(str(text), PREPARE, VocabConfig(size=70), folder / "learned", 64)


def count(text: Path, base: Path, folder: Path) -> None:
    tokenizer_json = load_tokenizer(base).backend_tokenizer.to_str()
    with keep_counts(resolve_sources(str(text), PREPARE), PREPARE, tokenizer_json, Place(folder)):
        pass


WORK: dict[str, tuple[Any, str, Callable[[Path, Path, Path], object]]] = {
    "prepared": (shards, "_build", prepare),
    "counted": (word_counts, "_count_words", count),
    "learned": (learning, "_choose_alphabet", learn),
}


@pytest.mark.parametrize(("module", "step", "make"), WORK.values(), ids=WORK)
def test_a_text_that_changes_while_it_is_prepared_leaves_nothing(
    module: Any, step: str, make: Any, tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made of it would be taken for that of the text put back."""
    watch_hashing(monkeypatch)
    text, work = write_corpus(tmp_path / "text.txt", 80), getattr(module, step)
    content = text.read_bytes()

    def change_after(*given: Any) -> Any:
        made = work(*given)
        REPLACED["cp -p"](text, swap(content))
        return made

    monkeypatch.setattr(module, step, change_after)
    with pytest.raises(CorpusError, match=rf"changed while it was read \({text} has changed\)"):
        make(text, tiny_base_folder, tmp_path / "made")
    assert not [path for path in (tmp_path / "made").glob("*") if path.is_dir()]
    REPLACED["cp -p"](text, content)
    monkeypatch.setattr(module, step, work)
    made = make(text, tiny_base_folder, tmp_path / "made")
    assert made is None or "doctor" in read_text(made, tiny_base_folder)


@pytest.fixture
def config(tiny_base_folder: Path, tmp_path: Path) -> PretrainConfig:
    """A run that has begun, with general text."""
    (tmp_path / "texts").mkdir()
    for seed, name in enumerate(("a", "b")):
        write_corpus(tmp_path / "texts" / f"{name}.txt", 80, seed)
    config = make_config(
        tiny_base_folder,
        tmp_path / "texts",
        run=RunConfig(dir=str(tmp_path / "runs"), name="run", trackers=()),
        replay=ReplayConfig(corpus=str(write_corpus(tmp_path / "general.txt", 80, 7)), frac=0.25),
        objective=ObjectiveConfig(keep="replay"),
    )
    begin(config)
    return config


def begin(config: PretrainConfig) -> dict[str, Any]:
    """What a start does until it trains; return what the run is."""
    run = prepare_run(resolve(config))
    Path(run.paths.run).mkdir(parents=True, exist_ok=True)
    write_run(run.paths.run, identity=run.identity)
    return run.identity


def test_a_run_names_the_file_that_changed(config: PretrainConfig, tmp_path: Path) -> None:
    run, own, general = tmp_path / "runs" / "run", tmp_path / "texts" / "b.txt", tmp_path / "general.txt"
    end = f"is not the text that the run directory {run} was made with; bring that back, or give another --run.name."
    prepared = sorted((tmp_path / "runs" / ".corpora").glob("*/" + MANIFEST))
    identity = begin(config)
    for touch in TOUCHED.values():
        touch(own)
        touch(general)
    assert begin(config) == identity
    kept, read_general = own.read_bytes(), general.read_bytes()

    def expect(said: str) -> None:
        with pytest.raises(RunError) as error:
            begin(config)
        assert str(error.value) == said
        assert sorted((tmp_path / "runs" / ".corpora").glob("*/" + MANIFEST)) == prepared, "nothing was made of it"

    REPLACED["cp -p"](own, swap(kept))
    expect(f"{own} has changed, so that --corpus '{own.parent}' {end}")
    (own.parent / "c.txt").write_text("the third file\n")
    expect(f"{own} has changed; {own.parent}/c.txt is new, so that --corpus '{own.parent}' {end}")
    own.write_bytes(kept)
    (own.parent / "c.txt").unlink()
    (own.parent / "a.txt").rename(tmp_path / "a.txt")
    expect(f"{own.parent}/a.txt is gone, so that --corpus '{own.parent}' {end}")
    (tmp_path / "a.txt").rename(own.parent / "a.txt")
    REPLACED["rsync -t"](general, swap(read_general))
    expect(f"{general} has changed, so that --replay.corpus '{general}' {end}")
    REPLACED["tar -x"](general, read_general)
    assert begin(config) == identity

    for path in (tmp_path / "runs" / ".corpora").glob("*/" + SOURCES):
        path.unlink()  # as 0.1.0 left it
    assert begin(config) == identity
    known = [*(tmp_path / "runs" / ".corpora").glob("*/" + SOURCES)]
    assert known, "from now on"
    for path in known:
        path.unlink()
    REPLACED["cp -p"](own, swap(kept))
    with pytest.raises(RunError) as error:
        begin(config)
    assert "belongs to another run (--corpus " in str(error.value) and "has other text, or " in str(error.value)


def test_a_base_that_changed_is_named(config: PretrainConfig, tiny_base_folder: Path, tmp_path: Path) -> None:
    """It is known by its tensors, and always was."""
    weights = tmp_path / "base" / "model.safetensors"
    shutil.copytree(tiny_base_folder, tmp_path / "base")
    moved = replace(config, base=str(tmp_path / "base"))
    begin(moved)
    tensors = load_file(weights)
    tensors["bert.encoder.layer.0.output.dense.weight"] += 1
    save_file(tensors, tmp_path / "other", {"format": "pt"})
    REPLACED["rsync -t"](weights, (tmp_path / "other").read_bytes())
    with pytest.raises(RunError) as error:
        resolve(moved)
    assert f"belongs to another run (--base '{tmp_path}/base' has other weights than before)" in str(error.value)


def test_what_0_1_0_prepared_of_a_bucket_goes_on(
    objects: str, tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew text there by path and time. While these are the same its corpus is taken, and from then on by bytes."""
    watch_hashing(monkeypatch)
    text, corpora = Place(f"{BUCKET}/{tmp_path.name}/text.txt"), tmp_path / "corpora"
    content = write_corpus(tmp_path / "text.txt", 80).read_bytes()
    text.put(content)
    made = prepare(text, tiny_base_folder, corpora)
    sources = resolve_sources(str(text), PREPARE, Place(corpora))
    identity = identify_corpus(sources, PREPARE, AutoTokenizer.from_pretrained(tiny_base_folder), 32, False)
    assert hash_values(identity) == made.fingerprint
    former = hash_values({**identity, "content": sources.former_fingerprint})
    folder = Path(made.folder).rename(corpora / former[:16])
    (folder / SOURCES).unlink()
    record = parse_json((folder / MANIFEST).read_bytes())
    write_manifest(Place(folder), {**{k: v for k, v in record.items() if k != "sha256"}, "fingerprint": former})
    monkeypatch.setattr(shards, "_build", None)
    found = prepare(text, tiny_base_folder, corpora)
    assert found == read_manifest(Place(folder)) and found.fingerprint == former and (folder / SOURCES).is_file()
    text.put(content)
    monkeypatch.setattr(type(sources), "former_fingerprint", property(lambda self: "of another time"))
    assert prepare(text, tiny_base_folder, corpora) == found, "uploaded again"
    text.put(swap(content))
    with pytest.raises(TypeError):
        prepare(text, tiny_base_folder, corpora)


IN_SHARDS = PrepareConfig(shard_bytes=4096, held_out_frac=0.1, min_document_chars=5)


def prepare_shards(text: Path, base: Path, where: Where) -> Manifest:
    return prepare_corpus(str(text), IN_SHARDS, base, 32, Place(where))


def take_all(corpus: Manifest) -> list[list[int]]:
    manifests._map_shard.cache_clear()  # what this process has opened
    numbers = np.arange(corpus.num_rows("train"))
    return list(take_numbered(corpus.shards("train"), numbers).column("input_ids").to_pylist())


def test_it_is_the_disks_and_what_is_damaged_there_is_told(
    local_ray: None, objects: str, tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_corpus(tmp_path / "text.txt", 200)
    places = (tmp_path / "corpora", f"{BUCKET}/{tmp_path.name}/corpora")
    on_disk, in_bucket = (prepare_shards(text, tiny_base_folder, place) for place in places)
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
    assert prepare_shards(text, tiny_base_folder, places[1]) == in_bucket
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
    assert prepare_shards(text, tiny_base_folder, places[1]) == in_bucket
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
