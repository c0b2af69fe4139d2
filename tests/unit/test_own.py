"""A program's own model and data: what is refused, and with which words; which rank reads which sample."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import IterableDataset

from toolkit.config.checks import check
from toolkit.config.load import load
from toolkit.data.sampler import Position
from toolkit.distributed.metrics import gather_metrics
from toolkit.errors import ConfigError, DataError
from toolkit.export import own as export
from toolkit.launch.environment import Ranks
from toolkit.own import data, entry
from toolkit.own.evaluation import _metrics
from toolkit.own.objective import losses_of, on_device
from toolkit.own.task import Task, digest, is_map_style

ENGINE: Any = SimpleNamespace(device=torch.device("cpu"))


def loaded(*words: str) -> Any:
    """Return the config of a program."""
    return load([f"recipe={entry._BASE}", "batch.global_size=4", "batch.micro_per_gpu=1", *words])


def task(dataset: Any, **more: Any) -> Task:
    """Return a program's parts."""
    return Task(**{"model": lambda: nn.Linear(1, 1), "dataset": dataset, "loss": lambda model, batch: batch, **more})


def read(dataset: Any, rank: int, steps: int, place: Position, *words: str, **more: Any) -> list[Any]:
    """Return what one of two ranks reads."""
    ranks = Ranks(rank=rank, local_rank=rank, world_size=2, local_world_size=2, launcher="single")
    found = data.data_of(task(dataset, collate=list, **more), loaded("train.max_steps=9", *words).cfg, ranks)
    return [one.batch[: one.size] for one in found.batches_from(place, steps)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=/x"], "model.path = /x has no effect: the program brings its own model, data and loss"),
        (["tuning=lora"], "tuning.method = lora has no effect: the program brings its own model"),
        (["data.max_length=77"], "data.max_length = 77 has no effect"),
        (["train.activation_checkpointing.enabled=true"], "enabled = true has no effect"),
        (["parallel.tensor=2"], "parallel.tensor = 2: how to split a model of one's own is not known"),
        (["batch.micro_per_gpu=auto"], "batch.micro_per_gpu = auto: nobody knows what a model of one's own takes"),
        (["plan.auto=true"], "plan.auto = true: nobody knows"),
        (["evaluate.keep_best=accuracy"], "evaluate.keep_best = accuracy must be eval_loss, or eval_ and the name"),
        (["batch.micro_per_gpu=3"], "batch.global_size = 4 is not a multiple of batch.micro_per_gpu"),
    ],
)
def test_settings_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(loaded(*words), 2, own=True)


def test_settings_that_can_be() -> None:
    check(loaded("zero=stage3", "data.num_workers=2", "evaluate.keep_best=eval_f1", "evaluate.every=3"), 2, own=True)


