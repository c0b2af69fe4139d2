"""Whole parameters and stored buffers from a partitioned model, one after another."""

from collections.abc import Collection, Iterator

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from toolkit.distributed.tensor import gather_parts, is_part


def is_divided(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether no rank alone can run the model: its parameters are divided over ranks."""
    return bool(engine.zero_optimization_partition_weights()) or engine.autotp_size() > 1


def gathered_parameters(
    module: torch.nn.Module, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and whole value, on rank 0's CPU, of all that a checkpoint must hold: parameters, stored buffers.

    On other ranks the value is an empty tensor.

    A collective where the model is divided: every rank must iterate to the end. One parameter is whole at a time.

    Args:
        module: the engine's.
        only: names; None yields all.
    """
    if isinstance(module, PipelineModule):  # toolkit.models.stages.StagedModel
        yield from module.gathered()
        return
    is_rank0 = torch.distributed.get_rank() == 0
    for name, parameter in module.named_parameters():
        if only is not None and name not in only:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            whole = gather_parts(name, parameter.detach()) if is_part(parameter) else parameter.detach()
            value = whole.to("cpu", copy=True) if is_rank0 else torch.empty(0)
        yield name, value
    stored = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in stored and only is None:
            yield name, buffer.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)
