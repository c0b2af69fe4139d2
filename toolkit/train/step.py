"""One optimizer step: a function for each type of engine."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.distributed.process_group import sum_over_ranks
from toolkit.errors import Diverged
from toolkit.models.pipeline import is_pipeline, train_window
from toolkit.models.router_loss import RouterLoss
from toolkit.train.anomalies import StepGuard
from toolkit.train.stragglers import Stopwatch
from toolkit.train.task import StepResult, Task


def train_step(
    engine: DeepSpeedEngine,
    task: Task,
    micro_batches: list[Any],
    world_size: int,
    guard: StepGuard,
    votes: Sequence[bool] = (),
    copies: int = 1,
) -> StepResult:
    """Do one optimizer step in the way of the engine's type; arguments, result and errors as `data_parallel_step`."""
    if is_pipeline(engine):
        return pipeline_step(engine, task, micro_batches, guard, votes)
    return data_parallel_step(engine, task, micro_batches, world_size, guard, votes, copies)


def data_parallel_step(
    engine: DeepSpeedEngine,
    task: Task,
    micro_batches: list[Any],
    world_size: int,
    guard: StepGuard,
    votes: Sequence[bool] = (),
    copies: int = 1,
) -> StepResult:
    """Do one optimizer step whose loss is exactly sum(token losses) / N over the global batch.

    N, the number of trained tokens of all ranks, is known before the first backward pass. The engine averages
    gradients over the ranks, hence the factor `world_size`; where several ranks count the same, N is as many times too
    large as it averages over fewer. `scale_wrt_gas=False`: it divides by nothing else (deepspeed 0.19.8, backward).

    Args:
        engine: the DeepSpeed engine.
        task: what is summed and counted.
        micro_batches: this rank's accumulation window on the CPU; as many on every rank.
        world_size: number of ranks.
        guard: judges loss and gradient before the weights change.
        votes: this rank's answers to questions on which all must act alike; they ride on a sum.
        copies: how many ranks compute the same rows.

    Raises:
        ValueError: no token of the global batch is trained.
        Diverged: fp16's loss scale cannot be lowered any more.
    """
    micro_tokens, tokens = [task.count(batch) for batch in micro_batches], task.sizes(micro_batches)
    arrived, forward = time.perf_counter(), Stopwatch(engine.device)
    # Not read here: the host would wait for the last step's update before it queues any work of this one.
    counts = sum_over_ranks([sum(micro_tokens), *tokens, *map(float, votes)], engine.device)
    factor = (world_size / counts[0]).float()
    micro_losses, routers = torch.zeros(len(micro_batches), device=engine.device), task.router_loss(engine)
    for place, batch in enumerate(micro_batches):
        forward.mark()
        _begin_router_loss(routers, engine, batch, len(micro_batches))
        micro_sum = task.loss_sum(engine, batch)
        forward.mark()
        engine.backward(micro_sum * factor, scale_wrt_gas=False)
        micro_losses[place] = micro_sum.detach()
        if place == len(micro_batches) - 1:
            loss, router_total, trained_tokens, others = _read(micro_losses, routers, counts)
            guard.see_loss(loss)
        _step(engine)
    return StepResult(
        loss=loss,
        trained_tokens=int(trained_tokens) // copies,
        total_tokens=int(others[0]) // copies,
        computed_tokens=int(others[1]) // copies,
        pairs=int(others[2]) // copies,
        grad_norm=guard.gate.grad_norm,
        votes=[int(count) for count in others[3:]],
        micro_losses=micro_losses,
        micro_tokens=micro_tokens,
        rank_tokens=tokens[1],
        arrived=arrived,
        forward_s=forward.seconds(),
        router_loss=router_total / (world_size * len(micro_batches)) if routers else None,
    )


def pipeline_step(
    engine: DeepSpeedEngine, task: Task, micro_batches: list[Any], guard: StepGuard, votes: Sequence[bool] = ()
) -> StepResult:
    """Do one optimizer step of a model that is divided into stages, with the same loss as `data_parallel_step`.

    The last stages alone count tokens and losses, so that each counts once. PipelineEngine divides a loss by the number
    of micro-batches and averages gradients over the pipelines (deepspeed 0.19.8), hence the factor.

    Args:
        engine: the PipelineEngine.
        task: what is summed and counted.
        micro_batches: the accumulation window of this rank's pipeline; the same on all its stages.
        guard: judges loss and gradient before the weights change.
        votes: as `data_parallel_step`; of every rank.

    Raises:
        ValueError: no token of the global batch is trained.
    """
    counts_here = engine.is_last_stage()
    micro_tokens = [task.count(batch) for batch in micro_batches]
    tokens = task.sizes(micro_batches)
    arrived = time.perf_counter()
    mine = [sum(micro_tokens), *tokens] if counts_here else [0, 0, 0, 0]
    counts = sum_over_ranks([*map(float, mine), *map(float, votes)], engine.device)
    factor = (engine.dp_world_size * len(micro_batches) / counts[0]).float()
    micro_losses: list[torch.Tensor] = []
    read: list[tuple[float, float, float, list[float]]] = []

    def finish(model: PreTrainedModel, batch: Any) -> torch.Tensor:
        micro_sum = task.loss_sum(model, batch)
        micro_losses.append(micro_sum.detach())
        return micro_sum * factor

    def before_update() -> None:
        micro_losses.extend([torch.zeros((), device=engine.device)] * (len(micro_batches) - len(micro_losses)))
        read.append(_read(torch.stack(micro_losses), None, counts))
        guard.see_loss(read[0][0])

    train_window(engine, micro_batches, finish, before_update)
    [(loss, _, trained_tokens, others)] = read
    return StepResult(
        loss=loss,
        trained_tokens=int(trained_tokens),
        total_tokens=int(others[0]),
        computed_tokens=int(others[1]),
        pairs=int(others[2]),
        grad_norm=guard.gate.grad_norm,
        votes=[int(count) for count in others[3:]],
        micro_losses=torch.stack(micro_losses),
        micro_tokens=micro_tokens,
        rank_tokens=tokens[1],
        arrived=arrived,
        forward_s=0.0,
    )


def _begin_router_loss(routers: RouterLoss | None, engine: DeepSpeedEngine, batch: Any, accumulation: int) -> None:
    if routers is None:
        return
    # Its gradient comes from no loss that the engine could scale.
    loss_scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    routers.begin(batch["segment_ids"], engine.device, loss_scale / accumulation)


def _read(
    micro_losses: torch.Tensor, routers: RouterLoss | None, counts: torch.Tensor
) -> tuple[float, float, float, list[float]]:
    """Return the global batch's loss, the sum of the routers', its trained tokens and the other counts.

    The one wait for the device in a step; DeepSpeed's own check of the gradients follows at once.
    """
    of_routers = routers.collect() if routers else micro_losses.new_zeros(())
    sums = sum_over_ranks(torch.stack((micro_losses.sum(), of_routers)), micro_losses.device)
    total, router_total, trained_tokens, *others = torch.cat((sums, counts)).tolist()
    if not trained_tokens:
        raise ValueError("no token of this global batch is trained")
    return total / trained_tokens, router_total, trained_tokens, others


def _step(engine: DeepSpeedEngine) -> None:
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
