"""Fine-tuned models of every family load with torch and transformers only, and give the same logits there."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from family_sets import EXAMPLES, STAGED, make_family_task
from finetuned_models import BOTTLENECK, CPU, FP32, FULL, fit
from lone_process import WITHOUT_PROJECT
from safetensors.torch import load_file
from transformers import AutoConfig

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError, RunError
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES, PLAIN_HEADS, is_plain
from domext_ray.families.readers.examples import LabelledSet, TaggedSentence
from domext_ray.families.readers.words import cut_words
from domext_ray.families.registry import FAMILIES
from domext_ray.families.task import ONLY_STAGE, Task, TaskOptions
from domext_ray.finetuning.export import CardFigures, build_card, export_stages, save_fitted
from domext_ray.finetuning.training import Fitted, Point, prepare_task
from domext_ray.models.exported import load_exported
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel, build_task_model
from domext_ray.storage import Place

ONE_MODEL = [each for each in EXAMPLES if each not in STAGED]

LOAD_ALONE = (
    WITHOUT_PROJECT
    + """
import json
import sys
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
for folder in sys.argv[1:]:
    name = json.load(open(f"{folder}/auto_class.json"))
    model = getattr(tf, name).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        outputs = model(**load_file(f"{folder}/inputs.safetensors"))
    save_file({"logits": outputs[0].contiguous()}, f"{folder}/found.safetensors")
