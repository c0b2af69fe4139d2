"""The data of a custom model's program: micro-batches of its datasets, on any number of ranks, from any position."""

import platform
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, IterableDataset

from toolkit.config import mesh, schema
from toolkit.data.sampler import GlobalBatchSampler, Position, next_position, sequential, steps_per_epoch
from toolkit.distributed import process_group
from toolkit.launch.environment import Ranks
from toolkit.messages import DataError, tr, warn

if TYPE_CHECKING:
    from toolkit.tasks.custom import CustomSpec

Collate = Callable[[list[Any]], Any]


def is_map_style(dataset: Any) -> bool:
    """Whether samples of a dataset can be read by index; DataError if it is neither map-style nor iterable."""
    if isinstance(dataset, DataLoader):
        raise DataError(tr("give the dataset, not a DataLoader: batches are made here."))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return True
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            "{kind} is no dataset: it needs __len__ and __getitem__, or __iter__.", kind=type(dataset).__name__
        )
    return False


def open_dataset(spec: "CustomSpec", cfg: schema.RunConfig, ranks: Ranks) -> "CustomData":
    """Return the training data of a program; DataError if it or the validation data cannot be used."""
    if spec.validation is not None and not is_map_style(spec.validation) and spec.shards_itself:
        raise DataError(_validation_problem())
    return _MapSamples(spec, cfg, ranks) if is_map_style(spec.dataset) else _StreamSamples(spec, cfg, ranks)


class MicroBatch(NamedTuple):
    """The input of one forward pass."""

    batch: Any
    size: int
    """Number of samples that count; 0 if the batch only keeps this rank in step with others."""

    @property
    def num_samples(self) -> int:
        """Samples in `batch`: those that count, or if there are none a single one, which fills it."""
        return max(self.size, 1)


class _MapSamples:
    """A map-style dataset: in each epoch every sample is on one rank, in an order by `run.seed`."""

    def __init__(self, spec: "CustomSpec", cfg: schema.RunConfig, ranks: Ranks) -> None:
        self.spec, self.cfg, self.ranks, self.size = spec, cfg, ranks, len(spec.dataset)
        if not self.size:
            raise DataError(tr("the dataset is empty."))
        if spec.shards_itself:
            raise DataError(tr("shards_itself= is for iterable datasets; of this one ranks read their own samples."))
        version = sys.version_info[:3]
        # In these versions a fork may inherit a locked list of threads (fixed in 3.10.15, 3.11.10 and 3.12).
        if cfg.data.num_workers and (version < (3, 10, 15) or (3, 11) <= version < (3, 11, 10)):
            # The program's own data need not survive being pickled, nor the program being imported: these are forks.
            warn(
                "data.num_workers = {count}: on Python {version} a forked data-loader process can hang when it "
                "starts (CPython issue 112275). Use Python 3.11.10, 3.12 or newer, or data.num_workers=0.",
                count=cfg.data.num_workers,
                version=platform.python_version(),
            )
        self.identity = {"samples": f"{type(spec.dataset).__name__} {self.size}"}
        self.described = tr("{count} samples of {kind}", count=f"{self.size:,}", kind=type(spec.dataset).__name__)
        self.steps_per_epoch = steps_per_epoch(self.size, cfg.batch.global_size)
        self.total_steps = cfg.train.max_steps or cfg.train.over_epochs(self.steps_per_epoch)

    def batches_from(self, position: Position, num_steps: int) -> Iterator[MicroBatch]:
        """Return this rank's micro-batches of `num_steps` steps from a position on, read by `data.num_workers`."""
        seed, workers = self.cfg.run.seed, self.cfg.data.num_workers
        loader: DataLoader[Any] = DataLoader(
            _MicroBatchReader(self.spec.dataset, self.spec.collate, seed),  # type: ignore[arg-type]
            sampler=_with_epochs(self._sampler(self.ranks.rank, position, num_steps)),
            batch_size=None,  # a micro-batch is an item
            collate_fn=_unchanged,  # type: ignore[arg-type]  # torch takes it for a list's
            num_workers=workers,
            pin_memory=get_accelerator().device_name() != "cpu",
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)

    def position_after(self, position: Position) -> Position:
        return next_position(position, self.size, self.cfg.batch.global_size)

    def names_at(self, position: Position) -> list[list[list[str]]]:
        """Return the names of a step's samples for messages, by rank and micro-batch."""
        by_rank = [self._sampler(rank, position, 1) for rank in range(self.ranks.world_size)]
        return [[[tr("sample {row}", row=row) for row in rows] for rows in sampler] for sampler in by_rank]

    def _sampler(self, rank: int, position: Position, num_steps: int) -> GlobalBatchSampler:
        """Return an iterable of the numbers of the samples that a rank takes, by micro-batch, from a position on."""
        return GlobalBatchSampler(
            num_rows=self.size,
            global_size=self.cfg.batch.global_size,
            micro_per_gpu=mesh.micro_rows(self.cfg),
            rank=rank,
            world_size=self.ranks.world_size,
            key=f"{self.cfg.run.seed} {self.identity['samples']}",
            start=position,
            num_steps=num_steps,
        )


