"""A program's own model and data: what is refused, and with which words; which rank reads which sample."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from toolkit import custom
from toolkit.config.load import load
from toolkit.config.rules import check_rules, check_without_validation
from toolkit.data.sampler import Position
from toolkit.distributed import process_group
from toolkit.distributed.row_exchange import gather_metrics
from toolkit.export import custom as export
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, DataError
from toolkit.tasks import custom as custom_task, custom_data
from toolkit.tasks.custom import (
    CustomSpec,
    _metrics_of_batch,
    cast_inputs,
    evaluate,
    losses_of,
    on_device,
    structure_digest,
)
from toolkit.tasks.custom_data import is_map_style
from toolkit.train.schedule import warn_of_short_run

ENGINE: Any = SimpleNamespace(device=torch.device("cpu"))


def loaded(*words: str) -> Any:
    """Return the config of a program."""
    return load([f"recipe={custom._BASE}", "batch.global_size=4", "batch.micro_per_gpu=1", *words])


def task(dataset: Any, **more: Any) -> CustomSpec:
    """Return a program's parts."""
    return CustomSpec(
        **{"model": lambda: nn.Linear(1, 1), "dataset": dataset, "loss": lambda model, batch: batch, **more}
    )


def read(dataset: Any, rank: int, steps: int, place: Position, *words: str, **more: Any) -> list[Any]:
    """Return what one of two ranks reads."""
    ranks = Ranks(rank=rank, local_rank=rank, world_size=2, local_world_size=2, launcher="single")
    found = custom_data.open_dataset(
        task(dataset, collate=list, **more), loaded("train.max_steps=9", *words).cfg, ranks
    )
    return [one.batch[: one.size] for one in found.batches_from(place, steps)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=/x"], "model.path = /x has no effect: the program brings its own model, data and loss"),
        (["tuning=lora"], "tuning.method = lora has no effect: the program brings its own model"),
        (["data.max_length=77"], "data.max_length = 77 has no effect"),
        (["train.activation_checkpointing.enabled=true"], "enabled = true has no effect"),
        (["parallel.tensor=2"], "parallel.tensor = 2: how to split a custom model is not known"),
        (["precision=fp8"], "precision.fp8 = tensorwise: which parameters of a custom model"),
        (["batch.micro_per_gpu=auto"], "batch.micro_per_gpu = auto: the memory of a custom model is unknown"),
        (["plan.auto=true"], "plan.auto = true: the memory of a custom model is unknown"),
        (
            ["optim.decay=hidden", "optim.weight_decay=0.1"],
            "optim.decay = hidden: which parameters of a custom model",
        ),
        (["optim.layer_lr_decay=0.9"], r"optim.layer_lr_decay = 0.9: which parameters .* Possible: 1"),
        (["evaluate.keep_best=accuracy"], "evaluate.keep_best = accuracy must be eval_loss, or eval_ and the name"),
        (["batch.micro_per_gpu=3"], "batch.global_size = 4 is not a multiple of batch.micro_per_gpu"),
    ],
)
def test_settings_that_cannot_be(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rules(loaded(*words), 2, custom=True)


def test_settings_that_can_be() -> None:
    check_rules(
        loaded("zero=stage3", "data.num_workers=2", "evaluate.keep_best=eval_f1", "evaluate.every=3"), 2, custom=True
    )


@pytest.mark.parametrize(
    ("dataset", "words", "more", "message"),
    [
        (3, [], {}, "int is no dataset: it needs __len__ and __getitem__, or __iter__"),
        ([], [], {}, "the dataset is empty"),
        ([1], [], {"shards_itself": True}, "shards_itself= is for iterable datasets"),
        (DataLoader([1]), [], {}, "give the dataset, not a DataLoader"),
        ([1], [], {"validation": DataLoader([1])}, "give the dataset, not a DataLoader"),
        (
            iter([1]),
            [],
            {"validation": iter([1]), "shards_itself": True},
            "validation= must give every rank all samples",
        ),
        (iter([1]), ["train.max_steps=0"], {}, "has no length: say how long to train"),
        (iter([1]), ["data.num_workers=1"], {}, "data.num_workers = 1: an iterable dataset is read by the training"),
        (iter([]), [], {}, "list_iterator gives no sample"),
        (iter([1, 2]), [], {}, r"list_iterator ends for good: iter\(\) of it must start again"),
    ],
)
def test_data_that_cannot_be(dataset: Any, words: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(dataset, 0, 2, Position(), *words, **more)


@pytest.mark.parametrize(
    ("version", "warns"), [((3, 10, 14), 1), ((3, 10, 15), 0), ((3, 11, 9), 1), ((3, 11, 10), 0), ((3, 12, 0), 0)]
)
def test_forks_that_may_hang_are_told(
    version: tuple[int, ...], warns: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_data.sys, "version_info", version)
    read([1, 2, 3, 4], 0, 0, Position(), "data.num_workers=1")
    assert len([line for line in said if "a forked data-loader process can hang" in line]) == warns


def test_settings_of_evaluations_without_validation_data() -> None:
    for word in ("evaluate.every=3", "evaluate.at_start=false", "evaluate.keep_best=eval_loss"):
        with pytest.raises(ConfigError, match="has no effect: the program gives no validation="):
            check_without_validation(loaded(word))
    check_without_validation(loaded("data.num_workers=2"))


def test_ranks_have_the_same_data_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="single")
    compared: list[Mapping[str, str]] = []

    def told(config: Any, mine: Mapping[str, str], error: type[Exception]) -> None:
        compared.append(mine)
        if mine != compared[0]:
            raise error("ranks differ.")

    monkeypatch.setattr(process_group, "check_alike", told)

    def begun(count: int, outputs: int) -> custom_task.CustomTask:
        mine = custom_task.CustomTask(task([1] * count, model=lambda: nn.Linear(1, outputs)))
        mine.begin(loaded().cfg, ranks)
        return mine

    begun(8, 1).settle(loaded().cfg)
    for other in (begun(7, 1), begun(8, 2)):
        with pytest.raises(DataError, match=r"ranks differ. Give every rank the whole dataset"):
            other.settle(loaded().cfg)


@pytest.mark.parametrize(
    ("dataset", "given", "told"),
    [
        ([1] * 8, [], ["too few optimizer steps to learn much: 2 (8 samples, 4 per step, train.epochs=1); 50"]),
        ([1] * 800, [], []),
        ([1] * 800, ["train.max_steps=7"], ["train.max_steps = 7: enough to try the recipe out, too few to learn."]),
        (iter, ["train.max_steps=7"], ["train.max_steps = 7: enough"]),
        (
            [1] * 800,
            ["schedule.warmup_steps=5", "schedule.warmup_min_ratio=0"],
            ["schedule.warmup_min_ratio = 0.0 lets the learning rate begin at 0"],
        ),
    ],
    ids=["short epoch", "long", "short", "short stream", "no rate"],
)
def test_a_run_that_cannot_learn_is_reported(dataset: Any, given: list[str], told: list[str], said: list[str]) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

    ranks = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="single")
    cfg = loaded(*given).cfg
    mine = custom_task.CustomTask(task(Endless() if dataset is iter else dataset))
    mine.begin(cfg, ranks)
    said.clear()
    warn_of_short_run(cfg, mine.epoch, mine.total_steps, 2)
    assert len(said) == len(told)
    assert all(text in line for text, line in zip(told, said, strict=True))