assert "domext_ray" not in sys.modules
"""
)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def make_fitted(start: StartModel, family: str, method: MethodConfig) -> Fitted:
    task = make_family_task(family, start.tokenizer).stages[ONLY_STAGE]
    config = FinetuneConfig(method=method, engine=FP32)
    fitted = prepare_task(start, task, config, Point(1e-3, 2, 1.0, 0), CPU, num_steps=2)
    with torch.no_grad():  # extensions that start at zero shall show
        for param in fitted.model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.02)
    return replace(fitted, thresholds={"threshold": 0.25})


def save_to(folder: Path, start: StartModel, family: str, method: MethodConfig) -> Fitted:
    """Make a model of a family and export it."""
    fitted = make_fitted(start, family, method)
    folder.parent.mkdir(exist_ok=True)
    save_fitted(start, fitted, folder, CardFigures(fitted.task.data, ""))
    return fitted


def write_inputs(fitted: Fitted, folder: Path) -> Any:
    """Write a batch and the class that loads the folder; return our own first output."""
    from safetensors.torch import save_file

    task = fitted.task
    batch = task.collate(task.encode(task.data.dev, is_training=False))
    inputs = {name: each.contiguous() for name, each in batch.inputs.items() if isinstance(each, torch.Tensor)}
    inputs.pop("cu_seq_lens")  # it goes with `max_length`, for an attention of ours
    save_file(inputs, folder / "inputs.safetensors")
    (folder / "auto_class.json").write_text(json.dumps(HEAD_AUTO_CLASSES[task.head]), encoding="utf-8")
    with torch.no_grad():
        return fitted.model.eval()(**batch.inputs)[0]


def test_a_plain_model_is_transformers_own(start: StartModel, tmp_path: Path) -> None:
    """A base without extensions needs no code of ours where transformers has the head."""
    for family in ONE_MODEL:
        folder = tmp_path / family
        fitted = save_to(folder, start, family, FULL)
        has_class = fitted.task.head in PLAIN_HEADS
        assert is_plain(fitted.model) == has_class == (not (folder / "modeling_domext.py").exists())
        if has_class:
            loaded = getattr(transformers, HEAD_AUTO_CLASSES[fitted.task.head]).from_pretrained(folder).eval()
            batch = fitted.task.collate(fitted.task.encode(fitted.task.data.dev, is_training=False))
            with torch.no_grad():
                found, expected = loaded(**batch.inputs)[0], fitted.model.eval()(**batch.inputs)[0]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=family)


def test_every_family_loads_alone(start: StartModel, tiny_roberta_folder: Path, tmp_path: Path) -> None:
    roberta = open_model(str(tiny_roberta_folder)).load()
    expected = {}
    for family in (*ONE_MODEL, "roberta"):
        model, method = (roberta, FULL) if family == "roberta" else (start, BOTTLENECK)
        fitted = save_to(tmp_path / family, model, "classification" if family == "roberta" else family, method)
        expected[tmp_path / family] = write_inputs(fitted, tmp_path / family)
        assert (tmp_path / family / "modeling_domext.py").exists()
    command = [sys.executable, "-I", "-c", LOAD_ALONE, *map(str, expected)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, logits in expected.items():
        found = load_file(folder / "found.safetensors")["logits"]
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5, msg=folder.name)


def test_labels_and_thresholds_are_in_the_configuration(start: StartModel, tmp_path: Path) -> None:
    save_to(tmp_path / "export", start, "ner", FULL)
    config = AutoConfig.from_pretrained(tmp_path / "export")
    assert config.id2label == {0: "O", 1: "B-Disease", 2: "I-Disease"} and config.label2id["I-Disease"] == 2
    assert config.task_thresholds == {"threshold": 0.25} and config.architectures == ["BertForTokenClassification"]
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    assert "No licence is known for the weights." in card
    assert "AutoModelForTokenClassification" in card and "trust_remote_code" not in card
    for path in (tmp_path / "export").iterdir():
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content and str(Path(start.id).parent).encode() not in content, path.name


@pytest.mark.usefixtures("own_modules")
def test_transformers_pipeline_gives_the_probabilities_of_several_labels(start: StartModel, tmp_path: Path) -> None:
    for method in (FULL, BOTTLENECK):
        folder = tmp_path / method.name
        fitted = save_to(folder, start, "multilabel", method)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert config["problem_type"] == "multi_label_classification"
        pipe = transformers.pipeline("text-classification", str(folder), trust_remote_code=True)
        texts = [{"text": "a cat"}, {"text": "a tree", "text_pair": "a dog"}]
        rows = fitted.task.encode(fitted.task.data.dev, is_training=False)
        outputs = fitted.run_rows(rows)
        expected = [each["probabilities"] for each in fitted.task.decode(fitted.task.data.dev, rows, outputs)]
        for options in ({"function_to_apply": "sigmoid"}, {}):  # problem_type alone says that it is a sigmoid
            found = [{each["label"]: each["score"] for each in pipe(text, top_k=None, **options)} for text in texts]
            for own, other in zip(expected, found, strict=True):
                assert list(own) == list(other) and list(own.values()) == pytest.approx(list(other.values()), abs=2e-6)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert 'function_to_apply="sigmoid", top_k=None' in card and "above 0.25" in card


@pytest.mark.usefixtures("own_modules")
def test_the_pipeline_of_the_card_gives_whole_words(start: StartModel, tmp_path: Path) -> None:
    """The card's own lines; words of several pieces, of which all but the first have any tag."""
    text = "unquestionably the zebra, dogcat. walkrun"
    for method in (FULL, BOTTLENECK):
        folder = tmp_path / method.name
        save_to(folder, start, "ner", method)
        card = (folder / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"```python\n(from transformers import pipeline\n.*?)```", card, re.DOTALL)
        assert ("trust_remote_code" in code) == (method is BOTTLENECK)
        values: dict[str, Any] = {}
        exec(code.replace("PATH_OF_THIS_FOLDER", str(folder)), values)
        words = cut_words(text)[1]
        found = values["pipe"](text)
        assert found and {each["start"] for each in found} <= {first for first, _ in words}
        assert {each["end"] for each in found} <= {last for _, last in words}
        assert "cuts words at all punctuation" not in card


def test_the_card_says_what_its_figures_do_not_hold_for(start: StartModel, tmp_path: Path) -> None:
    def build(*words: str) -> str:
        train = TaggedSentence("1", "secret.txt:1", ("X-12", "melts"), ("B-Disease", "O"))
        other = TaggedSentence("2", "secret.txt:2", words, ("B-Disease",) * len(words))
        data = LabelledSet("made", (train,), (other,), (), ("Disease",))
        task = FAMILIES["ner"](data, start.tokenizer, TaskOptions())
        assert isinstance(task, Task)
        fitted = prepare_task(start, task, FinetuneConfig(method=FULL, engine=FP32), Point(1e-3, 2, 1.0, 0), CPU, 2)
        return build_card(start, fitted, CardFigures(data, ""), is_plain=True)

    card = build("U.S.", "X-13")
    assert "1 of 2 entities of dev have words that are cut otherwise in running text." in card and "secret" not in card
    assert "cuts words at all punctuation" in card and "entities of dev" not in build("X-13")


