"""Custom models, datasets and losses: the sum of the samples' losses, exactly over the global batch."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from safetensors.torch import load_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from toolkit.checkpoint import intact, state_files
from toolkit.config import schema
from toolkit.data.sampler import Position
from toolkit.distributed import accelerator, process_group, row_exchange
from toolkit.engine import ds_config
from toolkit.evaluate.loss import SAMPLES
from toolkit.export.custom import CUSTOM_CARD, WEIGHTS, check_custom_exportable, export_custom
from toolkit.export.verify import aside_if_wrong
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, DataError, joined, tr
from toolkit.models import load, probe, save
from toolkit.tasks.custom_data import Collate, CustomData, MicroBatch, open_dataset, validation_batches
from toolkit.terminal import phase
from toolkit.train import run_dir, schedule, task
from toolkit.train.step import Samples, TokenCounts

Loss = Callable[[Any, Any], torch.Tensor]
"""Given the model and a batch, returns one loss per sample, [n]."""
Metrics = Callable[[Any, Any], Mapping[str, torch.Tensor]]
"""Given the model and a batch, returns by name a value per sample, [n, ...]."""
Score = Callable[[Mapping[str, torch.Tensor]], Mapping[str, float]]
"""Given the values of all samples, by name [N, ...] on the CPU, returns figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomSpec:
    """The arguments of `toolkit.custom.train`, which describes them."""

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any
    loss: Loss
    validation: Any = None
    metrics: Metrics | None = None
    score: Score | None = None
    collate: Collate = default_collate
    shards_itself: bool = False

    @property
    def model_name(self) -> str:
        """Name of the model in messages."""
        model = self.model
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "?")
        return tr("a custom model") if name == "<lambda>" else name

    def build(self, seed: int) -> nn.Module:
        """Return the program's module, or the one that its function makes with random weights by `seed`. ConfigError if
        it is no module, or no parameter of it is trained. DeepSpeed broadcasts rank 0's weights later.
        """
        model = self.model
        if not isinstance(model, nn.Module):
            state_files.seed_all(seed)
            model = model()
        if not isinstance(model, nn.Module):
            raise ConfigError("model= must be a torch.nn.Module or make one, and is {kind}.", kind=type(model).__name__)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError("nothing in {model} is trained: no parameter wants a gradient.", model=self.model_name)
        return model


