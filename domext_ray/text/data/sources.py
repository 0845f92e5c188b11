"""The files of a corpus -> read tasks.

Enters: `--corpus` (see `domext_ray.text.data.files`). Leaves: read tasks of bounded size whose documents come in one
canonical order, and a fingerprint of the content, which nothing is read for until somebody asks. A large file of lines
or row groups (Parquet) is cut into byte ranges whose places depend on its size alone, so neither the number of CPUs nor
their speed changes a row: a range has the lines, or the row groups, that begin in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.runtime.records import Records, Result
from domext_ray.storage import Place, hash_text, parse_json
from domext_ray.text.data.files import LINES, LOCAL, PARQUET, TEXT, SourceFile, find_files
from domext_ray.text.data.hashes import Memory, hash_sources, name_former
from domext_ray.text.data.package_docs import write_docs

SOURCES = "sources.json"
FileRecord: TypeAlias = tuple[str, str]
"""Where a file is, and what its content is known by."""
MOST_TASKS = 4096
"""Read tasks of a corpus, by and large: beyond 32 GiB, with the usual --prepare.shard_bytes, they grow with it."""


@dataclass(frozen=True)
class ReadTask:
    """A part of a corpus that one task reads."""

    files: tuple[SourceFile, ...]  # read whole, in order; one file when it is a byte range
    start: int = 0  # first byte of a range; what begins before it is another task's
    end: int = -1  # byte after the range; -1 for whole files

    @property
    def num_bytes(self) -> int:
        """Bytes that the task reads."""
        return sum(file.size for file in self.files) if self.end < 0 else self.end - self.start


@dataclass(frozen=True)
class Sources:
    """A resolved corpus."""

    spec: str
    tasks: tuple[ReadTask, ...]  # in canonical order
    folder: Place | None = None  # where hashes of files are remembered; None: nowhere
    by_names: bool = True  # as of `find_files`

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files, each once."""
        return tuple(dict.fromkeys(file for task in self.tasks for file in task.files))

    @functools.cached_property
    def hashes(self) -> tuple[str, ...]:
        """Hash of every file, which is read for it where nothing else proves that its bytes are as before."""
        return tuple(hash_sources(self.files, self._memory))

    @functools.cached_property
    def _memory(self) -> Memory:
        return self.folder / f".hashes-{hash_text(self.spec)[:16]}.json" if self.folder else {}

    @property
    def fingerprint(self) -> str:
        """Hash of the content."""
        return _join_hashes(self.files, self.hashes)

    @property
    def former_fingerprint(self) -> str:
        """What `fingerprint` was in 0.1.0: what it made goes on while its text is what it would take for the same."""
        return _join_hashes(self.files, self.former_hashes)

    @property
    def former_hashes(self) -> list[str]:
        """What `hashes` were in 0.1.0, which knew text in a bucket by path and time; of other text they are equal."""
        pairs = zip(self.files, self.hashes, strict=True)
        return [own if file.scheme in LOCAL else name_former(file) for file, own in pairs]

    def record(self) -> list[FileRecord]:
        """Return the files with what their content is known by, as `describe_changes` takes them."""
        return _record(self.files, self.hashes)

    def require_unchanged(self) -> None:
        """Refuse what was read while its files changed; one that has gone since was there."""
        found = find_files(self.spec, by_names=self.by_names)[0]
        there = {file.address: file for file in (write_docs(source, self.folder) for source in found)}
        now = [there[file.address] for file in self.files if file.address in there]
        before = [record for record in self.record() if record[0] in there]
        if changes := describe_changes(before, _record(now, hash_sources(now, self._memory))):
            raise CorpusError(
                f"--corpus {self.spec!r} changed while it was read ({changes}); start again when nothing writes to it."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(task.num_bytes for task in self.tasks)


def resolve_sources(spec: str, prepare: PrepareConfig, folder: Place | None = None) -> Sources:
    """Find the files of a corpus and cut them into read tasks; text that is there is not read.

    In `folder`, that of prepared corpora, a job remembers what it has hashed and writes what stands for `package-docs`.
    Without one it remembers nothing, and writes that to a cache of this machine.
    """
    files = [write_docs(file, folder) for file in find_files(spec)[0]]
    return Sources(spec, tuple(cut_tasks(files, prepare, (*LINES, PARQUET))), folder)


def cut_tasks(files: Sequence[SourceFile], prepare: PrepareConfig, kinds: Sequence[str] = LINES) -> Iterator[ReadTask]:
    """Cut large files of some kinds into ranges and join small files, in order."""
    task_bytes = max(prepare.shard_bytes, -(-sum(file.size for file in files) // MOST_TASKS))
    group: list[SourceFile] = []
    group_bytes = 0
    for file in files:
        is_cut = file.kind in kinds and not file.is_gzip
        is_cut = is_cut and file.size > task_bytes and (file.kind != TEXT or prepare.document != "file")
        if group and (is_cut or group_bytes + file.size > task_bytes):
            yield ReadTask(tuple(group))
            group, group_bytes = [], 0
        if is_cut:
            for start in range(0, file.size, task_bytes):
                yield ReadTask((file,), start, min(start + task_bytes, file.size))
        else:
            group.append(file)
            group_bytes += file.size
    if group:
        yield ReadTask(tuple(group))


def run_read_tasks(
    function: Callable[[int, ReadTask, bytes], Result],
    sources: Sources,
    verb: str,
    records: Records,
    find_plan: Callable[[int], bytes] = lambda number: b"",
) -> Iterator[Result]:
    """Run a function over (number, read task, plan) of all tasks on Ray, in order.

    The function is pickled. A plan is what a task is told of its documents. Results that `records` has are taken over.
    """
    from domext_ray.runtime.tasks import Task, run_tasks  # here, for most who import this file run no tasks: no Ray

    plans = map(find_plan, range(len(sources.tasks)))
    return run_tasks(
        lambda item: function(*item),
        (
            Task(i, (i, task, plan), task.num_bytes / 1e6, task.files[0].path, hashlib.sha256(plan).hexdigest())
            for i, (task, plan) in enumerate(zip(sources.tasks, plans, strict=True))
        ),
        records,
        verb=verb,
        total=sources.num_bytes / 1e6,
        unit="MB",
        remedy="free memory, or lower --prepare.shard_bytes or --prepare.max_document_chars",
    )


def _join_hashes(files: Sequence[SourceFile], hashes: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file, own in zip(files, hashes, strict=True):
        digest.update(json.dumps([file.kind, file.size]).encode() + own.encode())
    return digest.hexdigest()


def _record(files: Sequence[SourceFile], hashes: Sequence[str]) -> list[FileRecord]:
    return [(file.address, f"{file.kind} {own}") for file, own in zip(files, hashes, strict=True)]


def write_files(folder: Place, record: Sequence[FileRecord]) -> None:
    """Keep which files something was made of in its folder."""
    (folder / SOURCES).put(json.dumps({"files": record}, ensure_ascii=False).encode())


def require_files(folder: Place, find_record: Callable[[], Sequence[FileRecord]], remedy: str) -> None:
    """Refuse files that are not those that something was made of; nobody knows them of what 0.1.0 made.

    `find_record` is not called where nobody knows them; `remedy` ends the sentence.
    """
    try:
        content = (folder / SOURCES).read_bytes()
    except FileNotFoundError:
        return
    try:
        before = [(str(path), str(own)) for path, own in parse_json(content)["files"]]
    except (KeyError, TypeError, ValueError):  # it is damaged
        return
    if changes := describe_changes(before, find_record()):
        raise RunError(f"{changes}, {remedy}.")


def describe_changes(before: Sequence[FileRecord], now: Sequence[FileRecord]) -> str:
    """Say which files of a text have changed, are new, or are gone; empty: the text is the same, moved or not."""
    old, new = dict(before), dict(now)
    if [*old.values()] == [*new.values()]:
        return ""
    changed = [path for path in new if old.get(path, new[path]) != new[path]]
    others = {*old.values()}, {*new.values()}
    come, gone = [path for path in new if path not in old], [path for path in old if path not in new]
    if changed or others[0] != others[1]:  # else files have only other names, or there is one more of the same
        come = [path for path in come if new[path] not in others[0]]
        gone = [path for path in gone if old[path] not in others[1]]
    named = {_name(path) for path in come} & {_name(path) for path in gone}  # of a text, or another one, elsewhere
    other, former = ([path for path in paths if _name(path) in named] for paths in (come, gone))
    come, gone = ([path for path in paths if _name(path) not in named] for paths in (come, gone))
    told = ((changed, "has changed", "have changed"), (come, "is new", "are new"), (gone, "is gone", "are gone"))
    said = [f"{name_some(paths)} {many if len(paths) > 1 else one}" for paths, one, many in told if paths]
    if other:
        said.append(f"{name_some(other)} {'differ' if len(other) > 1 else 'differs'} from {name_some(former)}")
    first = next((path for path, was in zip(new, old, strict=False) if new[path] != old[was]), "")
    return "; ".join(said) or f"the files come in another order, from {first} on"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def name_some(paths: Sequence[str]) -> str:
    """Name the first of some files, and how many more there are."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"
