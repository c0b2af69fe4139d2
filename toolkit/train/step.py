"""One optimizer step: its passes, what ranks report with its first sum, what is wrong with its numbers."""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel

from toolkit.config.mesh import Mesh
from toolkit.config.schema import TrainConfig
from toolkit.distributed.process_group import sum_over_ranks
from toolkit.engine.deepspeed_patches import UpdateVeto
from toolkit.messages import Diverged, tr
from toolkit.models import stages

if TYPE_CHECKING:
    from toolkit.models.router_loss import Routers
    from toolkit.train.task import Task


class Stopwatch:
    """Adds up a device's time between marks without waiting: on GPUs marks are events, as the host only queues work."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the time at which a piece of work begins or, at every second call, ends."""
        if self._is_cpu:
            self._marks.append(time.perf_counter())
        else:
            event = get_accelerator().Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def seconds(self) -> float:
        """Return the summed seconds of work. On a GPU only after the host has synchronized with the last mark."""
        intervals = zip(self._marks[::2], self._marks[1::2], strict=True)  # begin, end, begin, end, …
        if self._is_cpu:
            return sum(end - begin for begin, end in intervals)
        return sum(begin.elapsed_time(end) for begin, end in intervals) / 1000


WINDOW = 100
"""Good steps whose median a step is compared with."""
FEWEST = 10
"""Good steps that there must have been before anything is called a spike."""


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
    """Of the good steps before; nan if there were none."""

    def text(self) -> str:
        """Return what is wrong as a clause for messages, without a full stop."""
        figures = {"value": f"{self.value:.4g}", "median": f"{self.median:.4g}"}
        if self.kind is AnomalyKind.loss:
            return tr("the loss is {value}", **figures)
        if self.kind is AnomalyKind.gradient:
            return tr("the gradient is not finite")
        if self.kind is AnomalyKind.loss_spike:
            return tr("the loss is {value}, while the median of the last steps is {median}", **figures)
        return tr("the gradient norm is {value}, while the median of the last steps is {median}", **figures)


