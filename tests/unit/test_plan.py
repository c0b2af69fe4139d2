"""Rows filled with samples: none lost, none doubled, none cut; the same plan whenever the same is asked for."""

import math
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import Packing, SourceConfig
from toolkit.data.loader import collate
from toolkit.data.packing import evaluated_samples, group, pack, plan_sequences
from toolkit.data.plans import PAD_MULTIPLE, PackingPlan, takes_each_once
from toolkit.data.sampler import Permutation
from toolkit.data.store import TokenizedCache
from toolkit.data.tokenize import build_caches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=300)


@given(lengths=LENGTHS, capacity=st.integers(60, 130), window=st.integers(0, 50))
@settings(deadline=None)
def test_packing_by_property(lengths: list[int], capacity: int, window: int) -> None:
    rows = pack(np.array(lengths), capacity, window)
    filled = np.bincount(rows, weights=lengths)
    assert filled.min() >= 1  # rows are numbered without gaps
    assert filled.max() <= capacity
    if not window:  # two rows that are half empty would be one
        assert sum(filled <= capacity / 2) <= 1
        assert len(filled) <= 11 / 9 * math.ceil(sum(lengths) / capacity * 1.5 + 1) + 4
    else:
        for start in range(0, len(lengths), window):
            assert not set(rows[start : start + window]) & set(rows[start + window :])


@given(lengths=LENGTHS, budget=st.integers(8, 200))
@settings(deadline=None)
def test_groups_by_property(lengths: list[int], budget: int) -> None:
    groups = group(np.array(lengths), budget)
    for number in range(groups.max() + 1):
        mine = np.array(lengths)[groups == number]
        padded = -(-mine.max() // PAD_MULTIPLE) * PAD_MULTIPLE
        assert len(mine) == 1 or len(mine) * padded <= budget
    by_group = [np.array(lengths)[groups == number] for number in range(groups.max() + 1)]
    assert all(before.min() >= after.max() for before, after in pairwise(by_group))


def test_best_fit_by_hand() -> None:
    assert pack(np.array([3, 6, 4, 7, 5]), 10).tolist() == [0, 1, 1, 0, 2]
    assert pack(np.array([10, 10, 1]), 10).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="a sample of 11 tokens does not fit into rows of 10"):
        pack(np.array([11]), 10)


def test_hardly_anything_is_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(math.log(120), 0.67, 20_000), 8, 2048).astype(np.int64)
    rows = pack(lengths, 2048)
    assert lengths.sum() / ((rows.max() + 1) * 2048) > 0.99


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
@settings(deadline=None)
def test_permutation_by_property(size: int, key: str) -> None:
    order = Permutation(size, key)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    some = np.arange(0, size, 7)
    assert Permutation(size, key)(some).tolist() == order[some].tolist()


def test_permutation_is_random_enough() -> None:
    orders = np.array([Permutation(50, str(key))(np.arange(50)) for key in range(4000)])
    counts = np.array([np.bincount(orders[:, place], minlength=50) for place in range(50)])  # expected 80 each
    chi_square = ((counts - 80.0) ** 2 / 80).sum()
    assert 2100 < chi_square < 2720  # 2,401 degrees of freedom, deviation 69
    neighbours = np.abs(np.diff(orders, axis=1)).mean()
    assert abs(neighbours - 51 / 3) < 0.2
    assert Permutation(10, "a")(np.arange(10)).tolist() == [7, 3, 6, 5, 0, 2, 1, 4, 8, 9]  # the same on every machine


def stores(tmp_path: Path) -> tuple[TokenizedCache, list[SourceConfig]]:
    """Return a store of 40 and 20 samples from two sources."""
    cfg = run_config(
        tmp_path,
        write_rows(tmp_path / "1.jsonl", pairs(40, 5)),
        write_rows(tmp_path / "2.jsonl", pairs(20, 9)),
    )
    return build_caches(cfg, ByteEncoder()).train, cfg.data.sources


def planned(
    store: TokenizedCache, folder: Path, packing: Packing, sources: list[SourceConfig], seed: int = 1
) -> PackingPlan:
    return plan_sequences(
        store,
        packing,
        max_length=40,
        micro_per_gpu=3,
        seed=seed,
        sources=sources,
        cache_dir=folder,
    )


