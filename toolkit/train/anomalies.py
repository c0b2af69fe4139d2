"""Steps whose numbers go wrong: noticed before the weights change, alike on all ranks, and recorded with samples."""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.config.schema import TrainConfig
from toolkit.disk import unused_path
from toolkit.distributed.process_group import gather, on_rank0
from toolkit.engine.deepspeed_patches import UpdateVeto
from toolkit.messages import Diverged, tr

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
    folder: Path,
    step: int,
    trouble: Anomaly,
    micro_losses: torch.Tensor,
    micro_tokens: Sequence[int],
    samples: Callable[[], Samples],
) -> tuple[str, Path]:
    """Write a step's samples to logs/bad-step-N.jsonl, worst micro-batch first; return a sentence and the file. A
    collective. `micro_losses`, sums, and `micro_tokens` [accumulation] are this rank's; `samples` is called on rank
    0 only.
    """
    sums = zip(micro_losses.tolist(), micro_tokens, strict=True)
    losses = gather([loss / count if count else 0.0 for loss, count in sums])
    file = unused_path(folder / "logs" / f"bad-step-{step}.jsonl")

    def write() -> str:
        found = [
            (losses[rank][place], {"step": step, "rank": rank, "micro_batch": place}, sample)
            for rank, micro_batches in enumerate(samples())
            for place, micro_batch in enumerate(micro_batches)
            for sample in micro_batch
        ]
        found.sort(key=lambda one: one[0] if math.isfinite(one[0]) else math.inf, reverse=True)
        reason = ""
        try:
            with file.open("w", encoding="utf-8") as handle:
                handle.write(json.dumps({"step": step, "what": trouble.kind.value, "text": trouble.text()}) + "\n")
                for loss, place, sample in found:
                    row = {**place, "loss": loss if math.isfinite(loss) else str(loss), **sample}
                    handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk is reported by what has to be saved
            file.unlink(missing_ok=True)
            reason = f" ({error.strerror})"
        first = found[0][1]
        worst = [sample["where"] + reason for _, place, sample in found if place == first]
        return tr(
            "step {step}: {what}; {which} rank {rank}, micro-batch {micro_batch}: {samples}",
            **first,
            what=trouble.text(),
            which=tr("it comes from") if trouble.kind is AnomalyKind.loss else tr("the highest loss is that of"),
            samples=", ".join(worst[:_NAMED]) + (", …" if len(worst) > _NAMED else ""),
        )

    return on_rank0(write), file
