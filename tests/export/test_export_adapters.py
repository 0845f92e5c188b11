"""An adapter's folder has the names and fields that its library reads, and gives this library's logits there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import as_rebuilt
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel

from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import RunError
from domext_ray.export.adapter_folders import ADAPTERS_VERSION, export_adapterhub, export_peft, find_reduction_factor
from domext_ray.export.folder import MARKER
from domext_ray.model.base import load_base
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.spec import ModelSpec
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.start import RebuiltRun

BASES = ("tiny_base_folder", "tiny_roberta_folder")
TEXTS = ["the dog and the cat run in the garden", "a good book"]
BOTTLENECK = {"heads": 0, "ffn_units": 0, "bottleneck_size": 5}
LORA = {"name": "lora", "heads": 0, "ffn_units": 0, "lora_rank": 3}
HOULSBY = {
    "mh_adapter": True,
    "output_adapter": True,
    "cross_adapter": False,
    "non_linearity": "gelu",
    "original_ln_before": False,
    "original_ln_after": True,
    "residual_before_ln": True,
    "adapter_residual_before_ln": False,
    "ln_before": False,
    "ln_after": False,
    "is_parallel": False,
    "scaling": 1.0,
    "use_gating": False,
    "dropout": 0.0,
    "inv_adapter": None,
    "phm_layer": False,
}
"""Fields that decide what AdapterHub's adapter computes, as its version 1.3.0 saves them for Houlsby's."""


LIBRARY = ("adapters==1.3.0", "transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2")
"""AdapterHub's library and what it needs in other versions than this project; the rest is the same."""


PYTHON_VARIABLE = "DOMEXT_ADAPTERS_PYTHON"
SCORE_IN_LIBRARY = """
import json, sys
import torch, transformers

assert adapters.__version__ == "1.3.0"
torch.set_num_threads(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
batch = tokenizer(json.loads(sys.argv[2]), padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
print(json.dumps({"ids": batch["input_ids"].tolist(), "logits": logits.tolist()}))
"""


def make_model(base_folder: Path, new_words: Sequence[list[int]] = (), **method: Any) -> DomextForMaskedLM:
    """A model whose extensions have moved far from their start."""
    base = load_base(str(base_folder))
    settings = MethodConfig(adapter="task", **method)
    model = ModelSpec(base, settings, new_words=new_words, dropout=0.1).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn(param.shape, generator=generator))
    return model.eval()


def make_rebuilt(model: DomextForMaskedLM, base_folder: Path, **method: Any) -> RebuiltRun:
    config = PretrainConfig(base=str(base_folder), method=MethodConfig(adapter="task", **method))
    return as_rebuilt(model, load_base(str(base_folder)), load_tokenizer(base_folder), config)


def export_bottlenecks(model: DomextForMaskedLM, base_folder: Path, folder: Path) -> Path:
    export_adapterhub(make_rebuilt(model, base_folder), "task", Place(folder))
    return folder


def export_lora(base_folder: Path, folder: Path, **method: Any) -> Path:
    export_peft(make_rebuilt(make_model(base_folder, **method), base_folder, **method), Place(folder))
    return folder


