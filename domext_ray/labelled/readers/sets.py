"""A described set -> a `LabelledSet` in memory.

Enters: a description and where the data are. Leaves: train, dev and test, the labels in the head's order, the
catalogue, and one sentence for everything that was counted instead of refused. Splits that a set has not are cut from
the one that it has by a hash of the text, or of whose it is (`group_field`), so that equal texts, or all of a person's,
land on one side and other rows change nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import (
    SPLITS,
    AnnotatedText,
    AnyExample,
    Choice,
    LabelledSet,
    LabelledText,
    MarkedText,
    Mention,
    MultiLabelText,
    Question,
    TaggedSentence,
)
from domext_ray.labelled.readers.files import Dirt, list_places
from domext_ray.labelled.readers.readers import find_file, find_split_files, read_splits
from domext_ray.labelled.readers.rows import read_catalogue
from domext_ray.labelled.readers.spans import Schema, name_relation, read_schema
from domext_ray.labelled.set_description import SetDescription

Splits = Mapping[str, tuple[AnyExample, ...]]


def load_set(
    description: SetDescription, data: str, *, strict: bool = False, repair: bool = False, seed: int = 0
) -> LabelledSet:
    """Read a labelled set.

    Args:
        description: what it is like, from `find_description`.
        data: a folder of files, a folder of `datasets.save_to_disk`, or a hub name.
        strict: the first row that breaks a rule is an error.
        repair: tags that their scheme forbids are mended and counted.
        seed: another cut where splits are cut.

    Raises:
        CorpusError: a file or split that is missing, empty or of another layout, a label that the description has not,
            and with `strict` any row that breaks a rule.
    """
    dirt = Dirt(strict, mends=repair)
    schema = _read_schema(description, data)
    read = read_splits(description, data, dirt, schema)
    splits, notes = cut_splits(read, description, data, seed, dirt)
    if "test" in read and not splits["test"]:
        notes.append(f"The test of {data} has no example.")
    catalogue = _read_catalogue(description, data)
    if catalogue:
        _check_terms(splits, catalogue, dirt)
    labels = _find_labels(splits, description, schema, dirt)
    for key, label in (("negative_label", description.negative_label), ("positive_label", description.positive_label)):
        if label is not None and label not in labels:
            raise CorpusError(f"{description.where}: {key} {label!r} is no label of {data} ({', '.join(labels)}).")
    return LabelledSet(
        description.name,
        splits["train"],
        splits["dev"],
        splits["test"],
        labels,
        description.negative_label,
        catalogue,
        (*notes, *dirt.notes, *_count_shared(splits)),
        description.positive_label,
        description.marks if description.task == "relation" else (),
        description.rule,
    )


def read_split(
    description: SetDescription, data: str, split: str, *, strict: bool = False
) -> tuple[tuple[AnyExample, ...], tuple[str, ...]]:
    """Read one split of a set, which needs no other: of a model that is there already it is scored.

    Args:
        description: what the set is like.
        data: where it is, as of `load_set`.
        split: train, dev or test; of a set in a single file it is cut as `load_set` cuts it.
        strict: the first row that breaks a rule is an error.

    Returns:
        The examples, and one sentence for everything that was counted instead of refused.

    Raises:
        CorpusError: there is no such split, or see `load_set`.
    """
    dirt = Dirt(strict)
    read: Splits = read_splits(description, data, dirt, _read_schema(description, data))
    notes: list[str] = []
    if split not in read and "train" in read:
        read, notes = cut_splits(read, description, data, 0, dirt)
    if not read.get(split):
        has = ", ".join(name for name in SPLITS if read.get(name)) or "none"
        reason = f"; {dirt.notes[0]}" if dirt.notes else "."
        raise CorpusError(f"{data} has no example in {split} (it has {has}){reason}")
    return tuple(read[split]), (*notes, *dirt.notes)


def cut_splits(
    splits: Splits, description: SetDescription, data: str, seed: int, dirt: Dirt
) -> tuple[dict[str, tuple[AnyExample, ...]], list[str]]:
    """Cut the splits that are missing or empty from the one that is there.

    What is cut is train (dev where there is no train). Test is cut only from a set of a single file: one that has
    train and dev keeps them whole and has no test.

    Args:
        splits: those that were read.
        description: its `fractions`.
        data: where they were read, for messages.
        seed: another seed is another cut.
        dirt: what was left out, for messages.

    Returns:
        Examples of all splits, and what was cut in sentences.

    Raises:
        CorpusError: train or dev is missing and `fractions` does not say how to cut it.
    """
    present = [split for split in SPLITS if splits.get(split)]
    whole = next((split for split in ("train", "dev") if split in present), None)
    missing = [split for split in ("train", "dev") if split not in present]
    shares = description.fractions
    if missing and (whole is None or any(each not in shares for each in (whole, *missing))):
        raise _lacks_split(missing[0], splits, description, data, dirt)
    made = {split: splits.get(split, ()) for split in SPLITS}
    if not missing or whole is None:
        return made, []
    wanted = [split for split in SPLITS if split in (whole, *missing)]
    if present == [whole] and "test" in shares:
        wanted.append("test")
    made.update(_cut(splits[whole], {split: shares[split] for split in wanted}, seed))
    for split in wanted:
        if not made[split]:
            raise CorpusError(
                f"{data} has only {len(splits[whole])} examples in {whole}, too few to cut {split} from; add a file."
            )
    counts = ", ".join(f"{len(made[split])} {split}" for split in wanted)
    is_foreign = whole == "dev" or "test" in wanted
    ending = ", so that scores do not compare with those of published splits." if is_foreign else "."
    by = repr(description.group_field) if description.group_field else "text"
    return made, [f"{whole} of {data} was cut by a hash of each {by}: {counts}{ending}"]


def _cut(examples: Sequence[AnyExample], shares: Mapping[str, float], seed: int) -> dict[str, tuple[AnyExample, ...]]:
    parts: dict[str, list[AnyExample]] = {split: [] for split in shares}
    total = sum(shares.values())
    for example in examples:
        own = f"group {example.group}" if example.group else _text_of(example)
        digest = hashlib.sha256(f"{seed}\n{own}".encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64 * total
        bounds = itertools.accumulate(shares.values())
        chosen = next((split for split, bound in zip(shares, bounds, strict=True) if place < bound), [*shares][-1])
        parts[chosen].append(example)
    return {split: tuple(each) for split, each in parts.items()}


def _lacks_split(split: str, splits: Splits, description: SetDescription, data: str, dirt: Dirt) -> CorpusError:
    if split in splits:
        reason = f"; {dirt.notes[0]}" if dirt.notes else "."
        files = find_split_files(Path(data), description) if Path(data).is_dir() else {}
        name = f" ({files[split].name})" if split in files else ""
        return CorpusError(f"The {split} of {data}{name} has no example{reason}")
    patterns = ", ".join(description.files[split]) or "none"
    return CorpusError(
        f"{data} has no {split} (looked for {patterns}); name its file as files.{split}, or give shares as fractions, "
        f"in {description.yaml}."
    )


def _text_of(example: AnyExample) -> str:
    """Return the text whose hash says on which side of a cut an example lands."""
    match example:
        case TaggedSentence():
            return " ".join(example.words) if not example.document else f"document {example.document}"
        case Question() | Choice():
            return example.context
        case _:
            return example.text


def _identity_of(example: AnyExample) -> tuple[object, ...]:
    """Return all that a model sees of an example."""
    match example:
        case TaggedSentence():
            return example.words
        case MarkedText():
            return (example.text, example.head, example.tail)
        case LabelledText() | MultiLabelText():
            return (example.text, example.pair)
        case Question():
            return (example.question, example.context)
        case Choice():
            return (example.context, example.stem, example.options)
        case _:
            return (example.text,)


def _count_shared(splits: Splits) -> list[str]:
    """Say how many examples of dev and test are also in train, or test in dev: their scores are too good."""
    notes = []
    for held_out, seen in (("dev", "train"), ("test", "train"), ("test", "dev")):
        known = {_identity_of(each) for each in splits[seen]}
        shared = [each.source for each in splits[held_out] if _identity_of(each) in known]
        if shared:
            notes.append(f"{len(shared)} x {held_out} example that is in {seen} too: {list_places(shared)}.")
    return notes


def labels_of(example: AnyExample) -> tuple[str, ...]:
    """Return the labels of an example: its class, entity types, or predicates.

    Args:
        example: of any family; those without labels give none.
    """
    match example:
        case TaggedSentence():
            return tuple(dict.fromkeys(tag[2:] for tag in example.tags if tag != "O"))
        case AnnotatedText(relations=relations) if relations:
            return tuple(dict.fromkeys(each.label for each in relations))
        case AnnotatedText():
            return tuple(dict.fromkeys(each.label for each in example.entities))
        case MarkedText() | LabelledText():
            return (example.label,) if example.label else ()
        case MultiLabelText():
            return example.labels
        case _:
            return ()


def _find_labels(splits: Splits, description: SetDescription, schema: Schema | None, dirt: Dirt) -> tuple[str, ...]:
    """Return the labels in the head's order, and check those of the examples."""
    first_places = {
        split: {label: each.source for each in reversed(splits[split]) for label in labels_of(each)} for split in SPLITS
    }
    declared = description.labels or tuple(dict.fromkeys(name_relation(*key) for key in schema or ()))
    for places in first_places.values():
        for label, source in places.items():
            if declared and label not in declared:
                raise CorpusError(
                    f"{source} has the label {label!r}; labels in {description.where} has {', '.join(declared)} only."
                )
    for split in ("dev", "test"):
        for label, source in sorted(first_places[split].items()):
            if label not in first_places["train"]:
                dirt.add(source, f"label {label!r} of {split}", "is not in train", outcome="kept")
    return declared or tuple(sorted({*first_places["train"], *first_places["dev"]}))


