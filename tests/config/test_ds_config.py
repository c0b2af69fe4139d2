"""The exported JSON: accepted by DeepSpeed's own parser, complete, explained, and closed to unknown names."""

import itertools
import json
from pathlib import Path
from typing import Any

import deepspeed.comm
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from generate_ds_keys import key_table

from toolkit.config.dotted_keys import leaves
from toolkit.config.files import known_recipes
from toolkit.config.load import LoadedConfig, load
from toolkit.config.mesh import model_ranks
from toolkit.config.schema import Device, Dtype, OptimizerName, RunConfig, ScheduleName
from toolkit.engine.ds_config import OWNED, build_ds_config, read_key
from toolkit.engine.ds_keys import json_keys
from toolkit.extras.cli.export_config import explain
from toolkit.messages import ConfigError

ROOT = Path(__file__).parents[2]
WORLD = 8
COMBINATIONS = [
    (stage, dtype, optimizer, parameters)
    for stage, dtype, optimizer, parameters in itertools.product((0, 1, 2, 3), Dtype, Device, Device)
    if (optimizer is Device.none or stage > 0)
    and (optimizer is not Device.nvme or stage == 3)
    and (parameters is Device.none or stage == 3)
]


def make_config(stage: int = 2, dtype: Dtype = Dtype.bf16) -> RunConfig:
    cfg = RunConfig()
    cfg.batch.global_size, cfg.batch.micro_per_gpu = 64, 4
    cfg.zero.stage, cfg.precision.dtype = stage, dtype
    return cfg


def parsed(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, world: int = WORLD) -> DeepSpeedConfig:
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: world)
    return DeepSpeedConfig(json.loads(json.dumps(values)))


@pytest.mark.parametrize(("stage", "dtype", "optimizer", "parameters"), COMBINATIONS)
def test_deepspeed_reads_what_was_written(
    stage: int, dtype: Dtype, optimizer: Device, parameters: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(stage, dtype)
    cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device = optimizer, parameters
    cfg.zero.offload_optimizer.nvme_path = cfg.zero.offload_param.nvme_path = "/nvme"
    cfg.zero.reduce_bucket_size, cfg.zero.stage3_prefetch_bucket_size = 123, 456
    ds = build_ds_config(cfg, WORLD, 100)
    theirs = parsed(ds.values, monkeypatch)
    assert (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu) == (64, 4)
    assert theirs.gradient_accumulation_steps == 2
    assert (theirs.float16_config.enabled, theirs.bfloat16_config.enabled) == (dtype is Dtype.fp16, dtype is Dtype.bf16)
    zero = theirs.zero_config.model_dump(by_alias=True)
    for key, value in leaves(ds.values["zero_optimization"]):
        read = zero
        for name in key.split("."):
            read = read[name]
        assert (str(read) if key.endswith("nvme_path") else read) == value, key
    assert theirs.zero_config.stage == stage
    assert (zero["offload_optimizer"] or {"device": "none"})["device"] == optimizer.value
    assert (zero["offload_param"] or {"device": "none"})["device"] == parameters.value
    assert ("aio" in ds.values) == (Device.nvme in (optimizer, parameters))
    assert ("sub_group_size" in ds.values["zero_optimization"]) == (stage == 3)


def test_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make_config(3, Dtype.fp16)
    cfg.train.gradient_clipping, cfg.optim.name = 0, OptimizerName.adam
    checkpointing = cfg.train.activation_checkpointing
    checkpointing.enabled = checkpointing.partition_activations = checkpointing.contiguous_memory_optimization = True
    checkpointing.number_checkpoints = 28
    cfg.track.csv.enabled = cfg.track.tensorboard.enabled = cfg.track.wandb.enabled = True
    cfg.profile.flops.enabled = cfg.profile.comms.enabled = cfg.profile.dump_state = True
    ds = build_ds_config(cfg, WORLD, 100)
    theirs = parsed(ds.values, monkeypatch)
    assert theirs.gradient_clipping == 0.0
    assert theirs.optimizer_name == "adam"
    assert theirs.optimizer_params["adam_w_mode"] is False
    assert theirs.activation_checkpointing_config.number_checkpoints == 28
    assert theirs.activation_checkpointing_config.contiguous_memory_optimization is True
    assert not theirs.monitor_config.enabled, "trackers of our own write"
    assert theirs.flops_profiler_config.enabled and theirs.comms_config.comms_logger.enabled
    for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "loss_scale", "auto_cast"):
        assert getattr(theirs.float16_config, name) == getattr(cfg.precision, name)


