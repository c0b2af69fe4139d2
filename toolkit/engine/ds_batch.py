"""The batch sizes of a DeepSpeed JSON on their way into the schema."""

import math

from toolkit.config.schema import AUTO
from toolkit.engine.ds_translate import Translation
from toolkit.messages import tr


def translate_batch(task: Translation) -> None:
    """Two of the three sizes determine the third, once the number of ranks is known."""
    total, micro, steps = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in (total, micro, steps):
        size = task.given.get(key, 1)
        if size != "auto" and (type(size) not in (int, float) or size != int(size) or size < 1):
            raise task.fail(key, tr("{key} = {value} must be a whole number of at least 1.", key=key, value=repr(size)))
    if task.has(micro):
        task.take("batch.micro_per_gpu", task.given[micro], micro)
    if task.has(total):
        task.take("batch.global_size", task.given[total], total)
    if not task.has(steps):
        if not task.strict:
            _fit_batch(task, total, micro)
        return
    if task.world_size is None:
        if not (task.has(total) and task.has(micro)):
            said = tr(
                "{key} = {value} says nothing without the number of ranks: give world_size=N. Taken is "
                "batch.global_size = {size}.",
                key=steps,
                value=task.given[steps],
                size=task.now("batch.global_size"),
            )
            if task.strict:
                raise task.fail(steps, said)
            task.note(steps, said, dropped=True)
        return
    if task.now("batch.micro_per_gpu") == AUTO:
        raise task.fail(
            steps,
            tr(
                "{key} = {value} cannot be with batch.micro_per_gpu = auto, which decides about it. Leave it out.",
                key=steps,
                value=task.given[steps],
            ),
        )
    _accumulate(task, total, micro, steps)


def _shares(task: Translation) -> int:
    """Return the ranks whose rows differ; 1 where nothing is known of ranks."""
    return (task.world_size or 1) // max(1, task.now("parallel.tensor")) or 1


def _fit_batch(task: Translation, total: str, micro: str) -> None:
    """Where the file gives one of two sizes, let the recipe's other one fit to it."""
    size, rows, shares = task.now("batch.global_size"), task.now("batch.micro_per_gpu"), _shares(task)
    if rows == AUTO or size % (rows * shares) == 0:
        return
    if task.has(micro) and not task.has(total) and not task.is_typed("batch.global_size"):
        task.take("batch.global_size", rows * shares, micro)  # as DeepSpeed, which then accumulates nothing
    elif task.has(total) and not task.has(micro) and size % shares == 0 and not task.is_typed("batch.micro_per_gpu"):
        task.take("batch.micro_per_gpu", math.gcd(size // shares, rows), total)


def _accumulate(task: Translation, total: str, micro: str, steps: str) -> None:
    """Take the size that the file leaves open from its accumulation, or hold its sizes against each other.

    Raises:
        ConfigError: they contradict each other.
    """
    times, shares = task.given[steps], _shares(task)
    if task.is_typed("batch.global_size") or (task.has(total) and task.is_typed("batch.micro_per_gpu")):
        said = tr("{key} = {value} gives way to the batch sizes of the command line.", key=steps, value=times)
        task.note(steps, said, dropped=True)
        return
    expected = times * shares * task.now("batch.micro_per_gpu")
    is_free = "batch.micro_per_gpu" not in task.loaded.explicit or not task.strict
    if not task.has(total):
        task.take("batch.global_size", int(expected), steps)
    elif not task.has(micro) and is_free:
        task.take("batch.micro_per_gpu", task.given[total] // (times * shares) or 1, steps)
        expected = times * shares * task.now("batch.micro_per_gpu")
    if task.now("batch.global_size") != expected and not task.contradictions:
        raise task.fail(
            total,
            tr(
                "train_batch_size = {total} is not train_micro_batch_size_per_gpu {micro} x "
                "gradient_accumulation_steps {steps} x {ranks} ranks = {expected}.",
                total=task.now("batch.global_size"),
                micro=task.now("batch.micro_per_gpu"),
                steps=times,
                ranks=shares,
                expected=expected,
            ),
        )
