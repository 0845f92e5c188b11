"""Every extension learns a task beside a frozen base: its start, what trains, what is kept, and its export."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from finetuned_models import CPU, FP32, FULL, draw_example
from transformers import AutoModelForSequenceClassification

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig, GridConfig
from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.export.model_folder import is_plain
from domext_ray.families.classification import ClassificationTask
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.task import Task, TaskOptions
from domext_ray.finetuning.export import export_stages
from domext_ray.finetuning.training import Fitted, Point, fit_task, restore_task
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel, build_task_model
from domext_ray.storage import Place

HEADS, UNITS, BOTTLENECK = {"heads": 1}, {"ffn_units": 6}, {"bottleneck_size": 4}
# The gates are so wide open that step 0 is nearly the base.
MODULES = {"module_hidden_size": 8, "module_ffn_size": 12, "gate_bias": 10.0}
LORA = {"lora_rank": 3, "lora_alpha": 5, "lora_targets": ("query", "value", "intermediate")}
OWN = r"\.adapters\.task\."
WRAPPED = r"\.(query|value|intermediate\.dense)\."
LORA_NAMES = WRAPPED + r"lora_[AB]\."
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (HEADS, r"\.attention\.adapters\.task\."),
    "units": (UNITS, r"\.layer\.\d\.adapters\.task\."),
    "bottleneck": (BOTTLENECK, r"\.output\.adapters\.task\."),
    "modules": (MODULES, r"\.layer\.\d\.extension\."),
    "lora": (LORA, LORA_NAMES),
    "one adapter": ({**HEADS, **UNITS, **BOTTLENECK, "trains": "adapter"}, OWN),
    "all": ({**HEADS, **UNITS, **BOTTLENECK, **MODULES, **LORA}, rf"{OWN}|\.extension\.|{LORA_NAMES}"),
}
POINT = Point(lr=5e-3, batch_size=8, epochs=3.0, seed=4)


def make_method(**values: Any) -> MethodConfig:
    return MethodConfig(**{"name": "own", "adapter": "task", "heads": 0, "ffn_units": 0, **values})


def make_config(method: MethodConfig) -> FinetuneConfig:
    """With patience, so that an earlier epoch may be taken back."""
    optim = FinetuneOptimConfig(dropout=0.0)
    return FinetuneConfig(method=method, engine=FP32, optim=optim, grid=GridConfig(patience=1))


@pytest.fixture(scope="module")
def plain(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


@pytest.fixture(scope="module")
def task(plain: StartModel) -> ClassificationTask:
    generator = np.random.default_rng(3)
    splits: Any = [tuple(draw_example("classification", i, generator) for i in range(size)) for size in (24, 8, 8)]
    data = LabelledSet("made", *splits, ("weather", "animal"))
    return ClassificationTask(data, plain.tokenizer, TaskOptions(max_length=40, stride=10))


@pytest.fixture(scope="module")
def extended(plain: StartModel, task: ClassificationTask, tmp_path_factory: pytest.TempPathFactory) -> StartModel:
    """A model that has an adapter and modules of its own already."""
    method = make_method(adapter="domain", **HEADS, **BOTTLENECK, **{**MODULES, "gate_bias": 1.0})
    folder = tmp_path_factory.mktemp("extended") / "export"
    export(plain, fit(plain, task, method), folder)
    return open_model(str(folder)).load()


def fit(start: StartModel, task: Task, method: MethodConfig) -> Fitted:
    return fit_task(start, task, make_config(method), POINT, CPU, lambda _: None)


def export(start: StartModel, fitted: Fitted, folder: Path) -> None:
    export_stages(start, fitted.task, {"model": fitted}, Place(folder))


def compute_logits(model: Any, task: Task) -> torch.Tensor:
    batch = task.collate(task.encode(task.data.test, is_training=False))
    with torch.no_grad():
        return model.eval()(**batch.inputs).logits


def name_encoder(names: Iterable[str]) -> set[str]:
    """Names of the encoder's tensors; a pooler belongs to the head."""
    return {name for name in names if name.startswith("bert.") and not name.startswith("bert.pooler.")}


