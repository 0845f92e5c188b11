"""A split of a labelled set -> examples: which file or dataset it is, which reader reads it, what a family makes of it.

Enters: a set's description, with a folder that has a file a split, a folder that `datasets` saved, or the name of a
dataset on the hub. Leaves: examples by split. Splits that a set has not are cut from the one that it has by a hash of
the text, or of whose it is (`group_field`), so that equal texts, or all of a person's, land on one side and other rows
change nothing.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from domext_ray.errors import ConfigError, CorpusError, find_storage_error
from domext_ray.families.readers.annotation_tools import complete_exports
from domext_ray.families.readers.cells import read_nested
from domext_ray.families.readers.columns import GROUP, LABEL_COLUMNS, find_missing, get_value, select_columns
from domext_ray.families.readers.examples import SPLITS, Example, Splits
from domext_ray.families.readers.issues import DataIssues, LeftOut, Record, SetRow
from domext_ray.families.readers.pubtator import is_pubtator, read_pubtator
from domext_ray.families.readers.records import list_brat, read_brat, read_conll, read_records, read_squad
from domext_ray.families.readers.set_description import BRAT_FILES, SET_FILE, WITH_PLACES, SetDescription
from domext_ray.families.registry import FAMILIES
from domext_ray.storage import Place
from domext_ray.text.data.files import find_suffix
from domext_ray.text.data.groups import hash_group
from domext_ray.text.data.readers import part_values

_BY_ROLE = ("conll", "squad", *WITH_PLACES)
"""Readers of files whose records go by role at once; those of all others, and of datasets, go by column."""
_ROWS = (".json", ".jsonl", ".ndjson", ".parquet", ".csv")
"""Files whose rows have names for their values."""
_SHARD = re.compile(r"(?P<split>[\w.]+)-(?P<place>\d{5})-of-(?P<number>\d{5})(-[0-9a-f]{16})?\.parquet")
"""A file of a split as the hub has it."""
_CONVERTED = "*/[0-9][0-9][0-9][0-9].parquet"
"""Files of splits as the hub makes them of others, each split in a folder of its name."""
_SPLIT_WORDS = {
    "train": ("train", "training", "trainset"),
    "dev": ("dev", "devel", "development", "developset", "validation", "valid", "val", "testa"),
    "test": ("test", "testing", "testset", "testb"),
}
"""Words in the names of files that say which split they are; some are those of CoNLL-2003 and NCBI-disease."""
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w-][\w.-]*)?)(:(?P<config>[\w.-]+))?")


def read_splits(description: SetDescription, issues: DataIssues, side: Any = None) -> dict[str, tuple[Example, ...]]:
    """Read the splits that a set has: one that it has not is missing, one that holds no example is empty.

    Nothing there, two files that claim one split, and a file of another layout are a CorpusError; files without
    columns, of which `group_field` names one, a ConfigError.
    """
    for key in description.ignored:
        issues.say(f"{description.path} has the key {key!r}, which is of version 0.1.0 and is ignored; leave it out.")
    folder = Path(description.data)
    if folder.exists() and not folder.is_dir():
        raise _is_no_folder(folder, description)
    is_plain = folder.is_dir() and not _is_saved_dataset(folder)
    description = _choose_reader(description) if is_plain else description
    files = find_split_files(description) if is_plain else {}
    shards = _find_shards(folder) if is_plain and not files else {}
    if is_plain and not shards:
        records = {
            split: _read_file(path, description, issues, [other for other in files.values() if other != path])
            for split, path in files.items()
        }
    else:
        description, records = _open_dataset(description, shards, issues)
    if files and description.group_field != "" and description.reader in _BY_ROLE:
        without = f"left out, because {next(iter(files.values()))} (reader: {description.reader}) has no columns"
        raise ConfigError(f"{description.where}: group_field is {description.group_field!r}; it must be {without}.")
    if not files or description.reader not in _BY_ROLE:
        records = {split: select_columns(found, description, issues) for split, found in records.items()}
    family = FAMILIES[description.task]
    rows = {split: [SetRow(record, description, issues) for record in found] for split, found in records.items()}
    return {
        split: _make(*family.begin_split(own, side), description)
        for split, own in family.read_together(rows, issues).items()
    }


def _is_no_folder(file: Path, description: SetDescription) -> CorpusError:
    """Return the error for a set that is given as a file."""
    whole = _describe_yaml(file.parent, description, {"train": file.name})
    cure = "" if description.path else f", or, if it is the whole set, {whole} and give {file.parent}"
    return CorpusError(f"{file} is a file; give the folder that holds it and the other splits{cure}.")


def _describe_yaml(folder: Path, description: SetDescription, files: Mapping[str, str]) -> str:
    """Which lines describe a set whose files have these names; a single one is the whole set, and is cut."""
    named = ", ".join(f"{split}: {json.dumps(name, ensure_ascii=False)}" for split, name in files.items())
    cut = ", fractions: {train: 0.8, dev: 0.1, test: 0.1}" if len(files) == 1 else ""
    return f"write task: {description.task}, files: {{{named}}}{cut}, a line each, into {folder / SET_FILE}"


def _choose_reader(description: SetDescription) -> SetDescription:
    """Return a set with the first of its family's readers that its files suit, unless its description names one.

    A CorpusError is that of the reader of what annotation tools write, which no other reader knows.
    """
    if not description.others:
        return description
    files, readers = list(find_split_files(description).values()), [description, *description.others]
    if not files:
        return next((own for own in readers if own.reader == "brat" and find_split_files(own)), description)
    suffix = find_suffix(str(files[0]))
    has_rows = suffix in _ROWS
    if not has_rows and any(own.reader == "pubtator" for own in readers) and is_pubtator(files[0]):
        return next(own for own in readers if own.reader == "pubtator")
    fault: CorpusError | None = None
    for own in readers if has_rows else ():
        try:
            records = read_records(files[0], own, DataIssues(is_strict=False))
            if own.reader not in _BY_ROLE and _suits(records, own):
                return own
        except CorpusError as error:
            fault = error if own.annotated and suffix != ".csv" else fault
    if fault is not None:
        raise fault
    is_of_rows = suffix == ".parquet" or (description.reader == "squad" and suffix in (".csv", ".jsonl", ".ndjson"))
    return next((own for own in readers if is_of_rows and own.reader not in _BY_ROLE), description)


def _suits(records: Iterable[Record], description: SetDescription) -> bool:
    """Whether the first row has what a reader needs."""
    first = next(complete_exports(records, description, DataIssues(is_strict=False)), None)
    has_names = first is not None and all(isinstance(name, str) for name in first.values)
    if first is None or not has_names or find_missing(first.values, description) is not None:
        return False
    if "tags" in description.required and not _has_tagged_words(first, description):
        return False
    return description.reader != LABEL_COLUMNS or (
        bool(description.labels) and {*description.labels} <= first.values.keys()
    )


def _has_tagged_words(row: Record, description: SetDescription) -> bool:
    """Whether what goes by the names of words and tags can be these: no entities, and in a CSV no single word."""
    tokens, tags = (get_value(row.values, description.columns[role]) for role in ("tokens", "tags"))
    is_word = find_suffix(row.path) == ".csv" and read_nested(tokens) == tokens
    has_places = isinstance(tags, list | tuple) and any(isinstance(tag, list | tuple | Mapping) for tag in tags)
    return not (is_word or has_places)


def find_split_files(description: SetDescription) -> dict[str, Path]:
    """Return the file of each split that has one; a CorpusError if two files match the pattern of one split."""
    folder, found = Path(description.data), dict[str, Path]()
    for split in reversed(SPLITS):  # a folder of brat for train may hold the others
        path = find_file(folder, description.files[split], f"files.{split}", description, [*found.values()])
        if path is not None:
            found[split] = path
    if description.reader == "brat" and folder in found.values():
        _require_own_folders(folder, [*found.values()], description)
    return {split: found[split] for split in SPLITS if split in found}


def _require_own_folders(folder: Path, found: Sequence[Path], description: SetDescription) -> None:
    """Refuse a split that is the whole folder where another one, by its name, would be part of it."""
    for split, names in BRAT_FILES.items():
        for path in sorted(set(folder.iterdir()) - {*found}):
            if path.name.lower() in names and any(list_brat(path)):
                raise CorpusError(
                    f"{path} is named as a {split}, and would be read with all of {folder}; name it as files.{split} "
                    f"in {description.yaml}, or rename it."
                )


def find_file(
    folder: Path, patterns: tuple[str, ...], option: str, description: SetDescription, others: Sequence[Path] = ()
) -> Path | None:
    """Return the file, or folder of brat, that the first matching pattern names.

    `option` is the patterns' key in the description; `others` are the files, or folders, of the other splits.
    """
    Place(folder).list_names()  # of a disk that fails a glob says that nothing is there
    is_brat = description.reader == "brat"
    for pattern in patterns:
        # a pattern may be an absolute path, or one in the home folder
        names = glob.glob(os.path.join(glob.escape(str(folder)), os.path.expanduser(pattern)))
        paths = sorted(map(Path, names))
        matches = [path for path in paths if (_has_brat(path, folder, others) if is_brat else path.is_file())]
        if len(matches) > 1:
            listed = ", ".join(path.name for path in matches)
            raise CorpusError(
                f"{folder} has {len(matches)} files that match {pattern!r} ({listed}); keep one, or name it as "
                f"{option} in {description.yaml}."
            )
        if matches:
            return matches[0]
    return None


def _has_brat(path: Path, folder: Path, others: Sequence[Path]) -> bool:
    """Whether a folder is a split of brat; the set's own one, which may have texts of another kind, needs notes."""
    texts, notes = list_brat(path, others)
    return bool(notes or (texts and path != folder))


