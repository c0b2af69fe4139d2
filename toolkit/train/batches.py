"""This rank's micro-batches of a config."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.config.mesh import Mesh, accumulation, mesh_of, micro_rows
from toolkit.config.schema import Packing, RunConfig
from toolkit.data.curriculum import CurriculumOrder, ScheduledMixture, length_limits
from toolkit.data.loader import build_loader
from toolkit.data.packing import pad_multiple
from toolkit.data.sampler import (
    BEGINNING,
    GlobalBatchSampler,
    Order,
    Position,
    next_position,
    sequential,
    steps_per_epoch,
)
from toolkit.errors import ConfigError
from toolkit.launch.environment import Ranks
from toolkit.messages import tr
from toolkit.models.loss import with_label_positions
from toolkit.models.sequence import local_part
from toolkit.train.prepared import Prepared

Batch = dict[str, torch.Tensor]


def rows_per_step(cfg: RunConfig, packing: Packing) -> tuple[int, int]:
    """Return the plan's rows per step over all ranks and per micro-batch; a row of a grouped plan is a micro-batch."""
    if packing is Packing.grouped:
        return cfg.batch.global_size // micro_rows(cfg), 1
    return cfg.batch.global_size, micro_rows(cfg)


def epoch_rows(cfg: RunConfig, prepared: Prepared) -> int:
    """Return the rows of one pass over the training data: those of the plan, unless weights change."""
    order = changing_order(cfg, prepared) if any(source.weights for source in cfg.data.sources) else None
    return order.num_rows if order else len(prepared.train_plan)


def epoch_steps(cfg: RunConfig, prepared: Prepared) -> int:
    """Return the optimizer steps of one pass over the training data.

    Raises:
        ConfigError: a curriculum is to last longer than that.
    """
    steps = steps_per_epoch(epoch_rows(cfg, prepared), rows_per_step(cfg, prepared.packing)[0])
    if cfg.data.curriculum.steps > steps:
        raise ConfigError(
            tr(
                "data.curriculum.steps = {wanted} is more than the {steps} steps of an epoch, in which each sample "
                "comes once. Use at most {steps}.",
                wanted=cfg.data.curriculum.steps,
                steps=steps,
            )
        )
    return steps


def changing_order(cfg: RunConfig, prepared: Prepared) -> Order | None:
    """Return the order of the rows where it is more than shuffling: a curriculum, or weights that change."""
    data, (global_size, _) = cfg.data, rows_per_step(cfg, prepared.packing)
    key = _key(cfg, prepared)
    if any(source.weights for source in data.sources):
        names = prepared.source_names[: len(data.sources)]
        plan, train = prepared.train_plan, cfg.train
        return ScheduledMixture(plan.bounds, data.sources, names, global_size, train.max_steps, train.epochs, key)
    if not data.curriculum.steps:
        return None
    limits = length_limits(data.curriculum, data.max_length)
    return CurriculumOrder(prepared.longest_samples(), limits, global_size, data.max_length, key)


def place_after(cfg: RunConfig, prepared: Prepared) -> Callable[[Position], Position]:
    """Return what tells the place in the training data after the step that begins at a place."""
    num_rows, (global_size, _) = epoch_rows(cfg, prepared), rows_per_step(cfg, prepared.packing)
    return lambda place: next_position(place, num_rows, global_size)


def order_figures(cfg: RunConfig, prepared: Prepared) -> Callable[[Position], dict[str, float]]:
    """Return what tells, for metrics.jsonl, how the step that begins at a place takes its rows; {} if shuffled."""
    order = changing_order(cfg, prepared)
    return lambda place: order.figures(place) if order else {}


def _key(cfg: RunConfig, prepared: Prepared) -> str:
    return f"{cfg.run.seed} {prepared.train.fingerprint}"


def training_batches(
    cfg: RunConfig, prepared: Prepared, ranks: Ranks, total_steps: int, start: Position = BEGINNING
) -> Iterator[Batch]:
    """Return the training micro-batches, accumulation x total_steps of them, as `train_step` likes them best.

    Where the tokens of rows are divided over ranks, this rank's part of them.

    A thread prepares those of the next step while this one is computed: it reads and lays out the samples (or takes
    them from `data.num_workers`), finds the trained tokens, and on GPUs copies all into page-locked memory.

    Args:
        cfg: checked config.
        prepared: tokenizer, stores and plans.
        ranks: who this process is.
        total_steps: optimizer steps.
        start: where in the data to begin.
    """
    place = mesh_of(cfg, ranks.world_size, ranks.rank)
    loader = build_loader(
        prepared.train,
        prepared.train_plan,
        _sampler(cfg, prepared, place, start, total_steps, changing_order(cfg, prepared)),
        prepared.pad_id,
        prepared.packing,
        seed=cfg.run.seed,
        num_workers=cfg.data.num_workers,
        multiple=pad_multiple(place.sequence),
    )
    # Iterated from here: the loader watches its processes only if they are started by the main thread.
    parts = map(partial(local_part, part=place.part, parts=place.sequence), iter(loader))
    return ahead(parts, accumulation(cfg, ranks.world_size))


