"""A model as a value: what it is, what of it goes to another process, and how often a base is read."""

from __future__ import annotations

import gc
import pickle
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig, TrainConfig, VocabConfig
from domext_ray.errors import RunError
from domext_ray.model import base as base_module
from domext_ray.model.base import Base, hash_tensors, load_base
from domext_ray.model.spec import META, ModelSpec
from domext_ray.models.masked_lm import load_masked_lm

METHOD = MethodConfig(heads=1, ffn_units=8)


@pytest.fixture
def folder(tiny_base_folder: Path, tmp_path: Path) -> Path:
    """A base of this test's own."""
    return Path(shutil.copytree(tiny_base_folder, tmp_path / "base"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The folders whose tensors are read."""
    gc.collect()
    found, real = list[Path](), base_module.read_weights

    def read_weights(folder: Path, base: str) -> dict[str, Any]:
        found.append(folder)
        return real(folder, base)

    monkeypatch.setattr(base_module, "read_weights", read_weights)
    yield found


def change(folder: Path) -> None:
    """Give a base other weights."""
    path = folder / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def test_a_base_is_read_once_as_long_as_somebody_has_it(folder: Path, reads: list[Path]) -> None:
    first = load_base(str(folder))
    assert load_base(str(folder)) is first and len(reads) == 1
    with_pairs = load_base(str(folder), next_sentence=True)
    assert with_pairs is not first and len(reads) == 2
    sha256 = first.sha256
    change(folder)
    assert load_base(str(folder)).sha256 != sha256 and len(reads) == 3, "its files are others now"
    del first, with_pairs
    gc.collect()
    load_base(str(folder))
    assert len(reads) == 4, "nothing is kept that nobody has"


def test_a_base_leaves_its_files_behind_and_finds_them_again(folder: Path, reads: list[Path]) -> None:
    base = load_base(str(folder))
    packed = pickle.dumps(ModelSpec(base, METHOD, new_words=[[7], [8, 9]]))
    assert len(packed) < 20_000 < sum(tensor.nbytes for tensor in base.tensors.values())
    expected = ModelSpec(base, METHOD, new_words=[[7], [8, 9]]).build().state_dict()
    del base
    gc.collect()
    spec = pickle.loads(packed)
    assert (spec.base_sha256, spec.counts.trainable > 0, len(reads)) == (spec.base.sha256, True, 1)
    found = spec.build().state_dict()
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
    assert spec.build() is not None and load_base(str(folder)).tensors is spec.base.tensors
    assert (len(reads), spec.base.folder) == (2, folder)


def test_what_is_made_of_a_base_leaves_it_as_it_is(tiny_base_folder: Path) -> None:
    base = load_base(str(tiny_base_folder))
    for _ in range(2):
        model, _tokenizer = load_masked_lm(str(tiny_base_folder))
        assert model.config.adapters == {}
        model.attach_adapter("law", bottleneck_size=4)
        model.set_active_adapters([])
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    assert (base.config.adapters, base.config.active_adapters) == ({}, None)
    assert hash_tensors(base.tensors) == base.sha256


def test_another_base_in_its_place_is_refused(folder: Path) -> None:
    spec = pickle.loads(pickle.dumps(ModelSpec(load_base(str(folder)), METHOD)))
    change(folder)
    gc.collect()
    with pytest.raises(RunError, match=re.escape(f"the base {str(folder)!r} on this node has sha256")):
        spec.build()


@pytest.mark.parametrize("method", [METHOD, MethodConfig(heads=0, ffn_units=0, lora_rank=2)], ids=["af", "lora"])
def test_a_model_without_values_is_the_one_with_them(method: MethodConfig, tiny_base_folder: Path) -> None:
    spec = ModelSpec(load_base(str(tiny_base_folder)), method, new_words=[[7]], next_sentence=True)
    plain, empty = dict(spec.build().named_parameters()), dict(spec.build(META).named_parameters())
    assert [*plain] == [*empty] and all(tensor.is_meta for tensor in empty.values())
    for name, param in plain.items():
        assert (param.shape, param.requires_grad) == (empty[name].shape, empty[name].requires_grad), name


def test_options_become_one_value(tiny_base_folder: Path) -> None:
    config = PretrainConfig(
        base=str(tiny_base_folder),
        seed=5,
        method=METHOD,
        train=TrainConfig(seq_length=16, long_seq_length=32, dropout=0.2, attention_dropout=0.0),
    )
    base = load_base(config.base)
    spec = ModelSpec.of(config, base, num_new_words=3)
    shape = spec.shape
    assert (shape.vocab_size, shape.extension_vocab_size) == (base.config.vocab_size + 3, 3)
    assert (shape.hidden_dropout_prob, shape.attention_probs_dropout_prob) == (0.2, 0.0)
    assert spec == ModelSpec.of(config, base, num_new_words=3) != replace(spec, seed=6)
    known = spec.with_tokenizer(base.folder)
    assert (known.new_words, known.vocab_size <= base.config.vocab_size) == ([], True)
    method = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
    plain = PretrainConfig(base="none", vocab=VocabConfig(size=70), method=method)
    assert ModelSpec.of(plain, None).shape.vocab_size == 70


def test_what_has_no_place_is_refused(tiny_base_folder: Path) -> None:
    spec = ModelSpec(load_base(str(tiny_base_folder)), METHOD)
    trained = {name: param for name, param in spec.build().named_parameters() if param.requires_grad}
    model = spec.load({name: param.detach() + 1 for name, param in trained.items()}, "there")
    assert all(torch.equal(model.get_parameter(name), param + 1) for name, param in trained.items())
    lacking = {name: param for name, param in trained.items() if name != min(trained)}
    for wrong in (lacking, {**trained, min(trained): torch.zeros(1)}):
        with pytest.raises(RunError, match=f"there does not fit .*first at {re.escape(min(trained))}"):
            spec.load(wrong, "there")


def test_a_base_that_was_never_read_can_be_counted() -> None:
    shape = load_base("general-mini").config
    assert ModelSpec(Base("nowhere", shape, (), ""), METHOD).counts.total > 0
