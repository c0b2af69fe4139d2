"""The torch loader that joins cache, plan, sampler and collation. B: rows of the micro-batch; S: padded length."""

import signal
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from toolkit.data import plans, store
from toolkit.sample_types import UNTRAINED, Batch, with_targets


class Layout(Enum):
    """How rows of a plan become rows of a batch."""

    alone = "alone"
    """Each sample is one; a row of a grouped plan is a whole micro-batch."""
    packed = "packed"
    """As they are."""
    joined = "joined"
    """All side by side in one, so that none is padded."""


class Branch(NamedTuple):
    """A sample of a row with others, whose first tokens may stand in that row already."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    shared: int
    """How many first tokens are those of the sample before it, or of what that one shares."""


def collate(
    rows: Sequence[Sequence[store.Sample | Branch]],
    pad_id: int,
    packed: bool = False,
    multiple: int = plans.PAD_MULTIPLE,
) -> Batch:
    """Return a micro-batch of tensors [B, S], the samples of a row side by side, padded on the right to the longest
    row, rounded up to a multiple of `multiple`. No `rows` give a filler, one untrained sample (attention over nothing
    would give NaN), for ranks that have no data left but must take part in the step. `labels` are not shifted: -100
    where untrained, each sample's first token always. `position_ids` restart with each sample; `segment_ids` number a
    row's samples from 1, 0 is padding. A `Branch` adds only the tokens that it does not share, at their positions in
    the complete sample. `packed`: add `cu_seq_lens`, the boundaries of samples and padding in the B x S tokens, for
    variable-length attention.
    """
    # A `Sample` is (ids, trained), and shares nothing.
    branches = [[Branch(*sample) if len(sample) > 2 else Branch(*sample, 0) for sample in row] for row in rows]
    longest = max((sum(len(branch.ids) - branch.shared for branch in row) for row in branches), default=1)
    num_rows, width = max(len(rows), 1), -(-longest // multiple) * multiple  # rounded up
    input_ids = torch.full((num_rows, width), pad_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, UNTRAINED)
    position_ids = torch.arange(width).repeat(num_rows, 1)
    segment_ids = torch.zeros_like(input_ids) if rows else torch.ones_like(input_ids)
    bounds = [0]  # of samples and paddings in the flattened batch
    for number, row in enumerate(branches):
        begin = 0
        for segment, (ids, trained, shared) in enumerate(row, start=1):
            end = begin + len(ids) - shared
            # Copies: torch has no uint32 arithmetic, and what a cache gives is read-only.
            tokens = torch.from_numpy(ids[shared:].astype("int64"))
            input_ids[number, begin:end] = tokens
            labels[number, begin:end] = tokens.masked_fill(~torch.from_numpy(trained[shared:].copy()), UNTRAINED)
            position_ids[number, begin:end] = torch.arange(shared, len(ids))
            segment_ids[number, begin:end] = segment
            bounds.append(number * width + end)
            begin = end
        if begin < width:
            bounds.append((number + 1) * width)
    batch = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "segment_ids": segment_ids}
    if packed:
        batch["cu_seq_lens"] = torch.tensor(bounds if rows else [0, width], dtype=torch.int32)  # else: the filler
    if any(branch.shared for row in branches for branch in row):
        batch |= _visibility(branches, segment_ids)
    return with_targets(batch)


def _visibility(branches: Sequence[Sequence[Branch]], segment_ids: torch.Tensor) -> Batch:
    """Return the entries of a `Batch` (see there) that say which tokens each token attends to, where the samples of a
    row share tokens: `seen_until`, `keys` and `cu_seq_lens_k`. `branches`: those of each row.
    """
    # Each segment writes its number at all tokens of its sample, so that the last one that sees a token remains.
    seen_until, width = segment_ids.clone(), segment_ids.size(1)
    keys = []  # of each segment, and of each padding, which attends to itself: indices of the tokens it attends to
    for number, row in enumerate(branches):
        # `path`: indices of a sample's tokens in the flattened batch, those it shares being in the branches before it.
        end, path = number * width, torch.empty(0, dtype=torch.int64)
        for segment, branch in enumerate(row, start=1):
            begin, end = end, end + len(branch.ids) - branch.shared
            path = torch.cat((path[: branch.shared], torch.arange(begin, end)))
            seen_until.view(-1)[path] = segment
            keys.append(path)
        if end < (number + 1) * width:
            keys.append(torch.arange(end, (number + 1) * width))
    bounds = torch.tensor([0, *map(len, keys)]).cumsum(0).int()
    return {"seen_until": seen_until, "keys": torch.cat(keys), "cu_seq_lens_k": bounds}


class PlannedRows:
    """The rows of a plan as a torch data set; travels to worker processes as paths, so they map the files again."""

    def __init__(self, cache: store.TokenizedCache, plan: plans.PackingPlan) -> None:
        self.cache, self.plan = cache, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, row: int) -> list[store.Sample | Branch]:
        """Return the samples of a row, (ids, loss mask) each; where they share prefixes, as `Branch`es."""
        samples, prefixes = self.plan[row], self.plan.prefixes(row)
        if not any(prefixes):
            return [self.cache[sample] for sample in samples]
        return [Branch(*self.cache[number], shared) for number, shared in zip(samples, prefixes, strict=True)]


def build_loader(
    cache: store.TokenizedCache,
    plan: plans.PackingPlan,
    micro_batches: Iterable[list[int]],
    pad_id: int,
    layout: Layout,
    *,
    seed: int,
    num_workers: int = 0,
    multiple: int = plans.PAD_MULTIPLE,
) -> "DataLoader[Batch]":
    """Return an iterable over one rank's micro-batches as tensors. `micro_batches`: the rows of the plan in each;
    `num_workers`: processes that read ahead, 0 none; `multiple`: row lengths are padded to a multiple of it.
    """
    # A generator of its own: DataLoader otherwise draws from torch's global one, and a loader more or less
    # (an evaluation, another number of epochs) would change the dropout of the training.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        PlannedRows(cache, plan),  # type: ignore[arg-type]  # has a Dataset's methods without its base class
        batch_sampler=micro_batches,
        collate_fn=partial(collate_planned, pad_id=pad_id, layout=layout, multiple=multiple),
        num_workers=num_workers,
        # A forked copy of a rank can stop for good: a thread of the process group that held a lock of the interpreter
        # at the fork is not there to give it back (CPython issue 112275; seen in 3.11.7, one fork of about 400).
        multiprocessing_context="spawn" if num_workers else None,
        worker_init_fn=_ignore_signals,
        generator=generator,
    )


def _ignore_signals(worker: int) -> None:
    """Ignore SIGTERM and SIGINT in a loader's worker: the rank saves a checkpoint first and still needs batches."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def collate_planned(
    rows: Sequence[Sequence[store.Sample | Branch]], pad_id: int, layout: Layout, multiple: int = plans.PAD_MULTIPLE
) -> Batch:
    """Return rows of a plan, each a list of samples, as tensors; `layout` says which samples share a batch row."""
    return collate(laid_out(rows, layout), pad_id, packed=layout is not Layout.alone, multiple=multiple)


_Item = TypeVar("_Item")


def laid_out(rows: Sequence[Sequence[_Item]], layout: Layout) -> Sequence[Sequence[_Item]]:
    """Regroup the samples (or one value for each) of a plan's rows by the rows of the batch that `layout` makes."""
    samples = [sample for row in rows for sample in row]
    if layout is Layout.alone:
        return [[sample] for sample in samples]
    if layout is Layout.joined and rows:
        return [samples]
    return rows
