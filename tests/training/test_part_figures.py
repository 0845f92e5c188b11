"""Figures of a mixture's parts are those of their rows, counted by hand, whatever stops the run has made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import write_corpus
from small_runs import attempts, make_config, make_train, read_records, train_in_cuts
from torch.nn import functional as F

from domext_ray.config.mixture import MixtureConfig
from domext_ray.config.pretrain import ObjectiveConfig, OptimConfig, ReplayConfig
from domext_ray.pretraining.inputs import prepare_run
from domext_ray.pretraining.plan import resolve
from domext_ray.report.figures import measure_run
from domext_ray.text.vocabulary.tokenizer import load_tokenizer
from domext_ray.training.phases import BatchMaker, make_phases
from domext_ray.training.run import Run

STEPS = 16
NAMES = ("domain", "general", "further")


@pytest.fixture(scope="module")
def task(tiny_base_folder: Path, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Run:
    """A corpus, general text, and a further part that comes in the second half."""
    folder = tmp_path_factory.mktemp("parts")
    further = {"corpus": str(write_corpus(folder / "further.txt", 120, seed=11)), "weight": {0: 0, 0.5: 2}}
    config = make_config(
        tiny_base_folder,
        write_corpus(folder / "corpus.txt", 400),
        replay=ReplayConfig(corpus=str(write_corpus(folder / "general.txt", 300, seed=9)), frac=0.25),
        mixture=MixtureConfig(parts={"further": further}),
        objective=ObjectiveConfig(keep="replay", mask_prob=0.3),
        train=make_train(STEPS, dropout=0.0),
        optim=OptimConfig(lr=1e-3, decay_steps=STEPS, warmup_steps=1),
    )
    return prepare_run(resolve(config))


@pytest.fixture(scope="module")
def records(task: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What an undisturbed run says; the first line is of its start."""
    folder = tmp_path_factory.mktemp("straight")
    train_in_cuts(task, folder, STEPS)
    return read_records(folder)


def pick(record: dict[str, Any]) -> dict[str, Any]:
    exact = ("step", "train/mlm_loss", "train/tokens", "train/keep_loss")
    return {name: value for name, value in record.items() if name in exact or name.startswith("parts/")}


def test_a_run_that_stops_anywhere_says_the_same(task: Run, records: list[dict[str, Any]], tmp_path: Path) -> None:
    train_in_cuts(task, tmp_path, 3, 8, 9, STEPS)  # the further part comes with step 9
    cut = [pick(record) for record in read_records(tmp_path)]
    straight = [pick(record) for record in records]
    stops = {3, 8, 9}  # where a run ends it evaluates itself
    assert [record for record in cut if record["step"] not in stops] == [
        record for record in straight if record["step"] not in stops
    ]
    for step in stops:
        assert cut[step].items() >= straight[step].items()
        assert cut[step].keys() - straight[step].keys() == {f"parts/{name}/held_out_loss" for name in NAMES}


def test_tokens_and_epochs_are_those_of_the_rows(task: Run, records: list[dict[str, Any]]) -> None:
    (manifests,) = task.inputs.texts
    (phase,) = make_phases(task.config, [manifests])
    tokenizer, sampler = load_tokenizer(task.inputs.tokenizer.local()), phase.sampler
    reader = BatchMaker(task.config, [phase], tokenizer, tokenizer).open(phase, rank=0, world_size=1)
    tokens, rows = np.zeros(3), np.zeros(3, dtype=int)
    for batch, record in enumerate(records[1:]):
        parts, numbers = sampler.draw(batch)
        for part in {*parts.tolist()}:
            tokens[part] += sum(map(len, reader.read(part, numbers[parts == part]).column("input_ids").to_pylist()))
        rows += np.bincount(parts, minlength=3)
        assert [record[f"parts/{name}/tokens"] for name in NAMES] == tokens.tolist()
        assert record["train/tokens"] == tokens.sum()
        for number, name in enumerate(NAMES):
            assert record[f"parts/{name}/epochs"] == rows[number] / sampler.rows_per_epoch(number)
        if record["step"] == STEPS // 2:
            assert rows.tolist() == [24, 8, 0]
    assert rows.sum() == 4 * STEPS and rows[1] == 16 and abs(rows[2] - 16) <= 1
    said = measure_run(records)["parts"]
    assert list(said) == [*NAMES] and [values["tokens"] for values in said.values()] == tokens.tolist()
    for name, figures in said.items():
        assert figures["held_out_loss"] == {
            when: records[place][f"parts/{name}/held_out_loss"] for when, place in (("before", 0), ("after", -1))
        }


