"""The labelled set that a configuration names: from files by its description, or the one that ships."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import CorpusError
from domext_ray.labelled.code_entities.build import load_code_entities
from domext_ray.labelled.examples import SPLITS, AnnotatedText, LabelledSet, TaggedSentence
from domext_ray.labelled.readers.sets import load_set
from domext_ray.labelled.set_description import SHIPPED_SET, check_set, find_description


@dataclass(frozen=True)
class LoadedSet:
    """A labelled set, and what it is for.

    Args:
        family: name of the task family.
        data: the set.
        metric: path of the figure that dev chooses by; empty: the family's.
        sha256: hash of all examples, wherever they were read.
    """

    family: str
    data: LabelledSet
    metric: str
    sha256: str


def load_labelled(config: FinetuneConfig, cache: Path) -> LoadedSet:
    """Read the set that a configuration names.

    Args:
        config: its `task`, `data` and `labelled`.
        cache: folder of sets that are made, not read.

    Raises:
        ConfigError: a task without the data that it needs.
        CorpusError: the files are missing, empty or of another layout.
    """
    check_set(config.task, config.data)
    if config.task == SHIPPED_SET:
        return _wrap("ner", load_code_entities(cache, seed=0), "")
    description = find_description(config.task, config.data)
    labelled = config.labelled  # where a set is cut depends on no run's seed
    data = load_set(description, config.data, strict=labelled.strict, repair=labelled.repair)
    if not data.labels and isinstance(data.train[0], TaggedSentence | AnnotatedText):
        raise CorpusError(f"no example of {config.data} has a label ({data.train[0].source} is the first); label some.")
    return _wrap(description.task, data, description.metric)


def _wrap(family: str, data: LabelledSet, metric: str) -> LoadedSet:
    digest = hashlib.sha256(repr((data.labels, data.catalogue)).encode())
    for split in SPLITS:
        for example in getattr(data, split):
            values = asdict(example)
            del values["source"]  # where a file is does not make it another set
            digest.update(f"{split} {values}\n".encode())
    return LoadedSet(family, data, metric, digest.hexdigest())
