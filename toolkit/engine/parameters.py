"""What a partitioned model and its optimizer hold: full parameters, their number, the optimizer's states."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from transformers import PreTrainedModel

from toolkit.distributed.process_group import full_shape, gather, gather_parts, is_part


def is_partitioned(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether no rank alone can run the model: its parameters are divided over ranks."""
    divided = any(is_part(parameter) for parameter in engine.module.parameters())
    return bool(engine.zero_optimization_partition_weights()) or divided


def is_muon(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's Muon is the optimizer: ZeRO's wrappers update its momentum before its step (0.19.8)."""
    return type(engine.basic_optimizer).__name__ == "MuonWithAuxAdam"


def gathered_parameters(
    module: torch.nn.Module, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the full value, in rank 0's host memory, of each parameter and persistent buffer; on other
    ranks the value is an empty tensor. A collective if the model is divided over ranks: every rank must iterate to the
    end. One parameter is gathered at a time. `only`: names to yield, None for all.
    """
    if isinstance(module, PipelineModule):  # toolkit.layouts.pipeline.PipelineStage
        yield from module.gathered(only)
        return
    is_rank0 = torch.distributed.get_rank() == 0
    for name, parameter in module.named_parameters():
        if only is not None and name not in only:
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            full = gather_parts(name, parameter)
            value = full.to("cpu", copy=True) if is_rank0 else torch.empty(0)
        yield name, value
    stored = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in stored and (only is None or name in only):
            yield name, buffer.detach().to("cpu", copy=True) if is_rank0 else torch.empty(0)


_GROUPS = (
    ("norms", ("norm",)),
    ("attention", ("attn", "attention", "query_key_value")),
    ("feed-forward", ("mlp", "expert", "feed_forward", "ffn")),
)
"""Group of parameters -> strings in their names; the first group that matches counts."""


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one group."""

    trained: int
    total: int


def count_parameters(model: PreTrainedModel) -> dict[str, Count]:
    """Count a model's parameters by group, at their full size if they are partitioned; LoRA's count in the group of the
    layer that they are added to.
    """
    embedding_ids = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    head_ids = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if name.startswith(("prefix_encoder.", "soft_prompt.")):
            group = "prefix"
        elif id(parameter) in embedding_ids:
            group = "embedding"
        elif id(parameter) in head_ids:
            group = "head"
        else:
            group = next((group for group, parts in _GROUPS if any(part in name.lower() for part in parts)), "other")
        size = math.prod(full_shape(name, parameter))
        total[group] += size
        trained[group] += size if parameter.requires_grad else 0
    return {group: Count(trained[group], total[group]) for group in total}


def ranks_with_broken_states(engine: deepspeed.DeepSpeedEngine) -> str:
    """Name the ranks whose optimizer states hold NaN or Inf, such as "rank 0, 3"; "" if none does. A collective.

    A weight whose Adam state is Inf never changes again; one whose state is NaN becomes NaN at the next step.
    """
    broken = [str(rank) for rank, is_finite in enumerate(gather(has_finite_states(engine))) if not is_finite]
    return "" if not broken else f"rank {', '.join(broken)}"


def has_finite_states(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether this rank's optimizer states outside NVMe have no NaN or Inf; checks 1 GB of host memory in 0.1 s."""
    basic = engine.basic_optimizer
    on_gpu = getattr(engine.optimizer, "backup_optimizer", None)  # of the part that is not offloaded
    # Muon has a second optimizer, for parameters that are no matrices.
    optimizers = filter(None, (basic, getattr(basic, "aux_optimizer", None), on_gpu))
    by_parameter = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    tensors = [value for state in by_parameter for value in state.values() if isinstance(value, torch.Tensor)]
    states = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # A sum is finite only if all its numbers are, so most tensors need not be looked at one by one.
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for state in states:
        sums.setdefault(state.device, []).append(state.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums_of_device).isfinite().all()) for sums_of_device in sums.values()):
        return True
    return all(bool(state.isfinite().all()) for state in states)  # finite numbers may have a sum that is not
