"""Each sample once per epoch over all ranks, balanced, and from any step as if the earlier ones had been taken."""

from itertools import islice

import pytest

from toolkit.data.sampler import GlobalBatchSampler, sequential

RANKS = [1, 2, 3, 4, 8]


def steps(sampler: GlobalBatchSampler, count: int) -> list[list[list[int]]]:
    """Return the micro-batches of so many steps."""
    stream = iter(sampler)
    return [list(islice(stream, sampler.accumulation)) for _ in range(count)]


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("num_samples", [1, 5, 23, 24, 25, 48, 101])
@pytest.mark.parametrize("micro", [1, 2])
def test_partition_over_ranks(world_size: int, num_samples: int, micro: int) -> None:
    global_size = 24 if 24 % (world_size * micro) == 0 else world_size * micro * 2
    samplers = [GlobalBatchSampler(num_samples, global_size, micro, rank, world_size, 7) for rank in range(world_size)]
    per_epoch = samplers[0].steps_per_epoch
    assert per_epoch == -(-num_samples // global_size)
    ranks = [steps(sampler, 2 * per_epoch) for sampler in samplers]
    for epoch in range(2):
        taken = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            sizes = [sum(map(len, rank[step])) for rank in ranks]
            assert max(sizes) - min(sizes) <= 1
            for rank in ranks:
                assert len(rank[step]) == global_size // (micro * world_size)
                lengths = [len(micro_batch) for micro_batch in rank[step]]
                assert max(lengths) <= micro
                assert max(lengths) - min(lengths) <= 1
            batch = [sample for rank in ranks for micro_batch in rank[step] for sample in micro_batch]
            position = step - epoch * per_epoch
            assert len(batch) == min(global_size, num_samples - position * global_size)
            # The global batch is the same whatever the number of ranks.
            begin = position * global_size
            assert sorted(batch) == sorted(samplers[0].order(epoch)[begin : begin + global_size].tolist())
            taken += batch
        assert sorted(taken) == list(range(num_samples))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(sample) for sample in GlobalBatchSampler(50, 8, 2, 0, 2, seed).order(epoch)]

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert GlobalBatchSampler(5, 8, 2, 0, 2, 1, shuffle=False).order(3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 9])
def test_any_start_continues_the_stream(start: int) -> None:
    whole = steps(GlobalBatchSampler(21, 8, 2, 1, 2, 3), 12)
    assert steps(GlobalBatchSampler(21, 8, 2, 1, 2, 3, start_step=start), 12 - start) == whole[start:]


def test_end_step_stops() -> None:
    sampler = GlobalBatchSampler(21, 8, 2, 0, 2, 3, start_step=2, end_step=5)
    assert len(list(sampler)) == 3 * sampler.accumulation


def test_hand_dealt_short_step() -> None:
    dealt = [list(GlobalBatchSampler(5, 8, 2, rank, 2, 0, shuffle=False, end_step=1)) for rank in range(2)]
    assert dealt == [[[0, 4], [2]], [[1], [3]]]
    lone = [list(GlobalBatchSampler(1, 8, 2, rank, 2, 0, end_step=1)) for rank in range(2)]
    assert lone == [[[0], []], [[], []]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="10 is not a multiple of 4 x 2"):
        GlobalBatchSampler(5, 10, 4, 0, 2, 0)
    with pytest.raises(ValueError, match="at least one sample"):
        GlobalBatchSampler(0, 8, 4, 0, 2, 0)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("num_samples", [1, 7, 8, 17])
def test_sequential_takes_each_once(world_size: int, num_samples: int) -> None:
    ranks = [sequential(num_samples, 3, rank, world_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(sample for rank in ranks for micro in rank for sample in micro) == list(range(num_samples))
    assert all(len(micro) <= 3 for rank in ranks for micro in rank)


def test_sequential_by_hand() -> None:
    assert [sequential(5, 1, rank, 2) for rank in range(2)] == [[[0], [2], [4]], [[1], [3], []]]