def test_batches_of_one_shape_where_they_are_asked_for(task: Run) -> None:
    """Of a mixture, too; a phase's rows have the shape of its length."""
    (manifests,) = task.inputs.texts
    (phase,), tokenizer = make_phases(task.config, [manifests]), load_tokenizer(task.inputs.tokenizer.local())
    values: dict[str, Any] = {"prepare": {"packed": True}, "objective": {"keep": "none"}}
    for is_fixed in (True, False):
        values["engine"] = {"fixed_shapes": is_fixed}
        config = replace(
            task.config, **{name: replace(getattr(task.config, name), **own) for name, own in values.items()}
        )
        reader = BatchMaker(config, [phase], tokenizer, tokenizer).open(phase, rank=0, world_size=1)
        batches = [batch for arrays, _ in reader(np.arange(STEPS)) for batch in arrays]
        shapes = {tuple(array.shape for array in batch.values() if isinstance(array, np.ndarray)) for batch in batches}
        assert (len(shapes) == 1) == is_fixed
        assert not is_fixed or batches[0]["input_ids"].shape[1] == manifests[0].seq_length


def test_training_losses_are_those_of_the_parts_own_tokens(
    task: Run, records: list[dict[str, Any]], tmp_path: Path
) -> None:
    with attempts() as begin:
        worker = begin(task, tmp_path)
    maker = BatchMaker(worker.config, worker.phases, worker.tokenizer, worker.tokenizer)
    (micro_batches, _), model = next(maker.make(0, rank=0, world_size=1)), cast(Any, worker.engine._deepspeed).module
    losses: dict[int, list[float]] = {}
    for batch in micro_batches:
        with torch.no_grad():
            logits = model.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, masked_positions=batch.masked_positions
            )[0]
        own = F.cross_entropy(logits, batch.labels, reduction="none")
        for part, loss in zip(cast(torch.Tensor, batch.parts).tolist(), own.tolist(), strict=True):
            losses.setdefault(part, []).append(loss)
    expected = {NAMES[part]: sum(values) / len(values) for part, values in losses.items() if part >= 0}
    assert expected.keys() == {"domain", "general"}
    found = {name: records[1].get(f"parts/{name}/train_loss") for name in NAMES}
    assert found == {**{name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}, "further": None}
    for record in records[1:]:  # the term that learns general text is the mean over the same tokens
        assert record["train/keep_loss"] == pytest.approx(record.get("parts/general/train_loss", 0.0), rel=1e-5)
    assert any("parts/further/train_loss" in line for line in records[STEPS // 2 + 1 :])


def test_the_held_out_loss_of_a_part_is_that_of_a_run_on_its_text(task: Run, tmp_path: Path) -> None:
    alone = replace(task.config, replay=ReplayConfig(), mixture=MixtureConfig())
    inputs = [replace(task.inputs, texts=((text,),)) for text in task.inputs.texts[0]]
    runs = [task, *(replace(task, config=alone, inputs=source) for source in inputs)]
    with attempts() as begin:
        found = [begin(made, tmp_path / str(number)).measures.evaluate(0) for number, made in enumerate(runs)]
    together, *others = found
    own = [record["eval/domain_mlm_loss"] for record in others]
    assert [together[f"parts/{name}/held_out_loss"] for name in NAMES] == own and len({*own}) == 3
    assert not any(name.startswith("parts/") for record in others for name in record)
