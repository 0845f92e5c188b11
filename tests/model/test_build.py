"""Bases from every kind of checkpoint, what trains, counts, and the base back bit for bit."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tokenizer
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DebertaV2Config,
    GPT2Config,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ShapeConfig
from domext_ray.errors import BaseModelError
from domext_ray.model import build
from domext_ray.model.base import HEADS, Base, hash_tensors, load_base
from domext_ray.model.build import detach, store_base
from domext_ray.model.domext import layers_domext
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.text.data import names

AF = MethodConfig(heads=1, ffn_units=6)


FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)


SHAPE = ShapeConfig(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=48, max_position_embeddings=40
)


SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}


def augment(base: Base | None, method: MethodConfig = AF, **values: Any) -> DomextForMaskedLM:
    size = 70 if base is None else base.config.vocab_size
    return ModelSpec(base, method, SHAPE, **{"vocab_size": size, **values}).build().eval()


def save(model_class: Any, config: Any, folder: Path, **values: Any) -> Path:
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder, **values)
    return save_tokenizer(folder, config.vocab_size)


def copy_base(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def make_inputs(vocab_size: int, pad: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(pad + 1, vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return ids.masked_fill(mask == 0, pad), mask


def assert_equals_theirs(folder: Path) -> Base:
    """The augmented model at step 0 gives the logits of transformers' own model."""
    base = load_base(str(folder))
    model, theirs = augment(base), AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask = make_inputs(base.config.vocab_size, base.config.pad_token_id)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:1]).logits, theirs(ids[:1]).logits, atol=1e-5, rtol=0)
        found, expected = model(ids, mask).logits, theirs(ids, mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    return base


@pytest.fixture
def bert(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


@pytest.fixture
def copied(tiny_base_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny BERT, to be spoiled."""
    return copy_base(tiny_base_folder, tmp_path / "base")


def test_every_kind_has_transformers_own_scores(
    tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    base = assert_equals_theirs(tiny_base_folder)
    assert base.has_mlm_head and not base.config.has_pooler and base.config.position_rule == "absolute"
    assert all(tensor.dtype == torch.float32 for tensor in base.tensors.values())
    assert base.original_names == {name: name for name in base.tensors}
    base = assert_equals_theirs(tiny_roberta_folder)
    assert base.has_mlm_head
    assert (base.config.position_rule, base.config.type_vocab_size, base.config.pad_token_id) == ("roberta", 1, 1)
    assert base.original_names["cls.predictions.transform.LayerNorm.weight"] == "lm_head.layer_norm.weight"
    assert_equals_theirs(save(XLMRobertaForMaskedLM, XLMRobertaConfig(**SIZES, type_vocab_size=1), tmp_path))


def test_unusual_values_are_kept(tmp_path: Path) -> None:
    """RoBERTa's masked-LM head is GELU whatever `hidden_act` is; BERT's follows it."""
    for activation in ("relu", "gelu_new", "silu"):
        values = {**SIZES, "hidden_act": activation, "layer_norm_eps": 0.1}
        bert = BertConfig(**values, pad_token_id=3, type_vocab_size=5)
        assert_equals_theirs(save(BertForMaskedLM, bert, tmp_path / f"bert-{activation}"))
        roberta = RobertaConfig(**values, pad_token_id=4, type_vocab_size=3)
        assert_equals_theirs(save(RobertaForMaskedLM, roberta, tmp_path / f"roberta-{activation}"))


def test_what_config_json_leaves_out_is_the_architectures_default(tmp_path: Path) -> None:
    save(XLMRobertaForMaskedLM, XLMRobertaConfig(**SIZES), tmp_path)
    values = {name: value for name, value in SIZES.items() if name != "initializer_range"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], **values})
    )
    base = assert_equals_theirs(tmp_path)
    assert (base.config.pad_token_id, base.config.type_vocab_size) == (1, 2)


def test_shards(tmp_path: Path) -> None:
    save(BertForMaskedLM, BertConfig(**SIZES), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equals_theirs(tmp_path)


def test_other_weight_files_in_the_folder_are_left_alone(copied: Path, bert: Base) -> None:
    save_file({"bert.encoder.layer.0.output.dense.weight": torch.zeros(1)}, copied / "model.fp16.safetensors")
    (copied / "pytorch_model.bin").write_bytes(b"not read")
    assert load_base(str(copied)).sha256 == bert.sha256


def test_bin_through_the_weights_only_loader(copied: Path, bert: Base) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    tensors["bert.embeddings.position_ids"] = torch.arange(128)[None]
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    torch.save(renamed, copied / "pytorch_model.bin")
    base = assert_equals_theirs(copied)
    assert base.sha256 == bert.sha256
    assert "bert.encoder.layer.0.output.LayerNorm.gamma" in base.original_names.values()


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_bin_that_carries_code_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").unlink()
    malice = {"weight": Malice(tmp_path / "ran")}
    for write in (
        lambda path: path.write_bytes(pickle.dumps(malice, protocol=2)),
        lambda path: torch.save(malice, path),
    ):
        write(copied / "pytorch_model.bin")
        assert_refused(copied, "pytorch_model.bin cannot be read as weights (UnpicklingError: it holds more than ten")
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_not_finite_or_not_tied_are_refused(copied: Path) -> None:
    tensors, name = load_file(copied / "model.safetensors"), "bert.encoder.layer.1.output.dense.weight"
    for value in (math.nan, -math.inf):
        changed = tensors[name].clone()
        changed[3, 5] = value
        save_file({**tensors, name: changed}, copied / "model.safetensors", metadata={"format": "pt"})
        assert_refused(copied, f"nan or infinite values in {name}")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file(tensors, copied / "model.safetensors")
    assert_refused(copied, "not tied")


def test_half_precision_is_cast_before_it_is_hashed(tiny_base_folder: Path, tmp_path: Path) -> None:
    hashes = set()
    for dtype in (torch.float16, torch.float32):
        tensors = load_file(tiny_base_folder / "model.safetensors")
        folder = copy_base(tiny_base_folder, tmp_path / str(dtype))
        save_file({name: tensor.half().to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
        hashes.add(load_base(str(folder)).sha256)
    assert len(hashes) == 1


def test_the_hash_sees_every_bit_and_name(bert: Base) -> None:
    tensors = {name: tensor.clone() for name, tensor in bert.tensors.items()}
    assert hash_tensors(dict(reversed(tensors.items()))) == bert.sha256
    name = "bert.encoder.layer.1.output.LayerNorm.bias"
    tensors[name][3] = torch.nextafter(tensors[name][3], torch.tensor(9.0))
    assert hash_tensors(tensors) != bert.sha256
    renamed = {**bert.tensors, "other": bert.tensors[name]}
    del renamed[name]
    assert hash_tensors(renamed) != bert.sha256


def test_the_pooler_of_a_pretraining_checkpoint_is_kept(tmp_path: Path) -> None:
    base = assert_equals_theirs(save(BertForPreTraining, BertConfig(**SIZES), tmp_path))
    assert base.config.has_pooler
    model, theirs = augment(base), BertModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, _ = make_inputs(70, 0)
    torch.testing.assert_close(model.bert(ids).pooler_output, theirs(ids).pooler_output, atol=1e-5, rtol=0)
    trainable = {name for name, param in augment(base, FULL).named_parameters() if param.requires_grad}
    assert not any("pooler" in name for name in trainable), "masked-LM training gives the pooler no gradient"


def test_a_sentence_encoder_gets_a_head_that_trains(tmp_path: Path) -> None:
    for model_class, config in ((BertModel, BertConfig(**SIZES)), (RobertaModel, RobertaConfig(**SIZES))):
        folder = save(model_class, config, tmp_path / model_class.__name__)
        base = load_base(str(folder))
        assert not base.has_mlm_head and base.config.has_pooler
        model = augment(base)
        ids, _ = make_inputs(70, 1)
        theirs = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        expected = theirs(ids).last_hidden_state
        torch.testing.assert_close(model.bert(ids).last_hidden_state, expected, atol=1e-5, rtol=0)
        trainable = {name for name, param in model.named_parameters() if param.requires_grad and "adapters" not in name}
        head = {f"cls.predictions.transform.{name}" for name in ("dense.weight", "dense.bias")}
        head |= {f"cls.predictions.transform.LayerNorm.{name}" for name in ("weight", "bias")}
        assert trainable == {*head, "cls.predictions.bias"}
        assert not model.cls.predictions.decoder.weight.requires_grad, "tied to the frozen word embeddings"
        own = sum(param.numel() for param in model.parameters() if param.requires_grad)
        assert ModelSpec(base, AF).counts.trainable == own
        assert set(detach(model, base.original_names)) == set(base.original_names.values())


def test_random_weights_without_a_base() -> None:
    model = augment(None, FULL, pad_token_id=2)
    assert model.config.adapters == {} and model.config.pad_token_id == 2
    assert all(param.requires_grad for param in model.parameters())
    table = model.bert.embeddings.position_embeddings.weight
    assert 0.015 < table.square().mean().sqrt() < 0.025
    inner = table @ table.T
    assert torch.allclose(inner.diagonal(1), inner[0, 1].expand(39), atol=1e-5), "depends on the distance alone"


def test_the_seed_decides_and_torch_is_left_alone(bert: Base) -> None:
    for base, method in ((bert, AF), (bert, MethodConfig(init="paper", ffn_units=6)), (None, FULL)):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        first = augment(base, method).state_dict()
        assert torch.equal(torch.rand(3), expected), method
        again, other = augment(base, method).state_dict(), augment(base, method, seed=1).state_dict()
        assert all(torch.equal(first[name], again[name]) for name in first), method
        assert any(not torch.equal(first[name], other[name]) for name in first), method


def test_counts_of_the_paper() -> None:
    """AF Adapter: 1 head and 1,024 units on Chinese RoBERTa-wwm-ext-base, 17.2 % of base + extension."""
    method = MethodConfig(adapter="medicine")
    counts = ModelSpec(Base("bert", DomextConfig(vocab_size=21128, has_pooler=True), HEADS, ""), method).counts
    assert counts.trainable == 21_266_688
    assert round(100 * counts.trainable_frac, 1) == 17.2
    assert round(100 * counts.trainable / (counts.encoder - counts.trainable), 1) == 20.8


def test_a_spec_has_the_shape_of_what_it_builds(bert: Base) -> None:
    spec = ModelSpec(bert, AF)
    assert spec.shape.adapters == augment(bert).config.adapters
    assert spec.counts.total == sum(param.numel() for param in augment(bert).parameters())
    assert bert.config.adapters == {}, "the base's own configuration is left as it was"


def test_a_base_stored_in_bf16_trains_fp32_extensions(bert: Base) -> None:
    method = MethodConfig(init="paper", ffn_units=6)
    ids, mask = make_inputs(bert.config.vocab_size, 0)
    for autocast in (True, False):
        model, exact = augment(bert, method), augment(bert, method)
        store_base(model, torch.bfloat16)
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        for name, param in model.named_parameters():
            stays = param.requires_grad or "LayerNorm" in name
            assert param.dtype == (torch.float32 if stays else torch.bfloat16), name
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            encoded = model.bert(ids, mask, output_hidden_states=True)
            loss, expected = model(ids, mask, labels=ids).loss, exact(ids, mask, labels=ids).loss
        assert all(states.dtype == torch.float32 for states in encoded.hidden_states), "the residual stream"
        torch.testing.assert_close(loss, expected, atol=0.05, rtol=0.02)
        loss.backward()
        gradients = [tensor.grad for tensor in model.parameters() if tensor.requires_grad]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)


def test_lora_is_computed_in_the_dtype_of_autocast(bert: Base) -> None:
    """peft would widen what its updates read, and autocast narrow it again: the same bits, four passes later."""
    method = MethodConfig(heads=0, ffn_units=0, lora_rank=3, lora_targets=("query", "value", "output"))
    ids, mask = make_inputs(bert.config.vocab_size, 0)
    found: dict[bool, list[Tensor]] = {}
    for casts in (False, True):
        model = augment(bert, method)
        store_base(model, torch.bfloat16)
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        assert len(layers) == 6 and not any(module.cast_input_dtype_enabled for module in layers)
        torch.manual_seed(1)
        for layer in layers:
            layer.cast_input_dtype_enabled = casts
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
        dtypes = set[torch.dtype]()
        for layer in layers:
            layer.lora_A["default"].register_forward_pre_hook(lambda _, given, met=dtypes: met.add(given[0].dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, mask, labels=ids).loss
        loss.backward()
        assert dtypes == {torch.float32 if casts else torch.bfloat16}
        found[casts] = [loss, *(param.grad for param in model.parameters() if param.grad is not None)]
    assert len(found[True]) == 13 and all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))


def test_a_mask_is_of_the_dtype_of_the_scores(bert: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every score, and the softmax over them, would be of the wider one."""
    model, weights, attend = augment(bert), list[torch.Tensor](), layers_domext.attend_eagerly
    build.prepare_for_device(model, torch.device("cpu"), bf16=True)
    ids, mask = make_inputs(bert.config.vocab_size, 0)
    assert not mask.all()

    def keep(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        context, own = attend(*arguments, **options)
        weights.append(own)
        return context, own

    monkeypatch.setattr(layers_domext, "attend_eagerly", keep)
    for autocast in (True, False):
        weights.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            model(ids, mask)
        assert {layer_weights.dtype for layer_weights in weights} == {torch.bfloat16 if autocast else torch.float32}
        assert all((layer_weights.masked_select(mask[:, None, None, :] == 0) == 0).all() for layer_weights in weights)


def test_attention_is_fused_where_that_is_faster(bert: Base) -> None:
    model = augment(bert)
    for device, bf16, implementation in (("cpu", True, "eager"), ("cpu", False, "sdpa"), ("cuda", True, "sdpa")):
        build.prepare_for_device(model, torch.device(device), bf16=bf16)
        assert model.config._attn_implementation == implementation, (device, bf16)
        assert model.bert.encoder.layer[0].attention.self.config._attn_implementation == implementation


def assert_refused(base: str | Path, *parts: str) -> None:
    with warnings.catch_warnings(), pytest.raises(BaseModelError) as caught:
        warnings.simplefilter("error")
        load_base(str(base))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message and message.endswith("."), message


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    for config in (DebertaV2Config(), GPT2Config()):
        config.save_pretrained(tmp_path)
        assert_refused(tmp_path, f"model_type {config.model_type!r}", "give a base of bert, roberta, ")
    DomextConfig().save_pretrained(tmp_path)
    assert_refused(tmp_path, "is an export of this library")


def test_folders_that_are_no_checkpoints(tmp_path: Path, tiny_base_folder: Path) -> None:
    assert_refused(tmp_path, "has no config.json")
    assert_refused(tmp_path / "absent", "does not exist")
    assert_refused("./absent", "does not exist")
    (tmp_path / "config.json").write_text("{")
    assert_refused(tmp_path, "is not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    assert_refused(tmp_path, "no JSON object")
    for values, said in (
        ({}, 'has no model_type, which says how the model is built; write "model_type": "bert" into it, or, if it is'),
        ({"architectures": ["BertForMaskedLM"], "model_type": None}, "has no model_type, "),
        ({"architectures": ["BertForMaskedLM"]}, 'write "model_type": "bert" into it.'),
        ({"architectures": ["XLMRobertaForMaskedLM"]}, 'write "model_type": "xlm-roberta" into it.'),
        ({"architectures": ["RobertaModel"]}, 'write "model_type": "roberta" into it.'),
        ({"architectures": ["ModernBertForMaskedLM"]}, 'write "model_type": "modernbert" into it.'),
        ({"architectures": ["GPT2LMHeadModel"]}, "(bert, roberta, "),
        ({"architectures": "BertForMaskedLM"}, "(bert, roberta, "),
        ({"model_type": ["bert"]}, "has model_type ['bert']"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert_refused(tmp_path, said)
    (tmp_path / "config.json").write_text((tiny_base_folder / "config.json").read_text())
    assert_refused(tmp_path, "has no tokenizer (none of tokenizer.json, vocab.txt")
    shutil.copy(tiny_base_folder / "tokenizer.json", tmp_path)
    assert_refused(tmp_path, "neither model.safetensors nor pytorch_model.bin")
    (tmp_path / "model.safetensors").write_bytes((tiny_base_folder / "model.safetensors").read_bytes()[:-9])
    assert_refused(tmp_path, "cannot be read as weights")
    assert_refused(tmp_path / "config.json", "is a file")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def test_what_a_clone_or_a_download_left_in_place_of_a_file_is_told(copied: Path) -> None:
    weights = copied / "model.safetensors"
    for path in (weights, copied / "config.json", copied / "tokenizer.json", copied / "tokenizer_config.json"):
        content = path.read_bytes()
        path.write_bytes(POINTER)
        assert_refused(copied, f"{path} is a pointer of Git LFS, not the file itself; fetch that (git lfs pull")
        path.write_bytes(content)
    for name, said in (
        ("model-00001-of-00002.safetensors", "it has NAME without model.safetensors.index.json, which lists"),
        ("pytorch_model-00001-of-00002.bin", "it has NAME without pytorch_model.bin.index.json, which lists"),
        ("tf_model.h5", "it has NAME, which is TensorFlow's; save the weights for PyTorch"),
        ("bert_model.ckpt.index", "it has NAME, which is TensorFlow's"),
        ("flax_model.msgpack", "it has NAME, which is Flax's"),
        ("model.safetensors.incomplete", "it has NAME, which seems to be a part of one; fetch it again"),
    ):
        weights = weights.rename(copied / name)
        assert_refused(copied, "neither model.safetensors nor pytorch_model.bin; ", said.replace("NAME", name))
    index = copied / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert_refused(copied, f"{index} lists model-00001-of-00001.safetensors, which is not there; fetch that, too")
    index.unlink()
    weights.unlink()
    (copied / "model.safetensors").symlink_to("nowhere")
    assert_refused(copied, "model.safetensors is a link to nothing; fetch it again")


def test_weights_under_other_names_or_quantised_are_told(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    for start in ("module.", "_orig_mod.", "model."):
        save_file({f"{start}{name}": tensor for name, tensor in tensors.items()}, copied / "model.safetensors")
        assert_refused(copied, "has no weights of a Bert model under their names (the first is ", f"'{start}bert.emb")
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn):
        name = "bert.encoder.layer.1.output.dense.weight"
        save_file({**tensors, name: tensors[name].to(dtype)}, copied / "model.safetensors")
        assert_refused(copied, f"is quantised ({name} is {str(dtype).removeprefix('torch.')}); give the model with")
    (copied / "model.safetensors").unlink()
    torch.save({"epoch": 3, "state_dict": tensors}, copied / "pytorch_model.bin")
    assert_refused(copied, "has no weights of a Bert model under their names (the first is 'epoch'); save the model")


def test_a_configuration_that_does_not_fit(copied: Path) -> None:
    content = (copied / "config.json").read_text()
    for values, part in (
        ({"intermediate_size": 65}, "does not hold what its config.json says"),
        ({"num_hidden_layers": 3}, "does not hold what its config.json says"),
        ({"num_hidden_layers": 1}, "does not hold what its config.json says"),
        ({"hidden_act": "wavelet"}, "the activation 'wavelet'"),
        ({"num_attention_heads": 5}, "describes no bert model"),
        ({"is_decoder": True}, "is a decoder"),
        ({"position_embedding_type": "relative_key"}, "relative positions"),
    ):
        (copied / "config.json").write_text(json.dumps({**json.loads(content), **values}))
        assert_refused(copied, part)


def write_vocabulary(folder: Path, entries: Sequence[str]) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")


def test_a_base_without_tokenizer_files_is_refused(tiny_roberta_folder: Path, copied: Path, tmp_path: Path) -> None:
    """Of a folder without them transformers makes a tokenizer that has special tokens alone."""
    for folder, kind in ((copied, "bert"), (copy_base(tiny_roberta_folder, tmp_path / "roberta"), "roberta")):
        (folder / "tokenizer.json").unlink()
        for model_type in (kind, "xlm-roberta")[: 1 if kind == "bert" else 2]:
            values = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**values, "model_type": model_type}))
            assert_refused(folder, f"--base '{folder}'", "has no tokenizer (none of tokenizer.json, vocab.txt")


def test_a_vocabulary_without_its_merges_is_refused(tiny_roberta_folder: Path, tmp_path: Path) -> None:
    """transformers reads every text as single bytes then, and says nothing."""
    folder = copy_base(tiny_roberta_folder, tmp_path / "roberta")
    record = json.loads((folder / "tokenizer.json").read_text())
    model, merges = record["model"], [" ".join(pair) for pair in record["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(record | {"model": model | {"merges": []}}))
    assert_refused(folder, " of its entries by its merges, so that they are not those of its vocabulary; give the")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    assert_refused(folder, "has a vocab.json without merges.txt, which says how words are made; add that")
    for kept in (merges, merges[: len(merges) // 4]):
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *kept]), encoding="utf-8")
        if kept == merges:
            assert load_base(str(folder)).config.vocab_size >= len(model["vocab"])
    assert_refused(folder, " of its entries by its merges, so that they are not those of its vocabulary; give the")


def test_a_special_token_that_the_files_lack_is_refused(copied: Path) -> None:
    """transformers makes one up, whose row in a padded table has learned nothing."""
    entries = list(json.loads((copied / "tokenizer.json").read_text())["model"]["vocab"])
    for missing in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        write_vocabulary(copied, [entry for entry in entries if entry != missing])
        assert_refused(copied, f"has no {missing.strip('[]').lower()} token ({missing}); ")
        write_vocabulary(copied, [f"{entry} " if entry == missing else entry for entry in entries])
        assert_refused(copied, f"has no {missing.strip('[]').lower()} token ({missing}), only '{missing} '; ")
    write_vocabulary(copied, entries)
    assert load_base(str(copied)).config.vocab_size == len(entries)


def test_another_models_tokenizer_is_refused(copied: Path) -> None:
    entries = list(json.loads((copied / "tokenizer.json").read_text())["model"]["vocab"])
    size = len(entries)
    for vocabulary, part in (
        ([*entries, "zebra"], f"ids up to {size}, the model {size} embedding rows"),
        (entries[: size // 2 - 1], "more than half without a word"),
        ([*entries[:5], *(f"[unused{i}]" for i in range(size - 5))], "makes [UNK] of every word of plain text"),
    ):
        write_vocabulary(copied, vocabulary)
        assert_refused(copied, part, "give the model's own tokenizer")
    write_vocabulary(copied, entries[: -(size // 3)])
    assert load_base(str(copied)).config.vocab_size == size, "a padded table is no mistake"


def test_a_hub_id_from_the_cache_in_silence(
    tiny_base_folder: Path, tmp_path: Path, bert: Base, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A cache laid out as the hub's client does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cache = tmp_path / "hub" / "models--someone--tiny"
    copy_base(tiny_base_folder, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    assert load_base("someone/tiny").sha256 == bert.sha256
    assert capfd.readouterr() == ("", "")
    assert_refused("nobody/no-such-model", "could not be fetched from the hub")


def test_the_shipped_base_names_itself_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "ASSETS", tmp_path)
    assert_refused("general-mini", "is missing from this installation")
