"""The corpus that every machine has: the prose of the docstrings in the installed Python packages.

No network is needed, and the text is a domain of its own (software documentation). A paragraph is a document; code
examples, tables, signatures and mark-up are left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from domext_ray.config.pretrain import RunOptions
from domext_ray.errors import AccessError
from domext_ray.storage import Place, find_cache, hash_values
from domext_ray.text.data.files import PACKAGE_DOCS, SourceFile

EXTRACTOR_VERSION = 2
MAX_FILE_BYTES = 2 * 2**20
"""Larger modules are generated tables."""
BYTES_PER_TOKEN = 6
"""Of the prose in JSONL, with a margin: four, and what is repeated."""
AHEAD_SECONDS = 120.0
"""How long a process that writes ahead is waited for, which takes seconds; then this one writes."""

_SKIPPED_FOLDERS = re.compile(r"(^|/)(tests?|testing|_vendor|vendored|node_modules)(/|$)|\.dist-info/|^\.\.")
# A string in triple quotes that is the first statement of a module, class or function.
_DOCSTRING = re.compile(
    rb"""(?:\A(?:\s*(?:\#[^\n]*)?\n)*|:[ \t]*(?:\#[^\n]*)?\n\s*)[rRuU]?(\"\"\"|\'\'\')(.*?)\1""", re.DOTALL
)
_ROLE = re.compile(r":[\w:.+-]+:`~?([^`<]+?)(?:\s*<[^`>]*>)?`")
_LITERAL = re.compile(r"``?([^`]+)``?_{0,2}")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)|https?://\S+")
_NOT_PROSE = re.compile(r"^\s*(>>>|\.\.\s|\$|\||\+[-=]|```|~~~|@|#!|[-=~^*]{3,}|:\w[\w ]*:|import |from \S+ import )")
_PARAMETER = re.compile(r"^\s*\*{0,2}\w[\w.]*\s*(\([^)]*\))?\s*:\s")
_ITEM = re.compile(r"([-*•]|\d+[.)])\s+")
_EMPTY_LINES = re.compile(r"\n[ \t]*\n")
# Packages that Ray ships are on the path of a job, which has imported it.
_WRITE = f"""import ray, sys, {__name__} as docs
docs.write_docs(docs.SourceFile(sys.argv[1], docs.PACKAGE_DOCS, 1), docs.Place(sys.argv[2]))"""
_ahead = dict[tuple[str, str], subprocess.Popen[bytes]]()
"""Processes that write ahead, by entry and folder."""


@functools.cache
def _index_distributions() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Version and Python files of every installed distribution, by name, without tests, vendored code and tables."""
    index: dict[str, tuple[str, tuple[str, ...]]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if not name or name.lower().replace("-", "_") == "domext_ray" or name.lower() in index:
            continue
        files = []
        for file in distribution.files or []:
            path = file.as_posix()
            if not path.endswith(".py") or _SKIPPED_FOLDERS.search(path):
                continue
            located = Path(str(file.locate()))
            num_bytes = file.size or (located.stat().st_size if located.exists() else 0)
            if 0 < num_bytes <= MAX_FILE_BYTES:
                files.append(str(located))
        if files:
            index[name.lower()] = (distribution.version, tuple(sorted(files)))
    return dict(sorted(index.items()))


def count_wanted(config: RunOptions) -> int | None:
    """Return the megabytes of prose that a run can use, up to its horizon; None: all, as where words are learned."""
    train, held_out_frac = config.train, config.prepare.held_out_frac
    longest = train.lengths[-1]
    steps = 0 if train.epochs else max(train.max_steps, config.optim.decay_steps)
    limits = [limit for limit in (steps * train.global_batch_size * longest, train.max_tokens) if limit]
    tokens = max(min(limits, default=0) / (1.0 - held_out_frac), train.eval_rows * longest / held_out_frac)
    megabytes = math.ceil(tokens * BYTES_PER_TOKEN / 1e6)
    return None if config.vocab.size or not limits or megabytes > 1000 else megabytes  # more than any machine has


@contextlib.contextmanager
def write_ahead(entry: str, folder: Place) -> Iterator[None]:
    """Write the prose of an entry of `--corpus` in a process of its own, while what is inside prepares to read it.

    `write_docs` waits for that process. One that fails has written nothing, and `write_docs` tries by itself.
    """
    command = [sys.executable, "-c", _WRITE, entry, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _ahead[entry, str(folder)] = process
    try:
        yield
    finally:
        _ahead.pop((entry, str(folder)), None)
        process.kill()
        process.wait()


def write_docs(file: SourceFile, folder: Place | None = None) -> SourceFile:
    """Return the file that the prose is in, if it is what a file stands for; else that file.

    It is JSONL, an object with the field `text` a line, in the order of the packages' names, and ends at the megabytes
    that are named. Its own name has all that decides its content. It is in `folder`, where all nodes read it, or in a
    cache of this machine.
    """
    if file.kind != PACKAGE_DOCS:
        return file
    limit = file.path.partition(":")[2] or "all"
    versions = {name: version for name, (version, _) in _index_distributions().items()}
    key = hash_values({"extractor": EXTRACTOR_VERSION, "versions": versions})[:16]
    place = (folder or Place(find_cache())) / f"{PACKAGE_DOCS}-{limit}-{key}.jsonl"
    if (process := _ahead.pop((file.path, str(folder)), None)) is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(AHEAD_SECONDS)
    if not place.is_file():
        lines, size = list[bytes](), 0
        for paragraph in read_paragraphs():
            if limit != "all" and size >= int(limit) * 10**6:
                break
            lines.append(json.dumps({"text": paragraph}, ensure_ascii=False).encode() + b"\n")
            size += len(lines[-1])
        place.put(b"".join(lines))
    info = place.info()
    assert info is not None
    scheme, _, path = str(place).rpartition("://")
    return SourceFile(path, PACKAGE_DOCS, info.size, scheme, round(info.modified * 1e9))


def read_paragraphs() -> Iterator[str]:
    """Yield the prose paragraphs of all docstrings, package by package and file by file."""
    for _, files in _index_distributions().values():
        for path in files:
            try:
                source = Place(path).read_bytes()
            except (FileNotFoundError, AccessError):  # its package's record names it, and it is not there for this user
                continue
            for match in _DOCSTRING.finditer(source):
                yield from extract_prose(match[2].decode("utf-8", errors="ignore"))


def extract_prose(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring that read as prose, their mark-up removed."""
    for block in split_blocks(docstring):
        prose = _strip_markup(block)
        if _reads_as_prose(prose):
            yield prose


def split_blocks(docstring: str) -> Iterator[str]:
    """Yield paragraphs, list items and descriptions of parameters, each on a line with its mark-up."""
    first, _, rest = docstring.partition("\n")
    text = first.strip() + "\n" + textwrap.dedent(rest.expandtabs())
    fenced = False
    for paragraph in _EMPTY_LINES.split(text):
        lines = []
        for line in paragraph.split("\n"):
            is_fence = line.strip().startswith("```")
            fenced ^= is_fence
            if line.strip() and (is_fence or not fenced):
                lines.append(line)
        yield from _split_items(lines)


def _split_items(lines: list[str]) -> Iterator[str]:
    """Cut a paragraph at list items and parameters; lines that are no prose end a block."""
    block: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith(">>>"):  # what follows is the example's output
            break
        is_prose, parameter, item = not _NOT_PROSE.match(line), _PARAMETER.match(line), _ITEM.match(stripped)
        if parameter or item or not is_prose:
            if block:
                yield " ".join(block)
            block = []
            if parameter:  # "name: what it is", or "name : type" with what it is on the next line
                stripped = "" if parameter[0].endswith(" : ") else line[parameter.end() :].strip()
                item = _ITEM.match(stripped)
            elif not is_prose:
                continue
            stripped = stripped[item.end() :] if item else stripped
        if stripped:
            block.append(stripped)
    if block:
        yield " ".join(block)


def _strip_markup(text: str) -> str:
    has_marks = "`" in text  # which most text has not, and looking for more takes longer
    text = _ROLE.sub(r"\1", text) if has_marks else text
    text = _LINK.sub(lambda match: match[1] or "", text) if "](" in text or "http" in text else text
    text = _LITERAL.sub(r"\1", text) if has_marks else text
    return text.replace("**", "").replace("\\", "")


def _reads_as_prose(text: str) -> bool:
    if not text.endswith((".", "!", "?", ":")):
        return False
    words = text.split()
    if len(words) < 6:
        return False
    plain = sum([word.strip(".,;:!?()'\"").isalpha() for word in words])
    return plain / len(words) > 0.75