def test_validation_data_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="single")
    monkeypatch.setattr(process_group, "gather", lambda value: [value, 3])
    for there in (0, 2):
        with pytest.raises(DataError, match="validation= must give every rank all samples"):
            list(custom_data.validation_batches(task([1], validation=[1] * there), loaded().cfg, ranks))
    assert len(list(custom_data.validation_batches(task([1], validation=[1] * 3), loaded().cfg, ranks))) == 2


class Engine(nn.Module):
    """What an evaluation asks of an engine."""

    device = torch.device("cpu")

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """Run the model."""
        return self.module(batch)


def evaluated(words: tuple[str, ...] = (), most: int | None = None, **more: Any) -> dict[str, float]:
    """Return the evaluation of three samples."""
    rows = [torch.tensor([float(row)]) for row in range(3)]
    parts = task(rows, validation=rows, loss=lambda model, batch: model(batch)[:, 0], **more)
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")
    engine: Any = Engine(nn.Identity())
    return evaluate(parts, loaded(*words).cfg, ranks, engine, most=most)


def test_a_trial_does_not_score() -> None:
    parts: dict[str, Any] = {
        "metrics": lambda model, batch: {"value": batch[:, 0]},
        "score": lambda values: {"range": values["value"].max() / (len(values["value"]) - 1)},
    }
    assert evaluated(**parts) == {"eval_loss": 1, "eval_samples": 3, "eval_range": 1}
    assert evaluated(most=1, **parts).keys() == {"eval_loss", "eval_samples"}


