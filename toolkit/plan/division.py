"""Parts of a model under pipeline, tensor and expert parallelism, and the bytes that ranks exchange. No torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from toolkit.config import tensor_split
from toolkit.messages import ConfigError, ModelError
from toolkit.plan.outline import HEAD, Outline, Shapes, is_routed, layer_of
from toolkit.plan.tuning_targets import SCORE

BUSIEST = 1.5
"""Assumed, not measured: rows of the busiest rank, as a multiple of the mean, if experts are divided over ranks."""


def load_of_busiest_rank(capacity: float) -> float:
    """Return `BUSIEST`, limited by `model.expert_capacity` (0: no limit)."""
    return min(BUSIEST, capacity or BUSIEST)


def stage_outlines(outline: Outline, num_stages: int) -> list[Outline]:
    """Return the outline of each pipeline stage, as a model by itself, in the order of computation. A stage without the
    head has an empty one, so that it counts no logits; one that receives hidden states has an empty trained parameter,
    as they need a gradient. Stages are balanced without an adapter's parameters. ModelError if one would train nothing.
    """
    layers, hidden = outline.sizes["layers"], outline.sizes["hidden"]
    embedding = {name: shape for name, shape in outline.shapes.items() if "embed" in name}
    last = {name: shape for name, shape in outline.shapes.items() if layer_of(name) < 0 and name not in embedding}
    if not {HEAD, SCORE} & {*last}:  # a tied head: the last stage holds the embedding too
        last |= {name: shape for name, shape in embedding.items() if not _is_added(name)}
    inner = [{key: shape for key, shape in outline.shapes.items() if layer_of(key) == layer} for layer in range(layers)]
    parts = [embedding, *inner, last]  # as `stage_bounds` takes them: layer n is part n + 1
    sizes = [sum(math.prod(shape) for name, shape in part.items() if not _is_added(name)) for part in parts]
    bounds = stage_bounds(sizes, layers, num_stages)
    stages = []
    for stage, (first, end) in enumerate(pairwise(bounds), 1):
        held = {name: shape for part in parts[first:end] for name, shape in part.items()}
        trained, names = held.keys() & outline.trained, list(held)
        if not trained:
            raise untrained_stage(num_stages, stage, names[0], names[-1])
        first_layer, end_layer = max(first - 1, 0), min(end - 1, layers)  # a stage counts its own from 0
        states: Shapes = {"hidden_states": (0, hidden)} if first else {}
        empty_head: Shapes = {HEAD: (0, hidden)} if end < len(parts) else {}
        stages.append(
            replace(
                outline,
                shapes={_renumbered(name, first_layer): shape for name, shape in held.items()} | states | empty_head,
                trained=frozenset(_renumbered(name, first_layer) for name in trained) | states.keys(),
                targets=frozenset(_renumbered(key, first_layer) for key in outline.targets if f"{key}.weight" in held),
                sizes=outline.sizes | {"layers": end_layer - first_layer},
            )
        )
    return stages


def _renumbered(name: str, before: int) -> str:
    """Return a parameter's name with its layer's number reduced by `before`."""
    number = layer_of(name)
    return name.replace(f".{number}.", f".{number - before}.", 1)


def untrained_stage(stages: int, stage: int, first: str, last: str) -> ModelError:
    """Return the error about a stage (from 1) without trained parameters, which DeepSpeed's optimizers need, and from
    which a stage's outputs get their gradients.
    """
    return ModelError(
        "parallel.pipeline = {stages}: stage {stage}, from {first} to {last}, would have nothing to train. Train "
        "something in each stage (tuning.last_layers, tuning.patterns, tuning.target_modules), or use parallel=data "
        "with zero=stage3.",
        stages=stages,
        stage=stage,
        first=first,
        last=last,
    )


def _is_added(name: str) -> bool:
    """Whether a parameter belongs to a LoRA adapter."""
    return ".lora_" in name or ".modules_to_save." in name


def stage_bounds(sizes: Sequence[int], layers: int, num_stages: int) -> list[int]:
    """Return the first part of each stage, and the end. `sizes`: of the parts: embedding, `layers` layers, the rest.
    Each stage gets a layer, so that each has parameters that an adapter trains; ModelError if there are too few.
    """
    if num_stages > layers:
        raise ModelError(
            "parallel.pipeline = {stages} is more than the model's {layers} layers. Use at most {layers}.",
            stages=num_stages,
            layers=layers,
        )
    # The first unit is the embedding and a layer, the last one a layer and the rest: unit n ends with part n + 1.
    units = [sizes[0] + sizes[1], *sizes[2:layers], sum(sizes[layers:])]
    return [0, *(bound + 1 for bound in balance_stages(units, num_stages)[1:-1]), len(sizes)]


def balance_stages(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` consecutive parts of `sizes` that differ least, as DeepSpeed divides layers by
    parameters: step by step the division is kept whose largest and smallest part differ least, of equal ones the one
    with the shortest last part (deepspeed 0.19.8, runtime/utils.py, partition_balanced). No part is empty.
    """
    ends = [0, *accumulate(sizes)]
    # Number of sizes that are divided -> (largest, smallest part, bounds) of the best division of these.
    divisions: dict[int, tuple[float, float, list[int]]] = {0: (0, math.inf, [0])}
    for _ in range(num_parts):
        longer = {}
        for end in range(1, len(ends)):
            # The best division of the sizes before `begin`, and the next part from there to `end`.
            ways = [
                (max(largest, ends[end] - ends[begin]), min(smallest, ends[end] - ends[begin]), [*bounds, end])
                for begin, (largest, smallest, bounds) in divisions.items()
                if begin < end
            ]
            if ways:
                longer[end] = min(reversed(ways), key=lambda way: way[0] - way[1])
        divisions = longer
    _, _, bounds = divisions[len(sizes)]
    return bounds


