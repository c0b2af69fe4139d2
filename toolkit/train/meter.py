"""Figures between two log lines."""

import math
import time

import torch
from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import sum_over_ranks
from toolkit.train.step import StepResult


class Meter:
    """Adds up steps; nothing is read from the device before `row`."""

    def __init__(self, engine: DeepSpeedEngine, trained_tokens: int = 0) -> None:
        """Start counting.

        Args:
            engine: asked for its gradient norm, loss scale and skipped steps.
            trained_tokens: those of the run so far.
        """
        self.engine = engine
        self.trained_tokens_so_far = trained_tokens
        self.grad_norm: torch.Tensor | None = None
        self.paused = 0.0
        self._reset()

    def _reset(self) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        self.trained_tokens = self.total_tokens = self.computed_tokens = self.steps = 0
        self.started = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.loss_sum += result.loss_sum.double()
        self.trained_tokens += result.trained_tokens
        self.total_tokens += result.total_tokens
        self.computed_tokens += result.computed_tokens
        self.trained_tokens_so_far += result.trained_tokens
        self.steps += 1
        self.grad_norm = result.grad_norm

    def row(self, step: int, epoch: float, lr: float) -> dict[str, float]:
        """Return the row of metrics.jsonl and start anew. A collective.

        Args:
            step: the last step counted.
            epoch: passes over the data so far, with fraction.
            lr: learning rate that this step used.

        Returns:
            `loss` is exact: sum of token losses / trained tokens over all ranks and all steps since the last row.
        """
        loss_sum = float(sum_over_ranks(self.loss_sum.reshape(1), self.engine.device)[0])
        seconds = time.perf_counter() - self.started
        row = {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": loss_sum / self.trained_tokens,
            "lr": lr,
            "grad_norm": self._read_grad_norm(),
            "tokens_per_s": self.total_tokens / seconds,
            "step_s": seconds / self.steps,
            "trained_tokens": self.trained_tokens_so_far,
            "padding_fraction": 1 - self.total_tokens / self.computed_tokens,
            "skipped_steps": self.engine.skipped_steps,
        }
        if self.engine.fp16_enabled():
            row["loss_scale"] = float(self.engine.optimizer.loss_scale)
        self._reset()
        return row

    def pause(self) -> None:
        """Leave out what happens before `resume`: evaluation, saving."""
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Count time again."""
        self.started += time.perf_counter() - self.paused

    def _read_grad_norm(self) -> float:
        norm = self.engine.get_global_grad_norm() if self.grad_norm is None else self.grad_norm
        return math.nan if norm is None else float(norm)
