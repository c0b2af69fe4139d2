"""Train a user's own model and dataset: docs/custom_models.md."""

from toolkit.distributed import exits

exits.end_with_launcher()  # before the seconds in which torch is imported

# ruff: noqa: E402
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from toolkit.config.rules import check_without_validation
from toolkit.distributed.row_exchange import gather_metrics
from toolkit.launch import ancestors, environment
from toolkit.messages import ConfigError, tr
from toolkit.train.startup import greet, make_ready

if TYPE_CHECKING:
    from toolkit.tasks.custom import Loss, Metrics, Score

__all__ = ["gather_metrics", "share", "train"]
_BASE = Path(__file__).with_name("custom.yaml")


def train(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    dataset: Any,
    loss: "Loss",
    *,
    validation: Any = None,
    metrics: "Metrics | None" = None,
    score: "Score | None" = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    shards_itself: bool = False,
    recipe: str | Path = "",
    overrides: Iterable[str] = (),
    words: Sequence[str] | None = None,
) -> Path:
    """Train any model on any dataset, as recipes are trained: under any launcher, on as many ranks as it starts.

    To be called once by a program that each rank runs; `deepspeed --num_gpus 2 my_train.py zero=stage1 optim.lr=3e-4`.

    Args:
        model: the module, or better a function that makes it (its class, if that takes no arguments): then its random
            weights follow from `run.seed`.
        dataset: map-style (`__len__` and `__getitem__`): each sample once per epoch over all ranks, in an order of
            `run.seed`; or iterable: a stream that is shared out to the ranks.
        loss: given the model and a batch, returns one loss per sample, `[n]`; minimised is the mean of a global batch.
        validation: dataset for evaluations, or None.
        metrics: given the model and a batch, returns a dict of values per sample, `[n]`; their means over the
            validation data are recorded as `eval_NAME`.
        score: given the values of all validation samples in their order, by name `[N, ...]`, returns a dict of figures,
            recorded in place of the means: for what is no mean.
        collate: makes a batch of a list of samples; torch's by default.
        shards_itself: the iterable dataset gives each rank what is its own; see `share`.
        recipe: a YAML file with settings, or the name of a recipe; "" takes `toolkit/custom.yaml`.
        overrides: settings as on the command line, which wins over them.
        words: the command line after the program; None takes it from sys.argv.

    Returns:
        The run directory, with metrics.jsonl, checkpoints/, export/model.safetensors and report.html.

    Raises:
        SystemExit: the run did not come to its end; with the exit code of `toolkit train`. The reason has been told.
    """
    parts = {
        "model": model,
        "dataset": dataset,
        "loss": loss,
        "validation": validation,
        "metrics": metrics,
        "score": score,
        "collate": collate,
        "shards_itself": shards_itself,
    }
    typed = environment.strip_launcher_arguments(sys.argv[1:] if words is None else words)
    folders: list[Path] = []  # gets the run directory: `run_guarded` returns an exit code alone
    settings = [*overrides, *typed]
    base = [] if any(map(_names_recipe, settings)) else [f"recipe={recipe or _BASE}"]
    code = exits.run_guarded(lambda: _run(parts, base + settings, folders))
    if code or not folders:
        raise SystemExit(code)
    return folders[0]


def _names_recipe(word: str) -> bool:
    """Whether an argument chooses a recipe, which need not have `recipe=` if it is a YAML file."""
    return word.startswith("recipe=") or ("=" not in word and word.endswith((".yaml", ".yml")))


def _run(parts: dict[str, Any], words: list[str], folders: list[Path]) -> int:
    """Train with the arguments `parts` of `train`; append the run directory to `folders`, and return the exit code."""
    if parts["score"] is not None and parts["metrics"] is None:
        raise ConfigError(tr("score= makes figures of what metrics= returns: give both."))
    if parts["metrics"] is not None and parts["validation"] is None:
        raise ConfigError(tr("metrics= are of the validation data: give validation= too."))
    ready = make_ready(words, custom=True)
    if ready is None:  # `--cfg job` has printed the config
        return 0
    arguments, ranks = ready
    if parts["validation"] is None:
        check_without_validation(arguments.loaded)
    if "OMP_NUM_THREADS" in os.environ:  # torch, which the program has imported, read it before it was set
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from toolkit.tasks.custom import CustomSpec, CustomTask
    from toolkit.train.trainer import Trainer

    spec = CustomSpec(**parts)
    if ranks.rank == 0:
        greet(arguments, ranks, spec.model_name)
    task, started = CustomTask(spec), time.monotonic() - ancestors.age_s()  # when the launcher was started
    folders.append(Trainer(task, arguments.loaded.cfg, ranks, started).train())
    return 0


def share() -> tuple[int, int]:
    """Return this rank's number and the count, at any time, for a dataset that shards itself: `rows[rank::count]`."""
    ranks = environment.detect(os.environ)
    return ranks.rank, ranks.world_size
