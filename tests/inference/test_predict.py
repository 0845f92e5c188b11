"""Predictions of whole inputs: parts, records, malformed rows, what is done and what is refused. Without Ray."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from changed_files import REPLACED, TOUCHED
from object_store import BUCKET

from domext_ray.config.inference import PredictConfig
from domext_ray.errors import ConfigError, CorpusError, DomextError, RunError
from domext_ray.files import read_json
from domext_ray.inference.parts import MALFORMED, SUMMARY
from domext_ray.inference.predict import (
    PredictPlan,
    plan_prediction,
    run_prediction,
)
from domext_ray.runs.run_directory import RUN, write_run
from domext_ray.storage import Place, write_json
from domext_ray.text.data.sources import write_files

ROWS = [
    *({"id": f"n{i}", "text": f"the {each} read a [MASK] ."} for i, each in enumerate("doctor man dog".split())),
    {"text": " "},
    {"body": "a [MASK]"},
    {"text": "no mask"},
    {"text": "the [MASK] and the [MASK]"},
]


@pytest.fixture
def config(tiny_base_folder: Path, tmp_path: Path) -> PredictConfig:
    """A small input with a row of every kind, and an output."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    places = {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out")}
    return PredictConfig(model=str(tiny_base_folder), block_rows=3, top_k=2, format="jsonl", **places)  # type: ignore[arg-type]


def work_on(plan: PredictPlan, numbers: list[int] | None = None) -> None:
    """What the pool's actors do."""
    write_identity_of(plan)
    plan.blocks.make()
    work = plan.load(torch.device("cpu"))
    for each in plan.input.blocks:
        if numbers is None or each.number in numbers:
            plan.blocks.records.write(each.number, plan.blocks.make_part(each, work))


def write_identity_of(plan: PredictPlan) -> None:
    Path(plan.folder).mkdir(exist_ok=True)
    write_run(plan.folder, identity=plan.identity)


