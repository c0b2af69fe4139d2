"""How tensor parallelism splits the matrices of a layer, by the names of the parameters; and which models it can split.

Of two matrices that follow each other the first is split by what comes out of it and the second by what goes into it,
so that a layer's ranks wait for one another once after attention and once after the feed-forward part (Megatron-LM,
Shoeybi et al. 2019). Embedding, output layer and norms stay whole on every rank. No torch here.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from toolkit.errors import ConfigError
from toolkit.messages import tr

FAMILIES = ("chatglm", "glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models whose parts are known to compute what the whole does: those that a test compares."""


class Split(Enum):
    """How one parameter is divided."""

    rows = "rows"
    """Each rank has some of the rows of a matrix, or numbers of a bias, side by side."""
    pairs = "pairs"
    """Two matrices lie on top of each other, and each rank has rows of both."""
    columns = "columns"
    """Each rank has some of a matrix's columns; what comes out is added up over the ranks."""


_PATTERNS = {
    Split.rows: r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|query_key_value|dense_h_to_4h)\.(weight|bias)$",
    Split.pairs: r".*\.gate_up_proj\.(weight|bias)$",
    # Their biases are added once, after the sum over the ranks.
    Split.columns: r".*\.(o_proj|down_proj|attention\.dense|dense_4h_to_h)\.weight$",
}
_ON_HEADS = r".*\.(q_norm|k_norm)\.weight$"
"""Whole on every rank, but each applies them to its own heads: their gradients are added up."""


def split_of(name: str) -> Split | None:
    """Return how a parameter is split; None for one that every rank has whole."""
    return next((split for split, pattern in _PATTERNS.items() if re.match(pattern, name)), None)


def part_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a parameter."""
    split = split_of(name)
    if split is None:
        return shape
    place = 1 if split is Split.columns else 0
    return (*shape[:place], shape[place] // size, *shape[place + 1 :])


def whole_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape of a parameter of which each of `size` ranks has a part of this shape."""
    split = split_of(name)
    if split is None:
        return shape
    place = 1 if split is Split.columns else 0
    return (*shape[:place], shape[place] * size, *shape[place + 1 :])


def partition_config() -> dict[str, Any]:
    """Return the same for DeepSpeed's AutoTP, which splits nothing but what is named here.

    Its own guess (heuristics, or transformers' plan) would gather logits and guess fused matrices from class names
    (deepspeed 0.19.8, engine._apply_autotp_partitioning).
    """
    rows, pairs, columns = (_PATTERNS[split] for split in Split)
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
    """Refuse a model that cannot be split over so many ranks.

    Args:
        config: `heads`, `key_heads` and `inner` of the model, and `model_type` where that is not known to be right.
        size: `parallel.tensor`.

    Raises:
        ConfigError: it is of another kind, or a number of heads or the inner width does not divide.
    """
    if size == 1:
        return
    kind = config.get("model_type", FAMILIES[0])
    if kind not in FAMILIES:
        raise ConfigError(
            tr(
                "parallel.tensor = {size}: how the layers of '{kind}' are split is not known here. Known are {known}. "
                "zero=stage3 divides any model.",
                size=size,
                kind=kind,
                known=", ".join(FAMILIES),
            )
        )
    for value, what in (
        (config["heads"], tr("attention heads")),
        (config["key_heads"], tr("heads of keys and values")),
        (config["inner"], tr("numbers in the middle of the feed-forward part")),
    ):
        if value % size:
            raise ConfigError(
                tr(
                    "parallel.tensor = {size} does not divide the model's {count} {what}. Use a number that does.",
                    size=size,
                    count=value,
                    what=what,
                )
            )
