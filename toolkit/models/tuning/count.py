"""How many parameters a model has and how many of them are trained, by what they are."""

import math
from collections import Counter
from dataclasses import dataclass

from transformers import PreTrainedModel

from toolkit.distributed.tensor import shape_of

_GROUPS = (
    ("norms", ("norm",)),
    ("attention", ("attn", "attention", "query_key_value")),
    ("feed-forward", ("mlp", "expert", "feed_forward", "ffn")),
)
"""Groups, by what the names of their parameters hold; what comes first decides."""


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one group."""

    trained: int
    """Those that are trained."""
    total: int
    """All."""


def count_parameters(model: PreTrainedModel) -> dict[str, Count]:
    """Return the parameters of a model by group; partitioned ones count whole, what LoRA adds with what it adds to."""
    inner = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    outer = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if name.startswith(("prefix_encoder.", "soft_prompt.")):
            group = "prefix"
        elif id(parameter) in inner:
            group = "embedding"
        elif id(parameter) in outer:
            group = "head"
        else:
            group = next((group for group, parts in _GROUPS if any(part in name.lower() for part in parts)), "other")
        size = math.prod(shape_of(name, parameter))
        total[group] += size
        trained[group] += size if parameter.requires_grad else 0
    return {group: Count(trained[group], total[group]) for group in total}
