"""The plan of memory: consistent with itself, whatever the model and the machines; benchmarks/plan.py runs it."""

import json
import math
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from toolkit.cli import main
from toolkit.config.load import load
from toolkit.config.mesh import micro_sizes
from toolkit.config.rules import check_rules
from toolkit.config.schema import Device, Dtype, RunConfig, TuningConfig, TuningMethod
from toolkit.plan.layouts import evaluate_layout
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.memory import HEAP_SHARE, PROCESS_BYTES, checkpoint_bytes, plan_host, plan_rank, process_bytes
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.outline import Outline, with_tuning
from toolkit.plan.planned_machine import parse_bytes, parse_machine
from toolkit.plan.search import fastest, layouts, overrides, with_layout
from toolkit.plan.speed import assumed, step_time
from toolkit.plan.summary import plan_json, plan_lines

WORLDS = st.sampled_from([1, 2, 4, 8, 16, 64])
STAGES = st.sampled_from([0, 1, 2, 3])
DTYPES = st.sampled_from(list(Dtype))
METHODS = st.sampled_from([TuningMethod.full, TuningMethod.lora, TuningMethod.freeze, TuningMethod.ptuning_v2])
# A mixture of experts is measured, as no formula knows it.
NAMES = st.sampled_from(sorted(name for name, config in published_models().items() if shapes_of_config(config)))
A100 = parse_machine("8xA100-80GB", 1, "1TB")


def model(name: str, method: TuningMethod = TuningMethod.full) -> Outline:
    """Return a published model."""
    known = shapes_of_config(published_models()[name])
    assert known is not None
    return with_tuning(*known, TuningConfig(method=method, last_layers=2))


RECIPE = load(["recipe=chatglm", "train.activation_checkpointing.enabled=false", "zero.overlap_comm=false"]).cfg


def config(stage: int, dtype: Dtype, micro: int = 1, world: int = 8) -> RunConfig:
    """Return a config of some layout."""
    cfg = with_layout(RECIPE, stage, Device.none, Device.none, False, micro)
    cfg.batch.global_size = 64 * micro * world
    cfg.precision.dtype = dtype
    return cfg


@given(name=NAMES, method=METHODS, stage=STAGES, dtype=DTYPES, world=WORLDS)
@settings(deadline=None, max_examples=60)
def test_more_ranks_never_need_more_memory(
    name: str, method: TuningMethod, stage: int, dtype: Dtype, world: int
) -> None:
    outline = model(name, method)
    few = plan_rank(outline, config(stage, dtype, world=world), world)
    many = plan_rank(outline, config(stage, dtype, world=2 * world), 2 * world)
    for phase in few.device:
        assert many.peak(phase) <= few.peak(phase) + 3 * outline.sizes["hidden"] * 65024  # what is rounded up


@given(name=NAMES, method=METHODS, stage=STAGES, dtype=DTYPES, micro=st.integers(1, 16))
@settings(deadline=None, max_examples=60)
def test_larger_micro_batches_need_more(name: str, method: TuningMethod, stage: int, dtype: Dtype, micro: int) -> None:
    outline = model(name, method)
    small, large = (plan_rank(outline, config(stage, dtype, size), 8) for size in (micro, micro + 1))
    assert small.peak("step") <= large.peak("step")
    assert small.peak("evaluation") < large.peak("evaluation")


def test_a_process_on_processors_holds_more_than_its_tensors() -> None:
    memory = plan_rank(model("glm-4-9b-chat", TuningMethod.lora), config(2, Dtype.bf16, world=2), 2, on_cpu=True)
    step, load = memory.device["step"], memory.device["load"]
    assert load["read"] == 2 * 151552 * 4096, "the embedding, as it is copied from its file"
    moving = sum(step.values()) - step["weights"] - step["optimizer"]
    assert moving > GIB / 10
    expected = PROCESS_BYTES + memory.peak(memory.worst) + HEAP_SHARE * moving
    assert process_bytes(memory) == pytest.approx(expected, rel=1e-6)
    cpu = replace(A100, on_cpu=True, ranks=2)
    host = plan_host(model("glm-4-9b-chat", TuningMethod.lora), config(2, Dtype.bf16, world=2), cpu, memory)
    assert host["step"]["heap"] == 2 * int(HEAP_SHARE * moving)


