"""What a stage or a rank has of a model under pipeline, tensor and expert parallelism, and what ranks send each other.

No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from toolkit.config import mesh, schema
from toolkit.messages import ConfigError, ModelError
from toolkit.plan.outline import HEAD, Outline, Shapes, is_routed, layer_of, load_of_busiest_rank
from toolkit.plan.tuning_targets import SCORE


def stage_outlines(outline: Outline, num_stages: int) -> list[Outline]:
    """Return the outline of each pipeline stage, as if it were a model of its own, in the order of computing.
    A stage without the head has one of no rows; one that receives states has a trained parameter of no rows for them,
    as they need a gradient. Bounds are chosen without what tuning adds. ModelError if a stage would train nothing.
    """
    layers, hidden = outline.sizes["layers"], outline.sizes["hidden"]
    before = {name: shape for name, shape in outline.shapes.items() if "embed" in name}
    after = {name: shape for name, shape in outline.shapes.items() if layer_of(name) < 0 and name not in before}
    after |= {} if {HEAD, SCORE} & {*after} else {name: shape for name, shape in before.items() if not _is_added(name)}
    inner = [{key: shape for key, shape in outline.shapes.items() if layer_of(key) == layer} for layer in range(layers)]
    parts = [before, *inner, after]
    sizes = [sum(math.prod(shape) for name, shape in part.items() if not _is_added(name)) for part in parts]
    bounds = stage_bounds(sizes, layers, num_stages)
    stages = []
    for stage, (first, end) in enumerate(pairwise(bounds), 1):
        held = {name: shape for part in parts[first:end] for name, shape in part.items()}
        trained, names = held.keys() & outline.trained, list(held)
        if not trained:
            raise untrained_stage(num_stages, stage, names[0], names[-1])
        num_before = max(first - 1, 0)  # a stage counts its layers from 0
        states: Shapes = {"hidden_states": (0, hidden)} if first else {}
        head: Shapes = {HEAD: (0, hidden)} if end < len(parts) else {}
        stages.append(
            replace(
                outline,
                shapes={_renumbered(name, num_before): shape for name, shape in held.items()} | states | head,
                trained=frozenset(_renumbered(name, num_before) for name in trained) | states.keys(),
                targets=frozenset(_renumbered(key, num_before) for key in outline.targets if f"{key}.weight" in held),
                sizes=outline.sizes | {"layers": min(end, layers + 1) - max(first, 1)},
            )
        )
    return stages


def _renumbered(name: str, before: int) -> str:
    """Return a parameter's name where so many layers before its own are left out."""
    number = layer_of(name)
    return name.replace(f".{number}.", f".{number - before}.", 1)


def untrained_stage(stages: int, stage: int, first: str, last: str) -> ModelError:
    """Return the error about a stage, from 1, without a parameter to train: DeepSpeed's optimizers want one, and what a
    stage hands on has to have a gradient.
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
    """Whether a parameter is one that LoRA adds to the model."""
    return ".lora_" in name or ".modules_to_save." in name


def stage_bounds(sizes: Sequence[int], layers: int, num_stages: int) -> list[int]:
    """Return where stages begin and end in a model's parts, by size: an embedding, `layers` layers, and the rest. Each
    stage has a layer, so that each has what an adapter trains.
    """
    if num_stages > layers:
        raise ModelError(
            "parallel.pipeline = {stages} is more than the model's {layers} layers. Use at most {layers}.",
            stages=num_stages,
            layers=layers,
        )
    units = [sizes[0] + sizes[1], *sizes[2:layers], sum(sizes[layers:])]
    return [0, *(bound + 1 for bound in balance_stages(units, num_stages)[1:-1]), len(sizes)]


def balance_stages(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return where the parts of a sequence begin and end that differ least: as DeepSpeed divides layers by parameters.
    Step by step the division is kept whose largest and smallest part differ least, of equal ones the one whose last
    part is the shortest (deepspeed 0.19.8, runtime/utils.py, partition_balanced). There are more `sizes` than parts, of
    which none is empty.
    """
    ends = [0, *accumulate(sizes)]
    divisions: dict[int, tuple[float, float, list[int]]] = {0: (0, math.inf, [0])}
    for _ in range(num_parts):
        longer = {}
        for end in range(1, len(ends)):
            ways = [
                (max(largest, ends[end] - ends[begin]), min(smallest, ends[end] - ends[begin]), [*bounds, end])
                for begin, (largest, smallest, bounds) in divisions.items()
                if begin < end
            ]
            if ways:
                longer[end] = min(reversed(ways), key=lambda way: way[0] - way[1])
        divisions = longer
    return divisions[len(sizes)][2]