def read_parts(plan: PredictPlan) -> list[dict[str, Any]]:
    paths = sorted(Path(plan.folder / "predictions").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def take_probabilities(rows: list[dict[str, Any]]) -> list[float]:
    """Take the probabilities out of predictions, in order."""
    return [fill.pop("probability") for row in rows for mask in row["masks"] for fill in mask["fills"]]


def test_every_row_has_its_prediction_in_order(config: PredictConfig) -> None:
    plan = plan_prediction(replace(config, keep_text=True))
    work_on(plan)
    found = read_parts(plan)
    assert [each["id"] for each in found] == ["n0", "n1", "n2", "in.jsonl:4", "in.jsonl:6", "in.jsonl:7"]
    assert [len(each["masks"]) for each in found] == [1, 1, 1, 0, 0, 2]
    assert [each["text"] for each in found] == [each["text"] for each in ROWS if "text" in each]
    summary = plan.finish(7, 2.0)
    assert read_json(plan.folder / SUMMARY, "") == summary
    assert {name: summary[name] for name in ("rows", "empty", "malformed", "rows_per_second", "labels")} == {
        **{"rows": 6, "empty": 1, "malformed": 1},
        **{"rows_per_second": 3.5, "labels": {"[MASK]": 5}},
    }
    (malformed,) = map(json.loads, (plan.folder / MALFORMED).read_text().splitlines())
    assert malformed == {"file": config.input, "line": 5, "reason": "the row has no field 'text'"}
    assert f"{config.input}:5: the row has no field 'text'" in plan.format_summary(summary)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_ids_of_several_rows_are_told(format: str, config: PredictConfig) -> None:
    """In whichever blocks they are; rows without an id are told apart by their places."""
    ids: list[str | int | None] = [1, "a", None, 2, "b", "2", None, "a", 2]
    rows = [{"text": "a [MASK]"} if given is None else {"text": "a [MASK]", "id": given} for given in ids]
    Path(config.input).write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_prediction(replace(config, format=format))  # type: ignore[arg-type]
    work_on(plan)
    summary = plan.finish(9, 1.0)
    assert summary["repeated_ids"] == {"first": "2", "rows": 3}
    said = "3 rows have an id that an earlier row has, the first is '2': only the order, .*; give each row its own"
    assert re.search(said, plan.format_summary(summary))
    Path(config.input).write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    plan = plan_prediction(replace(config, output=f"{config.output}-2"))
    work_on(plan)
    summary = plan.finish(5, 1.0)
    assert "repeated_ids" not in summary and "an earlier row" not in plan.format_summary(summary)


def test_parquet_has_the_same_columns_in_every_part(config: PredictConfig) -> None:
    plan = plan_prediction(config)
    work_on(plan)
    own = read_parts(plan)
    table = replace(config, format="parquet", output=f"{config.output}2", block_rows=1)
    plan = plan_prediction(table)
    work_on(plan)
    parts = sorted(Path(plan.folder / "predictions").iterdir())
    assert len({str(pq.read_schema(each)) for each in parts}) == 1
    found = pa.concat_tables(map(pq.read_table, parts)).to_pylist()
    # A block of one row is a batch of another shape, whose products may round the last digit otherwise.
    np.testing.assert_allclose(take_probabilities(found), take_probabilities(own), atol=2e-6)
    assert found == own


def test_only_missing_blocks_are_worked_on(config: PredictConfig) -> None:
    plan = plan_prediction(config)
    work_on(plan, [0, 2])
    assert [plan.blocks.is_done(each) for each in range(3)] == [True, False, True]
    half = Path(plan.blocks.find_part(2))
    half.write_bytes(half.read_bytes()[:-1])
    (half.parent / ".part-000001-abc.jsonl").write_text("of a job that was killed")
    plan.blocks.make()
    assert [plan.blocks.is_done(each) for each in range(3)] == [True, False, False]
    assert sorted(each.name for each in half.parent.iterdir()) == ["part-000000.jsonl", "part-000002.jsonl"]
    plan.blocks.records.find(0).put(b"{")
    assert not plan.blocks.is_done(0), "a damaged record is no record"
    with pytest.raises(RunError, match=r"\.blocks/000000\.json is damaged; run the same command again"):
        plan.blocks.read(0)


def test_a_block_that_fails_leaves_nothing(config: PredictConfig) -> None:
    plan = plan_prediction(config)
    plan.blocks.make()

    def fail(block: Any, path: Path) -> Any:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DomextError, match=r"part-000000\.jsonl cannot be .* free space there"):
        plan.blocks.make_part(plan.input.blocks[0], fail)
    assert not plan.blocks.is_done(0) and not list(Path(plan.folder / "predictions").iterdir())


def test_strict_stops_at_a_malformed_row(config: PredictConfig) -> None:
    plan = plan_prediction(replace(config, strict=True))
    with pytest.raises(CorpusError) as error:
        work_on(plan)
    assert str(error.value) == f"{config.input}:5: the row has no field 'text'; mend it, or leave out --strict."


def test_an_input_without_a_usable_row_is_refused_and_forgotten(config: PredictConfig) -> None:
    with pytest.raises(
        CorpusError, match=r"no row of --input .* has a field 'note' \(they have id, text\); set --field"
    ):
        plan_prediction(replace(config, field="note"))
    Path(config.input).write_text('{"id": "a", "text": [1]}\n{"id": "b", "text": {}}\n')
    plan = plan_prediction(config)
    work_on(plan)
    with pytest.raises(CorpusError, match=r"none of the 2 rows of --input "):
        plan.finish(2, 1.0)
    assert not (plan.folder / RUN).exists() and not (plan.folder / "predictions").exists()
    plan_prediction(config)


def test_another_command_for_an_output_is_refused(
    config: PredictConfig, tiny_roberta_folder: Path, tmp_path: Path
) -> None:
    """Other options, another model or input; an input that has moved is the same."""
    write_identity_of(plan_prediction(config))
    for options, said in (
        ({"top_k": 3}, "--top_k was 2 and is 3 now"),
        ({"block_rows": 4}, "--block_rows was 3 and is 4 now"),
        ({"field": "id"}, "--field was text and is id now"),
        ({"model": str(tiny_roberta_folder)}, "--model "),
    ):
        with pytest.raises(RunError) as error:
            plan_prediction(replace(config, **options))
        assert said in str(error.value) and "give another --output" in str(error.value)
    (tmp_path / "moved").mkdir()
    moved = Path(config.input).rename(tmp_path / "moved" / "in.jsonl")
    plan_prediction(replace(config, input=str(moved), strict=True))
    moved.write_text(moved.read_text() + "{}\n")
    with pytest.raises(RunError, match="input"):
        plan_prediction(replace(config, input=str(moved)))