def _find_side_file(patterns: tuple[str, ...], option: str, description: SetDescription, data: str) -> Path | None:
    """Find a schema or catalogue in the data's folder, or beside the description."""
    folders = [Path(data)] if Path(data).is_dir() else []
    if description.path:
        folders.append(Path(description.path).parent)
    found = (find_file(folder, patterns, option, description) for folder in folders)
    return next((each for each in found if each is not None), None)


def _read_schema(description: SetDescription, data: str) -> Schema | None:
    if description.task != "relation_extraction" or not description.schema:
        return None
    path = _find_side_file(description.schema, "schema", description, data)
    if path is None:
        raise _lacks_side_file("schema", description.schema, description, data)
    return read_schema(path)


def _read_catalogue(description: SetDescription, data: str) -> tuple[str, ...]:
    if description.task != "normalization":
        return ()
    path = _find_side_file(description.catalogue, "catalogue", description, data)
    if path is None:
        raise _lacks_side_file("catalogue", description.catalogue, description, data)
    return read_catalogue(path)


def _lacks_side_file(key: str, patterns: tuple[str, ...], description: SetDescription, data: str) -> CorpusError:
    return CorpusError(
        f"{data} has no {key} (looked for {', '.join(patterns)}); put it there, or name it as {key} in "
        f"{description.yaml}."
    )


def _check_terms(splits: Splits, catalogue: tuple[str, ...], dirt: Dirt) -> None:
    known = set(catalogue)
    for split in SPLITS:
        for each in splits[split]:
            if isinstance(each, Mention) and not known.issuperset(each.terms):
                strange = [term for term in each.terms if term not in known]
                dirt.add(each.source, "term", "is not in the catalogue", strange, outcome="kept")