def _read_file(path: Path, description: SetDescription, issues: DataIssues, others: Sequence[Path]) -> Iterator[Record]:
    """Yield records; `others` are the files, or folders, of the other splits."""
    match description.reader:
        case "conll":
            return read_conll(path, description, issues)
        case "squad":
            return read_squad(path, description)
        case "brat":
            return read_brat(path, issues, others)
        case "pubtator":
            return read_pubtator(path)
    records = read_records(path, description, issues)
    if "tags" in description.required and find_suffix(str(path)) == ".parquet" and not description.tags:
        records = _decode_tags(records, path, description)
    return complete_exports(records, description, issues)


def _decode_tags(records: Iterator[Record], path: Path, description: SetDescription) -> Iterator[Record]:
    """Give the numbers of tags the names that `datasets` keeps in a Parquet file."""
    import datasets  # slow to import, and needed by few sets

    decoders: dict[Any, Callable[[Any], Any]] | None = None
    for record in records:
        if decoders is None:
            features = datasets.Features.from_arrow_schema(pq.read_schema(path))
            names = [name for name in description.columns["tags"] if name in features]
            decoders = {name: _make_decoder(features[name], description) for name in names}
        tags = {name: decode(record.values[name]) for name, decode in decoders.items()}
        yield replace(record, values={**record.values, **tags})


