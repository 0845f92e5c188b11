"""A benchmark's unlabelled test file -> the file of predictions that its server takes (GLUE, CBLUE).

Enters: the name of the server's file, such as QNLI.tsv, and the benchmark's own test file. Leaves: its rows, read by
the columns of the set that ships, and that file, with an answer to every row in their order.

    GLUE    a table of index and prediction between tabs; labels are the set's own words
    CBLUE   the rows of the test file with their answers, as its format checkers want them
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from domext_ray.errors import ConfigError, CorpusError
from domext_ray.families.described_sets import list_shipped, read_description
from domext_ray.families.readers.cells import as_offset
from domext_ray.families.readers.set_description import SetDescription
from domext_ray.inference.input_plan import Block, BlockInput, cut_rows, name_input, take_rows
from domext_ray.inference.input_rows import MAX_ROW_BYTES, InputRow
from domext_ray.storage import Place, parse_json, write_text
from domext_ray.text.data.files import find_files, name_unreadable, open_stream
from domext_ray.text.data.names import describe_near, pick_near
from domext_ray.text.data.readers import part_values, read_rows

Values = Mapping[str, Any]
_ROLES = ("text", "pair")
_INDICES = ("index", "idx")
"""What GLUE and `datasets` call the column of a row's place."""


def _add_label(row: Values, record: Values) -> dict[str, Any]:
    return {**row, "label": record["label"]}


def _add_entities(row: Values, record: Values, last: int) -> dict[str, Any]:
    """`last`: what is added to an entity's exclusive end."""
    entities = [
        {"start_idx": span["start"], "end_idx": span["end"] + last, "type": span["label"], "entity": span["text"]}
        for span in record["entities"]
    ]
    return {"text": row["text"], "entities": entities}


def _add_triples(row: Values, record: Values) -> dict[str, Any]:
    triples = [
        {
            "predicate": relation["label"],
            "subject": relation["head"]["text"],
            "subject_type": relation["head"]["label"],
            "object": {"@value": relation["tail"]["text"]},
            "object_type": {"@value": relation["tail"]["label"]},
        }
        for relation in record["relations"]
    ]
    return {"text": row["text"], "spo_list": triples}


def _add_terms(row: Values, record: Values) -> dict[str, Any]:
    return {"text": row["text"], "normalized_result": "##".join(record["terms"])}


def _answer(row: Values, record: Values) -> str:
    """GLUE's cell; the similarity of STS-B is 0 to 5."""
    return str(record["label"]) if "label" in record else f"{min(5.0, max(0.0, record['value'])):.3f}"


_GLUE = {"CoLA": "cola", "SST-2": "sst2", "MRPC": "mrpc", "STS-B": "sts_b", "QQP": "qqp", "MNLI-m": "mnli"}
_GLUE |= {"MNLI-mm": "mnli", "AX": "mnli", "QNLI": "qnli", "RTE": "rte"}
_LABELS = {"CHIP-CTC": "chip_ctc", "CHIP-STS": "chip_sts"}
_LABELS |= {f"KUAKE-{name}": f"kuake_{name.lower()}" for name in ("QIC", "QQR", "QTR")}
SUBMISSIONS: Mapping[str, tuple[str, Callable[[Values, Values], Any]]] = {
    **{f"{name}.tsv": (own, _answer) for name, own in _GLUE.items()},
    **{f"{name}_test.json": (own, _add_label) for name, own in _LABELS.items()},
    "CMeEE_test.json": ("cmeee", partial(_add_entities, last=-1)),
    "CMeEE-V2_test.json": ("cmeee", partial(_add_entities, last=0)),
    "CMeIE_test.jsonl": ("cmeie", _add_triples),
    "CMeIE-V2_test.jsonl": ("cmeie", _add_triples),
    "CHIP-CDN_test.json": ("chip_cdn", _add_terms),
}
"""By the name of a server's file the set that it is about, and what it says of a row."""


@dataclass(frozen=True)
class SubmissionInput(BlockInput):
    """A benchmark's test file."""

    name: str  # of the server's file
    rows: tuple[Values, ...]  # as they are
    examples: tuple[InputRow, ...]  # what the model reads of each

    def make_reader(self) -> Callable[[Block], list[InputRow]]:
        """Return what gives the rows of blocks."""
        return lambda block: list(take_rows(self.examples, block))

    def describe(self) -> str:
        """Return what a dry run says of it."""
        return f"{self.num_rows:,} rows for {self.name}"