def check_extension(start: StartModel, task: Task, method: MethodConfig, trained: str, folder: Path) -> Fitted:
    """Check what holds for every extension: step 0, what trains and is kept, the base, and an export."""
    plain, fresh = (build_task_model(start, task, each, dropout=0.0, seed=4) for each in (FULL, method))
    for name in plain.state_dict().keys() - name_encoder(plain.state_dict()):
        fresh.get_parameter(name).data.copy_(plain.get_parameter(name))
    atol = 1e-3 if method.module_hidden_size else 0.0  # no gate is quite open, or it would not learn
    torch.testing.assert_close(compute_logits(fresh, task), compute_logits(plain, task), atol=atol, rtol=0.0)

    fitted = fit(start, task, method)
    learned = name_encoder(fitted.tensors)
    assert learned == {name for name, _ in fresh.named_parameters() if re.search(trained, name)} != set()
    moves = {name: not torch.equal(fitted.tensors[name], fresh.get_parameter(name)) for name in learned}
    assert all(moved or name.endswith("key.bias") for name, moved in moves.items())

    found = restore_task(start, task, make_config(method), POINT, CPU, fitted.tensors, fitted.thresholds)
    before, after = found.model.state_dict(), fitted.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(each, after[name]) for name, each in before.items()), "the base is still the start's"
    wrapped = WRAPPED if method.lora_rank else "$^"
    kept = {name for name in name_encoder(start.tensors) - learned if not re.search(wrapped, name)}
    assert kept and all(torch.equal(after[name], start.tensors[name]) for name in kept)

    export(start, fitted, folder)
    alone = load_exported(folder, CPU)
    assert alone.predict(task.data.test).predictions == fitted.predict(task.data.test)
    assert torch.equal(compute_logits(alone.stages["model"].model, task), compute_logits(fitted.model, task))
    again = open_model(str(folder)).load()
    assert all(torch.equal(again.tensors[name], after[name]) for name in name_encoder(after))
    return fitted


@pytest.mark.parametrize("kind", KINDS)
def test_an_extension_learns_a_task_beside_its_base(
    kind: str, plain: StartModel, task: ClassificationTask, tmp_path: Path
) -> None:
    values, trained = KINDS[kind]
    fitted = check_extension(plain, task, make_method(**values), trained, tmp_path / "export")
    assert is_plain(fitted.model) == (kind == "lora")


@pytest.mark.parametrize("kind", ["lora", "one adapter"])
def test_an_extension_stands_on_those_of_the_model(
    kind: str, extended: StartModel, task: ClassificationTask, tmp_path: Path
) -> None:
    """Beside the model's own, which train where all extensions do."""
    values, trained = KINDS[kind]
    brought = "" if values.get("trains") == "adapter" else r"|\.adapters\.domain\.|\.extension\."
    fitted = check_extension(extended, task, make_method(**values), trained + brought, tmp_path / "export")
    assert fitted.model.config.adapters.keys() == ({"domain"} if kind == "lora" else {"domain", "task"})


def test_what_the_model_cannot_take_is_refused(extended: StartModel, task: ClassificationTask) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({**MODULES, "module_ffn_size": 16}, "16 differ from the modules of --model, 8 and 12; give those to train"),
        ({**HEADS, "adapter": "domain"}, "'domain' is the name of an adapter of --model that has other"),
        ({"module_hidden_size": 6, "module_ffn_size": 8}, "--method.module_hidden_size is 6; it must be divisible by"),
        ({"trains": "biases"}, "--method.trains is biases; the base's layers have none"),
    ]
    for values, says in refused:
        config = copy.deepcopy(extended.config)
        config.attention_bias = config.ffn_bias = config.norm_bias = "trains" not in values
        with pytest.raises(ConfigError, match=re.escape(says)):
            build_task_model(replace(extended, config=config), task, make_method(**values), dropout=0.0, seed=0)


def test_what_would_not_train_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"word_rows": 9}, "--method.word_rows is 9; it must be 0 in fine-tuning, which has no corpus"),
        ({**LORA, **HEADS, "trains": "adapter"}, "it must be extensions with --method.lora_rank 3"),
        ({**MODULES, **HEADS, "trains": "adapter"}, "it must be extensions or all with --method.mod"),
    ]
    for values, says in refused:
        with pytest.raises(ConfigError, match=re.escape(says)):
            FinetuneConfig(method=make_method(**values))


def test_merged_lora_is_what_peft_makes(
    plain: StartModel, task: ClassificationTask, tiny_base_folder: Path, tmp_path: Path
) -> None:
    fitted = fit(plain, task, make_method(**LORA))
    export(plain, fitted, tmp_path / "export")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_base_folder, num_labels=2)
    targets = r".*\.(query|value|intermediate\.dense)"
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets))
    for name, each in fitted.tensors.items():
        model.base_model.model.get_parameter(re.sub("^pooler", "bert.pooler", name)).data.copy_(each)
    assert any("lora_B" in name and each.any() for name, each in fitted.tensors.items())
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    found = compute_logits(exported, task)
    torch.testing.assert_close(found, compute_logits(model, task), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(found, compute_logits(model.merge_and_unload(), task), atol=1e-6, rtol=0.0)