def _make(
    rows: Sequence[SetRow], read: Callable[[SetRow], Example], description: SetDescription
) -> tuple[Example, ...]:
    """Make the examples of a split."""
    option = f"group_field in {description.yaml}"
    made: list[Example] = []
    taken: set[str] = set()
    for row in rows:
        group, field = "", description.group_field
        if field != "":
            group = hash_group(row.get(GROUP), row.source, field, option).hex()
        try:
            example = read(row)
            row.check_text(str(row.get("id")), "id")
            for label in example.list_labels():
                row.check_text(label, "label")
        except LeftOut:
            continue
        made.append(replace(example, id=_name(row.get("id"), taken), path=row.record.path, group=group))
    return tuple(made)


def _name(given: object, taken: set[str]) -> str:
    """Return an id of its own: the file's, with #2 and so on where it repeats, or the example's number."""
    base = str(given).strip() if given is not None else ""
    base = base or str(len(taken) + 1)
    made, number = base, 1
    while made in taken:
        number += 1
        made = f"{base}#{number}"
    taken.add(made)
    return made


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _find_shards(folder: Path) -> dict[str, list[str]]:
    """Return the Parquet files of each split where a folder has them as the hub does, in `data` or in itself."""
    found: dict[str, dict[int, str]] = {}
    numbers: dict[str, int] = {}
    for path in sorted([*folder.glob("data/*.parquet"), *folder.glob("*.parquet")]):
        if match := _SHARD.fullmatch(path.name):
            found.setdefault(match["split"], {}).setdefault(int(match["place"]), str(path))
            numbers[match["split"]] = int(match["number"])
    for path in sorted(folder.glob(_CONVERTED)) if not found else ():
        found.setdefault(path.parent.name, {})[int(path.stem)] = str(path)
        numbers[path.parent.name] = max(found[path.parent.name]) + 1
    for split, paths in found.items():
        if missing := sorted({*range(numbers[split])} - {*paths}):
            raise CorpusError(
                f"{folder} lacks {len(missing)} of the {numbers[split]} files of {split} (the first is number "
                f"{missing[0]:05}); fetch the others, too."
            )
    return {split: [paths[place] for place in sorted(paths)] for split, paths in found.items()}


