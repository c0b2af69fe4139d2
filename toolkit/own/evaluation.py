"""An evaluation of a model of one's own: its loss and the program's metrics over all validation samples."""

from collections.abc import Callable, Mapping

import torch
from deepspeed import DeepSpeedEngine

from toolkit.checkpoint import random_state
from toolkit.config.schema import EVAL_LOSS, RunConfig
from toolkit.distributed.process_group import gather_metrics, sum_over_ranks
from toolkit.errors import DataError
from toolkit.evaluate import metrics
from toolkit.launch.environment import Ranks
from toolkit.messages import tr
from toolkit.own.data import MicroBatch, validation_batches
from toolkit.own.objective import losses_of, on_device, share_buffers
from toolkit.own.task import Task

_NUMBER = "number of the sample"


def evaluate(
    task: Task,
    cfg: RunConfig,
    ranks: Ranks,
    engine: DeepSpeedEngine,
    alive: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> dict[str, float]:
    """Return loss and metrics over the validation data, each sample once, the same on every rank. A collective.

    Leaves no trace in the model or in random generators.

    Args:
        task: with validation data.
        cfg: checked config.
        ranks: who this process is.
        engine: the engine.
        alive: called now and then.
        most: so many micro-batches at most, to try it; None takes all. `score` is left out of a trial: of a few samples
            there may be no such figure.

    Raises:
        DataError: the program's functions return something else than they should, or not what `evaluate.keep_best`
            names.
    """
    sums: dict[str, float] = {EVAL_LOSS: 0.0, metrics.SAMPLES: 0.0}
    kept: list[dict[str, torch.Tensor]] = []
    generators, was_training = random_state.capture(), engine.module.training
    share_buffers(engine.module)
    engine.eval()
    try:
        with torch.no_grad():
            for place, (numbers, micro) in enumerate(validation_batches(task, cfg, ranks)):
                if place == most:
                    break
                sums[EVAL_LOSS] += float(losses_of(task.loss, engine, micro)[: micro.size].double().sum())
                sums[metrics.SAMPLES] += micro.size
                values = _metrics(task, engine, micro)
                if task.score is not None:
                    kept.append({_NUMBER: torch.tensor(numbers, dtype=torch.long), **values})
                else:
                    for name, value in values.items():
                        sums[f"eval_{name}"] = sums.get(f"eval_{name}", 0.0) + float(value.double().sum())
                alive()
    finally:
        engine.train(was_training)
        random_state.restore_state(generators)
    total = sum_over_ranks(list(sums.values()), engine.device).tolist()
    found = dict(zip(sums, total, strict=True))
    count = found.pop(metrics.SAMPLES)
    figures = {name: value / count for name, value in found.items()}
    if task.score is not None and most is None:
        figures |= _scored(task.score, kept, engine.device)
    if most is None:
        _check_best(cfg.evaluate.keep_best, figures)
    return {EVAL_LOSS: figures.pop(EVAL_LOSS), metrics.SAMPLES: count, **figures}


def _check_best(name: str, figures: Mapping[str, float]) -> None:
    """Refuse to choose checkpoints by a figure that is not there."""
    if name and name not in figures:
        raise DataError(
            tr(
                "evaluate.keep_best = {name}, and the evaluation gives no such figure. Known: {known}.",
                name=name,
                known=", ".join(figures),
            )
        )


def _metrics(task: Task, engine: DeepSpeedEngine, micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the values of a micro-batch's samples, by name [count, ...]."""
    if task.metrics is None:
        return {}
    values = task.metrics(engine, on_device(micro.batch, engine.device))
    wanted = max(micro.size, 1)
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.ndim < 1 or len(value) != wanted:
            raise DataError(
                tr(
                    "metrics= must return a value per sample: '{name}' is no tensor of {count} rows.",
                    name=name,
                    count=wanted,
                )
            )
        if f"eval_{name}" in (EVAL_LOSS, metrics.SAMPLES) or not name.isidentifier():
            raise DataError(tr("metrics=: '{name}' cannot be the name of a metric.", name=name))
        if task.score is None and value.ndim > 1:
            raise DataError(
                tr(
                    "metrics=: '{name}' has several numbers per sample. Return one, or give score= too.",
                    name=name,
                )
            )
    return {name: value[: micro.size] for name, value in values.items()}


def _scored(
    score: Callable[[Mapping[str, torch.Tensor]], Mapping[str, float]],
    kept: list[dict[str, torch.Tensor]],
    device: torch.device,
) -> dict[str, float]:
    """Put together what all ranks have kept, in the order of the samples, and return the figures of it."""
    own = {name: torch.cat([part[name] for part in kept]) for name in kept[0]}
    together = gather_metrics(own, device)
    order = together.pop(_NUMBER).argsort()
    return {f"eval_{name}": float(value) for name, value in score({n: v[order] for n, v in together.items()}).items()}
