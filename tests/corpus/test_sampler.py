"""The canonical order of one text or several: a function of seed and batch, whatever the ranks and the restarts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from conftest import REPOSITORY

from domext_ray.errors import CorpusError
from domext_ray.text.corpus.sampler import BLOCK_ROWS, MAX_LANES, Part, Sampler, Stage, count_rows, share_rows
from domext_ray.text.data.draws import Purpose, hash_counters, to_uniform

ALONE, DOMAIN, GENERAL, FURTHER = (137, 5, 9001, 64), (137, 5, 901, 64), (90, 40), (70, 3, 31)
Row = tuple[int, int, int]
"""Text, epoch, and the row's number in its text."""


def make_alone(batch_size: int = 48, seed: int = 3, shard_rows: tuple[int, ...] = ALONE) -> Sampler:
    return Sampler((Part("--corpus", shard_rows, seed),), batch_size)


def make_mixture(share: str = "0.25", batch_size: int = 48, general: tuple[int, ...] = GENERAL) -> Sampler:
    part = Fraction(share)
    parts = (Part("--corpus", DOMAIN, 3), Part("--replay.corpus", general, 4))
    return Sampler(parts, batch_size, (Stage(0, (1 - part, part)),))


def make_curriculum(batch_size: int = 24) -> Sampler:
    """Three parts: the third one is left out at first, then has more and more; in the end the second has nothing."""
    shares = [("0.75", "0.25", "0"), ("0.5", "0.2", "0.3"), ("0.125", "0", "0.875")]
    texts = zip(("--corpus", "--replay.corpus", "third"), (DOMAIN, GENERAL, FURTHER), (3, 4, 5), strict=True)
    stages = (Stage(batch, tuple(map(Fraction, own))) for batch, own in zip((0, 7, 31), shares, strict=True))
    return Sampler(tuple(Part(*fields) for fields in texts), batch_size, tuple(stages))


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "one text": lambda: make_alone(shard_rows=DOMAIN),
    "two texts": make_mixture,
    "a curriculum of three": make_curriculum,
}


def list_rows(sampler: Sampler, batch: int) -> list[Row]:
    parts, numbers = sampler.draw(batch)
    found: list[Row] = [(-1, -1, -1)] * len(parts)
    for part, text in enumerate(sampler.parts):
        starts = np.concatenate([[0], np.cumsum(text.shard_rows)])
        own = np.flatnonzero(parts == part)
        for chosen, epoch, shards, within in sampler.locate(part, numbers[own]):
            for place, row in zip(own[chosen], starts[shards] + within, strict=True):
                found[place] = (part, epoch, int(row))
    return found


def list_alone(sampler: Sampler, batches: range) -> np.ndarray:
    """Row numbers of one text, [batches, global batch size]."""
    return np.array([[row for _, _, row in list_rows(sampler, batch)] for batch in batches])


