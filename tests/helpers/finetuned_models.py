"""Fine-tuned models of every family: a few steps of a tiny base on a made set; and whole runs without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import WORDS

from domext_ray.config.finetune import FinetuneConfig, FinetuneOptimConfig
from domext_ray.config.method import MethodConfig
from domext_ray.config.pretrain import EngineConfig
from domext_ray.families.readers.examples import (
    AnnotatedText,
    Choice,
    Entity,
    Example,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    Relation,
    TaggedSentence,
)
from domext_ray.families.registry import FAMILIES
from domext_ray.families.state import State
from domext_ray.families.task import StagedTask, TaskOptions
from domext_ray.finetuning.export import export_stages
from domext_ray.finetuning.training import Fitted, Point, fit_stages
from domext_ray.inference.examples import NOTHING_LEARNED, RawRecord, make_example
from domext_ray.models.start import StartModel
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.runtime.trials import Ledger, Rules, Step, Trial, Watch, run_here
from domext_ray.storage import Place

if TYPE_CHECKING:
    from domext_ray.runtime.tasks import Pool

CPU = torch.device("cpu")
FP32 = EngineConfig(precision="fp32")
FULL = MethodConfig(name="full", trains="all", heads=0, ffn_units=0)
BOTTLENECK = MethodConfig(name="task", trains="extensions", heads=0, ffn_units=0, bottleneck_size=4)
OPTIONS = TaskOptions(max_length=40, stride=10)
CATALOGUE = tuple(f"{first} {second}" for first in WORDS[:6] for second in WORDS[6:12])
MARKS = (("<<", ">>"), ("[[", "]]"))
LABELS = {
    "ner": ("Drug", "Disease"),
    "nested_ner": ("Disease", "Organ"),
    "relation": ("none", "treats"),
    "classification": ("weather", "animal"),
    "multilabel": ("weather", "animal"),
    "relation_extraction": ("treats",),
}


def make_raw(family: str, records: Sequence[RawRecord], state: State = NOTHING_LEARNED) -> list[Example]:
    """Unlabelled examples of a family."""
    return [make_example(family, record, f"record {i}", state) for i, record in enumerate(records, 1)]


def _make_words(generator: np.random.Generator) -> list[str]:
    return [str(word) for word in generator.choice(WORDS[:40], int(generator.integers(4, 9)))]


def draw_example(family: str, i: int, generator: np.random.Generator) -> Example:
    """A labelled example of a family."""
    words = _make_words(generator)
    text, own = " ".join(words), (str(i), f"t:{i}")
    before = text + " the "
    drug = Entity(len(before), len(before) + 4, "Drug")
    heart = Entity(drug.end + 5, drug.end + 10, "Organ")
    full = before + "drug and heart disease"
    is_first = bool(generator.integers(2))
    match family:
        case "ner":
            return TaggedSentence(*own, (*words, "heart", "disease"), ("O",) * len(words) + ("B-Disease", "I-Disease"))
        case "nested_ner":
            return AnnotatedText(*own, full, (heart, Entity(heart.start, len(full), "Disease")))
        case "relation":
            return MarkedText(
                *own, full, replace(drug, label=""), replace(heart, label=""), "treats" if is_first else "none"
            )
        case "classification":
            pair = "the sun" if i % 3 else None
            return LabelledText(
                *own, f"{text} {'cat' if is_first else 'wind'}", pair, "animal" if is_first else "weather"
            )
        case "multilabel":
            return MultiLabelText(
                *own, f"{text} {'cat' if is_first else 'wind'}", None, ("animal",) if is_first else ()
            )
        case "regression":
            return LabelledText(*own, text, " ".join(words[::-1]) if i % 8 else None, "", float(len(words)))
        case "qa":
            answers = (Entity(0, len(words[0]), ""),) if i % 4 else ()
            return Question(*own, "where is it", f"{text} {text} {text} {text}", answers)
        case "multiple_choice":
            return Choice(*own, text, "the", ("cat", "heart disease", "sun"), i % 3)
        case "relation_extraction":
            return AnnotatedText(*own, full, (drug, heart), (Relation(drug, heart, "treats"),))
        case _:
            return Mention(*own, f"{words[0]} {words[1]}", (CATALOGUE[i % len(CATALOGUE)],))


def draw_set(family: str) -> LabelledSet:
    """A set of 24 examples to train on, and 8 each for dev and test."""
    generator = np.random.default_rng(3)
    splits = [tuple(draw_example(family, i, generator) for i in range(size)) for size in (24, 8, 8)]
    is_relation = family == "relation"
    return LabelledSet(
        "made",
        *splits,
        LABELS.get(family, ()),
        "none" if is_relation else None,
        CATALOGUE if family == "normalization" else (),
        marks=MARKS if is_relation else (),
    )


def fit(
    start: StartModel,
    family: str,
    method: MethodConfig,
    embeds: bool = False,
    head_bilstm: int = 0,
    engine: EngineConfig = FP32,
    device: torch.device = CPU,
    epochs: float = 2.0,
    data: LabelledSet | None = None,
    options: TaskOptions = OPTIONS,
) -> tuple[StagedTask, dict[str, Fitted]]:
    """A few steps on a set, thresholds tuned on dev, as a fine-tuning run makes them."""
    encoder = TextEmbedding(start, device=device.type) if embeds else None
    task = FAMILIES[family](data or draw_set(family), start.tokenizer, options, embed=encoder)
    optim = FinetuneOptimConfig(dropout=0.0)
    config = FinetuneConfig(method=method, engine=engine, optim=optim, head_bilstm=head_bilstm)
    fitted = fit_stages(start, task, config, Point(3e-3, 8, epochs, 0), device, lambda _: None)
    return task, fitted


def export_fitted(start: StartModel, family: str, folder: Path, method: MethodConfig = FULL, **options: Any) -> Path:
    """Fit a model, and export it."""
    export_stages(start, *fit(start, family, method, **options), Place(folder))
    return folder


def finetune_here(config: FinetuneConfig, num_trainings: int | None = None) -> Path:
    """Carry out a fine-tuning run as the job does, with what its tasks on Ray do in this process.

    `num_trainings`: it is stopped by Ctrl-C after so many.
    """
    from domext_ray.finetuning import finetune  # here: tests for a card use this file, and have no Ray

    begun = count()

    def train(pool: Pool, trial: Trial) -> Step:
        if next(begun) == num_trainings:
            raise KeyboardInterrupt
        return pool.make()((trial, None))

    def run_trials(pool: Pool, trials: Sequence[Trial], ledger: Ledger, _: Watch, rules: Rules) -> None:
        run_here(trials, partial(train, pool), ledger, rules.failures)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "start_ray", lambda _: None)
        patch.setattr(finetune, "check_shared_storage", lambda _: None)
        patch.setattr(finetune, "plan_resources", lambda _: (1.0, 0.0, 1))
        patch.setattr(finetune, "run_trials", run_trials)
        patch.setattr(finetune, "run_tasks", lambda work, tasks, *_, **__: [work(task.item) for task in tasks])
        return Path(finetune.run_finetuning(config))
