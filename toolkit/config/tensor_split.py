"""How each parameter is divided where ranks hold parts of matrices or some of the experts, and which models can be."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from toolkit.messages import ConfigError, tr

FAMILIES = ("chatglm", "glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models whose parts, of tensors or of layers, compute what the model does, as a test compares."""


class Split(Enum):
    """How one parameter is divided."""

    rows = "rows"
    """Each rank has some of the rows of a matrix, or numbers of a bias, side by side."""
    pairs = "pairs"
    """Two matrices lie on top of each other, and each rank has rows of both."""
    columns = "columns"
    """Each rank has some of a matrix's columns; what comes out is added up over the ranks."""
    last = "last"
    """Each rank has some of the numbers along the last axis."""


AXES = {Split.columns: 1, Split.last: -1}
"""The axis that is divided, where it is not the first."""
# Of what peft puts in a matrix's place: the matrix itself or a trained copy, and LoRA's factor that has the split side.
# The other factor is whole on every rank; what comes between the two is whole, too, or added up over the ranks.
_IN_ITS_PLACE = r"\.base_layer|\.original_module|\.modules_to_save\.default"
_ROWS = rf"({_IN_ITS_PLACE}|\.lora_B\.default|\.lora_magnitude_vector\.default)?\.(weight|bias)$"
_PATTERNS = {
    Split.rows: rf".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|query_key_value|dense_h_to_4h){_ROWS}",
    Split.pairs: rf".*\.gate_up_proj{_ROWS}",
    # Their biases are added once, after the sum over the ranks.
    Split.columns: r".*\.(o_proj|down_proj|attention\.dense|dense_4h_to_h)"
    rf"({_IN_ITS_PLACE}|\.lora_A\.default)?\.weight$",
}
EXPERTS = r".*\.experts(\.base_layer)*\.(\w+|lora_A\.\w+\.weight)$"
"""Of all routed experts of a layer, one after another; ranks that divide them have some of them, whole."""
_LORA_OF_EXPERTS = r".*\.experts(\.base_layer)*\.lora_B\.\w+\.weight$"
"""The same, but experts are the last axis."""
_ON_HEADS = r".*\.(q_norm|k_norm)\.weight$"
"""Whole on every rank, but each applies them to its own heads: their gradients are added up."""


def split_of(name: str) -> Split | None:
    """Return how a parameter is split; None for one that every rank has whole."""
    if re.match(EXPERTS, name):
        return Split.rows
    if re.match(_LORA_OF_EXPERTS, name):
        return Split.last
    return next((split for split, pattern in _PATTERNS.items() if re.match(pattern, name)), None)


def part_shape(name: str, shape: tuple[int, ...], size: int, *, back: bool = False) -> tuple[int, ...]:
    """Return the shape of each rank's part of a parameter of the whole shape `shape`, split over `size` ranks; with
    `back`, the other way round, the whole shape where `shape` is a part's. A parameter that is not split keeps its own.
    """
    split = split_of(name)
    if split is None:
        return shape
    axis = AXES.get(split, 0) % len(shape)  # -1 becomes the index of the last axis
    length = shape[axis] * size if back else shape[axis] // size
    return (*shape[:axis], length, *shape[axis + 1 :])


def partition_config() -> dict[str, Any]:
    """Return how parameters are split as `tensor_parallel.partition_config` of DeepSpeed's AutoTP, which splits nothing
    that is not named here. Its own guess (heuristics, or transformers' plan) would gather logits and guess fused
    matrices from class names (deepspeed 0.19.8, engine._apply_autotp_partitioning).
    """
    rows, pairs, columns = _PATTERNS.values()
    # DeepSpeed calls a split of rows "column", and the other way round: it thinks of the transposed matrix.
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [rows], "partition_type": "column"},
            {"patterns": [pairs], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
            {"patterns": [columns], "partition_type": "row"},
            {"patterns": [_ON_HEADS], "partition_type": "skip", "grad_allreduce": True},
        ],
    }


def check_split(config: Mapping[str, Any], size: int) -> None:
    """Raise a ConfigError if a model cannot be split over `size` ranks. `config`: its `heads`, `key_heads` and `inner`
    (feed-forward width), and `model_type` unless that is known to be supported.
    """
    if size == 1:
        return
    kind = config.get("model_type", FAMILIES[0])
    if kind not in FAMILIES:
        raise ConfigError(
            "parallel.tensor = {size}: how the layers of '{kind}' are split is not known here. Known are {known}. "
            "zero=stage3 divides any model.",
            size=size,
            kind=kind,
            known=", ".join(FAMILIES),
        )
    for value, what in (
        (config["heads"], tr("attention heads")),
        (config["key_heads"], tr("heads of keys and values")),
        (config["inner"], tr("numbers in the middle of the feed-forward part")),
    ):
        if value % size:
            raise ConfigError(
                "parallel.tensor = {size} does not divide the model's {count} {what}. Use a number that does.",
                size=size,
                count=value,
                what=what,
            )
