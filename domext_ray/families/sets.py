"""A described set -> a `LabelledSet` in memory.

Enters: a configuration, or a description. Leaves: train, dev and test, the labels in the head's order, the catalogue,
and one sentence for everything that was counted instead of refused. By the hash by which splits are cut a set is cut to
few labels, too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.errors import CorpusError
from domext_ray.families.described_sets import find_set
from domext_ray.families.label_counts import describe_labels, find_oddities, require_learnable
from domext_ray.families.readers.examples import SPLITS, Example, LabelledSet, Splits
from domext_ray.families.readers.issues import DataIssues
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.families.registry import FAMILIES
from domext_ray.families.splits import cut_splits, find_file, lacks_split, read_splits
from domext_ray.text.data.sample import tell_remains
from domext_ray.text.data.sources import FileRecord

_NONE = ("nan", "null", "<na>", "#n/a")
"""What pandas, databases and Excel write where there is nothing."""
_SAMPLE = 2000
"""Examples that are looked at for what is left of another form."""
MIN_DEV = 50
"""Examples of dev that choose, at least, however few there are to learn from."""
_SELDOM = ("group", "misplaced", "unplaced")
"""Fields that count only where they have something."""


def load_labelled(config: FinetuneConfig) -> LabelledSet:
    """Read the set that a configuration names, with a hash of its examples, and print its warnings."""
    description, labelled = find_set(config.task, config.data), config.labelled
    data = load_set(description, strict=labelled.strict, repair=labelled.repair)
    for warning in data.warnings:
        print(f"warning: {warning}", flush=True)
    require_learnable(data, description.data)
    if labelled.num_examples:  # which are taken depends on no run's seed
        data = take_examples(data, labelled.num_examples, labelled.examples_seed)
    sha256, files = _hash_examples(data)
    return replace(data, sha256=sha256, files=files)


def load_set(description: SetDescription, *, strict: bool = False, repair: bool = False) -> LabelledSet:
    """Read a labelled set from a folder of files, a folder of `datasets.save_to_disk`, or the hub.

    With `strict` the first row that breaks a rule is an error; with `repair` tags that their scheme forbids are mended
    and counted.
    """
    issues = DataIssues(strict, mends=repair)
    family = FAMILIES[description.task]
    side = _read_side(description)
    read = read_splits(description, issues, side)
    splits, notes = cut_splits(read, description, issues.list_notes())
    if "test" in read and not splits["test"]:
        notes.append(f"The test of {description.data} has no example.")
    family.check_set(splits, side, issues)
    sources = {example.source for example in splits["train"]}
    splits["train"] = tuple(e for e in splits["train"] if e.is_learnable)
    if not splits["train"]:
        raise lacks_split("train", splits, description, issues.list_notes(sources))
    labels = _find_labels(splits, description, family.name_labels(side), issues)
    for key, label in (("negative_label", description.negative_label), ("positive_label", description.positive_label)):
        if label is not None and label not in labels:
            names = ", ".join(labels)
            raise CorpusError(f"{description.where}: {key} {label!r} is no label of {description.data} ({names}).")
    told = issues.list_notes(sources)
    found, heard = find_oddities(splits, labels)
    warnings = (*issues.warnings, *heard)
    _tell_remains(splits, description.data)
    return LabelledSet(
        description.name,
        splits["train"],
        splits["dev"],
        splits["test"],
        labels,
        description.negative_label,
        side if family.side_file == "catalogue" else (),
        (*notes, *told, *found, *warnings),
        description.positive_label,
        description.marks,
        description.rule,
        warnings,
        description.task,
        description.metric,
    )


def read_split(
    description: SetDescription, split: str, *, strict: bool = False
) -> tuple[tuple[Example, ...], tuple[str, ...]]:
    """Read one split of a set, with its notes, to score a model that is there already.

    The set needs no other split; one in a single file is cut as `load_set` cuts it.
    """
    issues = DataIssues(strict)
    side = _read_side(description) if FAMILIES[description.task].reads_by_side else None
    read: Splits = read_splits(description, issues, side)
    notes, warnings = list[str](), tuple(issues.warnings)
    if split not in read and "train" in read:
        read, notes = cut_splits(read, description, issues.list_notes())
    found = issues.list_notes({example.source for example in read.get("train", ()) if split != "train"})
    if not read.get(split):
        has = ", ".join(name for name in SPLITS if read.get(name)) or "none"
        reason = f"; {found[0]}" if found else "."
        raise CorpusError(f"{description.data} has no example in {split} (it has {has}){reason}")
    _tell_remains({split: read[split]}, description.data)
    told = itertools.chain.from_iterable(find_oddities({split: read[split]}, ()))
    return read[split], (describe_labels(split, read[split]), *notes, *found, *told, *warnings)


def take_examples(data: LabelledSet, number: int, seed: int, option: str = "--labelled.num_examples") -> LabelledSet:
    """Return a set with so many examples to learn from; dev shrinks in proportion, to `MIN_DEV` at least.

    Documents, or what else `Example.unit` says, are taken whole, in an order that the seed gives, until the number is
    reached: a larger number has all that a smaller one has. Test and the labels of the head stay as they are.
    """
    total = len(data.train)
    if number >= total:
        raise CorpusError(
            f"{option} has {number:,}, and train of {data.name} has {total:,} examples; give fewer, or leave it out."
        )
    train = _take_units(data.train, number, seed)
    dev = _take_units(data.dev, max(MIN_DEV, round(len(data.dev) * len(train) / total)), seed)
    told = f"Of train {len(train):,} of {total:,} examples are taken, and of dev {len(dev):,} of {len(data.dev):,}."
    taken = replace(data, train=train, dev=dev, notes=(told, *data.notes))
    require_learnable(taken, f"{data.name} ({option} {number})", "give a larger number.")
    return taken


def _take_units(examples: tuple[Example, ...], number: int, seed: int) -> tuple[Example, ...]:
    """Return the units that come first in a seed's order, as many as have `number` examples; in the set's own order."""
    places = np.array([example.draw(seed) for example in examples], np.uint64)
    last = np.sort(places)[min(number, len(places)) - 1]
    return tuple(itertools.compress(examples, places <= last))


def _tell_remains(splits: Splits, data: str) -> None:
    """Say what a sample of the texts has of another form, as of a corpus."""
    every = [example for examples in splits.values() for example in examples]
    sample = every[:: -(-len(every) // _SAMPLE) or 1]
    texts = ((example.path, text) for example in sample for text in (example.shown, getattr(example, "pair", "")))
    tell_remains(data, ((path, text) for path, text in texts if text))


def _find_labels(
    splits: Splits, description: SetDescription, named: tuple[str, ...], issues: DataIssues
) -> tuple[str, ...]:
    """Return the labels in the head's order, and check those of the examples."""
    first_places = {
        split: {label: example.source for example in reversed(splits[split]) for label in example.list_labels()}
        for split in SPLITS
    }
    declared = description.labels or named
    for places in first_places.values():
        for label, source in places.items():
            if declared and label not in declared:
                raise CorpusError(
                    f"{source} has the label {label!r}; labels in {description.where} has {', '.join(declared)} only."
                )
    for label, source in {**first_places["dev"], **first_places["train"]}.items():
        if not declared and label.casefold() in _NONE:
            issues.warn(
                f"{source} has the label {label!r}, as programs write where there is none; empty such cells, or name "
                f"the labels in {description.yaml} if it is one."
            )
    for split in ("dev", "test"):
        for label, source in sorted(first_places[split].items()):
            if label not in first_places["train"]:
                issues.add(source, f"label {label!r} of {split}", "is not in train", outcome="kept")
    return declared or tuple(sorted({*first_places["train"], *first_places["dev"]}))


def _find_side_file(key: str, description: SetDescription) -> Path:
    """Find a schema or catalogue in the data's folder, or beside the description."""
    patterns: tuple[str, ...] = getattr(description, key)
    data = Path(description.data)
    folders = [data] if data.is_dir() else []
    if description.path:
        folders.append(Path(description.path).parent)
    for folder in folders:
        path = find_file(folder, patterns, key, description)
        if path is not None:
            return path
    raise CorpusError(
        f"{description.data} has no {key} (looked for {', '.join(patterns)}); put it there, or name it as {key} in "
        f"{description.yaml}."
    )


def _read_side(description: SetDescription) -> Any:
    """Read the file beside the splits that a family needs, or that a description names."""
    family = FAMILIES[description.task]
    patterns = family.side_file and getattr(description, family.side_file)
    return family.read_side(_find_side_file(family.side_file, description)) if patterns else None


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
