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
    """Whether DeepSpeed's Muon is the optimizer, which ZeRO's wrappers move momenta of before its step (0.19.8)."""
    return type(engine.basic_optimizer).__name__ == "MuonWithAuxAdam"


def gathered_parameters(
    module: torch.nn.Module, only: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and full value, on rank 0's CPU, of all that a checkpoint must hold: parameters, stored buffers.

    On other ranks the value is an empty tensor. A collective where the model is divided: every rank must iterate to the
    end. One parameter is full at a time.
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
"""Groups, by what the names of their parameters hold; what comes first decides."""


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one group."""

    trained: int
    total: int


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
        size = math.prod(full_shape(name, parameter))
        total[group] += size
        trained[group] += size if parameter.requires_grad else 0
    return {group: Count(trained[group], total[group]) for group in total}


def ruined_ranks(engine: deepspeed.DeepSpeedEngine) -> str:
    """Return which ranks hold optimizer states that are NaN or Inf, "" if none does. A collective.

    Inf in one of Adam's keeps its weight from ever changing again; NaN spoils it at the next step.
    """
    ruined = [str(number) for number, finite in enumerate(gather(are_finite(engine))) if not finite]
    return "" if not ruined else f"rank {', '.join(ruined)}"


def are_finite(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether no state that this rank holds outside NVMe has a NaN or an Inf; reads 1 GB of host memory in 0.1 s."""
    basic = engine.basic_optimizer
    on_gpu = getattr(engine.optimizer, "backup_optimizer", None)  # beside partly offloaded ones
    # Muon's second one is for what is no matrix.
    parts = filter(None, (basic, getattr(basic, "aux_optimizer", None), on_gpu))
    held = [state for part in parts for state in part.state.values() if isinstance(state, dict)]
    tensors = [value for state in held for value in state.values() if isinstance(value, torch.Tensor)]
    states = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for state in states:
        sums.setdefault(state.device, []).append(state.sum(dtype=torch.float32))
    if all(bool(torch.stack(sums_of_device).isfinite().all()) for sums_of_device in sums.values()):
        return True
    return all(bool(state.isfinite().all()) for state in states)  # finite numbers may have a sum that is not
