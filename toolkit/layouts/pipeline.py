"""A model cut into the stages of a pipeline: each rank holds some of its layers and hands hidden states on.

The sequence of layers that DeepSpeed's PipelineModule wants says who holds what. A stage computes with the model's own
forward function, in which other stages' layers pass their input on, so masks and positions stay the model's. Only
hidden states [B, S, H] travel: the ranks of a pipeline read the same rows.
"""

import io
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import OptimizerStep
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config import schema, tensor_split
from toolkit.distributed import process_group
from toolkit.messages import ModelError
from toolkit.models import adapters, classifier, fine_tuning, head_outputs, loss, probe, structure
from toolkit.models.record import ModelRecord, record_of, set_record
from toolkit.models.stages import broadcast_from_last, stage_model, unwrap_model
from toolkit.plan import division
from toolkit.sample_types import Batch

Finish = Callable[[PreTrainedModel, Batch], torch.Tensor]
Found = TypeVar("Found")


def part_names(model: PreTrainedModel, num_stages: int) -> list[str]:
    """Return the names of the modules that stages of a (perhaps empty) model are made of, in the order of computing."""
    kind, embedding = model.config.model_type, model.get_input_embeddings()
    if kind not in tensor_split.FAMILIES:
        raise ModelError(
            "parallel.pipeline = {stages} is not supported for model type {kind}, which is not known to be a plain "
            "sequence of layers. Known: {known}. Use zero=stage3 or parallel=tensor.",
            stages=num_stages,
            kind=kind,
            known=", ".join(tensor_split.FAMILIES),
        )
    names = {part: name for name, part in model.named_modules()}
    # What else the base model holds with parameters: the norm after the last layer.
    norms = [
        names[part]
        for part in model.base_model.children()
        if part is not embedding and not isinstance(part, nn.ModuleList) and list(part.parameters())
    ]
    layers = [name for part, name in names.items() if isinstance(part, GradientCheckpointingLayer)]
    head = model.score if probe.is_classifier(model) else model.get_output_embeddings()
    return [names[embedding], *layers, *norms, names[head]]


def stage_bounds(model: PreTrainedModel, num_stages: int, num_scores: int = 0) -> list[int]:
    """Return the indices in `part_names` at which stages begin, and the end, so that stages have about equally many
    parameters, trained or not. `model`: without an adapter, perhaps empty. `num_scores`: of the head that will replace
    the output layer, 0 if none does.
    """
    parts = [model.get_submodule(name) for name in part_names(model, num_stages)]
    layers = sum(isinstance(part, GradientCheckpointingLayer) for part in parts)
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    if num_scores:
        sizes[-1] = num_scores * model.config.hidden_size
    return division.stage_bounds(sizes, layers, num_stages)


def stage_parameters(
    model: PreTrainedModel, num_stages: int, stage: int, tuning: schema.TuningConfig | None = None, num_scores: int = 0
) -> dict[str, slice]:
    """Return by name slice(None), for all rows, of the parameters that a stage of an empty model holds; of tied ones
    the first name. ModelError where freezing by `tuning` would leave a stage nothing to train. `num_scores`: see
    `stage_bounds`; then no stage holds the output layer, which will be replaced.
    """
    names, bounds = part_names(model, num_stages), stage_bounds(model, num_stages, num_scores)
    if num_scores and not probe.is_classifier(model):
        bounds[-1] -= 1  # the output layer is the last part
    elif tuning and tuning.method is schema.TuningMethod.freeze:
        fine_tuning.freeze(model, tuning)
        check_trained(model, bounds)
    own_parts = names[bounds[stage] : bounds[stage + 1]]
    held = {id(parameter) for name in own_parts for parameter in model.get_submodule(name).parameters()}
    return {name: slice(None) for name, parameter in model.named_parameters() if id(parameter) in held}


def check_trained(model: PreTrainedModel, bounds: list[int]) -> None:
    """Reject stages in which nothing is trained; see `division.untrained_stage`."""
    stages = len(bounds) - 1
    names = part_names(model, stages)
    for stage in range(stages):
        own_parts = names[bounds[stage] : bounds[stage + 1]]
        if not any(
            parameter.requires_grad for name in own_parts for parameter in model.get_submodule(name).parameters()
        ):
            raise division.untrained_stage(stages, stage + 1, own_parts[0], own_parts[-1])


def keep_only(model: PreTrainedModel, names: list[str], own_parts: list[str]) -> None:
    """Let a model's parts (`names`: all) but `own_parts` hand their input on; record whether the first one stays."""
    for name in names:
        if name not in own_parts:
            model.set_submodule(name, _HandOn(model.get_submodule(name)))
    record_of(model).begins = names[0] in own_parts