def test_nothing_is_left_open() -> None:
    for stage, dtype in itertools.product((0, 1, 2, 3), Dtype):
        for key, value in leaves(build_ds_config(make_config(stage, dtype), WORLD, 100).values):
            assert value is not None and value != "auto" and value != {}, key


@pytest.mark.parametrize(
    ("stage", "device", "dtype", "expected"),
    [
        (0, Device.none, Dtype.bf16, "bf16"),
        (1, Device.none, Dtype.bf16, "fp32"),
        (2, Device.none, Dtype.bf16, "fp32"),
        (2, Device.cpu, Dtype.bf16, "bf16"),
        (3, Device.cpu, Dtype.bf16, "fp32"),
        (3, Device.none, Dtype.fp16, "fp16"),
        (2, Device.none, Dtype.fp32, "fp32"),
    ],
)
def test_gradient_accumulation_dtype(stage: int, device: Device, dtype: Dtype, expected: str) -> None:
    cfg = make_config(stage, dtype)
    cfg.zero.offload_optimizer.device = device
    assert build_ds_config(cfg, WORLD, 9).values["data_types"]["grad_accum_dtype"] == expected


def test_scheduler_is_named_or_reported_missing() -> None:
    cfg = make_config()
    ds = build_ds_config(cfg, WORLD, 100)
    assert "scheduler" not in ds.values
    assert "schedule.name = cosine without warm-up has no equal" in ds.missing[0]
    cfg.schedule.warmup_ratio = 0.03
    assert "depends on the number of steps" in build_ds_config(cfg, WORLD).missing[0]
    ds = build_ds_config(cfg, WORLD, 100)
    assert ds.values["scheduler"]["params"]["warmup_num_steps"] == 3
    assert ds.values["scheduler"]["params"]["warmup_min_ratio"] == 1 / 3
    [missing] = ds.missing
    assert "WarmupCosineLR takes the first step at a learning rate of 0" in missing
    cfg.schedule.name, cfg.schedule.warmup_ratio = ScheduleName.constant, 0.0
    ds = build_ds_config(cfg, WORLD)
    assert "scheduler" not in ds.values and ds.missing == []


