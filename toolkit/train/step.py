"""One optimizer step: forward and backward passes in the way of the engine's type."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.distributed.process_group import sum_over_ranks
from toolkit.messages import Diverged
from toolkit.models.loss import RouterLoss
from toolkit.models.pipeline import is_pipeline, train_window
from toolkit.train.anomalies import StepGuard
from toolkit.train.stragglers import Stopwatch
from toolkit.train.task import StepResult, Task

_Sums = tuple[torch.Tensor, float, float | None, list[float]]
"""This rank's micro-batch losses; the global batch's loss, the sum of the routers' losses, and all other counts."""


def train_step(
    engine: DeepSpeedEngine,
    task: Task,
    micro_batches: list[Any],
    world_size: int,
    guard: StepGuard,
    votes: Sequence[bool] = (),
    copies: int = 1,
) -> StepResult:
    """Do one optimizer step whose loss is exactly sum(token losses) / N over the global batch, N known before any
    backward.

    `micro_batches`: this rank's accumulation window on the CPU, the same on all stages of a pipeline; `votes`: answers
    on which all ranks must agree, sent with a sum; `copies`: how many ranks compute the same sequences. N counts these
    copies, as the engine averages gradients over fewer ranks. ValueError if no token is trained; Diverged if fp16's
    loss scale cannot be lowered any more.
    """
    micro_tokens, sizes = [task.count(batch) for batch in micro_batches], task.sizes(micro_batches)
    arrived, forward = time.perf_counter(), Stopwatch(engine.device)
    has_stages = is_pipeline(engine)
    # A pipeline's last stage alone counts tokens and losses, so that each counts once.
    mine = [0, 0, 0, 0] if has_stages and not engine.is_last_stage() else [sum(micro_tokens), *sizes]
    # Not read here: the host would wait for the last step's update before it queues any work of this one.
    counts = sum_over_ranks([*mine, *map(float, votes)], engine.device)
    if has_stages:
        sums = _pipeline_passes(engine, task, micro_batches, guard, counts)
    else:
        sums = _data_parallel_passes(engine, task, micro_batches, guard, counts, world_size, forward)
    micro_losses, loss, router_sum, (trained, total, computed, pairs, *heard) = sums
    return StepResult(
        loss=loss,
        trained_tokens=int(trained) // copies,
        total_tokens=int(total) // copies,
        computed_tokens=int(computed) // copies,
        pairs=int(pairs) // copies,
        grad_norm=guard.gate.grad_norm,
        votes=[int(count) for count in heard],
        micro_losses=micro_losses,
        micro_tokens=micro_tokens,
        rank_tokens=sizes[1],
        arrived=arrived,
        forward_s=forward.seconds(),
        router_loss=None if router_sum is None else router_sum / (world_size * len(micro_batches)),
    )


def _data_parallel_passes(
    engine: DeepSpeedEngine,
    task: Task,
    micro_batches: list[Any],
    guard: StepGuard,
    counts: torch.Tensor,
    world_size: int,
    forward: Stopwatch,
) -> _Sums:
    """Pass each micro-batch forward and back, then update. The engine averages gradients over ranks, hence
    `world_size`; with `scale_wrt_gas=False` it divides by nothing else (deepspeed 0.19.8, backward).
    """
    factor = (world_size / counts[0]).float()
    micro_losses, routers = torch.zeros(len(micro_batches), device=engine.device), task.router_loss(engine)
    for place, batch in enumerate(micro_batches):
        forward.mark()
        if routers is not None:  # their gradient comes from no loss that the engine could scale
            loss_scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
            routers.begin(batch["segment_ids"], engine.device, loss_scale / len(micro_batches))
        micro_sum = task.loss_sum(engine, batch)
        forward.mark()
        engine.backward(micro_sum * factor, scale_wrt_gas=False)
        micro_losses[place] = micro_sum.detach()
        if place == len(micro_batches) - 1:
            sums = _read(micro_losses, routers, counts, guard)
        try:
            engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):  # DeepSpeed raises a bare Exception (0.19.8)
                raise
            raise Diverged(
                "fp16: gradients overflow even at the smallest loss scale ({scale}): these weights or this learning "
                "rate do not fit into fp16. Use precision=bf16 or precision=fp32, or lower optim.lr.",
                scale=engine.optimizer.loss_scale,
            ) from error
    return sums


def _pipeline_passes(
    engine: DeepSpeedEngine, task: Task, micro_batches: list[Any], guard: StepGuard, counts: torch.Tensor
) -> _Sums:
    """Do the same through pipeline stages. PipelineEngine divides by the number of micro-batches and averages over
    pipelines (deepspeed 0.19.8), hence the factor.
    """
    factor = (engine.dp_world_size * len(micro_batches) / counts[0]).float()
    micro_losses: list[torch.Tensor] = []
    read: list[_Sums] = []

    def finish(model: PreTrainedModel, batch: Any) -> torch.Tensor:
        micro_sum = task.loss_sum(model, batch)
        micro_losses.append(micro_sum.detach())
        return micro_sum * factor

    def before_update() -> None:
        micro_losses.extend([torch.zeros((), device=engine.device)] * (len(micro_batches) - len(micro_losses)))
        read.append(_read(torch.stack(micro_losses), None, counts, guard))

    train_window(engine, micro_batches, finish, before_update)
    return read[0]


def _read(micro_losses: torch.Tensor, routers: RouterLoss | None, counts: torch.Tensor, guard: StepGuard) -> _Sums:
    """Return all ranks' sums once the guard has seen the loss: a step's one wait for the device."""
    of_routers = routers.collect() if routers else micro_losses.new_zeros(())
    sums = sum_over_ranks(torch.stack((micro_losses.sum(), of_routers)), micro_losses.device)
    total, router_sum, *others = torch.cat((sums, counts)).tolist()
    if not others[0]:
        raise ValueError("no token of this global batch is trained")
    loss = total / others[0]
    guard.see_loss(loss)
    return micro_losses, loss, router_sum if routers else None, others
