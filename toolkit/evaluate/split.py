"""DeepSpeed's inference engine: a model whose linear layers are split over ranks (tensor parallelism)."""

import contextlib
import io

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.adapters import has_adapter

FAMILIES = ("glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""Of which a test shows that two ranks answer as one does; DeepSpeed 0.19.8 splits others too, some of them wrongly."""


def split(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model after `deepspeed.init_inference`, on this rank's device. A collective.

    With one rank the model computes as before: DeepSpeed 0.19.8 has kernels of its own for none of the families.

    Args:
        model: whole, in the precision that it is to compute in; it is changed.

    Raises:
        ModelError: DeepSpeed cannot split it, or not over so many ranks.
    """
    import deepspeed

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            tr(
                "engine = deepspeed: DeepSpeed's inference engine is not known to split a {kind} rightly; known are "
                "{known}. Leave engine out.",
                kind=type(model).__name__,
                known=", ".join(FAMILIES),
            )
        )
    if has_adapter(model):
        raise ModelError(
            tr("engine = deepspeed splits whole models only. Merge the adapter first: toolkit export-model merge=true")
        )
    groups = model.config.num_key_value_heads
    if groups % ranks:
        raise ModelError(
            tr(
                "engine = deepspeed: the model's {groups} heads of keys and values cannot be split over {ranks} ranks. "
                "Take a number of ranks that divides {groups}.",
                groups=groups,
                ranks=ranks,
            )
        )
    exact = [(name, value.clone()) for name, value in model.named_buffers() if value.dtype is torch.float32]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints which layers it takes
        engine = deepspeed.init_inference(model, dtype=model.dtype, tensor_parallel={"tp_size": ranks})
    split_model: PreTrainedModel = engine.module
    # It casts buffers too; rotary frequencies are right in float32 alone.
    for name, value in exact:
        owner, _, leaf = name.rpartition(".")
        setattr(split_model.get_submodule(owner), leaf, value.to(split_model.device))
    return split_model
