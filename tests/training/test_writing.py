"""General text that the base writes: the same rows however they are made, and which bases can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHAPE, make_random_model, write_corpus, write_tokenizer
from tiny_layouts import TINY_LAYOUTS
from transformers import BertConfig, BertModel

from domext_ray.config.pretrain import (
    EngineConfig,
    PrepareConfig,
    PretrainConfig,
    ReplayConfig,
    RunConfig,
    ScaleConfig,
    TrainConfig,
)
from domext_ray.errors import ConfigError
from domext_ray.model.base import load_base
from domext_ray.model.spec import build_base
from domext_ray.pretraining.inputs import check_texts, get_or_prepare_inputs
from domext_ray.pretraining.plan import load_run_base
from domext_ray.runs.run_directory import resolve_paths
from domext_ray.storage import Place
from domext_ray.text.data.folders import say
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training import writing
from domext_ray.training.writing import Writer, estimate_written, get_or_write_text, prepare_written

SELF = PretrainConfig(
    replay=ReplayConfig(corpus="self"), engine=EngineConfig(precision="fp32"), scale=ScaleConfig(use_gpu=False)
)


def write(folder: Path, number: int) -> np.ndarray:
    return Writer(load_base(str(folder))).write_rows(number)


def raise_interrupt(*_: Any, **__: Any) -> int:
    raise KeyboardInterrupt


def predict(folder: Path, ids: torch.Tensor) -> np.ndarray:
    """What the base says of each place of a row, [N, V]."""
    scores = build_base(load_base(str(folder)), torch.device("cpu")).eval()(ids).logits[0].detach()
    scores[:, load_tokenizer(folder).all_special_ids] = -torch.inf
    return scores.softmax(1).numpy()


def check_frequencies(drawn: np.ndarray, expected: np.ndarray) -> None:
    """Of many draws, each word has the share that is expected, within five standard errors."""
    found = np.bincount(drawn, minlength=len(expected)) / len(drawn)
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(drawn)) + 1e-4).all()


@pytest.fixture(autouse=True)
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the base in this process are fp32's."""
    monkeypatch.setattr(writing, "has_bf16_units", lambda: False)


def test_a_row_depends_on_its_place_alone(tiny_base_folder: Path) -> None:
    rows, tokenizer = write(tiny_base_folder, 40), load_tokenizer(tiny_base_folder)
    assert np.array_equal(rows[:21], write(tiny_base_folder, 21)) and len(np.unique(rows, axis=0)) == 40
    assert (rows[:, 0] == tokenizer.cls_token_id).all() and (rows[:, -1] == tokenizer.sep_token_id).all()
    assert not np.isin(rows[:, 1:-1], tokenizer.all_special_ids).any(), "no mask is left, and no special word drawn"


