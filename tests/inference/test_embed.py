"""Vectors of an input's rows: block by block, those of the model, whatever cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from made_banks import make_bank
from transformers import AutoModel, AutoTokenizer

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.shared import Pooling
from domext_ray.errors import BaseModelError, ConfigError, CorpusError, RunError
from domext_ray.inference.embed import (
    IDS,
    VECTORS,
    load_embedding,
    plan_embedding,
    run_embedding,
)
from domext_ray.inference.parts import PARTS, describe_losses
from domext_ray.models.source import open_model
from domext_ray.models.text_embedding import TextEmbedding
from domext_ray.runs.run_directory import write_run
from domext_ray.storage import Place

TEXTS = ["the cold river", "blood and heart disease", "", "a book of the school", "cell"]


@pytest.fixture
def config(tiny_base_folder: Path, tmp_path: Path) -> EmbedConfig:
    """Five texts, one without words, and two rows that are malformed, in blocks of three."""
    lines = [json.dumps({"id": f"t{i}", "body": text}) for i, text in enumerate(TEXTS)]
    lines[2:2] = ["{no JSON", json.dumps({"id": "x", "body": 3})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return EmbedConfig(
        model=str(tiny_base_folder),
        input=str(tmp_path / "in.jsonl"),
        field="body",
        output=str(tmp_path / "out"),
        block_rows=3,
    )


def embed_here(config: EmbedConfig) -> Path:
    """What the job does, without Ray."""
    plan = plan_embedding(config)
    Path(plan.folder).mkdir(exist_ok=True)
    plan.blocks.make()
    write_run(plan.folder, identity=plan.identity)
    work = plan.load(torch.device("cpu"))
    for block in plan.input.blocks:
        plan.blocks.records.write(block.number, plan.blocks.make_part(block, work))
    plan.finish(plan.input.num_rows, 1.0)
    return Path(plan.folder)


def test_parquet_has_ids_and_vectors(config: EmbedConfig, tiny_base_folder: Path) -> None:
    folder = embed_here(config)
    table = pq.read_table(folder / PARTS)
    assert table.column("id").to_pylist() == [f"t{i}" for i in range(5)]
    assert str(table.schema.field("vector").type) == "fixed_size_list<element: float>[32]"
    vectors = table.column("vector").to_pylist()
    expected = TextEmbedding(open_model(str(tiny_base_folder)).load())(TEXTS)
    assert vectors[2] is None
    for i in (0, 1, 3, 4):
        np.testing.assert_allclose(vectors[i], expected[i], atol=1e-5)
    lost = [json.loads(line) for line in (folder / "malformed.jsonl").read_text().splitlines()]
    assert [each["line"] for each in lost] == [3, 4] and "text" in lost[1]["reason"]
    summary = json.loads((folder / "summary.json").read_text())
    assert {name: summary[name] for name in ("rows", "empty", "malformed", "width")} == {
        "rows": 5,
        "empty": 1,
        "malformed": 2,
        "width": 32,
    }


def test_npy_is_one_array_with_its_ids(config: EmbedConfig) -> None:
    parquet = pq.read_table(embed_here(config) / PARTS).column("vector").to_pylist()
    folder = embed_here(replace(config, format="npy", output=config.output + "-npy"))
    vectors = np.load(folder / VECTORS)
    assert vectors.dtype == np.float32 and vectors.shape == (5, 32) and np.isnan(vectors[2]).all()
    assert np.array_equal(vectors[[0, 1, 3, 4]], np.array([parquet[i] for i in (0, 1, 3, 4)], dtype=np.float32))
    assert [json.loads(line) for line in (folder / IDS).read_text().splitlines()] == [f"t{i}" for i in range(5)]
    assert not (folder / PARTS).exists()


def test_ids_of_several_vectors_are_told(config: EmbedConfig) -> None:
    path = Path(config.input)
    path.write_text(path.read_text().replace('"t4"', '"t0"'))
    for format in ("parquet", "npy"):
        folder = embed_here(replace(config, format=format, output=f"{config.output}-{format}"))
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["repeated_ids"] == {"first": "t0", "rows": 1}
        assert describe_losses(summary, Place(folder), "")[-1].startswith("1 row has an id that an earlier row has")


def test_texts_that_are_cut_are_counted(config: EmbedConfig) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    lengths = sorted(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert lengths[-3] < lengths[-2], "so that two are longer"
    folder = embed_here(replace(config, max_length=lengths[-3], output=config.output + "-cut"))
    summary = json.loads((folder / "summary.json").read_text())
    (said,) = describe_losses({**summary, "empty": 0, "malformed": 0}, Place(folder), "")
    assert said == f"2 texts have more than {lengths[-3]} tokens, and their vectors leave out the rest."
    whole = json.loads((embed_here(replace(config, max_length=lengths[-1])) / "summary.json").read_text())
    assert whole["cases"] == {}


def test_layers_are_averaged(tiny_base_folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_base_folder), AutoModel.from_pretrained(tiny_base_folder)
    start, poolings = open_model(str(tiny_base_folder)).load(), get_args(Pooling)
    assert {*poolings} == {"mean", "cls"}
    for (layers, numbers), pooling in product((("0", [0]), ("1-2", [1, 2]), ("0,2", [0, 2])), poolings):
        config = EmbedConfig(input="x", output="y", layers=layers)
        assert config.layer_numbers == tuple(numbers)
        embed = TextEmbedding(start, pooling, config.layer_numbers, normalize=True)
        for text, vector in zip(TEXTS[:2], embed(TEXTS[:2]), strict=True):
            with torch.no_grad():
                outputs = model.eval()(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
            states = torch.stack([outputs.hidden_states[each][0] for each in numbers]).mean(0)
            pooled = states[0] if pooling == "cls" else states.mean(0)
            np.testing.assert_allclose(vector, pooled / pooled.norm(), atol=1e-5)


def test_an_output_that_moved_is_complete(config: EmbedConfig, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lost in (("parquet", f"{PARTS}/part-000001.parquet"), ("npy", IDS)):
        made = embed_here(replace(config, format=name, output=f"{config.output}-{name}"))  # type: ignore[arg-type]
        moved = replace(config, format=name, output=str(made.rename(f"{made}-moved")))  # type: ignore[arg-type]
        run_embedding(moved)
        assert "nothing is left to do" in capsys.readouterr().out
        done = plan_embedding(moved)
        assert done.is_complete and f"; {len(done.input.blocks)} are done\n" in done.describe()
        (Path(moved.output) / lost).unlink()
        left = plan_embedding(moved)
        assert (
            not left.is_complete
            and f"; {0 if name == 'npy' else len(done.input.blocks) - 1} are done\n" in left.describe()
        )


def test_mistakes_are_sentences(config: EmbedConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--layers is '3'; .* has 2 layers"):
        plan_embedding(replace(config, layers="3"))
    for layers in ("a", "2-1", "1,1", "-1", ","):
        with pytest.raises(ConfigError, match="--layers is "):
            replace(config, layers=layers)
    with pytest.raises(BaseModelError, match="--model '/no/such'"):
        plan_embedding(replace(config, model="/no/such"))
    with pytest.raises(CorpusError, match="--input"):
        plan_embedding(replace(config, input=str(tmp_path / "nothing.txt")))
    with pytest.raises(CorpusError, match=r"in.jsonl:3: the row .*; mend it, or leave out --strict"):
        embed_here(replace(config, strict=True))
    with pytest.raises(
        CorpusError, match=r"no row of --input .* has a field 'other' \(they have id, body\); set --field"
    ):
        embed_here(replace(config, field="other", output=str(tmp_path / "none")))
    assert not (tmp_path / "none" / PARTS).exists()
    embed_here(config)
    for values in ({"pooling": "cls"}, {"normalize": True}, {"batch_size": 32}):
        with pytest.raises(RunError, match="the output .* belongs to another run .*; give another --output"):
            plan_embedding(replace(config, **values))


def test_an_output_is_of_one_reading_of_long_texts(config: EmbedConfig) -> None:
    """The option came after 0.1.0, whose outputs, without it, go on as those that are cut."""
    for before, now in (("windows", "cut"), ("cut", "windows")):
        begun = replace(config, long_texts=before, output=f"{config.output}-{before}")  # type: ignore[arg-type]
        folder = embed_here(begun)
        with pytest.raises(RunError, match=r"--long_texts was (windows|left out) and is (windows|left out) now"):
            plan_embedding(replace(begun, long_texts=now))  # type: ignore[arg-type]
    identity = {name: value for name, value in plan_embedding(begun).identity.items() if name != "long_texts"}
    write_run(Place(folder), identity=identity)
    assert plan_embedding(begun).is_complete


def test_an_adapter_of_a_bank_makes_its_own_vectors(config: EmbedConfig, tiny_base_folder: Path) -> None:
    """Whatever head it has: the base and the adapter, pooled as its run had it."""
    bank = make_bank(Path(config.output).parent / "bank", str(tiny_base_folder))
    base = load_embedding(config, "cpu")
    made = {}
    for name in ("fills1", "tags2", "sorts1"):
        own = replace(config, model=f"{bank.folder}:{name}", output=f"{config.output}-{name}")
        vectors = pq.read_table(embed_here(own) / PARTS).column("vector").to_pylist()
        model: Any = bank.load(name)
        for i in (0, 1):
            with torch.no_grad():
                states = model.bert(**base.start.tokenizer(TEXTS[i], return_tensors="pt")).last_hidden_state
            np.testing.assert_allclose(vectors[i], states[0].mean(0), atol=1e-5)
        assert not np.allclose(vectors[0], base(TEXTS[:1])[0], atol=1e-2)
        made[name] = plan_embedding(own).identity["model_sha256"]
    assert len({*made.values(), base.start.sha256}) == 4
    with pytest.raises(RunError, match=r"the bank .* has no adapter 'more'; it has fills1, "):
        plan_embedding(replace(config, model=f"{bank.folder}:more"))
    bank.add("own", bank.load("fills1"), "fills1", {"run": "notes", "pooling": "cls"})
    own = replace(config, model=f"{bank.folder}:own")
    poolings = [plan_embedding(each).identity["pooling"] for each in (own, replace(own, pooling="mean"))]
    assert poolings == ["cls", "mean"]


@pytest.mark.jobs
@pytest.mark.usefixtures("local_ray")
def test_a_whole_job_goes_on_with_what_is_missing(config: EmbedConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(run_embedding(replace(config, output=config.output + "-ray")))
    parts = {each.name: each.read_bytes() for each in (folder / PARTS).iterdir()}
    assert len(parts) == 3
    made, here = (pq.read_table(each / PARTS).to_pylist() for each in (folder, embed_here(config)))
    assert [each["id"] for each in made] == [each["id"] for each in here]
    for one, other in zip(made, here, strict=True):  # a worker has other kernels and threads, which round otherwise
        assert (one["vector"] is None) == (other["vector"] is None)
        assert one["vector"] is None or np.allclose(one["vector"], other["vector"], atol=1e-5)
    (folder / "summary.json").unlink()
    (folder / ".blocks" / "000001.json").unlink()
    run_embedding(replace(config, output=config.output + "-ray"))
    assert json.loads((folder / "summary.json").read_text())["rows_now"] == 3
    assert parts == {each.name: each.read_bytes() for each in (folder / PARTS).iterdir()}
    capsys.readouterr()
    run_embedding(replace(config, output=config.output + "-ray"))
    assert "nothing is left to do" in capsys.readouterr().out
