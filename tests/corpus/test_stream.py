"""Batches that Ray Data makes are those of the order, masked in its tasks, whatever the ranks and the restarts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from row_files import SPECIALS, make_token_rows, make_wordpiece, write_arrow
from test_sampler import Sampler, list_rows, make_alone, make_curriculum, make_mixture

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.errors import CorpusError, RunError
from domext_ray.storage import Place
from domext_ray.text.corpus import stream
from domext_ray.text.corpus.batching import Masker
from domext_ray.text.corpus.manifest import FileRecord, Manifest
from domext_ray.text.corpus.sampler import share_rows
from domext_ray.text.corpus.stream import BatchReader, Prefetch, RankBatch, stream_batches

NUM_WORDS = 1200
SAMPLERS = {
    "one text": lambda: make_alone(26, 5, (300, 50, 700)),
    "two texts": lambda: make_mixture("0.3", 26),
    "a curriculum": lambda: make_curriculum(26),
}


def write_corpus(folder: Path, shard_rows: tuple[int, ...]) -> Manifest:
    """Shards whose rows hold their own number and a word more, each a token after the special ones."""
    folder.mkdir(exist_ok=True)
    records, number = [], 0
    for i, size in enumerate(shard_rows):
        ids = [[2, 5 + number + j, *[5 + j % 7] * (j % 9), 3] for j in range(size)]
        table = make_token_rows(ids, [[True] * len(row) for row in ids]).drop_columns("row_id")
        write_arrow(folder / f"train-{i}.arrow", table, 100)
        records.append(FileRecord(f"train-{i}.arrow", "", size, sum(map(len, ids))))
        number += size
    return Manifest(Place(folder), "f", 8, "t", {}, tuple(records), (), number, {})


def open_reader(folder: Path, sampler: Sampler, rank: int = 0, world_size: int = 1, size: int = 6) -> BatchReader:
    """A rank's reader of corpora that lie in a folder, written if they are not; the second text is kept."""
    tokenizer = make_wordpiece([*SPECIALS, *(f"w{i}" for i in range(NUM_WORDS))])
    corpora = [write_corpus(folder / str(i), part.shard_rows) for i, part in enumerate(sampler.parts)]
    maskers = [Masker(tokenizer, ObjectiveConfig(mask_prob=0.4), part.seed) for part in sampler.parts]
    is_kept = (False, True, False)[: len(corpora)] if len(corpora) > 1 else ()
    rows = share_rows(sampler.global_batch_size, rank, world_size)
    read = tuple(corpus.shards("train") for corpus in corpora)
    return BatchReader(read, sampler, tuple(maskers), is_kept, rows, size)


def take_apart(batch: RankBatch) -> list[tuple[list[int], list[int], bool]]:
    """The rows of micro batches without padding: as they were, what the model sees, and whether a row is kept."""
    found = []
    for micro_batch in batch[0]:
        ids = micro_batch["input_ids"].copy()
        counts = micro_batch["weights"] > 0
        kept: set[int] = set()
        if micro_batch["kept_rows"] is not None:
            own = micro_batch["kept_rows"]["weights"] > 0
            counts[micro_batch["kept_rows"]["prediction_indices"][own]] = True
            kept = {*micro_batch["kept_rows"]["rows"].tolist()} if own.any() else kept
        ids.reshape(-1)[micro_batch["masked_positions"][counts]] = micro_batch["labels"][counts]
        for i, row in enumerate(ids):
            length = int((row > 0).sum())
            found.append((row[:length].tolist(), micro_batch["input_ids"][i, :length].tolist(), i in kept))
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_number_of_ranks_reads_and_masks_the_same_rows(name: str, tmp_path: Path) -> None:
    sampler = SAMPLERS[name]()
    batches = np.array([0, 7, 8, 41])
    whole = [take_apart(rank_batch) for rank_batch in open_reader(tmp_path, sampler)(batches)]
    for batch, rows in zip(batches, whole, strict=True):
        drawn = list_rows(sampler, int(batch))
        assert [ids[1] - 5 for ids, _, _ in rows] == [row for _, _, row in drawn]
        assert all(part == 1 for (part, _, _), (_, _, is_kept) in zip(drawn, rows, strict=True) if is_kept)
        assert any(ids != seen for ids, seen, _ in rows)
    for world_size in (3, 5, 7):
        readers = [open_reader(tmp_path, sampler, rank, world_size, size=2) for rank in range(world_size)]
        shares = [[take_apart(rank_batch) for rank_batch in reader(batches)] for reader in readers]
        assert [[row[:2] for share in parts for row in share] for parts in zip(*shares, strict=True)] == [
            [row[:2] for row in own] for own in whole
        ]