def test_words_are_drawn_as_the_base_predicts_them(tiny_base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LENGTH", 6)
    drawn, tokenizer = write(tiny_base_folder, 20_000), load_tokenizer(tiny_base_folder)
    ids = torch.full((1, 6), tokenizer.mask_token_id)
    ids[0, 0], ids[0, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    expected = predict(tiny_base_folder, ids)
    for place in range(1, 5):
        check_frequencies(drawn[:, place], expected[place])


def test_half_of_a_rows_words_are_written_anew(tiny_base_folder: Path) -> None:
    writer, draw = Writer(load_base(str(tiny_base_folder))), np.random.default_rng(0)
    rows = [np.array([2, *draw.integers(60, 120, size), 3]) for size in draw.integers(5, 40, 100)]
    refilled = writer.refill_rows(rows)
    assert [len(row) for row in refilled] == [len(row) for row in rows]
    assert all(row[0] == 2 and row[-1] == 3 for row in refilled), "special words stay"
    share = np.mean(np.concatenate(refilled) != np.concatenate(rows))
    assert 0.4 < share < 0.55 and not np.isin(np.concatenate(refilled), [0, 1, 4]).any()
    assert all(map(np.array_equal, writer.refill_rows(rows[:48]), refilled[:48]))


def test_new_words_are_what_the_base_predicts_beside_the_others(
    tiny_base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_ROWS", 4_000)
    monkeypatch.setattr(writing, "REFILLED_FRAC", 0.3)
    draws = writing.hash_counters(writing.Purpose.REFILLS, np.arange(20_000)[:, None], np.arange(5))
    masks = writing.to_uniform(draws) < 0.3
    chosen = masks[:, 2] & ~masks[:, 1] & ~masks[:, 3]
    refilled = np.stack(Writer(load_base(str(tiny_base_folder))).refill_rows([np.array([2, 70, 80, 90, 3])] * 20_000))
    ids = torch.tensor([[2, 70, load_tokenizer(tiny_base_folder).mask_token_id, 90, 3]])
    check_frequencies(refilled[chosen, 2], predict(tiny_base_folder, ids)[2])


def test_it_is_written_once_and_whole(
    tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writing, "NUM_ROWS", 64)
    base = load_base(str(tiny_base_folder))
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(Path, "write_bytes", raise_interrupt)
        get_or_write_text(base, Place(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("written-*")), "it appears whole or not at all"
    path = Path(get_or_write_text(base, Place(tmp_path / "cache")))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(texts) == writing.NUM_ROWS and all(texts) and list(path.parent.iterdir()) == [path]
    assert "general text: 64 rows of 96 tokens, written by the base" in capsys.readouterr().out
    before = path.stat().st_mtime_ns
    assert get_or_write_text(base, Place(tmp_path / "cache")) == path and path.stat().st_mtime_ns == before
    path.unlink()
    again = get_or_write_text(base, Place(tmp_path / "cache"))
    assert [json.loads(line)["text"] for line in again.read_text().splitlines()] == texts


def test_a_file_that_two_texts_of_a_run_have_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say.cache_clear()
    (tmp_path / "general").mkdir()
    own = write_corpus(tmp_path / "a.txt", 200, seed=1)
    general = write_corpus(tmp_path / "general" / "b.txt", 200, seed=2)
    config = replace(SELF, corpus=str(own), run=RunConfig(dir=str(tmp_path / "runs")))
    check_texts(replace(config, replay=replace(config.replay, corpus=str(general.parent))), None)
    assert "reads" not in capsys.readouterr().err
    (general.parent / "link.txt").symlink_to(own)
    check_texts(replace(config, replay=replace(config.replay, corpus=str(general.parent))), None)
    told = f"note: --replay.corpus reads {general.parent}/link.txt, which --corpus reads, too.\n"
    assert told in capsys.readouterr().err


def test_it_becomes_rows_like_any_general_text(
    local_ray: None, tiny_base_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "NUM_ROWS", 64)
    lines = write_corpus(tmp_path / "corpus.txt", 2000, seed=1).read_text().splitlines()
    bodies = [json.dumps({"body": " ".join(lines[i : i + 40])}) for i in range(0, 2000, 40)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(bodies), encoding="utf-8")
    config = replace(
        SELF,
        base=str(tiny_base_folder),
        corpus=str(tmp_path / "corpus.jsonl"),
        run=RunConfig(name="written", dir=str(tmp_path / "runs")),
        prepare=PrepareConfig(field="body", min_document_chars=2000),  # which written text has not
        train=TrainConfig(seq_length=64),
    )
    base = load_run_base(config)
    check_texts(config, base)
    inputs = get_or_prepare_inputs(config, base, resolve_paths(config))
    [[_, general]] = inputs.texts
    assert general.num_documents == writing.NUM_ROWS and general.num_rows("held_out") > 0
    expected = estimate_written(64)
    assert abs(general.num_tokens("train") - expected.num_tokens) < 0.3 * expected.num_tokens
    assert prepare_written(PrepareConfig(packed=True)).packed, "rows of one batch have one layout"


def test_other_layouts_and_vocabularies_write(tiny_roberta_folder: Path, tmp_path: Path) -> None:
    folders = [tiny_roberta_folder, *(layout.save(tmp_path / name) for name, layout in TINY_LAYOUTS.items())]
    for folder in folders:
        rows, tokenizer = write(folder, 3), load_tokenizer(folder)
        assert rows.shape == (3, writing.LENGTH), folder
        assert not np.isin(rows[:, 1:-1], tokenizer.all_special_ids).any(), folder
        assert all(tokenizer.batch_decode(rows, skip_special_tokens=True)), folder


def test_a_base_without_a_head_cannot(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=write_tokenizer(tmp_path / "encoder"), **SHAPE)
    make_random_model(BertModel, config).save_pretrained(tmp_path / "encoder")
    TINY_LAYOUTS["electra"].save(tmp_path / "discriminator", "ForPreTraining")
    for base in (str(tmp_path / "encoder"), str(tmp_path / "discriminator")):
        with pytest.raises(ConfigError) as raised:
            load_run_base(replace(SELF, base=base))
        assert str(raised.value) == (
            f"--replay.corpus is self, and the base {base!r} has no MLM head to write general text with; "
            "give general text, or none."
        )
