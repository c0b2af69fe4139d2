"""Importing a DeepSpeed JSON: the usual tutorial file, "auto", contradictions, and every way to get it wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from toolkit.arguments import parse_checked
from toolkit.config.files import known_recipes
from toolkit.config.load import LoadedConfig, load
from toolkit.config.mesh import model_ranks
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import Device, Dtype, OptimizerName, RunConfig, ScheduleName, StateDtype, WarmupType
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.messages import ConfigError

TUTORIAL: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 2000,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "fp16": {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": False,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "wall_clock_breakdown": False,
}


def recipe(**where: str) -> LoadedConfig:
    """A small recipe; keyword arguments name explicit keys (with __ for dots) and their places."""
    cfg = RunConfig()
    cfg.batch.global_size, cfg.batch.micro_per_gpu = 64, 4
    places = {key.replace("__", "."): place for key, place in where.items()}
    return LoadedConfig(cfg=cfg, where=places, explicit=set(places))


def write(folder: Path, values: object) -> str:
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1), encoding="utf-8")
    return str(path)


def refused(
    folder: Path, values: object, loaded: LoadedConfig | None = None, world_size: int | None = 8, strict: bool = False
) -> str:
    with pytest.raises(ConfigError) as caught:
        import_json(write(folder, values), loaded or recipe(), world_size, strict=strict)
    return str(caught.value).replace(f"{folder}/", "")


def test_tutorial_file(tmp_path: Path) -> None:
    loaded, notes = import_json(write(tmp_path, TUTORIAL), recipe(batch__micro_per_gpu="recipes/x.yaml:7"), 8)
    cfg = loaded.cfg
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu) == (64, 4)
    assert (cfg.precision.dtype, cfg.precision.loss_scale, cfg.precision.initial_scale_power) == (Dtype.fp16, 0, 16)
    assert (cfg.optim.name, cfg.optim.lr, cfg.optim.betas) == (OptimizerName.adamw, 3e-5, [0.8, 0.999])
    assert (cfg.schedule.name, cfg.schedule.warmup_type) == (ScheduleName.constant, WarmupType.log)
    assert cfg.schedule.warmup_steps == 500
    assert cfg.train.activation_checkpointing.enabled and cfg.train.activation_checkpointing.cpu_checkpointing
    assert cfg.train.gradient_clipping == 0.5
    assert (cfg.zero.stage, cfg.zero.offload_param.device) == (3, Device.cpu)
    assert type(cfg.zero.sub_group_size) is int and cfg.zero.stage3_max_live_parameters == 10**9
    assert loaded.where["zero.stage"].endswith("ds.json:46")
    text = "\n".join(notes).replace(f"{tmp_path}/", "")
    assert "ds.json:3: train_micro_batch_size_per_gpu: auto -> 4 (batch.micro_per_gpu, recipes/x.yaml:7)" in text
    assert "gradient_accumulation_steps: auto -> 2 (" in text
    assert "zero_optimization.reduce_bucket_size: auto -> 500000000 (zero.reduce_bucket_size, schema default)" in text
    assert "partition_activations has no effect" in text
    assert "zero_optimization.allgather_partitions has no effect: DeepSpeed 0.19.8 does not read it." in text
    assert "steps_per_print has no effect" in text
    assert "ds.json:27: the section turns recomputation on" in text
    assert 'ds.json:8: "Adam" without "adam_w_mode": false means AdamW' in text


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("torch_adam", [True, False])
def test_pytorchs_adam_is_the_fused_one(tmp_path: Path, torch_adam: bool, fused: bool) -> None:
    params = {"lr": 1e-4, "torch_adam": torch_adam, "fused": fused}
    values = {"train_batch_size": 64, "optimizer": {"type": "AdamW", "params": params}}
    loaded, notes = import_json(write(tmp_path, values), recipe(), 8)
    made = build_ds_config(loaded.cfg, 8).values["optimizer"]["params"]
    assert (made["torch_adam"], made.get("fused", False)) == (torch_adam, torch_adam)
    told = '"fused" follows "torch_adam"' in "\n".join(notes)
    assert told == (fused != torch_adam)


@pytest.mark.parametrize("change", [str, str.lower, str.upper])
@pytest.mark.parametrize("ours", [name for name, kind in OPTIMIZERS.items() if kind.ds_type])
def test_names_of_optimizers_in_any_case(tmp_path: Path, ours: OptimizerName, change: Callable[[str], str]) -> None:
    section = {"type": change(OPTIMIZERS[ours].ds_type), "params": {"adam_w_mode": False}}
    loaded, _ = import_json(write(tmp_path, {"train_batch_size": 64, "optimizer": section}), recipe(), 8)
    assert loaded.cfg.optim.name is ours


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_scheduler_where_the_data_decides_the_steps(tmp_path: Path, name: str) -> None:
    loaded = recipe()
    loaded.cfg.train.epochs, loaded.cfg.schedule.warmup_ratio = 3, 0.03
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"}
    if name == "WarmupDecayLR":
        params |= {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}
    values: dict[str, Any] = {"train_batch_size": 64, "scheduler": {"type": name, "params": params}}
    found, notes = import_json(write(tmp_path, values), loaded, 8)
    text = "\n".join(notes)
    assert (found.cfg.schedule.warmup_ratio, found.cfg.schedule.warmup_type) == (0.03, WarmupType.linear)
    assert "warmup_num_steps: auto -> 0.03 (schedule.warmup_ratio," in text and "no effect" not in text
    assert "total_num_steps: auto -> as many as the data gives" in text
    values["scheduler"]["params"]["warmup_num_steps"] = 0
    assert import_json(write(tmp_path, values), loaded, 8)[0].cfg.schedule.warmup_ratio == 0


def test_export_of_import_keeps_every_value(tmp_path: Path) -> None:
    values = build_ds_config(import_json(write(tmp_path, TUTORIAL), recipe(), 8)[0].cfg, 8).values
    assert values["scheduler"] == {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500, "warmup_type": "log"},
    }
    assert values["optimizer"]["params"]["weight_decay"] == 3e-7
    assert values["zero_optimization"]["offload_optimizer"]["pin_memory"] is True


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_in_bf16_there_and_back(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: 8)
    states = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    loaded, _ = import_json(write(tmp_path, {"bf16": states, "zero_optimization": {"stage": stage}}), recipe(), 8)
    assert loaded.cfg.precision.optimizer_states is StateDtype.bf16
    ds = build_ds_config(loaded.cfg, 8, 100)
    theirs = DeepSpeedConfig(ds.values)
    assert theirs.bfloat16_config.bf16_master_weights_and_grads and theirs.bfloat16_config.bf16_optimizer_states
    assert theirs.grad_accum_dtype == "bf16" and any("Stochastic rounding is omitted" in one for one in ds.missing)
    again, _ = import_json(write(tmp_path, ds.values), recipe(), 8)
    assert again.cfg.precision.optimizer_states is StateDtype.bf16
    loaded.cfg.ds_extra = {"data_types": {"grad_accum_dtype": "fp32"}}
    if stage == 1:  # DeepSpeed would keep fp32 states in silence
        with pytest.raises(ConfigError, match=r"grad_accum_dtype = fp32: zero.stage = 1"):
            build_ds_config(loaded.cfg, 8, 100)


def test_other_keys_go_to_ds_extra(tmp_path: Path) -> None:
    extra = {"zero_optimization": {"stage": 3, "memory_efficient_linear": False}, "prescale_gradients": True}
    cfg = import_json(write(tmp_path, extra), recipe(), 8)[0].cfg
    assert cfg.ds_extra == {"zero_optimization": {"memory_efficient_linear": False}, "prescale_gradients": True}
    assert build_ds_config(cfg, 8).values["zero_optimization"]["memory_efficient_linear"] is False


def test_silence_means_deepspeeds_default(tmp_path: Path) -> None:
    loaded = recipe(zero__reduce_bucket_size="recipes/x.yaml:3")
    loaded.cfg.zero.offload_optimizer.device, loaded.cfg.zero.reduce_bucket_size = Device.cpu, 77
    result, notes = import_json(write(tmp_path, {"zero_optimization": {"stage": 3}}), loaded, 8)
    assert result.cfg.zero.offload_optimizer.device is Device.none
    assert result.cfg.zero.reduce_bucket_size == 77
    assert result.cfg.zero.overlap_comm is True
    assert result.cfg.precision.dtype is Dtype.fp32
    text = "\n".join(notes)
    assert "zero.offload_optimizer.device = none" in text
    assert "gradient_clipping is not given; used is train.gradient_clipping = 1.0 (schema default)" in text


def test_contradictions_are_all_listed(tmp_path: Path) -> None:
    loaded = recipe(zero__stage="recipes/x.yaml:4", optim__lr="command line", precision__dtype="recipes/x.yaml:9")
    text = refused(tmp_path, TUTORIAL, loaded, strict=True)
    assert len(text.splitlines()) == 3
    assert "ds.json:46: zero_optimization.stage gives zero.stage = 3, but recipes/x.yaml:4 says 2." in text
    assert "gives optim.lr = 3e-05, but command line says 2e-05" in text
    assert "gives precision.dtype = fp16, but recipes/x.yaml:9 says bf16" in text
    assert 'write "auto" in the JSON' in text


def test_batch_sizes(tmp_path: Path) -> None:
    cfg = import_json(
        write(tmp_path, {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}), recipe(), 8
    )[0].cfg
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu) == (48, 2)
    wrong = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert "train_batch_size = 64 is not" in refused(tmp_path, wrong)
    assert "give world_size=N" in refused(tmp_path, {"gradient_accumulation_steps": 3}, world_size=None, strict=True)


def test_a_micro_batch_that_is_found_by_training(tmp_path: Path) -> None:
    loaded = recipe(batch__micro_per_gpu="recipes/x.yaml:7")
    loaded.cfg.batch.micro_per_gpu = "auto"
    asked = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": 48}
    cfg, notes = import_json(write(tmp_path, asked), loaded, 8)
    assert (cfg.cfg.batch.global_size, cfg.cfg.batch.micro_per_gpu) == (48, "auto")
    assert "train_micro_batch_size_per_gpu: auto -> auto (batch.micro_per_gpu, recipes/x.yaml:7)" in "\n".join(notes)
    cfg, _ = import_json(write(tmp_path, {"train_micro_batch_size_per_gpu": 2}), loaded, 8)
    assert cfg.cfg.batch.micro_per_gpu == 2
    steps = refused(tmp_path, {"gradient_accumulation_steps": 3}, loaded)
    assert "gradient_accumulation_steps = 3 cannot be with batch.micro_per_gpu = auto" in steps


@pytest.mark.parametrize(
    ("scheduler", "name", "ratios"),
    [
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 90, "warmup_max_lr": 2e-5}}, "linear", (0.0, 0.0)),
        (
            {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 90, "warmup_min_ratio": 0.1, "warmup_num_steps": 9},
            },
            "cosine",
            (0.1, 0.0001),
        ),
    ],
)
def test_schedulers(tmp_path: Path, scheduler: dict[str, Any], name: str, ratios: tuple[float, float]) -> None:
    cfg = import_json(write(tmp_path, {"scheduler": scheduler}), recipe(), 8)[0].cfg
    assert cfg.schedule.name.value == name
    assert cfg.train.max_steps == 90
    assert cfg.schedule.warmup_steps == scheduler["params"].get("warmup_num_steps", 1000)
    assert (cfg.schedule.warmup_min_ratio, cfg.schedule.min_lr_ratio) == ratios
    assert cfg.schedule.warmup_type is WarmupType.log


def test_a_linear_schedule_of_deepspeed_ends_at_its_beginning(tmp_path: Path) -> None:
    params = {"total_num_steps": 90, "warmup_max_lr": 2e-5, "warmup_min_lr": 1e-6}
    loaded, notes = import_json(
        write(tmp_path, {"scheduler": {"type": "WarmupDecayLR", "params": params}}), recipe(), 8
    )
    assert loaded.cfg.schedule.warmup_min_ratio == pytest.approx(0.05)
    assert any("falls to warmup_min_lr = 1e-06; here the learning rate falls to 0" in note for note in notes)


def test_auto_everywhere(tmp_path: Path) -> None:
    auto = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {name: "auto" for name in ("lr", "betas", "eps", "weight_decay")}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                name: "auto" for name in ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
            },
        },
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}},
    }
    loaded = recipe()
    loaded.cfg.schedule.name, loaded.cfg.schedule.warmup_steps = ScheduleName.linear, 5
    loaded.cfg.train.max_steps = 50
    result, notes = import_json(write(tmp_path, auto), loaded, 8)
    assert result.cfg.precision.dtype is Dtype.bf16
    assert result.cfg.zero.stage == 2
    assert result.cfg.optim == loaded.cfg.optim
    assert sum(": auto -> " in note for note in notes) == 13
    assert any("bf16.enabled: auto -> True (precision.dtype, schema default)" in note for note in notes)


def test_all_wrong_types_are_one_message(tmp_path: Path) -> None:
    values = {
        "train_batch_size": 64.5,
        "gradient_clipping": "1.0",
        "zero_optimization": {"stage": "2", "overlap_comm": "Yes", "offload_optimizer": {"device": "gpu"}},
        "fp16": {"enabled": "true"},
        "optimizer": {"type": "AdamW", "params": {"lr": "1e-4", "betas": ["0.9", 0.95], "adam_w_mode": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "many", "warmup_max_lr": "auto"}},
        "tensor_parallel": {"autotp_size": 0},
        "wandb": {"enabled": "on", "project": 7},
        "gradient_cliping": 1,
    }
    wrong = {
        "train_batch_size": "64.5 must be a whole number of at least 1.",
        "gradient_clipping": '"1.0" must be a number (write 1.0).',
        "zero_optimization.stage": '"2" must be a whole number (write 2).',
        "zero_optimization.overlap_comm": '"Yes" must be true or false.',
        "zero_optimization.offload_optimizer.device": "gpu must be one of none, cpu, nvme.",
        "fp16.enabled": '"true" must be true or false (write true).',
        "optimizer.params.lr": '"1e-4" must be a number (write 1e-4).',
        "optimizer.params.betas": '["0.9", 0.95] must be a list of numbers.',
        "optimizer.params.adam_w_mode": "1 must be true or false.",
        "scheduler.params.warmup_num_steps": '"many" must be a number.',
        "wandb.enabled": '"on" must be true or false.',
        "wandb.project": "7 must be a text.",
    }
    found = refused(tmp_path, values)
    assert found.startswith("13 errors:\n1. ds.json:") and "'gradient_cliping'" in found
    assert re.findall(r": ([\w.]+) = (.+)", found) == list(wrong.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{\n ,", "ds.json:2:2: this is not JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "ds.json: a DeepSpeed JSON must be an object, {...}."),
        ('{"fp16": {},\n "fp16": {}}', "ds.json:2: 'fp16' stands twice, first at"),
        (
            '{\n"zero_optimisation": {"stage": 3}}',
            "ds.json:2: DeepSpeed has no key 'zero_optimisation'. Did you mean 'zero_optimization'?",
        ),
        ({"gradient_cliping": 1.0}, "Did you mean 'gradient_clipping'?"),
        (
            {"stage3_gather_16bit_weights_on_model_save": True},
            "ds.json:2: 'stage3_gather_16bit_weights_on_model_save' is in the wrong section. "
            "It belongs to 'zero_optimization.stage3_gather_16bit_weights_on_model_save'.",
        ),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "'activation_checkpointing.partition_activations'",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "Did you mean 'optimizer.params.lr'?"),
        ({"data_efficiency": {"enabled": True}}, "'data_efficiency' works with DeepSpeed's own data loader and layers"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "OneBitAdam was removed from DeepSpeed."),
        (
            {"optimizer": {"type": "Lamb", "params": {}}},
            "Lamb is not available. There are AdamW, Adam, Muon, Lion, Adafactor, SGD, Adagrad.",
        ),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "There are WarmupLR, WarmupDecayLR, WarmupCosineLR."),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled."),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "ds.json:4: bf16_master_weights_and_grads and"),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 0.5}},
            "reduce_bucket_size = 0.5 must be a whole number.",
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "must be one of none, cpu, nvme"),
        ({"zero_optimization": {"overlap_comm": "true"}}, '= "true" must be true or false (write true).'),
        ({"zero_optimization": True}, "'zero_optimization' is a section"),
        ({"train_batch_size": "64"}, 'train_batch_size = "64" must be a whole number of at least 1.'),
        ({"gradient_accumulation_steps": 0}, "must be a whole number of at least 1."),
        ({"zero": {"stage": 3}}, "DeepSpeed has no key 'zero'"),
        ({"fp_16": {"enabled": True}}, "Did you mean 'fp16'?"),
        ({"model_type": "llama", "architectures": []}, "none of its keys is DeepSpeed's; the first is 'model_type'."),
        ({"lr": 1}, "is in the wrong section"),
        ({"learning_rate": 1}, "DeepSpeed has no key 'learning_rate'."),
        ({"optimizer": {"type": "Adam", "learning_rate": 1}}, "DeepSpeed has no key 'optimizer.learning_rate'."),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "warmup_max_lr = 0.001, but the optimizer's lr"),
    ],
)
def test_refused(tmp_path: Path, values: object, message: str) -> None:
    assert message in refused(tmp_path, values)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.json cannot be read: No such file"):
        import_json(str(tmp_path / "nowhere.json"), recipe(), 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("schedule", list(ScheduleName))
def test_round_trip_of_every_kind(tmp_path: Path, stage: int, dtype: Dtype, schedule: ScheduleName) -> None:
    cfg = recipe().cfg
    cfg.zero.stage, cfg.precision.dtype, cfg.optim.name = stage, dtype, OptimizerName.adam
    cfg.schedule.name, cfg.schedule.warmup_steps, cfg.schedule.warmup_min_ratio = schedule, 7, 0.03
    cfg.zero.offload_optimizer.device = Device.nvme if stage == 3 else Device.cpu if stage else Device.none
    cfg.zero.offload_optimizer.nvme_path = "/nvme" if stage == 3 else ""
    cfg.train.activation_checkpointing.enabled = cfg.track.csv.enabled = cfg.profile.flops.enabled = True
    cfg.train.gradient_clipping, cfg.ds_extra = 0.0, {"prescale_gradients": True}
    exported = build_ds_config(cfg, 8, 1000).values
    result, _ = import_json(write(tmp_path, exported), recipe(), 8)
    assert build_ds_config(result.cfg, 8, 1000).values == exported


@pytest.mark.parametrize("name", known_recipes())
def test_round_trip(name: str, tmp_path: Path) -> None:
    loaded = load([f"recipe={name}"])
    ranks = max(2, model_ranks(loaded.cfg))
    exported = build_ds_config(loaded.cfg, ranks, 1000).values
    result, _ = import_json(write(tmp_path, exported), loaded, ranks)
    assert build_ds_config(result.cfg, ranks, 1000).values == exported


FOUND = sorted((Path(__file__).parent / "deepspeed_json").glob("*.json"))
"""As LLaMA-Factory and the ChatGLM repositories have them: "auto" everywhere, and what DeepSpeed ignores."""


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [None, 2])
def test_files_that_people_have_work_with_a_recipe(path: Path, ranks: int | None, tmp_path: Path) -> None:
    words = ["recipe=chatglm", "model=glm_tiny", "data=docstrings", f"run.dir={tmp_path}", f"deepspeed_json={path}"]
    cfg = parse_checked(words, world_size=ranks).loaded.cfg
    values = json.loads(path.read_text())
    assert cfg.zero.stage == values["zero_optimization"]["stage"]
    made = build_ds_config(cfg, ranks or cfg.parallel.tensor).values
    assert '"auto"' not in json.dumps(made)
    assert made.get("zero_allow_untested_optimizer") == values.get("zero_allow_untested_optimizer")


def test_there_are_ten_of_them() -> None:
    assert len(FOUND) == 10


def test_the_file_beats_the_recipe_and_loses_to_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "fp16": {"enabled": True}})
    words = ["recipe=chatglm", "model=glm_tiny", "data=docstrings", f"deepspeed_json={path}", f"run.dir={tmp_path}"]
    arguments = parse_checked([*words, "train.gradient_clipping=2", "precision=fp32"], world_size=2)
    cfg, notes = arguments.loaded.cfg, "\n".join(arguments.notes)
    assert (cfg.zero.stage, cfg.train.gradient_clipping, cfg.precision.dtype) == (1, 2.0, Dtype.fp32)
    assert "takes the place of: zero.stage = 3 (conf/zero/stage3.yaml:2) -> 1" in notes
    assert "gradient_clipping = 0.5 gives way to train.gradient_clipping = 2.0 on the command line" in notes
    assert "fp16.enabled = fp16 gives way to precision.dtype = fp32 on the command line" in notes


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"_comment": "mine"}, "ds.json:2: DeepSpeed ignores _comment."),
    ({"comms_config": {"verbose": False}}, "ds.json:2: DeepSpeed ignores comms_config."),
    ({"curriculum_learning": {}}, "DeepSpeed ignores curriculum_learning; data.curriculum does what it did."),
    ({"elasticity": {"enabled": True}}, "DeepSpeed ignores elasticity; batch.world_sizes does what it did."),
    ({"data_efficiency": {"enabled": False}}, "DeepSpeed ignores data_efficiency."),
    ({"fp16": {"enabled": False, "hysteresis": 9, "any": 1}}, "fp16 is disabled: its other keys have no effect."),
    (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        "zero_optimization.cpu_offload is an old name, read as zero_optimization.offload_optimizer.device = cpu.",
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        "is an old name, read as zero_optimization.stage3_gather_16bit_weights_on_model_save.",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine", "last_batch_iteration": -1}}},
        "DeepSpeed has no warmup_type 'cosine' and takes log.",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "torch.float16", "lower_precision_safe_modules": ["a.B"]}},
        "ds.json:3: torch_autocast is not used. In its place is precision.dtype = fp16",
    ),
    (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        },
        "ds.json:4: master weights and optimizer states stay in fp32: in bf16, DeepSpeed's Adam on the CPU would lose",
    ),
    ({"prescale_gradients": "auto"}, 'no setting of the recipe can replace "auto": omitted.'),
    ({"gradient_accumulation_steps": 3}, "says nothing without the number of ranks: give world_size=N."),
]


@pytest.mark.parametrize(("values", "note"), IGNORED)
def test_what_deepspeed_ignores_is_listed(values: dict[str, Any], note: str, tmp_path: Path) -> None:
    result, notes = import_json(write(tmp_path, values), recipe(), None)
    assert any(note in line for line in notes)
    if "cpu_offload" in note:
        assert result.cfg.zero.offload_optimizer.device is Device.cpu


def test_the_schedulers_peak_is_the_learning_rate(tmp_path: Path) -> None:
    values = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}}
    assert import_json(write(tmp_path, values), recipe(), 8)[0].cfg.optim.lr == 0.25


def test_sizes_fit_to_the_one_that_the_file_gives(tmp_path: Path) -> None:
    loaded = recipe(batch__global_size="recipes/x.yaml:1", batch__micro_per_gpu="recipes/x.yaml:2")
    batch = import_json(write(tmp_path, {"train_batch_size": 16}), loaded, 8)[0].cfg.batch
    assert (batch.global_size, batch.micro_per_gpu) == (16, 2)
    batch = import_json(write(tmp_path, {"train_micro_batch_size_per_gpu": 6}), loaded, 8)[0].cfg.batch
    assert (batch.global_size, batch.micro_per_gpu) == (48, 6)
    both = {"train_batch_size": 16, "gradient_accumulation_steps": 1}
    assert import_json(write(tmp_path, both), loaded, 8)[0].cfg.batch.micro_per_gpu == 2


def test_a_norm_among_the_optimizers_parameters_is_an_error(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 raises a ValueError for it, and clips by gradient_clipping."""
    values = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 0.5}}}
    with pytest.raises(ConfigError, match=r"'optimizer\.params\.max_grad_norm'. Did you mean 'gradient_clipping'\?"):
        import_json(write(tmp_path, values), recipe(), None)