def structure_digest(model: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's parameters and buffers."""
    shapes = {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in model.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    return blake2b(repr(sorted(shapes.items())).encode(), digest_size=8).hexdigest()


_NUMBER = "number of the sample"


def _card_of(model: nn.Module) -> dict[str, Any]:
    """Return facts about a model: its class, program, structure, sizes, and the `names` of what the export holds."""
    stored, parameters = model.state_dict(keep_vars=True), dict(model.named_parameters())
    return {
        "model": type(model).__name__,
        "program": sys.argv[0],
        "digest": structure_digest(model),
        "parameters": sum(parameter.numel() for parameter in parameters.values()),
        "trained_parameters": sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
        "names": [*parameters, *(name for name, _ in model.named_buffers() if name in stored)],
    }


class CustomTask(task.Task):
    """Trains a program's own module with its dataset and loss. See `toolkit.custom.train`."""

    unit = task.SAMPLES
    memory_sections = ("batch.", "zero")
    cfg: schema.RunConfig
    ranks: Ranks
    model: nn.Module | None
    card: dict[str, Any]
    """Facts about the model in checkpoints and in the report."""
    data: CustomData

    def __init__(self, spec: CustomSpec) -> None:
        self.spec = spec

    def begin(self, cfg: schema.RunConfig, ranks: Ranks) -> None:
        """Open the dataset, make the model, which may need the process group, note its card, and seed this rank."""
        self.cfg, self.ranks = cfg, ranks
        data = self.data = open_dataset(self.spec, cfg, ranks)
        self.steps_per_epoch, self.total_steps, self.identity = data.steps_per_epoch, data.total_steps, data.identity
        size, per_step = data.size, cfg.batch.global_size
        self.epoch = schedule.Epoch(samples=size, sequences=size, per_step=per_step) if size else None
        self.has_validation = self.spec.validation is not None
        model = self.model = self.spec.build(cfg.run.seed)
        state_files.seed_all(cfg.run.seed + ranks.rank)
        self.card = _card_of(model)

    def settle(self, cfg: schema.RunConfig) -> None:
        """Check that all ranks train the same model on the same data, else they would wait for each other forever."""
        self.cfg = cfg
        facts = {
            **{f"data: {name}": str(value) for name, value in self.data.identity.items()},
            "data: steps": f"{self.data.total_steps:,}",
            "model: trained parameters": f"{self.card['trained_parameters']:,}",
            "model: names and shapes": self.card["digest"],
        }
        try:
            process_group.check_alike(cfg.distributed, facts, DataError)
        except DataError as error:
            advice = tr(
                "Give every rank the whole dataset, which is divided among the ranks here, and build the same model on "
                "each; with shards_itself=True the length of a dataset is that of all ranks together."
            )
            raise DataError(joined(str(error), advice)) from error

    def data_summary(self) -> dict[str, Any]:
        return {"model": self.card["model"], "parameters": self.card["parameters"], **self.data.identity}

    def data_card(self) -> dict[str, Any]:
        return {"program": self.card["program"], "model": self.card["model"], **self.data.identity}

    def batches(self, position: Position, num_steps: int) -> Iterator[MicroBatch]:
        return self.data.batches_from(position, num_steps)

    def next_position(self, position: Position) -> Position:
        return self.data.position_after(position)

    def describe_samples_at(self, position: Position) -> Samples:
        """Return the names of a step's samples, without content, which only the program knows."""

        def shown(name: str) -> dict[str, Any]:
            return {"where": name, "tokens": 1, "trained_tokens": 1, "text": []}

        by_rank = self.data.names_at(position)
        return [[[shown(name) for name in names] for names in micro_batches] for micro_batches in by_rank]

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Raise ConfigError for a checkpoint whose parameters have other names or shapes."""
        file = checkpoint / save.MODEL_DIR / CUSTOM_CARD
        if intact.read_run_state(checkpoint).is_foreign:  # loading compares names and shapes
            return
        saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": "?", "digest": ""}
        if saved["digest"] != self.card["digest"]:
            raise ConfigError(
                "the checkpoint {folder} is of another model ({before}): names or shapes of its "
                "parameters are not those of {now}. Undo this, or start again under another run.name.",
                folder=checkpoint,
                before=saved["model"],
                now=self.card["model"],
            )

    def build_model(self, ds: ds_config.DsConfig, source: run_dir.RunSource) -> nn.Module:
        """Return the program's module, which from here on casts its inputs to the run's precision."""
        cfg, model, self.model = self.cfg, self.model, None  # the engine has it from here on
        assert model is not None
        accelerator.set_tf32(cfg.precision.tf32)
        dtype = load.TORCH_DTYPES[cfg.precision.dtype]
        if dtype is not torch.float32:
            cast_inputs(model, dtype)
        return model

    def model_files(self, engine: DeepSpeedEngine) -> task.ModelFiles:
        """Return the model's card; checkpoints hold frozen parameters too, which are nowhere else."""
        files = {CUSTOM_CARD: (json.dumps(self.card, indent=2) + "\n").encode()}
        return task.ModelFiles(files, None, holds_frozen=True)

    def start_lines(self, run: task.RunContext) -> str:
        return tr(
            "{trained} of {parameters} parameters of {model} are trained. {samples}, {steps} steps "
            "({per_epoch} per epoch). Run directory: {folder}",
            trained=f"{self.card['trained_parameters']:,}",
            parameters=f"{self.card['parameters']:,}",
            model=self.card["model"],
            samples=self.data.described,
            steps=f"{run.total_steps:,}",
            per_epoch=f"{self.steps_per_epoch:,}",
            folder=run.display_folder,
        )

    def longest_batch(self, position: Position) -> tuple[MicroBatch, str]:
        """Return the first micro-batch, as only the program knows which samples are the largest."""
        [batch] = islice(self.batches(position, 1), 1)
        return batch, tr("the first batch")

    def check_evaluation(self, run: task.RunContext) -> None:
        if self.has_validation:
            evaluate(self.spec, run.cfg, run.ranks, run.engine, most=1)

    def count_losses(self, batch: MicroBatch) -> int:
        return batch.size

    def token_counts(self, batches: list[MicroBatch]) -> TokenCounts:
        """Return samples for tokens, and no pairs."""
        samples = sum(batch.size for batch in batches)
        return TokenCounts(total_tokens=samples, computed_tokens=samples, pairs=0, trained_tokens=samples)

    def shape(self, batch: MicroBatch) -> tuple[int, ...]:
        return (batch.size,)

    def loss_sum(self, engine: Any, batch: MicroBatch) -> torch.Tensor:
        """Return the sum of the samples' losses, 0 with gradients for a batch without samples."""
        share_buffers(engine.module)
        if batch.size:
            return losses_of(self.spec.loss, engine, batch).float().sum()
        # The batch repeats a sample so that this rank joins the others' collectives: batch norm must not learn from it.
        # SyncBatchNorm stays in training, as it exchanges statistics with the other ranks, which are in training.
        norms = [
            part
            for part in engine.module.modules()
            if isinstance(part, _BatchNorm) and part.training and not isinstance(part, nn.SyncBatchNorm)
        ]
        for norm in norms:
            norm.eval()
        try:
            return losses_of(self.spec.loss, engine, batch).float().sum() * 0
        finally:
            for norm in norms:
                norm.train()

    def evaluate(self, run: task.RunContext, step: int, alive: Callable[[], None]) -> dict[str, float]:
        return evaluate(self.spec, run.cfg, run.ranks, run.engine, alive)

    def check_export(self, run: task.RunContext) -> None:
        """Raise an error if weights are of types that cannot be written."""
        process_group.on_rank0(lambda: check_custom_exportable(run.engine.module, run.folder / "export"))

    def export(self, run: task.RunContext, result: task.FitResult) -> None:
        """Write the weights, and load them into a new model if the program has a function that makes one."""
        folder = run.folder / "export"
        share_buffers(run.engine.module)
        with phase(tr("Exporting")):
            export_custom(run.engine, self.card, folder)
            if run.cfg.checkpoint.verify_export:
                process_group.on_rank0(lambda: _verify_export(self.spec, run.cfg.run.seed, folder))

    def summary(self, run: task.RunContext, result: task.FitResult) -> dict[str, Any]:
        summary = {name: self.card[name] for name in ("parameters", "trained_parameters")}
        summary["samples"] = result.state.total_tokens  # of which each sample counts as one here
        evaluations = result.state.evaluations
        if len(evaluations) > 1:  # a single one is the last
            summary["first_eval_loss"] = evaluations[0][schema.EVAL_LOSS]
        if evaluations:
            summary |= {f"last_{name}": value for name, value in evaluations[-1].items() if name != "step"}
        return summary

    def next_steps(self, run: task.RunContext, answers: list[dict[str, str]]) -> list[str]:
        if not run.cfg.checkpoint.export:
            return []
        file = f"{run.display_folder}/export/{WEIGHTS}"
        return [tr("The weights: {file} (safetensors.torch.load_model)", file=file)]


def losses_of(loss: Loss, engine: DeepSpeedEngine, micro: MicroBatch) -> torch.Tensor:
    """Return the losses of a micro-batch, [micro.num_samples], a filler's too; DataError if loss= gives other ones."""
    losses = loss(engine, on_device(micro.batch, engine.device))
    shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if shape != (micro.num_samples,):
        raise DataError(
            "loss= must return one loss per sample, a tensor [{count}] for this batch, and returned {shape}. For "
            "example cross_entropy(logits, labels, reduction='none'); of several losses per sample their mean: "
            "losses.flatten(1).mean(1).",
            count=micro.num_samples,
            shape=shape,
        )
    return losses


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device, copied without waiting if they are in pinned memory."""
    return _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with `change` applied to each tensor in its dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _map_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map_tensors(value, change) for value in batch)
    return batch


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Broadcast rank 0's buffers (batch norm statistics), as DistributedDataParallel does. A collective."""
    if process_group.world_size() == 1:
        return
    # A broadcast per dtype, as `cat` takes one; sorted, so that all ranks have the same order.
    for dtype in sorted({buffer.dtype for buffer in model.buffers()}, key=str):
        buffers = [buffer for buffer in model.buffers() if buffer.dtype is dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, 0)
        for buffer, value in zip(buffers, flat.split([part.numel() for part in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point inputs of a model, also in dicts and lists, but not tensors that only the loss gets."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _map_tensors(inputs, cast), _map_tensors(named, cast)

    model.register_forward_pre_hook(hook, with_kwargs=True)


def evaluate(
    spec: CustomSpec,
    cfg: schema.RunConfig,
    ranks: Ranks,
    engine: DeepSpeedEngine,
    alive: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> dict[str, float]:
    """Return mean loss and metrics over the validation data, the same on every rank; random states are restored. A
    collective. With `most` it evaluates so many micro-batches, without `score`, which may need more samples. DataError
    if the program's functions return something wrong, or not the figure that `evaluate.keep_best` names.
    """
    sums: dict[str, float] = {schema.EVAL_LOSS: 0.0, SAMPLES: 0.0}  # over this rank's samples, and their number
    metrics_of_batches: list[dict[str, torch.Tensor]] = []
    generators = state_files.capture_generators()
    share_buffers(engine.module)
    try:
        with probe.evaluating(engine):
            for index, (numbers, micro) in enumerate(validation_batches(spec, cfg, ranks)):
                if index == most:
                    break
                losses = losses_of(spec.loss, engine, micro)[: micro.size]  # without a filler's
                sums[schema.EVAL_LOSS] += float(losses.double().sum())
                sums[SAMPLES] += micro.size
                values = _metrics_of_batch(spec, engine, micro)
                if spec.score is not None:
                    metrics_of_batches.append({_NUMBER: torch.tensor(numbers, dtype=torch.long), **values})
                else:
                    for name, value in values.items():
                        sums[f"eval_{name}"] = sums.get(f"eval_{name}", 0.0) + float(value.double().sum())
                alive()
    finally:
        state_files.restore_generators(generators)
    totals = dict(zip(sums, process_group.sum_over_ranks(list(sums.values()), engine.device).tolist(), strict=True))
    count = totals.pop(SAMPLES)
    figures = {name: value / count for name, value in totals.items()}
    if spec.score is not None and most is None:
        scores = spec.score(_metrics_of_all(metrics_of_batches, engine.device))
        figures |= {f"eval_{name}": float(value) for name, value in scores.items()}
    best = cfg.evaluate.keep_best
    if most is None and best and best not in figures:
        raise DataError(
            "evaluate.keep_best = {name}, and the evaluation gives no such figure. Known: {known}.",
            name=best,
            known=", ".join(figures),
        )
    return {schema.EVAL_LOSS: figures.pop(schema.EVAL_LOSS), SAMPLES: count, **figures}


def _metrics_of_all(metrics_of_batches: list[dict[str, torch.Tensor]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the metrics of all ranks' samples, in the order of their numbers (`_NUMBER`). A collective."""
    metrics_of_rank = {name: torch.cat([part[name] for part in metrics_of_batches]) for name in metrics_of_batches[0]}
    metrics_of_ranks = row_exchange.gather_metrics(metrics_of_rank, device)
    order = metrics_of_ranks.pop(_NUMBER).argsort()
    return {name: values[order] for name, values in metrics_of_ranks.items()}


def _metrics_of_batch(spec: CustomSpec, engine: DeepSpeedEngine, micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the values of metrics= for a micro-batch, name -> [micro.size, ...], {} without metrics=; DataError for
    other shapes.
    """
    if spec.metrics is None:
        return {}
    values = spec.metrics(engine, on_device(micro.batch, engine.device))
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 1 or len(value) != micro.num_samples:
            raise DataError(
                "metrics= must return a value per sample: '{name}' is no tensor of {count} rows.",
                name=name,
                count=micro.num_samples,
            )
        if f"eval_{name}" in (schema.EVAL_LOSS, SAMPLES) or not name.isidentifier():
            raise DataError("metrics=: '{name}' cannot be the name of a metric.", name=name)
        if spec.score is None and value.ndim > 1:
            raise DataError(
                "metrics=: '{name}' has several numbers per sample. Return one, or give score= too.", name=name
            )
    return {name: value[: micro.size] for name, value in values.items()}  # without a filler, which does not count


def _verify_export(spec: CustomSpec, seed: int, folder: Path) -> None:
    """Load the export into a new model, if the program has a function that makes one; CheckpointError if that fails."""
    if isinstance(spec.model, nn.Module):
        return
    try:
        model = spec.build(seed)
    except Exception as error:
        raise CheckpointError(
            "{folder} could not be proved: model= failed when it was called once more, {reason}. Let it make the "
            "model again, or set checkpoint.verify_export=false.",
            folder=folder,
            reason=_first_line(error),
        ) from error
    with aside_if_wrong(folder):
        try:
            load_model(model, folder / WEIGHTS)
        except Exception as error:
            raise CheckpointError(
                "{folder} does not hold its model: {reason}.", folder=folder, reason=_first_line(error)
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
