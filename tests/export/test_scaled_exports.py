"""Exports with --scale: in every format what a run added is multiplied; at 0 there is the base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoint_runs import make_run
from job_calls import call_job
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

from domext_ray import load
from domext_ray.config.extensions.table import is_extension
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.export.onnx_graph import OnnxModel
from domext_ray.model.base import load_base
from domext_ray.model.build import merge_extensions, scale_extensions
from domext_ray.model.spec import ModelSpec
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.storage import Place
from domext_ray.training.start import rebuild_run

TEXTS = ["the old house was warm .", "a river"]
METHODS: dict[str, dict[str, Any]] = {
    "AF": {"heads": 1, "ffn_units": 8},
    "AF and shifts of all words": {"heads": 1, "ffn_units": 8, "word_rows": 10**6, "word_head": True},
    "AF and shifts of some words": {"heads": 1, "word_rows": 40},
    "bottlenecks": {"bottleneck_size": 5},
    "LoRA": {"lora_rank": 3},
    "LoRA and heads": {"lora_rank": 3, "lora_targets": ("query", "output"), "heads": 1},
}
Make = Callable[..., Path]


@pytest.fixture
def make(tiny_base_folder: Path, tmp_path: Path) -> Make:
    """Makes the directory of a run whose trained tensors have moved away from their start."""

    def make(**method: Any) -> Path:
        base = load_base(str(tiny_base_folder))
        own = MethodConfig(**{"heads": 0, "ffn_units": 0, **method})
        config = PretrainConfig(base=str(tiny_base_folder), method=own)
        model = ModelSpec(base, own).build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(0.2 * torch.randn(param.shape, generator=generator))
        run = make_run(tmp_path / "run", config, model, base)
        load(tiny_base_folder)[0].save_pretrained(run / "tokenizer")
        return run

    return make


def score(model: Any, tokenizer: Any) -> torch.Tensor:
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


def score_run(run: Path, scale: float) -> torch.Tensor:
    """Logits of a run's model in memory."""
    rebuilt = rebuild_run(Place(run))
    scale_extensions(cast(Any, rebuilt.model).eval(), rebuilt.config.method, scale)
    return score(rebuilt.model, rebuilt.tokenizer)


def export(run: Path, folder: Path, *options: str) -> Path:
    done = call_job("export_hf", "--run", str(run), "--output", str(folder), *options)
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_export_is_the_run_at_that_scale(
    method: dict[str, Any], make: Make, tiny_base_folder: Path, tmp_path: Path
) -> None:
    run = make(**method)
    tokenizer, base = load(tiny_base_folder)
    whole, expected = score_run(run, 1.0), score(base, tokenizer)
    folders = {scale: export(run, tmp_path / scale, "--scale", scale) for scale in ("0", "0.5", "1")}
    scores = {scale: score(load(folder)[1], tokenizer) for scale, folder in folders.items()}
    assert torch.equal(scores["0"], expected), "the base, bit for bit"
    assert torch.equal(score_run(run, 0.0), expected)
    torch.testing.assert_close(scores["0.5"], score_run(run, 0.5), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores["1"], whole, atol=1e-5, rtol=0)
    assert min((scores["0.5"] - other).abs().max() for other in (expected, whole)) > 1e-2
    for scale, found in scores.items():  # as other jobs have it, whose adapters have no scales
        start = load_masked_lm(str(folders[scale]))[0]
        torch.testing.assert_close(score(start, tokenizer), found, atol=1e-5, rtol=0)
        assert {adapter.scale for adapter in cast(Any, start.config).adapters.values()} <= {1.0}
    ordinary = export(run, tmp_path / "ordinary")
    assert (folders["1"] / "README.md").read_text() == (ordinary / "README.md").read_text()
    assert load_file(folders["1"] / "model.safetensors").keys() == load_file(ordinary / "model.safetensors").keys()


def test_a_card_says_the_scale_and_no_figures_of_another_one(make: Make, tmp_path: Path) -> None:
    run, pair = make(heads=1), {"before": 3.0, "after": 2.5}
    figures = {"mlm_loss": pair, "mlm_accuracy": pair, "bits_per_character": pair}
    summary = {"domain": figures, "general": {"mlm_accuracy": pair}, "train": {"steps": 3, "tokens": 1000}}
    (run / "summary.json").write_text(json.dumps(summary))
    cards = [(export(run, tmp_path / scale, "--scale", scale) / "README.md").read_text() for scale in ("0.7", "1")]
    assert "| Scale | 0.7 (1: as it was trained, 0: the base) |" in cards[0] and "Before and after" not in cards[0]
    assert "Scale" not in cards[1] and "Before and after" in cards[1]
    assert json.loads((tmp_path / "0.7" / "config.json").read_text())["adapters"]["domain"]["scale"] == 0.7
    tokenizer, model = load(tmp_path / "0.7")
    cast(Any, model).set_adapter_scale("domain", 1.0)
    assert torch.equal(score(model, tokenizer), score(load(tmp_path / "1")[1], tokenizer)), "the scale can be undone"


