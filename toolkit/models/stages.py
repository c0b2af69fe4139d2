"""Access to the model of an engine, with or without pipeline stages (layouts/pipeline.py)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from toolkit.models import loss, probe
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


def forward_logits(engine: PipelineEngine, batch: Batch, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run the same rows on every rank; return `pick` of the logits `[B, S, V]`, or of a classifier's scores at each
    token `[B, S, labels]`, float32 on the CPU. A collective.
    """
    inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    of_tokens = loss.logits_of
    if probe.is_classifier(unwrap_model(engine.module)):
        from toolkit.models.classifier import token_scores as of_tokens
    with probe.evaluating(engine):
        picked = engine.module.evaluate_window(
            engine, [inputs], lambda model, rows: pick(of_tokens(model, rows)).float().cpu()
        )
    logits: torch.Tensor = broadcast_from_last(engine, lambda: picked[0])
    return logits


def capture_probe(engine: DeepSpeedEngine, ids: torch.Tensor) -> probe.Probe:
    """Return the probe of an engine's model for a few ids [R, L]. A collective over all ranks that hold parts of it."""
    if not is_pipeline(engine):
        return probe.capture(engine.module, ids, engine.device)
    # Of a classifier the scores of every prefix, as in `probe.capture`.
    has_head = probe.is_classifier(unwrap_model(engine.module))

    def pick(token_logits: torch.Tensor) -> torch.Tensor:
        return token_logits.flatten(1) if has_head else token_logits[:, -1]

    logits = forward_logits(engine, {"input_ids": ids}, pick)
    return probe.Probe(ids, logits, str(stage_model(engine.module).dtype).removeprefix("torch."))


def broadcast_from_last(engine: DeepSpeedEngine, compute: Callable[[], Any]) -> Any:
    """Call `compute` on the last pipeline stage and return its result on every rank; without stages call it on each
    rank. A collective.
    """
    if not is_pipeline(engine):
        return compute()
    results = [compute() if engine.is_last_stage() else None]
    dist.broadcast_object_list(results, src=dist.get_world_size() - 1)
    return results[0]
