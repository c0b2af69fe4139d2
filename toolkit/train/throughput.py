"""How fast steps are, on each rank, and what metrics.jsonl says of them."""

import math
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low  # of two ranks, the one that is not slow

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.distributed.process_group import rank, sum_over_ranks, world_size
from toolkit.plan.flops import Work
from toolkit.train import task
from toolkit.train.baseline import Baseline
from toolkit.train.step import StepCounts, StepResult


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times and tokens of every rank, indexed by rank, summed over some steps; the same on all ranks but `seconds`."""

    steps: int
    seconds: float
    """Wall-clock time of the steps on this rank."""
    own_s: Sequence[float]
    """Seconds of each rank's own work, which waits for no other rank; waiting for data included."""
    data_wait_s: Sequence[float]
    tokens: Sequence[float]
    """Of each rank, padding included."""
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What hooks measured on each rank (`Hook.rank_figures`)."""

    def row(self) -> dict[str, float]:
        """Return figures for metrics.jsonl: waiting for data, slowest, median and fastest rank, in seconds per step."""
        waiting_rank = slowest_rank(self.data_wait_s)
        row: dict[str, float] = {
            "data_wait_s": self.data_wait_s[waiting_rank] / self.steps,
            "data_wait_fraction": self.data_wait_s[waiting_rank] / self.seconds,
        }
        if len(self.own_s) > 1:
            slowest = slowest_rank(self.own_s)
            row |= {
                "data_wait_rank": waiting_rank,
                "slowest_rank": slowest,
                "slowest_rank_s": self.own_s[slowest] / self.steps,
                "median_rank_s": median_low(self.own_s) / self.steps,
                "fastest_rank_s": min(self.own_s) / self.steps,
            }
        return row

    def __add__(self, other: "RankTimes") -> "RankTimes":
        """Return the times of both ones' steps together, without `figures`."""

        def both(name: str) -> list[float]:
            return [first + second for first, second in zip(getattr(self, name), getattr(other, name), strict=True)]

        sums = both("own_s"), both("data_wait_s"), both("tokens")
        return RankTimes(self.steps + other.steps, self.seconds + other.seconds, *sums)


def slowest_rank(values: Sequence[float]) -> int:
    """Return the rank whose value is the highest."""
    return max(range(len(values)), key=values.__getitem__)


_IN_SAMPLES = {"tokens_per_s": "samples_per_s", "rank_tokens_per_s": "rank_samples_per_s", "total_tokens": "samples"}
_OF_TOKENS = ("trained_tokens_per_s", "trained_tokens", "padding_fraction")
"""In rows of a task that counts samples in place of tokens: figures under other names, and those that are left out."""