def _open_dataset(
    description: SetDescription, shards: Mapping[str, list[str]], issues: DataIssues
) -> tuple[SetDescription, dict[str, Iterator[Record]]]:
    """Open a saved dataset, or one of the hub, or files of one; its splits go by the same patterns as files.

    The reader is the first of the family's that its first row suits, unless the description names one.
    """
    import datasets  # slow to import, and needed by few sets

    data = description.data
    try:
        if shards:
            loaded = datasets.load_dataset("parquet", data_files=dict(shards))
        elif Path(data).is_dir():
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
        raise find_storage_error(error) or CorpusError(
            f"{data!r} is no folder of labelled files here and could not be read as a dataset, saved or of the hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:150]})."
        ) from error
    splits = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    whole = next(iter(splits.values()))
    first = whole.select(range(min(len(whole), 1)))
    readers = [own for own in (description, *description.others) if own.reader not in WITH_PLACES]
    suiting = (own for own in readers if _suits(_read_dataset(first, data, own), own))
    description = next(suiting, description)
    found = {}
    for split in SPLITS:
        names = (
            name for pattern in description.files[split] for name in splits if fnmatch.fnmatch(name + ".", pattern)
        )
        name = next(names, None)
        if name is not None:
            records = _read_dataset(splits[name], f"{data}/{name}", description)
            found[split] = complete_exports(records, description, issues)
    return description, found


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
        numbers = [str(number) for number in range(len(names))]
        has_names = set(names) <= set(description.labels)
        shown = numbers if not has_names and set(numbers) <= set(description.labels) else names
        return lambda value: None if value is None or value < 0 else shown[value]
    if isinstance(feature, dict):
        parts = {name: _make_decoder(part, description) for name, part in feature.items()}
        return lambda value: value and {name: parts[name](part) for name, part in value.items()}
    inner = getattr(feature, "feature", None)
    if inner is not None:
        decode = _make_decoder(inner, description)
        return lambda value: value and [decode(item) for item in value]
    return part_values