def ahead(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield batches in their order while a thread prepares the next ones. An error comes up where its batch would have.

    Args:
        batches: used by the thread alone from now on.
        count: so many at most are ready before they are asked for.
    """
    on_gpu = get_accelerator().device_name() == "cuda"  # a run on CPUs leaves a GPU that is there alone

    def prepare() -> Batch | None:
        batch = next(batches, None)
        if batch is None or not on_gpu:
            return batch and with_label_positions(batch)
        return {name: tensor.pin_memory() for name, tensor in with_label_positions(batch).items()}

    # A thread begins on the first GPU, whichever is this rank's.
    own_gpu = partial(torch.cuda.set_device, torch.cuda.current_device()) if on_gpu else None
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=own_gpu)
    try:
        waiting = deque(thread.submit(prepare) for _ in range(count))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(prepare))
            yield batch
    finally:  # also when the rest is not wanted, as after a rewind
        thread.shutdown(cancel_futures=True)


def step_samples(cfg: RunConfig, prepared: Prepared, world_size: int, start: Position) -> list[list[list[int]]]:
    """Return the samples of one step: of each rank, of each micro-batch, their numbers in the training split.

    Args:
        cfg: checked config.
        prepared: stores and plans.
        world_size: number of ranks.
        start: the place at which the step begins.
    """
    plan, order = prepared.train_plan, changing_order(cfg, prepared)
    places = [mesh_of(cfg, world_size, rank) for rank in range(world_size)]
    by_rank = [_sampler(cfg, prepared, place, start, 1, order) for place in places]
    return [[[sample for row in rows for sample in plan[row]] for rows in sampler] for sampler in by_rank]


def _sampler(
    cfg: RunConfig, prepared: Prepared, place: Mesh, start: Position, num_steps: int, order: Order | None
) -> GlobalBatchSampler:
    global_size, micro = rows_per_step(cfg, prepared.packing)
    return GlobalBatchSampler(
        num_rows=order.num_rows if order else len(prepared.train_plan),
        global_size=global_size,
        micro_per_gpu=micro,
        rank=place.data_rank,
        world_size=place.data_ranks,
        key=_key(cfg, prepared),
        start=start,
        num_steps=num_steps,
        lengths=prepared.train_lengths,
        order=order,
    )


def num_evaluation_batches(cfg: RunConfig, prepared: Prepared, world_size: int) -> int:
    """Return how many validation micro-batches a rank has.

    Args:
        cfg: checked config.
        prepared: stores and plans.
        world_size: number of ranks.
    """
    assert prepared.validation_plan is not None
    ranks = mesh_of(cfg, world_size).data_ranks
    return math.ceil(len(prepared.validation_plan) / (rows_per_step(cfg, prepared.packing)[1] * ranks))


def evaluation_batches(cfg: RunConfig, prepared: Prepared, ranks: Ranks) -> Iterator[Batch]:
    """Yield the validation micro-batches of this rank: each sample once over all ranks.

    Beside what training has they hold `sources`, int64 [T]: of each trained token the number of its source.
    """
    assert prepared.validation is not None and prepared.validation_plan is not None
    store, plan = prepared.validation, prepared.validation_plan
    place = mesh_of(cfg, ranks.world_size, ranks.rank)
    shares = sequential(len(plan), rows_per_step(cfg, prepared.packing)[1], place.data_rank, place.data_ranks)
    loader = build_loader(
        store, plan, shares, prepared.pad_id, prepared.packing, seed=cfg.run.seed, multiple=pad_multiple(place.sequence)
    )
    sources = store.sources()
    for rows, batch in zip(shares, loader, strict=True):
        samples = [plan[row] for row in rows]
        if prepared.packing is not Packing.packed:  # then each sample is a row of the batch by itself
            samples = [[sample] for row in samples for sample in row]
        of_segment = torch.full((len(batch["segment_ids"]), int(batch["segment_ids"].max()) + 1), -1)
        for row, listed in enumerate(samples):
            of_segment[row, 1 : len(listed) + 1] = torch.from_numpy(sources[listed])
        given, of_token = with_label_positions(batch), of_segment.gather(1, batch["segment_ids"]).flatten()
        yield local_part({**given, "sources": of_token[given["places"]]}, place.part, place.sequence)
