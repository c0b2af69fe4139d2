"""One optimizer step of data-parallel training."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import sum_over_ranks
from toolkit.models.loss import num_trained_tokens, token_loss_sum

Batch = dict[str, torch.Tensor]


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What one step did. Counts are global; the loss is this rank's, left on the device to avoid a synchronisation."""

    loss_sum: torch.Tensor
    """Sum of the token losses of this rank, float32 scalar on the device."""
    trained_tokens: int
    """Tokens whose loss counted, over all ranks."""
    total_tokens: int
    """Tokens that are not padding, over all ranks."""
    computed_tokens: int
    """Tokens including padding, over all ranks."""
    votes: list[int]
    """How many ranks voted for each question."""
    grad_norm: torch.Tensor | None
    """Gradient norm before clipping where the engine does not know it (fp32 without ZeRO), else None."""


def train_step(
    engine: DeepSpeedEngine, micro_batches: list[Batch], world_size: int, votes: Sequence[bool] = ()
) -> StepResult:
    """Do one optimizer step whose loss is exactly sum(token losses) / N over the global batch.

    N, the number of trained tokens of all ranks, is known before the first backward pass. The engine averages
    gradients over the ranks, hence the factor `world_size`; `scale_wrt_gas=False` keeps it from dividing by the number
    of micro-batches as well (deepspeed 0.19.8, engine.backward).

    Args:
        engine: the DeepSpeed engine.
        micro_batches: this rank's accumulation window, CPU tensors `[B, S]`; as many on every rank.
        world_size: number of data-parallel ranks.
        votes: this rank's answers to questions on which all must act alike; they ride on the sum that is needed anyway.

    Raises:
        ValueError: no token of the global batch is trained.
    """
    counts = sum_over_ranks(
        [
            sum(num_trained_tokens(batch) for batch in micro_batches),
            sum(int((batch["segment_ids"] > 0).sum()) for batch in micro_batches),
            sum(batch["input_ids"].numel() for batch in micro_batches),
            *map(float, votes),
        ],
        engine.device,
    ).tolist()
    trained_tokens = int(counts[0])
    if trained_tokens == 0:
        raise ValueError("no token of this global batch is trained")
    loss_sum, grad_norm = torch.zeros((), device=engine.device), None
    for batch in micro_batches:
        on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
        micro_sum = token_loss_sum(engine, on_device)
        engine.backward(micro_sum * (world_size / trained_tokens), scale_wrt_gas=False)
        if batch is micro_batches[-1] and not _engine_knows_grad_norm(engine):
            grad_norm = torch.nn.utils.get_total_norm(
                [p.grad for p in engine.module.parameters() if p.grad is not None]
            )
        engine.step()
        loss_sum += micro_sum.detach()
    return StepResult(
        loss_sum=loss_sum,
        trained_tokens=trained_tokens,
        total_tokens=int(counts[1]),
        computed_tokens=int(counts[2]),
        votes=[int(count) for count in counts[3:]],
        grad_norm=grad_norm,
    )


def _engine_knows_grad_norm(engine: DeepSpeedEngine) -> bool:
    """In fp32 without ZeRO the engine clips but keeps no norm (deepspeed 0.19.8, engine.clip_fp32_gradients)."""
    return bool(engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())
