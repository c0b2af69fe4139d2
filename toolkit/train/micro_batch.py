"""The largest micro-batch that fits into the memory of every rank, found without anything running out of it."""

from collections.abc import Sequence

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.config.mesh import accumulation, micro_rows, micro_sizes
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import gather, world_size
from toolkit.engine.memory import PeakMemory
from toolkit.train.guard import Guard
from toolkit.train.longest import repeated_batch
from toolkit.train.prepared import Prepared
from toolkit.train.rehearse import Measured, rehearse_step, unchanged

SHARE = 0.92
"""Of the memory that may be used: the rest is for what falls apart in it, and for what communication takes."""


def find(
    engine: DeepSpeedEngine, guard: Guard, cfg: RunConfig, prepared: Prepared, memory: PeakMemory, room: int
) -> int:
    """Return how many rows a micro-batch may have, the same on every rank. A collective; changes nothing.

    One row cut to half its length, two such rows and a whole row take no more than a run needs at least, and tell what
    grows with the rows and what does not. From there the rows at most double as long as twice as many should fit: what
    is measured grows ever faster, if anything, so that where the last two lead to too much, it is too much.

    Args:
        engine: for micro-batches of one row.
        guard: of the engine.
        cfg: with micro-batches of one row.
        prepared: its plans.
        memory: entered.
        room: bytes that this rank may use.
    """
    times, sizes = accumulation(cfg, world_size()), micro_sizes(cfg, world_size())
    if times == 1:
        return 1

    def measure(rows: int, share: float = 1.0) -> Measured:
        return rehearse_step(engine, guard, repeated_batch(cfg, prepared, rows, share), memory, times)

    with unchanged(engine):
        half, two_halves, whole = measure(1, 0.5), measure(2, 0.5), measure(1)
        before, last = (0, 2 * half.forward_backward - two_halves.forward_backward), (1, whole.forward_backward)
        while (rows := min(gather(_next(sizes, before, last, SHARE * room)))) > last[0]:
            found = measure(rows)
            if not all(gather(max(found.forward_backward, found.update) <= SHARE * room)):
                break
            before, last = last, (rows, found.forward_backward)
    get_accelerator().empty_cache()
    return last[0]


def _next(sizes: Sequence[int], before: tuple[int, int], last: tuple[int, int], room: float) -> int:
    """Return the size to be tried after the last, or the last itself if no larger one will fit.

    Args:
        sizes: rows, ascending.
        before: rows, and the bytes that were measured with them.
        last: the same of more rows.
        room: bytes.
    """
    rows, taken = last
    per_row = (taken - before[1]) / (rows - before[0])
    larger = [size for size in sizes if size > rows]
    near = [size for size in larger if size <= 2 * rows] or larger[:1]
    return max((size for size in near if taken + (size - rows) * per_row <= room), default=rows)


def use(engine: DeepSpeedEngine, cfg: RunConfig) -> None:
    """Let an engine, before its first step, have the micro-batches of a config.

    Its optimizers read the number of micro-batches in one place, where gradients are kept in host memory (deepspeed
    0.19.8); its `config` is what checkpoints keep.
    """
    rows, times = micro_rows(cfg), accumulation(cfg, world_size())
    engine.set_train_micro_batch_size(rows)
    # Not by set_train_batch_size, which takes every rank for one with rows of its own.
    engine._config.train_batch_size, engine._config.gradient_accumulation_steps = cfg.batch.global_size, times
    engine.config |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": times}
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = times