class StepGuard:
    """Judges every step of an engine and vetoes updates by bad ones; all ranks see the same numbers and so agree."""

    def __init__(self, engine: DeepSpeedEngine, config: TrainConfig) -> None:
        self.engine, self.config = engine, config
        self.gate = UpdateVeto(engine, self._may_update)
        self.restart((), (), 0)

    def restart(self, losses: Sequence[float], grad_norms: Sequence[float], skips_in_a_row: int) -> None:
        """Start from the losses, gradient norms and skipped steps of a run's state: at its start and after a rewind."""
        self.losses, self.grad_norms = deque(losses, WINDOW), deque(grad_norms, WINDOW)
        self.skips_in_a_row, self._skipped = skips_in_a_row, self.engine.skipped_steps
        self.loss = math.nan
        self.anomaly: Anomaly | None = None

    def judge_loss(self, loss: float) -> None:
        """Judge a step's loss over the global batch (nats per token), before its update."""
        self.gate.begin()
        self.loss, self.anomaly = loss, None
        if not math.isfinite(loss):
            self.anomaly = Anomaly(AnomalyKind.loss, loss, _median(self.losses))
        elif _is_spike(loss, self.losses, self.config.max_loss_ratio):
            self.anomaly = Anomaly(AnomalyKind.loss_spike, loss, _median(self.losses))

    def _may_update(self, grad_norm: float) -> bool:
        """Return whether an update with this gradient norm may happen; see `UpdateVeto`."""
        if self.anomaly is None and not math.isfinite(grad_norm):
            return self.engine.fp16_enabled()  # an overflow belongs to finding the loss scale, and DeepSpeed skips it
        if self.anomaly is None and _is_spike(grad_norm, self.grad_norms, self.config.max_grad_norm_ratio):
            self.anomaly = Anomaly(AnomalyKind.gradient_spike, grad_norm, _median(self.grad_norms))
        return self.anomaly is None

    def check(self) -> Anomaly | None:
        """Return what was wrong with the step just done, None if nothing. Record loss and gradient norm of a step that
        updated the weights, for later ones to be compared with; Diverged if it was a bad one.
        """
        skipped = self.engine.skipped_steps > self._skipped
        self._skipped = self.engine.skipped_steps
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        # DeepSpeed itself skips an update by a gradient that is not finite; in fp16 that only lowers the loss scale.
        if skipped and self.anomaly is None and not self.engine.fp16_enabled():
            self.anomaly = Anomaly(AnomalyKind.gradient, self.gate.grad_norm, _median(self.grad_norms))
        if self.anomaly is not None and not skipped:  # by an optimizer class of DeepSpeed's that the gate does not know
            raise Diverged(
                "{what}, and {optimizer} has updated the weights all the same.",
                what=self.anomaly.text(),
                optimizer=type(self.engine.optimizer).__name__,
            )
        if not skipped:
            self.losses.append(self.loss)
            if math.isfinite(self.gate.grad_norm):  # ZenFlow computes it only in steps that update all columns
                self.grad_norms.append(self.gate.grad_norm)
        return self.anomaly

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss of the step just done is NaN or Inf."""
        return self.anomaly is not None and self.anomaly.kind is AnomalyKind.loss

    @property
    def has_ruined_weights(self) -> bool:
        """Whether the weights seem to be ruined: the loss was bad, and the step before was skipped, too."""
        return self.skips_in_a_row > 1 and self.has_bad_loss

    def check_end(self, eval_loss: float | None) -> None:
        """Raise Diverged if the run has ended with ruined weights; `eval_loss` is None without validation."""
        if self.has_ruined_weights and (eval_loss is None or not math.isfinite(eval_loss)):
            raise Diverged(
                "the loss of the last {count} steps was NaN or Inf: the weights are ruined. Lower optim.lr; the last "
                "checkpoints are older than these steps.",
                count=self.skips_in_a_row,
            )

    def check_patience(self, step: int) -> None:
        """Raise Diverged if too many steps in a row were skipped: DeepSpeed alone would never stop (0.19.8)."""
        if self.skips_in_a_row >= self.config.max_skipped_steps:
            raise Diverged(
                "{count} steps in a row up to step {step} were skipped (gradient overflow; NaN, Inf or a spike of loss "
                "or gradient): nothing is being learned. Lower optim.lr, look at the samples that were logged, or use "
                "precision=bf16 or precision=fp32.",
                count=self.skips_in_a_row,
                step=step,
            )


def _is_spike(value: float, before: Sequence[float], ratio: float) -> bool:
    """Whether a value is more than `ratio` (0: never) times the median of those of good steps before."""
    return bool(ratio) and len(before) >= FEWEST and value > ratio * _median(before)


def _median(values: Sequence[float]) -> float:
    """Return the median of some values, NaN if there are none."""
    return statistics.median(values) if values else math.nan


Samples = list[list[list[dict[str, Any]]]]
"""Samples of a step as JSON objects: by rank, micro-batch, position in it."""


@dataclass(slots=True)
class StepVote:
    """What a rank reports with the first sum of a step; afterwards the sum, the same on every rank."""

    stops: int = 0
    """1 where the rank was told to stop: by a signal, or by the file `stop`."""
    save_verified: int = 0
    """1 where the rank has written and verified its part of the checkpoint that is under way."""
    lost_run_dir: int = 0
    """1 where the rank no longer finds the run directory."""
    save_due: int = 0
    """1 on rank 0 where `checkpoint.minutes` have passed."""
    last_step: int = 0
    """On rank 0 the step that the run shall end with; 0 leaves it as it is."""

    def pack(self) -> list[float]:
        """Return the fields as numbers that can be summed over ranks."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def unpack(cls, sums: Sequence[float]) -> "StepVote":
        """Return the vote that `pack` made numbers of."""
        return cls(*map(int, sums))


class TokenCounts(NamedTuple):
    """Tokens of a rank's micro-batches of a step; of a task without tokens, its samples."""

    total_tokens: int
    """Tokens that are not padding."""
    computed_tokens: int
    """Tokens including padding."""
    pairs: int
    """Pairs of a token and one that it attends to (in its sample, not after it), for the FLOPs of attention."""
    trained_tokens: int