@pytest.mark.parametrize(
    ("dataset", "words", "more", "message"),
    [
        (3, [], {}, "int is no data set: it needs __len__ and __getitem__, or __iter__"),
        ([], [], {}, "the data set is empty"),
        ([1], [], {"shards_itself": True}, "shards_itself= is for iterable data sets"),
        (iter([1]), ["train.max_steps=0"], {}, "has no length: say how long to train"),
        (iter([1]), ["data.num_workers=1"], {}, "data.num_workers = 1: an iterable data set is read by the training"),
        (iter([]), [], {}, "list_iterator gives no sample"),
        (iter([1, 2]), [], {}, r"list_iterator ends for good: iter\(\) of it must begin anew"),
    ],
)
def test_data_that_cannot_be(dataset: Any, words: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(dataset, 0, 2, Position(), *words, **more)


def test_a_loss_is_one_number_per_sample() -> None:
    micro = data.MicroBatch(torch.ones(3, 2), 3)
    for wrong, shape in ((torch.ones(3, 2), r"\(3, 2\)"), (torch.tensor(1.0), r"\(\)"), (1.0, "float")):
        with pytest.raises(DataError, match=rf"a tensor \[3\] for this batch, and returned {shape}"):
            losses_of(lambda model, batch, wrong=wrong: wrong, ENGINE, micro)
    assert losses_of(lambda model, batch: batch[:, 0], ENGINE, micro).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": torch.tensor(1.0)}, "'a' is no tensor of 3 rows"),
        ({"a": torch.ones(3, 2)}, "'a' has several numbers per sample"),
        ({"loss": torch.ones(3)}, "'loss' cannot be the name of a metric"),
    ],
)
def test_metrics_are_values_per_sample(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _metrics(task([1], metrics=lambda model, batch: values), ENGINE, data.MicroBatch(torch.ones(3), 3))


def test_models_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module or make one, and is int"):
        task([1], model=lambda: 3).build(1)
    with pytest.raises(ConfigError, match="nothing in Linear is trained"):
        task([1], model=nn.Linear(1, 1).requires_grad_(False)).build(1)
    with pytest.raises(SystemExit) as ended:
        entry.train(nn.Linear(1, 1), [1], lambda model, batch: batch, score=dict, words=[])
    assert ended.value.code == 2
    assert digest(nn.Linear(1, 2)) == digest(nn.Linear(1, 2)) != digest(nn.Linear(2, 1))


def test_random_weights_follow_from_the_seed() -> None:
    first, second, other = (task([1]).build(seed).weight.item() for seed in (1, 1, 2))
    assert first == second != other


def test_every_sample_once_per_epoch() -> None:
    both = [read(list(range(10)), rank, 3, Position()) for rank in (0, 1)]
    assert [[len(rows) for rows in one] for one in both] == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]
    assert sorted(row for one in both for rows in one for row in rows) == list(range(10))
    assert read(list(range(10)), 1, 2, Position(0, 4)) == both[1][2:]


class Numbers(IterableDataset):
    """Ten numbers, of which a rank may get its own half."""

    def __init__(self, *own: int) -> None:
        self.own, self.epochs = own, []

    def __iter__(self) -> Any:
        return iter(range(*self.own, 10, 2) if self.own else range(10))

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch."""
        self.epochs.append(epoch)


def test_a_stream_has_whole_steps_and_goes_on_in_its_middle() -> None:
    assert not is_map_style(Numbers())
    numbers = Numbers()
    first, second = (read(numbers, rank, 3, Position()) for rank in (0, 1))
    assert first == [[0], [2], [4], [6], [8], [0]] and second == [[1], [3], [5], [7], [9], [1]]
    assert numbers.epochs == [0, 1, 0, 1]
    assert read(numbers, 0, 1, Position(0, 8)) == first[4:]
    assert read(Numbers(1), 1, 1, Position(0, 8), shards_itself=True) == second[4:]


def test_what_is_drawn_for_a_sample_is_its_own() -> None:
    class Noisy(list):
        def __getitem__(self, row: Any) -> Any:
            return torch.rand(1).item()

    rows = data._Rows(Noisy(range(4)), list, 42)
    state = torch.random.get_rng_state()
    assert rows[0, [1, 2]].batch == [rows[0, [1]].batch[0], rows[0, [2]].batch[0]]
    assert rows[0, [1]] != rows[1, [1]]
    assert rows[0, []].size == 0 and len(rows[0, []].batch) == 1
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_of_any_shape_go_to_the_device() -> None:
    batch = {"a": torch.ones(1), "b": [torch.ones(1), "text"], "c": (1, torch.ones(1))}
    assert on_device(batch, torch.device("meta"))["b"][0].device.type == "meta"
    assert on_device(batch, torch.device("meta"))["c"][1].device.type == "meta"


def test_one_rank_gathers_its_own() -> None:
    assert gather_metrics({"a": torch.arange(3)})["a"].tolist() == [0, 1, 2]


def test_onnx_by_torch_s_exporter(tmp_path: Path) -> None:
    """As docs/from_ddp.md shows it: safetensors into a model, the model through torch's exporter."""
    pytest.importorskip("onnxscript", reason="needs the packages onnx and onnxscript (pip install onnx onnxscript)")
    from onnx.reference import ReferenceEvaluator

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    export._write(model.state_dict(), {"model": "Sequential"}, tmp_path / "export")
    load_model(model, tmp_path / "export" / "model.safetensors")
    images = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(model.eval(), (images,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    [found] = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"input": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(images).detach(), rtol=1e-4, atol=1e-5)