def test_any_number_of_ranks_reads_the_same_rows() -> None:
    """Shares are one behind the other, and nearly of one size, in rows or in groups of rows."""
    for size, group in ((16, 1), (26, 1), (28, 4)):
        for world_size in (1, 3, 5, 7, size // group):
            shares = [share_rows(size, rank, world_size, group) for rank in range(world_size)]
            assert [row for share in shares for row in range(size)[share]] == [*range(size)], (size, world_size)
            sizes = [(share.stop - share.start) / group for share in shares]
            assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and max(sizes) == sizes[-1]
            assert all(share.start % group == 0 for share in shares)


def test_a_rank_reads_near_a_few_places_of_a_text() -> None:
    """Of 64 lanes each of four ranks reads a quarter, so that together they read the text once."""
    sampler, length = make_alone(256), sum(ALONE) // MAX_LANES
    for rank in range(4):
        numbers = np.concatenate([sampler.draw(batch)[1][share_rows(256, rank, 4)] for batch in range(20)])
        assert sorted({*(numbers % MAX_LANES).tolist()}) == [*range(16 * rank, 16 * rank + 16)]
        assert (numbers // MAX_LANES).max() == 20 * 256 // MAX_LANES - 1 < length
    uneven = [make_alone(100).draw(batch)[1][share_rows(100, 1, 5)] % MAX_LANES for batch in range(40)]
    assert len({*np.concatenate(uneven).tolist()}) < 2 * MAX_LANES / 5


def test_seed_and_epoch_change_the_order() -> None:
    first, other = list_alone(make_alone(seed=0), range(191)), list_alone(make_alone(seed=1), range(191))
    assert (first != list_alone(make_alone(seed=0), range(191, 382))).mean() > 0.9
    assert (first != other).mean() > 0.9


def test_rows_mix_within_blocks_only() -> None:
    numbers = np.arange(3 * BLOCK_ROWS)
    rows = np.empty_like(numbers)
    for chosen, _, _, within in make_alone(1, 0, (3 * BLOCK_ROWS,)).locate(0, numbers):
        rows[chosen] = within
    np.testing.assert_array_equal(rows // BLOCK_ROWS, np.repeat([0, 1, 2], BLOCK_ROWS))
    assert (rows[:BLOCK_ROWS] != np.arange(BLOCK_ROWS)).mean() > 0.9


def test_golden_order() -> None:
    """The order is part of every checkpoint's meaning: these numbers must never change."""
    assert hash_counters(1, 2, 3).tolist() == [7702586659592502839]
    assert hash_counters(3, start=hash_counters(1, 2)).tolist() == [7702586659592502839]
    sampler = Sampler((Part("", (2 * BLOCK_ROWS + 37, 101), seed=1),), global_batch_size=96)
    numbers = np.concatenate([sampler.draw(batch)[1] for batch in range(0, 300, 9)])
    located = [column for *_, shards, rows in sampler.locate(0, numbers) for column in (shards, rows)]
    digest = hashlib.sha256(b"".join(column.astype("<i8").tobytes() for column in located)).hexdigest()
    assert digest[:16] == "ed5257e3cd0811e1", "another order needs another version in training.phases.ORDER"


def test_hash_is_uniform() -> None:
    draws = to_uniform(hash_counters(7, 1, 0, np.arange(200_000)))
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert np.abs(counts / 10_000 - 1).max() < 0.05


def test_a_part_has_its_share_of_the_rows_before_any_batch() -> None:
    for share, size in (("0.25", 48), ("0.1", 24), ("0.33", 10), ("0.01", 16)):
        sampler = make_mixture(share, size)
        counts = np.array([np.bincount(sampler.draw(batch)[0], minlength=2) for batch in range(200)])
        assert (counts.sum(axis=1) == size).all()
        taken, exact = counts[:, 1].cumsum(), float(Fraction(share)) * size * np.arange(1, 201)
        assert (taken <= exact + 1e-9).all() and (taken > exact - 1).all(), share
        assert counts[:, 1].max() - counts[:, 1].min() <= 1
        assert sampler.rows_before(137) == counts[:137].sum(axis=0).tolist()


def test_a_curriculum_has_its_shares_from_batch_to_batch() -> None:
    sampler = make_curriculum()
    counts = np.array([np.bincount(sampler.draw(batch)[0], minlength=3) for batch in range(60)])
    assert (counts.sum(axis=1) == 24).all()
    assert counts[:7].tolist() == [[18, 6, 0]] * 7
    assert counts[7:31].sum(axis=0).tolist() == pytest.approx([0.5 * 576, 0.2 * 576, 0.3 * 576], abs=2)
    assert counts[31:].tolist() == [[3, 0, 21]] * 29
    for batch in (0, 6, 7, 8, 31, 44):
        assert sampler.rows_before(batch) == counts[:batch].sum(axis=0).tolist()


def test_no_batch_takes_back_rows_however_shares_and_sizes_fall() -> None:
    """Of counts that are rounded one by one, the last part would have to make up for all others."""
    random = np.random.default_rng(5)
    for _ in range(60):
        num_parts = int(random.integers(2, 7))
        weights = [Fraction(int(draw)) for draw in random.integers(0, 10, num_parts) + np.eye(num_parts, dtype=int)[0]]
        shares = tuple(weight / sum(weights) for weight in weights)
        size, stages = int(random.integers(1, 12)), (Stage(0, shares), Stage(17, shares[::-1]))
        totals = np.array([count_rows(stages, batch, size) for batch in range(60)])
        assert (np.diff(totals, axis=0) >= 0).all() and (np.diff(totals.sum(axis=1)) == size).all()
        wanted = np.outer(np.arange(18) * size, np.array(shares, dtype=float))
        assert np.abs(totals[:18] - wanted).max() < num_parts - 1 + 1e-9


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_row_of_a_part_comes_once_per_epoch_but_for_the_tail(name: str) -> None:
    sampler = SAMPLERS[name]()
    read = [row for batch in range(60) for row in list_rows(sampler, batch)]
    for part, corpus in enumerate(sampler.parts):
        length = sampler.rows_per_epoch(part)
        assert 0 <= sum(corpus.shard_rows) - length < sampler.num_lanes
        epochs = [[row for owner, epoch, row in read if (owner, epoch) == (part, number)] for number in range(2)]
        if part == 0 and not epochs[1]:  # the curriculum's 60 batches read less than it
            assert len(epochs[0]) == len(set(epochs[0]))
            continue
        assert len(epochs[0]) == len(set(epochs[0])) == length and {*epochs[0]} <= {*range(sum(corpus.shard_rows))}
        assert epochs[0][: len(epochs[1])] != epochs[1]
        assert len(set(epochs[1])) == len(epochs[1]) > 0


def test_parts_alternate_within_a_batch() -> None:
    parts, _ = make_mixture("0.25", 48).draw(3)
    for size in (4, 8, 24):  # shares of 12, 6 and 2 workers
        counts = parts.reshape(-1, size).sum(axis=1)
        assert (counts == size / 4).all()


def test_an_order_does_not_depend_on_what_is_beside_it() -> None:
    first = [row for batch in range(6) for row in list_rows(make_mixture("0.25"), batch) if row[0] == 1]
    other = [row for batch in range(3) for row in list_rows(make_mixture("0.5"), batch) if row[0] == 1]
    assert first == other


def test_too_few_rows_are_an_error() -> None:
    with pytest.raises(CorpusError, match=r"--replay\.corpus makes 47 rows, too few for batches of 48.*48 places"):
        make_mixture(general=(40, 7))
    with pytest.raises(CorpusError, match="--corpus makes 99 rows, too few for batches of 100.*64 places"):
        make_alone(100, 0, (60, 39))
    assert make_mixture(batch_size=480, general=(40, 30)).rows_per_epoch(1) == 64, "beside another, it may be small"


def test_no_two_draws_share_their_counters() -> None:
    numbers = [purpose.value for purpose in Purpose.__members__.values()]
    assert len(set(numbers)) == len(numbers)
    users: dict[str, list[str]] = {name: [] for name in Purpose.__members__}
    unnamed = []
    for path in sorted((REPOSITORY / "domext_ray").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"\bPurpose\.(\w+)", text)):
            users[name].append(path.name)
        if "import hash_counters" in text:
            unnamed.append(path.name)
    assert {name: len(files) for name, files in users.items()} == dict.fromkeys(users, 1), users
    assert unnamed == ["evaluate.py"], "its seed is its own"
