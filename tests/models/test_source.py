"""What a user calls a model: each kind is known by its files, and who does not take it says what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finetuned_models import BOTTLENECK, CPU, FULL, export_fitted
from labelled_fixtures import write

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.config.jobs import ExportConfig
from domext_ray.errors import BaseModelError, DomextError
from domext_ray.inference.embed import plan_embedding
from domext_ray.inference.onnx_export import export_onnx
from domext_ray.inference.predict import plan_prediction
from domext_ray.models.bank import AdapterBank
from domext_ray.models.exported import load_exported
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.source import BankAdapter, BaseModel, Export, FinetunedRun, Graphs, Run, open_model
from domext_ray.serving.served_model import find_single_model
from domext_ray.text.data.names import SHIPPED_BASE, find_local_base


@pytest.fixture(scope="module")
def places(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of every kind, by a name; what only its files tell has no more than these."""
    root = tmp_path_factory.mktemp("models")
    start = open_model(str(tiny_base_folder)).load()
    plain, tagger = (
        export_fitted(start, family, root / family, method, epochs=0.5)
        for family, method in (("classification", FULL), ("ner", BOTTLENECK))
    )
    export_onnx(ExportConfig(run=str(plain), format="onnx", output=str(root / "graph")))
    AdapterBank.create(root / "bank", str(tiny_base_folder)).add_run("tags", tagger)
    write(root / "run" / "config.yaml", "seed: 0\n")
    write(root / "tuned" / "config.yaml", "seed: 0\n")
    (root / "tuned" / "trainings").mkdir()
    names = ("run", "tuned", "classification", "ner", "graph", "bank")
    return {name: str(root / name) for name in names} | {"base": str(tiny_base_folder), "adapter": f"{root}/bank:tags"}


KINDS = {
    "run": (Run, False),
    "tuned": (FinetunedRun, True),
    "ner": (Export, True),
    "classification": (BaseModel, True),  # all of it was trained, so that it is a plain model
    "base": (BaseModel, False),
    "graph": (Graphs, True),
    "adapter": (BankAdapter, False),
}


def test_each_kind_is_known_by_its_files(places: dict[str, str]) -> None:
    for name, (kind, does_task) in KINDS.items():
        found = open_model(places[name], "--models")
        assert (type(found), found.does_task, found.option) == (kind, does_task, "--models"), name
    for name in (SHIPPED_BASE, "bert-base-uncased", "nowhere/model", "s3://bucket/model", places["bank"]):
        assert type(open_model(name)) is BaseModel, "whoever reads it says what is wrong with it"
    adapter = open_model(places["adapter"])
    assert isinstance(adapter, BankAdapter)
    assert (str(adapter.bank), adapter.adapter) == (places["bank"], "tags")


def predict(model: str) -> Any:
    return plan_prediction(PredictConfig(model=model, input=str(Path(__file__)), output="found"))


def embed(model: str) -> Any:
    return plan_embedding(EmbedConfig(model=model, input=str(Path(__file__)), output="vectors"))


def load(model: str) -> Any:
    return open_model(model).load()


def write_graphs(model: str) -> Any:
    return export_onnx(ExportConfig(run=model, format="onnx", output=f"{model.replace(':', '-')}-graph"))


USERS: dict[Callable[[str], Any], dict[str, str]] = {
    predict: {},
    embed: {"tuned": "a fine-tuned run; give its export, ", "graph": "which domext predict alone takes"},
    load: {
        "tuned": "a fine-tuned run; give its export, ",
        "graph": "an ONNX folder, which domext predict alone takes; give what it was made from",
        "adapter": "an adapter of a bank; give the run that was added to the bank",
    },
    load_masked_lm: {
        **dict.fromkeys(("tuned", "ner", "classification", "graph"), "was fine-tuned and has no masked-LM head; give"),
        "adapter": "an adapter of a bank",
    },
    find_single_model: {"graph": "an ONNX folder", "adapter": "an adapter of a bank"},
    write_graphs: {"graph": "an ONNX folder", "adapter": "an adapter of a bank"},
    lambda model: load_exported(Path(model), CPU): {
        "graph": "an ONNX folder",
        **dict.fromkeys(("base", "adapter"), "holds no fine-tuned model; give the export of a fine-tuning run"),
    },
}
"""Who takes models, and what each says of the kinds that it does not take."""
UNFINISHED = {"run", "tuned"}
"""Have no more than a name here, so that who takes them fails later."""


@pytest.mark.parametrize("use", USERS)
def test_who_does_not_take_a_kind_says_what_it_is(use: Callable[[str], Any], places: dict[str, str]) -> None:
    for name in KINDS:
        said = USERS[use].get(name)
        is_slow = use is write_graphs  # `inference/test_onnx.py` writes graphs of all kinds
        if said is None and name not in UNFINISHED and not is_slow:
            use(places[name])
        elif said is not None:
            with pytest.raises(DomextError, match=re.escape(said)) as error:
                use(places[name])
            assert places[name] in str(error.value), "the sentence names what was given"


def test_a_folder_that_is_no_base_is_told_what_it_is(places: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "peft" / "adapter_config.json", "{}")
    write(tmp_path / "hub" / "adapter" / "adapter_config.json", "{}")
    write(tmp_path / "hub" / "base" / "config.json", "{}")
    write(tmp_path / "old" / "modules.json", "[]")
    for name in ("checkpoint-500", "checkpoint-1000"):
        write(tmp_path / "trained" / name / "config.json", json.dumps({"model_type": "bert"}))
    write(tmp_path / "models--bert" / "snapshots" / "0a1b" / "config.json", "{}")
    (tmp_path / "empty").mkdir()
    for folder, said in (
        (places["bank"], f"adapters predict, embed and serve take as {places['bank']}:NAME."),
        (places["graph"], "an ONNX graph, which predict alone takes"),
        (places["run"], "it is a run without an export"),
        (tmp_path / "peft", "an adapter, not a model: merge it into its base"),
        (
            tmp_path / "hub",
            "an adapter, not a model: merge it into its base",
        ),  # its base alone is not what was meant
        (tmp_path / "old", f"such as {tmp_path}/old/0_Transformer."),
        (tmp_path / "trained", f"trained/checkpoint-500 and in {tmp_path}/trained/checkpoint-1000: give that folder."),
        (tmp_path / "models--bert", f"there is one in {tmp_path}/models--bert/snapshots/0a1b: give that folder."),
        (tmp_path / "empty", "give a folder that save_pretrained wrote."),
    ):
        with pytest.raises(BaseModelError, match=re.escape(f"--base {str(folder)!r} has no config.json; ")) as error:
            find_local_base(str(folder))
        assert said in str(error.value)