MEASURED_PROCESSES = {
    "zero=stage0 data.max_length=512": 4.45,
    "zero=stage0 data.max_length=256 batch.micro_per_gpu=2": 3.69,
    "zero=stage1 data.max_length=256": 5.27,
    "zero=stage1 data.max_length=512": 6.55,
    "zero=stage2 data.max_length=512": 5.51,
    "zero=stage2 data.max_length=512 precision=bf16": 4.93,
    "zero=stage2 data.max_length=1024 precision=bf16": 5.46,
    "zero=stage3 data.max_length=512": 6.28,
    "zero=stage0 data.max_length=512 tuning=lora": 2.26,
}
"""GiB of a process that trains SmolLM2-135M on packed rows: benchmarks/README.md, memory of a CPU process."""


@pytest.mark.parametrize("words", MEASURED_PROCESSES)
def test_a_process_on_processors_takes_about_what_is_planned(words: str) -> None:
    fixed = ["recipe=quickstart", "model=smollm2_135m", "data.packing=packed", "batch.global_size=2"]
    cfg = load([*fixed, "batch.micro_per_gpu=1", *words.split()]).cfg
    planned = process_bytes(plan_rank(outline_of(cfg), cfg, 1, on_cpu=True)) / GIB
    assert 0.8 < MEASURED_PROCESSES[words] / planned < 1.1


@given(name=NAMES, dtype=DTYPES, world=WORLDS.filter(lambda world: world > 1), method=METHODS)
@settings(deadline=None, max_examples=60)
def test_higher_stages_keep_less_between_steps(name: str, dtype: Dtype, world: int, method: TuningMethod) -> None:
    outline = model(name, method)
    rests = [
        sum(
            size
            for kind, size in plan_rank(outline, config(stage, dtype, world=world), world).device["save"].items()
            if kind in ("weights", "optimizer")
        )
        for stage in range(4)
    ]
    assert rests[1] == rests[2]
    assert rests[3] < rests[2]
    if dtype is not Dtype.fp32:  # in fp32 ZeRO keeps a copy of the weights that stage 0 does not need
        assert rests[1] < rests[0]


