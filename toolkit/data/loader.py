"""The torch loader that joins store, plan, sampler and collate."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.utils.data import DataLoader

from toolkit.config.schema import Packing
from toolkit.data.collate import Batch, collate
from toolkit.data.plan import PAD_MULTIPLE, Plan
from toolkit.data.store import Sample, Store


class PlannedRows:
    """The rows of a plan as a torch data set; travels to worker processes as paths, so they map the files again.

    Args:
        store: the split.
        plan: its rows.
    """

    def __init__(self, store: Store, plan: Plan) -> None:
        self.store, self.plan = store, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, row: int) -> list[Sample]:
        """Return the samples of a row."""
        return [self.store[sample] for sample in self.plan[row]]


def build_loader(
    store: Store,
    plan: Plan,
    micro_batches: Iterable[list[int]],
    pad_id: int,
    packing: Packing,
    *,
    seed: int,
    num_workers: int = 0,
    multiple: int = PAD_MULTIPLE,
) -> "DataLoader[Batch]":
    """Return an iterable over one rank's micro-batches as tensors.

    Args:
        store: the split.
        plan: its rows.
        micro_batches: rows of each; a `GlobalBatchSampler` or the list of `sequential`.
        pad_id: id that fills up.
        packing: how the plan was made.
        seed: seeds the workers.
        num_workers: processes that load ahead; 0 loads in this one.
        multiple: of so many tokens each row is a multiple.
    """
    # A generator of its own: DataLoader otherwise draws from torch's global one, and a loader more or less
    # (an evaluation, another number of epochs) would change the dropout of the training.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        PlannedRows(store, plan),  # type: ignore[arg-type]  # has a Dataset's methods without its base class
        batch_sampler=micro_batches,
        collate_fn=partial(_collate, pad_id=pad_id, packing=packing, multiple=multiple),
        num_workers=num_workers,
        generator=generator,
    )


def _collate(rows: Sequence[Sequence[Sample]], pad_id: int, packing: Packing, multiple: int) -> Batch:
    if packing is Packing.packed:
        return collate(rows, pad_id, packed=True, multiple=multiple)
    # Each sample on a row of its own; a row of a grouped plan is a whole micro-batch.
    return collate([[sample] for row in rows for sample in row], pad_id, multiple=multiple)
