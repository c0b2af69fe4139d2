"""Expert parallelism (`parallel.expert`): the routed experts of a layer are divided over ranks, to which tokens go.

The exchange is GShard's: Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 3.2. Nothing is dropped here:
routers may, whose numbers of what they drop are ~0 to ~(E - 1) (`router_loss.Routers`).

T tokens of a rank, K experts of a token, P ranks that share them, N rows that reach a rank, H hidden width.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.distributed import row_exchange
from toolkit.distributed.process_group import is_expert_part
from toolkit.messages import ConfigError, ModelError, tr
from toolkit.models import weights
from toolkit.models.experts import SORTED, Groups, compute_experts, count_choices, expert_parameters, mark_as_divided


def divide(model: PreTrainedModel, ranks: int) -> dict[str, slice]:
    """Keep of each layer's experts in an empty model those of this rank; return name -> rows that this rank has, of
    every parameter and stored buffer. ModelError if `ranks` do not divide the experts. A collective.
    """
    check_divides(model, ranks)
    from deepspeed.utils import groups  # seconds, which those who divide nothing need not wait

    groups._create_expert_and_data_parallel(ranks)
    group = f"ep_size_{ranks}"  # the name that DeepSpeed (0.19.8, utils/groups.py) gives it
    return keep_own_experts(model, groups._get_expert_parallel_rank(group), ranks, group)


def check_divides(model: PreTrainedModel, ranks: int) -> None:
    """Raise ModelError unless a model's experts can be divided over so many ranks."""
    numbers = {weight.size(0) for weight in expert_parameters(model).values()}
    reason = ""
    if not numbers or not model._can_set_experts_implementation():  # transformers 5.24, modeling_utils.py
        reason = tr("it has no routed experts that transformers computes by an interface")
    elif uneven := [number for number in numbers if number % ranks]:
        reason = tr("its {count} experts cannot be divided by {ranks}", count=uneven[0], ranks=ranks)
    if reason:
        raise ModelError(
            "parallel.expert = {ranks} is incompatible with {model}: {reason}.",
            ranks=ranks,
            model=type(model).__name__,
            reason=reason,
        )


def keep_own_experts(model: PreTrainedModel, rank: int, ranks: int, group: str) -> dict[str, slice]:
    """Keep in each layer only the experts of rank `rank` of `ranks`, which are DeepSpeed's group `group`, and let the
    layer compute by `compute_elsewhere`. Return the same as `divide`.
    """
    stored = dict.fromkeys(weights.shapes_of(model), slice(None))
    for name, parameter in expert_parameters(model).items():
        module, _, leaf = name.rpartition(".")
        layer, size = model.get_submodule(module), parameter.size(0) // ranks
        stored[name] = slice(rank * size, (rank + 1) * size)
        own_experts = parameter.data[stored[name]].clone()  # a view would keep all experts in memory
        setattr(layer, leaf, mark_as_divided(nn.Parameter(own_experts, requires_grad=parameter.requires_grad), group))
        layer.num_experts, layer.expert_group, layer.compute_elsewhere = size, group, compute_elsewhere
    model.set_experts_implementation(SORTED)
    return stored


def compute_elsewhere(self: Any, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return what experts make of rows [T x K, H], computed on the ranks that have them; 0 of rows that were dropped.
    `self`: the layer's experts; `chosen`: the number of each row's expert, by which rows are sorted; < 0: dropped.
    """
    from deepspeed.utils import groups

    group = groups._get_expert_parallel_group(self.expert_group)
    num_experts, ranks = self.num_experts, dist.get_world_size(group)
    # Rows of each of all experts, [P x own]; dropped rows are counted in front, as number 0, and skipped.
    counts = count_choices(chosen.clamp(min=-1) + 1, num_experts * ranks + 1)[1:]
    received = torch.empty_like(counts)  # [P, own]: rows from each rank for each expert
    dist.all_to_all_single(received, counts, group=group)
    received = received.view(ranks, num_experts)
    num_sent, num_received = rows_exchanged(counts.view(ranks, num_experts), received)
    num_dropped = len(rows) - sum(num_sent)  # of the first rows, as their numbers are the smallest
    rows = row_exchange.exchange_rows(rows[num_dropped:], group, num_sent, num_received)  # [N, H], by rank and expert
    # `compute_experts` wants them by expert alone: `order` sorts them, its inverse restores the order of the senders.
    expert = torch.arange(num_experts, device=rows.device).repeat(ranks)
    expert = expert.repeat_interleave(received.flatten(), output_size=sum(num_received))
    order = expert.argsort(stable=True)
    rows = compute_experts(self, rows[order], Groups(received.sum(0)), expert[order])
    back = row_exchange.exchange_rows(rows[order.argsort()], group, num_received, num_sent)
    return functional.pad(back, (0, 0, num_dropped, 0)) if num_dropped else back


def rows_exchanged(counts: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank, and how many come from it. `counts` [P, own]: rows for each expert of each
    rank; `received` [P, own]: rows from each rank for each expert of this one.
    """
    num_sent, num_received = torch.stack((counts.sum(1), received.sum(1))).tolist()  # the host waits here
    return num_sent, num_received


def check_not_alone(trained: list[torch.nn.Parameter], ds_config: dict[str, Any]) -> None:
    """Raise ConfigError if ZeRO-1 in bf16 is to train divided experts alone: BF16_Optimizer fails on the norm of an
    empty list (0.19.8, runtime/utils.py, get_global_norm_of_tensors).
    """
    is_bf16_stage1 = ds_config.get("bf16", {}).get("enabled") and ds_config["zero_optimization"]["stage"] == 1
    if is_bf16_stage1 and all(map(is_expert_part, trained)):
        raise ConfigError(
            tr(
                "zero.stage = 1: nothing but divided experts is trained, and DeepSpeed's first stage "
                "wants something else, too. Use zero=stage2."
            )
        )


def split_off_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move experts that are divided over ranks into parameter groups of their own, as their gradients are summed over
    other ranks. The groups are marked as DeepSpeed marks those of its own experts (0.19.8, moe/utils.py,
    split_params_into_different_moe_groups_for_optimizer).
    """
    new_groups = []
    for group in groups:
        experts = [parameter for parameter in group["params"] if is_expert_part(parameter)]
        undivided = [parameter for parameter in group["params"] if not is_expert_part(parameter)]
        if undivided:
            new_groups.append(group | {"params": undivided})
        if experts:
            new_groups.append(group | {"params": experts, "moe": True, "name": experts[0].group_name})
    return new_groups


class ExpertGroups(MoE):
    """A part of a model that computes nothing, by which DeepSpeed knows that its ranks have different experts.

    The engine looks for modules of this class or AutoEP's (0.19.8, engine._configure_distributed_model). AutoEP puts
    routers and experts of its own into a model, under other names, and has none of GLM's.
    """

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Leave groups as they are: the model's ranks have them (toolkit.layouts.experts)."""