class ThroughputMeter:
    """Sums up steps for the rows of metrics.jsonl. `trained_tokens`, `total_tokens`: of the run before its first step
    here, in `unit` (tokens or samples); `counted_in`: "", or the figure's name for what the loss is the mean of.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        baseline: Baseline,
        trained_tokens: int = 0,
        total_tokens: int = 0,
        unit: str = task.TOKENS,
        counted_in: str = "",
    ) -> None:
        self.engine, self.baseline, self.unit, self.counted_in = engine, baseline, unit, counted_in
        self.trained_tokens_so_far, self.total_tokens_so_far = trained_tokens, total_tokens
        self.paused = 0.0
        self.on_its_own_since = time.perf_counter()
        """When ranks last waited for one another."""
        self._reset()

    def _reset(self) -> None:
        """Start summing up anew, for the next row."""
        self.results: list[StepResult] = []
        self.step_seconds: list[float] = []
        self.own_s = self.data_wait_s = 0.0
        self.started = self.step_began = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Add the step that has just ended. Own work is the time up to its first collective, and its forward passes."""
        self.results.append(result)
        self.trained_tokens_so_far += result.counts.trained_tokens
        self.total_tokens_so_far += result.counts.total_tokens
        self.own_s += result.arrived - self.on_its_own_since + result.forward_s
        now = self.on_its_own_since = time.perf_counter()
        self.step_seconds.append(now - self.step_began)
        self.step_began = now

    def pace(self, figures: Mapping[str, float] | None = None) -> RankTimes:
        """Return the times of all ranks since the last row, with `figures`, those of this rank's hooks; set `peaks` for
        the row. A collective: each rank fills a column of a matrix of zeros, and the sum over ranks has them all.
        """
        seconds, device, figures = time.perf_counter() - self.started, self.engine.device, figures or {}
        rank_tokens = sum(result.rank_tokens for result in self.results)
        rank_figures = [self.own_s, self.data_wait_s, rank_tokens, *memory_peaks(device), *figures.values()]
        # float64, as sums of tokens are too large for float32.
        values = torch.zeros(len(rank_figures), world_size(), dtype=torch.float64)
        values[:, rank()] = torch.tensor(rank_figures, dtype=torch.float64)
        rows = sum_over_ranks(values.flatten(), device).view(len(rank_figures), -1).tolist()
        own_s, data_wait_s, tokens, host_bytes, device_bytes, *more = rows
        self.peaks = host_bytes, device_bytes
        return RankTimes(len(self.results), seconds, own_s, data_wait_s, tokens, dict(zip(figures, more, strict=True)))

    def row(self, step: int, epoch: float, lr: float, pace: RankTimes) -> dict[str, float]:
        """Return a row of metrics.jsonl about the steps since the last row, and reset the sums. `loss` and the task's
        figures are exact means over the trained tokens (or samples) of all ranks, without steps whose loss is not
        finite. `lr`: of the last step; `pace`: returned by the method `pace` just before.
        """
        results, seconds, ranks = self.results, pace.seconds, world_size()
        counts = StepCounts(*map(sum, zip(*(result.counts for result in results), strict=True)))
        total, computed, trained = counts.total_tokens, counts.computed_tokens, counts.trained_tokens
        finite = [result for result in results if math.isfinite(result.loss)]
        counted = sum(result.counts.losses for result in finite)
        loss_sum = sum(result.loss * result.counts.losses for result in finite)
        router_losses = [result.router_loss for result in results if result.router_loss is not None]
        host_bytes, device_bytes = self.peaks  # by rank
        row = {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": loss_sum / counted if finite else results[-1].loss,
            "lr": lr,
            "grad_norm": results[-1].grad_norm,
            "tokens_per_s": total / seconds,
            "trained_tokens_per_s": trained / seconds,
            "rank_tokens_per_s": total / seconds / ranks,
            "step_s": seconds / len(results),
            "step_median_s": statistics.median(self.step_seconds),
            "step_p95_s": sorted(self.step_seconds)[math.ceil(0.95 * len(results)) - 1],
            "trained_tokens": self.trained_tokens_so_far,
            "total_tokens": self.total_tokens_so_far,
            "padding_fraction": 1 - total / computed,
            "skipped_steps": self.engine.skipped_steps,
            "time": round(time.time(), 3),
            **pace.row(),
            **self.baseline.speed(
                Work(total, counts.pairs, trained), Work(computed, counts.pairs, trained), seconds * ranks
            ),
            "host_memory_peak_bytes": int(max(host_bytes)),
        }
        if max(device_bytes):
            row["device_memory_peak_bytes"] = int(max(device_bytes))
        if self.baseline.planned_bytes is not None:
            row["planned_memory_bytes"] = self.baseline.planned_bytes
        if self.counted_in:
            row[self.counted_in] = counted
        for name in results[-1].figures:
            count = sum(result.figures[name][1] for result in finite)
            if count:
                row[name] = sum(result.figures[name][0] for result in finite) / count
        if router_losses:
            row["router_loss"] = statistics.fmean(router_losses)
        if self.engine.fp16_enabled():
            row["loss_scale"] = float(self.engine.optimizer.loss_scale)
        self._reset()
        if self.unit == task.SAMPLES:
            return {_IN_SAMPLES.get(name, name): row[name] for name in row if name not in _OF_TOKENS}
        return row

    def pause(self) -> None:
        """Stop counting time until `resume`, for an evaluation or a save."""
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Count time again."""
        paused_s = time.perf_counter() - self.paused
        self.started += paused_s
        self.step_began += paused_s
        self.on_its_own_since += paused_s


def memory_peaks(device: torch.device) -> tuple[float, float]:
    """Return this process's peak bytes so far: of its resident memory, and of tensors on its GPU (0 without one)."""
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return host, 0 if device.type == "cpu" else get_accelerator().max_memory_allocated(device)
