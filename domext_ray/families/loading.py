"""The labelled set that a configuration names, with a hash of its examples."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.families.described_sets import find_set
from domext_ray.families.label_counts import count_labels, list_label_rows, require_learnable
from domext_ray.families.readers.examples import LabelledSet
from domext_ray.families.sets import load_set, take_examples
from domext_ray.report.tables import format_text
from domext_ray.text.data.sources import FileRecord

_SELDOM = ("group", "misplaced", "unplaced")
"""Fields that count only where they have something."""


@dataclass(frozen=True)
class LoadedSet:
    """A labelled set, and what it is for."""

    family: str
    data: LabelledSet
    metric: str  # path of the figure that dev chooses by
    sha256: str  # of all examples, wherever they were read
    files: Sequence[FileRecord] = ()  # with hashes of their examples, as `require_files` compares them

    def describe(self) -> str:
        """Return what a plan says of it: examples and labels of each split, and its notes."""
        data = self.data
        sizes = " / ".join(f"{len(examples):,}" for examples in data.splits.values())
        labels = format_text(list_label_rows(count_labels(data.splits, data.labels)))
        notes = (f"note: {note}" for note in data.notes if note not in data.warnings)
        return "\n".join([f"set: {data.name}, {sizes} examples (train / dev / test)", labels, *notes])


def load_labelled(config: FinetuneConfig) -> LoadedSet:
    """Read the set that a configuration names, and print its warnings."""
    description, labelled = find_set(config.task, config.data), config.labelled
    data = load_set(description, strict=labelled.strict, repair=labelled.repair)
    for warning in data.warnings:
        print(f"warning: {warning}", flush=True)
    require_learnable(data, description.data)
    if labelled.num_examples:  # which are taken depends on no run's seed
        data = take_examples(data, labelled.num_examples, labelled.examples_seed)
    return LoadedSet(description.task, data, description.metric, *_hash_examples(data))


def hash_by_file(lines: Iterable[tuple[str, str]]) -> list[FileRecord]:
    """Return each file with a hash of what was read there, given in pairs of file and that."""
    files = defaultdict[str, Any](hashlib.sha256)
    for path, line in lines:
        files[path].update(f"{line}\n".encode())
    return [(path, digest.hexdigest()) for path, digest in files.items()]


def _hash_examples(data: LabelledSet) -> tuple[str, list[FileRecord]]:
    digest, lines = hashlib.sha256(repr((data.labels, data.catalogue)).encode()), list[tuple[str, str]]()
    for split, examples in data.splits.items():
        for example in examples:
            values = {key: value for key, value in asdict(example).items() if value or key not in _SELDOM}
            del values["source"], values["path"]  # where a file is does not make it another set
            lines.append((example.path, f"{split} {values}"))
            digest.update(f"{lines[-1][1]}\n".encode())
    return digest.hexdigest(), hash_by_file(lines)
