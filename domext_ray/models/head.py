"""The head that a fine-tuned model brings to its next fine-tuning.

Enters: a checkpoint's folder. Leaves: its head's tensors, in the order of the task's labels.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from domext_ray.errors import ConfigError
from domext_ray.export.model_folder import HEAD_AUTO_CLASSES
from domext_ray.families.task import Task
from domext_ray.model.base import read_weights
from domext_ray.storage import Place, parse_json

_FAMILY = re.compile("^(Domext|Bert|Roberta)(?=For)")  # their heads have the same tensors
_ENCODERS = ("bert.", "roberta.")
_OUTPUTS = {f"{layer}.{kind}" for layer in ("classifier", "type_dense") for kind in ("weight", "bias")}
_MAX_SHOWN = 5


@dataclass(frozen=True)
class StartHead:
    """A checkpoint's head."""

    kind: str  # its class in heads_domext.py
    labels: tuple[str, ...]  # of its outputs, in order
    tensors: dict[str, Tensor]  # fp32, by that class' names


def find_head(folder: Path) -> str | None:
    """Return the class in heads_domext.py of the head that a checkpoint brings; None: it brings none."""
    for architecture in read_config(folder).get("architectures") or ():
        kind = _FAMILY.sub("Domext", str(architecture))
        if kind in HEAD_AUTO_CLASSES:
            return kind
    return None


def read_head(folder: Path, model: str, option: str) -> StartHead:
    """Read the head that a checkpoint brings; messages name it by `model` and `option`, as the user did."""
    kind = find_head(folder)
    if kind is None:
        raise ConfigError(
            f"--keep_head is True; it must be false with {option} {model!r}, which brings no task's head."
        )
    names: Mapping[str, str] = read_config(folder).get("id2label") or {}
    labels = tuple(names[number] for number in sorted(names, key=int))
    weights = read_weights(folder, model)
    tensors = {name: tensor.float().contiguous() for name, tensor in weights.items() if not name.startswith(_ENCODERS)}
    return StartHead(kind, labels, tensors)


def fit_head(head: StartHead, task: Task, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a head's tensors in the order of a task's labels; `expected` are those of the task's own head."""
    rule = "leave --keep_head out for a new head"
    if head.kind != task.head:
        raise ConfigError(
            f"--keep_head is True; the model's head is of the kind {head.kind.removeprefix('DomextFor')}, and the task "
            f"needs {task.head.removeprefix('DomextFor')}; {rule}."
        )
    tensors = dict(head.tensors)
    if task.names_outputs:
        if sorted(head.labels) != sorted(task.head_labels):
            raise ConfigError(
                f"--keep_head is True; the model's head has {len(head.labels)} labels ({_shorten(head.labels)}), the "
                f"set has {len(task.head_labels)} ({_shorten(task.head_labels)}); {rule}."
            )
        order = [head.labels.index(label) for label in task.head_labels]
        for name in tensors.keys() & _OUTPUTS:
            with contextlib.suppress(RuntimeError):  # of another shape, which is said below
                tensors[name] = tensors[name].unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        wanted = tuple(expected[name].shape) if name in expected else None
        if shapes.get(name) != wanted:
            raise ConfigError(
                f"--keep_head is True; the model's head has {name} of shape {_show(shapes.get(name))}, and this task's "
                f"of shape {_show(wanted)}; {rule}."
            )
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json; empty where there is none that can be read."""
    try:
        values = parse_json(Place(folder / "config.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}  # what reads the model says what is wrong with it
    return values if isinstance(values, dict) else {}


def _shorten(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:_MAX_SHOWN]) + (", ..." if len(labels) > _MAX_SHOWN else "")


def _show(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else "x".join(map(str, shape)) or "1"
