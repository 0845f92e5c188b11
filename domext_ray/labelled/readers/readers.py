"""A split of a labelled set -> examples: which file or dataset it is, which reader reads it, what a family makes of it.

Enters: a folder with a file a split, a folder that `datasets` saved, or the name of a dataset on the hub, with the
set's description. Leaves: examples by split.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from domext_ray.data.groups import hash_group
from domext_ray.errors import CorpusError
from domext_ray.labelled.examples import SPLITS, AnyExample, Choice
from domext_ray.labelled.readers.files import Dirt, Ids, Record
from domext_ray.labelled.readers.label_columns import LABEL_COLUMNS, gather_labels
from domext_ray.labelled.readers.questions import make_question, read_squad
from domext_ray.labelled.readers.records import GROUP, read_records, select_columns
from domext_ray.labelled.readers.rows import (
    check_options,
    make_choice,
    make_classified,
    make_marked,
    make_mention,
    make_multilabelled,
    make_valued,
)
from domext_ray.labelled.readers.spans import Schema, make_extraction, make_nested
from domext_ray.labelled.readers.tagged import make_tagged, read_conll
from domext_ray.labelled.set_description import SetDescription

Maker: TypeAlias = Callable[[Record, SetDescription, Dirt], AnyExample | None]
"""Makes a row's example, without its id; None, and one more in `Dirt`, where the row breaks a rule."""
_MAKERS: dict[str, Maker] = {
    "nested_ner": make_nested,
    "relation": make_marked,
    "classification": make_classified,
    "multilabel": make_multilabelled,
    "regression": make_valued,
    "qa": make_question,
    "multiple_choice": make_choice,
    "normalization": make_mention,
}
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<config>[\w.-]+))?")


def read_splits(
    description: SetDescription, data: str, dirt: Dirt, schema: Schema | None = None
) -> dict[str, tuple[AnyExample, ...]]:
    """Read the splits that a set has.

    Args:
        description: the set's layout.
        data: a folder of files, a folder of `datasets.save_to_disk`, or a hub name, "NAME" or "NAME:CONFIGURATION".
        dirt: counts what is left out.
        schema: allowed triples (relation extraction).

    Returns:
        Examples by split; a split that the set has not is missing, one that holds none is empty.

    Raises:
        CorpusError: nothing is there, two files claim one split, or a file has another layout.
    """
    folder = Path(data)
    if folder.is_dir() and not _is_saved_dataset(folder):
        files = find_split_files(folder, description)
        return {split: read_file(path, description, dirt, schema) for split, path in files.items()}
    if folder.exists() and not folder.is_dir():
        raise CorpusError(f"{data} is a file; give the folder that holds it and the other splits.")
    splits = _open_dataset(data, description)
    return {split: _make(_select(rows, description, dirt), description, dirt, schema) for split, rows in splits.items()}


def find_split_files(folder: Path, description: SetDescription) -> dict[str, Path]:
    """Return the file of each split that has one; a CorpusError if two files match the pattern of one split."""
    found = {}
    for split in SPLITS:
        path = find_file(folder, description.files[split], f"files.{split}", description)
        if path is not None:
            found[split] = path
    return found


def find_file(folder: Path, patterns: tuple[str, ...], option: str, description: SetDescription) -> Path | None:
    """Return the file that the first matching pattern (with * and ?) names; `option` is its key in the description."""
    for pattern in patterns:
        names = glob.glob(os.path.join(glob.escape(str(folder)), pattern))  # a pattern may be an absolute path
        matches = sorted(path for each in names if (path := Path(each)).is_file())
        if len(matches) > 1:
            listed = ", ".join(each.name for each in matches)
            raise CorpusError(
                f"{folder} has {len(matches)} files that match {pattern!r} ({listed}); keep one, or name it as "
                f"{option} in {description.yaml}."
            )
        if matches:
            return matches[0]
    return None


def read_file(
    path: Path, description: SetDescription, dirt: Dirt, schema: Schema | None = None
) -> tuple[AnyExample, ...]:
    """Read a file's examples.

    Args:
        path: the file.
        description: its layout.
        dirt: counts what is left out.
        schema: allowed triples (relation extraction).

    Raises:
        CorpusError: a file of another layout.
    """
    if description.reader == "conll":
        records = read_conll(path, description)
    elif description.reader == "squad":
        records = read_squad(path)
    else:
        records = _select(read_records(path, description, dirt), description, dirt)
    return _make(records, description, dirt, schema)


