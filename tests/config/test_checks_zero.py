"""What goes beyond ZeRO's stages: accepted by DeepSpeed's own parser, refused where it cannot be."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import deepspeed.comm
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig

from toolkit.checkpoint.directory import RunState
from toolkit.config import requirements
from toolkit.config.dotted_keys import leaves
from toolkit.config.load import LoadedConfig, load
from toolkit.config.rules import check_rules
from toolkit.config.schema import Device
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.messages import CheckpointError, ConfigError
from toolkit.plan.layouts import evaluate_layout
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import plan_rank
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.outline import with_tuning
from toolkit.plan.planned_machine import parse_machine
from toolkit.plan.search import fastest, layouts, overrides, with_layout
from toolkit.plan.speed import assumed
from toolkit.plan.summary import plan_lines
from toolkit.train.resume import _check_layout

ZENFLOW = "zero=stage2_zenflow train.rehearse=false train.on_bad_step=stop batch.global_size=8"
WHY = " cannot be with the other settings; docs/zero.md says why. Add "
END = ", or leave it out."
# Words after `recipe=zero1 model=glm_tiny`, on 8 ranks -> message
REFUSED = {
    "zero=stage3_superoffload train.on_bad_step=rewind checkpoint.every=10": (
        f"zero.offload_optimizer.super_offload = true{WHY}train.on_bad_step=skip{END}"
    ),
    "zero=stage3_superoffload precision=fp16 train.gradient_clipping=0 train.rehearse=false train.on_bad_step=stop": (
        f"zero.offload_optimizer.super_offload = true{WHY}precision=bf16{END}"
    ),
    "zero=stage3_hpz zero.zero_hpz_partition_size=3": (
        "zero.zero_hpz_partition_size = 3 must divide the 8 ranks of the run. Set it to the number of GPUs per node: "
        "zero.zero_hpz_partition_size=2."
    ),
    "zero=stage2 zero.zero_hpz_partition_size=2": (
        "zero.zero_hpz_partition_size = 2 has no effect: zero.stage is 2. Remove it, or set "
        "zero.zero_hpz_partition_size=1."
    ),
    "zero=stage3_hpz zero.offload_param.device=cpu": (
        f"zero.zero_hpz_partition_size = 8{WHY}zero.offload_param.device=none{END}"
    ),
    "zero=stage3_hpz parallel.sequence=2": f"zero.zero_hpz_partition_size = 8{WHY}parallel.sequence=1{END}",
    "zero=stage3_zeropp": f"zero.zero_quantized_gradients = true{WHY}precision=fp16{END}",
    "zero=stage3_hpz compile=deepcompile": (f"compile.deepcompile = true{WHY}zero.zero_hpz_partition_size=1{END}"),
    "zero=stage3_nvme compile=deepcompile zero.offload_optimizer.nvme_path=/": (
        f"compile.deepcompile = true{WHY}zero.offload_param.device=cpu{END}"
    ),
    f"{ZENFLOW} compile=deepcompile": f"compile.deepcompile = true{WHY}zero.zenflow.enabled=false{END}",
    "zero=stage0 precision=fp32 compile=deepcompile": (
        "compile.deepcompile = true needs zero.stage 1, 2 or 3, but it is 0."
    ),
    "zero=stage1 compile=inductor compile.mode=reduce-overhead": (
        "compile.mode = reduce-overhead replays CUDA graphs, which keep gradients of the last micro-batch (zero.stage "
        "0 and 1) and addresses of weights (3). Use zero=stage2, or compile.mode=max-autotune-no-cudagraphs."
    ),
    "compile=inductor compile.backend=eager compile.mode=max-autotune": (
        "compile.mode = max-autotune has no effect: compile.backend is eager, not inductor. Remove it, or set "
        'compile.mode="".'
    ),
    "zero=stage3 zero.zero_quantized_weights=true": (
        "zero.zero_quantized_weights = true needs NVIDIA GPUs, and there are none here. Set it to false."
    ),
    "zero=stage3_superoffload": (
        "zero.offload_optimizer.super_offload = true needs NVIDIA GPUs, and there are none here. Set it to false."
    ),
    "zero=stage3_superoffload train.gradient_clipping=0": (
        f"zero.offload_optimizer.super_offload = true{WHY}train.rehearse=false train.on_bad_step=stop{END}"
    ),
    "zero=stage3_superoffload zero.stage=2 optim.name=adam run.max_restarts=1 run.name=x checkpoint.every=9": (
        f"zero.offload_optimizer.super_offload = true{WHY}zero.stage=3 optim.name=adamw run.max_restarts=0{END}"
    ),
    "zero=stage3_offload zero.offload_optimizer.cpuadam_cores_perc=0.5": (
        "zero.offload_optimizer.cpuadam_cores_perc = 0.5 has no effect: zero.offload_optimizer.super_offload is false. "
        "Remove it, or set zero.offload_optimizer.cpuadam_cores_perc=0.8."
    ),
    "zero=stage3_superoffload zero.offload_optimizer.cpuadam_cores_perc=1": (
        "zero.offload_optimizer.cpuadam_cores_perc = 1.0 must be above 0 and below 1."
    ),
    "zero=stage2_zenflow": f"zero.zenflow.enabled = true{WHY}train.rehearse=false train.on_bad_step=stop{END}",
    f"{ZENFLOW} run.max_restarts=1 run.name=x checkpoint.every=9 zero.zenflow.overlap_step=true": (
        f"zero.zenflow.enabled = true{WHY}run.max_restarts=0{END}"
    ),
    f"{ZENFLOW} zero.stage=3": (
        "zero.zenflow.enabled = true and zero.stage = 3 do not go together: ZenFlow turns whole weights before it "
        "splits them, and here they are split as they are read. Use zero.stage=2."
    ),
    f"{ZENFLOW} precision=fp16 optim.torch=true": (
        f"zero.zenflow.enabled = true{WHY}precision=bf16 optim.torch=false{END}"
    ),
    f"{ZENFLOW} zero.zenflow.offload=true batch.micro_per_gpu=auto": (
        f"zero.zenflow.enabled = true{WHY}zero.overlap_comm=true batch.micro_per_gpu=1{END}"
    ),
    f"{ZENFLOW} parallel.sequence=2": f"zero.zenflow.enabled = true{WHY}parallel.sequence=1{END}",
    f"{ZENFLOW} batch.global_size=16": (
        "zero.zenflow.enabled = true updates after every micro-batch: batch.global_size = 16 must be "
        "batch.micro_per_gpu (1) x 8 ranks. To add up more steps, use zero.zenflow.update_interval."
    ),
    f"{ZENFLOW} zero.zenflow.select_interval=6": (
        "zero.zenflow.select_interval = 6 must be a multiple of zero.zenflow.update_interval = 4."
    ),
    f"{ZENFLOW} zero.zenflow.topk_ratio=1": "zero.zenflow.topk_ratio = 1.0 must be above 0 and below 1.",
    f"{ZENFLOW} zero.zenflow.pt_reserved_cores_perc=0.2": (
        "zero.zenflow.pt_reserved_cores_perc = 0.2 has no effect: zero.zenflow.overlap_step is false. Remove it, or "
        "set zero.zenflow.pt_reserved_cores_perc=0.5."
    ),
    "zero=stage2_offload zero.zenflow.topk_ratio=0.2": (
        "zero.zenflow.topk_ratio = 0.2 has no effect: zero.zenflow.enabled is false. Remove it, or set "
        "zero.zenflow.topk_ratio=0.1."
    ),
}
ACCEPTED = {
    "hpz": "zero=stage3_hpz",
    "zeropp": "zero=stage3_zeropp precision=fp16",
    "zenflow": f"{ZENFLOW} zero.zenflow.overlap_step=true zero.zenflow.pt_reserved_cores_perc=0.25",
    "superoffload": "zero=stage3_superoffload",
    "superoffload-overlapped": (
        "zero=stage3_superoffload train.gradient_clipping=0 train.rehearse=false train.on_bad_step=stop"
    ),
}


def loaded_with(words: str, *more: str) -> LoadedConfig:
    return load(["recipe=zero1", "model=glm_tiny", *words.split(), *more])


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_rules(loaded_with(words, f"run.dir={tmp_path}"), world_size=8)
    first, *_ = caught.value.parts or [caught.value]
    assert str(first).partition(": ")[2] == REFUSED[words]


def test_a_gpu_that_ranks_leave_alone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by DeepSpeed's variable, or hidden by CUDA's."""
    monkeypatch.setattr(requirements.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "nvidia-smi" else None)
    loaded = loaded_with("zero=stage3_zeropp", "precision=fp16", f"run.dir={tmp_path}")
    assert not [*requirements.check_devices(loaded)]
    for name, value in (("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.delenv("DS_ACCELERATOR")
        monkeypatch.setenv(name, value)
        told = [str(error) for error in requirements.check_devices(loaded)]
        assert "zero.zero_quantized_weights = true needs NVIDIA GPUs" in "\n".join(told), name


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_by_deepspeed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that is written arrives in DeepSpeed's own config, on a machine with GPUs."""
    monkeypatch.setattr(requirements.shutil, "which", lambda name: f"/usr/bin/{name}")
    loaded = loaded_with(ACCEPTED[name], f"run.dir={tmp_path}")
    check_rules(loaded, world_size=8)
    values = build_ds_config(loaded.cfg, 8, 100).values
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: 8)
    theirs = DeepSpeedConfig(json.loads(json.dumps(values))).zero_config
    zero: dict[str, Any] = theirs.model_dump(by_alias=True)
    for key, value in leaves(values["zero_optimization"]):
        read: Any = zero
        for part in key.split("."):
            read = read[part]
        assert read == value, key
    assert theirs.zero_hpz_partition_size == (8 if name in ("hpz", "zeropp") else 1)
    assert isinstance(theirs.zenflow, ZenFlowConfig) == (name == "zenflow")
    assert ("adam_w_mode" in values["optimizer"]["params"]) == (name != "zenflow")


def test_compile_is_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepCompile arrives in DeepSpeed's own config; torch.compile alone is not DeepSpeed's."""
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: 8)
    for word, enabled, deepcompile in (
        ("none", False, False),
        ("inductor", True, False),
        ("deepcompile", True, True),
    ):
        loaded = loaded_with(f"zero=stage3 compile={word}", f"run.dir={tmp_path}")
        check_rules(loaded, world_size=8)
        assert (loaded.cfg.compile.enabled, loaded.cfg.compile.deepcompile) == (enabled, deepcompile)
        values = build_ds_config(loaded.cfg, 8, 100).values
        assert ("compile" in values) == deepcompile
        assert DeepSpeedConfig(json.loads(json.dumps(values))).compile_config.deepcompile is deepcompile


def test_zenflow_of_another_json(tmp_path: Path) -> None:
    """A section that is there switches it on; what counts epochs by DeepSpeed's data loader is refused."""
    file = tmp_path / "ds.json"
    text = (
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, '
        '"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.2, "select_strategy": "step", '
        '"select_interval": 8, "update_interval": "auto"}}}'
    )
    file.write_text(text)
    result, _ = import_json(str(file), loaded_with("zero=stage2_offload train.on_bad_step=stop"), 8)
    zenflow = result.cfg.zero.zenflow
    assert (zenflow.enabled, zenflow.topk_ratio, zenflow.select_interval, zenflow.update_interval) == (True, 0.2, 8, 4)
    file.write_text(text.replace('"step"', '"epoch"'))
    with pytest.raises(ConfigError, match="select_strategy = epoch counts by a data loader"):
        import_json(str(file), loaded_with("zero=stage2_offload train.on_bad_step=stop"), 8)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"zenflow": {"enabled": True, "overlap_step": True}}, "zero.zenflow.overlap_step"),
        ({"offload_optimizer": {"super_offload": True}}, "zero.offload_optimizer.super_offload"),
    ],
)
def test_no_checkpoint_leads_into_or_out_of_it(zero: dict[str, Any], key: str, side: int, tmp_path: Path) -> None:
    pair: list[dict[str, Any]] = [{"zenflow": {"enabled": True, "overlap_step": False}, "stage": 2}, {"stage": 2}]

    def check() -> None:
        before, now = ({"zero": one, "optim": {"name": "adamw"}, "precision": {}} for one in pair)
        _check_layout(tmp_path, RunState(world_size=2, config=before), now)

    counts = tmp_path / "engine.json"
    counts.write_text("{}")
    with pytest.raises(CheckpointError, match="an earlier version saved it under ZenFlow"):
        check()
    counts.write_text('{"zenflow": {}}')
    check()
    pair[side] |= zero
    with pytest.raises(CheckpointError, match=f"a run with {key} = true cannot be resumed from a checkpoint"):
        check()


