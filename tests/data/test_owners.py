"""Fields that say whose a row is, by their names and by values that repeat, are told before anything trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from row_files import write_kinds, write_rows

from domext_ray.commands.early import check_early
from domext_ray.config.options.build import from_dict, identity_of
from domext_ray.config.pretrain import NO_GROUPS, PrepareConfig, PretrainConfig, identify_documents
from domext_ray.errors import CorpusError
from domext_ray.text.data import groups
from domext_ray.text.data.groups import PEOPLE, FieldValues, count_values, join_values, tell_groups
from domext_ray.text.data.sample import check_corpus

Values = Callable[[int], Any]


def make_rows(number: int = 120, **fields: Values) -> list[dict[str, Any]]:
    """Rows with a text of their own, and what each field has in the row of a number."""
    return [
        {**{name: value(i) for name, value in fields.items()}, "text": f"a note of some length, number {i}"}
        for i in range(number)
    ]


@pytest.fixture
def look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a job that looks at a text says of it at once: a sentence that refuses it, a note, or nothing."""

    def look_at(corpus: Path | str, group_field: str = "", words: int = 0, **options: Any) -> str:
        groups._TOLD.clear()
        groups.say.cache_clear()
        values = {"corpus": str(corpus), "run": {"dir": str(tmp_path / "runs")}, "method": {"heads": 1}, **options}
        config = from_dict(
            PretrainConfig, {**values, "prepare": {"group_field": group_field}, "vocab": {"size": words}}
        )
        try:
            check_early(config)
        except CorpusError as error:
            return f"error: {error}"
        return capsys.readouterr().err

    return look_at


def three_each(row: int) -> str:
    return f"p-{row % 40:03d}"


WHOSE = """patient patient_id PATIENT_ID PatientID patientId patientid patient-id Patient~ID patient.id patient_name
    inpatient_id hospital_patient_id id_of_patient Patientennummer subject_id SUBJECT_ID subjectId SubjectID subjectid
    mrn MRN pat_mrn mrn_hash hadm_id HADM_ID hadmid encounter EncounterID encounter_number visit visit_id visitid
    VISIT_NO"""
NOT_WHOSE = """patient_age PatientSex PATIENTAGE visit_date visit_type encounter_class date_of_visit num_patients visits
    is_inpatient outpatient subject topic patience section"""


def test_names_of_people_and_stays(tmp_path: Path, look: Callable[..., str]) -> None:
    for name in WHOSE.split():
        path = write_rows(tmp_path / "x.jsonl", make_rows(**{name.replace("~", " "): three_each}))
        assert "40 different" in look(path) and "word of the exported tokenizer" in look(path, words=50), name
    for name in NOT_WHOSE.split():  # a category may have words as values
        path = write_rows(tmp_path / "x.jsonl", make_rows(**{name: lambda i: "abcdefghij"[i % 10]}))
        assert look(path, words=50) == "", name


def test_the_sentences(tmp_path: Path, look: Callable[..., str]) -> None:
    path = write_rows(tmp_path / "x.jsonl", make_rows(patient_id=three_each))
    assert look(path) == (
        f"note: --corpus '{path}' has 40 different 'patient_id' in 120 rows that were read; give --prepare.group_field "
        "patient_id, or none if no rows belong together: otherwise rows of one 'patient_id' are on both sides of the "
        "held-out split, and the run's page may quote them.\n"
    )
    assert look(path, words=50) == (
        f"error: --corpus '{path}' has 40 different 'patient_id' in 120 rows that were read, and --vocab.size 50 "
        "learns new words from them: a name that a single 'patient_id' has could become a word of the exported "
        "tokenizer; give --prepare.group_field patient_id, or --prepare.group_field none if no rows belong together."
    )
    assert look(path, "none", words=50) == look(path, "patient_id", words=50) == ""