def _select(records: Iterable[Record], description: SetDescription, dirt: Dirt) -> Iterator[Record]:
    """Yield records whose values go by role."""
    if description.reader == LABEL_COLUMNS:
        records = gather_labels(records, description, dirt)
    return select_columns(records, description, dirt)


def _make(
    records: Iterable[Record], description: SetDescription, dirt: Dirt, schema: Schema | None
) -> tuple[AnyExample, ...]:
    """Make the examples of a split from records whose values go by role."""
    if description.group_field:
        groups: dict[str, str] = {}
        grouped = _make(_note_groups(records, description, groups), replace(description, group_field=""), dirt, schema)
        return tuple(replace(each, group=groups[each.source]) for each in grouped)
    if description.task == "ner":
        return tuple(make_tagged(records, description, dirt))
    maker: Maker = _MAKERS.get(description.task) or partial(make_extraction, schema=schema)
    ids = Ids()
    made: list[AnyExample] = []
    for record in records:
        example = maker(record, description, dirt)
        if example is not None:
            made.append(replace(example, id=ids.make(record.values["id"])))
    if description.task == "multiple_choice":
        check_options(cast(list[Choice], made))
    return tuple(made)


def _note_groups(records: Iterable[Record], description: SetDescription, groups: dict[str, str]) -> Iterator[Record]:
    """Note the group of every record, by its place."""
    option = f"group_field in {description.yaml}"
    for record in records:
        groups[record.source] = hash_group(record.values[GROUP], record.source, description.group_field, option).hex()
        yield record


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _open_dataset(data: str, description: SetDescription) -> dict[str, Iterator[Record]]:
    """Open a saved dataset or one of the hub; its splits go by the same patterns as files."""
    import datasets  # slow to import, and needed by few sets

    try:
        if Path(data).is_dir():
            loaded = datasets.load_from_disk(data)
            _require_own_files(loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded], data)
        else:
            match = _HUB_NAME.fullmatch(data)
            if match is None:
                raise CorpusError(f"{data!r} is no folder here and no hub name; give a folder of labelled files.")
            loaded = datasets.load_dataset(match["name"], match["config"] or description.config or None)
    except CorpusError:
        raise
    except Exception as error:  # the library raises a dozen kinds: offline, unknown, gated, damaged …
        raise CorpusError(
            f"{data!r} is no folder of labelled files here and could not be read as a dataset, saved or of the hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:150]})."
        ) from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    found = {}
    for split in SPLITS:
        names = (
            name for pattern in description.files[split] for name in splits if fnmatch.fnmatch(name + ".", pattern)
        )
        name = next(names, None)
        if name is not None:
            found[split] = _read_dataset(splits[name], f"{data}/{name}", description)
    return found


def _require_own_files(splits: Iterable[Any], folder: str) -> None:
    """Refuse a saved dataset whose description names files elsewhere: they would become examples without a word."""
    own = os.path.realpath(folder) + os.sep
    for path in (file["filename"] for split in splits for file in split.cache_files):
        if not os.path.realpath(path).startswith(own):
            raise CorpusError(
                f"the dataset in {folder} names {path}, which is outside of it; a saved dataset has its data files in "
                "its own folder."
            )


def _read_dataset(dataset: Any, path: str, description: SetDescription) -> Iterator[Record]:
    decoders = {name: _make_decoder(feature, description) for name, feature in dataset.features.items()}
    for row, values in enumerate(dataset, 1):
        yield Record({name: decoders[name](value) for name, value in values.items()}, path, row)


def _make_decoder(feature: Any, description: SetDescription) -> Callable[[Any], Any]:
    """Return what turns class numbers into names, unless the description's labels are these numbers."""
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
        numbers = [str(each) for each in range(len(names))]
        has_names = set(names) <= set(description.labels)
        shown = numbers if not has_names and set(numbers) <= set(description.labels) else names
        return lambda value: None if value is None or value < 0 else shown[value]
    if isinstance(feature, dict):
        parts = {name: _make_decoder(each, description) for name, each in feature.items()}
        return lambda value: value and {name: parts[name](each) for name, each in value.items()}
    inner = getattr(feature, "feature", None)
    if inner is not None:
        decode = _make_decoder(inner, description)
        return lambda value: value and [decode(each) for each in value]
    return lambda value: value