def tensor_part(outline: Outline, size: int) -> Outline:
    """Return a rank's part of a model under tensor parallelism over `size` ranks."""
    if size == 1:
        return outline
    sizes = outline.sizes
    tensor_split.check_split(
        {"heads": sizes["heads"], "key_heads": sizes["keys"] // sizes["head_size"], "inner": sizes["inner"]}, size
    )
    shapes = {name: tensor_split.part_shape(name, shape, size) for name, shape in outline.shapes.items()}
    divided = {name: sizes[name] // size for name in ("heads", "keys", "inner")}
    return replace(outline, shapes=shapes, sizes=sizes | divided)


def expert_part(outline: Outline, size: int, capacity: float = 0.0) -> Outline:
    """Return a rank's part of a model whose routed experts are divided over `size` ranks; the rest is not divided.
    `capacity`: `model.expert_capacity`. ConfigError if `size` does not divide the number of experts.
    """
    if size == 1:
        return outline
    routed = {name: shape for name, shape in outline.shapes.items() if is_routed(name)}
    counts = {shape[0] for name, shape in routed.items() if not _is_added(name)} or {0}  # 0: a model without experts
    if uneven := [count for count in counts if count % size or not count]:
        raise ConfigError(
            "parallel.expert = {size} cannot divide the {count} routed experts of a layer of this model. Use a divisor "
            "of that number, or 1 for a model without them.",
            size=size,
            count=uneven[0],
        )
    # The axis of experts is the last one of LoRA's second factors, and the first one of all others.
    parts = {
        name: (*shape[:-1], shape[-1] // size) if "lora_B" in name else (shape[0] // size, *shape[1:])
        for name, shape in routed.items()
    }
    # These experts get the tokens of `size` ranks, so that the cost per rank does not change.
    sizes = outline.sizes | {"experts": outline.sizes.get("experts", 0) // size, "expert_ranks": size}
    return replace(outline, shapes=outline.shapes | parts, sizes=sizes, received=load_of_busiest_rank(capacity))


def expert_parallel_bytes(part: Outline, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return the bytes that a rank sends to other experts for a micro-batch, and the number of collectives.

    In each pass (forward, backward, recomputation) a token's states go to each chosen expert and back; before that, but
    not in the backward pass, numbers of rows are sent. Experts are assumed to be chosen equally often. `states_bytes`:
    of a micro-batch's hidden states.
    """
    size = part.sizes.get("expert_ranks", 1)
    if size == 1:
        return 0.0, 0
    layers = len({layer_of(name) for name in part.shapes if is_routed(name)})
    passes = 3 if recomputes else 2
    one_way = part.sizes.get("chosen", 0) * states_bytes * (size - 1) / size
    return layers * 2 * passes * one_way, layers * (2 * passes + passes - 1)


def tensor_parallel_bytes(outline: Outline, size: int, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return the bytes that a rank sends for tensor parallelism over `size` ranks in a micro-batch, and the number of
    all-reduces, which are assumed to be rings. `states_bytes`: of a micro-batch's hidden states. The outputs of a
    matrix that is split by columns are all-reduced in the forward pass, and in recomputation; the gradients of the
    inputs of any other split matrix in the backward pass, each matrix by itself, even if three share an input
    (deepspeed 0.19.8, module_inject/layers.py).
    """
    if size == 1:
        return 0.0, 0
    kinds = {name: tensor_split.split_of(name) for name, shape in outline.shapes.items() if len(shape) == 2}
    # Reduced tensors are as wide as the hidden states, or between LoRA's two factors as their rank. In a ring a rank
    # sends 2 (size - 1) / size of each.
    columns, shapes = tensor_split.Split.columns, outline.shapes
    output_widths = [shapes[name][0] for name, kind in kinds.items() if kind is columns]
    input_widths = [shapes[name][1] for name, kind in kinds.items() if kind not in (None, columns)]
    widths = [*output_widths, *input_widths, *(output_widths if recomputes else ())]
    return sum(widths) / outline.sizes["hidden"] * 2 * (size - 1) / size * states_bytes, len(widths)