class StepCounts(NamedTuple):
    """Counts of a step: of a rank's micro-batches, or summed over all ranks, in the order in which they are sent."""

    losses: int
    """N, of which the step's loss is the mean: trained tokens, samples or pairs of answers; the rest: `TokenCounts`."""
    total_tokens: int
    computed_tokens: int
    pairs: int
    trained_tokens: int


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What one step did. Loss and counts are those of the global batch, the same on every rank."""

    loss: float
    """Sum of the losses / `counts.losses`: nats per token, or of a task that does not count tokens per sample or pair.
    """
    counts: StepCounts
    vote: StepVote
    """The sum over all ranks."""
    micro_losses: torch.Tensor
    """Sums of the losses of this rank's micro-batches, float32 [accumulation] on the device."""
    router_loss: float | None = None
    """Mean over layers and micro-batches of all ranks, without its coefficient; None where it is not counted."""
    expert_loads: torch.Tensor | None = None
    """Each expert's tokens of the global batch, float64 on the device, in the order of `Routers.collect`."""
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name of a further metric -> sum and count over the global batch: `Task.take_figures`."""
    # Set by `train_step`, after the update:
    grad_norm: float = math.nan
    """Norm of the gradient before clipping; inf where it overflowed."""
    micro_counts: list[int] = field(default_factory=list)
    """What the losses of this rank's micro-batches are sums of."""
    rank_tokens: int = 0
    """Tokens of this rank, including padding."""
    arrived: float = 0.0
    """`time.perf_counter()` when this rank reached the step's first collective."""
    forward_s: float = 0.0


