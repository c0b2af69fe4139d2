"""Each row once per epoch over all ranks, balanced, and from any place as if the earlier ones had been taken."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from toolkit.data.sampler import BEGINNING, GlobalBatchSampler, Position, sequential, steps_per_epoch

RANKS = [1, 2, 3, 4, 8]
Steps = list[list[list[int]]]


def steps(sampler: GlobalBatchSampler, count: int) -> Steps:
    """Return the micro-batches of so many steps."""
    stream = iter(sampler)
    return [list(islice(stream, sampler.accumulation)) for _ in range(count)]


def rows_of(ranks: list[Steps], step: int) -> list[int]:
    """Return the rows of a step over all ranks, ascending."""
    return sorted(row for rank in ranks for micro_batch in rank[step] for row in micro_batch)


@pytest.mark.parametrize("world_size", RANKS)
@given(
    num_rows=st.integers(1, 120),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    by_length=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=30)
def test_partition(world_size: int, num_rows: int, micro: int, accumulation: int, by_length: bool, seed: int) -> None:
    global_size = world_size * micro * accumulation
    lengths = np.random.default_rng(seed).integers(1, 99, num_rows)
    samplers = [
        GlobalBatchSampler(
            num_rows,
            global_size,
            micro,
            rank,
            world_size,
            f"{seed}",
            costs=lengths.__getitem__ if by_length else None,
        )
        for rank in range(world_size)
    ]
    per_epoch = steps_per_epoch(num_rows, global_size)
    ranks = [steps(sampler, 2 * per_epoch) for sampler in samplers]
    place = BEGINNING
    for epoch in range(2):
        taken = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            assert place.epoch == epoch
            sizes = [sum(map(len, rank[step])) for rank in ranks]
            assert max(sizes) - min(sizes) <= 1
            for rank in ranks:
                assert len(rank[step]) == accumulation
                parts = [len(micro_batch) for micro_batch in rank[step]]
                assert max(parts) <= micro
                assert max(parts) - min(parts) <= 1
            batch = rows_of(ranks, step)
            assert len(batch) == min(global_size, num_rows - place.row)
            # The global batch is the same whatever the number of ranks.
            assert batch == sorted(samplers[0].step_rows(place).tolist())
            if by_length and len(batch) == global_size:  # no row of an earlier micro-batch is shorter
                for rank in ranks:
                    for before, after in zip(rank[step], rank[step][1:], strict=False):
                        assert lengths[before].min() >= lengths[after].max()
            taken += batch
            place = samplers[0].after(place)
        assert sorted(taken) == list(range(num_rows))


@given(num_rows=st.integers(1, 60), old=st.sampled_from(RANKS), new=st.sampled_from(RANKS), done=st.integers(0, 12))
@settings(deadline=None, max_examples=100)
def test_any_place_continues_on_any_number_of_ranks(num_rows: int, old: int, new: int, done: int) -> None:
    def ranks_of(world_size: int, start: Position, count: int) -> list[Steps]:
        return [
            steps(GlobalBatchSampler(num_rows, 24, 1, rank, world_size, "k", start=start), count)
            for rank in range(world_size)
        ]

    whole = ranks_of(old, BEGINNING, done + 3)
    place, sampler = BEGINNING, GlobalBatchSampler(num_rows, 24, 1, 0, old, "k")
    for _ in range(done):
        place = sampler.after(place)
    rest = ranks_of(new, place, 3)
    assert [rows_of(rest, step) for step in range(3)] == [rows_of(whole, done + step) for step in range(3)]
    if old == new:
        assert rest == [rank[done:] for rank in whole]


@given(num_rows=st.integers(1, 80), row=st.integers(0, 79), size=st.sampled_from([4, 8, 12]))
@settings(deadline=None)
def test_another_batch_size_continues_in_the_middle_of_an_epoch(num_rows: int, row: int, size: int) -> None:
    row = min(row, num_rows - 1)
    order = GlobalBatchSampler(num_rows, num_rows, num_rows, 0, 1, "k").step_rows(Position(2, 0)).tolist()
    sampler = GlobalBatchSampler(num_rows, size, 1, 0, 1, "k", start=Position(2, row))
    rest = [row for step in steps(sampler, steps_per_epoch(num_rows - row, size)) for part in step for row in part]
    assert rest == order[row:]


def test_epochs_and_keys_differ_and_repeat() -> None:
    def order(key: str, epoch: int) -> tuple[int, ...]:
        return tuple(GlobalBatchSampler(50, 50, 1, 0, 1, key).step_rows(Position(epoch, 0)).tolist())

    assert order("1", 0) == order("1", 0)
    assert len({order(key, epoch) for key in ("1 data", "2 data", "1 other") for epoch in (0, 1)}) == 6
    plain = GlobalBatchSampler(5, 8, 2, 0, 2, "k", shuffle=False)
    assert plain.step_rows(Position(3, 1)).tolist() == [1, 2, 3, 4]


def test_num_steps_stops() -> None:
    sampler = GlobalBatchSampler(21, 8, 2, 0, 2, "k", start=Position(0, 16), num_steps=3)
    assert len(list(sampler)) == 3 * sampler.accumulation


def test_hand_dealt_short_step() -> None:
    dealt = [list(GlobalBatchSampler(5, 8, 2, rank, 2, "k", shuffle=False, num_steps=1)) for rank in range(2)]
    assert dealt == [[[0, 2], [4]], [[1], [3]]]
    lone = [list(GlobalBatchSampler(1, 8, 2, rank, 2, "k", num_steps=1)) for rank in range(2)]
    assert lone == [[[0], []], [[], []]]
    lengths = np.array([1, 5, 3, 4, 2])
    dealt = [
        list(GlobalBatchSampler(5, 8, 2, rank, 2, "k", shuffle=False, num_steps=1, costs=lengths.__getitem__))
        for rank in range(2)
    ]
    assert dealt == [[[1, 2], [0]], [[3], [4]]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="10 is not a multiple of 4 x 2"):
        GlobalBatchSampler(5, 10, 4, 0, 2, "k")
    with pytest.raises(ValueError, match="at least one row"):
        GlobalBatchSampler(0, 8, 4, 0, 2, "k")


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 17])
def test_sequential_takes_each_once(world_size: int, num_rows: int) -> None:
    ranks = [sequential(num_rows, 3, rank, world_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(row for rank in ranks for micro in rank for row in micro) == list(range(num_rows))
    assert all(len(micro) <= 3 for rank in ranks for micro in rank)


def test_sequential_by_hand() -> None:
    assert [sequential(5, 1, rank, 2) for rank in range(2)] == [[[0], [2], [4]], [[1], [3], []]]