def cut_splits(
    splits: Splits, description: SetDescription, found: Sequence[str]
) -> tuple[dict[str, tuple[Example, ...]], list[str]]:
    """Cut the splits that are missing or empty from the one that is there.

    What is cut is train (dev where there is no train). Test is cut only from a set of a single file: one that has
    train and dev keeps them whole and has no test.

    A CorpusError says that train or dev is missing and `fractions` does not say how to cut it.
    """
    present = [split for split in SPLITS if splits.get(split)]
    whole = next((split for split in ("train", "dev") if split in present), None)
    missing = [split for split in ("train", "dev") if split not in present]
    shares = description.fractions
    if missing and (whole is None or any(split not in shares for split in (whole, *missing))):
        raise lacks_split(missing[0], splits, description, found)
    made = {split: splits.get(split, ()) for split in SPLITS}
    if not missing or whole is None:
        return made, []
    wanted = [split for split in SPLITS if split in (whole, *missing)]
    if present == [whole] and "test" in shares:
        wanted.append("test")
    made.update(_cut(splits[whole], {split: shares[split] for split in wanted}))
    for split in wanted:
        if not made[split]:
            number = f"{len(splits[whole])} examples in {whole}"
            raise CorpusError(f"{description.data} has only {number}, too few to cut {split} from; add a file.")
    counts = ", ".join(f"{len(made[split])} {split}" for split in wanted)
    is_foreign = whole == "dev" or "test" in wanted
    ending = ", so that scores do not compare with those of published splits." if is_foreign else "."
    by = repr(description.group_field) if description.group_field else "text"
    return made, [f"{whole} of {description.data} was cut by a hash of each {by}: {counts}{ending}"]


def _cut(examples: Sequence[Example], shares: Mapping[str, float]) -> dict[str, tuple[Example, ...]]:
    parts: dict[str, list[Example]] = {split: [] for split in shares}
    total = sum(shares.values())
    for example in examples:
        place = example.draw(0) / 2**64 * total
        bounds = itertools.accumulate(shares.values())
        chosen = next((split for split, bound in zip(shares, bounds, strict=True) if place < bound), [*shares][-1])
        parts[chosen].append(example)
    return {split: tuple(part) for split, part in parts.items()}


def lacks_split(split: str, splits: Splits, description: SetDescription, notes: Sequence[str]) -> CorpusError:
    """Return the error for a set without a split, or with one that holds nothing; the first note says why."""
    data = description.data
    if split in splits:
        reason = f"; {notes[0]}" if notes else "."
        files = find_split_files(description) if Path(data).is_dir() else {}
        name = f" ({files[split].name})" if split in files else ""
        return CorpusError(f"The {split} of {data}{name} has no example{reason}")
    patterns, cure = ", ".join(description.files[split]) or "none", ""
    guessed = _guess_files(Path(data)) if not description.path and Path(data).is_dir() else {}
    if len(guessed) == 1 or split in guessed:
        what = f"if {guessed['train']} is the whole set, " if len(guessed) == 1 else ""
        cure = f"{what}{_describe_yaml(Path(data), description, guessed)}"
    inner = sorted(path for path in Path(data).iterdir() if _find_shards(path)) if Path(data).is_dir() else []
    if inner:
        cure = f"give one of the sets in it, such as {inner[0]}"
    if "label" in description.required and any(path.is_dir() for path in (Path(data) / split).glob("*")):
        cure = f"make {split}.jsonl of the folders in {Path(data) / split}, an object a row with a text and its class"
    rule = cure or f"name its file as files.{split}, or give shares as fractions, in {description.yaml}"
    return CorpusError(f"{data} has no {split} (looked for {patterns}); {rule}.")


def _guess_files(folder: Path) -> dict[str, str]:
    """Return the file of each split by the words of its name, or a lone file as train; empty if that is not certain."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    names = [name for name in names if not name.lower().startswith(("readme", "licen"))]
    words = {name: {word.lower() for word in _WORD.findall(name)} for name in names}
    found = {split: [name for name in names if words[name] & {*known}] for split, known in _SPLIT_WORDS.items()}
    if len(names) == 1 and not found["dev"] + found["test"]:
        return {"train": names[0]}
    listed = [name for own in found.values() for name in own]
    is_certain = all(len(own) == 1 for own in found.values() if own) and len({*listed}) == len(listed)
    return {split: own[0] for split, own in found.items() if own} if is_certain and found["train"] else {}
