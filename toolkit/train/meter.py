"""Figures between two log lines."""

import math
import time

from deepspeed import DeepSpeedEngine

from toolkit.train.pace import Pace, exchange
from toolkit.train.step import StepResult


class Meter:
    """Adds up steps."""

    def __init__(self, engine: DeepSpeedEngine, trained_tokens: int = 0, total_tokens: int = 0) -> None:
        """Start counting.

        Args:
            engine: asked for its loss scale and skipped steps.
            trained_tokens: those of the run so far.
            total_tokens: those of the run so far.
        """
        self.engine = engine
        self.trained_tokens_so_far, self.total_tokens_so_far = trained_tokens, total_tokens
        self.grad_norm = math.nan
        self.paused = 0.0
        self.on_its_own_since = time.perf_counter()
        """When ranks last waited for one another."""
        self._reset()

    def _reset(self) -> None:
        self.loss_sum = 0.0
        self.trained_tokens = self.total_tokens = self.computed_tokens = self.steps = 0
        self.rank_tokens = 0
        self.own_s = self.data_wait_s = 0.0
        self.bad_loss = math.nan
        self.started = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Count one step."""
        if math.isfinite(result.loss):
            self.loss_sum += result.loss * result.trained_tokens
            self.trained_tokens += result.trained_tokens
        else:
            self.bad_loss = result.loss
        self.total_tokens += result.total_tokens
        self.computed_tokens += result.computed_tokens
        self.trained_tokens_so_far += result.trained_tokens
        self.total_tokens_so_far += result.total_tokens
        self.steps += 1
        self.grad_norm = result.grad_norm
        self.rank_tokens += result.rank_tokens
        self.own_s += result.arrived - self.on_its_own_since + result.forward_s
        self.on_its_own_since = time.perf_counter()

    def pace(self) -> Pace:
        """Return how fast each rank was since the last row. A collective."""
        seconds = time.perf_counter() - self.started
        return exchange(self.steps, seconds, self.own_s, self.data_wait_s, self.rank_tokens, self.engine.device)

    def row(self, step: int, epoch: float, lr: float, pace: Pace) -> dict[str, float]:
        """Return the row of metrics.jsonl and start anew.

        Args:
            step: the last step counted.
            epoch: passes over the data so far, with fraction.
            lr: learning rate that this step used.
            pace: of the ranks since the last row.

        Returns:
            `loss` is exact: sum of token losses / trained tokens over all ranks and all steps since the last row whose
            loss is a number.
        """
        seconds = time.perf_counter() - self.started
        row = {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": self.loss_sum / self.trained_tokens if self.trained_tokens else self.bad_loss,
            "lr": lr,
            "grad_norm": self.grad_norm,
            "tokens_per_s": self.total_tokens / seconds,
            "step_s": seconds / self.steps,
            "trained_tokens": self.trained_tokens_so_far,
            "total_tokens": self.total_tokens_so_far,
            "padding_fraction": 1 - self.total_tokens / self.computed_tokens,
            "skipped_steps": self.engine.skipped_steps,
            **pace.row(),
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
        gone = time.perf_counter() - self.paused
        self.started += gone
        self.on_its_own_since += gone
