"""One optimizer step: its passes, what is wrong with its numbers, and which rank the others wait for.

Steps take equally long on all ranks, so each rank's own work is compared: the time from the end of a step to the next
first sum over ranks (data, host), and the forward passes; backward passes reduce gradients. Under ZeRO-3 forward passes
wait too, which hides most of a slow processor or GPU.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median_low  # of two ranks, the one that is not slow
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from toolkit.config.schema import TrainConfig
from toolkit.distributed.process_group import gather, on_rank0, sum_over_ranks
from toolkit.engine.deepspeed_patches import UpdateVeto
from toolkit.messages import Diverged, tr
from toolkit.models import stages
from toolkit.models.router_loss import Routers

if TYPE_CHECKING:
    from toolkit.train.task import Task


COMPARED_STEPS = 20
"""Steps, at least, over which ranks are compared."""
IN_A_ROW = 3
"""Comparisons one after the other in which a rank has to be slow."""
SLOWER = 1.2
"""A slow rank's own work to the median of the ranks."""
LEAST_SHARE = 0.03
"""Of a step's time by which its own work has to be longer: less is not worth a warning."""


class Stopwatch:
    """Adds up a device's time between marks without waiting: on GPUs marks are events, as the host only queues work."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The work begins, or ends."""
        if self._is_cpu:
            self._marks.append(time.perf_counter())
        else:
            event = get_accelerator().Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def seconds(self) -> float:
        """Return the sum. On a GPU only when the host has waited for the last mark."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._is_cpu:
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Some steps, rank by rank. Sums over the steps."""

    steps: int
    seconds: float
    """From the first to the last, the same for all but for the clocks."""
    own_s: Sequence[float]
    """Of each rank's own work, waiting for data included."""
    data_wait_s: Sequence[float]
    tokens: Sequence[float]
    """Of each rank, padding included."""

    def row(self) -> dict[str, float]:
        """Return what metrics.jsonl says of it, in seconds per step."""
        data_rank = _slowest(self.data_wait_s)
        row: dict[str, float] = {
            "data_wait_s": self.data_wait_s[data_rank] / self.steps,
            "data_wait_fraction": self.data_wait_s[data_rank] / self.seconds,
        }
        if len(self.own_s) > 1:
            slowest = _slowest(self.own_s)
            row |= {
                "data_wait_rank": data_rank,
                "slowest_rank": slowest,
                "slowest_rank_s": self.own_s[slowest] / self.steps,
                "median_rank_s": median_low(self.own_s) / self.steps,
                "fastest_rank_s": min(self.own_s) / self.steps,
            }
        return row

    def __add__(self, other: "RankTimes") -> "RankTimes":

        def both(name: str) -> list[float]:
            return [one + more for one, more in zip(getattr(self, name), getattr(other, name), strict=True)]

        per_rank = map(both, ("own_s", "data_wait_s", "tokens"))
        return RankTimes(self.steps + other.steps, self.seconds + other.seconds, *per_rank)