@given(name=NAMES, stage=STAGES, dtype=DTYPES, micro=st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_recomputing_and_training_less_save_memory(name: str, stage: int, dtype: Dtype, micro: int) -> None:
    cfg = config(stage, dtype, micro)
    other = deepcopy(cfg)
    other.train.activation_checkpointing.enabled = True
    full = plan_rank(model(name), cfg, 8).peak("step")
    assert plan_rank(model(name), other, 8).peak("step") <= full
    assert plan_rank(model(name, TuningMethod.lora), cfg, 8).peak("step") < full


@given(name=NAMES, dtype=st.sampled_from([Dtype.bf16, Dtype.fp16]), stage=st.sampled_from([1, 2, 3]))
@settings(deadline=None, max_examples=20)
def test_what_is_offloaded_moves_to_the_host(name: str, dtype: Dtype, stage: int) -> None:
    outline, cfg = model(name), config(stage, dtype)
    there = with_layout(cfg, stage, Device.cpu, Device.none, False, 1)
    before, after = plan_rank(outline, cfg, 8), plan_rank(outline, there, 8)
    assert after.peak("step") < before.peak("step")
    assert sum(after.host.values()) >= 12 * outline.num_trained / 8
    hosts = [plan_host(outline, there, A100, after), plan_host(outline, cfg, A100, before)]
    more, less = (max(sum(parts.values()) for parts in host.values()) for host in hosts)
    assert more > less


def test_page_locked_blocks_are_powers_of_two() -> None:
    words = ["recipe=zero2_offload", "model=glm4_9b", "model.path=/models/none"]
    locked, plain = (load([*words, f"zero.offload_optimizer.pin_memory={value}"]).cfg for value in ("true", "false"))
    outline = outline_of(plain)
    elements = outline.num_trained
    assert plan_rank(outline, plain, 1).host == {"optimizer": 12 * elements, "gradients": 8 * elements}
    accumulated = sum(2 ** math.ceil(math.log2(2 * math.prod(shape))) for shape in outline.shapes.values())
    # 35 GiB of master weights, 35 of gradients and 17.5 in bf16 are a block each; moments are not locked.
    assert plan_rank(outline, locked, 1).host == {
        "optimizer": 64 * GIB + 8 * elements,
        "gradients": (64 + 32) * GIB + accumulated,
    }
    assert plan_rank(outline, locked, 1, on_cpu=True) == plan_rank(outline, plain, 1, on_cpu=True)


def test_page_locked_blocks_of_stage_3() -> None:
    words = ["recipe=zero3_offload", "model.path=/models/none"]
    more = ["zero.offload_optimizer.pin_memory=false", "zero.offload_param.pin_memory=false"]
    locked, plain = load(words).cfg, load([*words, *more]).cfg
    outline = outline_of(plain)
    elements = outline.num_trained
    assert plan_rank(outline, plain, 1).host == {
        "optimizer": 12 * elements,
        "gradients": 8 * elements,
        "weights": 2 * elements,
    }
    each = sum(2 ** math.ceil(math.log2(2 * math.prod(shape))) for shape in outline.shapes.values())
    assert plan_rank(outline, locked, 1).host == {
        "optimizer": 12 * elements,
        "gradients": (32 + 5 * 4 + 8) * GIB,  # all, and those of each tile: five below 4 GiB, the last with the head
        "weights": 16 * GIB + each,  # a block of all, and one of each weight before, which torch keeps
    }


def test_known_totals() -> None:
    """16 to 18 bytes per parameter of mixed precision, over the ranks (ZeRO, Rajbhandari et al. 2020, table 1)."""
    outline = model("ChatGLM3-6B")
    assert outline.num_parameters == 6_243_584_000
    rest = plan_rank(outline, config(0, Dtype.bf16), 8).peak("save")
    assert rest == 14 * outline.num_parameters
    assert checkpoint_bytes(outline, config(2, Dtype.bf16)) == 12 * outline.num_parameters


def test_qlora_has_its_weights_in_four_bits() -> None:
    words = ["recipe=chatglm", "tuning=qlora", "model.path=/models/none", "zero=stage2"]
    cfg = load(words).cfg
    outline = outline_of(cfg)
    weights = plan_rank(outline, cfg, 8).device["save"]["weights"]
    assert 3.5 * GIB < weights < 4.2 * GIB  # 5.7 billion in layers at 0.52 bytes, two times 0.27 billion at 2
    stages = {layout.cfg.zero.stage for layout in layouts(outline, cfg, A100, assumed(A100, "bf16"))}
    assert stages == {0, 1, 2}


def test_answers_count_where_they_are_asked_for() -> None:
    words = ["recipe=chatglm", "model.path=/models/none", "zero=stage2"]
    plain, asked = (load([*words, *more]).cfg for more in ([], ["evaluate.metrics=[bleu]", "evaluate.batch_size=64"]))
    outline = outline_of(plain)
    before, after = (plan_rank(outline, cfg, 8).device["evaluation"] for cfg in (plain, asked))
    # 28 layers x 2 groups x 128 x (key and value) x 2 bytes, of 64 x (2,048 + 64) tokens
    assert after["cache"] == 28 * 2 * 128 * 2 * 2 * 64 * (2048 + 64)
    assert sum(after.values()) > sum(before.values())


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ([], 8),
        (["parallel=tensor"], 8),
        (["parallel=sequence", "tuning=lora"], 8),
        (["parallel=tensor", "parallel.sequence=2"], 8),
        (["parallel=pipeline", "evaluate.prompts=[]"], 1),  # in bf16 stages go with ZeRO 1 alone
    ],
)
def test_every_layout_keeps_the_batch_and_can_be_typed(options: list[str], choices: int) -> None:
    words = ["recipe=chatglm", "model.path=/models/none", "zero=stage1", "plan.auto=true", *options]
    before = load(words).cfg
    outline = outline_of(before)
    found = list(layouts(outline, before, A100, assumed(A100, "bf16")))
    assert len(found) == choices * 2 * len(micro_sizes(before, 8))
    for layout in found:
        assert layout.cfg.batch.global_size == before.batch.global_size
        loaded = load([*words, *overrides(before, layout.cfg)])
        check_rules(loaded, 8, files=False)
        assert plan_rank(outline, loaded.cfg, 8) == layout.memory


def test_the_fastest_fits_and_nothing_faster_does() -> None:
    cfg = load(["recipe=chatglm"]).cfg
    outline, rates = outline_of(cfg), assumed(A100, "bf16")
    found = list(layouts(outline, cfg, A100, rates))
    best = fastest(found)
    assert best is not None
    assert best.fits
    assert all(layout.time.seconds >= best.time.seconds / 1.03 for layout in found if layout.fits)
    small = parse_machine("1x8GB", 1, "16GB")
    assert fastest(list(layouts(outline, cfg, small, assumed(small, "bf16")))) is None
    mine = evaluate_layout(outline, cfg, A100, rates)
    assert plan_json(outline, A100, mine, found)["fastest"] == overrides(cfg, best.cfg)