@pytest.mark.parametrize("packing", list(Packing))
def test_plan_of_a_store(tmp_path: Path, packing: Packing) -> None:
    store, sources = stores(tmp_path)
    plan = planned(store, tmp_path, packing, sources)
    assert sorted(sample for row in range(len(plan)) for sample in plan[row]) == list(range(60))
    again = planned(store, tmp_path, packing, sources)
    assert [again[row] for row in range(len(again))] == [plan[row] for row in range(len(plan))]
    travelled = pickle.loads(pickle.dumps(plan))
    assert [travelled[row] for row in range(len(plan))] == [plan[row] for row in range(len(plan))]
    assert len(pickle.dumps(plan)) < 500
    if packing is Packing.none:
        assert takes_each_once(store, sources, 0), "so that a run plans nothing"
        return
    other = planned(store, tmp_path, packing, sources, seed=2)
    assert [other[row] for row in range(len(other))] != [plan[row] for row in range(len(plan))]
    lengths = [[int(store.lengths(np.array([sample]))[0]) for sample in plan[row]] for row in range(len(plan))]
    if packing is Packing.packed:
        assert max(map(sum, lengths)) <= 40
    else:
        assert all(max(row) * len(row) <= 120 for row in lengths)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize(("first", "second"), [(1.0, 1.5), (2.0, 0.25), (0.5, 3.0)])
def test_weights(tmp_path: Path, packing: Packing, first: float, second: float) -> None:
    store, sources = stores(tmp_path)
    sources[0].weight, sources[1].weight = first, second
    plan = planned(store, tmp_path, packing, sources)
    counts = Counter(sample for row in range(len(plan)) for sample in plan[row])
    for samples, weight in ((range(40), first), (range(40, 60), second)):
        assert sum(counts[sample] for sample in samples) == round(weight * len(samples))
        assert all(int(weight) <= counts[sample] <= math.ceil(weight) for sample in samples)


@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_every_token_comes_once_and_none_crosses(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=60))
    samples = []
    for number, length in enumerate(lengths):
        trained = np.array([False, *data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))])
        samples.append((np.arange(length, dtype=np.uint32) + 1000 * (number + 1), trained[:length]))
    rows = pack(np.array(lengths), 64)
    batch = collate(
        [[samples[i] for i in np.flatnonzero(rows == row)] for row in range(rows.max() + 1)], 7, packed=True
    )
    ids, segments = batch["input_ids"].numpy(), batch["segment_ids"].numpy()
    found = {}
    for row in range(len(ids)):
        for segment in range(1, segments[row].max() + 1):
            place = np.flatnonzero(segments[row] == segment)
            number = ids[row][place[0]] // 1000 - 1
            assert number not in found
            found[number] = ids[row][place].tolist()
            assert batch["position_ids"][row][place].tolist() == list(range(len(place)))
            labels = batch["labels"].numpy()[row][place]
            mask = samples[number][1]
            assert np.where(mask, ids[row][place], -100).tolist() == labels.tolist()
    assert found == {number: sample[0].tolist() for number, sample in enumerate(samples)}
    assert set(ids[segments == 0]) <= {7}
    bounds = batch["cu_seq_lens"].tolist()
    assert bounds[0] == 0 and bounds[-1] == ids.size
    flat, starts = segments.reshape(-1), set(bounds)
    for place in range(1, ids.size):
        assert (place in starts) == (place % ids.shape[1] == 0 or flat[place] != flat[place - 1])


class Split:
    """As much of a store as a subset needs: how many samples, and of which source each is."""

    def __init__(self, *counts: int) -> None:
        self.of = np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.of)

    def sources(self) -> np.ndarray:
        return self.of


@pytest.mark.parametrize(
    ("counts", "most", "shares"),
    [
        ((50, 30), 0, [50, 30]),
        ((50, 30), 80, [50, 30]),
        ((900, 100), 100, [90, 10]),
        ((9000, 5), 100, [99, 1]),  # every source is represented
        ((1, 1, 9998), 10, [1, 1, 8]),
        ((333, 333, 334), 100, [33, 33, 34]),
        ((10, 10, 10), 2, [1, 1, 1]),
    ],
)
def test_an_evaluation_takes_its_share_of_each_source(counts: tuple[int, ...], most: int, shares: list[int]) -> None:
    split = Split(*counts)
    chosen = evaluated_samples(split, most)  # type: ignore[arg-type]
    assert np.bincount(split.of[chosen], minlength=len(counts)).tolist() == shares
    assert np.array_equal(chosen, np.unique(chosen)), "each once, ascending"
    assert np.array_equal(chosen, evaluated_samples(split, most))  # type: ignore[arg-type]


def test_the_subset_is_no_stretch_of_the_file() -> None:
    chosen = evaluated_samples(Split(10_000), 1000)  # type: ignore[arg-type]
    assert np.histogram(chosen, 10, (0, 10_000))[0].min() > 60
