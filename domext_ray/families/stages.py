"""Trained stages of a task -> scores and predictions of the whole chain and of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from domext_ray.families.family import Prediction
from domext_ray.families.metrics.scores import Score, over_clusters
from domext_ray.families.task import Predict, StagedTask


@dataclass(frozen=True)
class StagedResult:
    """What a chain of trained stages reached, by split."""

    scores: dict[str, Score]  # of the whole chain
    predictions: dict[str, list[Prediction]]
    steps: dict[str, dict[str, Score]]  # by split, then by the step's name
    thresholds: dict[str, float]
    notes: tuple[str, ...]


def evaluate_stages(
    task: StagedTask, predictors: Mapping[str, Predict], splits: Sequence[str] = ("dev", "test")
) -> StagedResult:
    """Score a chain of trained stages; an empty split is left out.

    On dev, which comes first, the task's thresholds are tuned; without it they are those that the task has.
    """
    result = StagedResult({}, {}, {}, {}, ())
    for split in splits:
        examples = getattr(task.data, split)
        if not examples:
            continue
        predictions = task.run(predictors, examples)
        if split == "dev":
            task.fit_thresholds(examples, predictions)
            predictions = task.decide_all(examples, predictions)
        result.predictions[split] = predictions
        result.scores[split] = over_clusters(task.score(examples, predictions), examples)
        result.steps[split] = task.score_steps(examples, predictions)
    return replace(result, thresholds=task.thresholds, notes=list_notes(task))


def list_notes(task: StagedTask) -> tuple[str, ...]:
    """Return what a task, and each of its stages, has counted so far."""
    stages = task.stages if task.is_chain else {}
    own = [f"{name}: {note}" for name, stage in stages.items() for note in stage.notes]
    return tuple(dict.fromkeys([*task.notes, *own]))


def score_baselines(task: StagedTask, split: str) -> dict[str, Score]:
    """Return what trivial baselines score on a split, by their names."""
    examples = getattr(task.data, split)
    return {name: task.score(examples, predictions) for name, predictions in task.predict_baselines(examples).items()}
