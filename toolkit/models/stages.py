"""Access to the model of an engine, with or without pipeline stages (layouts/pipeline.py)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from toolkit.sample_types import Batch

Measured = TypeVar("Measured")


def stage_model(module: Any) -> Any:
    """Return the model that an engine's module runs: the module itself, or this rank's pipeline stage."""
    return module.__dict__["stage"] if isinstance(module, PipelineModule) else module


def unwrap_model(module: Any) -> Any:
    """Return the model that an engine's module is: the module itself, or of a pipeline a full model without weights."""
    return module.__dict__["full_model"] if isinstance(module, PipelineModule) else module


def is_pipeline(engine: Any) -> bool:
    """Whether an engine's layers are divided into the stages of a pipeline."""
    return isinstance(engine, PipelineEngine)


def measure_each(
    engine: Any, micro_batches: Iterable[Batch], measure: Callable[[Any, Batch], Measured]
) -> Iterator[tuple[Batch, Measured]]:
    """Yield each micro-batch with `measure(model, micro_batch)`; in a pipeline on the last stage only, where the model
    is its stage, else `engine`. A collective over the stages.
    """
    if not is_pipeline(engine):
        yield from ((batch, measure(engine, batch)) for batch in micro_batches)
        return
    remaining = iter(micro_batches)
    while window := list(islice(remaining, 2 * engine.num_stages)):  # enough to keep most stages busy
        yield from zip(window, engine.module.evaluate_window(engine, window, measure), strict=False)


def broadcast_from_last(engine: DeepSpeedEngine, compute: Callable[[], Any]) -> Any:
    """Return on every rank what `compute` returns on the last pipeline stage, without stages on each. A collective."""
    if not is_pipeline(engine):
        return compute()
    results = [compute() if engine.is_last_stage() else None]
    dist.broadcast_object_list(results, src=dist.get_world_size() - 1)
    return results[0]
