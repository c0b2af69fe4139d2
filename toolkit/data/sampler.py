"""Which samples make up each step, and which of them each rank takes: a pure function of seed, epoch and step."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class GlobalBatchSampler:
    """Yields one rank's micro-batches, step after step, epoch after epoch.

    Within an epoch each sample comes once over all ranks. The last step of an epoch takes what is left, spread evenly:
    it is neither dropped nor filled up with repeats. Every rank gets exactly `accumulation` micro-batches per step, so
    that collectives match; some of a short step may be empty lists, which `collate` turns into untrained filler.

    Args:
        num_samples: samples in the training split.
        global_size: samples per step over all ranks.
        micro_per_gpu: most samples in one micro-batch.
        rank: this process.
        world_size: number of processes.
        seed: decides the order of every epoch.
        shuffle: False takes the samples in the store's order.
        start_step: step (from 0, over all epochs) to begin with; any step is reached in the same time.
        end_step: step before which to stop; None never stops.
    """

    def __init__(
        self,
        num_samples: int,
        global_size: int,
        micro_per_gpu: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        start_step: int = 0,
        end_step: int | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError("a sampler needs at least one sample")
        if global_size < 1 or global_size % (micro_per_gpu * world_size):
            raise ValueError(f"{global_size} is not a multiple of {micro_per_gpu} x {world_size}")
        self.num_samples, self.global_size, self.seed, self.shuffle = (
            num_samples,
            global_size,
            seed,
            shuffle,
        )
        self.rank, self.world_size = rank, world_size
        self.start_step, self.end_step = start_step, end_step
        self.accumulation = global_size // (micro_per_gpu * world_size)
        """Micro-batches per rank and step."""
        self.steps_per_epoch = -(-num_samples // global_size)
        """Steps per epoch, the last one possibly short."""

    def __iter__(self) -> Iterator[list[int]]:
        step = self.start_step
        epoch, order = -1, np.empty(0, dtype=np.int64)
        while self.end_step is None or step < self.end_step:
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order(epoch)
            begin = step % self.steps_per_epoch * self.global_size
            yield from self._share(order[begin : begin + self.global_size])
            step += 1

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the samples in an epoch, [num_samples], the same on all ranks."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        seeds = np.random.SeedSequence([self.seed, epoch])
        return np.random.Generator(np.random.PCG64(seeds)).permutation(self.num_samples)

    def _share(self, batch: NDArray[np.int64]) -> Iterator[list[int]]:
        """Deal a global batch to the ranks, and a rank's part to its micro-batches: sizes differ by one at most."""
        mine = batch[self.rank :: self.world_size]
        for micro_batch in range(self.accumulation):
            yield mine[micro_batch :: self.accumulation].tolist()


def sequential(num_samples: int, micro_per_gpu: int, rank: int, world_size: int) -> list[list[int]]:
    """Return one rank's micro-batches for an evaluation: each sample once over all ranks, in the store's order.

    Args:
        num_samples: samples in the split.
        micro_per_gpu: most samples in one micro-batch.
        rank: this process.
        world_size: number of processes.

    Returns:
        As many micro-batches on every rank; [] where a rank has run out of samples.
    """
    mine = list(range(rank, num_samples, world_size))
    most = -(-num_samples // world_size)
    return [mine[begin : begin + micro_per_gpu] for begin in range(0, most, micro_per_gpu)]