class StragglerDetector:
    """Reports, once for each, ranks that are slow for long. `hosts` are those of the ranks."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._times: RankTimes | None = None
        self._suspect, self._in_a_row = -1, 0
        self._reported: set[int] = set()

    def see(self, times: RankTimes) -> str:
        """Add the steps since the last call; return a warning for the user, "" if there is none."""
        self._times = times = self._times + times if self._times else times
        if times.steps < COMPARED_STEPS:
            return ""
        self._times = None
        waits = times.own_s[slowest := _slowest(times.own_s)] - median_low(times.own_s)
        per_token = [own_s / max(tokens, 1) for own_s, tokens in zip(times.own_s, times.tokens, strict=True)]
        # Slow per token too, as longer sequences take longer.
        is_slow = all(values[slowest] > SLOWER * median_low(values) for values in (times.own_s, per_token))
        suspect = slowest if is_slow and waits > LEAST_SHARE * times.seconds else -1
        self._in_a_row = self._in_a_row + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if suspect < 0 or self._in_a_row < IN_A_ROW or suspect in self._reported:
            return ""
        self._reported.add(suspect)
        own_s, median_s, host = times.own_s[suspect], median_low(times.own_s), self.hosts[suspect]
        if times.data_wait_s[suspect] - median_low(times.data_wait_s) > (own_s - median_s) / 2:
            where = tr(
                "Most of that it waits for its data: look at the disk or the network that {host} reads from; more "
                "data.num_workers may hide it.",
                host=host,
            )
        else:
            where = tr(
                "It is not the data: look at what else runs on {host}, and at the clocks and the temperature of its "
                "processors and GPUs (top, nvidia-smi).",
                host=host,
            )
        return tr(
            "all ranks wait for rank {rank} on {host}: its own work takes {own} s per step, {times} times "
            "that of the median rank ({median} s). {where}",
            rank=suspect,
            host=host,
            own=f"{own_s / times.steps:.3g}",
            median=f"{median_s / times.steps:.3g}",
            times=f"{own_s / median_s:.1f}",
            where=where,
        )


def _slowest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


WINDOW = 100
"""Good steps whose median a step is compared with."""
FEWEST = 10
"""Good steps that have to be known before anything is called a spike."""


class AnomalyKind(Enum):
    """What is wrong with a step."""

    loss = "loss"
    gradient = "gradient"
    loss_spike = "loss spike"
    gradient_spike = "gradient spike"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A step that went wrong and did not change the weights."""

    kind: AnomalyKind
    value: float
    """The loss in nats per token, or the norm of the gradient."""
    median: float
    """Of the good steps before; nan where none is known."""

    def text(self) -> str:
        """Return it as a sentence without its end."""
        figures = {"value": f"{self.value:.4g}", "median": f"{self.median:.4g}"}
        if self.kind is AnomalyKind.loss:
            return tr("the loss is {value}", **figures)
        if self.kind is AnomalyKind.gradient:
            return tr("the gradient is not finite")
        if self.kind is AnomalyKind.loss_spike:
            return tr("the loss is {value}, while the median of the last steps is {median}", **figures)
        return tr("the gradient norm is {value}, while the median of the last steps is {median}", **figures)


