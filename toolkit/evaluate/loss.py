"""Loss and perplexity of the validation split, exact over all its tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import sum_over_ranks
from toolkit.models.loss import num_trained_tokens, token_loss_sum


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result over all ranks."""

    loss: float
    """Nats per trained token."""
    tokens: int
    """Trained tokens."""

    @property
    def perplexity(self) -> float:
        """Return exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate_loss(engine: DeepSpeedEngine, micro_batches: Iterable[dict[str, torch.Tensor]]) -> Evaluation:
    """Evaluate the model as it stands. A collective.

    Args:
        engine: the engine; left in training mode.
        micro_batches: this rank's part of the split, CPU tensors `[B, S]`; as many on every rank, fillers included.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    tokens = 0
    engine.eval()
    with torch.no_grad():
        for batch in micro_batches:
            tokens += num_trained_tokens(batch)
            on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
            loss_sum += token_loss_sum(engine, on_device).double()
    engine.train()
    totals = sum_over_ranks(
        torch.stack([loss_sum, torch.tensor(float(tokens), dtype=torch.float64).to(loss_sum)]),
        engine.device,
    )
    return Evaluation(loss=float(totals[0] / totals[1]), tokens=int(totals[1]))
