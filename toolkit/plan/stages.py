"""What the stages of a pipeline hold of a model. No torch."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from toolkit.plan.parameters import Outline, Shapes, layer_of

_HEAD = "lm_head.weight"


def stage_outlines(outline: Outline, num_stages: int) -> list[Outline]:
    """Return the parts of a model as models of their own, in the order in which they compute.

    What a stage lacks stands in it with no rows: an embedding, as the states that come in have a gradient, and a head.

    Args:
        outline: the whole.
        num_stages: stages.
    """
    layers, hidden = outline.sizes["layers"], outline.sizes["hidden"]
    before = {name: shape for name, shape in outline.shapes.items() if "embed" in name}
    head = {name: shape for name, shape in outline.shapes.items() if name == _HEAD} or before
    norm = {name: shape for name, shape in outline.shapes.items() if layer_of(name) < 0 and name not in (before | head)}
    inner = [{name: s for name, s in outline.shapes.items() if layer_of(name) == layer} for layer in range(layers)]
    parts = [before, *inner, norm, head]
    bounds = balanced([sum(map(math.prod, part.values())) for part in parts], num_stages)
    found = []
    for first, end in pairwise(bounds):
        own = [place for place in range(first, end) if 1 <= place <= layers]
        shapes: Shapes = {} if first == 0 else {name: (0, hidden) for name in before}
        shapes |= {} if end == len(parts) else {_HEAD: (0, hidden)}
        for place in range(first, end):
            start = own[0] - 1 if own else 0
            shapes |= {_renumbered(name, start): shape for name, shape in parts[place].items()}
        found.append(
            replace(outline, shapes=shapes, trained=frozenset(shapes), sizes=outline.sizes | {"layers": len(own)})
        )
    return found


def balanced(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return where the parts of a sequence begin and end that differ least: as DeepSpeed divides layers by parameters.

    Step by step the division is kept whose largest and smallest part differ least, of equal ones the one whose last
    part is the shortest (deepspeed 0.19.8, runtime/utils.py, partition_balanced).

    Args:
        sizes: more than `num_parts` of them.
        num_parts: of which none is empty.
    """
    ends = [0, *accumulate(sizes)]
    found: dict[int, tuple[float, float, list[int]]] = {0: (0, math.inf, [0])}
    for _ in range(num_parts):
        longer = {}
        for end in range(1, len(ends)):
            ways = [
                (max(largest, ends[end] - ends[begin]), min(smallest, ends[end] - ends[begin]), [*bounds, end])
                for begin, (largest, smallest, bounds) in found.items()
                if begin < end
            ]
            if ways:
                longer[end] = min(reversed(ways), key=lambda way: way[0] - way[1])
        found = longer
    return found[len(sizes)][2]


def _renumbered(name: str, start: int) -> str:
    """Return a parameter's name with its layer counted from a stage's first."""
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda number: str(int(number[0]) - start), name, count=1)
