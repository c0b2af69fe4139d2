"""Whole parameters and stored buffers from a partitioned model, one after another."""

from collections.abc import Collection, Iterator

import deepspeed
import torch
from deepspeed.pipe import PipelineModule


def gathered_parameters(
    module: torch.nn.Module, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and whole value, on rank 0's CPU, of all that a checkpoint must hold: parameters, stored buffers.

    On other ranks the value is an empty tensor.

    A collective under stage 3 and of a pipeline: every rank must iterate to the end. At most one parameter is whole at
    a time.

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
            value = parameter.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)
        yield name, value
    stored = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in stored and only is None:
            yield name, buffer.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)
