"""Whole parameters and stored buffers from a partitioned model, one after another."""

from collections.abc import Iterator

import deepspeed
import torch


def gathered_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and whole value, on rank 0's CPU, of all that a checkpoint must hold: parameters, stored buffers.

    On other ranks the value is an empty tensor.

    A collective under stage 3: every rank must iterate to the end. At most one parameter is whole at a time.
    """
    is_rank0 = torch.distributed.get_rank() == 0
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            value = parameter.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)
        yield name, value
    stored = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in stored:
            yield name, buffer.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)
