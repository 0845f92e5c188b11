"""The files of a corpus -> read tasks.

Enters: `--corpus` (see `domext_ray.data.files`). Leaves: read tasks of bounded size whose documents come in one
canonical order, and a fingerprint of the content, which nothing is read for until somebody asks. A large file of lines
or row groups (Parquet) is cut into byte ranges whose places depend on its size alone, so neither the number of CPUs nor
their speed changes a row: a range has the lines, or the row groups, that begin in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from domext_ray.config.pretrain import PrepareConfig
from domext_ray.data.files import LINES, PARQUET, TEXT, SourceFile, find_files, fingerprint_files
from domext_ray.data.package_docs import write_docs
from domext_ray.storage import Place, Where, hash_text

MOST_TASKS = 4096
"""Read tasks of a corpus, by and large: beyond 32 GiB, with the usual --prepare.shard_bytes, they grow with it."""


@dataclass(frozen=True)
class ReadTask:
    """A part of a corpus that one task reads.

    Args:
        files: files read whole, in order; one file when it is a byte range.
        start: first byte of a range (0 for whole files); what begins before it is another task's.
        end: byte after the range; -1 for whole files.
    """

    files: tuple[SourceFile, ...]
    start: int = 0
    end: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes that the task reads."""
        return sum(each.size for each in self.files) if self.end < 0 else self.end - self.start


@dataclass(frozen=True)
class Sources:
    """A resolved corpus.

    Args:
        spec: what the user wrote.
        tasks: what to read, in canonical order.
        folder: where hashes of files are remembered; None: nowhere.
    """

    spec: str
    tasks: tuple[ReadTask, ...]
    folder: Place | None = None

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files, each once."""
        return tuple(dict.fromkeys(file for task in self.tasks for file in task.files))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the content, which is read for it the first time."""
        memory = self.folder / f".hashes-{hash_text(self.spec)[:16]}.json" if self.folder else None
        digest = hashlib.sha256()
        for file, own in zip(self.files, fingerprint_files(self.files, memory), strict=True):
            digest.update(json.dumps([file.kind, file.size]).encode() + own.encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.num_bytes for each in self.tasks)


def resolve_sources(spec: str, prepare: PrepareConfig, folder: Where | None = None) -> Sources:
    """Find the files of a corpus and cut them into read tasks; text that is there is not read.

    Args:
        spec: the `--corpus` option.
        prepare: says what a document is and how large a task may be.
        folder: of prepared corpora, where a job remembers what it has hashed and writes what stands for `package-docs`;
            None: nothing is remembered, and that is written to a cache of this machine.

    Raises:
        CorpusError: an entry that names nothing, a file of an unknown kind, or files that are all empty.
    """
    files = [write_docs(each, folder) for each in find_files(spec)[0]]
    return Sources(spec, tuple(cut_tasks(files, prepare, (*LINES, PARQUET))), Place(folder) if folder else None)


def cut_tasks(files: Sequence[SourceFile], prepare: PrepareConfig, kinds: Sequence[str] = LINES) -> Iterator[ReadTask]:
    """Cut large files of some kinds into ranges and join small files, in order."""
    task_bytes = max(prepare.shard_bytes, -(-sum(each.size for each in files) // MOST_TASKS))
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