def score(model: torch.nn.Module, tokenizer_folder: Path) -> torch.Tensor:
    batch = load_tokenizer(tokenizer_folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def read_example(folder: Path, base_folder: Path) -> str:
    """Return the code that an export's README.md shows, with the base's folder for its name."""
    _, code, _ = re.split("```(?:python)?\n", (folder / "README.md").read_text())
    return code.replace(f'"{base_folder.name}"', repr(str(base_folder)))


def load_with_adapter(base_folder: Path, adapter: Path) -> PreTrainedModel:
    """Load a plain model and put an adapter's tensors behind each sublayer, by hooks: no code of ours."""
    model = AutoModelForMaskedLM.from_pretrained(base_folder).eval()
    description = json.loads((adapter / "adapter_config.json").read_text())
    name, activation = description["name"], ACTIVATIONS[description["config"]["non_linearity"]]
    tensors = load_file(adapter / "adapter.safetensors")
    for first in sorted(key for key in tensors if key.endswith("adapter_down.0.weight")):
        sublayer, _ = first.split(f".adapters.{name}.")
        down, up = (
            [tensors.pop(f"{sublayer}.adapters.{name}.{part}.{kind}") for kind in ("weight", "bias")]
            for part in ("adapter_down.0", "adapter_up")
        )
        model.get_submodule(f"{sublayer}.dropout").register_forward_hook(make_hook(down, up, activation))
    assert not tensors, "an adapter that nothing reads"
    return model


ACTIVATIONS = {"gelu": torch.nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh}


def make_hook(
    down: list[torch.Tensor], up: list[torch.Tensor], activation: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def adapt(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + activation(output @ down[0].T + down[1]) @ up[0].T + up[1]

    return adapt


@pytest.mark.parametrize("base_name", BASES)
def test_a_bottleneck_folder_computes_the_models_logits(
    base_name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Where more than bottlenecks has trained, the base is written, too."""
    base_folder = request.getfixturevalue(base_name)
    headless = Path(shutil.copytree(base_folder, tmp_path / "headless"))
    AutoModelForMaskedLM.from_pretrained(base_folder).base_model.save_pretrained(headless)
    for i, (source, more, has_base) in enumerate(
        (
            (base_folder, {"layers": "1"}, True),
            (base_folder, {"layers": "1", "bottleneck_norms": False}, False),
            (base_folder, {"train_heads": True, "bottleneck_norms": False}, True),
            (headless, {"bottleneck_norms": False}, True),
        )
    ):
        model = make_model(source, **BOTTLENECK, **more)
        folder = export_bottlenecks(model, source, tmp_path / f"export-{i}")
        assert (folder / "base").is_dir() == has_base
        plain = folder / "base" if has_base else source
        expected = score(model, base_folder)
        assert not torch.allclose(score(AutoModelForMaskedLM.from_pretrained(plain).eval(), base_folder), expected)
        loaded = load_with_adapter(plain, folder / "adapter")
        torch.testing.assert_close(score(loaded, plain if has_base else source), expected, atol=1e-5, rtol=0)


def test_activation_and_place_are_the_formats_own(tiny_base_folder: Path, tmp_path: Path) -> None:
    for activation, place, fields in (
        ("tanh", "attention", {"output_adapter": False}),
        ("relu", "output", {"mh_adapter": False}),
    ):
        variant = {"bottleneck_activation": activation, "bottleneck_place": place, "bottleneck_norms": False}
        model = make_model(tiny_base_folder, **BOTTLENECK, **variant)
        folder = export_bottlenecks(model, tiny_base_folder, tmp_path / place)
        found = json.loads((folder / "adapter" / "adapter_config.json").read_text())["config"]
        assert found.items() >= (HOULSBY | fields | {"non_linearity": activation}).items()
        assert "An adapter of width 5 a layer" in (folder / "README.md").read_text()
        loaded = load_with_adapter(tiny_base_folder, folder / "adapter")
        torch.testing.assert_close(score(loaded, tiny_base_folder), score(model, tiny_base_folder), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("base_name", "prefix"), list(zip(BASES, ("bert", "roberta"), strict=True)))
def test_a_bottleneck_folder_has_the_names_that_adapterhubs_library_reads(
    base_name: str, prefix: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base_folder = request.getfixturevalue(base_name)
    folder = export_bottlenecks(make_model(base_folder, layers="1", **BOTTLENECK), base_folder, tmp_path / "export")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "adapter/adapter.safetensors", "adapter/adapter_config.json", "base/config.json"} <= files
    assert {path.name for path in (folder / "adapter").iterdir()} == {"adapter.safetensors", "adapter_config.json"}
    assert len({(folder / name).stat().st_mode for name in files}) == 1, "every file is readable by the same people"
    shapes = {
        name: tuple(tensor.shape) for name, tensor in load_file(folder / "adapter" / "adapter.safetensors").items()
    }
    expected = {}
    for place in ("attention.output", "output"):
        start = f"{prefix}.encoder.layer.1.{place}.adapters.task"
        expected |= {f"{start}.adapter_down.0.weight": (5, 32), f"{start}.adapter_down.0.bias": (5,)}
        expected |= {f"{start}.adapter_up.weight": (32, 5), f"{start}.adapter_up.bias": (32,)}
    assert shapes == expected
    found = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    fields = found.pop("config")
    assert fields.items() >= HOULSBY.items()
    assert int(32 // fields["reduction_factor"]) == 5 and fields["leave_out"] == [0]
    assert found == {
        "hidden_size": 32,
        "model_class": "BertForMaskedLM" if prefix == "bert" else "RobertaForMaskedLM",
        "model_name": base_folder.name,
        "model_type": prefix,
        "name": "task",
        "version": f"adapters.{ADAPTERS_VERSION}",
    }
    readme = (folder / "README.md").read_text()
    assert 'from_pretrained("base", ' in readme and str(tmp_path) not in readme


def test_only_the_layer_norms_of_adapted_layers_differ_from_the_base(tiny_base_folder: Path, tmp_path: Path) -> None:
    model = make_model(tiny_base_folder, layers="1", **BOTTLENECK)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = export_bottlenecks(model, tiny_base_folder, tmp_path / "export")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), (
        "the model has changed"
    )
    written, base = load_file(folder / "base" / "model.safetensors"), load_base(str(tiny_base_folder)).tensors
    assert written.keys() == base.keys()
    changed = {name for name, tensor in written.items() if not torch.equal(tensor, base[name])}
    norms = {f"bert.encoder.layer.1.{place}.LayerNorm" for place in ("attention.output", "output")}
    assert changed == {f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")}
    assert AutoTokenizer.from_pretrained(folder / "base")(TEXTS) == AutoTokenizer.from_pretrained(tiny_base_folder)(
        TEXTS
    )


def test_an_idle_adapter_is_left_out(tiny_base_folder: Path, tmp_path: Path) -> None:
    model = make_model(tiny_base_folder, **BOTTLENECK)
    expected = score(model, tiny_base_folder)
    model.bert.attach_adapter("other", heads=1)
    model.bert.set_active_adapters(["task"])
    folder = export_bottlenecks(model, tiny_base_folder, tmp_path / "export")
    loaded = load_with_adapter(folder / "base", folder / "adapter")
    torch.testing.assert_close(score(loaded, tiny_base_folder), expected, atol=1e-5, rtol=0)


def test_the_reduction_factor_gives_the_width() -> None:
    for hidden_size in (32, 312, 768, 1024):
        for size in range(1, 2 * hidden_size):
            assert int(hidden_size // find_reduction_factor(hidden_size, size)) == size
        assert find_reduction_factor(hidden_size, hidden_size // 4) == 4


def test_what_adapterhubs_format_does_not_hold_is_refused(tiny_base_folder: Path, tmp_path: Path) -> None:
    export = partial(export_bottlenecks, base_folder=tiny_base_folder, folder=tmp_path / "export")
    for method, reason in (
        ({"heads": 1, "ffn_units": 0}, "no bottlenecks"),
        (BOTTLENECK | {"heads": 1}, "1 extra heads"),
        (BOTTLENECK | {"ffn_units": 8}, "8 extra FFN units"),
        (BOTTLENECK | {"module_hidden_size": 4, "module_ffn_size": 8}, "extension modules of width 4"),
        (BOTTLENECK | {"lora_rank": 2}, "has LoRA"),
        (BOTTLENECK | {"bottleneck_layer_norm": True}, "a LayerNorm inside the bottlenecks"),
        (BOTTLENECK | {"new_words": [[7, 8]]}, "1 new words"),
    ):
        with pytest.raises(RunError, match=reason):
            export(make_model(tiny_base_folder, **method))
    model = make_model(tiny_base_folder, **BOTTLENECK)
    with pytest.raises(RunError, match="no adapter 'law' to export; it has task"):
        export_adapterhub(make_rebuilt(model, tiny_base_folder), "law", Place(tmp_path / "export"))
    model.bert.attach_adapter("other", bottleneck_size=2)
    with pytest.raises(RunError, match="the active adapter 'other' besides 'task'"):
        export(model)
    model.bert.set_active_adapters(["task"])
    model.config.causal = True
    with pytest.raises(RunError, match="attention from left to right"):
        export(model)
    assert not list(tmp_path.iterdir())


def test_only_an_earlier_export_of_the_kind_is_replaced(tiny_base_folder: Path, tmp_path: Path) -> None:
    model = make_model(tiny_base_folder, bottleneck_norms=False, **BOTTLENECK)
    folder = export_bottlenecks(model, tiny_base_folder, tmp_path / "export")
    export_bottlenecks(model, tiny_base_folder, folder)
    assert {path.name for path in folder.iterdir()} == {"README.md", "adapter", MARKER}
    with pytest.raises(RunError, match="an export of another kind \\(adapterhub\\)"):
        export_lora(tiny_base_folder, folder, **LORA)
    with pytest.raises(RunError, match="is a file"):
        export_bottlenecks(model, tiny_base_folder, folder / MARKER)
    (folder / "adapter" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="notes.txt"):
        export_bottlenecks(model, tiny_base_folder, folder)
    assert (folder / "adapter" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("base_name", BASES)
def test_a_lora_folder_gives_the_models_logits_in_peft(
    base_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    base_folder = request.getfixturevalue(base_name)
    for targets in ("query,value", "output", "query,key,value,attention_output,intermediate,output"):
        method = LORA | {"lora_targets": targets}
        model = make_model(base_folder, **method)
        assert all(param.any() for name, param in model.named_parameters() if ".lora_B." in name)
        folder = tmp_path / targets
        export_peft(make_rebuilt(model, base_folder, **method), Place(folder))
        monkeypatch.chdir(folder)
        names: dict[str, Any] = {}
        exec(read_example(folder, base_folder), names)
        loaded = names["model"].eval()
        adapted = {name for name, _ in loaded.named_parameters() if ".lora_A." in name}
        assert len(adapted) == 2 * len(targets.split(",")), "two layers"
        torch.testing.assert_close(score(loaded, base_folder), score(model, base_folder), atol=1e-5, rtol=0)
        with loaded.disable_adapter():
            assert not torch.allclose(score(loaded, base_folder), score(model, base_folder), atol=1e-3)


@pytest.mark.parametrize("base_name", BASES)
def test_a_lora_folder_is_what_peft_itself_would_save(
    base_name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base_folder = request.getfixturevalue(base_name)
    method = LORA | {"lora_alpha": 7.0}
    folder = export_lora(base_folder, tmp_path / "lora", **method)
    PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base_folder), folder).save_pretrained(
        tmp_path / "own"
    )
    ours, theirs = (load_file(saved / "adapter_model.safetensors") for saved in (folder, tmp_path / "own"))
    assert ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
    configs = [json.loads((saved / "adapter_config.json").read_text()) for saved in (folder, tmp_path / "own")]
    assert configs[0] == configs[1]
    assert (configs[0]["r"], configs[0]["lora_alpha"]) == (3, 7.0)
    assert configs[0]["base_model_name_or_path"] == base_folder.name
    files = {"adapter_config.json", "adapter_model.safetensors", "README.md", MARKER}
    assert {file.name for file in folder.iterdir()} == files
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "every file is readable by the same people"
    for path in folder.iterdir():
        assert str(base_folder.parent).encode() not in path.read_bytes(), "it tells where things lie on this machine"


def test_what_pefts_format_does_not_hold_is_refused(tiny_base_folder: Path, tmp_path: Path) -> None:
    for method, reason in (
        (BOTTLENECK, "no LoRA"),
        (BOTTLENECK | {"lora_rank": 2}, "extensions beside LoRA"),
        (LORA | {"train_heads": True}, "not the base's own, such as cls.predictions"),
    ):
        with pytest.raises(RunError, match=reason):
            export_lora(tiny_base_folder, tmp_path / "lora", **method)
    model = make_model(tiny_base_folder, **LORA)
    model.config.causal = True
    with pytest.raises(RunError, match="attention from left to right"):
        export_peft(make_rebuilt(model, tiny_base_folder, **LORA), Place(tmp_path / "lora"))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """An interpreter that has AdapterHub's library, and its environment."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if PYTHON_VARIABLE in os.environ:
        return os.environ[PYTHON_VARIABLE], environment
    # A folder that goes before this interpreter's packages: a venv would need a second torch.
    target = tmp_path_factory.mktemp("adapters")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *LIBRARY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"AdapterHub's library cannot be installed from the package index: {reason}")
    return sys.executable, {**environment, "PYTHONPATH": str(target)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_name", "layers", "bottleneck_norms", "variant"),
    [
        (BASES[0], "", True, {}),
        (BASES[0], "1", False, {}),
        (BASES[1], "1", True, {}),
        (BASES[1], "", False, {}),
        (BASES[0], "", True, {"bottleneck_parallel": True, "bottleneck_activation": "relu"}),
        (BASES[1], "", False, {"bottleneck_place": "output", "bottleneck_activation": "tanh"}),
        (BASES[0], "", False, {"bottleneck_parallel": True, "bottleneck_place": "attention"}),
    ],
)
def test_adapterhubs_own_library_gives_the_models_logits(
    base_name: str,
    layers: str,
    bottleneck_norms: bool,
    variant: dict[str, Any],
    library: tuple[str, dict[str, str]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    base_folder = request.getfixturevalue(base_name)
    model = make_model(base_folder, bottleneck_norms=bottleneck_norms, layers=layers, **BOTTLENECK, **variant)
    folder = export_bottlenecks(model, base_folder, tmp_path / "export")
    plain = folder / "base" if bottleneck_norms else base_folder
    python, environment = library
    program = read_example(folder, base_folder) + SCORE_IN_LIBRARY
    command = [python, "-c", program, str(plain), json.dumps(TEXTS)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["ids"] == load_tokenizer(base_folder)(TEXTS, padding=True)["input_ids"]
    logits, expected = torch.tensor(found["logits"]), score(model, base_folder)
    print(f"largest difference {(logits - expected).abs().max():.1e} of {expected.abs().max():.1f}")
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
