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
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, RunError
from domext_ray.export.adapter_folders import export_adapterhub, export_peft
from domext_ray.export.model_folder import save_model, save_with_code
from domext_ray.model.base import Base, describe_base, load_base
from domext_ray.model.build import detach
from domext_ray.model.domext.configuration_domext import LAYOUT_DEFAULTS, DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import LAYOUTS
from domext_ray.model.spec import ModelSpec
from domext_ray.storage import Place
from domext_ray.training.start import RebuiltRun

PLAIN = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)


EVERYTHING = MethodConfig(heads=1, ffn_units=6, bottleneck_size=5, word_rows=9, word_head=True)


MODULES = {"module_hidden_size": 12, "module_ffn_size": 10}


LENGTH = 40


each_layout = pytest.mark.parametrize("kind", TINY_LAYOUTS)


NOTHING = {"heads": 0, "ffn_units": 0}


COUNTED: list[dict[str, Any]] = [
    {"trains": "all"},
    {"trains": "top_layers", "top_layers": 1},
    {"trains": "top_layers", "top_layers": 2},
    {"trains": "layer_norms"},
    {"heads": 2, "ffn_units": 6, "layers": "1"},
    {"bottleneck_size": 4},
    {"bottleneck_size": 4, "layers": "1"},
    {"bottleneck_size": 4, "bottleneck_place": "output", "bottleneck_layer_norm": True},
    {"bottleneck_size": 4, "bottleneck_place": "attention"},
    MODULES,
    {"lora_rank": 3, "lora_targets": ("query", "intermediate", "output")},
    {"word_rows": 7, "word_head": True},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny base of each layout; ModernBERT's has five layers, of which the first and the fourth see everything."""
    root = tmp_path_factory.mktemp("layouts")
    deep = {"modernbert": {"num_hidden_layers": 5}}
    return {kind: tiny.save(root / kind, **deep.get(kind, {})) for kind, tiny in TINY_LAYOUTS.items()}


def load(folders: dict[str, Path], kind: str) -> Base:
    return load_base(str(folders[kind]))


def rebuild(model: Any, base: Base, method: MethodConfig) -> RebuiltRun:
    tokenizer = AutoTokenizer.from_pretrained(base.folder)
    return as_rebuilt(model, base, tokenizer, PretrainConfig(base=base.id, method=method))


def augment(base: Base, method: MethodConfig = PLAIN, **values: Any) -> DomextForMaskedLM:
    return ModelSpec(base, method, **values).build().eval()


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
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    ids, mask = make_rows()
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(ids, mask, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        optimizer.step()
    model.eval()


@each_layout
def test_scores_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    model = augment(load(folders, kind))
    for implementation in ("sdpa", "eager"):
        theirs = AutoModelForMaskedLM.from_pretrained(
            folders[kind], dtype=torch.float32, attn_implementation=implementation
        ).eval()
        model.set_attn_implementation(implementation)
        for padded in (False, True):
            torch.testing.assert_close(score(model, padded), score(theirs, padded), atol=1e-5, rtol=0)


@each_layout
def test_extensions_start_at_the_base_which_comes_back_under_its_own_names(folders: dict[str, Path], kind: str) -> None:
    base, original = load(folders, kind), load_file(folders[kind] / "model.safetensors")
    model, plain = augment(base, EVERYTHING), score(augment(base))
    assert torch.equal(score(model), plain)
    run_steps(model)
    assert not torch.allclose(score(model), plain, atol=1e-3)
    found = detach(model, base.original_names)
    assert set(found) == set(original)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in original.items()
    )


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
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.tensors.items())


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
        found, expected = (encoder(ids, attention_mask=mask).last_hidden_state for encoder in (model.bert, theirs))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
    fresh = {name for name, param in model.named_parameters() if name.startswith("cls.") and param.requires_grad}
    assert fresh == {name for name, _ in model.named_parameters() if name.startswith("cls.")}


@each_layout
def test_counts_are_those_of_the_tensors(folders: dict[str, Path], kind: str) -> None:
    base = load(folders, kind)
    for values in COUNTED:
        method = MethodConfig(**{**NOTHING, **values})
        model = augment(base, method, new_words=[[7]] * 3)
        counts = ModelSpec(base, method, new_words=[[7]] * 3).counts
        params = dict(model.named_parameters())
        assert counts.total == sum(param.numel() for param in params.values()), values
        assert counts.trainable == sum(param.numel() for param in params.values() if param.requires_grad), values
        assert counts.encoder == sum(param.numel() for name, param in params.items() if name.startswith("bert."))


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
    export_peft(rebuild(model, base, method), Place(tmp_path / "export"))
    theirs = AutoModelForMaskedLM.from_pretrained(folders[kind], dtype=torch.float32)
    loaded = PeftModel.from_pretrained(theirs, str(tmp_path / "export")).eval()
    torch.testing.assert_close(score(loaded), score(model), atol=1e-5, rtol=0)


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


def test_a_base_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    scaled = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    for kind, values, says in (
        (
            "modernbert",
            {"rope_parameters": scaled},
            "scales its rotary positions (rope_parameters of full_attention)",
        ),
        ("modernbert", {"decoder_bias": False}, "has no bias in its output projection"),
        ("electra", {"embedding_size": 16}, "has word embeddings of width 16 under layers of width 32"),
    ):
        folder = TINY_LAYOUTS[kind].save(tmp_path / "-".join([kind, *values]), **values)
        with pytest.raises(BaseModelError) as caught:
            load_base(str(folder))
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_layout_lacks_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    base = load(folders, "modernbert")
    with pytest.raises(ConfigError, match=r"--method\.trains is biases; the base's layers have none"):
        augment(base, MethodConfig(trains="biases", heads=0, ffn_units=0))
    with pytest.raises(ConfigError, match=r"--objective\.next_sentence is True; .* 0 segment type"):
        augment(base, next_sentence=True)
    lora = MethodConfig(heads=0, ffn_units=0, lora_rank=2)
    with pytest.raises(RunError, match="the format of peft is not written for bases of the kind ModernBert; take the"):
        export_peft(rebuild(augment(base, lora), base, lora), Place(tmp_path / "peft"))
    method = MethodConfig(heads=0, ffn_units=0, bottleneck_size=4)
    with pytest.raises(RunError, match="the format of adapterhub is not written for bases of the kind ModernBert"):
        export_adapterhub(rebuild(augment(base, method), base, method), "domain", Place(tmp_path / "hub"))