def test_a_dry_run_writes_nothing(config: PredictConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_prediction(replace(config, dry_run=True))
    assert "7 rows in 1 file\n" in capsys.readouterr().out
    assert not Path(config.output).exists()


def test_what_is_complete_is_left_alone(config: PredictConfig, capsys: pytest.CaptureFixture[str]) -> None:
    work_on(plan_prediction(config))
    write_json(Place(Path(config.output) / SUMMARY), {})
    run_prediction(replace(config, output=str(Path(config.output).rename(f"{config.output}-moved"))))
    assert "nothing is left to do" in capsys.readouterr().out


def test_what_cannot_be_done_is_refused(config: PredictConfig) -> None:
    for options, said in (
        ({"max_length": 129}, "--max_length is 129; "),
        ({"task": "ner"}, "so it must be fill_mask"),
        ({"input": "nowhere.txt"}, "--input 'nowhere.txt' names no file"),
        ({"model": "./nowhere"}, "--model './nowhere'"),
    ):
        with pytest.raises(DomextError) as error:
            plan_prediction(replace(config, **options))
        assert said in str(error.value)
    outside: list[dict[str, Any]] = [
        *({"input": ""}, {"output": " "}, {"model": ""}, {"field": ""}, {"split": "all"}, {"format": "csv"}),
        *({"top_k": 0}, {"max_length": -1}, {"block_rows": 0}, {"batch_tokens": -1}, {"output": "s3://bucket/a"}),
    ]
    for options in outside:
        with pytest.raises(ConfigError, match=f"--{next(iter(options))} is "):
            PredictConfig(**{"input": "a", "output": "b", **options})
    (Path(config.output) / "predictions").mkdir(parents=True)
    with pytest.raises(RunError, match="holds predictions of something else; give another --output"):
        plan_prediction(config)


def test_an_input_is_what_its_bytes_are(config: PredictConfig) -> None:
    """Whatever its size and time say; the file that changed is named."""
    plan, path = plan_prediction(config), Path(config.input)
    write_identity_of(plan)
    write_files(plan.folder, plan.input.list_files())
    for touch in TOUCHED.values():
        touch(path)
        assert plan_prediction(config).identity == plan.identity
    plan.input.require_unchanged()
    REPLACED["cp -p"](path, path.read_bytes().replace(b"doctor", b"church"))
    said = f"{path} has changed, so that --input '{path}' is not what the output {plan.folder} was made with; bring "
    with pytest.raises(RunError) as error:
        plan_prediction(config)
    assert str(error.value) == f"{said}that back, or give another --output."
    with pytest.raises(CorpusError, match=rf"--input '{path}' changed while it was read \({path} has changed\); start"):
        plan.input.require_unchanged()


def test_an_input_in_a_bucket_is_too(config: PredictConfig, objects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(f"{BUCKET}/{Path(config.output).parent.name}/in.jsonl")
    content = Path(config.input).read_bytes()
    place.put(content)
    config = replace(config, input=str(place))
    plan = plan_prediction(config)
    assert plan.input.former_sha256 != plan.identity["input_sha256"] == plan.input.sha256
    Path(plan.folder).mkdir()
    write_run(plan.folder, identity={**plan.identity, "input_sha256": plan.input.former_sha256})  # as 0.1.0 had it
    assert plan_prediction(config).identity["input_sha256"] == plan.input.former_sha256
    write_run(plan.folder, identity=plan.identity)
    write_files(plan.folder, plan.input.list_files())
    monkeypatch.setattr("domext_ray.text.data.hashes.name_former", lambda file: f"{file.path} of a later time")
    place.put(content)
    assert plan_prediction(config).identity == plan.identity, "uploaded again"
    place.put(content.replace(b"doctor", b"church"))
    with pytest.raises(RunError, match=rf"^{place} has changed, so that --input"):
        plan_prediction(config)
    with pytest.raises(CorpusError, match=rf"changed while it was read \({place} has changed\)"):
        plan.input.require_unchanged()