def test_plan_counts_what_is_added() -> None:
    known = shapes_of_config(published_models()["ChatGLM3-6B"])
    assert known is not None
    plain = loaded_with("zero=stage3 precision=bf16").cfg
    outline = with_tuning(*known, plain.tuning)
    cfg = loaded_with("zero=stage3_hpz precision=bf16").cfg
    added = plan_rank(outline, cfg, 16).peak("step") - plan_rank(outline, plain, 16).peak("step")
    assert abs(added - 2 * outline.num_parameters / 8) <= 8, "a second copy of the weights over 8 ranks"
    cfg = loaded_with(f"{ZENFLOW} precision=bf16").cfg
    other = dataclasses.replace(cfg.zero, zenflow=type(cfg.zero.zenflow)())
    before = plan_rank(outline, dataclasses.replace(cfg, zero=other), 8)
    after = plan_rank(outline, cfg, 8)
    assert abs(after.peak("step") - before.peak("step") - 3 * 2 * 0.1 * outline.num_trained) <= 8
    assert after.host == before.host


def test_what_a_plan_proposes_is_accepted() -> None:
    cfg = loaded_with("zero=stage3_hpz").cfg
    other = with_layout(cfg, 2, Device.none, Device.none, False, 1)
    assert overrides(cfg, other) == ["zero.stage=2", "zero.zero_hpz_partition_size=1"]
    cfg = loaded_with(ZENFLOW).cfg
    assert overrides(cfg, with_layout(cfg, 1, Device.none, Device.none, False, 1)) == [
        "zero.stage=1",
        "zero.offload_optimizer.device=none",
        "zero.zenflow.enabled=false",
    ]


