"""Batches of a language model's data: how the rows of a plan make steps, and this rank's micro-batches of them, for
training, evaluation and the dry run. A row is a sequence of the plan (`LanguageData.train_plan`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray

from toolkit.config import schema
from toolkit.config.mesh import Mesh, accumulation, mesh_of, micro_rows
from toolkit.data import sampler
from toolkit.data.loader import Branch, Layout, PlannedRows, build_loader, collate_planned, laid_out
from toolkit.data.plans import PAD_MULTIPLE, pad_multiple
from toolkit.data.store import Sample
from toolkit.distributed.process_group import rank, world_size
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, tr
from toolkit.sample_types import Batch
from toolkit.tasks.language_data import LanguageData
from toolkit.terminal import phase

if TYPE_CHECKING:
    from toolkit.data.orders import Order


def rows_per_step(cfg: schema.RunConfig, packing: schema.Packing) -> tuple[int, int]:
    """Return the plan's rows in a step of all ranks, and in a micro-batch; a grouped row is a micro-batch."""
    if packing is schema.Packing.grouped:
        return cfg.batch.global_size // micro_rows(cfg), 1
    return cfg.batch.global_size, micro_rows(cfg)


def epoch_rows(cfg: schema.RunConfig, data: LanguageData) -> int:
    """Return the number of rows of an epoch: the plan's, unless the sources' weights change with the steps."""
    order = changing_order(cfg, data) if any(source.weights for source in cfg.data.sources) else None
    return order.num_rows if order else len(data.train_plan)


def epoch_steps(cfg: schema.RunConfig, data: LanguageData) -> int:
    """Return the optimizer steps of an epoch; ConfigError if the curriculum takes more."""
    steps = sampler.steps_per_epoch(epoch_rows(cfg, data), rows_per_step(cfg, data.packing)[0])
    if cfg.data.curriculum.steps > steps:
        raise ConfigError(
            "data.curriculum.steps = {wanted} is more than the {steps} steps of an epoch, in which each sample "
            "comes once. Use at most {steps}.",
            wanted=cfg.data.curriculum.steps,
            steps=steps,
        )
    return steps


def changing_order(cfg: schema.RunConfig, data: LanguageData) -> "Order | None":
    """Return the order of rows for a curriculum or scheduled weights, None if rows are shuffled."""
    sources, curriculum, key = cfg.data.sources, cfg.data.curriculum, _order_key(cfg, data)
    is_mixture = any(source.weights for source in sources)
    if not is_mixture and not curriculum.steps:
        return None
    from toolkit.data import orders

    global_size, _ = rows_per_step(cfg, data.packing)
    if is_mixture:
        names = data.source_names[: len(sources)]  # those of validation data come behind
        return orders.ScheduledMixture(data.train_plan.bounds, sources, names, global_size, cfg.train, key)
    lengths, offsets = data.train.lengths(data.train_plan.members), data.train_plan.offsets
    longest_samples = lengths if offsets is None else np.maximum.reduceat(lengths, offsets[:-1])  # [rows]
    limits = orders.length_limits(curriculum, cfg.data.max_length)
    return orders.CurriculumOrder(longest_samples, limits, global_size, cfg.data.max_length, key)


def _order_key(cfg: schema.RunConfig, data: LanguageData) -> str:
    """Return the text that seeds the order of rows."""
    return f"{cfg.run.seed} {data.train.content}"