def test_other_formats_are_of_the_scale(make: Make, tiny_base_folder: Path, tmp_path: Path) -> None:
    tokenizer, base = load(tiny_base_folder)
    expected = score(base, tokenizer)
    run = make(lora_rank=3)
    for scale in ("0", "0.5"):
        folder = export(run, tmp_path / f"peft-{scale}", "--format", "peft", "--scale", scale)
        plain = AutoModelForMaskedLM.from_pretrained(tiny_base_folder).eval()
        found = score(PeftModel.from_pretrained(plain, folder).eval(), tokenizer)
        torch.testing.assert_close(found, score_run(run, float(scale)), atol=1e-5, rtol=0)
        assert f"at the scale {scale} (1: as" in (folder / "README.md").read_text()
        assert not float(scale) or not torch.allclose(found, expected, atol=1e-3)


def test_a_bottleneck_folder_has_the_scale_in_its_description_and_in_the_layer_norms(
    make: Make, tiny_base_folder: Path, tmp_path: Path
) -> None:
    run, base = make(bottleneck_size=5), load_base(str(tiny_base_folder)).tensors
    found = {}
    for scale in ("0", "0.5", "1"):
        folder = export(run, tmp_path / f"hub-{scale}", "--format", "adapterhub", "--scale", scale)
        described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert described["config"]["scaling"] == float(scale)
        assert (folder / "base").is_dir() == (scale != "0"), "the LayerNorms are the base's own"
        if scale != "0":
            found[scale] = load_file(folder / "base" / "model.safetensors")
    for name, tensor in found["1"].items():
        torch.testing.assert_close(found["0.5"][name], (tensor + base[name]) / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("method", "scale"),
    [("AF and shifts of some words", "0.5"), ("AF", "0"), ("LoRA", "0.5"), ("LoRA", "0")],
)
@pytest.mark.slow
def test_a_graph_is_of_the_scale(method: str, scale: str, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    run = make(**METHODS[method])
    batch = load(run)[0](TEXTS, padding=True, return_tensors="pt")
    places = torch.arange(batch["input_ids"].numel())
    folder = export(run, tmp_path / "onnx", "--format", "onnx", "--scale", scale)
    found = OnnxModel(folder)(batch["input_ids"], batch["attention_mask"], masked_positions=places).logits
    torch.testing.assert_close(found, score_run(run, float(scale)).flatten(0, 1), atol=1e-4, rtol=0)
    assert f" Scale: {scale} (1: as" in (folder / "README.md").read_text()


def test_what_has_no_scale_is_refused_in_one_sentence(make: Make, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    for method, said in (
        ({"trains": "all"}, "--scale is 0.5; it must be 1 with --method.trains all, which changes the base itself."),
        ({"heads": 1, "train_heads": True}, "--scale is 0.5; it must be 1 with --method.train_heads, which changes"),
        (
            {"module_hidden_size": 8, "module_ffn_size": 4},
            "--scale is 0.5; it must be 1 with gated modules (--method.module_hidden_size), which have no scale.",
        ),
    ):
        done = call_job("export_hf", "--run", str(make(**method)), "--output", folder, "--scale", "0.5")
        assert done.code == 2 and said in done.err and done.err.count("\n") == 1, done.err
    run = str(make(heads=1))
    for options, said in (
        (("--scale", "0.5"), "--output is ''; it must be a folder of its own with --scale 0.5: RUN/export is of the"),
        (("--scale", "-1", "--output", folder), "--scale is -1.0; it must be from 0 to 10."),
    ):
        done = call_job("export_hf", "--run", run, *options)
        assert done.code == 2 and said in done.err and done.err.count("\n") == 1, done.err
    scaled = export(Path(run), tmp_path / "scaled", "--scale", "0.5")
    done = call_job("export_hf", "--run", str(scaled), "--format", "onnx", "--output", folder, "--scale", "0.5")
    assert done.code == 2 and "--scale is 0.5; it must be 1 unless --run is a pre-training run's" in done.err
    assert not Path(folder).exists()


def test_lora_at_a_scale_is_merged(make: Make) -> None:
    rebuilt = rebuild_run(Place(make(lora_rank=3)))
    model: Any = rebuilt.model
    scale_extensions(model, rebuilt.config.method, 0.0)
    merge_extensions(model)
    assert rebuilt.spec.base is not None
    tensors = dict(model.named_parameters())
    assert not any(map(is_extension, tensors))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in rebuilt.spec.base.tensors.items())
