"""Models as ONNX folders: graphs compute what torch does, in programs without torch and in predictions; refusals."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_runs import as_rebuilt
from finetuned_models import BOTTLENECK, CPU, FULL, draw_set, export_fitted
from method_runs import build, make_places
from methods import ROWS, Row, find_row
from tiny_layouts import TINY_LAYOUTS

from domext_ray.config.inference import InferenceScaleConfig, PredictConfig
from domext_ray.config.jobs import ExportConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, DomextError, RunError
from domext_ray.export import onnx_graph
from domext_ray.export.model_folder import export_model
from domext_ray.export.onnx_graph import GRAPH, INT8, OnnxModel, write_graph
from domext_ray.families.registry import FAMILIES
from domext_ray.inference.onnx_export import export_onnx
from domext_ray.inference.predict import PredictPlan, plan_prediction
from domext_ray.inference.predictors import open_task
from domext_ray.model.base import load_base
from domext_ray.model.build import merge_extensions
from domext_ray.model.spec import ModelSpec
from domext_ray.models.exported import hash_export, load_exported
from domext_ray.models.masked_lm import load_masked_lm
from domext_ray.models.source import open_model
from domext_ray.storage import Place
from domext_ray.text.vocabulary.tokenizer import load_tokenizer

TOLERANCE = 1e-4
LONE = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"domext_ray", "torch", "transformers"}:
            raise ImportError(name)

sys.meta_path.insert(0, Without())
exec(open(sys.argv[1]).read())
"""


