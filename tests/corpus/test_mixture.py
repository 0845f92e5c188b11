"""Several corpora in one canonical order, a function of seed and batch, whatever ranks and restarts."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_stream import write_corpus

from domext_ray.corpus.mixture import EPOCH, PART, MixturePart, MixturePlan, Stage, count_rows, stream_mixture
from domext_ray.errors import CorpusError

DOMAIN, GENERAL, FURTHER = (137, 5, 901, 64), (90, 40), (70, 3, 31)
Row = tuple[int, int, int]
"""Part, epoch, and the row's number in its part."""
GOLDEN = [
    [(0, 0, 6), (1, 0, 3), (0, 0, 2), (0, 0, 4), (1, 0, 2), (0, 0, 13)],
    [(0, 0, 1), (1, 1, 0), (0, 0, 5), (0, 0, 17), (1, 1, 8), (0, 0, 7)],
]


def make_plan(share: str = "0.25", batch_size: int = 48, general: tuple[int, ...] = GENERAL) -> MixturePlan:
    part = Fraction(share)
    parts = (MixturePart("--corpus", DOMAIN, 3, 1 - part), MixturePart("--replay.corpus", general, 4, part))
    return MixturePlan(parts, batch_size)


def make_curriculum(batch_size: int = 24) -> MixturePlan:
    """Three parts: the third one is left out at first, then has more and more; in the end the second has nothing."""
    shares = [("0.75", "0.25", "0"), ("0.5", "0.2", "0.3"), ("0.125", "0", "0.875")]
    first, *later = ([Fraction(each) for each in own] for own in shares)
    texts = zip(("--corpus", "--replay.corpus", "third"), (DOMAIN, GENERAL, FURTHER), (3, 4, 5), first, strict=True)
    changes = tuple(Stage(batch, tuple(own)) for batch, own in zip((7, 31), later, strict=True))
    return MixturePlan(tuple(MixturePart(*each) for each in texts), batch_size, changes)


PLANS = {"two parts": make_plan, "a curriculum of three": make_curriculum}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> MixturePlan:
    return PLANS[request.param]()


def list_rows(plan: MixturePlan, batch: int) -> list[Row]:
    parts, numbers = plan.assign(batch)
    rows: list[Row] = [(-1, -1, -1)] * plan.global_batch_size
    for part, corpus in enumerate(plan.parts):
        starts = np.concatenate([[0], np.cumsum(corpus.shard_rows)])
        own = np.flatnonzero(parts == part)
        for chosen, epoch, shards, within in plan.locate(part, numbers[own]):
            for place, row in zip(own[chosen], starts[shards] + within, strict=True):
                rows[place] = (part, epoch, int(row))
    return rows


@pytest.mark.parametrize(("share", "batch_size"), [("0.25", 48), ("0.1", 24), ("0.33", 10), ("0.01", 16)])
def test_a_part_has_its_share_of_the_rows_before_any_batch(share: str, batch_size: int) -> None:
    plan = make_plan(share, batch_size)
    counts = np.array([np.bincount(plan.assign(batch)[0], minlength=2) for batch in range(200)])
    assert (counts.sum(axis=1) == batch_size).all()
    taken = counts[:, 1].cumsum()
    exact = float(Fraction(share)) * batch_size * np.arange(1, 201)
    assert (taken <= exact + 1e-9).all() and (taken > exact - 1).all()
    assert counts[:, 1].max() - counts[:, 1].min() <= 1
    assert plan.rows_before(137) == counts[:137].sum(axis=0).tolist()


def test_a_curriculum_has_its_shares_from_batch_to_batch() -> None:
    plan = make_curriculum()
    counts = np.array([np.bincount(plan.assign(batch)[0], minlength=3) for batch in range(60)])
    assert (counts.sum(axis=1) == 24).all()
    assert counts[:7].tolist() == [[18, 6, 0]] * 7
    assert counts[7:31].sum(axis=0).tolist() == pytest.approx([0.5 * 576, 0.2 * 576, 0.3 * 576], abs=2)
    assert counts[31:].tolist() == [[3, 0, 21]] * 29
    for batch in (0, 6, 7, 8, 31, 44):
        assert plan.rows_before(batch) == counts[:batch].sum(axis=0).tolist()