def test_the_best_is_chosen_by_a_figure_that_is_there() -> None:
    words = ("evaluate.keep_best=eval_acuracy",)
    metrics = {"metrics": lambda model, batch: {"accuracy": batch[:, 0]}}
    with pytest.raises(DataError, match=r"= eval_acuracy, and .* no such figure. Known: eval_loss, eval_accuracy"):
        evaluated(words, **metrics)
    assert evaluated(words, most=1, **metrics) and evaluated(("evaluate.keep_best=eval_accuracy",), **metrics)


def test_a_model_that_is_not_made_again(tmp_path: Path) -> None:
    export.write_custom(nn.Linear(1, 1).state_dict(), {}, tmp_path / "export")
    custom_task._verify_export(task([1]), 1, tmp_path / "export")
    with pytest.raises(
        CheckpointError, match="model= failed when it was called once more, ZeroDivisionError: division"
    ):
        custom_task._verify_export(task([1], model=lambda: 1 / 0), 1, tmp_path / "export")
    with pytest.raises(CheckpointError, match="does not hold its model: RuntimeError"):
        custom_task._verify_export(task([1], model=lambda: nn.Linear(2, 1)), 1, tmp_path / "export")


def test_empty_tensors_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("none", torch.zeros(0, 3))
        return model

    monkeypatch.setattr(export, "gathered_parameters", lambda module: module.state_dict().items())
    export.export_custom(Engine(make()), {}, tmp_path / "export")  # type: ignore[arg-type]
    custom_task._verify_export(task([1], model=make), 1, tmp_path / "export")


def test_inputs_of_any_shape_are_cast() -> None:
    class Model(nn.Module):
        def forward(self, first: Any, second: Any) -> list[torch.dtype]:
            return [first["a"].dtype, first["b"][0].dtype, second[0].dtype]

    model, one = Model(), torch.ones(1)
    cast_inputs(model, torch.bfloat16)
    found = model({"a": one, "b": [one]}, second=(one.long(),))
    assert found == [torch.bfloat16, torch.bfloat16, torch.int64]


def test_a_loss_is_one_number_per_sample() -> None:
    micro = custom_data.MicroBatch(torch.ones(3, 2), 3)
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
        _metrics_of_batch(
            task([1], metrics=lambda model, batch: values), ENGINE, custom_data.MicroBatch(torch.ones(3), 3)
        )


def test_models_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module or make one, and is int"):
        task([1], model=lambda: 3).build(1)
    with pytest.raises(ConfigError, match="nothing in Linear is trained"):
        task([1], model=nn.Linear(1, 1).requires_grad_(False)).build(1)
    with pytest.raises(SystemExit) as ended:
        custom.train(nn.Linear(1, 1), [1], lambda model, batch: batch, score=dict, words=[])
    assert ended.value.code == 2
    assert structure_digest(nn.Linear(1, 2)) == structure_digest(nn.Linear(1, 2)) != structure_digest(nn.Linear(2, 1))


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

    rows = custom_data._MicroBatchReader(Noisy(range(4)), list, 42)
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
    export.write_custom(model.state_dict(), {"model": "Sequential"}, tmp_path / "export")
    load_model(model, tmp_path / "export" / "model.safetensors")
    images = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(model.eval(), (images,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    [found] = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"input": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(images).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ([], "toolkit/custom.yaml"),
        (["deepspeed_json=ds.yaml"], "toolkit/custom.yaml"),
        (["recipe=typed"], "typed"),
        (["typed.yaml"], "typed.yaml"),
    ],
)
def test_a_typed_recipe_takes_the_place_of_the_program_s(
    words: list[str], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(custom, "_run", lambda parts, settings, folders: seen.append(settings) or 2)
    with pytest.raises(SystemExit):
        custom.train(nn.Linear(1, 1), [1], lambda model, batch: batch, words=words)
    named = [word for word in seen[0] if word.endswith(recipe)]
    assert len(named) == 1 and len(seen[0]) == max(1, len(words) + (recipe == "toolkit/custom.yaml"))
