"""Several labels a text: how they are read, figures and thresholds are scikit-learn's; a training learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WORDS
from finetuned_models import CPU, FP32, FULL
from labelled_fixtures import dump_lines, write
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig
from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_description
from domext_ray.families.metrics.label_set_metrics import THRESHOLDS, choose_threshold, mark_labels, score_label_sets
from domext_ray.families.multilabel import MultiLabelTask
from domext_ray.families.readers.examples import LabelledSet, MultiLabelText
from domext_ray.families.sets import load_set
from domext_ray.families.task import TaskOptions
from domext_ray.finetuning.training import Point, fit_task
from domext_ray.models.source import open_model
from domext_ray.models.start import StartModel

LABELS = ("animal", "place", "weather")
WORDS_OF = {"animal": ("cat", "dog"), "place": ("house", "garden"), "weather": ("sun", "wind")}


def make_texts(split: str, num_texts: int, seed: int) -> tuple[MultiLabelText, ...]:
    """Texts with a word of each of their labels; every fifth or so has none."""
    generator = np.random.default_rng(seed)
    plain = [each for each in WORDS[:60] if not any(each in own for own in WORDS_OF.values())]
    texts = []
    for i in range(num_texts):
        labels = tuple(each for each in LABELS if generator.random() < 0.4)
        words = [*generator.choice(plain, 3), *(generator.choice(WORDS_OF[each]) for each in labels)]
        text = " ".join(map(str, generator.permutation(words)))
        texts.append(MultiLabelText(f"{split}{i}", f"{split}:{i}", text, None, labels))
    return tuple(texts)


@pytest.fixture(scope="module")
def start(tiny_base_folder: Path) -> StartModel:
    return open_model(str(tiny_base_folder)).load()


def make_task(start: StartModel) -> MultiLabelTask:
    data = LabelledSet("made", make_texts("train", 80, 0), make_texts("dev", 40, 1), (), LABELS)
    return MultiLabelTask(data, start.tokenizer, TaskOptions(max_length=32, stride=8))


def read_set(folder: Path, files: dict[str, str]) -> LabelledSet:
    for name, text in files.items():
        write(folder / name, text)
    return load_set(find_description("multilabel", str(folder)))


def test_labels_are_lists_or_separated(tmp_path: Path) -> None:
    labels: list[Any] = [["b", "a", "b"], [], [3], None, ["a", ""]]
    lines = dump_lines([{"text": "one", "labels": each} for each in labels])
    table = 'text,labels\none,"b, a"\ntwo,\nthree,a\n'
    made = read_set(tmp_path / "made", {"train.jsonl": lines, "dev.csv": table})
    assert [each.labels for each in made.train] == [("b", "a"), (), ("3",)]  # type: ignore[union-attr]
    assert [each.labels for each in made.dev] == [("b", "a"), (), ("a",)]  # type: ignore[union-attr]
    assert made.labels == ("3", "a", "b") and "2 x row left out: it has no list of labels" in made.notes[0]
    described = "task: multilabel\nseparator: '|'\ncolumns: {labels: topics}\nlabels: [a, b]\n"
    tables = {"train.tsv": "text\ttopics\none\ta|b\n", "dev.tsv": "text\ttopics\ntwo\tb\n", "set.yaml": described}
    assert read_set(tmp_path / "own", tables).train[0].labels == ("a", "b")  # type: ignore[union-attr]
    with pytest.raises(CorpusError, match=r"dev\.tsv:2 has the label 'c'; labels in .* has a, b only"):
        read_set(tmp_path / "unknown", {**tables, "dev.tsv": "text\ttopics\ntwo\tc\n"})


def test_figures_are_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    gold, found = generator.random((2, 50, 4)) < 0.4
    names = ("a", "b", "c", "d")
    sets = [[tuple(np.array(names)[row]) for row in side] for side in (gold, found)]
    assert (mark_labels(sets[0], names) == gold).all()
    score = score_label_sets(*sets, names)
    assert score.get("accuracy") == pytest.approx(accuracy_score(gold, found))
    for name, compute in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        for average in ("micro", "macro"):
            assert score.get(f"{name}.{average}") == pytest.approx(compute(gold, found, average=average))
        by_label = [score.get(f"{name}.per_label.{each}") for each in names]
        assert by_label == pytest.approx(list(compute(gold, found, average=None)))
    assert score_label_sets([("a", "z")], [("a",)], ("a",)).get("f1.micro") == pytest.approx(2 / 3), "z is missed"


def test_the_threshold_is_the_best_of_all() -> None:
    generator = np.random.default_rng(1)
    gold = generator.random((60, 3)) < 0.3
    probabilities = np.clip(0.3 * gold + generator.random((60, 3)) * 0.6, 0, 1)
    kinds: dict[str, Any] = {
        "f1.micro": lambda found: f1_score(gold, found, average="micro"),
        "f1.macro": lambda found: f1_score(gold, found, average="macro"),
        "accuracy": lambda found: accuracy_score(gold, found),
    }
    for path, compute in kinds.items():
        chosen = choose_threshold(gold, probabilities, path)
        assert compute(probabilities > chosen) == pytest.approx(max(compute(probabilities > t) for t in THRESHOLDS))
        assert choose_threshold(gold, np.where(gold, 0.99, 0.01), path) == 0.5, "of equal ones the usual one"


def test_a_prediction_is_what_is_above_the_threshold(start: StartModel) -> None:
    task = make_task(start)
    examples = task.data.dev[:2]
    rows = task.encode(examples, is_training=False)
    logits = np.log(np.array([[3.0, 1 / 3, 1.5], [0.25, 0.25, 0.25]])).astype(np.float32)
    outputs = [(each,) for each in logits]
    first, second = task.decode(examples, rows, outputs)
    assert list(first["probabilities"]) == ["animal", "weather", "place"] and second["labels"] == []
    assert task.show(first) == {
        "labels": ["animal", "weather"],
        "probabilities": {"animal": 0.75, "weather": 0.6, "place": 0.25},
    }
    task.set_thresholds({"threshold": 0.7})
    assert task.decode(examples, rows, outputs)[0]["labels"] == ["animal"] == task.decide(examples[0], first)["labels"]


def test_the_baseline_is_the_best_constant(start: StartModel) -> None:
    task = make_task(start)
    found = task.predict_baseline(task.data.train)
    constants = [tuple(label for label, bit in zip(LABELS, f"{i:03b}", strict=True) if bit == "1") for i in range(8)]
    best = max(
        task.score(task.data.train, [{"labels": each}] * len(task.data.train)).get("f1.micro") for each in constants
    )
    assert task.score(task.data.train, found).get("f1.micro") == best


def test_it_learns_several_labels(start: StartModel) -> None:
    """The loss is transformers' own, and dev chooses the threshold."""
    task = make_task(start)
    config = FinetuneConfig(method=FULL, engine=FP32, optim=FinetuneOptimConfig(dropout=0.0))
    fitted = fit_task(start, task, config, Point(5e-3, 8, 12.0, 0), CPU, lambda _: None)
    baseline = task.score(task.data.dev, task.predict_baseline(task.data.dev)).get("f1.micro")
    assert fitted.dev_scores[-1] > 0.85 > baseline
    assert fitted.thresholds == task.thresholds and 0.05 <= task.thresholds["threshold"] <= 0.95
    batch = task.collate(task.encode(task.data.dev[:5], is_training=False))
    assert batch.num_targets == 15
    with torch.no_grad():
        outputs = fitted.model.eval()(**batch.inputs, labels=batch.targets["labels"])
        own = task.compute_loss_sum(outputs, batch.targets) / batch.num_targets
    torch.testing.assert_close(own, outputs.loss)
