"""Orders that change over a run: each row once per epoch, limits kept, shares kept, and the same from any place."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from toolkit.config.schema import CurriculumConfig, CurriculumShape, SourceConfig, TrainConfig, WeightPoint
from toolkit.data.orders import CurriculumOrder, Order, ScheduledMixture, length_limits
from toolkit.data.sampler import BEGINNING, GlobalBatchSampler, Position, length_classes
from toolkit.messages import DataError


def places(order: Order, global_size: int, count: int) -> list[Position]:
    """Return where the first steps begin."""
    sampler, found = GlobalBatchSampler(order.num_rows, global_size, 1, 0, 1, "", order=order), [BEGINNING]
    while len(found) < count:
        found.append(sampler.after(found[-1]))
    return found


def taken(order: Order, global_size: int, place: Position) -> list[int]:
    return GlobalBatchSampler(order.num_rows, global_size, 1, 0, 1, "", order=order).step_rows(place).tolist()


def test_limits() -> None:
    def limits(**values: object) -> list[float]:
        return length_limits(CurriculumConfig(start_length=100, **values), 500).tolist()  # type: ignore[arg-type]

    assert limits(steps=4) == [100, 200, 300, 400]
    assert limits(steps=4, shape=CurriculumShape.root) == [100, 300, 100 + 400 * 0.5**0.5, 100 + 400 * 0.75**0.5]
    assert limits(steps=6, shape=CurriculumShape.discrete, levels=2) == [100, 100, 100, 300, 300, 300]
    assert limits(steps=0) == []
    assert length_classes(CurriculumConfig(start_length=100, steps=1), 500) == [100, 200, 400]
    assert length_classes(CurriculumConfig(start_length=100), 500) == []


@given(
    num_rows=st.integers(1, 150),
    global_size=st.sampled_from([1, 4, 12]),
    part=st.floats(0, 1),
    shape=st.sampled_from(list(CurriculumShape)),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=100)
def test_curriculum_by_property(
    num_rows: int, global_size: int, part: float, shape: CurriculumShape, seed: int
) -> None:
    per_epoch = -(-num_rows // global_size)
    steps = max(1, round(part * per_epoch))
    lengths = np.random.default_rng(seed).integers(1, 100, num_rows)
    limits = length_limits(CurriculumConfig(steps=steps, start_length=10, shape=shape), 100)
    order = CurriculumOrder(lengths, limits, global_size, 100, f"{seed}")
    come: list[int] = []
    for number, place in enumerate(places(order, global_size, 2 * per_epoch)):
        rows, figure = taken(order, global_size, place), order.figures(place)["curriculum_length"]
        left = sorted(set(range(num_rows)) - set(come)) if place.epoch == 0 else []
        if number < steps:
            longest = lengths[rows].max()
            assert longest <= figure
            short = [row for row in left if lengths[row] <= limits[number]]
            if longest > limits[number]:  # only for want of shorter ones
                assert set(short) <= set(rows)
                assert longest <= sorted(lengths[left])[len(rows) - 1]
        else:
            assert figure == 100
        if place.epoch == 0:
            come += rows
    assert sorted(come) == list(range(num_rows))
    second = [
        row
        for place in places(order, global_size, 2 * per_epoch)[per_epoch:]
        for row in taken(order, global_size, place)
    ]
    assert sorted(second) == list(range(num_rows))


def test_a_curriculum_draws_by_chance() -> None:
    """Among the rows within its limit it prefers neither short ones nor those that stand first."""
    lengths = np.arange(1, 1001)
    order = CurriculumOrder(lengths, np.full(5, 500.0), 50, 1000, "k")
    first = order.rows(BEGINNING, 250)
    assert lengths[first].max() <= 500
    assert 200 < lengths[first].mean() < 300
    assert abs(np.corrcoef(np.arange(250), first)[0, 1]) < 0.2
    other = CurriculumOrder(lengths, np.full(5, 500.0), 50, 1000, "other").rows(BEGINNING, 250)
    assert other.tolist() != first.tolist()


def source(*points: tuple[float, float], weight: float = 1.0) -> SourceConfig:
    return SourceConfig(weight=weight, weights=[WeightPoint(at=at, weight=value) for at, value in points])


def test_weights_by_hand() -> None:
    rising = source((0.25, 1.0), (0.75, 3.0))
    assert [rising.weight_at(at) for at in (0, 0.25, 0.5, 0.75, 1)] == [1, 1, 2, 3, 3]
    assert rising.mean_weight == 2
    assert source((0, 0), (1, 3)).mean_weight == 1.5
    assert (source(weight=0.5).weight_at(0.3), source(weight=0.5).mean_weight) == (0.5, 0.5)


def mixture(**values: object) -> ScheduledMixture:
    given = {
        "bounds": [0, 60, 100, 120],
        "sources": [source((0, 2), (1, 0)), source((0, 0), (0.5, 1)), source(weight=0.5)],
        "names": ["a", "b", "b"],
        "global_size": 8,
        "train": TrainConfig(epochs=3),
        "key": "k",
    }
    return ScheduledMixture(**(given | values))  # type: ignore[arg-type]


def test_a_mixture_keeps_its_shares() -> None:
    order = mixture()
    assert order.num_rows == round(1 * 60 + 0.75 * 40 + 0.5 * 20)
    assert order.total_steps == 3 * 13
    counts, wanted = np.zeros(3), np.zeros(3)
    for step, place in enumerate(places(order, 8, order.total_steps)):
        rows = taken(order, 8, place)
        assert len(rows) == (4 if step % 13 == 12 else 8)
        counts += np.histogram(rows, [0, 60, 100, 120])[0]
        at = (step + 0.5) / order.total_steps
        parts = np.array([60 * 2 * (1 - at), 40 * min(1, 2 * at), 10])
        wanted += len(rows) * parts / parts.sum()
        assert np.abs(counts - wanted).max() < 1
        shares = order.figures(place)
        assert shares["mixture_share/a"] == pytest.approx(parts[0] / parts.sum(), abs=1e-6)
        assert shares["mixture_share/b"] == pytest.approx(1 - parts[0] / parts.sum(), abs=2e-6)


def test_no_row_of_a_source_comes_twice_before_all_have() -> None:
    order = mixture(train=TrainConfig(epochs=5))
    come = [row for place in places(order, 8, order.total_steps) for row in taken(order, 8, place)]
    for begin, end in ((0, 60), (60, 100), (100, 120)):
        mine = [row for row in come if begin <= row < end]
        passes = [mine[first : first + end - begin] for first in range(0, len(mine), end - begin)]
        assert len(passes) > 1
        assert all(len(set(one)) == len(one) for one in passes)
        assert passes[0] != passes[1]


def test_fixed_weights_give_each_row_as_often_as_they_say() -> None:
    order = mixture(sources=[source((0, 2), (1, 2)), source(), source((0.5, 1))], train=TrainConfig(epochs=2))
    counts = Counter(row for place in places(order, 8, order.total_steps) for row in taken(order, 8, place))
    assert {counts[row] for row in range(60)} == {4}
    assert {counts[row] for row in range(60, 120)} == {2}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_place_goes_on_with_the_same_rows(world_size: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 90)
    limits = length_limits(CurriculumConfig(steps=9, start_length=10), 100)
    for order, other in (
        (mixture(), mixture()),
        (CurriculumOrder(lengths, limits, 8, 100, "k"), CurriculumOrder(lengths, limits, 8, 100, "k")),
    ):
        every = places(order, 8, 30)
        for number in (0, 5, 13, 20):
            parts = [
                GlobalBatchSampler(order.num_rows, 8, 1, rank, world_size, "", order=other, start=every[number])
                for rank in range(world_size)
            ]
            for step in range(3):
                accumulation = 8 // world_size
                dealt = [
                    row
                    for part in parts
                    for batch in list(islice(iter(part), 3 * accumulation))[
                        step * accumulation : (step + 1) * accumulation
                    ]
                    for row in batch
                ]
                assert sorted(dealt) == sorted(taken(order, 8, every[number + step]))


def test_a_mixture_goes_on_after_the_end_as_it_ended() -> None:
    """As after a rewind, which passes data over."""
    order = mixture(train=TrainConfig(max_steps=4))
    late = places(order, 8, 9)[8]
    assert order.figures(late)["mixture_share/a"] == 0
    assert len(taken(order, 8, late)) == 8


def test_a_source_without_rows_is_told() -> None:
    with pytest.raises(DataError, match="data source b has no row to train"):
        mixture(bounds=[0, 60, 60, 80])