def move(model: Any) -> Any:
    """The model with extensions that are away from their start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if ".adapters." in name or ".extension." in name:
                each.add_(torch.randn(each.shape, generator=generator) * 0.05)
    merge_extensions(model)
    return model.eval()


def measure(model: Any, folder: Path) -> float:
    """The worst difference of scores, in rows of several lengths up to the longest, with padding and without."""
    graph, generator, worst = OnnxModel(folder), torch.Generator().manual_seed(1), 0.0
    longest = model.config.max_row_length
    for rows, length in ((2, 9), (1, 2), (1, 40), (3, longest)):
        ids = torch.randint(5, model.config.vocab_size, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:, length // 2 :] = 0
        places = torch.tensor([0, length // 2 - 1, length // 3])
        places = torch.cat([places, places + (rows - 1) * length])  # of a row with padding, too
        with torch.no_grad():
            states = model.bert(ids, mask, pool=False).last_hidden_state.flatten(0, 1)[places]
            expected = model.cls.predictions(states, model.bert.embeddings.adapters)
        found = graph(ids, mask if rows > 1 else None, masked_positions=places).logits
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def read_program(folder: Path) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return str(program)


def run_program(folder: Path, tmp_path: Path, program: str | None = None) -> list[str]:
    """What a card's program prints, in a process that can import neither torch nor transformers nor this library."""
    path = tmp_path / "program.py"
    path.write_text(program or read_program(folder))
    done = subprocess.run(
        [sys.executable, "-c", LONE, str(path)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def predict(model: Path, rows: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """What a job's actor writes."""
    root.mkdir()
    (root / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    given = {"model": str(model), "input": str(root / "in.jsonl"), "output": str(root / "out"), "format": "jsonl"}
    plan: PredictPlan = plan_prediction(PredictConfig(**given, top_k=5))  # type: ignore[arg-type]
    Path(plan.folder).mkdir()
    plan.blocks.make()
    work = plan.load(CPU)
    for each in plan.input.blocks:
        plan.blocks.records.write(each.number, plan.blocks.make_part(each, work))
    return [json.loads(line) for part in sorted(Path(plan.folder).rglob("*.jsonl")) for line in part.open()]


def export(run: Path, folder: Path, **options: Any) -> Path:
    return Path(export_onnx(ExportConfig(run=str(run), format="onnx", **{"output": str(folder), **options})))


@pytest.fixture(scope="module")
def places(tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_places(tmp_path_factory.mktemp("methods"), tiny_base_folder, tiny_roberta_folder)


def save_export(row: Row, places: Any, folder: Path) -> Path:
    """A model with a row's extension as its export."""
    built = build(row, places)
    rebuilt = as_rebuilt(move(built.model), built.base, load_tokenizer(places.tokenizer_of(row)), PretrainConfig())
    export_model(rebuilt, Place(folder))
    return folder


def test_a_masked_lm_is_a_graph(places: Any, tmp_path: Path) -> None:
    source = save_export(find_row("exBERT"), places, tmp_path / "export")
    folder = export(source, tmp_path / "onnx", int8=True)
    assert not {each.suffix for each in folder.rglob("*")} & {".safetensors", ".py", ".bin"}
    for each in (folder / GRAPH, folder / INT8 / GRAPH):
        content = each.read_bytes()
        assert not [name for name in (b"stack_trace", b"site-packages", b"domext_ray/") if name in content]
    model, tokenizer = load_masked_lm(str(source))
    assert measure(model, folder) < TOLERANCE
    rows = [{"text": "The patient was given [MASK]."}, {"text": "the [MASK] and the [MASK]"}, {"text": "no mask"}]
    expected, found, int8 = (
        predict(each, rows, tmp_path / f"predict-{i}") for i, each in enumerate((source, folder, folder / INT8))
    )
    for here, there, small in zip(expected, found, int8, strict=True):
        for first, second, third in zip(here["masks"], there["masks"], small["masks"], strict=True):
            assert [each["token"] for each in second["fills"]] == [each["token"] for each in first["fills"]]
            np.testing.assert_allclose(*([each["probability"] for each in of["fills"]] for of in (second, first)), 1e-3)
            assert third["fills"][0]["probability"] == pytest.approx(first["fills"][0]["probability"], rel=0.1)
    (printed,) = run_program(folder, tmp_path)
    ids = tokenizer.convert_tokens_to_ids(eval(printed))
    assert [tokenizer.decode([each]) for each in ids] == [each["token"] for each in found[0]["masks"][0]["fills"]]
    assert (folder / INT8 / GRAPH).stat().st_size < (folder / GRAPH).stat().st_size
    assert "int8" in (folder / INT8 / "README.md").read_text() and "int8" not in (folder / "README.md").read_text()
    assert "base_model" not in (folder / "README.md").read_text(), "a folder is no model of the hub"


def test_a_fine_tuned_model_is_a_graph(tiny_base_folder: Path, tmp_path: Path) -> None:
    source = export_fitted(open_model(str(tiny_base_folder)).load(), "ner", tmp_path / "export", BOTTLENECK)
    folder = export(source, tmp_path / "onnx")
    examples = draw_set("ner").test
    expected, found = (
        open_task(open_model(str(each))).load(CPU).predict(examples).predictions for each in (source, folder)
    )
    check_close(found, expected)
    model = load_exported(source, CPU).stages["model"].model
    tokenizer = load_tokenizer(source)
    printed = run_program(folder, tmp_path)
    with torch.no_grad():
        best = model(**tokenizer("a text", return_tensors="pt")).logits[0].argmax(-1).tolist()
    encoded = tokenizer("a text")
    firsts = [encoded.word_to_tokens(word)[0] for word in (0, 1)]
    assert [eval(each) for each in printed] == [
        (encoded.tokens()[place], model.config.id2label[best[place]]) for place in firsts
    ]


@pytest.mark.slow
def test_large_weights_stand_beside_a_graph(
    tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_graph, "MAX_PROTOBUF_BYTES", 0)
    folder = export(tiny_base_folder, tmp_path / "onnx", int8=True)
    weights, alone = folder / f"{GRAPH}.data", hash_export(folder)
    assert weights.is_file() and measure(load_masked_lm(str(tiny_base_folder))[0], folder) < TOLERANCE
    assert (
        OnnxModel(folder / INT8)(torch.arange(5, 15)[None], masked_positions=torch.tensor([3])).logits.isfinite().all()
    )
    shutil.rmtree(folder / INT8)
    assert hash_export(folder) == alone, "the int8 graph is another model"
    weights.write_bytes(weights.read_bytes()[:-1] + b"1")
    assert hash_export(folder) != alone


@pytest.mark.parametrize(
    "family",
    ["classification", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ner", "relation_extraction"))],
)
def test_only_predict_takes_a_graph(family: str, places: Any, tmp_path: Path) -> None:
    """And a foreign graph beside a base is none of ours."""
    (tmp_path / "in.txt").write_text("the [MASK]\n")
    given = {"input": str(tmp_path / "in.txt"), "output": str(tmp_path / "out")}
    source = export_fitted(open_model(str(places.bert)).load(), family, tmp_path / family, FULL, epochs=0.3)
    folder = export(source, tmp_path / "onnx")
    with pytest.raises(ConfigError, match="fills no masks: it is the graph of a task; leave --task out"):
        plan_prediction(PredictConfig(model=str(folder), task="fill_mask", **given))  # type: ignore[arg-type]
    with pytest.raises(BaseModelError, match="an ONNX folder, which domext predict alone takes"):
        load_exported(folder, CPU)
    with pytest.raises(BaseModelError, match="an ONNX folder, .* give what it was made from"):
        export(folder, tmp_path / "again")
    with pytest.raises(
        ConfigError, match=r"--scale\.use_gpu is True; .* is an ONNX folder, so it must be auto or false"
    ):
        plan_prediction(PredictConfig(model=str(folder), scale=InferenceScaleConfig(use_gpu=True), **given))  # type: ignore[arg-type]
    base = shutil.copytree(places.bert, tmp_path / "base")
    (base / GRAPH).write_bytes(b"of another exporter")
    assert plan_prediction(PredictConfig(model=str(base), **given)).model.task == "fill_mask"  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_adapters_of_a_graph_are_chosen(places: Any, tmp_path: Path) -> None:
    model = build(find_row("AF"), places).model
    model.attach_adapter("law", bottleneck_size=4)
    base, tokenizer = load_base(str(places.bert)), load_tokenizer(places.bert)
    export_model(as_rebuilt(move(model), base, tokenizer, PretrainConfig()), Place(tmp_path / "two"))
    scores = []
    for names in ("domain", "law", "domain,law"):
        folder = export(tmp_path / "two", tmp_path / names, adapter=names)
        alone, _ = load_masked_lm(str(tmp_path / "two"))
        alone.set_active_adapters(names.split(","))
        assert measure(alone, folder) < TOLERANCE
        ids = torch.arange(5, 15)[None]
        scores.append(OnnxModel(folder)(ids, masked_positions=torch.tensor([3])).logits)
    assert not torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


@pytest.mark.slow
@pytest.mark.parametrize("row", [each for each in ROWS if not each.after], ids=lambda row: row.slug)
def test_every_method_is_a_graph(row: Row, places: Any, tmp_path: Path) -> None:
    model = build(row, places).model
    write_graph(move(model), tmp_path / GRAPH)
    assert measure(model, tmp_path) < TOLERANCE


EXTENSIONS = {
    "none": {"trains": "all"},
    "AF": {"heads": 1, "ffn_units": 6},
    "exBERT": {"module_hidden_size": 12, "module_ffn_size": 10},
    "bottleneck": {"bottleneck_size": 5},
    "words": {"word_rows": 9, "word_head": True},
    "LoRA": {"lora_rank": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY_LAYOUTS)
@pytest.mark.parametrize("name", EXTENSIONS)
def test_every_layout_is_a_graph(name: str, kind: str, tmp_path: Path) -> None:
    """ModernBERT's tiny window is 4 on either side, and rows are much longer."""
    deep = {"modernbert": {"num_hidden_layers": 5}}
    base = load_base(str(TINY_LAYOUTS[kind].save(tmp_path / "base", **deep.get(kind, {}))))
    method = MethodConfig(**{"heads": 0, "ffn_units": 0, **EXTENSIONS[name]})  # type: ignore[arg-type]
    model = ModelSpec(base, method).build()
    write_graph(move(model), tmp_path / GRAPH)
    assert measure(model, tmp_path) < TOLERANCE


STAGED = ("relation_extraction", "normalization")
"""Families whose models read other examples than the task does."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_graph(
    family: str, kind: str, tiny_base_folder: Path, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    known = {"bert": tiny_base_folder, "roberta": tiny_roberta_folder}
    base = known.get(kind) or TINY_LAYOUTS[kind].save(tmp_path / "base")
    method = BOTTLENECK if family != "normalization" else FULL
    source = export_fitted(open_model(str(base)).load(), family, tmp_path / "export", method)
    folder = export(source, tmp_path / "onnx")
    task, other = load_exported(source, CPU), load_exported(folder, CPU, takes_graphs=True)
    examples = draw_set(family).test
    for name, fitted in ({} if family in STAGED else task.stages).items():
        rows = fitted.task.encode(examples, is_training=False)
        for size in (1, len(rows)):
            for here, there in zip(fitted.run(rows[:size]), other.stages[name].run(rows[:size]), strict=True):
                torch.testing.assert_close(there, here, atol=TOLERANCE, rtol=0)
    expected, found = (each.predict(examples).predictions for each in (task, other))
    check_close(found, expected)
    for each in folder.rglob("README.md"):
        printed = run_program(each.parent, tmp_path)
        assert printed or family in ("nested_ner", "relation_extraction"), "few steps may find no span"
        assert len(printed) == 2 or family != "ner", "the words of 'a text', whatever their pieces"


def check_close(found: Any, expected: Any) -> None:
    """Compare predictions, whose numbers differ by rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [*found.values()], [*expected.values()]
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            check_close(*pair)
    else:
        assert found == (pytest.approx(expected, abs=TOLERANCE) if isinstance(expected, float) else expected)


@pytest.mark.slow
def test_what_a_graph_cannot_hold_is_said(places: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_export(find_row("AF"), places, tmp_path / "export")

    def refuse(run: Path, says: str, **options: Any) -> None:
        with pytest.raises(DomextError, match=says):
            export(run, tmp_path / "onnx", **options)
        assert not (tmp_path / "onnx").exists()

    refuse(source, "--adapter names 'clinic'; the model's adapters are: domain", adapter="clinic")
    model, tokenizer = load_masked_lm(str(source))
    model.bert.set_router("domain", torch.zeros(5 + 2**16, dtype=torch.int32), 0.0)
    export_model(
        as_rebuilt(model, load_base(str(places.bert)), tokenizer, PretrainConfig()), Place(tmp_path / "routed")
    )
    refuse(tmp_path / "routed", r"the model has a router, by which a row may have an adapter \(domain\) or none")
    export(tmp_path / "routed", tmp_path / "named", adapter="domain")
    model.detach_adapter("domain")
    for name in ("clinic", "law"):
        model.attach_adapter(name, bottleneck_size=4)
    export_model(as_rebuilt(model, load_base(str(places.bert)), tokenizer, PretrainConfig()), Place(tmp_path / "two"))
    refuse(tmp_path / "two", r"the model has several adapters \(clinic, law\), so it must name the graph's")
    refuse(tmp_path / "two", "--output is empty; it must be a folder, for --run .* is no run's directory", output="")
    start = open_model(str(places.bert)).load()
    refuse(
        export_fitted(start, "ner", tmp_path / "read", FULL, head_bilstm=8, epochs=0.3),
        "reads states by a BiLSTM of 8, which a graph cannot hold",
    )
    refuse(
        export_fitted(start, "normalization", tmp_path / "recalls", FULL, embeds=True, epochs=0.3),
        "recalls terms by the vectors of a second model",
    )
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / GRAPH).write_bytes(b"no graph")
    refuse(tmp_path / "graph", "is an ONNX folder, .* give what it was made from")
    with pytest.raises(RunError, match=r"model\.onnx is no graph of this project, or damaged"):
        OnnxModel(tmp_path / "graph")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    refuse(source, r'ONNX needs onnx, which is not installed: pip install "domext_ray\[onnx\]"')
    with pytest.raises(ConfigError, match=r"holds an ONNX graph, which needs onnxruntime, which is not installed"):
        OnnxModel(tmp_path / "graph")