def _unchanged(item: MicroBatch) -> MicroBatch:
    return item


def _with_epochs(sampler: GlobalBatchSampler) -> Iterator[tuple[int, list[int]]]:
    """Yield the epoch and the rows of each micro-batch."""
    position = sampler.start  # where the step of the micro-batch begins
    for number, rows in enumerate(sampler, start=1):
        yield position.epoch, rows
        if number % sampler.accumulation == 0:
            position = sampler.after(position)


class _MicroBatchReader:
    """Reads micro-batches by epoch and indices of samples, in this process or in a data-loader worker."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitem__(self, epoch_and_rows: tuple[int, list[int]]) -> MicroBatch:
        return self.read(*epoch_and_rows)

    def read(self, epoch: int, rows: list[int]) -> MicroBatch:
        """Return a micro-batch; without rows the first sample with a size of 0, so that the rank stays in step.
        Random transforms depend on seed, epoch and the sample's index alone, not on ranks, workers or resuming.
        """
        with _preserved_generators():
            samples = []
            for row in rows or [0]:
                _seed(f"{self.seed} {epoch} {row}")
                samples.append(self.dataset[row])
            return MicroBatch(self.collate(samples), len(rows))


def _capture_generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def _restore_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.random.set_rng_state(states[2])


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the state of the CPU's random generators afterwards."""
    before = _capture_generators()
    try:
        yield
    finally:
        _restore_generators(before)


def _seed(key: str) -> None:
    """Seed the CPU's random generators by a text; the GPU's are the training's."""
    number = int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "little")
    random.seed(number)
    np.random.seed(number % 2**32)  # NumPy takes no larger ones
    torch.default_generator.manual_seed(number)


