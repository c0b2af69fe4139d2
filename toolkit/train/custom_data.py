"""What a program brings to train (its model, datasets and loss), and the micro-batches of its data."""

import platform
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from toolkit.checkpoint import random_state
from toolkit.config.mesh import accumulation, micro_rows
from toolkit.config.schema import RunConfig
from toolkit.data.sampler import GlobalBatchSampler, Position, next_position, sequential, steps_per_epoch
from toolkit.distributed import process_group
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, DataError, tr, warn

Loss = Callable[[Any, Any], torch.Tensor]
"""Given the model and a batch, returns one loss per sample, [n]."""
Metrics = Callable[[Any, Any], Mapping[str, torch.Tensor]]
"""Given the model and a batch, returns by name a value per sample, [n, ...]."""
Score = Callable[[Mapping[str, torch.Tensor]], Mapping[str, float]]
"""Given the values of all samples, by name [N, ...] on the CPU, returns figures."""
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomSpec:
    """A program's own parts; see `toolkit.custom.train`."""

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any
    loss: Loss
    validation: Any = None
    metrics: Metrics | None = None
    score: Score | None = None
    collate: Collate = default_collate
    shards_itself: bool = False

    @property
    def model_name(self) -> str:
        """Return what messages call the model."""
        model = self.model
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "?")
        return tr("a custom model") if name == "<lambda>" else name

    def build(self, seed: int) -> nn.Module:
        """Return the model: one that a function makes is the same on every rank, its random weights follow the seed."""
        model = self.model
        if not isinstance(model, nn.Module):
            random_state.seed_all(seed)
            model = model()
        if not isinstance(model, nn.Module):
            raise ConfigError("model= must be a torch.nn.Module or make one, and is {kind}.", kind=type(model).__name__)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("nothing in {model} is trained: no parameter wants a gradient.", model=self.model_name)
        return model


def is_map_style(dataset: Any) -> bool:
    """Whether any sample of a dataset can be read by its number."""
    if isinstance(dataset, DataLoader):
        raise DataError(tr("give the dataset, not a DataLoader: batches are made here."))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return True
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            "{kind} is no dataset: it needs __len__ and __getitem__, or __iter__.", kind=type(dataset).__name__
        )
    return False


def open_dataset(spec: CustomSpec, cfg: RunConfig, ranks: Ranks) -> "CustomData":
    """Return the training data of a program; see that it and the validation data are datasets that can be used."""
    if spec.validation is not None and not is_map_style(spec.validation) and spec.shards_itself:
        raise DataError(_shared_out())
    return _MapSamples(spec, cfg, ranks) if is_map_style(spec.dataset) else _StreamSamples(spec, cfg, ranks)


def digest(model: nn.Module) -> str:
    """Return what tells two models apart by the names and shapes of what a checkpoint holds."""
    shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters()}
    shapes |= {name: tuple(one.shape) for name, one in model.named_buffers()}
    return blake2b(repr(sorted(shapes.items())).encode(), digest_size=8).hexdigest()


class MicroBatch(NamedTuple):
    """What one forward pass gets."""

    batch: Any
    size: int
    """Samples in it that count: 0 where it is there only for the ranks to compute in step."""


def _forks_may_hang(version: tuple[Any, ...]) -> bool:
    """Whether a fork inherits a locked list of threads; mended in 3.10.15, 3.11.10 and 3.12."""
    return version[:3] < (3, 10, 15) or (3, 11) <= version[:3] < (3, 11, 10)


class _MapSamples:
    """A map-style dataset: each sample once per epoch over all ranks, in an order of `run.seed`."""

    def __init__(self, spec: CustomSpec, cfg: RunConfig, ranks: Ranks) -> None:
        self.spec, self.cfg, self.ranks, self.size = spec, cfg, ranks, len(spec.dataset)
        if not self.size:
            raise DataError(tr("the dataset is empty."))
        if spec.shards_itself:
            raise DataError(tr("shards_itself= is for iterable datasets; of this one ranks read their own samples."))
        if cfg.data.num_workers and _forks_may_hang(sys.version_info):
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
        self.total_steps = cfg.train.max_steps or cfg.train.epochs * self.steps_per_epoch

    def batches_from(self, place: Position, num_steps: int) -> Iterator[MicroBatch]:
        seed, workers = self.cfg.run.seed, self.cfg.data.num_workers
        loader: DataLoader[Any] = DataLoader(
            _Rows(self.spec.dataset, self.spec.collate, seed),  # type: ignore[arg-type]
            sampler=_with_epochs(self._sampler(self.ranks.rank, place, num_steps)),
            batch_size=None,  # a micro-batch is an item
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # torch takes it for a list's
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)

    def position_after(self, place: Position) -> Position:
        return next_position(place, self.size, self.cfg.batch.global_size)

    def samples_at(self, place: Position) -> list[list[list[str]]]:
        """Return what the samples of a step are called: of each rank, of each micro-batch."""
        by_rank = [self._sampler(rank, place, 1) for rank in range(self.ranks.world_size)]
        return [[[tr("sample {row}", row=row) for row in rows] for rows in sampler] for sampler in by_rank]

    def _sampler(self, rank: int, place: Position, num_steps: int) -> GlobalBatchSampler:
        return GlobalBatchSampler(
            num_rows=self.size,
            global_size=self.cfg.batch.global_size,
            micro_per_gpu=micro_rows(self.cfg),
            rank=rank,
            world_size=self.ranks.world_size,
            key=f"{self.cfg.run.seed} {self.identity['samples']}",
            start=place,
            num_steps=num_steps,
        )


def _as_it_is(item: MicroBatch) -> MicroBatch:
    return item


