"""The model card of a fine-tuned model: what it predicts, how well, and for what it is meant.

Enters: the encoder, what was trained on it, and its figures. Leaves: Markdown with the YAML header of the Hugging Face
hub.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from domext_ray.downstream.finetune.training import Fitted
from domext_ray.downstream.start.model import StartModel
from domext_ray.export.card import describe_base_model
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES
from domext_ray.labelled.metrics.scores import flatten
from domext_ray.report.tables import format_markdown

MAX_LABELS = 40
_TASKS = {
    "AutoModelForTokenClassification": ("token-classification", "Token classification"),
    "AutoModelForSequenceClassification": ("text-classification", "Text classification"),
    "AutoModelForQuestionAnswering": ("question-answering", "Question answering"),
    "AutoModelForMultipleChoice": ("multiple-choice", "Multiple choice"),
}
"""Class of transformers -> the hub's name of the task, and its name for people."""
_PIPELINES = ("token-classification", "text-classification", "question-answering")
"""Tasks that are pipelines of the hub, too."""
_USE = """## Use and limits

Meant for: the task above, on text like that of its labelled set. Whoever uses it checks it on examples of their own
first; other text, other labels or another way of labelling may give other figures.

Not meant for: decisions about people that nobody checks. It has the biases of its base and of its labels, and may
repeat what they say. Do not publish a model of private text without asking its owners."""


@dataclass(frozen=True)
class SplitScore:
    """What a model scored on a split.

    Args:
        value: the figure by which dev chose.
        low, high: its bootstrap 95 % interval.
        num_examples: examples of the split.
    """

    value: float
    low: float
    high: float
    num_examples: int


def read_score(figures: Mapping[str, Any], metric: str) -> SplitScore:
    """Return the chosen figure of what `Score.describe` gave."""
    values = flatten({name: each for name, each in figures.items() if name not in ("intervals", "examples")})
    low, high = figures["intervals"][metric]
    return SplitScore(float(values[metric]), low, high, figures["examples"])


def build_card(
    start: StartModel, set_name: str, fitted: Fitted, scores: Mapping[str, SplitScore], metric: str, *, is_plain: bool
) -> str:
    """Return the model card: a YAML header, then what the model is, its figures, how it loads, and its terms.

    Args:
        start: the encoder that it started from.
        set_name: what it was fine-tuned on.
        fitted: the model.
        scores: by split, of all models of the task together; empty: not scored.
        metric: what they are.
        is_plain: transformers' own classes load it.
    """
    task = fitted.task
    auto_class = HEAD_AUTO_CLASSES[task.head]
    name = f"{start.name} fine-tuned on {set_name}"
    pipeline = _TASKS[auto_class][0]
    header: dict[str, Any] = {
        "library_name": "transformers",
        **({"pipeline_tag": pipeline} if pipeline in _PIPELINES else {}),
        **start.terms.header,
        **describe_base_model(start.id),
        "tags": ["domext", "domain-adaptation", task.head.removeprefix("DomextFor")],
    }
    results = _list_results(_TASKS[auto_class], set_name, scores, metric)
    header |= {"model-index": [{"name": name, "results": results}]} if results else {}
    labels = ", ".join(task.head_labels[:MAX_LABELS]) + ("…" if len(task.head_labels) > MAX_LABELS else "")
    trust = "" if is_plain else ", trust_remote_code=True"
    sections = [
        f"# {name}",
        f"{len(task.head_labels):,} outputs: {labels}. Rows of at most {task.options.max_length} tokens.",
        _describe_scores(scores, metric),
        f"""## Loading

```python
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {auto_class}.from_pretrained("FOLDER"{trust})
```""",
        _describe_pipeline(fitted, trust),
        _USE,
        f"## Terms\n\n{start.terms.describe()}",
    ]
    head = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(each for each in sections if each) + "\n"


def _describe_pipeline(fitted: Fitted, trust: str) -> str:
    """Say how a model of several labels a text is asked for all of them; nothing of other models."""
    if fitted.task.head_config.get("problem_type") != "multi_label_classification":
        return ""
    return f"""A text has any number of these labels, or none. A label counts whose probability is above \
{fitted.thresholds["threshold"]:g}, which dev chose:

```python
from transformers import pipeline

pipe = pipeline("text-classification", "FOLDER"{trust}, function_to_apply="sigmoid", top_k=None)
print(pipe("a text"))
```"""


def _list_results(
    task: tuple[str, str], set_name: str, scores: Mapping[str, SplitScore], metric: str
) -> list[dict[str, Any]]:
    """Return the scores as the hub's evaluation results."""
    return [
        {
            "task": {"type": task[0], "name": task[1]},
            "dataset": {"type": set_name, "name": set_name, "split": split},
            "metrics": [{"type": metric, "name": metric, "value": round(each.value, 4)}],
        }
        for split, each in scores.items()
        if math.isfinite(each.value)
    ]


def _describe_scores(scores: Mapping[str, SplitScore], metric: str) -> str:
    if not scores:
        return ""
    rows = [
        (split, f"{each.value:.3f}", f"{each.low:.3f} to {each.high:.3f}", f"{each.num_examples:,}")
        for split, each in scores.items()
    ]
    table = format_markdown(("", metric, "95 % interval", "examples"), rows)
    return f"## Figures\n\n{table}\n\nThe model was chosen by dev, so dev's figure is rather too high."