def test_a_plan_offers_states_in_bf16_instead_of_offloading() -> None:
    cfg, machine = load(["recipe=chatglm", "zero=stage3"]).cfg, parse_machine("1xA100-80GB", 1, "1TB")
    outline, rates = outline_of(cfg), assumed(machine, "bf16")
    found = list(layouts(outline, cfg, machine, rates))
    text = plan_lines(outline, machine, rates, evaluate_layout(outline, cfg, machine, rates), found)
    (line,) = (line for line in text if "With optimizer states in bf16" in line)
    words = line.rpartition(": ")[2].split()
    leaner = load(["recipe=chatglm", "zero=stage3", *words]).cfg
    check_rules(load(["recipe=chatglm", "zero=stage3", *words]), world_size=1, files=False)
    assert "precision.optimizer_states=bf16" in words
    assert evaluate_layout(outline, leaner, machine, rates).fits


def test_a_plan_counts_activations_in_host_memory() -> None:
    """All but three of the inputs of layers leave the GPU, into page-locked blocks."""
    moves = "train.activation_checkpointing.cpu_checkpointing=true"
    outline = outline_of(load(["recipe=chatglm"]).cfg)
    plain, moved = (plan_rank(outline, load(["recipe=chatglm", *more]).cfg, 8) for more in ([], [moves]))
    layers = outline.sizes["layers"]
    one = plain.device["step"]["layer inputs"] // layers
    assert moved.device["step"]["layer inputs"] == 3 * one
    assert moved.host["layer inputs"] == layers * (1 << (one - 1).bit_length()) and "layer inputs" not in plain.host