class _StreamSamples:
    """An iterable dataset as an endless stream; a rank takes every n-th sample, or all if the dataset shards itself.
    The row of a `Position` is the number of samples that all ranks have taken; its epoch stays 0.
    """

    def __init__(self, spec: "CustomSpec", cfg: schema.RunConfig, ranks: Ranks) -> None:
        self.spec, self.cfg, self.ranks = spec, cfg, ranks
        size, name = cfg.batch.global_size, type(spec.dataset).__name__
        length = self.size = len(spec.dataset) if hasattr(spec.dataset, "__len__") else 0
        if not (cfg.train.max_steps or length):
            raise DataError("{kind} has no length: say how long to train, train.max_steps=1000.", kind=name)
        if cfg.data.num_workers:
            raise DataError(
                "data.num_workers = {count}: an iterable dataset is read by the training process. Set "
                "it to 0; to read ahead, let the dataset itself use a torch.utils.data.DataLoader.",
                count=cfg.data.num_workers,
            )
        # A dataset that shards itself may give other samples for another number of ranks.
        division = f"{ranks.world_size} parts" if spec.shards_itself else "shared out"
        self.identity = {"samples": f"{name}, {division}"}
        self.described = tr("A stream of {kind}", kind=name)
        self.total_steps = cfg.train.max_steps or steps_per_epoch(cfg.train.over_epochs(length), size)
        self.steps_per_epoch = steps_per_epoch(length, size) if length else self.total_steps

    def batches_from(self, position: Position, num_steps: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of `num_steps` steps from a position on; what is before it is read again."""
        ranks, size = self.ranks.world_size, mesh.micro_rows(self.cfg)
        # Of the samples after those that are skipped this rank takes the one at `first`, and every `every`-th from it.
        if self.spec.shards_itself:  # the dataset yields this rank's samples alone; `position.row` counts all ranks'
            first, every, skipped = 0, 1, position.row // ranks
        else:
            first, every, skipped = self.ranks.rank, ranks, position.row
        samples: list[Any] = []
        batches_left = num_steps * mesh.accumulation(self.cfg, ranks)
        for number, sample in enumerate(self._samples()):
            if number < skipped or (number - skipped) % every != first:
                continue
            samples.append(sample)
            if len(samples) == size:
                yield MicroBatch(self.spec.collate(samples), size)
                samples, batches_left = [], batches_left - 1
                if not batches_left:
                    return

    def position_after(self, position: Position) -> Position:
        return Position(0, position.row + self.cfg.batch.global_size)

    def names_at(self, position: Position) -> list[list[list[str]]]:
        """Return all samples of a step as the name of each micro-batch, by rank: the dataset may divide them itself."""
        ranks, accumulation = self.ranks.world_size, mesh.accumulation(self.cfg, self.ranks.world_size)
        name = tr("sample {row}", row=f"{position.row} - {position.row + self.cfg.batch.global_size - 1}")
        return [[[name] for _ in range(accumulation)] for _ in range(ranks)]

    def _samples(self) -> Iterator[Any]:
        """Yield samples without end. The dataset has random states of its own, apart from the training's."""
        passes, states = self._passes(), _capture_generators()
        while True:
            with _preserved_generators():
                _restore_generators(states)
                sample = next(passes)
                states = _capture_generators()
            yield sample

    def _passes(self) -> Iterator[Any]:
        """Yield the samples of pass after pass over the dataset; DataError if one has none."""
        dataset, name = self.spec.dataset, type(self.spec.dataset).__name__
        for number in count():
            is_empty = True
            _seed(f"{self.cfg.run.seed} {number}")
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(number)
            for sample in dataset:
                is_empty = False
                yield sample
            if is_empty and not number:
                raise DataError("{kind} gives no sample.", kind=name)
            if is_empty:
                raise DataError("{kind} ends for good: iter() of it must start again each time.", kind=name)


CustomData = _MapSamples | _StreamSamples
"""`size`: samples of an epoch, 0 if unknown; `identity`: what identifies the data; `described`: them in messages."""


def validation_batches(
    spec: "CustomSpec", cfg: schema.RunConfig, ranks: Ranks
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yield the sample indices and the data of this rank's validation micro-batches, as many on every rank; each sample
    is on one rank. DataError on every rank if there are no samples, or ranks have different numbers of them.
    """
    size, rank, world = mesh.micro_rows(cfg), ranks.rank, ranks.world_size
    with _preserved_generators():
        _seed(f"{cfg.run.seed} validation")
        samples = spec.validation if is_map_style(spec.validation) else list(spec.validation)
        reader = _MicroBatchReader(samples, spec.collate, cfg.run.seed)
    if len(set(process_group.gather(len(samples)))) > 1:
        raise DataError(_validation_problem())
    if not len(samples):
        raise DataError(tr("the validation dataset is empty."))
    for numbers in sequential(len(samples), size, rank, world):
        yield numbers, reader.read(_VALIDATION, numbers)


_VALIDATION = -1
"""What stands for the epoch in the seeds of validation samples."""


def _validation_problem() -> str:
    return tr(
        "validation= must give every rank all samples: they are shared out here. Beside shards_itself=True it must be "
        "map-style, such as a list of all samples."
    )