def test_every_kind_of_file(tmp_path: Path, look: Callable[..., str]) -> None:
    """Values are texts and numbers, also where the beginning of a file alone is read, or nobody reads the column."""
    paths = write_kinds(tmp_path, make_rows(mrn=lambda i: i % 40, picture=lambda i: b"\xff\x00"))
    table = pa.Table.from_pylist(make_rows(mrn=lambda i: f"{i % 40}.0"))
    pq.write_table(table.set_column(0, "mrn", table["mrn"].dictionary_encode()), tmp_path / "y.parquet")
    for path in (*paths, tmp_path / "y.parquet"):
        assert "40 different 'mrn' in 120 rows" in look(path, words=50), path


def test_what_repeats(tmp_path: Path, look: Callable[..., str]) -> None:
    """Values that are far apart, next to each other, in two files; and what does not repeat, or is no name."""

    def repeats(values: Values, number: int = 120) -> bool:
        return look(write_rows(tmp_path / "x.jsonl", make_rows(number, visit_id=values)), words=50) != ""

    assert all(map(repeats, (lambda i: i % 60, lambda i: i // 3, lambda i: max(i, 1), lambda i: 7)))
    others: list[Any] = [None, True, 0.5, "", [1], "x" * 100]
    assert not any(map(repeats, (int, *(lambda i, value=value: value for value in others))))
    halves = [write_rows(tmp_path / f"{name}.jsonl", make_rows(40, mrn=lambda i: i)) for name in "yz"]
    halves[1].write_text(halves[1].read_text().replace("note", "letter"))
    assert "40 different 'mrn' in 80 rows" in look(f"{halves[0]},{halves[1]}") and look(halves[0]) == ""
    fields = dict(visit_id=lambda i: i % 50, mrn=lambda i: i % 10, patient_id=lambda i: i % 40)
    assert "give --prepare.group_field mrn," in look(write_rows(tmp_path / "x.jsonl", make_rows(**fields)))


def test_other_names_are_only_told(tmp_path: Path, look: Callable[..., str]) -> None:
    def say(**fields: Values) -> str:
        return look(write_rows(tmp_path / "x.jsonl", make_rows(300, **fields)), words=50)

    for name, values in (
        ("thread_id", lambda i: i % 100),
        ("author", lambda i: f"Jo {'abcdefgh'[i % 8]} {i % 7}"),
        ("doc", lambda i: f"d{i % 60}"),
    ):
        assert say(**{name: values}).startswith("note: ") and "rows seem to belong together" in say(**{name: values})
    for name, values in (
        ("id", int),  # each has its own
        ("label_id", lambda i: i % 12),  # a category
        ("stars", lambda i: i % 60),
        ("price", lambda i: f"{i % 60}.50"),
        ("date", lambda i: f"2020-{1 + i % 12:02}-{1 + i % 5:02}"),
        ("time", lambda i: f"2020-01-01 10:{i % 60:02}:00"),
        ("journal", lambda i: "J. of " + "abcdefghijklmnopqrstuvwxyz"[i % 26] * (1 + i % 2)),
        ("code", lambda i: i if i % 10 else 0),  # few of its values repeat
    ):
        assert say(**{name: values}) == "", name


def test_fields_within_objects(tmp_path: Path, look: Callable[..., str]) -> None:
    rows = make_rows(meta=lambda i: {"who is": {"mrn": three_each(i)}, "bytes": b""})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    for row in rows:
        del row["meta"]["bytes"]
    cure = """take 'mrn' out of 'meta.who is' (of JSONL: jq -c '. + ."meta"."who is"' FILE > NEW.jsonl) and"""
    for path in (write_rows(tmp_path / "x.jsonl", rows), tmp_path / "x.parquet"):
        assert cure in look(path) and cure in look(path, words=50)
    for name in ("mrn", "meta.who is.mrn"):
        assert f"x.jsonl:1 has 'mrn' within an object; {cure} give --prepare.group_field mrn." in look(
            tmp_path / "x.jsonl", name
        )


def test_a_field_of_stays_beside_one_of_patients(tmp_path: Path, look: Callable[..., str]) -> None:
    rows = make_rows(patient_id=lambda i: i % 20, visit_id=lambda i: i % 40)
    path = write_rows(tmp_path / "x.jsonl", rows)
    said = look(path, "visit_id", words=50)
    assert "has 20 different 'patient_id' and 40 different 'visit_id'" in said and said.startswith("note: ")
    assert "give --prepare.group_field patient_id: otherwise" in said
    assert look(path, "patient_id", words=50) == ""


def test_general_text_and_parts(tmp_path: Path, look: Callable[..., str]) -> None:
    """Words are learned on --corpus alone, and general text has no groups, whatever is said of the domain's."""
    domain = write_rows(tmp_path / "x.jsonl", make_rows(patient_id=lambda i: i))
    other = write_rows(tmp_path / "y.jsonl", make_rows(patient_id=three_each))
    for group_field in ("", "patient_id"):
        said = look(domain, group_field, 50, replay={"corpus": str(other)})
        assert said.startswith(f"note: --replay.corpus '{other}' has 40 ") and "--mixture.parts, without keep" in said
    parts = {"parts": {"letters": {"corpus": str(other), "weight": 1}}}
    assert look(domain, words=50, mixture=parts).startswith(f"note: --mixture.parts letters '{other}' has 40 ")
    assert look(domain, "patient_id", 50, mixture=parts) == look(domain, "none", 50, mixture=parts) == ""


def test_none(tmp_path: Path, look: Callable[..., str]) -> None:
    """It is recorded, decides no document, and is no field."""
    said, silent = PrepareConfig(group_field=NO_GROUPS), PrepareConfig()
    assert identity_of(said) != identity_of(silent) and identify_documents(said) == identify_documents(silent)
    assert said.grouped_by == "" and replace(said, held_out_by="block", field="none")
    write_rows(tmp_path / "x.jsonl", [{"none": None, **row} for row in make_rows()])
    pc.write_csv(pa.Table.from_pylist(make_rows(none=int)), tmp_path / "x.csv")
    for name in ("x.jsonl", "x.csv"):
        refusal = "has a field 'none', and --prepare.group_field none says that no rows belong together; give that fi"
        assert refusal in look(tmp_path / name, "none") and look(tmp_path / name) == "", name
    (tmp_path / "x.txt").write_text("a line that is long enough\nanother line that is\n")
    assert look(tmp_path / "x.txt", "none") == ""  # plain text has no fields, and needs none


def test_a_run_that_has_begun_has_its_words(tmp_path: Path, look: Callable[..., str]) -> None:
    path = write_rows(tmp_path / "x.jsonl", make_rows(patient_id=three_each))
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "run.json").write_text("{}")
    assert look(path, words=50, run={"dir": str(tmp_path / "runs"), "name": "run"}) == ""


def test_a_column_that_is_only_counted_loses_no_row(tmp_path: Path) -> None:
    """A value of it that is not UTF-8 is no fault of the row's."""
    texts = pa.array([f"a note of some length, number {i}" for i in range(9)])
    names = pa.StringArray.from_buffers(9, pa.array(range(10), pa.int32()).buffers()[1], pa.py_buffer(b"\xff" * 9))
    pq.write_table(pa.table({"patient_id": names, "text": texts}), tmp_path / "x.parquet")
    sample = check_corpus(str(tmp_path / "x.parquet"), PrepareConfig())
    assert len(sample.documents) == 9 and not sample.dropped.counts and not sample.dropped.values


def test_of_many_values_some_are_counted_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the parts and their order are; figures of the whole follow within a tenth."""
    rows = [{"mrn": i % 5000} for i in range(15_000)]
    found = []
    for parts in ([rows], [rows[:100], rows[100:9000], rows[9000:]], [rows[::2], rows[1::2]]):
        joined: FieldValues = {}
        for part in parts:
            values: FieldValues = {}
            for row in part:
                count_values(values, row, ("text",), PEOPLE)
            join_values(joined, json.loads(json.dumps(values)))  # as they are kept of a task
        assert len(joined["mrn"]) <= 2 * groups._MOST_VALUES
        (counted,) = groups._list_counted(joined)
        assert {*counted.rows} == {3} and abs(counted.num_values - 5000) < 500 and counted.about
        found.append(counted)
    assert found[0] == found[1] == found[2]
    with pytest.raises(CorpusError, match="has about [45],[0-9]{3} different 'mrn' in about 1[3-6],"):
        tell_groups(joined, "x.jsonl", PrepareConfig(), learned="--vocab.size 5")