def check_submission(name: str, task: str) -> None:
    """Refuse a file that no server takes, and a task beside one, which its name says; an empty name is none."""
    if name and name not in SUBMISSIONS:
        near = describe_near(pick_near(name, SUBMISSIONS)) or f"it must be one of {', '.join(SUBMISSIONS)}."
        raise ConfigError(f"--submission is {name!r}; {near}")
    if name and task:
        raise ConfigError(f"--task is {task!r}; it must be empty with --submission.")


def plan_submission(name: str, spec: str, family: str, labels: Sequence[str], block_rows: int) -> SubmissionInput:
    """Read a benchmark's test file, `spec`, for a model's family and the labels that it predicts."""
    description = read_description(list_shipped()[SUBMISSIONS[name][0]])
    if family != description.task:
        raise ConfigError(f"--submission is {name!r}, which is {description.task}; the model's task is {family}.")
    strange = [label for label in labels if description.labels and label not in description.labels]
    if strange:
        known = ", ".join(description.labels)
        raise ConfigError(f"--submission is {name!r}, whose labels are {known}; the model predicts {strange[0]!r}.")
    path, rows = _read_rows(spec, description)
    roles = (part_values(_name_roles(row, description)) for row in rows)
    examples = tuple(InputRow(str(i), path, i + 1, values) for i, values in enumerate(roles))
    for example in examples:
        blank = [role for role, value in example.values.items() if not isinstance(value, str) or not value.strip()]
        if blank:
            raise CorpusError(f"{path}: row {example.line} has no {blank[0]}; {name} needs a prediction of every row.")
    if name.endswith(".tsv"):
        rows = [_drop_index(row, i, path, name) for i, row in enumerate(rows)]
    digest = hashlib.sha256(json.dumps([name, rows], sort_keys=True).encode()).hexdigest()
    return SubmissionInput(cut_rows(rows, block_rows), digest, name, tuple(rows), examples)


def _read_rows(spec: str, description: SetDescription) -> tuple[str, list[Values]]:
    """Read the one file: an array of JSON, or what a corpus may be."""
    with name_input():
        files = find_files(spec, by_names=False)[0]
    if len(files) > 1:
        raise CorpusError(f"--input {spec!r} names {len(files)} files; --submission takes one, the test file.")
    (file,) = files
    with name_unreadable(file), open_stream(file) as stream:
        content = stream.read() if file.suffix == ".json" else b""
    if content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        try:
            found = parse_json(content)
        except ValueError as error:
            raise CorpusError(f"{file.path} is no JSON ({error}); give the benchmark's own test file.") from error
    else:
        columns = [name for names in description.columns.values() for name in names if isinstance(name, str)]
        read = read_rows(file, [*columns, *_INDICES], lambda *_: None, max_bytes=MAX_ROW_BYTES)
        found = []
        for row in read:
            if row.fault:
                raise CorpusError(f"{file.path}:{row.number}: the row {row.fault}; give the benchmark's own test file.")
            found += [] if row.value is None else [row.value]
    if not found or not all(isinstance(value, dict) for value in found):
        raise CorpusError(f"{file.path} is no list of rows with fields; give the benchmark's own test file.")
    return file.path, found


def _drop_index(row: Values, place: int, path: str, name: str) -> Values:
    """Return a row without its index, which must be its place."""
    index = next((row[key] for key in _INDICES if key in row), place)
    if as_offset(index) != place:
        raise CorpusError(
            f"{path}: row {place + 1} has the index {index!r}, and not {place}; {name} needs the benchmark's own test "
            "file, whole and in its order."
        )
    return {key: value for key, value in row.items() if key not in _INDICES}


def _name_roles(row: Values, description: SetDescription) -> dict[str, Any]:
    """What the set's columns call text and pair, under these names."""
    names = {role: map(str, description.columns[role]) for role in _ROLES if role in description.required}
    return {role: next((row[name] for name in own if name in row), None) for role, own in names.items()}


def write_submission(plan: SubmissionInput, records: Sequence[Values], folder: Place) -> Place:
    """Write the server's file into a folder, of what was predicted of each row."""
    answer = SUBMISSIONS[plan.name][1]
    answers = [answer(row, record) for row, record in zip(plan.rows, records, strict=True)]
    if plan.name.endswith(".tsv"):
        text = "".join(f"{index}\t{value}\n" for index, value in [("index", "prediction"), *enumerate(answers)])
    elif plan.name.endswith(".jsonl"):
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in answers)
    else:
        text = json.dumps(answers, ensure_ascii=False, indent=2) + "\n"
    write_text(folder / plan.name, text)
    return folder / plan.name
