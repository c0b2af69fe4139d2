"""What one of the ranks that split a model's layers has of it. No torch."""

from dataclasses import replace

from toolkit.config.tensor import check_split, part_shape, split_of
from toolkit.plan.parameters import Outline


def part_of(outline: Outline, size: int) -> Outline:
    """Return a rank's part of a model.

    Args:
        outline: of the whole model.
        size: `parallel.tensor`.

    Raises:
        ConfigError: the heads, or the inner width, cannot be divided by it.
    """
    if size == 1:
        return outline
    sizes = outline.sizes
    check_split(
        {"heads": sizes["heads"], "key_heads": sizes["keys"] // sizes["head_size"], "inner": sizes["inner"]}, size
    )
    shapes = {name: part_shape(name, shape, size) for name, shape in outline.shapes.items()}
    own = {name: sizes[name] // size for name in ("heads", "keys", "inner")}
    return replace(outline, shapes=shapes, sizes=sizes | own)


def exchanged(outline: Outline, size: int, states_bytes: int) -> tuple[float, int]:
    """Return the bytes that a rank sends to its neighbours for a micro-batch, and in how many collectives.

    Of each matrix that is split by columns the output is added up in the forward pass, of each other one what goes
    back in the backward pass (deepspeed 0.19.8, module_inject/layers.py: one all-reduce for each matrix, also of three
    that share an input); ring algorithms taken for granted.

    Args:
        outline: of the whole model.
        size: `parallel.tensor`.
        states_bytes: hidden states of a micro-batch.
    """
    if size == 1:
        return 0.0, 0
    times = sum(1 for name, shape in outline.shapes.items() if len(shape) == 2 and split_of(name))
    return times * 2 * (size - 1) / size * states_bytes, times
