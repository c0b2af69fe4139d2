"""DeepSpeed's inference engine: generation with a model whose weights are split over ranks."""

import contextlib
import io

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from toolkit.config import tensor_split
from toolkit.messages import ModelError, tr
from toolkit.models.record import has_adapter

FAMILIES = tuple(kind for kind in tensor_split.FAMILIES if kind != "chatglm")
"""Model types for which a test shows that two ranks give the same answers as one; DeepSpeed 0.19.8 splits others too,
some of them wrongly."""


def split_inference(model: PreTrainedModel) -> PreTrainedModel:
    """Split a full model over all ranks by `deepspeed.init_inference`, in place, and return it on this rank's device. A
    collective. DeepSpeed 0.19.8 has kernels for none of these model types. ModelError if the model cannot be split.
    """
    import deepspeed

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if model.config.model_type not in FAMILIES:
        raise ModelError(
            "engine = deepspeed: DeepSpeed's inference engine is not known to split a {kind} rightly; known are "
            "{known}. Leave engine out.",
            kind=type(model).__name__,
            known=", ".join(FAMILIES),
        )
    if has_adapter(model):
        raise ModelError(
            tr("engine = deepspeed splits whole models only. Merge the adapter first: toolkit export-model merge=true")
        )
    groups = model.config.num_key_value_heads
    if groups % ranks:
        raise ModelError(
            "engine = deepspeed: the model's {groups} heads of keys and values cannot be split over {ranks} ranks. "
            "Take a number of ranks that divides {groups}.",
            groups=groups,
            ranks=ranks,
        )
    float32_buffers = [(name, value.clone()) for name, value in model.named_buffers() if value.dtype is torch.float32]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the layers that it splits
        engine = deepspeed.init_inference(model, dtype=model.dtype, tensor_parallel={"tp_size": ranks})
    split_model: PreTrainedModel = engine.module
    # It casts buffers too, but rotary frequencies must stay float32.
    for name, value in float32_buffers:
        owner, _, attribute = name.rpartition(".")
        setattr(split_model.get_submodule(owner), attribute, value.to(split_model.device))
    return split_model
