"""A split of a described set -> numbered blocks of examples, as an input that can be scored.

Enters: what describes the set, where it is, and which split. Leaves: an input like that of files (`InputPlan`), whose
rows are examples already. A set that has no other split than this one is enough: nothing is learned from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from domext_ray.errors import ConfigError, CorpusError
from domext_ray.families.described_sets import find_set
from domext_ray.families.readers.examples import Example, RawSentence
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.families.readers.words import NO_MARKS, WordMarks
from domext_ray.families.sets import hash_by_file, read_split
from domext_ray.families.tagging import cut_again
from domext_ray.inference.input_plan import Block, BlockInput, cut_rows, take_rows
from domext_ray.inference.input_rows import TEXT_FIELD, InputRow
from domext_ray.text.data.sources import FileRecord


@dataclass(frozen=True)
class LabelledInput(BlockInput):
    """A split of a set."""

    task: str  # what the user called the set
    description: SetDescription
    split: str  # train, dev or test
    strict: bool  # a row that breaks a rule of its set is an error; else it is left out and counted
    notes: tuple[str, ...]  # one sentence for every thing that was counted instead of refused
    marks: WordMarks  # by which the model cuts running text

    def read(self) -> tuple[Example, ...]:
        """Return the examples, with the words that the model cuts; refuse them if others were counted."""
        examples = read_split(self.description, self.split, strict=self.strict)[0]
        if _hash_examples(examples) != self.sha256:
            raise CorpusError(
                f"--input {self.description.data!r} changed while it was read; start again when nothing writes to it."
            )
        if not self.marks:
            return examples
        return tuple(
            cut_again(example, self.marks) if isinstance(example, RawSentence) else example for example in examples
        )

    def require_pairs(self) -> None:
        """Refuse examples without a second text: the model has learned from pairs of texts."""
        singles = [example.source for example in self.read() if getattr(example, "pair", None) is None]
        if singles:
            raise CorpusError(
                f"{len(singles):,} of {self.num_rows:,} examples of {self.split} have no second text (the first is "
                f"{singles[0]}), and the model has learned from pairs of texts; set columns.pair in "
                f"{self.description.yaml} to the column that has them, or take these rows out."
            )

    def list_files(self) -> list[FileRecord]:
        return hash_by_file(_list_lines(self.read()))

    def make_reader(self) -> Callable[[Block], list[InputRow]]:
        """Return what gives the rows of blocks."""
        examples = self.read()
        return lambda block: [_make_row(example) for example in take_rows(examples, block)]

    def describe(self) -> str:
        """Return what a dry run says of it."""
        return f"{self.num_rows:,} examples of {self.split}"


def plan_labelled(
    task: str, data: str, split: str, block_rows: int, *, strict: bool, marks: WordMarks = NO_MARKS
) -> LabelledInput:
    """Read a split of a set and cut it into blocks; see `LabelledInput`."""
    try:
        description = find_set(task, data)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--data", "--input")) from error
    try:
        examples, notes = read_split(description, split, strict=strict)
    except CorpusError as error:
        raise CorpusError(str(error).replace("--labelled.strict", "--strict")) from error
    blocks, sha256 = cut_rows(examples, block_rows), _hash_examples(examples)
    return LabelledInput(blocks, sha256, task, description, split, strict, notes, marks)


def _hash_examples(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for _, line in _list_lines(examples):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _list_lines(examples: Iterable[Example]) -> Iterator[tuple[str, str]]:
    """Each example's file, and what it is, wherever it was read."""
    for example in examples:
        values = asdict(example)
        del values["source"], values["path"]
        yield example.path, str(values)


def _make_row(example: Example) -> InputRow:
    return InputRow(example.id, example.source, 0, {TEXT_FIELD: example.shown}, example=example)
