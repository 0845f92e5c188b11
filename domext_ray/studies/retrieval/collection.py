"""A folder in BEIR's layout -> documents, queries, and which documents answer which query.

    corpus.jsonl        an object a line: "_id", "text" and, if there is one, "title"
    queries.jsonl       an object a line: "_id", "text"
    qrels/SPLIT.tsv     a header, then query id, document id and judgement (an integer, 0: irrelevant) between tabs

Source: Thakur et al. 2021, "BEIR", arXiv 2104.08663.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from domext_ray.errors import CorpusError
from domext_ray.storage import hash_file, parse_json

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"


@dataclass(frozen=True)
class Collection:
    """Documents and the queries that are judged."""

    document_ids: list[str]  # the greatest first: of equally near ones trec_eval prefers that
    documents: list[str]  # their texts, a title first
    query_ids: list[str]  # of the queries that are judged; one without a relevant document scores 0
    queries: list[str]  # their texts
    judgements: list[dict[int, int]]  # for each query, by a document's place; 0 and below is irrelevant
    sha256: dict[str, str]  # of the three files, by name

    @property
    def own_places(self) -> list[int]:
        """For each query the place of the document that has its id, which no search is to find; -1: there is none."""
        places = {name: place for place, name in enumerate(self.document_ids)}
        return [places.get(name, -1) for name in self.query_ids]


def read_collection(folder: Path, split: str) -> Collection:
    """Read a collection."""
    paths = {name: folder / name for name in (CORPUS, QUERIES, f"qrels/{split}.tsv")}
    for name, path in paths.items():
        if not path.is_file():
            raise CorpusError(f"--data {str(folder)!r} has no {name}; give a folder in BEIR's layout.")
    corpus, queries = (_read_texts(paths[name]) for name in (CORPUS, QUERIES))
    corpus = dict(sorted(corpus.items(), reverse=True))
    places = {name: place for place, name in enumerate(corpus)}
    judged: dict[str, dict[int, int]] = {}
    for line, query, document, judgement in _read_judgements(paths[f"qrels/{split}.tsv"]):
        for kind, name, known in (("query", query, queries), ("document", document, corpus)):
            if name not in known:
                raise CorpusError(f"{line} names the {kind} {name!r}, which is not there; mend the judgements.")
        judged.setdefault(query, {})[places[document]] = judgement
    asked = [name for name in queries if name in judged]
    if not any(value > 0 for own in judged.values() for value in own.values()):
        raise CorpusError(f"{paths[f'qrels/{split}.tsv']} judges no document relevant; give another --split.")
    return Collection(
        [*corpus],
        [*corpus.values()],
        asked,
        [queries[name] for name in asked],
        [judged[name] for name in asked],
        {name: hash_file(path) for name, path in paths.items()},
    )


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines that are not blank, each with its place."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 ({error.reason}); convert it.") from error


def _read_texts(path: Path) -> dict[str, str]:
    """Texts by id, in the file's order."""
    texts: dict[str, str] = {}
    for place, line in _read_lines(path):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise CorpusError(f"{place} is no JSON ({error}); give an object per line.") from error
        if not isinstance(record, dict) or not {"_id", "text"} <= record.keys():
            raise CorpusError(f'{place} is no object with "_id" and "text"; give an object per line.')
        parts = [record.get("title") or "", record["text"]]
        if not isinstance(record["_id"], str) or not all(isinstance(part, str) for part in parts):
            raise CorpusError(f'{place} has an "_id", a "title" or a "text" that is no string; mend it.')
        if record["_id"] in texts:
            raise CorpusError(f"{place} has the id {record['_id']!r} a second time; give each text an id of its own.")
        texts[record["_id"]] = " ".join(part for part in parts if part)
    if not texts:
        raise CorpusError(f"{path} is empty; give an object per line.")
    return texts


def _read_judgements(path: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield place, query, document and judgement of every line but the header."""
    for number, (place, line) in enumerate(_read_lines(path)):
        fields = line.split("\t")
        if len(fields) != 3:
            raise CorpusError(f"{place} has {len(fields)} fields between tabs; it needs query, document, judgement.")
        if number == 0 and not fields[2].strip().lstrip("-").isdigit():
            continue  # the header
        try:
            yield place, fields[0], fields[1], int(fields[2])
        except ValueError as error:
            raise CorpusError(f"{place} has the judgement {fields[2]!r}; it must be an integer.") from error
