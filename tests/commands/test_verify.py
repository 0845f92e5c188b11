"""What `domext verify` says of every kind of place, whole and damaged, here and in a bucket."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_runs import make_run
from conftest import write_corpus
from job_calls import Ended, call_job
from made_banks import add_drawn
from object_store import BUCKET

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PrepareConfig, PretrainConfig
from domext_ray.export.model_folder import export_run
from domext_ray.model.base import load_base
from domext_ray.model.spec import ModelSpec
from domext_ray.models.bank import AdapterBank
from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place
from domext_ray.text.corpus.shards import prepare_corpus
from domext_ray.text.vocabulary.extension import save_extension


def verify(place: Path | Place) -> Ended:
    return call_job("verify", str(place))


@pytest.fixture(scope="module")
def run(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint, a tokenizer and an export."""
    base, folder = load_base(str(tiny_base_folder)), tmp_path_factory.mktemp("verify") / "af"
    config = PretrainConfig(base=str(tiny_base_folder), method=MethodConfig(heads=1, ffn_units=8))
    model = ModelSpec(base, config.method).build()
    make_run(folder, config, model, base)
    write_run(Place(folder), identity={"base": "tiny"})
    shutil.copytree(tiny_base_folder, folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    export_run(Place(folder), Place(folder / "export"))
    return folder


def copy_run(run: Path, base: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder))


def copy_export(run: Path, base: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run / "export", folder))


def make_bank(run: Path, base: Path, folder: Path) -> Path:
    bank = AdapterBank.create(folder, str(base))
    for number, name in enumerate(("clinic", "law")):
        add_drawn(bank, name, "masked_lm", number)
    return folder


def make_vocabulary(run: Path, base: Path, folder: Path) -> Path:
    save_extension(folder, load_base(str(base)).vocabulary, ["thalamus", "myocarditis"], {})
    return folder


def make_corpus(run: Path, base: Path, folder: Path) -> Path:
    text = write_corpus(folder.with_suffix(".txt"), 200)
    prepare = PrepareConfig(shard_bytes=4096, held_out_frac=0.1, min_document_chars=5)
    return Path(prepare_corpus(str(text), prepare, base, 32, Place(folder.with_suffix(".corpora"))).folder)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def read_all(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("make", "kind", "files"),
    [
        (copy_run, "run", ("checkpoints/*/moments.safetensors", "export/model.safetensors")),
        (copy_export, "export", ("config.json",)),
        (make_bank, "bank of adapters", ("adapters/law/adapter-*.safetensors",)),
        (make_vocabulary, "vocabulary", ("extension.json",)),
        (make_corpus, "prepared corpus", ("train-*.arrow", "token_counts.npy")),
    ],
)
def test_damage_is_named_and_nothing_is_changed(
    make: Callable[[Path, Path, Path], Path],
    kind: str,
    files: tuple[str, ...],
    run: Path,
    local_ray: None,
    tiny_base_folder: Path,
    tmp_path: Path,
) -> None:
    place = make(run, tiny_base_folder, tmp_path / "place")
    before = read_all(place)
    ended = verify(place)
    assert (ended.code, ended.err) == (0, "") and read_all(place) == before
    assert ended.out.startswith(f"{kind}: {place}\n") and "damaged" not in ended.out
    for path, damage in itertools.product(
        [sorted(place.glob(pattern))[0] for pattern in files], (flip, cut, Path.unlink)
    ):
        whole = path.read_bytes()
        damage(path)
        ended = verify(place)
        assert ended.code == 2 and ended.err.count("\n") == 1 and path.name in f"{ended.out}{ended.err}"
        if not (kind == "vocabulary" and damage is Path.unlink):  # without that file it is none
            assert sum(line.endswith("damaged") for line in ended.out.splitlines()) == 1
        path.write_bytes(whole)
    assert verify(place).code == 0 and read_all(place) == before


def test_every_damage_has_a_sentence(run: Path, tmp_path: Path) -> None:
    place = copy_run(run, run, tmp_path / "place")
    for name in ("config.yaml", "run.json", "tokenizer/tokenizer.json", "export/config.json"):
        cut(place / name)
    (place / "export" / "model.safetensors").unlink()
    (place / "export" / "notes.txt").write_text("mine")
    (copy_export(run, run, place / "onnx") / "model.safetensors").unlink()  # any export beside that of the run
    (place / "router.safetensors").write_bytes(b"none")
    ended = verify(place)
    assert ended.code == 2 and ended.err == f"error: {place} is damaged: 8 of its files or parts, named above.\n"
    sentences = ended.out.splitlines()[-8:]
    assert all(str(place) in sentence and sentence.endswith(".") for sentence in sentences)


def test_a_bucket_is_read_like_a_disk(run: Path, objects: str, tmp_path: Path) -> None:
    place = Place(f"{BUCKET}/{tmp_path.name}/af")
    for name in Place(run).list_files():
        (place / name).put((run / name).read_bytes())
    assert verify(place).code == verify(place / "export").code == 0
    (place / "export" / "model.safetensors").put(b"other")
    ended = verify(place)
    assert ended.code == 2 and f"{place}/export/model.safetensors: changed since it was exported" in ended.out


def test_what_is_none_of_these_is_told(tmp_path: Path) -> None:
    ended = verify(tmp_path)
    assert ended.code == 2 and ended.out == "" and "is no run, corpus, vocabulary, bank or export" in ended.err
    assert "--path names '/nope', which does not exist; give a run" in call_job("verify", "/nope").err
    assert call_job("verify").err == "error: --path is ''; it must be a folder, such as runs/af.\n"