def hpz_plan(gpus: str, nodes: int, *more: str) -> tuple[list[str], str]:
    """Return what changes the recipe with hpZ to the fastest layout, and the plan as text."""
    cfg = load(["recipe=chatglm", "zero=stage3_hpz", *more]).cfg
    outline, machine = outline_of(cfg), parse_machine(gpus, nodes, "1TB")
    rates = assumed(machine, "bf16")
    found = list(layouts(outline, cfg, machine, rates))
    best = fastest(found)
    assert best is not None
    mine = evaluate_layout(outline, cfg, machine, rates)
    return overrides(cfg, best.cfg), "\n".join(plan_lines(outline, machine, rates, mine, found))


def test_a_plan_keeps_copies_within_a_node() -> None:
    """Between nodes weights are then gathered once, not twice, so that hpZ is the fastest where links are slow."""
    size = "zero.zero_hpz_partition_size"
    for gpus, nodes, expected in (("8xA100-80GB", 4, None), ("4xA100-80GB", 2, f"{size}=4"), ("8xH100", 1, None)):
        changes, text = hpz_plan(gpus, nodes, "batch.global_size=64")
        assert [word for word in changes if word.startswith((size, "zero.stage"))] == [expected] * bool(expected)
        assert "switches off" not in text


def test_a_plan_names_what_it_switches_off() -> None:
    """Of LoRA's weights nothing has to be gathered below stage 3."""
    changes, text = hpz_plan("8xA100-80GB", 2, "tuning=lora")
    assert "zero.zero_hpz_partition_size=1" in changes
    (line,) = (line for line in text.splitlines() if "switches off" in line)
    assert line.startswith("It switches off zero.zero_hpz_partition_size, which costs time here. The fastest with it")
    words = line.rpartition(": ")[2].split()
    kept = load(["recipe=chatglm", "zero=stage3_hpz", "tuning=lora", *words]).cfg.zero
    assert kept.stage == 3 and kept.zero_hpz_partition_size == 8
