"""Bases of every layout: transformers' own numbers, the base back bit for bit, exports with and without code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import as_rebuilt
from peft import PeftModel
from safetensors.torch import load_file
from tiny_layouts import TINY_LAYOUTS
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig, ShapeConfig
from domext_ray.errors import BaseModelError, ConfigError, RunError
from domext_ray.export.adapter_folders import export_adapterhub, export_peft
from domext_ray.export.model_folder import save_model, save_with_code
from domext_ray.model.base import Base, describe_base, load_base
from domext_ray.model.build import build_model, detach
from domext_ray.model.counts import count_parameters
from domext_ray.model.domext.configuration_domext import LAYOUT_DEFAULTS, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import LAYOUTS, find_layout
from domext_ray.training.rebuild import RebuiltRun

PLAIN = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
EVERYTHING = MethodConfig(heads=1, ffn_units=6, bottleneck_size=5, word_rows=9, word_head=True)
MODULES = {"module_hidden_size": 12, "module_ffn_size": 10}
LENGTH = 40
each_layout = pytest.mark.parametrize("kind", TINY_LAYOUTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny base of each layout; ModernBERT's has five layers, of which the first and the fourth see everything."""
    root = tmp_path_factory.mktemp("layouts")
    deep = {"modernbert": {"num_hidden_layers": 5}}
    return {kind: tiny.save(root / kind, **deep.get(kind, {})) for kind, tiny in TINY_LAYOUTS.items()}


def load(folders: dict[str, Path], kind: str) -> Base:
    return load_base(str(folders[kind]))


def rebuild(model: Any, base: Base, method: MethodConfig) -> RebuiltRun:
    tokenizer = AutoTokenizer.from_pretrained(base.tokenizer_folder)
    return as_rebuilt(model, base, tokenizer, PretrainConfig(base=base.id, method=method))


def augment(base: Base, method: MethodConfig = PLAIN, **values: Any) -> DomextForMaskedLM:
    arguments = {"vocab_size": base.config.vocab_size, "dropout": 0.0, "seed": 0, **values}
    return build_model(base, ShapeConfig(), method, **arguments).eval()


def make_rows(padded: bool = True) -> tuple[Tensor, Tensor | None]:
    """Rows of 40, 20 and 5 tokens: ModernBERT's tiny window is 4 on either side."""
    ids = torch.randint(5, 200, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    if not padded:
        return ids, None
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [20], [5]])).long()
    return ids * mask, mask


@torch.no_grad()
def score(model: Any, padded: bool = True) -> Tensor:
    """Logits of the tokens."""
    ids, mask = make_rows(padded)
    logits = model(ids, attention_mask=mask).logits
    return logits.flatten(0, 1) if mask is None else logits[mask.bool()]