class PipelineStage(PipelineModule):
    """This rank's stage of a model; `tensor` ranks split each layer. A pass takes a micro-batch from `batches`, and
    ends on the last stage with `finish`.
    """

    def __init__(self, model: PreTrainedModel, num_stages: int, dtype: torch.dtype, tensor: int = 1) -> None:
        with no_init_weights(), torch.device("meta"):
            full = type(model)(model.config)  # the same model, as it will be trained, with empty parameters
        full.tie_weights()
        full.to(dtype)
        if hasattr(model, "generation_config"):  # not what gives scores
            full.generation_config = model.generation_config
        names, self.bounds = part_names(model, num_stages), stage_bounds(full, num_stages)
        check_trained(model, self.bounds)
        tuned = record_of(model).tuned
        set_record(full, ModelRecord(origin=record_of(model).origin, tuned=tuned))
        if tuned is not None:
            if tuned.settings:
                adapters.attach_adapter(full, tuned.settings, tuned.base)
            trained = {*structure.trained_names(model)}
            for name, parameter in full.named_parameters():
                parameter.requires_grad_(name in trained)
        parts = [model.get_submodule(name) for name in names]
        # What DeepSpeed divides, builds and exchanges: it gets the model's own parts, in the order of computing.
        specs: list[LayerSpec] = [LayerSpec(_Named, name, part) for name, part in zip(names, parts, strict=True)]
        in_head = {id(parameter) for parameter in parts[-1].parameters()}
        if any(parameter.requires_grad and id(parameter) in in_head for parameter in parts[0].parameters()):
            # A tied embedding is on the first and the last stage, under one name; trained, its gradients are exchanged.
            for index in (0, -1):
                weight = f"{names[0]}.weight"
                specs[index] = TiedLayerSpec("embedding", _Named, names[0], parts[index], tied_weight_attr=weight)
        with redirect_stdout(io.StringIO()):  # it prints its seeds
            pipelines = dist.get_world_size() // (num_stages * tensor)
            topology = PipeModelDataParallelTopology(num_stages, tensor, pipelines)
            super().__init__(layers=specs, topology=topology, dynamic_shape=True)
        self._layer_specs.clear()  # they keep the other stages' parts
        keep_only(model, names, names[self._local_start : self._local_stop])
        model.to(next(self.parameters()).device)  # rotary frequencies, which no layer holds
        # Without this DeepSpeed leaves all stages but the first out of the gradient's norm (0.19.8, clip_grad_norm_).
        for parameter in self.parameters():
            parameter.model_parallel = not parameter.ds_pipe_replicated
        # Not as submodules: the layers are that already, under their places in the sequence.
        self.__dict__["stage"], self.__dict__["full_model"] = model, full
        set_record(self, ModelRecord(tuned=tuned))  # for `record_of(engine)`, whose module this is
        self.begins, self.ends = self.stage_id == 0, self.stage_id == num_stages - 1
        self.batches: deque[Batch] = deque()
        self.finish: Finish | None = None

    def _partition_layers(self, method: str = "") -> None:
        """Divide as the weights were read, where DeepSpeed would count trained parameters alone (0.19.8)."""
        self.parts = self.bounds
        self._set_bounds(start=self.bounds[self.stage_id], stop=self.bounds[self.stage_id + 1])

    def train(self, mode: bool = True) -> "PipelineStage":
        """Switch to training, or back."""
        super().train(mode)
        if "stage" in self.__dict__:
            self.__dict__["stage"].train(mode)
        return self

    def forward(self, received: torch.Tensor) -> Any:
        """Compute this stage's part of the next micro-batch: hidden states [B, S, H], or what `finish` makes of them.
        `received` are those of the stage before; on the first stage token ids.
        """
        model, batch = self.__dict__["stage"], self.batches.popleft()
        if not self.begins:
            batch = {**batch, "inputs_embeds": received}
        if not self.ends:
            return head_outputs.hidden_states(model, batch)
        assert self.finish is not None
        return self.finish(model, batch)

    def gathered(self, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full value of the parameters of all stages, or of those among `only`, on rank 0's CPU; on
        other ranks the value is empty. A collective, tensor by tensor.
        """
        named = self.__dict__["stage"].named_parameters()
        parameters = {name: parameter for name, parameter in named if only is None or name in only}
        # Stage by stage: its first rank (`source`) tells all ranks what it holds, and sends each value to rank 0, once
        # the ranks of the stage have gathered it from their parts.
        rank, per_stage = dist.get_rank(), dist.get_world_size() // self.num_stages
        for source in range(0, dist.get_world_size(), per_stage):
            described = [
                (name, process_group.full_shape(name, tensor), tensor.dtype) for name, tensor in parameters.items()
            ]
            received_list = [described]
            dist.broadcast_object_list(received_list, src=source)  # replaces the list's item by the source's
            for name, shape, dtype in received_list[0]:
                value, full = torch.empty(0), torch.empty(0)
                is_of_stage = rank // per_stage == source // per_stage
                if is_of_stage:
                    full = process_group.gather_parts(name, parameters[name])
                if rank == source == 0:
                    value = full.to("cpu", copy=True)
                elif rank == source:
                    dist.send(full.contiguous(), dst=0)
                elif rank == 0:
                    received = torch.empty(shape, dtype=dtype, device=next(iter(parameters.values())).device)
                    dist.recv(received, src=source)
                    value = received.cpu()
                yield name, value

    def train_window(
        self, engine: PipelineEngine, micro_batches: Sequence[Batch], finish: Finish, before_update: Callable[[], None]
    ) -> None:
        """Do one optimizer step, one micro-batch forward and one back in turn (1F1B). A collective.
        The engine averages gradients over its micro-batches and pipelines. `finish` makes, on the last stage, a scalar
        of the model and a micro-batch with `inputs_embeds`; `before_update` is called on every rank.
        """

        def update(pipeline: PipelineEngine, **options: Any) -> None:
            before_update()
            PipelineEngine._exec_optimizer_step(pipeline, **options)

        # What the engine calls for each instruction of its schedule (0.19.8, runtime/pipe/engine.py).
        engine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, OptimizerStep: update}
        engine.train_batch(self._hand_over(micro_batches, finish))

    @torch.no_grad()
    def evaluate_window(
        self, engine: PipelineEngine, micro_batches: Sequence[Batch], measure: Callable[[PreTrainedModel, Batch], Found]
    ) -> list[Found]:
        """Run micro-batches forward, as many on each rank; return `measure` of each on the last stage. A collective."""
        measurements: list[Found] = []

        def keep(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
            measurements.append(measure(model, batch))
            return torch.zeros((), device=engine.device)

        engine.total_loss = None  # a sum that it would continue
        inputs = self._hand_over(micro_batches, keep)
        engine.eval_batch(inputs, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches))
        return measurements

    def _hand_over(self, micro_batches: Sequence[Batch], finish: Finish) -> Any:
        """Set what `forward` takes; return the (input, labels) that the engine wants on its first and last stage."""
        self.batches, self.finish = deque(micro_batches), finish
        return iter([(batch["input_ids"], batch["input_ids"]) for batch in micro_batches])


def forward_logits(engine: PipelineEngine, batch: Batch, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run the same rows on every rank; return `pick` of the logits `[B, S, V]`, or of a classifier's scores at each
    token `[B, S, labels]`, float32 on the CPU. A collective.
    """
    inputs = {name: tensor.to(engine.device) for name, tensor in batch.items()}
    is_classifier = probe.is_classifier(unwrap_model(engine.module))

    def picked_logits(model: PreTrainedModel, rows: Batch) -> torch.Tensor:
        logits = classifier.token_scores(model, rows) if is_classifier else loss.forward_output(model, rows)
        return pick(logits).float().cpu()

    with probe.evaluating(engine):
        picked = engine.module.evaluate_window(engine, [inputs], picked_logits)  # [] but on the last stage
    logits: torch.Tensor = broadcast_from_last(engine, lambda: picked[0])
    return logits


def capture_stages(engine: PipelineEngine, ids: torch.Tensor) -> probe.Probe:
    """Return the probe of a pipeline's model, by which a checkpoint is verified when it is loaded: logits [R, V] at the
    last of `ids` [R, L]; of a classifier the scores at all tokens, [R, L x labels]. A collective: the same on all.
    """
    is_classifier = probe.is_classifier(unwrap_model(engine.module))

    def pick(token_logits: torch.Tensor) -> torch.Tensor:
        return token_logits.flatten(1) if is_classifier else token_logits[:, -1]

    logits = forward_logits(engine, {"input_ids": ids}, pick)
    return probe.Probe(ids, logits, probe.precision_of(stage_model(engine.module), engine.device))


class _Named(nn.Module):
    """A part under the name that it has in the model, so that a checkpoint's files hold the model's own names."""

    def __init__(self, name: str, part: nn.Module) -> None:
        super().__init__()
        *path, last = name.split(".")
        owner: nn.Module = self
        for step in path:
            owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        owner.add_module(last, part)


class _HandOn(nn.Module):
    """Stands in the place of a part that another stage holds, and hands its input on."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        if hasattr(part, "attention_type"):  # by which some models choose the mask of a layer
            self.attention_type = part.attention_type

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states