def test_masks_of_an_epoch_are_those_of_the_epoch_in_a_batch_that_ends_one(tmp_path: Path) -> None:
    sampler = make_alone(80, 5, (90,))
    reader = open_reader(tmp_path, sampler)
    drawn = list_rows(sampler, 0)
    assert {epoch for _, epoch, _ in drawn} == {0, 1}
    ((batch, tokens),) = reader(np.array([0]))
    table = pa.concat_tables([reader.read(0, sampler.draw(0)[1][i : i + 1]) for i in range(80)])
    alone = [reader.maskers[0].mask(table.slice(i, 1), epoch) for i, (_, epoch, _) in enumerate(drawn)]
    assert [seen for _, seen, _ in take_apart((batch, tokens))] == [masked.inputs.tolist() for masked in alone]
    assert tokens == [sum(len(masked.inputs) for masked in alone)]


def test_ray_data_makes_the_batches_in_order_from_any_on(
    tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ROWS_PER_TASK", 52)
    sampler = make_mixture("0.3", 26)
    reader = open_reader(tmp_path, sampler)
    expected = [take_apart(rank_batch) for rank_batch in reader(np.arange(60))]
    assert [take_apart(rank_batch) for rank_batch in itertools.islice(stream_batches(reader), 60)] == expected
    second = open_reader(tmp_path, sampler, 1, 3)
    found = next(stream_batches(second, 47))
    assert take_apart(found) == take_apart(second(np.array([47]))[0])
    assert [row[:2] for row in take_apart(found)] == [row[:2] for row in expected[47][8:17]]


def test_executions_follow_each_other_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []

    def run(batches: stream.BatchRange) -> Iterator[int]:
        ranges.append((batches.first, batches.last))
        yield from range(batches.first, batches.last)

    monkeypatch.setattr(stream, "_run", run)
    reader = BatchReader((), make_alone(512), (), (), slice(0, 512), 32)
    batches: Iterator[Any] = stream_batches(reader, 5)
    assert list(itertools.islice(batches, 40)) == [*range(5, 45)]
    # Each begins in a thread of its own.
    assert sorted(ranges)[:2] == [(5, 13), (13, 21)] and {last - first for first, last in ranges} == {8}
    ranges.clear()
    assert list(stream_batches(reader, 0, 41)) == [*range(41)] and max(ranges) == (40, 41)
    assert list(stream_batches(reader, 3, 3)) == []


def test_a_shard_that_has_gone_is_named(tmp_path: Path, local_ray: None) -> None:
    reader = open_reader(tmp_path, make_alone(24, 5, (300,)))
    (tmp_path / "0" / "train-0.arrow").unlink()
    with pytest.raises(CorpusError, match=r"train-0\.arrow has gone; the same command prepares it again"):
        next(stream_batches(reader))


@pytest.mark.slow  # it waits for as long as Ray looks for room
def test_reading_that_has_no_room_ends(tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others' work that does not end: Ray Data would wait for ever."""
    monkeypatch.setattr(stream, "LOOK_SECONDS", 0.5)

    @ray.remote(num_cpus=ray.cluster_resources()["CPU"] - 0.1)
    class Other:
        def begin(self) -> None: ...

    other = Other.remote()  # type: ignore[attr-defined]
    ray.get(other.begin.remote())
    batches = stream_batches(open_reader(tmp_path, make_alone(24, 5, (300,))), wait_seconds=2.0)
    with pytest.raises(RunError) as raised:
        next(batches)
    said = str(raised.value)
    assert said.startswith("reading rows: nothing of it runs after 2 s (--scale.wait): Ray has no room yet for ")
    assert "times 0.25 CPU; free are 0.1 of " in said
    ray.kill(other)


def test_prefetch_starts_at_once_and_hands_over_items_and_errors() -> None:
    started = threading.Event()

    def broken() -> Iterator[int]:
        started.set()
        yield from range(10)
        raise CorpusError("the shard ended")

    items = Prefetch(broken(), depth=2)
    assert started.wait(timeout=120)
    assert [next(items) for _ in range(10)] == list(range(10))
    for _ in range(2):
        with pytest.raises(CorpusError, match="the shard ended"):
            next(items)