def training_batches(
    cfg: schema.RunConfig,
    data: LanguageData,
    ranks: Ranks,
    total_steps: int,
    start: sampler.Position = sampler.BEGINNING,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of `total_steps` steps from a position on, prefetched by a thread."""
    mesh = mesh_of(cfg, ranks.world_size, ranks.rank)
    shares = _training_sampler(cfg, data, mesh, start, total_steps, changing_order(cfg, data))
    # `load_batches` starts the loader here, in the main thread: only then it watches its worker processes.
    batches = _with_columns(load_batches(cfg, data, "train", shares, cfg.data.num_workers), shares, data, "train")
    return prefetch(map(partial(part_of, mesh=mesh), batches), accumulation(cfg, ranks.world_size))


def load_batches(
    cfg: schema.RunConfig, data: LanguageData, split: str, shares: Iterable[list[int]], num_workers: int = 0
) -> Iterator[Batch]:
    """Return an iterator over micro-batches of a split; `shares` lists the rows of each."""
    return iter(
        build_loader(
            *data.split(split),
            shares,
            data.pad_id,
            data.layout,
            seed=cfg.run.seed,
            num_workers=num_workers,
            multiple=pad_multiple(cfg.parallel.sequence),
        )
    )


def part_of(batch: Batch, mesh: Mesh) -> Batch:
    """Return this rank's part of a micro-batch if sequences are divided over ranks, else all of it."""
    if mesh.sequence == 1:
        return batch
    from toolkit.layouts.sequence import local_part

    return local_part(batch, mesh.part, mesh.sequence)


def _with_columns(
    batches: Iterator[Batch], shares: Iterable[list[int]], data: LanguageData, split: str
) -> Iterator[Batch]:
    """Return the batches of a split with their further columns, if there are any: `reference` and `value` of samples,
    float32 [samples], and those of `TokenTargets.columns` of trained tokens. `shares` lists each batch's rows.
    """
    store, plan = data.split(split)
    reference, targets = data.reference.get(split), data.targets.get(split)

    def with_columns(rows: list[int], batch: Batch) -> Batch:
        """Return a batch, made of these rows of the plan, with the columns of their samples."""
        samples = [sample for row in rows for sample in plan[row]]
        columns = targets.columns(samples) if targets is not None else {}
        if reference is not None:  # log-probability of each answer by the reference model of a preference loss
            columns["reference"] = torch.from_numpy(reference[samples])
        if (values := store.values(samples)) is not None:  # labels, good or bad, or margins: see `store.has_values`
            columns["value"] = torch.from_numpy(values)
        return {**batch, **columns}

    has_columns = store.has_values or reference is not None or targets is not None
    if not has_columns:
        return batches
    return (with_columns(rows, batch) for rows, batch in zip(shares, batches, strict=True))


def prefetch(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield the batches, in pinned memory unless the device is a CPU. A thread, which alone uses `batches`, prepares
    `count` in advance; an error in it is raised in place of its batch.
    """
    accelerator = get_accelerator()
    on_gpu = accelerator.device_name() != "cpu"  # False for a run on CPUs of a machine with a GPU

    def prepare() -> Batch | None:
        batch = next(batches, None)
        if batch is None or not on_gpu:
            return batch
        return {name: tensor.pin_memory() for name, tensor in batch.items()}

    # A new thread begins with the first GPU as its current device.
    set_own_gpu = partial(accelerator.set_device, accelerator.current_device()) if on_gpu else None
    thread = ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=set_own_gpu)
    try:
        waiting = deque(thread.submit(prepare) for _ in range(count))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(prepare))
            yield batch
    finally:  # also if the generator is closed early, as after a rewind
        thread.shutdown(cancel_futures=True)


def step_samples(
    cfg: schema.RunConfig, data: LanguageData, world_size: int, start: sampler.Position
) -> list[list[list[int]]]:
    """Return the numbers of the samples of the step at a position, by rank and micro-batch."""
    plan, order = data.train_plan, changing_order(cfg, data)
    meshes = [mesh_of(cfg, world_size, rank) for rank in range(world_size)]
    by_rank = [_training_sampler(cfg, data, mesh, start, 1, order) for mesh in meshes]
    return [[[sample for row in rows for sample in plan[row]] for rows in share] for share in by_rank]


def _training_sampler(
    cfg: schema.RunConfig,
    data: LanguageData,
    mesh: Mesh,
    start: sampler.Position,
    num_steps: int,
    order: "Order | None",
) -> sampler.GlobalBatchSampler:
    """Return the sampler of this rank's rows of the training plan from a position on, in `order` or shuffled."""
    global_size, micro = rows_per_step(cfg, data.packing)
    store, plan = data.train, data.train_plan

    def costs(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what each row costs to compute, for `GlobalBatchSampler`: its tokens, or its pairs of attention."""
        if plan.members is None or plan.offsets is None:  # a row is one sample
            return store.lengths(rows if plan.members is None else plan.members[rows])
        if data.packing is not schema.Packing.none:
            return plan.attention_pairs(store, rows)
        # Without packing: a preference pair, whose two answers are at `first` and `first + 1` of the members.
        first = plan.offsets[rows]
        chosen, rejected = store.lengths(plan.members[first]), store.lengths(plan.members[first + 1])
        if plan.shared is None:  # each is padded to the longer one
            return np.maximum(chosen, rejected)
        return chosen + rejected - plan.shared[first + 1]  # their common prompt is computed once

    return sampler.GlobalBatchSampler(
        num_rows=order.num_rows if order else len(plan),
        global_size=global_size,
        micro_per_gpu=micro,
        rank=mesh.data_rank,
        world_size=mesh.data_ranks,
        key=_order_key(cfg, data),
        start=start,
        num_steps=num_steps,
        costs=costs,
        order=order,
    )


def evaluation_batches(cfg: schema.RunConfig, data: LanguageData, ranks: Ranks) -> Iterator[Batch]:
    """Yield this rank's validation micro-batches, prefetched; `sources`, int64 [T]: each trained token's source."""
    mesh = mesh_of(cfg, ranks.world_size, ranks.rank)
    return prefetch(map(partial(part_of, mesh=mesh), _evaluation_batches(cfg, data, ranks)), 2)


@contextmanager
def evaluation_with_progress(
    cfg: schema.RunConfig, data: LanguageData, ranks: Ranks, alive: Callable[[], object]
) -> Iterator[Iterator[Batch]]:
    """Provide the batches of `evaluation_batches`; show a progress bar meanwhile, and call `alive` after each batch."""
    at_once = rows_per_step(cfg, data.packing)[1] * mesh_of(cfg, ranks.world_size).data_ranks
    count = -(-len(data.split("validation")[1]) // at_once)
    with phase(tr("Evaluating"), count, tr("batches")) as advance:

        def batches() -> Iterator[Batch]:
            for batch in evaluation_batches(cfg, data, ranks):
                yield batch
                alive()
                advance(1)

        yield batches()


def _evaluation_batches(cfg: schema.RunConfig, data: LanguageData, ranks: Ranks) -> Iterator[Batch]:
    """Yield the full batches of `evaluation_batches`, without prefetching."""
    store, plan = data.split("validation")
    mesh = mesh_of(cfg, ranks.world_size, ranks.rank)
    shares = sampler.sequential(len(plan), rows_per_step(cfg, data.packing)[1], mesh.data_rank, mesh.data_ranks)
    sources, loaded = store.sources(), load_batches(cfg, data, "validation", shares)
    for plan_rows, batch in zip(shares, _with_columns(loaded, shares, data, "validation"), strict=True):
        # [rows, segments + 1]: the source of each segment, which is a sample; segment 0 is padding.
        source_of_segment = torch.full((len(batch["segment_ids"]), int(batch["segment_ids"].max()) + 1), -1)
        for row, samples in enumerate(laid_out([plan[row] for row in plan_rows], data.layout)):
            numbers = np.asarray(samples) % len(store)  # in a `MismatchedCache` sample i is also i + len(store)
            source_of_segment[row, 1 : len(numbers) + 1] = torch.from_numpy(sources[numbers])
        source_of_token = source_of_segment.gather(1, batch["segment_ids"]).flatten()
        yield {**batch, "sources": source_of_token[batch["target_indices"]]}


def longest_batch(cfg: schema.RunConfig, data: LanguageData, world_size: int) -> Batch:
    """Return the longest training rows as a micro-batch, which in a small split has fewer rows than others; if rows are
    divided over ranks, this rank's part of it.
    """
    per_step, micro = rows_per_step(cfg, data.packing)
    ranks = mesh_of(cfg, world_size).data_ranks
    rows_per_rank = math.ceil(min(per_step, len(data.train_plan)) / ranks)
    micro_batches = per_step // (micro * ranks)
    return _collate(cfg, data, _longest_rows(data, math.ceil(rows_per_rank / micro_batches)))


def repeated_batch(cfg: schema.RunConfig, data: LanguageData, times: int, share: float = 1.0) -> Batch:
    """Return a micro-batch of `times` copies of the longest row, with samples cut to a `share` of their tokens."""
    [samples] = _longest_rows(data, 1)
    if share < 1:
        samples = [_shortened(sample, share) for sample in samples]
    return _collate(cfg, data, [samples] * times)


def _longest_rows(data: LanguageData, count: int) -> list[list[Sample | Branch]]:
    """Return the `count` rows of the plan that take the most memory, the largest first, each as its samples."""
    plan, store = data.train_plan, data.train
    lengths = plan.lengths(store)
    if plan.shared is not None:  # a shared token's keys and values are copied, about a sixteenth of its memory
        lengths = lengths + plan.shared // 16
    if plan.offsets is None:  # each row is one sample
        order = np.argsort(-lengths, kind="stable")
    elif data.layout is not Layout.alone:
        order = np.argsort(-np.add.reduceat(lengths, plan.offsets[:-1]), kind="stable")
    else:
        # Samples are padded to the longest of a row, rounded up: the padded row counts. With as many tokens, longer
        # samples need more for attention. `lexsort` sorts by its last key first.
        longest = -(-np.maximum.reduceat(lengths, plan.offsets[:-1]) // PAD_MULTIPLE) * PAD_MULTIPLE
        order = np.lexsort((-longest, -np.diff(plan.offsets) * longest))
    rows = PlannedRows(store, plan)
    return [rows[int(row)] for row in order[:count]]


def _shortened(sample: Sample | Branch, share: float) -> Sample | Branch:
    """Return a `share` of a sample's tokens, consecutive ones, of which only the last is trained: the first tokens, or
    those up to the first trained one if that comes later, as ChatGLM-6B needs the <sop> before it. A branch shares the
    same proportion of its tokens.
    """
    ids, trained = sample[:2]
    length = max(2, int(len(ids) * share))
    if isinstance(sample, Branch):
        shared = min(int(sample.shared * share), length - 2)  # not the trained token, and the one that predicts it
        return Branch(ids[:length], np.arange(length) == length - 1, shared)
    end = max(length, int(trained.argmax()) + 1)
    trained = trained[end - length : end].copy()
    trained[-1] = True
    return ids[end - length : end], trained


def _collate(cfg: schema.RunConfig, data: LanguageData, rows: list[list[Sample | Branch]]) -> Batch:
    batch = collate_planned(rows, data.pad_id, data.layout, pad_multiple(cfg.parallel.sequence))
    return part_of(batch, mesh_of(cfg, world_size(), rank()))
