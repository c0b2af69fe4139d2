"""The step of a model of one's own: the sum of its samples' losses, exactly over the global batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.distributed.process_group import world_size
from toolkit.errors import DataError
from toolkit.messages import tr
from toolkit.own.data import MicroBatch
from toolkit.own.task import Loss
from toolkit.train.step import SAMPLES, Objective


def objective_of(loss: Loss) -> Objective:
    """Return what a step sums up: sum(losses of samples) / N, whatever micro-batch, accumulation and rank count."""

    def loss_sum(engine: DeepSpeedEngine, micro: MicroBatch) -> torch.Tensor:
        share_buffers(engine.module)
        with _statistics_kept(engine.module, not micro.size):
            total = losses_of(loss, engine, micro).float().sum()
        return total if micro.size else total * 0

    def sizes(micro_batches: list[MicroBatch]) -> list[int]:
        return [sum(micro.size for micro in micro_batches)] * 2 + [0]

    return Objective(
        unit=SAMPLES,
        count=lambda micro: micro.size,
        sizes=sizes,
        loss_sum=loss_sum,
        shape=lambda micro: (micro.size,),
    )


def losses_of(loss: Loss, engine: DeepSpeedEngine, micro: MicroBatch) -> torch.Tensor:
    """Return the losses of a micro-batch's samples, [n].

    Raises:
        DataError: that is not what the program's function returns.
    """
    found = loss(engine, on_device(micro.batch, engine.device))
    wanted = max(micro.size, 1)
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if shape != (wanted,):
        raise DataError(
            tr(
                "loss= must return one loss per sample, a tensor [{count}] for this batch, and returned {shape}. For "
                "example cross_entropy(logits, labels, reduction='none'); of several losses per sample their mean: "
                "losses.flatten(1).mean(1).",
                count=wanted,
                shape=shape,
            )
        )
    return found


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device; from page-locked memory the host does not wait for it."""
    return _with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with all its tensors changed, in whatever they lie."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _with_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_with_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_with_tensors(value, change) for value in batch)
    return batch


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, such as the statistics of batch norm. A collective.

    As DistributedDataParallel does before each forward pass. Checkpoints and export hold rank 0's, so a run that goes
    on has what the run had.
    """
    if world_size() == 1:
        return
    for dtype in sorted({buffer.dtype for buffer in model.buffers()}, key=str):
        buffers = [buffer for buffer in model.buffers() if buffer.dtype is dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer, value in zip(buffers, flat.split([one.numel() for one in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))


@contextmanager
def _statistics_kept(model: nn.Module, is_filler: bool) -> Iterator[None]:
    """Let batch norm learn nothing from a sample that does not count."""
    # SyncBatchNorm talks to the other ranks, which are in training.
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm) and part.training]
    norms = [part for part in norms if is_filler and not isinstance(part, nn.SyncBatchNorm)]
    for part in norms:
        part.eval()
    try:
        yield
    finally:
        for part in norms:
            part.train()


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model whose weights are in half precision take what a data set gives: floating-point inputs are cast,
    those in dicts and lists too.

    What only the loss sees, such as the numbers of a regression, keeps its precision.
    """

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _with_tensors(inputs, cast), _with_tensors(named, cast)

    model.register_forward_pre_hook(hook, with_kwargs=True)