def test_no_batch_takes_back_rows_however_shares_and_sizes_fall() -> None:
    """Of counts that are rounded one by one, the last part would have to make up for all others."""
    random = np.random.default_rng(5)
    for _ in range(60):
        num_parts = int(random.integers(2, 7))
        weights = [Fraction(int(each)) for each in random.integers(0, 10, num_parts) + np.eye(num_parts, dtype=int)[0]]
        shares = tuple(each / sum(weights) for each in weights)
        size, stages = int(random.integers(1, 12)), (Stage(0, shares), Stage(17, shares[::-1]))
        totals = np.array([count_rows(stages, batch, size) for batch in range(60)])
        assert (np.diff(totals, axis=0) >= 0).all() and (np.diff(totals.sum(axis=1)) == size).all()
        wanted = np.outer(np.arange(18) * size, np.array(shares, dtype=float))
        assert np.abs(totals[:18] - wanted).max() < num_parts - 1 + 1e-9


def test_every_row_of_a_part_comes_once_per_epoch_but_for_the_tail(plan: MixturePlan) -> None:
    read = [row for batch in range(60) for row in list_rows(plan, batch)]
    for part, corpus in enumerate(plan.parts):
        length = plan.rows_per_epoch(part)
        assert 0 <= sum(corpus.shard_rows) - length < plan.num_lanes
        epochs = [[row for each, epoch, row in read if (each, epoch) == (part, number)] for number in range(2)]
        if part == 0 and not epochs[1]:  # the curriculum's 60 batches read less than it
            assert len(epochs[0]) == len(set(epochs[0]))
            continue
        assert len(epochs[0]) == len(set(epochs[0])) == length
        assert epochs[0][: len(epochs[1])] != epochs[1]
        assert len(set(epochs[1])) == len(epochs[1]) > 0


def test_parts_alternate_within_a_batch() -> None:
    parts, _ = make_plan("0.25", 48).assign(3)
    for size in (4, 8, 24):  # shares of 12, 6 and 2 workers
        counts = parts.reshape(-1, size).sum(axis=1)
        assert (counts == size / 4).all()


def test_an_order_does_not_depend_on_what_is_beside_it() -> None:
    first = [row for batch in range(6) for row in list_rows(make_plan("0.25"), batch) if row[0] == 1]
    other = [row for batch in range(3) for row in list_rows(make_plan("0.5"), batch) if row[0] == 1]
    assert first == other


def test_golden_mixture() -> None:
    """The order is part of every checkpoint's meaning: these numbers must never change."""
    parts = (MixturePart("a", (7, 11), 42, Fraction(2, 3)), MixturePart("b", (9,), 43, Fraction(1, 3)))
    plan = MixturePlan(parts, 6)
    assert [list_rows(plan, batch) for batch in (0, 3)] == GOLDEN


def test_too_few_rows_are_an_error() -> None:
    with pytest.raises(CorpusError, match=r"--replay\.corpus makes 47 rows, and a batch takes them from 48 places"):
        make_plan(general=(40, 7))


@pytest.mark.jobs
@pytest.mark.parametrize("plan", [make_plan("0.3", 24), make_curriculum()], ids=[*PLANS])
def test_ray_data_reads_the_mixture_in_order_and_resumes_anywhere(
    plan: MixturePlan, tmp_path: Path, local_ray: None
) -> None:
    manifests = []
    for number, part in enumerate(plan.parts):
        (tmp_path / str(number)).mkdir()
        manifests.append(write_corpus(tmp_path / str(number), part.shard_rows))
    expected = [list_rows(plan, batch) for batch in range(60)]
    for world_size in (1, 2, 4):
        shares = []
        for rank in range(world_size):
            read = list(itertools.islice(stream_mixture(manifests, plan, rank=rank, world_size=world_size), 60))
            assert [each.batch for each in read] == list(range(60))
            for each in read:
                ids = [row[1] for row in each.rows.column("input_ids").to_pylist()]
                assert ids == each.rows.column("row_id").to_pylist()
            shares.append([_describe(each.rows) for each in read])
        assert [list(itertools.chain(*ranks)) for ranks in zip(*shares, strict=True)] == expected
    for batch in (6, 7, 30, 31, 47):
        resumed = next(stream_mixture(manifests, plan, rank=1, world_size=2, batch=batch))
        assert _describe(resumed.rows) == expected[batch][plan.global_batch_size // 2 :]


def _describe(rows) -> list[Row]:  # type: ignore[no-untyped-def]
    return list(zip(*(rows.column(name).to_pylist() for name in (PART, EPOCH, "row_id")), strict=True))
