"""Several sessions of custom models in one process group: its arguments are a JSON list of (task, words).

STEP:TASK goes on with a run of the same words as if it had died after that step."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert_worker
import pytest
import sessions_worker
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from toolkit.custom import gather_metrics, share, train
from toolkit.distributed import process_group
from toolkit.launch import environment
from toolkit.train.startup import make_ready
from toolkit.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
COUNT = 37


class Regression:
    """37 points; what is read of one is noisy, and drawn anew each time."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= row < COUNT:
            raise IndexError(row)
        draw = torch.Generator().manual_seed(row)
        inputs = torch.randn(8, generator=draw)
        return inputs + 0.1 * torch.randn(8), inputs[:2].sum()


class Stream(IterableDataset):
    """The same points as a stream; a rank's own part of it if it is to shard itself."""

    def __init__(self, itself: bool = False) -> None:
        self.itself = itself

    def __iter__(self) -> Any:
        number, count = share() if self.itself else (0, 1)
        samples = Regression()
        for row in range(number, COUNT - COUNT % count, count):
            yield samples[row]


def network() -> nn.Module:
    """Return a small network with batch norm."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def plain() -> nn.Module:
    """Return one whose step does not depend on how samples are put together."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def squares(model: Any, batch: Any) -> torch.Tensor:
    """Return the squared errors."""
    return functional.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="none")


def predictions(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Return what is to be scored."""
    return {"predicted": model(batch[0]).squeeze(1), "wanted": batch[1]}


def correlation(values: Any) -> dict[str, float]:
    """Return a figure that is no mean of samples'."""
    return {"correlation": float(torch.corrcoef(torch.stack([values["predicted"], values["wanted"]]))[0, 1])}


def errors(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Return a mean that is the loss itself."""
    return {"error": squares(model, batch)}


def example(name: str) -> Callable[[list[str]], Path]:
    """Return the main function of a shipped example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def resume_after(words: list[str], step: int) -> list[str]:
    """Leave of a run what one has that died after a step's checkpoint, and return the words of its successor."""
    given = dict(word.split("=", 1) for word in words)
    folder, name = Path(given["run.dir"]), given["run.name"]
    if process_group.rank() == 0:
        sessions_worker.die(str(folder / name), step, str(folder / f"{name}-again"))
    process_group.barrier()
    return [word for word in words if not word.startswith("run.name=")] + [f"run.name={name}-again"]


TASKS: dict[str, Callable[[list[str]], Path]] = {
    "plain": lambda words: train(plain, Regression(), squares, words=words),
    "map": lambda words: train(network, Regression(), squares, validation=Regression(), metrics=errors, words=words),
    "score": lambda words: train(
        network, Regression(), squares, validation=Stream(), metrics=predictions, score=correlation, words=words
    ),
    "stream": lambda words: train(plain, Stream(), squares, words=words),
    "itself": lambda words: train(plain, Stream(itself=True), squares, shards_itself=True, words=words),
    "converted": lambda words: train(
        lambda: convert_worker.net_of(words[1].rpartition("=")[2]),
        convert_worker.Samples(),
        convert_worker.squares,
        words=words,
    ),
    "cifar10": lambda words: example("cifar10")(words),
    "encoder": lambda words: example("encoder")(words),
}


def check_gathering() -> None:
    """Put rows together of which every rank has another number, and one none."""
    rank = process_group.rank()
    values = {"flag": torch.tensor([True] * rank), "half": torch.full((rank + 1, 2), rank, dtype=torch.bfloat16)}
    found = gather_metrics(values)
    assert found["flag"].tolist() == [True] and found["flag"].dtype is torch.bool
    assert found["half"].tolist() == [[0, 0], [1, 1], [1, 1]] and found["half"].dtype is torch.bfloat16
    with pytest.raises(ValueError, match="other metrics"):
        gather_metrics({f"of {rank}": torch.zeros(1)})


def main() -> None:
    """Run the sessions."""
    jobs = json.loads(Path(sys.argv[-1]).read_text())
    sys.argv = [sys.argv[0]]
    ready = make_ready([f"recipe={ROOT}/toolkit/custom.yaml"], custom=True)
    assert ready
    process_group.start(ready[0].loaded.cfg.distributed)
    environment.check_port = lambda environ: None  # it is this process group's
    Trainer.train = Trainer.train_in_group  # type: ignore[method-assign]
    check_gathering()
    for task, words in jobs:
        step, _, name = task.rpartition(":")
        TASKS[name](resume_after(words, int(step)) if step else words)
    process_group.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
