"""Passes over a pipeline: every rank of it calls these with the same micro-batches."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep
from transformers import PreTrainedModel

from toolkit.models import probe
from toolkit.models.loss import logits_of
from toolkit.models.stages import stage_model

Batch = dict[str, torch.Tensor]
Finish = Callable[[PreTrainedModel, Batch], torch.Tensor]


def is_pipeline(engine: Any) -> bool:
    """Whether an engine's layers are divided into the stages of a pipeline."""
    return isinstance(engine, PipelineEngine)


def train_window(
    engine: PipelineEngine, micro_batches: Sequence[Batch], finish: Finish, before_update: Callable[[], None]
) -> None:
    """Do one optimizer step, one micro-batch forward and one back in turn (1F1B). A collective.

    Args:
        engine: the engine, which divides gradients by its micro-batches and averages them over pipelines.
        micro_batches: as many as the engine accumulates, `[B, S]`.
        finish: on the last stage makes a scalar of the model and a micro-batch with `inputs_embeds`.
        before_update: called on every rank when all gradients are there.
    """

    def update(self: PipelineEngine, **options: Any) -> None:
        before_update()
        PipelineEngine._exec_optimizer_step(self, **options)

    engine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, OptimizerStep: update}
    _give(engine, micro_batches, finish)
    engine.train_batch(_pairs(micro_batches))


@torch.no_grad()
def evaluate_window(engine: PipelineEngine, micro_batches: Sequence[Batch], finish: Finish) -> list[torch.Tensor]:
    """Run micro-batches forward in evaluation mode. A collective over all ranks, with as many on each.

    Args:
        engine: the engine; left in evaluation mode.
        micro_batches: any number.
        finish: on the last stage makes something of the model and a micro-batch with `inputs_embeds`.

    Returns:
        What `finish` returned for each; [] on other stages.
    """
    found: list[torch.Tensor] = []

    def keep(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        found.append(finish(model, batch))
        return torch.zeros((), device=engine.device)

    engine.total_loss = None  # a sum that it goes on with otherwise
    _give(engine, micro_batches, keep)
    engine.eval_batch(_pairs(micro_batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches))
    return found


def forward_logits(engine: PipelineEngine, batch: Batch, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run some rows forward, the same on every rank, and return what is picked of their logits. A collective.

    Args:
        engine: the engine; left in its mode.
        batch: `input_ids` `[B, S]`, and what else `toolkit.models.loss.hidden_states` takes.
        pick: gets the logits `[B, S, V]`; what it returns travels to all ranks, so it should be small.

    Returns:
        float32 on the CPU.
    """
    given = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    was_training = engine.module.training
    picked = evaluate_window(engine, [given], lambda model, one: pick(logits_of(model, one)).float().cpu())
    engine.module.train(was_training)
    found: list[Any] = [*picked, None][:1]
    dist.broadcast_object_list(found, src=dist.get_world_size() - 1)
    logits: torch.Tensor = found[0]
    return logits


def take_probe(engine: DeepSpeedEngine, ids: torch.Tensor) -> probe.Probe:
    """Return what an engine's model makes of a few ids. A collective over all ranks that hold parts of it."""
    if not is_pipeline(engine):
        return probe.take(engine.module, ids, engine.device)
    logits = forward_logits(engine, {"input_ids": ids}, lambda found: found[:, -1])
    return probe.Probe(ids, logits, str(stage_model(engine.module).dtype).removeprefix("torch."))


def value_of_last_stage(engine: DeepSpeedEngine, ask: Callable[[], Any]) -> Any:
    """Return on every rank what is known on the last stage; without stages simply that. A collective."""
    if not is_pipeline(engine):
        return ask()
    found = [ask() if engine.is_last_stage() else None]
    dist.broadcast_object_list(found, src=dist.get_world_size() - 1)
    return found[0]


def _give(engine: PipelineEngine, micro_batches: Sequence[Batch], finish: Finish) -> None:
    engine.module.batches, engine.module.finish = deque(micro_batches), finish


def _pairs(micro_batches: Sequence[Batch]) -> Any:
    """Yield input and labels, which the first and the last stage want to see; the module has the batches itself."""
    return iter([(batch["input_ids"], batch["input_ids"]) for batch in micro_batches])