class StepGuard:
    """Judges every step of an engine. All it goes by is the same on every rank."""

    def __init__(self, engine: DeepSpeedEngine, config: TrainConfig) -> None:
        self.engine, self.config = engine, config
        self.gate = UpdateVeto(engine, self._may_update)
        self.restart((), (), 0)

    def restart(self, losses: Sequence[float], grad_norms: Sequence[float], skips_in_a_row: int) -> None:
        """Take over what a run's state says, at the beginning and after a checkpoint was loaded into the engine."""
        self.losses, self.grad_norms = deque(losses, WINDOW), deque(grad_norms, WINDOW)
        self.skips_in_a_row, self._skipped = skips_in_a_row, self.engine.skipped_steps
        self.loss = math.nan
        self.trouble: Anomaly | None = None

    def see_loss(self, loss: float) -> None:
        """Take note of a step's loss over the global batch (nats per token) before its update."""
        self.gate.begin()
        self.loss, self.trouble = loss, None
        if not math.isfinite(loss):
            self.trouble = Anomaly(AnomalyKind.loss, loss, _median(self.losses))
        elif _is_spike(loss, self.losses, self.config.max_loss_ratio):
            self.trouble = Anomaly(AnomalyKind.loss_spike, loss, _median(self.losses))

    def _may_update(self, grad_norm: float) -> bool:
        if self.trouble is None and not math.isfinite(grad_norm):
            return self.engine.fp16_enabled()  # an overflow belongs to finding the loss scale, and DeepSpeed skips it
        if self.trouble is None and _is_spike(grad_norm, self.grad_norms, self.config.max_grad_norm_ratio):
            self.trouble = Anomaly(AnomalyKind.gradient_spike, grad_norm, _median(self.grad_norms))
        return self.trouble is None

    def check(self) -> Anomaly | None:
        """Return what was wrong with the step just done; Diverged if the optimizer did not heed it."""
        skipped = self.engine.skipped_steps > self._skipped
        self._skipped = self.engine.skipped_steps
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if skipped and self.trouble is None and not self.engine.fp16_enabled():
            self.trouble = Anomaly(AnomalyKind.gradient, self.gate.grad_norm, _median(self.grad_norms))
        if self.trouble is not None and not skipped:  # a class of DeepSpeed's that the gate does not know
            raise Diverged(
                "{what}, and {optimizer} has updated the weights all the same.",
                what=self.trouble.text(),
                optimizer=type(self.engine.optimizer).__name__,
            )
        if not skipped:
            self.losses.append(self.loss)
            if math.isfinite(self.gate.grad_norm):  # ZenFlow knows it only in steps that update everything
                self.grad_norms.append(self.gate.grad_norm)
        return self.trouble

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss of the step just done is NaN or Inf."""
        return self.trouble is not None and self.trouble.kind is AnomalyKind.loss

    @property
    def is_spoilt(self) -> bool:
        """Whether the weights themselves seem to be ruined: not one sample is bad, but one step after the other."""
        return self.skips_in_a_row > 1 and self.has_bad_loss

    def check_end(self, eval_loss: float | None) -> None:
        """Raise Diverged if the run has ended with ruined weights; `eval_loss` is None without validation."""
        if self.is_spoilt and (eval_loss is None or not math.isfinite(eval_loss)):
            raise Diverged(
                "the loss of the last {count} steps was NaN or Inf: the weights are ruined. Lower optim.lr; the last "
                "checkpoints are older than these steps.",
                count=self.skips_in_a_row,
            )

    def check_patience(self, step: int) -> None:
        """Raise Diverged if too many steps in a row were skipped: DeepSpeed alone would never stop (0.19.8)."""
        if self.skips_in_a_row >= self.config.max_skipped_steps:
            raise Diverged(
                "{count} steps in a row up to step {step} were skipped because gradients overflowed, or the loss or "
                "gradient was NaN, Inf or a spike: nothing is being learned. Lower optim.lr, look at the samples that "
                "were logged, or use precision=bf16 or precision=fp32.",
                count=self.skips_in_a_row,
                step=step,
            )


def _is_spike(value: float, before: Sequence[float], ratio: float) -> bool:
    return bool(ratio) and len(before) >= FEWEST and value > ratio * _median(before)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


Samples = list[list[list[dict[str, Any]]]]
"""Of each rank, of each micro-batch, each sample as something that JSON can say."""
_NAMED = 3


def record_bad_step(
    file: Path, step: int, trouble: Anomaly, result: "StepResult", samples: Callable[[], Samples]
) -> str:
    """Write a step's samples to a file, as `record_samples` does; return a sentence. A collective."""
    head = {"step": step, "what": trouble.kind.value, "text": trouble.text()}
    found, reason = record_samples(file, head, result, samples)
    worst = found[0]
    named = [row["where"] + reason for row in found if all(row[key] == worst[key] for key in ("rank", "micro_batch"))]
    return tr(
        "step {step}: {what}; {which} rank {rank}, micro-batch {micro_batch}: {samples}",
        step=step,
        rank=worst["rank"],
        micro_batch=worst["micro_batch"],
        what=trouble.text(),
        which=tr("it comes from") if trouble.kind is AnomalyKind.loss else tr("the highest loss is that of"),
        samples=", ".join(named[:_NAMED]) + (", …" if len(named) > _NAMED else ""),
    )


