"""Whole parameters and stored buffers from a partitioned model, one after another."""

from collections.abc import Collection, Iterator

import deepspeed
import torch
import torch.distributed as dist

from toolkit.models.stages import StagedModel, stage_model


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
    if isinstance(module, StagedModel):
        yield from _stage_by_stage(module)
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


def _stage_by_stage(module: StagedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of a pipeline: the first rank of each stage sends what it holds to rank 0, one after another."""
    own = {name: one.detach() for name, one in stage_model(module).named_parameters()}
    per_stage = dist.get_world_size() // module.num_stages
    for source in range(0, dist.get_world_size(), per_stage):
        listed = [[(name, one.shape, one.dtype) for name, one in own.items()]]
        dist.broadcast_object_list(listed, src=source)
        for name, shape, dtype in listed[0]:
            value = torch.empty(0)
            if source == 0 == dist.get_rank():
                value = own[name].to("cpu", copy=True)
            elif dist.get_rank() == source:
                dist.send(own[name].contiguous(), dst=0)
            elif dist.get_rank() == 0:
                received = torch.empty(shape, dtype=dtype, device=next(iter(own.values())).device)
                dist.recv(received, src=source)
                value = received.cpu()
            yield name, value