def tensor_part(outline: Outline, size: int) -> Outline:
    """Return a rank's part of a model under tensor parallelism."""
    if size == 1:
        return outline
    sizes = outline.sizes
    mesh.check_split(
        {"heads": sizes["heads"], "key_heads": sizes["keys"] // sizes["head_size"], "inner": sizes["inner"]}, size
    )
    shapes = {name: mesh.part_shape(name, shape, size) for name, shape in outline.shapes.items()}
    divided = {name: sizes[name] // size for name in ("heads", "keys", "inner")}
    return replace(outline, shapes=shapes, sizes=sizes | divided)


def expert_part(outline: Outline, size: int, capacity: float = 0.0) -> Outline:
    """Return a rank's part of a model whose routed experts are divided over `size` ranks; all else is whole."""
    if size == 1:
        return outline
    routed = {name: shape for name, shape in outline.shapes.items() if is_routed(name)}
    counts = {shape[0] for name, shape in routed.items() if not _is_added(name)} or {0}
    if uneven := [count for count in counts if count % size or not count]:
        raise ConfigError(
            "parallel.expert = {size} cannot divide the {count} routed experts of a layer of this model. Use a divisor "
            "of that number, or 1 for a model without them.",
            size=size,
            count=uneven[0],
        )
    parts = {
        name: (*shape[:-1], shape[-1] // size) if "lora_B" in name else (shape[0] // size, *shape[1:])
        for name, shape in routed.items()
    }
    # The tokens of as many ranks meet these experts, so that those of one rank cost what they did.
    sizes = outline.sizes | {"experts": outline.sizes.get("experts", 0) // size, "expert_ranks": size}
    return replace(outline, shapes=outline.shapes | parts, sizes=sizes, received=load_of_busiest_rank(capacity))


def rank_part(outline: Outline, cfg: schema.RunConfig) -> Outline:
    """Return what a rank has of a model, or of a pipeline stage of it, before ZeRO divides that."""
    return expert_part(tensor_part(outline, cfg.parallel.tensor), cfg.parallel.expert, cfg.model.expert_capacity)


def zero_groups(part: Outline, ranks: int) -> list[tuple[int, int, int]]:
    """Return numbers of parameters and of trained ones, and the ranks over which ZeRO divides them: of what all `ranks`
    have, and of routed experts, which only some ranks have alike.
    """
    size = part.sizes.get("expert_ranks", 1)
    routed = {name for name in part.shapes if size > 1 and is_routed(name)}
    groups = ((part.shapes.keys() - routed, ranks), (routed, ranks // size))
    return [(part.count(names), part.count(names & part.trained), over) for names, over in groups]


def dispatched_bytes(part: Outline, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return how many bytes a rank sends for a micro-batch to ranks with other experts, and in how many collectives.
    In each pass (forward, backward, recomputation) the states of each token go to each chosen expert and back; before,
    but not in the backward pass, the numbers of rows are sent. `states_bytes`: hidden states of a micro-batch; experts
    are assumed to be chosen equally often.
    """
    size = part.sizes.get("expert_ranks", 1)
    if size == 1:
        return 0.0, 0
    layers, passes = len({layer_of(name) for name in part.shapes if is_routed(name)}), 3 if recomputes else 2
    once = part.sizes.get("chosen", 0) * states_bytes * (size - 1) / size
    return layers * passes * 2 * once, layers * (3 * passes - 1)


def exchanged_bytes(outline: Outline, size: int, states_bytes: int, recomputes: bool) -> tuple[float, int]:
    """Return how many bytes tensor parallelism over `size` ranks makes a rank send for a micro-batch, and in how many
    all-reduces (rings are assumed). `states_bytes`: hidden states of a micro-batch.
    The outputs of a matrix that is split by columns are all-reduced in the forward pass, and in recomputation; the
    gradients of the inputs of any other split matrix in the backward pass, each matrix by itself, even if three share
    an input (deepspeed 0.19.8, module_inject/layers.py).
    """
    if size == 1:
        return 0.0, 0
    kinds = {name: mesh.split_of(name) for name, shape in outline.shapes.items() if len(shape) == 2}
    # What is added up is as wide as the hidden states, and between LoRA's two factors as their rank.
    columns = [outline.shapes[name][0] for name, kind in kinds.items() if kind is mesh.Split.columns]
    others = [outline.shapes[name][1] for name, kind in kinds.items() if kind not in (None, mesh.Split.columns)]
    widths = [*columns, *others, *(columns if recomputes else ())]
    return sum(widths) / outline.sizes["hidden"] * 2 * (size - 1) / size * states_bytes, len(widths)
