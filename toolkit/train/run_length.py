"""Whether a run is long enough to learn, and which overrides make it longer. Neither torch nor deepspeed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.config.mesh import mesh_of, micro_rows, with_micro_batch
from toolkit.config.schema import Packing, RunConfig
from toolkit.engine.ds_config import warmup_steps
from toolkit.messages import tr
from toolkit.train.schedule import learning_rate

FEWEST_STEPS = 50
"""Optimizer steps below which fine-tuning changes a model little, whatever the learning rate."""
_LOOKED_AT = 1000
"""Steps whose learning rate is looked at: it is 0 at the beginning of a schedule, if anywhere before the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One pass over the training data."""

    samples: int
    """Samples."""
    sequences: int
    """Rows of the plan: samples, or what they are packed into; with `grouped` micro-batches."""
    per_step: int
    """Of these, per optimizer step."""

    @property
    def steps(self) -> int:
        """Return the optimizer steps."""
        return math.ceil(self.sequences / self.per_step)


def warnings(cfg: RunConfig, epoch: Epoch | None, total_steps: int, world_size: int) -> list[str]:
    """Return what is to be said about the length of a run and its learning rate before it starts.

    Args:
        cfg: checked config.
        epoch: a pass over the data; None where it is not known.
        total_steps: optimizer steps of the run; 0 where they are not known.
        world_size: number of ranks.
    """
    lines = []
    if epoch and 0 < total_steps < FEWEST_STEPS and not cfg.train.max_steps:
        lines.append(_too_short(cfg, epoch, total_steps, world_size))
    elif 0 < total_steps < FEWEST_STEPS:
        lines.append(
            tr("train.max_steps = {steps}: enough to try the recipe out, too few to learn.", steps=total_steps)
        )
    if count := _steps_without_rate(cfg, total_steps):
        lines.append(
            tr(
                "WARNING: schedule.warmup_min_ratio = {ratio} lets the learning rate begin at 0 (steps without a "
                "change: {count}). Use schedule.warmup_min_ratio=-1, which begins at 1 / steps of the warm-up.",
                ratio=cfg.schedule.warmup_min_ratio,
                count=count,
            )
        )
    return lines


def _steps_without_rate(cfg: RunConfig, total_steps: int) -> int:
    """Return how many steps before the last have a learning rate of 0."""
    total = total_steps or _LOOKED_AT
    warmup = warmup_steps(cfg, total)
    looked_at = range(min(total - 1, _LOOKED_AT))
    return sum(learning_rate(cfg.schedule, 1.0, done, total, warmup) == 0 for done in looked_at)


def _too_short(cfg: RunConfig, epoch: Epoch, total_steps: int, world_size: int) -> str:
    longer = [
        tr("{override} ({steps} steps)", override=word, steps=steps) for word, steps in _longer(cfg, epoch, world_size)
    ]
    samples, sequences = f"{epoch.samples:,}", f"{epoch.sequences:,}"
    data = (
        tr("{samples} samples", samples=samples)
        if epoch.samples == epoch.sequences
        else tr("{samples} samples in {sequences} sequences", samples=samples, sequences=sequences)
    )
    return tr(
        "WARNING: too few optimizer steps to learn much: {steps} ({data}, {per_step} per step, "
        "train.epochs={epochs}); {fewest} or more are usual. Each of these makes the run longer: {ways}",
        steps=total_steps,
        data=data,
        per_step=epoch.per_step,
        epochs=cfg.train.epochs,
        fewest=FEWEST_STEPS,
        ways="; ".join(longer),
    )


def _longer(cfg: RunConfig, epoch: Epoch, world_size: int) -> Iterator[tuple[str, int]]:
    """Yield overrides, and the steps of the run with them."""
    epochs, size = cfg.train.epochs, cfg.batch.global_size
    if cfg.data.packing is not Packing.none and epoch.samples > epoch.sequences:
        unpacked = math.ceil(epoch.samples / size)
        enough = max(epochs, math.ceil(FEWEST_STEPS / unpacked))
        more = f" train.epochs={enough}" if enough > epochs else ""
        yield f"data.packing=none{more}", unpacked * enough
    unit = micro_rows(with_micro_batch(cfg)) * mesh_of(cfg, world_size).data_ranks
    scale = epoch.per_step / size  # rows of a grouped plan are micro-batches
    for smaller in range((size - 1) // unit * unit, 0, -unit):
        steps = math.ceil(epoch.sequences / max(1.0, smaller * scale)) * epochs
        if steps >= FEWEST_STEPS:
            yield f"batch.global_size={smaller}", steps
            break
    enough = math.ceil(FEWEST_STEPS / epoch.steps)
    yield f"train.epochs={enough}", epoch.steps * enough
