"""Tables, JSON, CoNLL, SQuAD and brat -> records.

Enters: .csv (quoted), .tsv and .txt (tabs; quotes are literal, as in GLUE, unless cells show that they are quoted),
.json (a list of objects, or an object of objects by id; CBLUE, PubMedQA), .jsonl, .parquet; CoNLL files (a word and its
tag a line, tab or white space between, a blank line between sentences, -DOCSTART- between documents); SQuAD v1.1 and
v2.0 JSON (and CMRC 2018, which has its layout); folders of brat. Leaves: one `Record` a row. A file of another layout
is refused.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from domext_ray.errors import CorpusError, name_file
from domext_ray.families.readers.cells import shorten
from domext_ray.families.readers.columns import find_missing, lacks_column, require_one_each
from domext_ray.families.readers.issues import DataIssues, Record
from domext_ray.families.readers.offsets import GAPS
from domext_ray.families.readers.set_description import Column, SetDescription
from domext_ray.families.readers.tagged import is_tag
from domext_ray.families.readers.word_rows import TAG_NAMES, find_word_columns, join_word_rows
from domext_ray.files import walk
from domext_ray.storage import Place, is_pointer
from domext_ray.text.data.files import (
    HEAD_BYTES,
    PARQUET,
    RECODE,
    SourceFile,
    find_foreign,
    find_suffix,
    part_words,
    require_lines,
    require_text,
)
from domext_ray.text.data.line_forms import ITEMS, LINES, part_json_words, require_json_lines
from domext_ray.text.data.readers import read_columns, read_objects
from domext_ray.text.data.tables import Forms, read_cells, tell_forms

_LINES = (".jsonl", ".ndjson")
_LONGEST = 2**30
"""Bytes of a line, characters of a cell: labelled files are read whole, however long their rows are."""
_DOCUMENT_START = "-DOCSTART-"
_ANNOTATOR = {"classes", "annotations"}
"""What NER Annotator (tecoholic's, for spaCy) has beside its texts, and these."""
_COMMENTS = ("# ", "#\t")
_WEBANNO = "#FORMAT=WebAnno"
_NUMBER = re.compile(r"\d+(?:[-.]\d+)?")
"""What stands before a word of CoNLL-U: its number, or those of a range of words (du: 3-4) or of an empty node."""
_LABEL_NAMES = ("label", "labels", "class", "category", "target")
_MOST_WORDS = 500
"""Of a file that is a single sentence: one of more has no blank lines."""
_IS_CSV = (
    "has commas between its cells, as a CSV; write a word, a tab and its tag a line, a blank line after a sentence, or "
    "name it .csv and begin it with a row of names, such as sentence_id,word,tag"
)
_SPACES = re.compile("[ \\r\\f\\v]+")
"""Between cells; a space of another kind, such as U+00A0 or U+3000, is part of a word."""
_BRAT = (".txt", ".ann")
_BRAT_ENTITY = re.compile(r"T\S*\t(\S+) (\d+ \d+(?:;\d+ \d+)*)\t(.*)")


def read_text(path: Path, *, has_words: bool = False) -> str:
    """Return a file's text without byte-order mark, decompressed when its name ends in .gz; it must be UTF-8.

    U+200B is a space, unless the file has its words apart.
    """
    try:
        content = Place(path).read_bytes()
        if path.suffix == ".gz" and not is_pointer(content):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read ({' '.join(str(error).split())}); replace it.") from None
    require_text(str(path), content[:HEAD_BYTES])
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise CorpusError(f"{path}:{line} is not UTF-8 (byte 0x{byte:02x}); {RECODE}.") from None
    return text if has_words else part_words(text)


def split_lines(text: str) -> list[str]:
    r"""Cut a text at \n (and \r\n) only: U+2028 and the like are part of a text."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def read_records(path: Path, description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield the rows of a table or of a JSON file, by its ending.

    The description says which columns there are, hence whether a table has a header; rows of another width are counted.
    """
    kind = find_suffix(str(path))
    if fault := find_foreign(str(path)):
        raise CorpusError(f"{path} {fault}.")
    if kind in (".json", *_LINES):
        names = [name for columns in description.columns.values() for name in columns if isinstance(name, str)]
        yield from read_json_records(path, names)
    elif kind in (".tsv", ".txt", ".tab", ".csv"):
        yield from _name_cells(path, description, issues)
    elif kind == ".parquet":
        yield from _read_parquet(path)
    else:
        read_text(path)  # what is no text is refused as what it is
        raise CorpusError(
            f"{path} is of no known kind; name it .csv, .tsv, .json or .jsonl (.gz may follow), or .parquet, by what "
            "it holds, or write its rows as one of these."
        )


def _require_no_json(path: Path, text: str) -> None:
    """Refuse JSON Lines in a file whose name ends as that of a table."""
    line = text.lstrip(" \t\r\n").partition("\n")[0]
    if line.startswith("{") and line.rstrip().endswith("}") and _is_json_lines(line):
        raise CorpusError(f"{path} is JSON Lines, and such a file's name must end in .jsonl; rename it.")


def read_json_records(path: Path, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the objects of a JSON list, of JSON Lines, or of an object by id (which becomes the value "id")."""
    text = read_text(path)
    rest = text.lstrip(" \t\r\n")
    has_lines = find_suffix(str(path)) in _LINES
    head = rest[:HEAD_BYTES].encode()
    require_json_lines(str(path), head, fields, taken=() if has_lines else (ITEMS, LINES))
    if has_lines:
        require_lines(str(path), head)
    if has_lines or (rest.startswith("{") and _is_json_lines(rest)):
        yield from _read_json_lines(path, text)
    elif rest:
        rows: Any = parse_document(path, text)
        if not isinstance(rows, (list, dict)):
            what = "the file must be a list of objects or one object a line"
            raise CorpusError(f"{path} has another layout: {what}, but {shorten(rows, 40)} is there.")
        if isinstance(rows, dict) and rows.keys() != _ANNOTATOR:
            for key, value in _require_different_keys(path, rows).items():
                place = f"[{key!r}]"
                yield Record({"id": key, **_require_object(value, path, place)}, str(path), place)
            return
        within = ""
        if isinstance(rows, dict):
            rows, within = _require_different_keys(path, rows)["annotations"], "annotations"
        for number, value in enumerate(list_items(path, rows, within)):
            if value is None and within:  # a text that nobody has annotated, which is not there either
                continue
            place = f"{within}[{number}]"
            yield Record(_require_object(value, path, place), str(path), place)


class Repeating(dict[str, Any]):
    """An object of JSON that has a key twice."""

    key: str


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    repeating = Repeating(made)
    ((repeating.key, _),) = Counter(key for key, _ in pairs).most_common(1)
    return repeating


def parse_document(path: Path, text: str) -> Any:
    """Return what a whole file of JSON says; a CorpusError says that it is none."""
    try:
        return json.loads(part_json_words(text), object_pairs_hook=_make_object)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{path}:{error.lineno} is no JSON ({error.msg}); mend the file.") from None
    except RecursionError:
        raise CorpusError(f"{path} is nested too deeply; mend the file.") from None
    except ValueError:
        number = re.search(rf"\d{{{sys.get_int_max_str_digits() + 1}}}", text)
        line = text.count("\n", 0, number.start() if number else 0) + 1
        raise CorpusError(f"{path}:{line} has a number of too many digits; mend the file.") from None


def _require_different_keys(path: Path, value: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Return an object that stands somewhere in a file of JSON, if it has no key twice; else it is a CorpusError."""
    if isinstance(value, Repeating):
        where = f"{path}:{place}" if place else path
        raise CorpusError(f"{where} has the key {value.key!r} twice; give each its own.")
    return value


def list_items(path: Path, value: Any, place: str) -> list[Any]:
    """Return a list that stands somewhere in a file of JSON; anything else there is a CorpusError."""
    if not isinstance(value, list):
        where = f"{path}:{place}" if place else path
        raise CorpusError(f"{where} has another layout: it must be a list, but {shorten(value, 40)} is there.")
    return value


def _is_json_lines(text: str) -> bool:
    """Return whether the first line alone is a whole row, rather than an object of rows."""
    try:
        value = json.loads(text.split("\n", 1)[0])
    except (ValueError, RecursionError):
        return False
    is_of_rows = value and all(isinstance(row, dict) for row in value.values())
    return not (is_of_rows or value.keys() == _ANNOTATOR)


def _read_json_lines(path: Path, text: str) -> Iterator[Record]:
    for row in read_objects(io.BytesIO(text.encode()), 0, -1, _LONGEST):
        if row.reason and row.reason != "no_object":
            raise CorpusError(f"{path}:{row.number} {row.fault}; mend the line.")
        if row.value is not None or row.reason:
            yield Record(_require_object(row.value, path, row.number), str(path), row.number)


def _require_object(value: object, path: Path, place: int | str) -> dict[str, Any]:
    match value:
        case dict():
            return value
        case [str(text), dict(labels)]:  # as spaCy 2 is trained on
            return {"text": text, **labels}
    raise CorpusError(
        f"{path}:{place} has another layout: a row must be an object with named values, but {shorten(value, 40)} is "
        "there."
    )


def read_table(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line, cells) of the rows of a .csv, or of a table with tabs, that are not blank."""
    forms: Forms = {}
    text = read_text(path)
    _require_no_json(path, text)
    content, is_tsv = io.BytesIO(text.encode()), find_suffix(str(path)) != ".csv"
    for line, cells, fault in read_cells(content, str(path), is_tsv=is_tsv, max_cell=_LONGEST, forms=forms):
        if fault:
            raise CorpusError(f"{path}:{line} is no CSV (the row {fault}); mend the row.")
        if any(cell.strip() for cell in cells):
            yield line, cells
    tell_forms(forms)


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        with name_file(path):
            for row in read_columns(SourceFile(str(path), PARQUET, 0), None, lambda *_: None):
                if row.reason:
                    raise ValueError(f"row {row.number} {row.fault}")
                yield Record(row.value, str(path), row.number)
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CorpusError(f"{path} cannot be read as Parquet ({reason}); replace it.") from None


def _name_cells(path: Path, description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Name the cells by the header if the first line has the columns' names, else by their places."""
    header: list[str] | None = None
    width = 0
    for number, cells in read_table(path):
        if not width:
            width = len(cells)
            names = [cell.strip() for cell in cells]
            if find_missing(dict.fromkeys(names), description) is None:
                require_one_each(f"{path}:{number}", names, description)
                header = names
                continue
            if find_missing(dict.fromkeys(range(-width, width)), description) is not None:
                raise lacks_column(f"{path}:{number}", names, description, is_table=True)
            _require_no_header(f"{path}:{number}", names, description)
        if len(cells) != width:
            issues.add(f"{path}:{number}", "row", f"has not {width} fields as the first line", len(cells))
        elif header is not None and [cell.strip() for cell in cells] == header:
            issues.add(f"{path}:{number}", "row", "repeats the header")
        elif header is not None:
            yield Record(dict(zip(header, cells, strict=True)), str(path), number)
        else:
            yield Record({place: cell for i, cell in enumerate(cells) for place in (i, i - width)}, str(path), number)


def _require_no_header(source: str, names: Sequence[str], description: SetDescription) -> None:
    """Refuse a first row that would be read by places, and whose label is the name of such a column."""
    cells: dict[Column, str] = {place: name for i, name in enumerate(names) for place in (i, i - len(names))}
    places = [place for role in ("label", "labels") for place in description.columns.get(role, ())]
    named = next((place for place in places if cells.get(place, "").lower() in _LABEL_NAMES), None)
    if named is not None:
        raise CorpusError(
            f"{source} is a header, and would be read as a row, because the set's columns are places; give their names "
            f"({cells[named]!r} in place of {named}) as columns in {description.yaml}."
        )


def _describe_rows(description: SetDescription) -> str:
    """What a file of JSON, which is read as CoNLL's columns, would have to be, as it follows "is JSON,"."""
    if not description.others:
        return f"and reader: conll reads columns; leave that line out of {description.yaml}"
    names = {role: [repr(name) for name in own if isinstance(name, str)] for role, own in description.columns.items()}
    words, text = (
        ", and ".join(" or ".join(names[role]) for role in own) for own in (("tokens", "tags"), ("text", "entities"))
    )
    return (
        f"whose rows have neither words with tags ({words}) nor a text with entities ({text}); set columns, and reader "
        f"(records or spans), in {description.yaml}"
    )


def read_conll(path: Path, description: SetDescription, issues: DataIssues) -> Iterator[Record]:
    """Yield the sentences of a CoNLL file, or of a table with a word a row, by role.

    The description's columns "tokens" and "tags" may have places of their own; default first and last. Comments before
    a sentence (`# id 7`), and what is no word of CoNLL-U, are told and left out. A line without word and tag, or a word
    column that has the words' numbers, is a CorpusError.
    """
    token_place, tag_place = (
        next((place for place in description.columns[role] if isinstance(place, int)), default)
        for role, default in (("tokens", 0), ("tags", -1))
    )
    tokens: list[str] = []
    tags: list[str] = []
    num_documents = num_ranges = 0
    comments: list[int] = []
    text = read_text(path, has_words=True)
    require_lines(str(path), text[:HEAD_BYTES].encode())
    if find_suffix(str(path)) in (".json", *_LINES) and text.lstrip().startswith(("{", "[")):
        raise CorpusError(f"{path} is JSON, {_describe_rows(description)}.")
    _require_no_json(path, text)
    if text.startswith(_WEBANNO):
        raise CorpusError(f"{path} is TSV of WebAnno or INCEpTION; export CoNLL 2002 there.")
    lines = split_lines(text)
    if lines and (columns := find_word_columns(path, lines[0], description)) is not None:
        yield from join_word_rows(itertools.islice(read_table(path), 1, None), path, columns)
        return
    filled = [line for line in lines if line.strip() and not line.startswith((_DOCUMENT_START, *_COMMENTS))]
    width = len(_cut_line(filled[0])) if filled else 0
    is_tab_ended = width > 2 and all(line.endswith("\t") for line in filled)
    firsts = [_cut_line(line)[0] for line in filled] if width > 2 else []
    is_numbered = any(map(str.isdecimal, firsts)) and all(map(_NUMBER.fullmatch, firsts))
    if is_numbered and token_place in (0, -width):
        raise CorpusError(
            f"{path} numbers the words in its first column, as CoNLL-U does; set columns.tokens, such as tokens: 1, in "
            f"{description.yaml}."
        )
    if width > 2 and any(isinstance(place, str) for place in description.columns["tags"]):
        _require_one_tagged(path, [_cut_line(line) for line in filled], description)
    num_sentences = num_words = 0
    for number, line in enumerate([*lines, ""], 1):
        is_document_start = line.startswith(_DOCUMENT_START)
        if line.strip() and not is_document_start:
            cells = _cut_line(line)
            cells = cells[:-1] if is_tab_ended and not cells[-1] else cells
            try:
                token, tag = cells[token_place], cells[tag_place].strip()
            except IndexError:
                token = tag = ""
            if line.startswith(_COMMENTS) and not tokens and (len(_cut_line(line)) != width or not is_tag(tag)):
                comments.append(number)
                continue
            if "\t" not in line and "," in cells[-1] and not is_tag(cells[-1]):
                raise CorpusError(f"{path}:{number} {_IS_CSV}.")
            if is_numbered and not cells[0].isdecimal():
                issues.add(f"{path}:{number}", "line", "is a range of words, or an empty node, of CoNLL-U")
                num_ranges += 1
                continue
            if number == 1 and tag.lower() in TAG_NAMES:
                raise CorpusError(f"{path}:1 is a header, of which CoNLL's columns have none; take that line out.")
            if len(cells) < 2 or not token or not tag:
                empty = ", whose word is an empty cell" if tag and len(cells) > 1 else ""
                raise CorpusError(
                    f"{path}:{number} has another layout: a word and its tag are expected, but {shorten(line, 40)} is "
                    f"there{empty}."
                )
            tokens.append(part_words(token))
            tags.append(tag)
            continue
        if tokens:
            document = str(num_documents) if num_documents else ""
            values = {"tokens": tokens, "tags": tags, "document": document, "is_word_a_line": not num_ranges}
            yield Record(values, str(path), number - len(tokens) - num_ranges)
            num_sentences, num_words = num_sentences + 1, len(tokens)
            tokens, tags, num_ranges = [], [], 0
        num_documents += is_document_start
    if num_sentences == 1 and num_words > _MOST_WORDS:
        issues.warn(f"{path} has no blank line, so that its {num_words:,} words are one sentence; put one behind each.")
    if comments:
        issues.say(f"{len(comments):,} x line of {path} is a comment and left out ({path}:{comments[0]} is the first).")


def _require_one_tagged(path: Path, rows: Sequence[Sequence[str]], description: SetDescription) -> None:
    """Refuse a file of which the last column is one of several with tags of the same types."""
    width = len(rows[0])
    kinds = [
        {
            cells[place][2:]
            for cells in rows
            if len(cells) == width and cells[place][1:2] == "-" and is_tag(cells[place])
        }
        for place in range(width)
    ]
    places = [place for place in range(width - 1) if kinds[place] & kinds[-1]]
    if places:
        listed = " and ".join(map(str, [*places, width - 1]))
        raise CorpusError(
            f"{path} has tags of entities in the columns {listed}, counted from 0; set columns.tags, such as tags: "
            f"{places[0]}, in {description.yaml}."
        )


def _cut_line(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else _SPACES.split(line.strip(" \r\f\v"))


def read_squad(path: Path, description: SetDescription) -> Iterator[Record]:
    """Yield one record a question of a SQuAD file, by role; a CorpusError names the place of another layout."""
    data = None if find_suffix(str(path)) in _LINES else parse_document(path, read_text(path))
    if not isinstance(data, dict) or "data" not in data:
        raise CorpusError(
            f"{path} has another layout: a SQuAD file must be an object with a key 'data'; write reader: records in "
            f"{description.yaml} for rows with question, context and answers."
        )
    for i, article in enumerate(list_items(path, _require_different_keys(path, data)["data"], "data")):
        if isinstance(article, dict) and "question" in article and "paragraphs" not in article:
            raise CorpusError(
                f"{path}:data[{i}] has another layout: it is a question by itself, where SQuAD has articles with "
                f"paragraphs; run jq -c '.data[]' FILE > NEW.jsonl, give that, and write reader: records in "
                f"{description.yaml}."
            )
        for j, paragraph in enumerate(_list_parts(path, article, "paragraphs", f"data[{i}]")):
            place = f"data[{i}].paragraphs[{j}]"
            questions = _list_parts(path, paragraph, "qas", place)
            if not isinstance(context := paragraph.get("context"), str):
                raise CorpusError(f"{path}:{place} has another layout: a paragraph must have a text as 'context'.")
            for k, values in enumerate(questions):
                own = f"{place}.qas[{k}]"
                if not isinstance(values, dict) or "question" not in values or "answers" not in values:
                    raise CorpusError(f"{path}:{own} has another layout: it must have 'question' and 'answers'.")
                yield Record({**values, "context": context}, str(path), own)


def _list_parts(path: Path, value: Any, key: str, place: str) -> list[Any]:
    """Return the list that an object has as a key; it may lack it."""
    if not isinstance(value, dict):
        raise CorpusError(
            f"{path}:{place} has another layout: it must be an object, but {shorten(value, 40)} is there."
        )
    return list_items(path, _require_different_keys(path, value, place).get(key, []), f"{place}.{key}")


def list_brat(folder: Path, others: Collection[Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the texts and the notes of brat in a folder and in those in it, however deep.

    `others`, the folders of other splits, are left out, and so are hidden ones, such as a notebook server's.
    """
    if not folder.is_dir():
        return [], []
    with name_file(folder):
        paths = [Path(path) for path, is_folder, _ in walk(str(folder)) if not is_folder and path.endswith(_BRAT)]
    foreign = {other.resolve() for other in others} - {folder.resolve(), *folder.resolve().parents}
    folders = {path.parent for path in paths}
    left_out = {parent for parent in folders if foreign and foreign & {parent.resolve(), *parent.resolve().parents}}
    left_out |= {parent for parent in folders if any(part.startswith(".") for part in parent.relative_to(folder).parts)}
    kept = sorted(path for path in paths if path.parent not in left_out and not path.name.startswith("."))
    texts, notes = ([path for path in kept if path.suffix == suffix] for suffix in _BRAT)
    return texts, notes


def read_brat(folder: Path, issues: DataIssues, others: Collection[Path] = ()) -> Iterator[Record]:
    """Yield one record a document of brat, NAME.txt with NAME.ann, by role; lines other than entities are left alone.

    Folders in the folder count, too, and name their documents: `part2/b0`. What brat cuts at the end of a line is one
    stretch.
    """
    texts, all_notes = list_brat(folder, others)
    for notes in sorted({*all_notes} - {path.with_suffix(".ann") for path in texts}):
        issues.add(f"{notes}:1", "document", "has no .txt file beside it")
    for path in texts:
        notes = path.with_suffix(".ann")
        if not notes.is_file():
            issues.add(f"{path}:1", "document", "has no .ann file beside it")
            continue
        entities = []
        for number, line in enumerate(split_lines(read_text(notes)), 1):
            if not line.startswith("T"):
                continue
            match = _BRAT_ENTITY.fullmatch(line)
            if match is None:
                rule = "an entity is its id, a tab, its type and places, a tab and its text"
                raise CorpusError(f"{notes}:{number} has another layout: {rule}, but {shorten(line, 40)} is there.")
            places = [tuple(map(int, place.split())) for place in match[2].split(";")]
            gaps = tuple((end, start) for (_, end), (start, _) in itertools.pairwise(places))
            values = {"start": places[0][0], "end": places[-1][1], "type": match[1], "mention": match[3]}
            entities.append({**values, "place": f"{notes}:{number}", GAPS: gaps})
        name = path.relative_to(folder).with_suffix("").as_posix()
        yield Record({"id": name, "text": read_text(path), "entities": entities}, str(path), 1)