def train_step(
    engine: DeepSpeedEngine,
    task: "Task",
    micro_batches: list[Any],
    mesh: Mesh,
    guard: StepGuard,
    vote: StepVote | None = None,
) -> StepResult:
    """Do one optimizer step, whose loss is exactly sum(losses) / N over the global batch: N counts trained tokens (or
    what else the task's losses are of) and is summed over ranks before any backward pass. A collective.

    Args:
        task: counts tokens, and computes the losses (`Task.loss_sum`).
        micro_batches: this rank's accumulation window, of `Task.batches`, on the CPU; the same on all stages of a
            pipeline.
        mesh: this rank's position. N includes the copies of a token on ranks that split matrices, as the engine
            averages gradients over fewer ranks, and where it counts sequences those on ranks that split them; the
            result includes neither.
        guard: judges loss and gradient, and vetoes the update if they are bad.
        vote: this rank's, sent with the counts.

    Raises:
        ValueError: no token is trained.
        Diverged: fp16's loss scale cannot be lowered any more.
    """
    task.prepare_step(engine, micro_batches)
    micro_counts, tokens = list(map(task.count_losses, micro_batches)), task.token_counts(micro_batches)
    arrived, forward = time.perf_counter(), Stopwatch(engine.device)
    has_stages = stages.is_pipeline(engine)
    # A pipeline's last stage alone counts tokens and losses, so that each counts once.
    is_counted = not has_stages or engine.is_last_stage()
    rank_counts = StepCounts(sum(micro_counts), *tokens) if is_counted else StepCounts(0, 0, 0, 0, 0)
    # Not read here: the host would wait for the last step's update before it queues any work of this one.
    counts = sum_over_ranks([*rank_counts, *(vote or StepVote()).pack()], engine.device)
    if has_stages:
        result = _pipeline_passes(engine, task, micro_batches, guard, counts, mesh.copies)
    else:
        result = _data_parallel_passes(engine, task, micro_batches, guard, counts, mesh.world_size, forward)
    result.counts = StepCounts(*(count // mesh.copies for count in result.counts))
    if task.counted:  # samples or pairs: each rank that has a part of a sequence has counted it
        result.counts = result.counts._replace(losses=result.counts.losses // mesh.sequence)
    if result.router_loss is not None:
        result.router_loss /= mesh.world_size * len(micro_batches)
    result.grad_norm, result.micro_counts = guard.gate.grad_norm, micro_counts
    result.rank_tokens = tokens.computed_tokens
    result.arrived, result.forward_s = arrived, forward.seconds()
    return result


def _data_parallel_passes(
    engine: DeepSpeedEngine,
    task: "Task",
    micro_batches: list[Any],
    guard: StepGuard,
    counts: torch.Tensor,
    world_size: int,
    forward: Stopwatch,
) -> StepResult:
    """Run each micro-batch forward and backward, then update; return all ranks' sums. `counts`: see `_sum_and_judge`;
    `forward`: gets the time of forward passes. The engine averages gradients over ranks, hence `world_size` in the
    factor; with `scale_wrt_gas=False` it divides by nothing else (deepspeed 0.19.8, backward).
    """
    factor = (world_size / counts[0]).float()
    micro_losses, routers = torch.zeros(len(micro_batches), device=engine.device), task.routers(engine)
    skipped = engine.skipped_steps
    if routers is not None:
        routers.collect(engine.device)  # drops what a step that failed has left, as in a dry run without enough memory
    for number, batch in enumerate(micro_batches):
        forward.mark()
        if routers is not None:  # their gradient comes from no loss that the engine could scale
            loss_scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
            routers.begin(batch, engine.device, loss_scale / len(micro_batches))
        micro_sum = task.loss_sum(engine, batch)
        forward.mark()
        engine.backward(micro_sum * factor, scale_wrt_gas=False)
        micro_losses[number] = micro_sum.detach()
        if number == len(micro_batches) - 1:
            result = _sum_and_judge(task, micro_losses, routers, counts, guard)
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
    if routers is not None and engine.skipped_steps == skipped and result.expert_loads is not None:
        routers.move_biases(result.expert_loads)
    return result


def _pipeline_passes(
    engine: DeepSpeedEngine, task: "Task", micro_batches: list[Any], guard: StepGuard, counts: torch.Tensor, copies: int
) -> StepResult:
    """Run the forward and backward passes of a step through pipeline stages; return all ranks' sums. PipelineEngine
    divides by the number of micro-batches and averages over pipelines (deepspeed 0.19.8), hence the factor. `counts`:
    see `_sum_and_judge`; `copies`: ranks that split matrices, so that each counts the same tokens.
    """
    factor = (engine.dp_world_size * copies * len(micro_batches) / counts[0]).float()
    micro_losses: list[torch.Tensor] = []
    results: list[StepResult] = []

    def scaled_loss(model: PreTrainedModel, batch: Any) -> torch.Tensor:
        micro_sum = task.loss_sum(model, batch)
        micro_losses.append(micro_sum.detach())
        return micro_sum * factor

    def before_update() -> None:  # on stages but the last no loss was computed
        micro_losses.extend([torch.zeros((), device=engine.device)] * (len(micro_batches) - len(micro_losses)))
        results.append(_sum_and_judge(task, torch.stack(micro_losses), None, counts, guard))

    engine.module.train_window(engine, micro_batches, scaled_loss, before_update)
    return results[0]


def _sum_and_judge(
    task: "Task", micro_losses: torch.Tensor, routers: "Routers | None", counts: torch.Tensor, guard: StepGuard
) -> StepResult:
    """Sum losses, figures and expert loads over all ranks, let the guard judge the loss, and return the step as known
    before its update, `router_loss` as a sum. `counts`: fields of `StepCounts`, then of `StepVote`, summed already.
    Here the host waits for the device, once per step.
    """
    router_sums = routers.collect(micro_losses.device) if routers else micro_losses.new_zeros(1)  # loss, then loads
    figures = task.take_figures()
    own_figures = [sum_and_count.to(micro_losses) for sum_and_count in figures.values()]
    # The loss; sum and count of each figure in turn; the routers' loss; each expert's load, which stays on the device.
    sums = sum_over_ranks(torch.cat((micro_losses.sum()[None], *own_figures, router_sums)), micro_losses.device)
    num_counts, num_figures = len(StepCounts._fields), 2 * len(figures)
    scalars, expert_loads = sums.tensor_split([2 + num_figures])
    loss_sum, *numbers = torch.cat((scalars, counts)).tolist()
    figure_numbers, router_sum, count_numbers = numbers[:num_figures], numbers[num_figures], numbers[num_figures + 1 :]
    figure_pairs = zip(figure_numbers[::2], figure_numbers[1::2], strict=True)  # (sum, count) of each
    step_counts = StepCounts(*map(int, count_numbers[:num_counts]))
    if not step_counts.losses:
        raise ValueError("no token of this global batch is trained")
    loss = loss_sum / step_counts.losses
    guard.judge_loss(loss)
    return StepResult(
        loss=loss,
        counts=step_counts,
        vote=StepVote.unpack(count_numbers[num_counts:]),
        micro_losses=micro_losses,
        router_loss=router_sum if routers and routers.coefficient else None,
        expert_loads=expert_loads if len(expert_loads) else None,
        figures=dict(zip(figures, figure_pairs, strict=True)),
    )
