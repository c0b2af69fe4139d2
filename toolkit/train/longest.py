"""The longest micro-batch that a run can come to: its rows, and the same ones cut short."""

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.config.mesh import mesh_of
from toolkit.config.schema import Packing, RunConfig
from toolkit.data.loader import collate
from toolkit.data.packing import PAD_MULTIPLE, pad_multiple
from toolkit.data.store import Sample
from toolkit.distributed.process_group import rank
from toolkit.models.sequence import local_part
from toolkit.train.batches import rows_per_step
from toolkit.train.prepared import Prepared

Batch = dict[str, torch.Tensor]


def longest_batch(cfg: RunConfig, prepared: Prepared, world_size: int) -> Batch:
    """Return the longest rows of the training data as one micro-batch, the same on every rank, or this rank's part.

    Args:
        cfg: checked config.
        prepared: stores and plans.
        world_size: number of ranks; in a small split micro-batches never get full.
    """
    num_rows, (per_step, micro) = len(prepared.train_plan), rows_per_step(cfg, prepared.packing)
    ranks = mesh_of(cfg, world_size).data_ranks
    per_rank = -(-min(per_step, num_rows) // ranks)
    times = per_step // (micro * ranks)
    return _batch(cfg, prepared, [_samples(prepared, row) for row in _longest(prepared, -(-per_rank // times))])


def repeated_batch(cfg: RunConfig, prepared: Prepared, times: int, share: float = 1.0) -> Batch:
    """Return the longest row of the plan several times over: what a larger micro-batch would be.

    Args:
        cfg: checked config.
        prepared: stores, and plans for micro-batches of one row.
        times: rows.
        share: of each sample's tokens that is kept.
    """
    [row] = _longest(prepared, 1)
    samples = _samples(prepared, row)
    if share < 1:
        samples = [_cut(sample, share) for sample in samples]
    return _batch(cfg, prepared, [samples] * times)


def _longest(prepared: Prepared, count: int) -> NDArray[np.int64]:
    """Return the rows of the plan that take the most memory, the largest first."""
    plan, store = prepared.train_plan, prepared.train
    if plan.offsets is None:
        tokens = store.lengths(plan.members)
    else:
        begins, lengths = plan.offsets[:-1], store.lengths(plan.members)
        if prepared.packing is Packing.packed:
            tokens = np.add.reduceat(lengths, begins)
        else:  # padded to the longest of a row; of as many tokens, longer samples take more for their attention
            longest = -(-np.maximum.reduceat(lengths, begins) // PAD_MULTIPLE) * PAD_MULTIPLE
            padded = np.diff(plan.offsets) * longest
            return np.lexsort((-longest, -padded))[:count]
    return np.argsort(-tokens, kind="stable")[:count]


def _samples(prepared: Prepared, row: int) -> list[Sample]:
    return [prepared.train[sample] for sample in prepared.train_plan[row]]


def _cut(sample: Sample, share: float) -> Sample:
    """Return some tokens of a sample in a row; the last of them is trained, as a step needs something that is.

    The first ones, unless the prompt is longer: then those that end with the first trained token. ChatGLM-6B takes no
    row without <sop>, which stands at the end of the prompt.
    """
    ids, trained = sample
    kept = max(2, int(len(ids) * share))
    end = max(kept, int(trained.argmax()) + 1)
    trained = trained[end - kept : end].copy()
    trained[-1] = True
    return ids[end - kept : end], trained


def _batch(cfg: RunConfig, prepared: Prepared, rows: list[list[Sample]]) -> Batch:
    parts, packed = cfg.parallel.sequence, prepared.packing is Packing.packed
    if not packed:
        rows = [[sample] for row in rows for sample in row]
    return local_part(collate(rows, prepared.pad_id, packed, pad_multiple(parts)), rank() % parts, parts)
