"""Padding, labels, the filler row, and the loader that joins store, sampler and collate."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.data.collate import collate
from toolkit.data.loader import build_loader
from toolkit.data.prepare import prepare
from toolkit.data.sampler import GlobalBatchSampler, sequential
from toolkit.data.store import Sample, Store


def sample(ids: list[int], trained: list[int]) -> Sample:
    return np.array(ids, dtype=np.uint32), np.array(trained, dtype=np.bool_)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(21)))
    cfg.data.validation_fraction = 0.0
    return prepare(cfg, ByteEncoder()).train


def test_collate_by_hand() -> None:
    batch = collate([sample([5, 6, 7], [0, 1, 1]), sample([8], [0])], pad_id=9, pad_multiple=4)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 9], [8, 9, 9, 9]],
        "labels": [[-100, 6, 7, -100], [-100, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 2, 3]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("length", "padded"), [(1, 8), (8, 8), (9, 16)])
def test_rounding_up(length: int, padded: int) -> None:
    batch = collate([sample([3] * length, [0] * length)], pad_id=0)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(1, padded)}


def test_filler_is_untrained_and_attends_to_itself() -> None:
    batch = collate([], pad_id=4)
    assert batch["input_ids"].tolist() == [[4] * 8]
    assert batch["labels"].tolist() == [[-100] * 8]
    assert batch["attention_mask"].tolist() == [[1] * 8]


def test_largest_ids_survive() -> None:
    batch = collate([(np.array([65535], dtype=np.uint16), np.array([True]))], pad_id=0)
    assert batch["labels"][0, 0] == 65535


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_each_sample_once(store: Store, num_workers: int) -> None:
    trained = 0
    for rank in range(2):
        sampler = GlobalBatchSampler(len(store), 8, 2, rank, 2, 0, end_step=3)
        batches = list(build_loader(store, sampler, 0, seed=1, num_workers=num_workers))
        assert len(batches) == 6
        trained += sum(int((batch["labels"] != -100).sum()) for batch in batches)
    assert trained == store.num_trained_tokens


def test_loader_leaves_the_global_generator_alone(store: Store) -> None:
    before = torch.get_rng_state()
    batches = list(build_loader(store, sequential(len(store), 4, 0, 1), 0, seed=1))
    assert len(batches) == 6
    assert torch.equal(torch.get_rng_state(), before)
