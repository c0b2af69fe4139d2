"""Padding, labels, the filler row, and the loader that joins store, sampler and collate."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import Packing
from toolkit.data.loader import Layout, build_loader, collate
from toolkit.data.packing import plan_sequences
from toolkit.data.plans import PackingPlan
from toolkit.data.sampler import GlobalBatchSampler, sequential
from toolkit.data.store import Sample, TokenizedCache
from toolkit.data.tokenize import build_caches
from toolkit.messages import DataError
from toolkit.tasks.language_batches import _with_columns, prefetch


def sample(ids: list[int], trained: list[int]) -> Sample:
    return np.array(ids, dtype=np.uint32), np.array(trained, dtype=np.bool_)


@pytest.fixture
def store(tmp_path: Path) -> TokenizedCache:
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(21)))
    return build_caches(cfg, ByteEncoder()).train


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list[list[int]]]:
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_the_sampler_is_iterated_once_without_further_columns(store: TokenizedCache) -> None:
    prepared = mock.Mock(reference={}, targets={}, split=lambda _: (store, mock.Mock()))
    batches = iter([{"input_ids": torch.zeros(1, 8)}])
    assert _with_columns(batches, mock.Mock(), prepared, "train") is batches  # a Mock cannot be iterated


def test_collate_by_hand() -> None:
    batch = collate([[sample([5, 6, 7], [0, 1, 1])], [sample([8], [0])]], pad_id=9)
    assert as_lists(batch) == {
        "input_ids": [[5, 6, 7, 9, 9, 9, 9, 9], [8, 9, 9, 9, 9, 9, 9, 9]],
        "labels": [[-100, 6, 7, *[-100] * 5], [-100] * 8],
        "segment_ids": [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
        "position_ids": [list(range(8))] * 2,
        "target_indices": [1, 2],
        "targets": [6, 7],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_packed_by_hand() -> None:
    rows = [[sample([5, 6, 7], [0, 1, 1]), sample([8, 3], [0, 1])], [sample([1] * 8, [0] * 8)]]
    assert as_lists(collate(rows, pad_id=9, packed=True)) == {
        "input_ids": [[5, 6, 7, 8, 3, 9, 9, 9], [1] * 8],
        "labels": [[-100, 6, 7, -100, 3, -100, -100, -100], [-100] * 8],
        "segment_ids": [[1, 1, 1, 2, 2, 0, 0, 0], [1] * 8],
        "position_ids": [[0, 1, 2, 0, 1, 5, 6, 7], list(range(8))],
        "cu_seq_lens": [0, 3, 5, 8, 16],
        "target_indices": [1, 2, 4],
        "targets": [6, 7, 3],
    }


@pytest.mark.parametrize(("length", "padded"), [(1, 8), (8, 8), (9, 16)])
def test_rounding_up(length: int, padded: int) -> None:
    batch = collate([[sample([3] * length, [0] * length)]], pad_id=0)
    assert {tuple(tensor.shape) for name, tensor in batch.items() if "target" not in name} == {(1, padded)}


@pytest.mark.parametrize("packed", [False, True])
def test_filler_is_untrained_and_attends_to_itself(packed: bool) -> None:
    batch = collate([], pad_id=4, packed=packed)
    assert batch["input_ids"].tolist() == [[4] * 8]
    assert batch["labels"].tolist() == [[-100] * 8]
    assert batch["segment_ids"].tolist() == [[1] * 8]
    assert batch.get("cu_seq_lens", torch.tensor([0, 8])).tolist() == [0, 8]


def test_largest_ids_survive() -> None:
    batch = collate([[(np.array([65535], dtype=np.uint16), np.array([True]))]], pad_id=0)
    assert batch["labels"][0, 0] == 65535


# Workers, whose imports take seconds, get the plan and the layout as they are, whatever was packed how.
@pytest.mark.parametrize(("packing", "num_workers"), [*((packing, 0) for packing in Packing), (Packing.packed, 2)])
def test_loader_gives_each_sample_once(
    store: TokenizedCache, tmp_path: Path, packing: Packing, num_workers: int
) -> None:
    plan = plan_sequences(store, packing, max_length=32, micro_per_gpu=2, seed=3, sources=[], cache_dir=tmp_path)
    layout = Layout.packed if packing is Packing.packed else Layout.alone
    trained, seen = 0, 0
    for rank in range(2):
        sampler = GlobalBatchSampler(len(plan), 8, 2, rank, 2, "k", num_steps=-(-len(plan) // 8))
        batches = list(build_loader(store, plan, sampler, 0, layout, seed=1, num_workers=num_workers))
        assert len(batches) == 2 * -(-len(plan) // 8)
        trained += sum(int((batch["labels"] != -100).sum()) for batch in batches)
        seen += sum(int((batch["input_ids"] != 0).sum()) for batch in batches)
    assert trained == store.num_trained_tokens
    assert seen == store.num_tokens


def test_signals_to_all_processes_leave_the_workers_alone(store: TokenizedCache) -> None:
    loader = build_loader(
        store, PackingPlan(len(store)), sequential(len(store), 1, 0, 1), 0, Layout.alone, seed=1, num_workers=2
    )
    batches = iter(loader)
    first = [next(batches), next(batches)]  # both workers are at work
    # No copies of this process, which has other children too: what forks the ranks of other tests is one.
    workers = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
    assert len(workers) == 2
    for one in workers:
        one.send_signal(signal.SIGTERM)
    assert len([*first, *batches]) == len(store)


def test_loader_leaves_the_global_generator_alone(store: TokenizedCache) -> None:
    before = torch.get_rng_state()
    shares = sequential(len(store), 4, 0, 1)
    batches = list(build_loader(store, PackingPlan(len(store)), shares, 0, Layout.alone, seed=1))
    assert len(batches) == 6
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_ahead_keep_their_order() -> None:
    taken = []

    def source() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(7):
            taken.append(number)
            yield {"labels": torch.tensor([[number, -100, number]])}

    batches = prefetch(source(), 3)
    assert not taken, "nothing is prepared before the first batch is asked for"
    first = next(batches)
    assert [int(batch["labels"][0, 0]) for batch in (first, *batches)] == list(range(7))
    assert taken == list(range(7))
    assert not threads()


def test_a_run_on_cpus_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # calling for it would fail here
    given = {"labels": torch.tensor([[1, 1]])}
    [batch] = prefetch(iter([given]), 2)
    assert batch is given


def test_an_error_comes_where_its_batch_would_have() -> None:
    def source() -> Iterator[dict[str, torch.Tensor]]:
        yield {"labels": torch.tensor([[1, 1]])}
        yield {"labels": torch.tensor([[2, 2]])}
        raise DataError("the disk is gone")

    batches = prefetch(source(), 4)
    assert [int(next(batches)["labels"][0, 0]) for _ in range(2)] == [1, 2]
    with pytest.raises(DataError, match=r"^the disk is gone$"):
        next(batches)
    assert not threads()


def test_what_is_not_wanted_any_more_leaves_no_thread() -> None:
    taken = []

    def source() -> Iterator[dict[str, torch.Tensor]]:
        for number in range(100):
            taken.append(number)
            yield {"labels": torch.tensor([[number]])}

    batches = prefetch(source(), 2)
    next(batches)
    assert threads()
    del batches  # as the loop does when it goes back to a checkpoint
    assert not threads()
    assert len(taken) <= 4


def threads() -> list[str]:
    """Return the threads that prepare batches."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]