@given(world=st.sampled_from([2, 4, 8, 16]), stage=STAGES)
@settings(deadline=None, max_examples=20)
def test_estimates_of_time_are_consistent(world: int, stage: int) -> None:
    outline, cfg = model("ChatGLM3-6B"), config(stage, Dtype.bf16, world=world)
    machine = Machine(world, 80 * GIB, A100.card)
    time = step_time(outline, cfg, machine, assumed(machine, "bf16"))
    slower = step_time(
        outline, cfg, Machine(world // 2, 80 * GIB, A100.card, 2), assumed(Machine(8, 0, None, 2), "bf16")
    )
    assert 0 < time.seconds < slower.seconds
    recomputed = deepcopy(cfg)
    recomputed.train.activation_checkpointing.enabled = True
    assert 1.2 < step_time(outline, recomputed, machine, assumed(machine, "bf16")).compute / time.compute < 1.4


@given(world=st.sampled_from([2, 4, 8]), stage=STAGES, slower=st.floats(1.5, 20))
@settings(deadline=None, max_examples=20)
def test_measured_gathering_counts_at_stage_3_alone(world: int, stage: int, slower: float) -> None:
    machine = Machine(world, 0, None, 1, on_cpu=True)
    outline, cfg = model("ChatGLM3-6B"), config(stage, Dtype.bf16, world=world)
    rates = replace(assumed(machine, "bf16"), latency_s=0.0)
    before = step_time(outline, cfg, machine, rates).communication
    after = step_time(outline, cfg, machine, replace(rates, gather=rates.link / slower)).communication
    assert after == pytest.approx(before * slower if stage == 3 else before)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("gpus=8", "gpus = 8 should be the GPUs of one machine: 8x80GB, 8xA100-80GB, 4xH100 or 2xcpu.\n"),
        ("gpus=24GB", "2xcpu. Did you mean '1x24GB'?\n"),
        ("gpus=1x24", "2xcpu. Did you mean '1x24GB'?\n"),
        ("gpus=0x80GB", "should be the GPUs of one machine"),
        (
            "gpus=8xVoodoo2",
            "no datasheet of 'Voodoo2' is known. Write its memory, 8x80GB, or one of: A100 80GB, H100, H20",
        ),
        ("host_memory=much", "host_memory = much is no size"),
        ("nodes=0", "nodes"),
        ("calibrate=true", "calibrate=true measures this machine, which is not 1 x 8 x 80 GiB"),
    ],
)
def test_what_cannot_be_planned_is_said(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipe=chatglm", *([] if word.startswith("gpus") else ["gpus=8x80GB"]), word]
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_known_needs_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipe=chatglm", "model=hf", "gpus=8x80GB"]
    assert main([*words, "model.path=/models/none"]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main([*words, f"model.path={tmp_path}"]) == 2
    assert "is no model's config.json" in capsys.readouterr().err


def test_the_sizes_of_a_group_are_those_of_its_own_model_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def resolve(loaded: Any, *_: Any, **__: Any) -> Any:
        asked.append(loaded.cfg.model.path)
        return loaded

    monkeypatch.setattr("toolkit.cli.plan.resolve_model_path", resolve)
    words = ["plan", "recipe=qwen3_8b", "gpus=8x80GB"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("Qwen3-8B: 8,190,735,360 of")
    assert asked == []
    main([*words, "model.path=owner/other"])
    assert asked == ["owner/other"]


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    """transformers knows the type, but has no such class of its own, and would ask whether to run the code."""
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    config = {"model_type": "t5", "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["recipe=chatglm", "model=hf", f"model.path={tmp_path}", "gpus=8x80GB", f"prepare.dir={tmp_path}/c"]
    finished = subprocess.run(
        [sys.executable, "-m", "toolkit", "plan", *words],
        input="y\ny\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 2
    assert "holds a t5, which is no causal language model" in finished.stderr
    assert not ran.exists()


def test_bounds_and_cards_that_are_special(tmp_path: Path) -> None:
    def planned(*words: str) -> dict[str, Any]:
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        assert main(["plan", "recipe=chatglm", f"output={output}", *words]) == 0
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    assert planned("gpus=8xV100-32GB", "precision=fp16")["recipe"]["step_s"] > 0  # it has no bf16
    bounded = planned("gpus=8xA100-80GB", "plan.max_gpu_gib=20", "batch.micro_per_gpu=auto")
    fitting = [one for one in bounded["layouts"] if one["fits"]]
    assert fitting
    assert all(sum(parts.values()) < 20 * GIB for one in fitting for parts in one["device_bytes"].values())
    assert main(["plan", "recipe=chatglm", "gpus=8x80GB", f"output={tmp_path}/0.json"]) == 2  # nothing is overwritten
    assert Machine(2, GIB, None, nodes=2, uneven_ranks=3).world_size == 3


def test_logits_count_where_the_loss_is_not_chunked() -> None:
    words = ["recipe=chatglm", "model.path=/models/none", "data.max_length=8192"]
    plain, full = (load([*words, *more]).cfg for more in ([], ["kernels.loss=full"]))
    outline = outline_of(plain)
    before, after = (plan_rank(outline, cfg, 8).device["step"]["loss"] for cfg in (plain, full))
    assert after > 8192 * 65024 * 12 > before


def test_names_without_layers_are_understood() -> None:
    shapes = {"transformer.h.0.attn.c_attn.weight": (8, 24), "transformer.h.1.attn.c_attn.weight": (8, 24)}
    sizes = {"layers": 2, "hidden": 8, "keys": 8, "heads": 2, "head_size": 4, "inner": 32, "prefix": 32}
    frozen = with_tuning(shapes, sizes, TuningConfig(method=TuningMethod.freeze, last_layers=1))
    assert frozen.trained == {"transformer.h.1.attn.c_attn.weight"}


def test_sizes() -> None:
    assert parse_bytes("80GB", "gpus") == parse_bytes("80GiB", "gpus") == 80 * GIB
    assert parse_bytes("1.5TB", "host_memory") == 1536 * GIB
    assert parse_machine("4x24gb", 2, "").world_size == 8


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    """In a process of its own, as a user types it; the output is read back."""
    script = (
        "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules; sys.exit(code)"
    )
    output = tmp_path / "plan.json"
    words = ["plan", "recipe=chatglm", "gpus=8xH100", "nodes=2", "host_memory=1TB", f"output={output}", "language=en"]
    ran = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Recommended: " in ran.stdout
    plan: dict[str, Any] = json.loads(output.read_text())
    assert plan["machine"]["ranks"] == 8
    assert {one["zero_stage"] for one in plan["layouts"]} == {0, 1, 2, 3}
    assert all(set(one["device_bytes"]) == {"load", "step", "evaluation", "save", "export"} for one in plan["layouts"])


def test_a_recipe_for_one_gpu_is_planned_on_others(said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With a smaller micro-batch and the same global batch where the ranks can share that."""
    words = ["plan", "recipe=chatglm3_lora", "batch.micro_per_gpu=4"]
    for gpus, size, planned in (
        ("8x80GB", 16, "micro_per_gpu=2"),
        ("3x80GB", 16, "global_size=15 batch.micro_per_gpu=1"),
    ):
        assert main([*words, f"batch.global_size={size}", f"gpus={gpus}"]) == 0
        assert said[0].endswith(f"planned with batch.{planned}.")
        del said[:]
    assert main(["check", *words[1:], "data=examples", "batch.global_size=16", "world_size=8"]) == 2
    assert "Use 32. Or batch.micro_per_gpu=2." in capsys.readouterr().err


def test_a_layout_that_hardly_fits_is_not_recommended_while_another_leaves_memory() -> None:
    cfg, machine = load(["recipe=chatglm3_lora"]).cfg, parse_machine("1x24GB", 1, "")
    outline, rates = outline_of(cfg), assumed(machine, "bf16")
    found = list(layouts(outline, cfg, machine, rates))
    best = fastest(found)
    assert best is not None and best.fits and not best.is_tight
    tightest = fastest(found, tight=True)
    assert tightest is not None and tightest.is_tight and tightest.time.seconds < best.time.seconds
    assert fastest([layout for layout in found if layout.is_tight]) is tightest
    lines = plan_lines(outline, machine, rates, evaluate_layout(outline, cfg, machine, rates), found)
    warned = r"Faster, \S+ s per step, but with 9\d % of the memory a little more than planned runs out: \S+"
    assert any(re.match(warned, line) for line in lines)


def test_where_nothing_fits_inputs_of_layers_are_offered_to_host_memory() -> None:
    words = ["recipe=chatglm", "tuning=lora", "data.max_length=131072", "batch.global_size=1"]
    cfg, machine = load(words).cfg, parse_machine("1x64GB", 1, "512GB")
    outline, rates = outline_of(cfg), assumed(machine, "bf16")
    found = list(layouts(outline, cfg, machine, rates))
    assert fastest(found) is None
    lines = plan_lines(outline, machine, rates, evaluate_layout(outline, cfg, machine, rates), found)
    [line] = [line for line in lines if line.startswith("With the inputs of recomputed layers in host memory")]
    changes = line.partition(" s per step: ")[2].split()
    assert "train.activation_checkpointing.cpu_checkpointing=true" in changes
    assert evaluate_layout(outline, load([*words, *changes]).cfg, machine, rates).fits