def test_the_card_has_what_the_model_scored_and_what_it_is_for(start: StartModel, tmp_path: Path) -> None:
    figures = {"micro": {"f1": 0.71239}, "intervals": {"micro.f1": [0.69, 0.74]}, "examples": 1200}
    nothing = {"micro": {"f1": math.nan}, "intervals": {"micro.f1": [math.nan, math.nan]}, "examples": 0}
    scores = {"dev": figures, "test": nothing}
    data = LabelledSet("bc5cdr", (), (), ())
    fitted = make_fitted(start, "ner", FULL)
    save_fitted(start, fitted, tmp_path / "export", CardFigures(data, "micro.f1", scores))
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---")[1])
    assert header["model-index"][0]["results"] == [
        {
            "task": {"type": "token-classification", "name": "Token classification"},
            "dataset": {"type": "bc5cdr", "name": "bc5cdr", "split": "dev"},
            "metrics": [{"type": "micro.f1", "name": "micro.f1", "value": 0.7124}],
        }
    ]
    assert header["pipeline_tag"] == "token-classification"
    assert "base_model" not in header, "a folder is no hub id"
    assert "| dev | 0.712 | 0.690 to 0.740 | 1,200 |" in card
    assert "Not meant for: decisions about people" in card and "figure is rather too high." in card

    save_fitted(replace(start, id="org/bert"), fitted, tmp_path / "export", CardFigures(data, ""))
    header = yaml.safe_load((tmp_path / "export" / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert header["base_model"] == "org/bert" and "model-index" not in header


def test_the_card_says_where_its_figures_prove_little(start: StartModel) -> None:
    """As where a baseline reaches them, or where dev stands in train."""
    train = tuple(TaggedSentence(f"{i}", f"train:{i}", (f"w{i}",), ("O",)) for i in range(4))
    data = LabelledSet("made", train, tuple(replace(each, source="dev") for each in train[:2]), (), ("Disease",))
    scored = {"dev": {"f1": 0.8, "intervals": {"f1": [0.7, 0.9]}, "examples": 2}}
    fitted = make_fitted(start, "ner", FULL)
    for reached, is_told in ((0.9, True), (0.8, True), (0.7, False)):
        figures = CardFigures(data, "f1", scored, {"dev": {"majority": {"f1": reached}}})
        card = build_card(start, fitted, figures, is_plain=True)
        told = f"On dev: the majority baseline, which trains nothing, reaches {reached:.3f}, and this model did"
        assert (told in card) == is_told
        assert "On dev: 2 of the 2 dev examples are in train, too, so figures on dev are too high." in card


def test_only_an_earlier_export_of_a_fine_tuned_model_is_replaced(start: StartModel, tmp_path: Path) -> None:
    (task, fitted), folder = fit(start, "ner", FULL), tmp_path / "export"
    export_stages(start, task, fitted, Place(folder))
    figures = {task.metric: 0.25, "intervals": {task.metric: [0.2, 0.3]}, "examples": 8}
    export_stages(start, task, fitted, Place(folder), {"dev": figures})
    assert "| dev | 0.250 |" in (folder / "README.md").read_text(encoding="utf-8")
    (folder / "notes.txt").touch()
    for place, reason in ((folder, "/notes.txt: "), (Path(start.id), "what the export is made from")):
        with pytest.raises(RunError, match=reason):
            export_stages(start, task, fitted, Place(place))
    assert "| dev | 0.250 |" in (folder / "README.md").read_text(encoding="utf-8")


def test_half_an_export_of_several_models_predicts_nothing(
    start: StartModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task, fitted), folder, real = fit(start, "relation_extraction", FULL), tmp_path / "export", Place.put
    export_stages(start, task, fitted, Place(folder))
    assert load_exported(folder, CPU).stages.keys() == task.stages.keys()

    def put(self: Place, *args: Any, **settings: Any) -> str:
        if str(self) == str(folder / "task.json"):
            raise OSError("killed")
        return real(self, *args, **settings)

    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(RunError, match="killed"):
        export_stages(start, task, fitted, Place(folder))
    with pytest.raises(RunError, match="half an export"):
        load_exported(folder, CPU)


def test_an_export_is_a_start_model_again(start: StartModel, tmp_path: Path) -> None:
    """A plain one as a base, an extended one with its extension."""
    for method in (FULL, BOTTLENECK):
        folder = tmp_path / method.name
        fitted = save_to(folder, start, "classification", method)
        again = open_model(str(folder)).load()
        own = dict(fitted.model.named_parameters())
        encoder = {name for name in own if name.startswith("bert.")}
        brought = again.tensors.keys() - encoder
        assert brought == ({f"bert.pooler.dense.{each}" for each in ("weight", "bias")} if method is FULL else set())
        assert encoder <= again.tensors.keys()
        assert all(torch.equal(again.tensors[name], own[name]) for name in encoder)


def test_a_kept_head_goes_on(start: StartModel, tmp_path: Path) -> None:
    """Every tensor of an exported model of every family is the next fine-tuning's start."""
    for family in ONE_MODEL:
        for method in (FULL, BOTTLENECK):
            folder = tmp_path / family / method.name
            fitted = save_to(folder, start, family, method)
            again = open_model(str(folder)).load(keep_head=True)
            assert again.brings == fitted.task.head and again.sha256 != open_model(str(folder)).load().sha256
            model = build_task_model(again, fitted.task, FULL, dropout=0.0, seed=7)
            found = dict(model.named_parameters())
            for name, expected in fitted.model.named_parameters():
                name = name if name in found else f"bert.{name}"  # a pooler that the export has inside the encoder
                assert torch.equal(found[name], expected), f"{family}: {name}"


def test_a_kept_heads_labels_may_come_in_another_order(start: StartModel, tmp_path: Path) -> None:
    for family in ("ner", "nested_ner", "relation", "classification"):
        folder = tmp_path / family
        fitted = save_to(folder, start, family, FULL)
        again = open_model(str(folder)).load(keep_head=True)
        task: Any = fitted.task
        if family == "ner":
            data = replace(task.data, labels=("Organ", "Disease"))
            more = type(task)(data, task.tokenizer, task.options)
            with pytest.raises(ConfigError, match=r"head has 3 labels \(O, B-Disease, .*the set has 5 \(.*keep_head"):
                build_task_model(again, more, FULL, dropout=0.0, seed=0)
            continue
        turned = type(task)(replace(task.data, labels=task.data.labels[::-1]), task.tokenizer, task.options)
        batch = task.collate(task.encode(task.data.dev, is_training=False))
        model = build_task_model(again, turned, FULL, dropout=0.0, seed=0)
        with torch.no_grad():
            found, expected = model.eval()(**batch.inputs)[0], fitted.model.eval()(**batch.inputs)[0]
        torch.testing.assert_close(found.flip(1), expected, msg=family)


def test_a_head_that_does_not_fit_is_refused(start: StartModel, tiny_base_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--keep_head is True; it must be false with --model .*no task's head"):
        open_model(str(tiny_base_folder)).load(keep_head=True)
    save_to(tmp_path / "export", start, "classification", FULL)
    again = open_model(str(tmp_path / "export")).load(keep_head=True)
    with pytest.raises(ConfigError, match="kind SequenceClassification, and the task needs TokenClassification"):
        build_task_model(again, make_fitted(start, "ner", FULL).task, FULL, dropout=0.0, seed=0)
    with pytest.raises(ConfigError, match=r"has bilstm\.dense\.bias of shape none, and this task.s of shape 32;"):
        task = make_fitted(start, "classification", FULL).task
        build_task_model(again, task, FULL, dropout=0.0, seed=0, head_bilstm=6)
