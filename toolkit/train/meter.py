"""Figures between two log lines."""

import math
import resource
import statistics
import time

import torch
from deepspeed import DeepSpeedEngine

from toolkit.distributed.process_group import world_size
from toolkit.plan.speed import Work
from toolkit.train.account import Account
from toolkit.train.collectives import Collectives
from toolkit.train.pace import Pace, exchange
from toolkit.train.step import SAMPLES, TOKENS, StepResult

_IN_SAMPLES = {"tokens_per_s": "samples_per_s", "rank_tokens_per_s": "rank_samples_per_s", "total_tokens": "samples"}
_OF_TOKENS = ("trained_tokens_per_s", "trained_tokens", "padding_fraction")


class Meter:
    """Adds up steps."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        account: Account,
        trained_tokens: int = 0,
        total_tokens: int = 0,
        unit: str = TOKENS,
        collectives: Collectives | None = None,
    ) -> None:
        """Start counting.

        Args:
            engine: asked for its loss scale and skipped steps.
            account: what speed and memory are compared with.
            trained_tokens: those of the run so far.
            total_tokens: those of the run so far.
            unit: what is counted; with SAMPLES the rows say samples where they would say tokens.
            collectives: those of the run so far.
        """
        self.engine, self.account, self.unit = engine, account, unit
        self.collectives = collectives or Collectives()
        self.collectives.take(counts=False)  # what came before the first step
        self.trained_tokens_so_far, self.total_tokens_so_far = trained_tokens, total_tokens
        self.grad_norm = math.nan
        self.paused = 0.0
        self.on_its_own_since = time.perf_counter()
        """When ranks last waited for one another."""
        self._reset()

    def _reset(self) -> None:
        self.loss_sum = 0.0
        self.loss_tokens = self.trained_tokens = self.total_tokens = self.computed_tokens = self.steps = 0
        self.pairs = self.rank_tokens = 0
        self.step_seconds: list[float] = []
        self.own_s = self.data_wait_s = self.communication_s = 0.0
        self.bad_loss = math.nan
        self.router_losses: list[float] = []
        self.started = self.step_began = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Count one step."""
        if math.isfinite(result.loss):
            self.loss_sum += result.loss * result.trained_tokens
            self.loss_tokens += result.trained_tokens
        else:
            self.bad_loss = result.loss
        if result.router_loss is not None:
            self.router_losses.append(result.router_loss)
        self.trained_tokens += result.trained_tokens
        self.total_tokens += result.total_tokens
        self.computed_tokens += result.computed_tokens
        self.pairs += result.pairs
        self.trained_tokens_so_far += result.trained_tokens
        self.total_tokens_so_far += result.total_tokens
        self.steps += 1
        self.grad_norm = result.grad_norm
        self.rank_tokens += result.rank_tokens
        self.own_s += result.arrived - self.on_its_own_since + result.forward_s
        now = self.on_its_own_since = time.perf_counter()
        self.step_seconds.append(now - self.step_began)
        self.step_began = now

    def pace(self) -> Pace:
        """Return how fast each rank was since the last row. A collective."""
        seconds = time.perf_counter() - self.started
        self.communication_s += self.collectives.take()
        mine = [self.own_s, self.data_wait_s, self.rank_tokens, self.communication_s]
        own_s, data_wait_s, tokens, self.communication_of, *self.peaks = exchange(
            [*mine, *memory_peaks(self.engine.device)], self.engine.device
        )
        return Pace(self.steps, seconds, own_s, data_wait_s, tokens)

    def row(self, step: int, epoch: float, lr: float, pace: Pace) -> dict[str, float]:
        """Return the row of metrics.jsonl and start anew.

        Args:
            step: the last step counted.
            epoch: passes over the data so far, with fraction.
            lr: learning rate that this step used.
            pace: of the ranks since the last row, of the call just before.

        Returns:
            `loss` is exact: sum of token losses / trained tokens over all ranks and all steps since the last row whose
            loss is a number.
        """
        seconds, ranks, in_samples = pace.seconds, world_size(), self.unit == SAMPLES
        row = {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": self.loss_sum / self.loss_tokens if self.loss_tokens else self.bad_loss,
            "lr": lr,
            "grad_norm": self.grad_norm,
            "tokens_per_s": self.total_tokens / seconds,
            "trained_tokens_per_s": self.trained_tokens / seconds,
            "rank_tokens_per_s": self.total_tokens / seconds / ranks,
            "step_s": seconds / self.steps,
            "step_median_s": statistics.median(self.step_seconds),
            "step_p95_s": sorted(self.step_seconds)[math.ceil(0.95 * self.steps) - 1],
            "trained_tokens": self.trained_tokens_so_far,
            "total_tokens": self.total_tokens_so_far,
            "padding_fraction": 1 - self.total_tokens / self.computed_tokens,
            "skipped_steps": self.engine.skipped_steps,
            "time": round(time.time(), 3),
            **pace.row(),
            **self.account.speed(
                Work(self.total_tokens, self.pairs, self.trained_tokens),
                Work(self.computed_tokens, self.pairs, self.trained_tokens),
                seconds * ranks,
            ),
            **self._memory(),
        }
        if self.collectives.is_on:
            row["communication_fraction"] = min(self.communication_of) / seconds
        if self.router_losses:
            row["router_loss"] = statistics.fmean(self.router_losses)
        if self.engine.fp16_enabled():
            row["loss_scale"] = float(self.engine.optimizer.loss_scale)
        self._reset()
        return {_IN_SAMPLES.get(name, name): row[name] for name in row if name not in _OF_TOKENS} if in_samples else row

    def _memory(self) -> dict[str, float]:
        host, device = (max(peaks) for peaks in self.peaks)
        row: dict[str, float] = {"host_memory_peak_bytes": int(host)}
        if device:
            row["device_memory_peak_bytes"] = int(device)
        if self.account.planned_bytes is not None:
            row["planned_memory_bytes"] = self.account.planned_bytes
        return row

    def pause(self) -> None:
        """Leave out what happens before `resume`: evaluation, saving."""
        self.communication_s += self.collectives.take()
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Count time again."""
        gone = time.perf_counter() - self.paused
        self.started += gone
        self.step_began += gone
        self.collectives.take(counts=False)
        self.on_its_own_since += gone


def memory_peaks(device: torch.device) -> tuple[float, float]:
    """Return the most bytes so far that this process had in memory, and its tensors on a GPU (0 without one)."""
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return host, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
