"""exBERT: the gated module against NumPy, new words in and out, parameter counts, and what trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_tokenizer
from torch import Tensor
from transformers import BertConfig, BertForPreTraining, BertModel, RobertaConfig, RobertaForMaskedLM

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import ShapeConfig
from domext_ray.errors import ConfigError
from domext_ray.extensions.table import is_extension
from domext_ray.model.base import HEADS, Base, hash_tensors, load_base
from domext_ray.model.build import build_model, detach
from domext_ray.model.counts import count_parameters
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM, DomextForPreTraining

Arrays = dict[str, np.ndarray]

EXBERT = MethodConfig(name="exbert", heads=0, ffn_units=0, module_hidden_size=12, module_ffn_size=20)
NO_MODULE = MethodConfig(name="words", heads=0, ffn_units=0)
EVERYTHING = MethodConfig(heads=1, ffn_units=6, module_hidden_size=12, module_ffn_size=20, init="paper")
NEW_WORDS = [[7, 8], [9], [10, 11, 12]]
NUM_HEADS = 4


@pytest.fixture
def base(tiny_base_folder: Path) -> Base:
    return load_base(str(tiny_base_folder))


def augment(base: Base, method: MethodConfig = EXBERT, **values: Any) -> DomextForMaskedLM:
    values = {"vocab_size": base.config.vocab_size, "new_words": NEW_WORDS, "dropout": 0.0, "seed": 0, **values}
    return build_model(base, ShapeConfig(), method, **values).eval()


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


# --- the paper's equation in NumPy ----------------------------------------------------------------------------------


def normalize(x: np.ndarray, params: Arrays, name: str) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * params[f"{name}.weight"] + params[f"{name}.bias"]


def project(x: np.ndarray, params: Arrays, name: str) -> np.ndarray:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attend(x: np.ndarray, params: Arrays, name: str) -> np.ndarray:
    query, key, value = (project(x, params, f"{name}.{each}") for each in ("query", "key", "value"))
    size = query.shape[-1] // NUM_HEADS
    heads = []
    for i in range(NUM_HEADS):
        part = slice(i * size, (i + 1) * size)
        scores = query[..., part] @ key[..., part].swapaxes(-1, -2) / math.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ value[..., part])
    return np.concatenate(heads, -1)


def run_layer(x: np.ndarray, params: Arrays, names: dict[str, str]) -> np.ndarray:
    """One post-LN transformer layer (T_ofs and T_ext alike)."""
    output = names["attention_output"]
    attended = normalize(
        project(attend(x, params, names["heads"]), params, f"{output}.dense") + x, params, f"{output}.LayerNorm"
    )
    output = names["output"]
    inner = gelu(project(attended, params, names["intermediate"]))
    return normalize(project(inner, params, f"{output}.dense") + attended, params, f"{output}.LayerNorm")


BASE_NAMES = {
    "heads": "attention.self",
    "attention_output": "attention.output",
    "intermediate": "intermediate.dense",
    "output": "output",
}
MODULE_NAMES = {
    "heads": "extension.heads",
    "attention_output": "extension.attention_output",
    "intermediate": "extension.intermediate",
    "output": "extension.output",
}


def score_in_numpy(model: DomextForMaskedLM, ids: np.ndarray) -> np.ndarray:
    """`H_out = T_ofs(H)·σ(w(H)) + T_ext(H)·(1 - σ(w(H)))`, and logits over both tables of words."""
    params = {name: each.detach().double().numpy() for name, each in model.named_parameters()}
    words = [params["bert.embeddings.word_embeddings.weight"], params["bert.embeddings.extension.weight"]]
    x = np.concatenate(words)[ids] + params["bert.embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = normalize(x + params["bert.embeddings.token_type_embeddings.weight"][0], params, "bert.embeddings.LayerNorm")
    for i in range(model.config.num_hidden_layers):
        start = f"bert.encoder.layer.{i}."
        layer = {name.removeprefix(start): each for name, each in params.items() if name.startswith(start)}
        gate = 1 / (1 + np.exp(-project(x, layer, "extension.gate")))
        x = run_layer(x, layer, BASE_NAMES) * gate + run_layer(x, layer, MODULE_NAMES) * (1 - gate)
    head = "cls.predictions.transform"
    x = normalize(gelu(project(x, params, f"{head}.dense")), params, f"{head}.LayerNorm")
    bias = np.concatenate([params["cls.predictions.bias"], params["cls.predictions.extension.bias"]])
    return x @ np.concatenate(words).T + bias


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_forward_pass_follows_the_papers_equation(base: Base, implementation: str) -> None:
    model = augment(base)
    stir(model)
    model.set_attn_implementation(implementation)
    ids = make_ids(base)
    with torch.no_grad():
        found = model(ids).logits
    expected = score_in_numpy(model, ids.numpy())
    assert found.shape[-1] == base.config.vocab_size + len(NEW_WORDS)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5, rtol=0)


# --- counts ---------------------------------------------------------------------------------------------------------

SIZES_OF_THE_PAPER = [
    (120, 512, 1_160_552, 16.4),
    (180, 720, 1_664_748, 23.5),
    (252, 1024, 2_353_396, 33.2),
    (504, 2048, 4_702_184, 66.3),
    (768, 3072, 7_087_872, 100.0),
]


@pytest.mark.parametrize(("width", "units", "expected", "share"), SIZES_OF_THE_PAPER)
def test_sizes_of_the_paper(width: int, units: int, expected: int, share: float) -> None:
    method = MethodConfig(heads=0, ffn_units=0, module_hidden_size=width, module_ffn_size=units)
    config = DomextConfig(num_hidden_layers=1, module_hidden_size=width, module_ffn_size=units)
    gate = 768 + 1
    assert count_parameters(config, method, HEADS).trainable == expected + gate
    assert round(100 * expected / 7_087_872, 1) == share, "of a layer of the base"


def test_twelve_gated_modules_of_the_paper() -> None:
    method = MethodConfig(heads=0, ffn_units=0, module_hidden_size=252, module_ffn_size=1024)
    config = DomextConfig(module_hidden_size=252, module_ffn_size=1024)
    assert count_parameters(config, method, HEADS).trainable == 28_249_980


@pytest.mark.parametrize("train_heads", [False, True])
@pytest.mark.parametrize("next_sentence", [False, True])
@pytest.mark.parametrize("method", [EXBERT, NO_MODULE, EVERYTHING])
@pytest.mark.parametrize("trains", ["extensions", "all"])
def test_counts_are_those_of_the_tensors(
    base: Base, method: MethodConfig, trains: str, next_sentence: bool, train_heads: bool
) -> None:
    values = {**vars(method), "trains": trains, "train_heads": train_heads}
    method = MethodConfig(**values)
    model = augment(base, method, next_sentence=next_sentence)
    counts = count_parameters(model.config, method, base.heads, next_sentence=next_sentence)
    assert counts.total == sum(each.numel() for each in model.parameters())
    assert counts.trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counts.encoder == sum(each.numel() for each in model.bert.parameters())


# --- starts and rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_the_gates_bias_is_a_value(base: Base, bias: float) -> None:
    model = augment(base, MethodConfig(**{**vars(EXBERT), "gate_bias": bias}))
    gates = [layer.extension.gate.bias for layer in model.bert.encoder.layer]
    assert all(torch.equal(each, torch.full((1,), bias)) for each in gates)


def test_an_open_gate_is_the_base(base: Base) -> None:
    """A gate cannot be quite open, but the nearer to it, the nearer the model is to the base."""
    ids = make_ids(base).clamp(max=base.config.vocab_size - 1)
    plain = augment(base, MethodConfig(heads=0, ffn_units=1), new_words=[])
    distances = []
    for bias in (0.0, 4.0, 40.0):
        model = augment(base, MethodConfig(**{**vars(EXBERT), "gate_bias": bias}))
        found = model(ids).logits[..., : base.config.vocab_size]
        distances.append(float((found - plain(ids).logits).detach().abs().max()))
    assert distances[0] > distances[1] > distances[2] and distances[2] < 1e-4, distances


def test_new_words_start_at_random_or_from_their_pieces(base: Base) -> None:
    known = base.tensors["bert.embeddings.word_embeddings.weight"]
    table = augment(
        base, MethodConfig(**{**vars(EXBERT), "word_init": "subword_mean"})
    ).bert.embeddings.extension.weight
    for row, pieces in enumerate(NEW_WORDS):
        torch.testing.assert_close(table[row], known[pieces].mean(0))
    random = augment(base).bert.embeddings.extension.weight
    assert not torch.isclose(random, table).any()
    assert 0.05 < random.std() < 0.2, "the base's initializer_range is 0.1"


def test_the_output_is_tied_to_both_tables(base: Base, tmp_path: Path) -> None:
    model = augment(base)
    stir(model)
    model.save_pretrained(tmp_path)
    for each in (model, DomextForMaskedLM.from_pretrained(tmp_path)):
        head, embeddings = each.cls.predictions, each.bert.embeddings
        assert head.extension.weight is embeddings.extension.weight
        assert head.decoder.weight is embeddings.word_embeddings.weight
    ids = make_ids(base)
    assert torch.equal(DomextForMaskedLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


def test_stage_one_leaves_the_base_bit_for_bit(base: Base) -> None:
    model = augment(base, EVERYTHING)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    ids = make_ids(base)
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert all(each.grad is None for name, each in model.named_parameters() if not is_extension(name))
        optimizer.step()
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if is_extension(name)}
    assert hash_tensors(detach(model)) == base.sha256


def test_stage_two_and_trained_heads(base: Base) -> None:
    model = augment(base, MethodConfig(**{**vars(EXBERT), "trains": "all"}))
    assert all(each.requires_grad for each in model.parameters())
    heads = augment(base, MethodConfig(**{**vars(EXBERT), "train_heads": True}), next_sentence=True)
    trained = {name for name, each in heads.named_parameters() if each.requires_grad and not is_extension(name)}
    assert trained == {
        name for name, _ in heads.named_parameters() if name.startswith(HEADS) and not is_extension(name)
    }
    assert not heads.bert.embeddings.word_embeddings.weight.requires_grad
    adapter = augment(base, MethodConfig(heads=1, ffn_units=0, trains="adapter", train_heads=True))
    trained = {name for name, each in adapter.named_parameters() if each.requires_grad and is_extension(name)}
    assert trained and all(".adapters.domain." in name for name in trained), "the head's biases of new words do not"


def test_a_width_that_the_heads_do_not_divide_is_refused(base: Base) -> None:
    with pytest.raises(ConfigError, match=r"--method.module_hidden_size is 13; it must be divisible by .* 4 attention"):
        augment(base, MethodConfig(**{**vars(EXBERT), "module_hidden_size": 13}))


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
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {
        name for name, _ in model.named_parameters() if is_extension(name)
    }


def test_a_base_without_pooler_gets_one_that_trains(base: Base) -> None:
    model = augment(base, next_sentence=True)
    trained = {name for name, each in model.named_parameters() if each.requires_grad and not is_extension(name)}
    assert trained == {
        f"{module}.{part}" for module in ("bert.pooler.dense", "cls.seq_relationship") for part in ("weight", "bias")
    }


def test_one_segment_type_is_no_base_for_pairs(tmp_path: Path) -> None:
    config = RobertaConfig(**{**SMALL, "type_vocab_size": 1})
    RobertaForMaskedLM(config).save_pretrained(save_tokenizer(tmp_path, 70))
    with pytest.raises(ConfigError, match="pairs need two"):
        augment(load_base(str(tmp_path)), MethodConfig(heads=1, ffn_units=2), new_words=[], next_sentence=True)


def test_a_sentence_encoder_gets_all_heads(tmp_path: Path) -> None:
    BertModel(BertConfig(**SMALL)).save_pretrained(save_tokenizer(tmp_path, 70))
    base = load_base(str(tmp_path), next_sentence=True)
    assert base.heads == (HEADS[2],)
    model = augment(base, EXBERT, next_sentence=True)
    trained = {name.split(".")[1] for name, each in model.named_parameters() if each.requires_grad and "cls" in name}
    assert trained == {"predictions", "seq_relationship"}