def _with_epochs(sampler: GlobalBatchSampler) -> Iterator[tuple[int, list[int]]]:
    place = sampler.start
    for number, rows in enumerate(sampler, start=1):
        yield place.epoch, rows
        if number % sampler.accumulation == 0:
            place = sampler.after(place)


class _Rows:
    """Reads micro-batches by the numbers of their samples, in this process or in another."""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitem__(self, wanted: tuple[int, list[int]]) -> MicroBatch:
        """Return a micro-batch; without samples one of the first, which does not count. Random transforms depend on
        seed, epoch and the sample's number alone, not on ranks, workers or stops.
        """
        epoch, rows = wanted
        with _generators_kept():
            samples = []
            for row in rows or [0]:
                _seed(f"{self.seed} {epoch} {row}")
                samples.append(self.dataset[row])
            return MicroBatch(self.collate(samples), len(rows))


def _capture() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.random.set_rng_state(states[2])


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = _capture()
    try:
        yield
    finally:
        _restore(before)


def _seed(key: str) -> None:
    """Seed what draws on the CPU; a GPU's generator is the training's."""
    number = int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


class _StreamSamples:
    """An iterable dataset as an endless stream; a rank takes every n-th sample, or all if the dataset shards itself."""

    def __init__(self, spec: CustomSpec, cfg: RunConfig, ranks: Ranks) -> None:
        self.spec, self.cfg, self.ranks = spec, cfg, ranks
        size, name = cfg.batch.global_size, type(spec.dataset).__name__
        known = self.size = len(spec.dataset) if hasattr(spec.dataset, "__len__") else 0
        if not (cfg.train.max_steps or known):
            raise DataError("{kind} has no length: say how long to train, train.max_steps=1000.", kind=name)
        if cfg.data.num_workers:
            raise DataError(
                "data.num_workers = {count}: an iterable dataset is read by the training process. Set "
                "it to 0; to read ahead, let the dataset itself use a torch.utils.data.DataLoader.",
                count=cfg.data.num_workers,
            )
        # What a rank of another number would read of a data set that shards itself, nobody knows.
        whose = f"{ranks.world_size} parts" if spec.shards_itself else "shared out"
        self.identity = {"samples": f"{name}, {whose}"}
        self.described = tr("A stream of {kind}", kind=name)
        self.total_steps = cfg.train.max_steps or steps_per_epoch(cfg.train.epochs * known, size)
        self.steps_per_epoch = steps_per_epoch(known, size) if known else self.total_steps

    def batches_from(self, place: Position, num_steps: int) -> Iterator[MicroBatch]:
        ranks, size = self.ranks.world_size, micro_rows(self.cfg)
        first, every = (0, 1) if self.spec.shards_itself else (self.ranks.rank, ranks)
        skipped = place.row // ranks if self.spec.shards_itself else place.row
        mine: list[Any] = []
        wanted = num_steps * accumulation(self.cfg, ranks)
        for number, sample in enumerate(self._samples()):
            if number < skipped or (number - skipped) % every != first:
                continue
            mine.append(sample)
            if len(mine) == size:
                yield MicroBatch(self.spec.collate(mine), size)
                mine, wanted = [], wanted - 1
                if not wanted:
                    return

    def position_after(self, place: Position) -> Position:
        return Position(0, place.row + self.cfg.batch.global_size)

    def samples_at(self, place: Position) -> list[list[list[str]]]:
        ranks, size = self.ranks.world_size, micro_rows(self.cfg)
        times = accumulation(self.cfg, ranks)
        name = tr("sample {row}", row=f"{place.row} - {place.row + self.cfg.batch.global_size - 1}")
        return [[[name] * min(size, 1) for _ in range(times)] for _ in range(ranks)]

    def _samples(self) -> Iterator[Any]:
        """Yield samples without end; what the data set draws comes from generators of its own."""
        states, number = _capture(), 0
        while True:
            is_empty = True
            outside = _capture()
            _restore(states)
            _seed(f"{self.cfg.run.seed} {number}")
            if hasattr(self.spec.dataset, "set_epoch"):
                self.spec.dataset.set_epoch(number)
            stream = iter(self.spec.dataset)
            while True:
                try:
                    sample = next(stream)
                except StopIteration:
                    break
                finally:
                    states = _capture()
                    _restore(outside)
                is_empty = False
                yield sample
                outside = _capture()
                _restore(states)
            if is_empty:
                name = type(self.spec.dataset).__name__
                if not number:
                    raise DataError("{kind} gives no sample.", kind=name)
                raise DataError("{kind} ends for good: iter() of it must start again each time.", kind=name)
            number += 1


CustomData = _MapSamples | _StreamSamples
"""`size`: samples of a pass over all ranks, 0 if not known; `identity`: what is the same if a run learns from the same
data; `described`: the data for the user."""


def validation_batches(spec: CustomSpec, cfg: RunConfig, ranks: Ranks) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yield this rank's validation micro-batches (as many on every rank) and sample numbers, each once in all."""
    size, rank, world = micro_rows(cfg), ranks.rank, ranks.world_size
    with _generators_kept():
        _seed(f"{cfg.run.seed} validation")
        samples = spec.validation if is_map_style(spec.validation) else list(spec.validation)
        rows = _Rows(samples, spec.collate, cfg.run.seed)
    if len(set(process_group.gather(len(samples)))) > 1:
        raise DataError(_shared_out())
    if not len(samples):
        raise DataError(tr("the validation dataset is empty."))
    for numbers in sequential(len(samples), size, rank, world):
        yield numbers, rows[-1, numbers]


def _shared_out() -> str:
    return tr(
        "validation= must give every rank all samples: they are shared out here. Beside shards_itself=True it must be "
        "map-style, such as a list of all samples."
    )