def record_samples(
    file: Path, head: Mapping[str, Any], result: "StepResult", samples: Callable[[], Samples]
) -> tuple[list[dict[str, Any]], str]:
    """Write `head` (with its "step") and a step's samples, worst micro-batch first; return these, and why the file
    could not be written, "" if it was. A collective; `samples` is called on rank 0 only.
    """
    sums = zip(result.micro_losses.tolist(), result.micro_counts, strict=True)
    losses = gather([loss / count if count else 0.0 for loss, count in sums])

    def write() -> tuple[list[dict[str, Any]], str]:
        found = [
            {"step": head["step"], "rank": rank, "micro_batch": place, "loss": losses[rank][place], **sample}
            for rank, micro_batches in enumerate(samples())
            for place, micro_batch in enumerate(micro_batches)
            for sample in micro_batch
        ]
        found.sort(key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf, reverse=True)
        try:
            with file.open("w", encoding="utf-8") as handle:
                handle.write(json.dumps(head) + "\n")
                for row in found:
                    loss = row["loss"]
                    row = row | {"loss": loss if math.isfinite(loss) else str(loss)}
                    handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk is reported by what has to be saved
            file.unlink(missing_ok=True)
            return found, f" ({error.strerror})"
        return found, ""

    return on_rank0(write)


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What one step did. Loss and counts are those of the global batch, the same on every rank."""

    loss: float
    """Sum of the losses / count: nats per token, or of a task that does not count tokens per sample or pair."""
    count: int
    """What the loss is the mean of: trained tokens, samples or pairs of answers."""
    trained_tokens: int
    total_tokens: int
    """Tokens that are not padding."""
    computed_tokens: int
    """Tokens including padding."""
    pairs: int
    """Pairs of a token and one of its sample that is not behind it."""
    grad_norm: float
    """Norm of the gradient before clipping; inf where it overflowed."""
    votes: list[int]
    micro_losses: torch.Tensor
    """Sums of the losses of this rank's micro-batches, float32 [accumulation] on the device."""
    micro_counts: list[int]
    """What the losses of this rank's micro-batches are sums of."""
    rank_tokens: int
    """Tokens of this rank, including padding."""
    arrived: float
    """Seconds of `time.perf_counter` when this rank came to where ranks first wait for one another."""
    forward_s: float
    router_loss: float | None = None
    """Mean over layers and micro-batches of all ranks, without its coefficient; None where it is not counted."""
    expert_loads: torch.Tensor | None = None
    """Each expert's tokens of the global batch, float64 on the device, in the order of `Routers.collect`."""
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Further sums over the global batch, each with over how many: `Task.take_figures`."""


_Sums = tuple[torch.Tensor, float, float | None, torch.Tensor, dict[str, tuple[float, float]], list[float]]
"""This rank's micro-batch losses; the global batch's loss, the sum of the routers' losses, the experts' tokens, the
task's figures, and all other counts.
"""


def train_step(
    engine: DeepSpeedEngine,
    task: "Task",
    micro_batches: list[Any],
    world_size: int,
    guard: StepGuard,
    votes: Sequence[float] = (),
    copies: int = 1,
    parts: int = 1,
) -> StepResult:
    """Do one optimizer step whose loss is exactly sum(losses) / N over the global batch, N (of tokens: those trained)
    known before any backward.

    `micro_batches`: this rank's accumulation window on the CPU, the same on all stages of a pipeline; `votes`: answers
    on which all ranks must agree, sent with a sum; `copies`: how many ranks compute the same tokens, `parts`: how many
    have parts of the same sequences. N counts copies, as the engine averages gradients over fewer ranks; and parts
    where it counts sequences. ValueError if no token is trained; Diverged if fp16's loss scale cannot be lowered any
    more.
    """
    task.prepare_step(engine, micro_batches)
    micro_counts, sizes = [task.count(batch) for batch in micro_batches], task.sizes(micro_batches)
    arrived, forward = time.perf_counter(), Stopwatch(engine.device)
    has_stages = stages.is_pipeline(engine)
    # A pipeline's last stage alone counts tokens and losses, so that each counts once.
    is_counted = not has_stages or engine.is_last_stage()
    mine = [number if is_counted else 0 for number in (sum(micro_counts), *sizes)]
    # Not read here: the host would wait for the last step's update before it queues any work of this one.
    counts = sum_over_ranks([*mine, *map(float, votes)], engine.device)
    if has_stages:
        sums = _pipeline_passes(engine, task, micro_batches, guard, counts, copies)
    else:
        sums = _data_parallel_passes(engine, task, micro_batches, guard, counts, world_size, forward)
    micro_losses, loss, router_sum, loads, figures, (count, total, computed, pairs, trained, *heard) = sums
    return StepResult(
        loss=loss,
        count=int(count) // (copies * parts if task.counted else copies),
        trained_tokens=int(trained) // copies,
        total_tokens=int(total) // copies,
        computed_tokens=int(computed) // copies,
        pairs=int(pairs) // copies,
        grad_norm=guard.gate.grad_norm,
        votes=[int(count) for count in heard],
        micro_losses=micro_losses,
        micro_counts=micro_counts,
        rank_tokens=sizes[1],
        arrived=arrived,
        forward_s=forward.seconds(),
        router_loss=None if router_sum is None else router_sum / (world_size * len(micro_batches)),
        expert_loads=loads if len(loads) else None,
        figures=figures,
    )


def _data_parallel_passes(
    engine: DeepSpeedEngine,
    task: "Task",
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
    micro_losses, routers = torch.zeros(len(micro_batches), device=engine.device), task.routers(engine)
    skipped = engine.skipped_steps
    if routers is not None:
        routers.collect(engine.device)  # drops what a step that failed has left, as in a dry run without enough memory
    for place, batch in enumerate(micro_batches):
        forward.mark()
        if routers is not None:  # their gradient comes from no loss that the engine could scale
            loss_scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
            routers.begin(batch, engine.device, loss_scale / len(micro_batches))
        micro_sum = task.loss_sum(engine, batch)
        forward.mark()
        engine.backward(micro_sum * factor, scale_wrt_gas=False)
        micro_losses[place] = micro_sum.detach()
        if place == len(micro_batches) - 1:
            sums = _read(task, micro_losses, routers, counts, guard)
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
    if routers is not None and engine.skipped_steps == skipped:
        routers.move_biases(sums[3])
    return sums


def _pipeline_passes(
    engine: DeepSpeedEngine,
    task: "Task",
    micro_batches: list[Any],
    guard: StepGuard,
    counts: torch.Tensor,
    copies: int,
) -> _Sums:
    """Do the same through pipeline stages. PipelineEngine divides by the number of micro-batches and averages over
    pipelines (deepspeed 0.19.8), hence the factor.
    """
    factor = (engine.dp_world_size * copies * len(micro_batches) / counts[0]).float()
    micro_losses: list[torch.Tensor] = []
    read: list[_Sums] = []

    def finish(model: PreTrainedModel, batch: Any) -> torch.Tensor:
        micro_sum = task.loss_sum(model, batch)
        micro_losses.append(micro_sum.detach())
        return micro_sum * factor

    def before_update() -> None:
        micro_losses.extend([torch.zeros((), device=engine.device)] * (len(micro_batches) - len(micro_losses)))
        read.append(_read(task, torch.stack(micro_losses), None, counts, guard))

    engine.module.train_window(engine, micro_batches, finish, before_update)
    return read[0]


def _read(
    task: "Task", micro_losses: torch.Tensor, routers: Routers | None, counts: torch.Tensor, guard: StepGuard
) -> _Sums:
    """Return all ranks' sums once the guard has seen the loss: a step's one wait for the device."""
    of_routers = routers.collect(micro_losses.device) if routers else micro_losses.new_zeros(1)
    figures = task.take_figures()
    pairs = [pair.to(micro_losses) for pair in figures.values()]
    sums = sum_over_ranks(torch.cat((micro_losses.sum()[None], *pairs, of_routers)), micro_losses.device)
    known, loads = sums.tensor_split([2 + 2 * len(figures)])
    total, *others = torch.cat((known, counts)).tolist()
    of_figures, (router_sum, *others) = others[: 2 * len(figures)], others[2 * len(figures) :]
    if not others[0]:
        raise ValueError("no token of this global batch is trained")
    loss = total / others[0]
    guard.see_loss(loss)
    found = dict(zip(figures, zip(of_figures[::2], of_figures[1::2], strict=True), strict=True))
    return micro_losses, loss, router_sum if routers and routers.coefficient else None, loads, found, others