def run_steps(model: DomextForMaskedLM) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    ids, mask = make_rows()
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(ids, mask, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        optimizer.step()
    model.eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@each_layout
def test_scores_are_those_of_transformers(
    folders: dict[str, Path], kind: str, implementation: str, padded: bool
) -> None:
    theirs = AutoModelForMaskedLM.from_pretrained(
        folders[kind], dtype=torch.float32, attn_implementation=implementation
    ).eval()
    model = augment(load(folders, kind))
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(score(model, padded), score(theirs, padded), atol=1e-5, rtol=0)


@each_layout
def test_a_packed_row_has_the_scores_of_its_documents(folders: dict[str, Path], kind: str) -> None:
    """Those of transformers' own model, which reads each document alone; two are longer than ModernBERT's window."""
    theirs = AutoModelForMaskedLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    model = augment(load(folders, kind))
    sizes = (17, 4, 11)
    row = torch.randint(5, 200, (1, sum(sizes)), generator=torch.Generator().manual_seed(4))
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    with torch.no_grad():
        found = model(row, document_ids=numbers).logits[0]
        expected = torch.cat([theirs(each).logits[0] for each in row.split(sizes, dim=1)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@each_layout
def test_extensions_start_at_the_base_exactly(folders: dict[str, Path], kind: str) -> None:
    base = load(folders, kind)
    model = augment(base, EVERYTHING)
    assert torch.equal(score(model), score(augment(base)))
    run_steps(model)
    assert not torch.allclose(score(model), score(augment(base)), atol=1e-3)


@each_layout
def test_the_base_comes_back_under_its_own_names(folders: dict[str, Path], kind: str) -> None:
    base, original = load(folders, kind), load_file(folders[kind] / "model.safetensors")
    model = augment(base, EVERYTHING)
    run_steps(model)
    found = detach(model, base.original_names)
    assert set(found) == set(original)
    assert all(torch.equal(found[name], each) and found[name].dtype == each.dtype for name, each in original.items())


@each_layout
def test_what_has_no_extension_is_exported_as_transformers_own(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    base = load(folders, kind)
    model = augment(base, dropout=base.config.hidden_dropout_prob)
    run_steps(model)
    export = tmp_path / "export"  # of a run, whose directory stands for it as a base
    save_model(model, export)
    AutoTokenizer.from_pretrained(folders[kind]).save_pretrained(export)
    loaded, info = AutoModelForMaskedLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(score(loaded.eval()), score(model), atol=1e-5, rtol=0)
    again = load_base(str(tmp_path))
    assert describe_base(again.config) == describe_base(base.config)
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in again.tensors.items())


@pytest.mark.usefixtures("own_modules")
@each_layout
def test_an_export_brings_its_code_and_says_so(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Without its code it must not load as the architecture that config.json names, with random weights in it."""
    folder = tmp_path / "export"
    model = augment(load(folders, kind), EVERYTHING)
    run_steps(model)
    save_with_code(model, folder)
    AutoTokenizer.from_pretrained(folders[kind]).save_pretrained(folder)
    loaded = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules.")
    assert torch.equal(score(loaded), score(model))
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).to_dict()["model_type"] == "domext"
    assert type(AutoTokenizer.from_pretrained(folder)) is type(AutoTokenizer.from_pretrained(folders[kind]))
    for loader in (AutoModel, AutoModelForMaskedLM):
        with pytest.raises(Exception, match="give trust_remote_code=True"):
            loader.from_pretrained(folder, trust_remote_code=False)
    fill = pipeline("fill-mask", model=str(folder), trust_remote_code=True)
    assert len(fill("the river was [MASK]")) == 5


@each_layout
def test_an_encoder_alone_gets_a_fresh_head(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    TINY_LAYOUTS[kind].save(tmp_path, "Model")
    base = load_base(str(tmp_path))
    assert not base.has_mlm_head
    model = augment(base, MethodConfig(heads=1, ffn_units=0))
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, mask = make_rows()
    with torch.no_grad():
        found, expected = (each(ids, attention_mask=mask).last_hidden_state for each in (model.bert, theirs))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    fresh = {name for name, each in model.named_parameters() if name.startswith("cls.") and each.requires_grad}
    assert fresh == {name for name, _ in model.named_parameters() if name.startswith("cls.")}


@each_layout
@pytest.mark.parametrize(
    "values",
    [
        {"trains": "all", "heads": 0, "ffn_units": 0},
        {"trains": "top_layers", "top_layers": 1, "heads": 0, "ffn_units": 0},
        {"trains": "top_layers", "top_layers": 2, "heads": 0, "ffn_units": 0},
        {"trains": "layer_norms", "heads": 0, "ffn_units": 0},
        {"heads": 2, "ffn_units": 6, "layers": "1"},
        {"heads": 0, "ffn_units": 0, "bottleneck_size": 4},
        {"heads": 0, "ffn_units": 0, "bottleneck_size": 4, "layers": "1"},
        {"heads": 0, "ffn_units": 0, "bottleneck_size": 4, "bottleneck_place": "output", "bottleneck_layer_norm": True},
        {"heads": 0, "ffn_units": 0, "bottleneck_size": 4, "bottleneck_place": "attention"},
        {"heads": 0, "ffn_units": 0, **MODULES},
        {"heads": 0, "ffn_units": 0, "lora_rank": 3, "lora_targets": ("query", "intermediate", "output")},
        {"heads": 0, "ffn_units": 0, "word_rows": 7, "word_head": True},
    ],
)
def test_counts_are_those_of_the_tensors(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    base = load_base(str(TINY_LAYOUTS[kind].save(tmp_path)))
    method = MethodConfig(**values)
    model = augment(base, method, new_words=[[7]] * 3)
    counts = count_parameters(model.config, method, base.heads)
    params = dict(model.named_parameters())
    assert counts.total == sum(each.numel() for each in params.values())
    assert counts.trainable == sum(each.numel() for each in params.values() if each.requires_grad)
    assert counts.encoder == sum(each.numel() for name, each in params.items() if name.startswith("bert."))


@each_layout
def test_a_model_tells_its_layout(folders: dict[str, Path], kind: str) -> None:
    layout = find_layout(augment(load(folders, kind), EVERYTHING).config)
    assert type(layout) is type(LAYOUTS[kind])


def test_berts_configuration_says_nothing_of_a_layout() -> None:
    config = DomextConfig()
    assert not config.describe_layout() and not LAYOUT_DEFAULTS.keys() & config.to_dict().keys()
    assert not LAYOUT_DEFAULTS.keys() & describe_base(config).keys()
    described = DomextConfig(gated_ffn=True, local_layers=[1], local_window=4)
    assert DomextConfig(**{**described.to_dict(), "model_type": None}).describe_layout() == described.describe_layout()


@pytest.mark.parametrize("kind", [kind for kind in TINY_LAYOUTS if "peft" in LAYOUTS[kind].formats])
def test_pefts_folder_loads_beside_transformers_own_model(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    base, method = (
        load(folders, kind),
        MethodConfig(heads=0, ffn_units=0, lora_rank=3, lora_targets=("query", "output")),
    )
    model = augment(base, method)
    run_steps(model)
    export_peft(rebuild(model, base, method), tmp_path / "export")
    theirs = AutoModelForMaskedLM.from_pretrained(folders[kind], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(theirs, str(tmp_path / "export")).eval()
    torch.testing.assert_close(score(loaded), score(model), atol=1e-5, rtol=0)


# --- ModernBERT: rows longer than the window, padding, rotary positions ---------------------------------------------


def make_modern(folders: dict[str, Path], **values: Any) -> DomextForMaskedLM:
    """With every kind of extension, none of which starts at zero."""
    method = MethodConfig(heads=1, ffn_units=6, bottleneck_size=5, **MODULES, init="paper", bottleneck_std=0.5)
    return augment(load(folders, "modernbert"), method, **values)


def compute_gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    ids, mask = make_rows()
    model(ids, attention_mask=mask, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_does_not_change_the_tokens(folders: dict[str, Path], implementation: str, causal: bool) -> None:
    model, (ids, mask) = make_modern(folders, causal=causal), make_rows()
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        together = model(ids, mask).logits
        assert together.isfinite().all(), "padding far from every token too"
        for row, length in enumerate((LENGTH, 20, 5)):
            alone = model(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(together[row, :length], alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_gradients_of_padded_rows_are_finite(folders: dict[str, Path], implementation: str) -> None:
    model = make_modern(folders).train()
    model.set_attn_implementation(implementation)
    found = compute_gradients(model)
    assert set(found) == {name for name, each in model.named_parameters() if each.requires_grad}
    assert all(each.isfinite().all() and each.count_nonzero() for each in found.values())


def test_a_local_layer_sees_its_window_only(folders: dict[str, Path]) -> None:
    """Of a model that has local layers alone, a token changes those within the window times the layers."""
    model, (ids, _) = make_modern(folders), make_rows(padded=False)
    for layer in model.bert.encoder.layer:
        layer.is_local = True
    changed = ids.clone()
    changed[:, 0] = 3
    reach = model.config.local_window * model.config.num_hidden_layers
    for causal, implementation in ((False, "sdpa"), (False, "eager"), (True, "sdpa"), (True, "eager")):
        model.config.causal = causal
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            states = [model.bert(each).last_hidden_state for each in (ids, changed)]
        is_changed = (states[0] != states[1]).any(dim=(0, 2))
        assert is_changed[reach] and not is_changed[reach + 1 :].any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_the_gradients(folders: dict[str, Path], use_reentrant: bool) -> None:
    model = make_modern(folders).train()
    expected = compute_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = compute_gradients(model)
    assert set(found) == set(expected)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)


def test_rows_of_a_batch_name_their_adapters(folders: dict[str, Path]) -> None:
    model, (ids, mask) = make_modern(folders), make_rows()
    positions = torch.arange(LENGTH).expand(3, -1) + torch.tensor([[0], [3], [9]])
    with torch.no_grad():
        names = ["domain", "__base__", "domain"]
        found = model(ids, mask, position_ids=positions, adapter_names=names).logits
        with_adapter = model(ids, mask, position_ids=positions).logits
        model.bert.set_active_adapters([])
        without = model(ids, mask, position_ids=positions).logits
    expected = torch.stack([with_adapter[0], without[1], with_adapter[2]])
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-5)
    assert not torch.allclose(with_adapter[1, :20], without[1, :20], atol=1e-3)


def test_rotary_positions_count_distances_alone(folders: dict[str, Path]) -> None:
    model, (ids, _) = make_modern(folders), make_rows(padded=False)
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected, moved = (model(ids, position_ids=positions + each).logits for each in (0, 50))
        stretched = model(ids, position_ids=positions * 2).logits
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(stretched, expected, atol=1e-2)


@pytest.mark.slow
def test_compiles_into_one_graph(folders: dict[str, Path]) -> None:
    model, (ids, _) = make_modern(folders).train(), make_rows(padded=False)
    expected = model(ids).logits
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits
    torch.testing.assert_close(found, expected)


def test_a_configuration_of_an_earlier_transformers_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    """The hub's files have no layer_types and no rope_parameters."""
    base = load(folders, "modernbert")
    values = json.loads((folders["modernbert"] / "config.json").read_text())
    del values["layer_types"], values["rope_parameters"]
    values |= {"global_attn_every_n_layers": 2, "global_rope_theta": 12_000.0, "local_rope_theta": 9_000.0}
    for path in folders["modernbert"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**values, "position_embedding_type": "absolute"}))
    found = load_base(str(tmp_path)).config
    assert found.local_layers == [1, 3] and base.config.local_layers == [1, 2, 4]
    assert (found.rope_theta, found.local_rope_theta) == (12_000.0, 9_000.0)
    assert describe_base(found) != describe_base(base.config)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "scales its rotary positions (rope_parameters of full_attention)",
        ),
        ("modernbert", {"decoder_bias": False}, "has no bias in its output projection"),
        ("electra", {"embedding_size": 16}, "has word embeddings of width 16 under layers of width 32"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(tmp_path: Path, kind: str, values: dict[str, Any], says: str) -> None:
    TINY_LAYOUTS[kind].save(tmp_path, **values)
    with pytest.raises(BaseModelError) as caught:
        load_base(str(tmp_path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_layout_lacks_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    base = load(folders, "modernbert")
    with pytest.raises(ConfigError, match=r"--method\.trains is biases; the base's layers have none"):
        augment(base, MethodConfig(trains="biases", heads=0, ffn_units=0))
    with pytest.raises(ConfigError, match=r"--objective\.next_sentence is True; .* 0 segment type"):
        augment(base, next_sentence=True)
    lora = MethodConfig(heads=0, ffn_units=0, lora_rank=2)
    with pytest.raises(RunError, match="the format of peft is not written for bases of the kind ModernBert; take the"):
        export_peft(rebuild(augment(base, lora), base, lora), tmp_path / "peft")
    method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=4)
    with pytest.raises(RunError, match="the format of adapterhub is not written for bases of the kind ModernBert"):
        export_adapterhub(rebuild(augment(base, method), base, method), "domain", tmp_path / "hub")
