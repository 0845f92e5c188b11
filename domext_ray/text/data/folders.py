"""The files of a folder -> those that are its text; what is left out is said, with the way to read it.

Enters: names below the folder with their sizes. Leaves: the names that are read. What only describes the text, or is of
another kind than most, is none; of a dataset the training split alone is text, by the rules of `datasets` itself: what
README.md declares, else what the names say. Where neither is certain, all is read. A file or a glob that a user names
never comes here.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from domext_ray.config.options.yaml_text import parse_yaml
from domext_ray.errors import ConfigError, CorpusError, to_line
from domext_ray.files import Globs, matches, parse_glob

CARD = "README.md"
"""It describes a dataset of the hub, in a header of YAML."""
_HEADER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:\s|$)", re.DOTALL)
_SHOWN = 3
"""Names in a sentence, at most."""
_MOST = 3 / 4
"""Of a folder's files, so that the others are strangers there; of a kind, of their bytes, too."""
_BESIDE = re.compile(
    r"(?:readme(?:[-_.].*)?|(?:licen[cs]es?|copying|notice|citation)(?:\.\w+)?"
    r"|_\w+"  # _SUCCESS, _metadata, _started_1: Spark, Databricks, Hive
    r"|dataset_infos?\.json|dataset_dict\.json"
    r"|(?:md5|sha\d+|check)sums?(?:\.txt)?|.*\.(?:crc|md5|sha\d+|sig|asc|lock)"
    r"|thumbs\.db|desktop\.ini|.*~|~\$.*|#.*#"
    r"|.+\.(?:bak|orig|swp|tmp|part|partial|crdownload|incomplete)"  # copies of editors, unfinished downloads
    r"|.+\.ann)",  # brat's annotations of texts
    re.IGNORECASE,
)
"""What describes files, or is left behind by programs, by the last part of its name."""
_BESIDE_FOLDER = re.compile(r"(?:^|/)_(?:temporary|delta_log|spark_metadata)/")
_CACHE = re.compile(r"cache-.*\.arrow|tmp\w{8}|state\.json")
"""What `datasets` leaves beside the Arrow files of a dataset: results of map and filter among it."""
_MAY_BE_SPLIT = re.compile(r"(?:^|[-._ 0-9/])(?:train|val|dev|test|eval)", re.IGNORECASE)
"""How the words begin that `datasets`, which takes a second to import, looks for in names."""
_SHARD = re.compile(r"data/([^/]*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""`datasets.data_files.SPLIT_PATTERN_SHARDED`."""
_SNAPSHOT = re.compile(r"((?:.*/)?)snapshots/[0-9a-f]{40}(?=/)")
Splits = dict[str, list[str]]


@functools.cache
def say(note: str) -> None:
    """Say it once a process, which lists a text several times."""
    print(f"note: {note}.", file=sys.stderr, flush=True)


def name_few(names: Sequence[str]) -> str:
    """Name the first of some files or folders, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def choose_text(
    folder: str,
    sizes: Mapping[str, int],
    find_kind: Callable[[str], str],
    read_card: Callable[[], bytes],
    *,
    by_names: bool,
) -> list[str]:
    """Return the names of the files that are a folder's text.

    `folder` is as a user would write it, and `sizes` has the bytes of its files by their paths in it. `read_card` is
    called only where there is a `CARD`. With `by_names` names alone may say that a file is of another split than train.
    """
    if commits := _find_commits(sizes):
        raise CorpusError(
            f"--corpus names {folder}, where the hub's client keeps every file twice; name a commit's folder in it: "
            f"{name_few([f'{folder}/{commit}' for commit in commits])}."
        )
    beside = _find_beside(sizes)
    names = [name for name in sorted(sizes) if name not in beside]
    globs = _read_globs(folder, read_card()) if CARD in sizes and names else {}
    splits = {split: [name for name in names if matches(of, name)] for split, of in globs.items()}
    if by_names and not splits:
        splits = _find_shards(names)
    kept = names
    if splits:
        kept = _take_train(folder, names, splits)
    elif by_names:
        kept = _take_named(folder, names)
    strangers = _find_strangers(folder, kept, sizes, find_kind)
    if left_out := sorted(beside | strangers):
        say(
            f"of {folder}, what describes or repeats its text, or is of another kind than most of it, is left out: "
            f"{name_few(left_out)}; to read such a file, name it, too, or {folder}/** for all"
        )
    return [name for name in kept if name not in strangers]


def _find_commits(names: Collection[str]) -> list[str]:
    """Return the folders of commits in the cache of the hub's client, whose files are links to its `blobs`."""
    caches = {name.rpartition("blobs/")[0] for name in names if "blobs/" in name}
    return sorted({found[0] for name in names if (found := _SNAPSHOT.match(name)) and found[1] in caches})


def _find_beside(sizes: Mapping[str, int]) -> set[str]:
    """What is beside text; nothing where nothing else is there, and no README where most of the text is READMEs."""
    parts = {path: path.rpartition("/") for path in sizes}
    caches = {path for path, (*_, name) in parts.items() if _CACHE.fullmatch(name)}
    with_arrow = {parts[path][0] for path in sizes if path.endswith(".arrow") and path not in caches}
    beside = {path for path in caches if parts[path][0] in with_arrow}
    beside |= {path for path, (*_, name) in parts.items() if _BESIDE.fullmatch(name) or _BESIDE_FOLDER.search(path)}
    if not (num_others := len(sizes) - len(beside)):
        return set()
    readmes = {path for path in beside if parts[path][2].lower().startswith("readme")}
    num_folders = len({parts[path][0] for path in readmes})
    return beside - readmes if num_folders >= _MOST * (num_folders + num_others) else beside


def _read_globs(folder: str, card: bytes) -> dict[str, Globs]:
    """Return the globs of each split that a dataset's card declares; empty: it declares none."""
    header = _HEADER.match(card.decode(errors="replace"))
    if header is None or "configs:" not in header[1]:
        return {}
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    try:
        card_data = DatasetCardData(configs=parse_yaml(header[1], "its header").value.get("configs"))
        configs = MetadataConfigs.from_dataset_card_data(card_data)
        default = configs.get_default_config_name()
        with_files = {name: config["data_files"] for name, config in configs.items() if config.get("data_files")}
        declared = {name: sanitize_patterns(files) for name, files in with_files.items()}
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorpusError(
            f"{folder}/{CARD} declares a dataset and cannot be read ({to_line(error)}); mend its "
            f"header, or name the files, as {folder}/**."
        ) from error
    if declared and default is None:
        trained = [f"{folder}/{pattern}" for splits in declared.values() for pattern in splits.get("train", ())]
        raise CorpusError(
            f"{folder} has {len(declared)} datasets by its {CARD} ({name_few([*declared])}); name the files of one: "
            f"{name_few(trained)}."
        )
    patterns = declared.get(str(default), {})
    return {
        split: Globs().union(*(parse_glob(glob.removeprefix("./")) for glob in globs))
        for split, globs in patterns.items()
    }


def _find_shards(names: Iterable[str]) -> Splits:
    """Return the files of each split of a dataset as `datasets` uploads it; empty: it is none with a training split."""
    splits: Splits = {}
    for name in names:
        if found := _SHARD.fullmatch(name):
            splits.setdefault(found[1], []).append(name)
    return splits if "train" in splits else {}


def _take_train(folder: str, names: Sequence[str], splits: Splits) -> list[str]:
    """Return the training files of a dataset whose splits are certain."""
    if not (train := splits.get("train")):
        fault = "without a file" if "train" in splits else "missing"
        others = [f"{folder}/{name}" for files in splits.values() for name in files]
        raise CorpusError(
            f"--corpus names {folder}, a dataset by its {CARD}, whose split 'train' is {fault}; name what is text in it"
            f"{f', such as {name_few(others)}' if others else ''}."
        )
    if left_out := sorted({*names} - {*train}):
        _say_left_out(folder, [*splits], left_out)
    return train


def _say_left_out(folder: str, splits: Sequence[str], names: Sequence[str]) -> None:
    say_train(folder, splits, f"left out: {name_few(names)}; to read such a file, name it, too")


def say_train(dataset: str, splits: Sequence[str], how: str) -> None:
    """Say that the training split alone of a dataset is read, and how another is."""
    say(f"of {dataset} (splits: {', '.join(splits)}) the split train alone is text; {how}")


def _take_named(folder: str, names: Sequence[str]) -> list[str]:
    """Return the files but those of another split than train, by the words that `datasets` looks for in names."""
    suspects = [name for name in names if _MAY_BE_SPLIT.search(name)]
    if not suspects:
        return list(names)
    from datasets import data_files

    splits: dict[str, set[str]] = {}
    parts = {name: name.lower().rpartition("/")[::2] for name in suspects}  # folders, and the file's own name
    for place, patterns in enumerate(
        (data_files.DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME, data_files.DEFAULT_PATTERNS_SPLIT_IN_FILENAME)
    ):
        for split, globs in patterns.items():  # **/WORD/** and **/WORD: one pass of a large folder, name by name
            words = [fnmatch.translate(glob.removeprefix("**/").removesuffix("/**")) for glob in globs]
            is_word = re.compile("|".join(words)).match
            said = {part for part in {of[place] for of in parts.values()} if any(map(is_word, part.split("/")))}
            splits.setdefault(str(split), set()).update(name for name, of in parts.items() if of[place] in said)
        found = set[str]().union(*splits.values())
        parts = {name: of for name, of in parts.items() if name not in found}  # folders say it before files do
    train = splits.pop("train")
    others = set[str]().union(*splits.values()) - train
    if train and len(train) + len(others) >= _MOST * len(names):
        if others:
            _say_left_out(folder, ["train", *(split for split, of in splits.items() if of)], sorted(others))
        return [name for name in names if name not in others]
    if others and len(others) == len(names):
        raise CorpusError(
            f"--corpus names {folder}, whose files are by their names all of another split than train "
            f"({name_few(sorted(others))}); to train on them, name them, such as {folder}/{sorted(others)[0]}, or "
            f"give a glob, such as {folder}/**/*{PurePosixPath(names[0]).suffix}."
        )
    if others:
        say(
            f"all files of {folder} are read, though some have the name of another split than train: "
            f"{name_few(sorted(others))}; to leave such files out, name the others"
        )
    return list(names)


def _find_strangers(
    folder: str, names: Sequence[str], sizes: Mapping[str, int], find_kind: Callable[[str], str]
) -> set[str]:
    """Return the files of another kind than most; none where no kind has most of both files and bytes."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(find_kind(name), []).append(name)
    if len(kinds) < 2:
        return set()
    num_bytes = sum(sizes[path] for path in names)
    for of in kinds.values():
        if len(of) >= _MOST * len(names) and sum(sizes[path] for path in of) >= _MOST * num_bytes:
            return {*names} - {*of}
    listed = (f"{len(of):,} {kind} ({of[0]}{', …' if len(of) > 1 else ''})" for kind, of in kinds.items())
    say(f"{folder} has files of several kinds, of which none is most of it, and all are read: {'; '.join(listed)}")
    return set()
