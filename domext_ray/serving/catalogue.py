"""Which adapters are served, and what is known of each without its tensors: task, labels, router.

Enters: a bank. Leaves: for a request's text the adapter that answers it. The model itself is elsewhere (engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from domext_ray.adapters.bank import AdapterBank
from domext_ray.adapters.entry import MASKED_LM, SEQUENCES, TOKENS, BankEntry
from domext_ray.config.vectors import Pooling
from domext_ray.downstream.tasks.description import TaskDescription, make_described_task
from domext_ray.downstream.tasks.multilabel import USUAL_THRESHOLD
from domext_ray.downstream.tasks.task import ONLY_STAGE, Task, TaskOptions
from domext_ray.errors import RunError
from domext_ray.model.domext.modeling_domext import AUTO, BASE_NAME
from domext_ray.model.domext.routers_domext import Router, choose_adapters
from domext_ray.vocabulary.tokenizer import load_tokenizer

MOST_TOKENS = 512
"""Tokens of a row where --max_length is 0 and the model takes more."""


@dataclass(frozen=True, eq=False)
class ServedAdapter:
    """An adapter as requests see it.

    Args:
        name: the bank's name for it; "__base__": the base.
        sha256: of its tensors.
        architecture: a key of `entry.ARCHITECTURES`.
        family: of its task; empty: a masked LM.
        task: encodes and decodes; None: a masked LM.
        router: tells its text; None: it has none.
        threshold: the router's.
        pooling: how it learned to make a vector of a text, mean or cls; mean if it did not.
    """

    name: str
    sha256: str
    architecture: str
    family: str = ""
    task: Task | None = None
    router: Router | None = None
    threshold: float = 0.0
    pooling: Pooling = "mean"

    def describe(self) -> dict[str, Any]:
        """Return what GET /v1/adapters says of it."""
        labels = list(self.task.data.labels) if self.task is not None else []
        return {
            "name": self.name,
            "architecture": self.architecture,
            "family": self.family,
            "labels": labels,
            "routed": self.router is not None,
            "sha256": self.sha256,
        }


class Catalogue:
    """The adapters that are served; one is in it whole or not at all.

    Args:
        bank: where they are.
        max_length: tokens of a row; 0: as many as the model takes, up to 512.

    Raises:
        BaseModelError: the base is not to be had.
        RunError: `max_length` is more than the model takes.
    """

    base: ServedAdapter | None = ServedAdapter(BASE_NAME, "", MASKED_LM)
    """The base as requests see it; None: it is not there on its own."""
    has_words = False
    """Whether the base has a masked-LM head."""

    def __init__(self, bank: AdapterBank, max_length: int = 0) -> None:
        self.bank: Any = bank
        base = AdapterBank.open(bank.folder, bank.base_id).base  # of another object, so that its tensors are let go
        self.has_words = base.has_mlm_head
        self._start(load_tokenizer(base.tokenizer_folder), base.config.max_row_length, max_length)

    def _start(self, tokenizer: PreTrainedTokenizerBase, most: int, max_length: int) -> None:
        """Begin without adapters, with rows of at most `most` tokens."""
        if max_length > most:
            raise RunError(
                f"--max_length is {max_length}; the base has {most} positions, so it must be {most} at most."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length or min(MOST_TOKENS, most)
        self._adapters: dict[str, ServedAdapter] = {}

    def names(self) -> list[str]:
        """Return the adapters' names, sorted."""
        return sorted(self._adapters)

    def list(self) -> list[ServedAdapter]:
        """Return the adapters by name, without the base."""
        return [self._adapters[name] for name in self.names()]

    def find(self, name: str) -> ServedAdapter | None:
        """Return an adapter, or the base by its name; None: it is not served."""
        return self.base if name == BASE_NAME else self._adapters.get(name)

    def list_choices(self) -> str:
        """Return what a request may call its adapter."""
        return ", ".join([*self.names(), *([] if self.base is None else [BASE_NAME, AUTO])])

    def describe_missing(self, name: str) -> str:
        """Return the sentence for a name that cannot be served."""
        return f"the bank has no adapter {name[:60]!r}; add it with domext bank --add first."

    def put(self, adapter: ServedAdapter) -> None:
        """Serve an adapter."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> ServedAdapter | None:
        """Serve an adapter no longer; return it, if it was there."""
        return self._adapters.pop(name, None)

    def read(self, name: str) -> ServedAdapter:
        """Read an adapter of the bank; it is not served by that.

        Raises:
            RunError: the bank has none of that name, or its files are damaged.
        """
        entry, tensors = self.bank.read_adapter(name)
        family, task = self._make_task(name, entry)
        router = None
        if entry.adapter.router_words:
            router = Router(entry.adapter)
            router.weight.copy_(tensors[f"bert.router.adapters.{name}.weight"])
        threshold = float(entry.adapter.router_threshold)
        return ServedAdapter(name, entry.sha256, entry.architecture, family, task, router, threshold, entry.pooling)

    def _make_task(self, name: str, entry: BankEntry) -> tuple[str, Task | None]:
        if entry.architecture == MASKED_LM:
            return "", None
        description = entry.task or describe_head(name, entry, self.max_length)
        task = make_described_task(description, self.tokenizer)
        if not isinstance(task, Task):
            raise RunError(f"the adapter {name!r} is a stage of {description.family}, which is not served.")
        return description.family, task

    def route(self, input_ids: np.ndarray, allowed: Sequence[ServedAdapter]) -> ServedAdapter | None:
        """Choose the adapter of a text by routers.

        Args:
            input_ids: int64 [N].
            allowed: adapters that can answer it.

        Returns:
            The adapter; the base where no router knows the text; None where none has a router.
        """
        routed = {each.name: each for each in allowed if each.router is not None}
        if not routed:
            return None
        limits = {name: each.threshold for name, each in routed.items()}
        routers = {name: each.router for name, each in routed.items()}
        (chosen,) = choose_adapters(routers, limits, torch.from_numpy(input_ids)[None])
        return self.base if chosen is None else routed[chosen]


def describe_head(name: str, entry: BankEntry, max_length: int) -> TaskDescription:
    """Describe the task of an adapter that came without a description, by its head's labels.

    Args:
        name: the adapter's.
        entry: its description; not of a masked LM.
        max_length: tokens of a row.

    Raises:
        RunError: the labels are not those of a task that is served.
    """
    labels, options = entry.labels, TaskOptions(max_length=max_length)
    if entry.architecture == TOKENS:
        kinds = tuple(dict.fromkeys(label[2:] for label in labels if label != "O"))
        if labels != ("O", *(f"{mark}-{kind}" for kind in kinds for mark in "BI")):
            raise RunError(
                f"the adapter {name!r} has the labels {', '.join(labels[:6])}; tags are served in the order O, B-X, "
                "I-X, B-Y, I-Y, as domext finetune --task ner makes them."
            )
        return TaskDescription("ner", name, kinds, "f1.micro", options)
    assert entry.architecture == SEQUENCES
    if entry.problem_type == "regression":
        return TaskDescription("regression", name, (), "spearman", options, state={"mean": 0.0, "std": 1.0})
    if entry.problem_type == "multi_label_classification":
        thresholds = {ONLY_STAGE: {"threshold": USUAL_THRESHOLD}}
        return TaskDescription("multilabel", name, labels, "f1.micro", options, thresholds=thresholds)
    return TaskDescription("classification", name, labels, "accuracy", options)
