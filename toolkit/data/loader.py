"""The torch loader that joins store, sampler and collate."""

from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.data import DataLoader

from toolkit.data.collate import Batch, collate
from toolkit.data.store import Store


def build_loader(
    store: Store,
    micro_batches: Iterable[list[int]],
    pad_id: int,
    *,
    seed: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> "DataLoader[Batch]":
    """Return an iterable over one rank's micro-batches as tensors.

    Args:
        store: the split; worker processes map its files again instead of copying them.
        micro_batches: a `GlobalBatchSampler` or the list of `sequential`.
        pad_id: id that fills up.
        seed: seeds the workers.
        num_workers: processes that load ahead; 0 loads in this one.
        pin_memory: page-locked tensors, for faster copies to a GPU.
    """
    # A generator of its own: DataLoader otherwise draws from torch's global one, and a loader more or less
    # (an evaluation, another number of epochs) would change the dropout of the training.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        store,  # type: ignore[arg-type]  # has the __len__ and __getitem__ of a Dataset without its base class
        batch_sampler=micro_batches,
        collate_fn=partial(collate, pad_id=pad_id),
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=generator,
    )
