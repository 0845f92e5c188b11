"""exBERT: the gated module against its equation, new words in and out, parameter counts, and what trains."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining, BertModel, RobertaConfig, RobertaForMaskedLM

from domext_ray.config.extensions.table import is_extension
from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.model.base import HEADS, Base, load_base
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining
from domext_ray.model.spec import ModelSpec

Tensors = dict[str, Tensor]


EXBERT = MethodConfig(name="exbert", heads=0, ffn_units=0, module_hidden_size=12, module_ffn_size=20)


NO_MODULE = MethodConfig(name="words", heads=0, ffn_units=0)


EVERYTHING = MethodConfig(heads=1, ffn_units=6, module_hidden_size=12, module_ffn_size=20, init="paper")


NEW_WORDS = [[7, 8], [9], [10, 11, 12]]


NUM_HEADS = 4


@pytest.fixture
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


def augment(base: Base, method: MethodConfig = EXBERT, **values: Any) -> DomextForMaskedLM:
    return ModelSpec(base, method, **{"new_words": NEW_WORDS, **values}).build().eval()


def stir(model: torch.nn.Module) -> None:
    """Move every extension off its start: a bias of zero hides a missing one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_extension(name):
                param.add_(0.2 * torch.randn(param.shape, generator=generator))


def make_ids(base: Base, rows: int = 3, length: int = 11) -> Tensor:
    """Rows with words of the base and new ones."""
    ids = torch.randint(5, base.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    ids[:, 2::4] = base.config.vocab_size + torch.arange(rows)[:, None] % len(NEW_WORDS)
    return ids


# --- the paper's equation, in double precision ----------------------------------------------------------------------


def normalize(x: Tensor, params: Tensors, name: str) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"], 1e-12)


def project(x: Tensor, params: Tensors, name: str) -> Tensor:
    return functional.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def attend(x: Tensor, params: Tensors, name: str) -> Tensor:
    heads = (project(x, params, f"{name}.{part}").unflatten(-1, (NUM_HEADS, -1)) for part in ("query", "key", "value"))
    query, key, value = (projected.transpose(1, 2) for projected in heads)
    weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def run_layer(x: Tensor, params: Tensors, names: dict[str, str]) -> Tensor:
    """One post-LN transformer layer (T_ofs and T_ext alike)."""
    attention, output = names["attention_output"], names["output"]
    attended = project(attend(x, params, names["heads"]), params, f"{attention}.dense") + x
    attended = normalize(attended, params, f"{attention}.LayerNorm")
    inner = functional.gelu(project(attended, params, names["intermediate"]))
    return normalize(project(inner, params, f"{output}.dense") + attended, params, f"{output}.LayerNorm")


PARTS = ("heads", "attention_output", "intermediate", "output")
BASE_NAMES = dict(zip(PARTS, ("attention.self", "attention.output", "intermediate.dense", "output"), strict=True))


MODULE_NAMES = {part: f"extension.{part}" for part in PARTS}


def score_by_hand(model: DomextForMaskedLM, ids: Tensor) -> Tensor:
    """`H_out = T_ofs(H)·σ(w(H)) + T_ext(H)·(1 - σ(w(H)))`, and logits over both tables of words."""
    params = {name: param.detach().double() for name, param in model.named_parameters()}
    words = [params["bert.embeddings.word_embeddings.weight"], params["bert.embeddings.extension.weight"]]
    x = torch.cat(words)[ids] + params["bert.embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = normalize(x + params["bert.embeddings.token_type_embeddings.weight"][0], params, "bert.embeddings.LayerNorm")
    for i in range(model.config.num_hidden_layers):
        start = f"bert.encoder.layer.{i}."
        layer = {name.removeprefix(start): tensor for name, tensor in params.items() if name.startswith(start)}
        gate = project(x, layer, "extension.gate").sigmoid()
        x = run_layer(x, layer, BASE_NAMES) * gate + run_layer(x, layer, MODULE_NAMES) * (1 - gate)
    head = "cls.predictions.transform"
    x = normalize(functional.gelu(project(x, params, f"{head}.dense")), params, f"{head}.LayerNorm")
    bias = torch.cat([params["cls.predictions.bias"], params["cls.predictions.extension.bias"]])
    return x @ torch.cat(words).T + bias


def test_the_forward_pass_follows_the_papers_equation(base: Base) -> None:
    model, ids = augment(base), make_ids(base)
    stir(model)
    expected = score_by_hand(model, ids)
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found = model(ids).logits
        assert found.shape[-1] == base.config.vocab_size + len(NEW_WORDS)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_sizes_of_the_paper() -> None:
    """Of a layer, beside the gate, and its share of a layer of the base; and twelve gated layers."""
    for width, units, expected, share in (
        (120, 512, 1_160_552, 16.4),
        (180, 720, 1_664_748, 23.5),
        (252, 1024, 2_353_396, 33.2),
        (504, 2048, 4_702_184, 66.3),
        (768, 3072, 7_087_872, 100.0),
    ):
        sizes = {"module_hidden_size": width, "module_ffn_size": units}
        method = MethodConfig(heads=0, ffn_units=0, **sizes)
        counts = ModelSpec(Base("one", DomextConfig(num_hidden_layers=1), HEADS, ""), method).counts
        assert counts.trainable == expected + 768 + 1
        assert round(100 * expected / 7_087_872, 1) == share
        if width == 252:
            assert ModelSpec(Base("all", DomextConfig(), HEADS, ""), method).counts.trainable == 28_249_980


def test_counts_are_those_of_the_tensors(base: Base) -> None:
    for method, trains, next_sentence, train_heads in product(
        (EXBERT, NO_MODULE, EVERYTHING), ("extensions", "all"), (False, True), (False, True)
    ):
        own = replace(method, trains=trains, train_heads=train_heads)
        model = augment(base, own, next_sentence=next_sentence)
        counts = ModelSpec(base, own, new_words=NEW_WORDS, next_sentence=next_sentence).counts
        assert counts.total == sum(param.numel() for param in model.parameters()), own
        assert counts.trainable == sum(param.numel() for param in model.parameters() if param.requires_grad), own
        assert counts.encoder == sum(param.numel() for param in model.bert.parameters()), own


def test_an_open_gate_is_the_base(base: Base) -> None:
    """A gate cannot be quite open, but the nearer to it, the nearer the model is to the base."""
    ids = make_ids(base).clamp(max=base.config.vocab_size - 1)
    plain = augment(base, MethodConfig(heads=0, ffn_units=1), new_words=[])
    distances = []
    for bias in (0.0, 4.0, 40.0):
        model = augment(base, replace(EXBERT, gate_bias=bias))
        assert {layer.extension.gate.bias.item() for layer in model.bert.encoder.layer} == {bias}
        found = model(ids).logits[..., : base.config.vocab_size]
        distances.append(float((found - plain(ids).logits).detach().abs().max()))
    assert distances[0] > distances[1] > distances[2] and distances[2] < 1e-4, distances


def test_new_words_start_at_random_or_from_their_pieces(base: Base) -> None:
    known = base.tensors["bert.embeddings.word_embeddings.weight"]
    table = augment(base, replace(EXBERT, word_init="subword_mean")).bert.embeddings.extension.weight
    for row, pieces in enumerate(NEW_WORDS):
        torch.testing.assert_close(table[row], known[pieces].mean(0))
    random = augment(base).bert.embeddings.extension.weight
    assert not torch.isclose(random, table).any()
    assert 0.05 < random.std() < 0.2, "the base's initializer_range is 0.1"


def test_the_output_is_tied_to_both_tables(base: Base, tmp_path: Path) -> None:
    model = augment(base)
    stir(model)
    model.save_pretrained(tmp_path)
    for network in (model, DomextForMaskedLM.from_pretrained(tmp_path)):
        head, embeddings = network.cls.predictions, network.bert.embeddings
        assert head.extension.weight is embeddings.extension.weight
        assert head.decoder.weight is embeddings.word_embeddings.weight
    ids = make_ids(base)
    assert torch.equal(DomextForMaskedLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_stage_two_and_trained_heads(base: Base) -> None:
    model = augment(base, replace(EXBERT, trains="all"))
    assert all(param.requires_grad for param in model.parameters())
    heads = augment(base, replace(EXBERT, train_heads=True), next_sentence=True)
    trained = {name for name, param in heads.named_parameters() if param.requires_grad and not is_extension(name)}
    assert trained == {
        name for name, _ in heads.named_parameters() if name.startswith(HEADS) and not is_extension(name)
    }
    assert not heads.bert.embeddings.word_embeddings.weight.requires_grad
    adapter = augment(base, MethodConfig(heads=1, ffn_units=0, trains="adapter", train_heads=True))
    trained = {name for name, param in adapter.named_parameters() if param.requires_grad and is_extension(name)}
    assert trained and all(".adapters.domain." in name for name in trained), "the head's biases of new words do not"


def test_what_does_not_fit_is_refused(base: Base, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--method.module_hidden_size is 13; it must be divisible by .* 4 attention"):
        augment(base, replace(EXBERT, module_hidden_size=13))
    config = RobertaConfig(**{**SMALL, "type_vocab_size": 1})
    RobertaForMaskedLM(config).save_pretrained(save_tokenizer(tmp_path, 70))
    with pytest.raises(ConfigError, match="pairs need two"):
        augment(load_base(str(tmp_path)), MethodConfig(heads=1, ffn_units=2), new_words=[], next_sentence=True)


# --- next sentence --------------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "vocab_size": 70,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}


def test_a_pretraining_checkpoint_brings_its_next_sentence_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = BertForPreTraining(BertConfig(**SMALL)).eval()
    theirs.save_pretrained(save_tokenizer(tmp_path, 70))
    base = load_base(str(tmp_path), next_sentence=True)
    assert base.heads == HEADS and load_base(str(tmp_path)).heads == (HEADS[0], HEADS[2])
    model = augment(base, MethodConfig(heads=1, ffn_units=2), new_words=[], next_sentence=True)
    assert isinstance(model, DomextForPreTraining)
    ids = torch.randint(5, 70, (3, 9))
    segments = (torch.arange(9) > 4).long().expand(3, 9)
    found, expected = model(ids, token_type_ids=segments), theirs(ids, token_type_ids=segments)
    torch.testing.assert_close(found.prediction_logits, expected.prediction_logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5, rtol=0)
    labels = {"labels": ids, "next_sentence_label": torch.tensor([0, 1, 0])}
    torch.testing.assert_close(
        model(ids, token_type_ids=segments, **labels).loss, theirs(ids, token_type_ids=segments, **labels).loss
    )
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        name for name, _ in model.named_parameters() if is_extension(name)
    }


def test_a_sentence_encoder_gets_all_heads(tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(save_tokenizer(tmp_path, 70))
    base = load_base(str(tmp_path), next_sentence=True)
    assert base.heads == (HEADS[2],)
    model = augment(base, EXBERT, next_sentence=True)
    trained = {name.split(".")[1] for name, param in model.named_parameters() if param.requires_grad and "cls" in name}
    assert trained == {"predictions", "seq_relationship"}
