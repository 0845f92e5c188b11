"""A sample of a corpus, read in this process, without Ray or a hash of the content: what it tells is told at once.

Enters: `--corpus`. Leaves: documents from places at equal distances over it. Before a run it is checked for mistakes,
and what is left in it of another form (tags, escapes, characters read wrongly) is told as notes, and not refused: code
and web pages are texts, too. A dry run also estimates rows from it (`corpus.estimate`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from domext_ray.config.mixture import DOMAIN, TextPart
from domext_ray.config.pretrain import PrepareConfig, RunOptions
from domext_ray.errors import CorpusError
from domext_ray.text.data.documents import read_grouped, require_fields
from domext_ray.text.data.dropped import Dropped
from domext_ray.text.data.files import LOCAL, PACKAGE_DOCS, TEXT, SourceFile, find_files
from domext_ray.text.data.folders import say
from domext_ray.text.data.groups import ALL_KINDS, PEOPLE, tell_groups
from domext_ray.text.data.package_docs import write_docs
from domext_ray.text.data.sources import ReadTask, cut_tasks
from domext_ray.text.data.tables import tell_forms

PLACES, REMOTE_PLACES = 32, 8
PLACE_BYTES, GLANCE_BYTES = 2**18, 2**15
"""Read of a file of lines at a place, and characters taken of it, about; the lesser one where only mistakes count."""
WHOLE_BYTES = 64 * 2**20
"""A file that cannot be cut (compressed text, Parquet) and is larger is never read to its end."""

_WINDOWS = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
"""How Windows-1252 reads bytes from 0x80 to 0x9f."""
_REMAINS = (
    (
        "UTF-8 that was read as Latin-1 (Ã©, â€™): ftfy FILE -o NEW mends it",
        re.compile(rf"Ã[\u0080-\u00bf{_WINDOWS}]|â€|Â[\u00a0-\u00bf]|ï»¿"),
    ),
    ("U+FFFD, where a character was lost: make the text anew from its source", re.compile("\ufffd")),
    (
        "tags or entities of HTML or XML (</p>, &amp;): take them out",
        re.compile(
            r"</[a-zA-Z][\w:.-]*>|<[a-zA-Z][\w:.-]*(?: [\w:.-]+=\"[^\"<>]*\")*\s?/>|<[a-zA-Z][\w:.-]* [\w:.-]+=[\"'\w]"
            r"|<(?:br|p|li|hr)>|&(?:amp|lt|gt|quot|apos|nbsp|#\d{2,6}|#x[0-9a-fA-F]{2,6});"
        ),
    ),
    (
        r"escapes (\n, \", \u00e9) in place of what they stand for: decode them",
        re.compile(r'\\[nrt](?![a-z])|\\"|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}'),
    ),
    ("ligatures of a PDF (ﬁ, ﬂ): write them as letters", re.compile("[\ufb00-\ufb06]")),
    ("a word that a line's end has cut (exam-): join lines before", re.compile(r"[a-z]-\Z")),
    (
        r"commands of LaTeX (\cite{…}): run pandoc -f latex -t plain --wrap none FILE > NEW.txt",
        re.compile(
            r"\\(?:begin|end|(?:sub)*section|chapter|cite[pt]?|ref|label|emph|text(?:bf|it)|footnote|usepackage"
            r"|documentclass)\*?(?:\[[^\]]*\])*\{|\\item\b"
        ),
    ),
    (
        "marks of a wiki ([[…]], {{cite|…}}): run pandoc -f mediawiki -t plain --wrap none FILE > NEW.txt",
        re.compile(r"\[\[[^\[\]\n]+\]\]|\{\{[A-Za-z][^{}\n]*\|"),
    ),
    (
        "times of subtitles (00:01:02,000 -->): keep the lines between them alone",
        re.compile(r"\d\d:\d\d[,.]\d{3} --> (?:\d+:)?\d\d:\d\d"),
    ),
    (
        "headers or codes of e-mails (Content-Type:, =20): export the messages as plain text",
        re.compile(
            r"(?m)^(?:Message-ID|MIME-Version|Content-Type|Content-Transfer-Encoding|Received|Return-Path"
            r"|DKIM-Signature): |^(?:From|To|Cc): [^\n@]*\w@\w|=(?:20|3D|C3=[89AB][0-9A-F]|E2=80=9[0-9A-F])|[a-z]=$"
        ),
    ),
    (
        "records of a reference manager (PMID- 1, TI  - …, @article{…): export a table, or keep the abstracts alone",
        re.compile(
            r"(?m)^(?:PMID- \d|(?:T[IY1]|A[BU]|N2|FAU) {1,2}- \S|@(?:article|book|in[a-z]{8,}|misc|[a-z]*thesis) ?\{"
            r"|(?:title|abstract|author) *= *[{\"])"
        ),
    ),
    (
        "a value as Python or JSON spells it (b'…', ['…'], nan) in place of its text: take the text out",
        re.compile(
            r"(?:nan|NaN|None|null|NULL|<NA>)\Z"
            r"""|b(['"]).*\1\Z|\[(['"]).*\2\]\Z|\{"[^"]+": .*\}\Z|"[^"]*(?:\\.[^"]*)+"\Z"""
        ),
    ),
)
"""What is told, with its cure, and how it is found; the last one is a whole text."""
_REMAINS_FRAC, _FEWEST_REMAINS = 0.05, 3
"""Texts that have something by chance, or because they are about it, are fewer."""
_FEWEST_LINES, _CUT_FRAC = 20, 1 / 3
"""Lines that show whether a program has cut them, and the share that goes on in the next line if it has."""
_MOST_WIDTH, _NEAR_WIDTH, _NEAR_FRAC = 200, 0.75, 0.9
"""Characters of a line that was cut at a width, how full each is of the widest, and the share that is so full."""

ItemT = TypeVar("ItemT")


@dataclass
class SampledPlace:
    """What was read at a place of a corpus."""

    documents: list[str] = field(default_factory=list)  # the first of those that were read
    groups: bytearray = field(default_factory=bytearray)  # hashes of their groups, joined; see `read_grouped`
    files: list[tuple[str, int]] = field(default_factory=list)  # the path of each, and how many of these documents
    num_chars: int = 0  # of what was read to its end
    num_bytes: int = 0  # of that


@dataclass(frozen=True)
class Sample:
    """A sample of a corpus, and which corpus that is."""

    spec: str  # as the user named it
    prepare: PrepareConfig  # how it becomes rows
    files: Sequence[SourceFile]  # all of the corpus's
    places: Sequence[SampledPlace]
    dropped: Dropped

    @property
    def frac(self) -> float:
        """Share of the corpus's bytes that was read to its end, 0 to 1."""
        return sum(place.num_bytes for place in self.places) / sum(file.size for file in self.files)

    @property
    def documents(self) -> list[str]:
        """The documents of all places, in order."""
        return [document for place in self.places for document in place.documents]

    @property
    def named(self) -> Iterator[tuple[str, str]]:
        """The documents, each behind the path of its file."""
        for place in self.places:
            paths = (path for path, number in place.files for _ in range(number))
            yield from zip(paths, place.documents, strict=True)

    @property
    def is_whole(self) -> bool:
        """Whether these are all documents of the corpus."""
        return self.frac == 1 and all(sum(map(len, place.documents)) == place.num_chars for place in self.places)


def check_corpus(spec: str, prepare: PrepareConfig, *, to_end: bool = False) -> Sample:
    """Read a sample of a corpus and refuse what it shows to be a mistake.

    With `to_end`, for an estimate, more is read: package documentation, and files that cannot be cut, to their end.
    """
    files, repeated = find_files(spec)
    for file in files:
        require_fields(file, prepare)
    if repeated:
        say(f"--corpus names {repeated[0]} more than once; it is read once")
    files = [*map(write_docs, files)] if to_end else files
    sample = read_sample(spec, prepare, files, to_end=to_end)
    tell_forms(sample.dropped.forms)
    if all(file.kind != PACKAGE_DOCS for file in files):  # which are about tags and escapes, too
        tell_remains(sample.spec, sample.named)
    if prepare.document == "line":
        tell_cut_lines(sample)
    dropped, documents = sample.dropped, sample.documents
    has_docs = any(file.kind == PACKAGE_DOCS for file in files)  # which are text
    if sample.frac == 1 or (
        dropped.num_not_text == dropped.count_rows(len(documents)) and not has_docs
    ):  # else only a reading of all of it says which share holds no text
        dropped.require_text(spec, len(documents), prepare, is_sample=sample.frac < 1)
    num_documents = len(set(documents))
    if sample.frac == 1 and num_documents < 2:
        found = Dropped(dropped.counts + Counter(duplicate=len(documents) - num_documents), dropped.places)
        raise CorpusError(
            f"--corpus {spec!r} has {num_documents or 'no'} usable document (dropped: "
            f"{'; '.join(found.describe(prepare)) or 'nothing else is there'}), and training and evaluation need one "
            "each; give more text, or a finer --prepare.document."
        )
    return sample


def tell_remains(spec: str, texts: Iterable[tuple[str, str]]) -> None:
    """Say on standard error, once a process, what many texts of a sample have, each given with the path of its file."""
    counts, first, num_texts = [0] * len(_REMAINS), [""] * len(_REMAINS), 0
    for path, text in texts:
        num_texts += 1
        for i, (_, pattern) in enumerate(_REMAINS):
            if pattern.match(text) if i == len(_REMAINS) - 1 else pattern.search(text):
                counts[i] += 1
                first[i] = first[i] or path
    for (what, _), number, path in zip(_REMAINS, counts, first, strict=True):
        if number >= max(_FEWEST_REMAINS, _REMAINS_FRAC * num_texts):
            say(
                f"{number:,} of {num_texts:,} texts of {spec!r} that were looked at have {what}, unless they "
                f"are meant; the first is in {path}"
            )


def tell_cut_lines(sample: Sample) -> None:
    """Say on standard error that lines, each a document, were cut at a width: what they end with goes on in the next.

    Lines that have no full stop and no capitals may be texts of their own; they are not all about as long.
    """
    paths = {file.path for file in sample.files if file.kind == TEXT}
    lines = [(path, text) for path, text in sample.named if path in paths]
    pairs = [(path, line, after) for (path, line), (own, after) in itertools.pairwise(lines) if path == own]
    cut = [
        (path, len(line))
        for path, line, after in pairs
        if (line[-1].isalpha() or line[-1] in ",-") and after[0].isalpha() and not after[0].isupper()
    ]
    if len(cut) < max(_FEWEST_LINES, _CUT_FRAC * len(pairs)):
        return
    widths = sorted(width for _, width in cut)
    widest = widths[len(widths) * 19 // 20]
    if widest <= _MOST_WIDTH and sum(width >= _NEAR_WIDTH * widest for width in widths) >= _NEAR_FRAC * len(widths):
        say(
            f"{len(cut):,} of {len(pairs):,} lines of {sample.spec!r} that were looked at go on in the next line, as "
            f"where a program cuts text at about {widest} characters, and each is a document; if blank lines "
            "part paragraphs, set --prepare.document blank_line, else join the lines before; the first is in "
            f"{cut[0][0]}"
        )


def tell_owners(sample: Sample, config: RunOptions, part: TextPart, *, is_begun: bool = False) -> None:
    """Tell which field of a run's text seems to say whose a row is, where no option does: see `tell_groups`.

    A run that `is_begun` has its words already.
    """
    learned = config.vocab.learned_by if part.name == DOMAIN and not is_begun else ""
    values, prepare = sample.dropped.values, config.prepare
    tell_groups(values, part.corpus, prepare, option=part.option, learned=learned, is_general=part.keep)


def read_sample(spec: str, prepare: PrepareConfig, files: Sequence[SourceFile], *, to_end: bool = False) -> Sample:
    """Read documents at some places of a corpus; `to_end` as of `check_corpus`."""
    size, read = PLACE_BYTES, files
    if not to_end:
        size, read = GLANCE_BYTES, [file for file in files if file.kind != PACKAGE_DOCS]
    tasks, number = [*cut_tasks(read, replace(prepare, shard_bytes=size))], PLACES
    if any(file.scheme not in LOCAL for file in read) and not to_end:
        tasks, number = [replace(task, files=task.files[:1]) for task in tasks], REMOTE_PLACES
    dropped = Dropped(watched=PEOPLE if to_end else ALL_KINDS)  # to the end the others would cost time
    places = [_read_place(task, prepare, dropped, size, to_end=to_end) for task in choose_evenly(tasks, number)]
    return Sample(spec, prepare, files, places, dropped)


def choose_evenly(items: Sequence[ItemT], number: int) -> Sequence[ItemT]:
    """Return so many of some items, from the first to the last at equal distances."""
    if len(items) <= number:
        return items
    return [items[i * (len(items) - 1) // (number - 1)] for i in range(number)]


def _read_place(task: ReadTask, prepare: PrepareConfig, dropped: Dropped, size: int, *, to_end: bool) -> SampledPlace:
    """Read the beginning of a task: of a range of a file so many bytes, of files as many as have enough text."""
    place, num_taken = SampledPlace(), 0
    if task.end >= 0:
        task = replace(task, end=min(task.end, task.start + size))
    for file in task.files:
        if num_taken >= size:
            break
        num_documents, num_chars, is_all = len(place.documents), 0, True
        for document, group in read_grouped(replace(task, files=(file,)), prepare, dropped):
            num_chars += len(document)
            if num_taken < size:
                place.documents.append(document)
                place.groups += group
                num_taken += len(document)
            elif not to_end or file.size > WHOLE_BYTES:
                is_all = False
                break
        place.files.append((file.path, len(place.documents) - num_documents))
        if is_all:
            place.num_chars += num_chars
            place.num_bytes += file.size if task.end < 0 else task.num_bytes
    return place
