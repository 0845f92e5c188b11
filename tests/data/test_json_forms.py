"""JSON that is not JSON Lines: what it is called, and that the program for jq makes its rows of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from domext_ray.errors import CorpusError
from domext_ray.text.data.files import find_files
from domext_ray.text.data.readers import read_rows

ROWS = [{"id": i, "text": f"Größe {i}"} for i in range(12)]
TEXTS = [row["text"] for row in ROWS]
TABLE = pd.DataFrame(ROWS)
COLUMNS = "jq -c '(.[keys_unsorted[0]] | keys_unsorted[]) as $i | map_values(.[$i])'"
SPLIT = ".columns as $c | .data[] | . as $row | [range($c | length) | {key: $c[.], value: $row[.]}] | from_entries"
FORMS: dict[str, tuple[str, str, str]] = {
    "columns": (TABLE.to_json(), "an object of columns, as pandas writes them", COLUMNS),
    "indented": (TABLE.to_json(indent=1), "an object of columns, as pandas writes them", COLUMNS),
    "split": (
        TABLE.to_json(orient="split"),
        "an object of columns and data, as pandas splits them",
        f"jq -c '{SPLIT}'",
    ),
    "table": (
        TABLE.to_json(orient="table"),
        "an object of a schema and data, as pandas writes them",
        "jq -c '.data[]'",
    ),
    "index": (TABLE.to_json(orient="index"), "an object of objects", "jq -c '.[]'"),
    "long": (TABLE.to_json(orient="index", indent=1), "an object of objects by number", "jq -c '.[]'"),
    "ids": (json.dumps({f"n{row['id']}": row for row in ROWS}), "an object of objects", "jq -c '.[]'"),
    "records": (TABLE.to_json(orient="records"), "an array", "jq -c '.[]'"),
    "values": (TABLE.to_json(orient="values"), "an array of arrays", "jq -c '.[] | {\"text\": .[1]}'"),
    "texts": (json.dumps(TEXTS, indent=1), "an array of texts", "jq -c '.[] | {\"text\": .}'"),
    "line": (f"\ufeff \n{json.dumps(TEXTS)}", "an array of texts", "jq -c '.[] | {\"text\": .}'"),
    "text_lines": ("\n".join(map(json.dumps, TEXTS)), "a text a line", "jq -c '{\"text\": .}'"),
    "rows": ("\n".join(json.dumps([*row.values()]) for row in ROWS), "an array a line", "jq -c '{\"text\": .[1]}'"),
    "labels": ("\n".join(json.dumps([text, "x"]) for text in TEXTS), "an array a line", "jq -c '{\"text\": .[0]}'"),
    "objects": ("\n".join(json.dumps(row, indent=1) for row in ROWS), "an object over several lines", "jq -c ."),
}
LONG = "z" * 70_000
TAKEN = {  # first rows that look like another form
    "meta": '{"meta": {"0": {"a": 1}}, "text": "a"}\n{"text": "b"}\n',
    "long_meta": json.dumps({"meta": {"0": 1}, "text": "a", "rest": LONG}) + "\n",
    "list_first": '["a"]\n{"text": "b"}\n{"text": "c"}\n',
    "texts_first": '"a"\n{"text": "b"}\n',
    "lists": '{"text": ["a", "b"]}\n{"text": ["c"]}\n',
    "tokens": '{"tokens": ["a", "b"], "tags": ["O", "O"]}',
    "one": '{"text": "a", "id": [1]}',
    "other": '{"body": "a", "spans": [1, 2]}\n{"body": "b", "spans": []}\n',
    "numbers": f'{{"text": "a", "n": {"9" * 9000}}}\n',
    "nothing": "[]\n",
}


def read(path: Path) -> list[object]:
    ((file,), _) = find_files(str(path))
    return [row.value for row in read_rows(file, ("text", "id"), lambda *_: None, max_bytes=2**20, only_texts=True)]


def test_each_form_is_named_with_what_makes_rows_of_it(tmp_path: Path) -> None:
    for name, (content, what, command) in FORMS.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(CorpusError) as caught:
            read(path)
        says = f"{path} is not JSON Lines, an object a line, but {what}; run {command} FILE > NEW.jsonl and give that."
        assert str(caught.value) == says, name


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_makes_the_rows_of_it(tmp_path: Path) -> None:
    for name in ("columns", "split", "values", "rows"):
        content, _, command = FORMS[name]
        made = subprocess.run(shlex.split(command), input=content, text=True, capture_output=True, check=True)
        (tmp_path / "rows.jsonl").write_text(made.stdout, encoding="utf-8")
        assert [row["text"] for row in read(tmp_path / "rows.jsonl") if isinstance(row, dict)] == TEXTS, command


def test_rows_that_only_look_like_another_form_are_read(tmp_path: Path) -> None:
    for name, content in TAKEN.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
        assert len(read(tmp_path / f"{name}.jsonl")) == content.count("\n") + (not content.endswith("\n")), name


def test_a_field_of_another_name_is_in_the_program(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["a", "b"]')
    ((file,), _) = find_files(str(tmp_path / "a.json"))
    with pytest.raises(CorpusError, match=re.escape("jq -c '.[] | {\"본문\": .}'")):
        list(read_rows(file, ("본문",), lambda *_: None, max_bytes=99))


def test_zero_width_spaces_of_json_are_spaces(tmp_path: Path) -> None:
    r"""Raw or escaped, in nested values; a backslash before "u200b" in a text is a backslash."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a\u200bb\\u200bc\\u200B\\u200bd", "id": "\\\\u200b \\\\\\u200b"}\n', encoding="utf-8"
    )
    assert read(tmp_path / "a.jsonl") == [{"text": "a b c  d", "id": "\\u200b \\ "}]