def test_explain_covers_every_leaf() -> None:
    cfg = make_config(3)
    cfg.ds_extra = {"zero_optimization": {"memory_efficient_linear": False}}
    ds = build_ds_config(cfg, WORLD, 100)
    assert set(ds.why) == {key for key, _ in leaves(ds.values)}
    for key, why in ds.why.items():
        if not why.startswith(("=", "ds_extra.")):
            assert read_key(cfg, why) is not None, key
    where = {"zero.stage": "conf/zero/stage3.yaml:2", "ds_extra": "recipes/x.yaml:9"}
    table = explain(ds, LoadedConfig(cfg=cfg, where=where))
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert set(lines) == set(ds.why)
    assert lines["zero_optimization.stage"].endswith("zero.stage  (conf/zero/stage3.yaml:2)")
    assert lines["gradient_clipping"].endswith("train.gradient_clipping  (schema default)")
    assert lines["zero_optimization.memory_efficient_linear"].endswith("(recipes/x.yaml:9)")
    assert "= batch.global_size 64 / (batch.micro_per_gpu 4 x 8 ranks)" in lines["gradient_accumulation_steps"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"zero_optimisation": {}}, "DeepSpeed has no key 'zero_optimisation'. Did you mean 'zero_optimization'?"),
        ({"gradient_cliping": 1}, "DeepSpeed has no key 'gradient_cliping'. Did you mean 'gradient_clipping'?"),
        ({"zero_optimization": {"stag": 3}}, "Did you mean 'zero_optimization.stage'?"),
        ({"zero_optimization": {"stage": 3}}, "set zero.stage instead"),
        ({"fp16": {"enabled": True}}, "set precision.dtype instead"),
        ({"scheduler": {"type": "WarmupLR"}}, "set schedule.name instead"),
        ({"elasticity": {"enabled": True}}, "removed from DeepSpeed. Take it out, and use batch.world_sizes instead"),
        ({"amp": {"enabled": True}}, "'amp' belongs to a feature that was removed from DeepSpeed. Take it out."),
        (
            {"zero_optimization": {"mics_shard_size": 2}},
            "removed from DeepSpeed. Take it out, and use zero.zero_hpz_partition_size instead",
        ),
        (
            {"zero_optimization": {"mics_hierarchical_params_gather": True}},
            "belongs to a feature that was removed from DeepSpeed. Take it out.",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "Write 'zero_optimization.offload_optimizer'."),
        ({"stage3_max_live_parameters": 1}, "It belongs to 'zero_optimization.stage3_max_live_parameters'."),
        ({"prescale_gradients": "auto"}, "needs a value"),
        ({"data_types": "fp32"}, "'data_types' is a section"),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow: cannot be false"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "is judged by the norm of its gradient"),
    ],
)
def test_extra_is_checked(extra: dict[str, Any], message: str) -> None:
    cfg = make_config()
    cfg.ds_extra = extra
    with pytest.raises(ConfigError) as caught:
        build_ds_config(cfg, WORLD, 100)
    assert str(caught.value).startswith("ds_extra.")
    assert message in str(caught.value)


def test_extra_reaches_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = make_config()
    cfg.ds_extra = {"prescale_gradients": True, "data_types": {"grad_accum_dtype": "bf16"}, "steps_per_print": 5}
    ds = build_ds_config(cfg, WORLD, 100)
    theirs = parsed(ds.values, monkeypatch)
    assert (theirs.prescale_gradients, theirs.grad_accum_dtype, theirs.steps_per_print) == (True, "bf16", 5)
    assert ds.why["prescale_gradients"] == "ds_extra.prescale_gradients"


def test_every_owned_key_exists_on_both_sides() -> None:
    known = set(json_keys())
    for theirs, ours in OWNED.items():
        # The table knows tensor_parallel as a whole; that DeepSpeed takes its keys is shown in test_tensor.py.
        assert theirs in known or theirs.startswith("tensor_parallel.")
        read_key(RunConfig(), ours)


def test_key_table_is_fresh() -> None:
    written = (ROOT / "toolkit" / "engine" / "ds_keys.json").read_text(encoding="utf-8")
    assert key_table() == written, "run scripts/generate_ds_keys.py"


@pytest.mark.parametrize("recipe", known_recipes())
def test_recipe_snapshot(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cfg = load([f"recipe={recipe}"]).cfg
    ranks = max(2, model_ranks(cfg))
    values = build_ds_config(cfg, ranks, 1000).values
    parsed(values, monkeypatch, world=ranks)
    golden = ROOT / "tests" / "golden" / "ds_config" / f"{recipe}.json"
    assert values == json.loads(golden.read_text(encoding="utf-8")), "run scripts/record_golden.py if this is meant"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["precision.communication_dtype=fp32"], {"communication_data_type": "fp32"}),
        (
            ["precision.communication_dtype=bf16", "parallel=sequence", "parallel.sequence=2"],
            {"seq_parallel_communication_data_type": "bf16"},
        ),
    ],
)
def test_the_type_in_which_gradients_travel(
    words: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed takes the model's type, or with sequence parallelism fp32, unless told."""
    values = build_ds_config(load(["recipe=chatglm", "batch.global_size=64", *words]).cfg, WORLD).values
    assert {key: value for key, value in values.items() if "communication" in key} == expected
    config = parsed(values, monkeypatch)
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    assert all(str(getattr(config, key)) == names[value] for key, value in expected.items())
