"""Which parameters learn at which rate; what DeepSpeed's JSON says of each optimizer; what a plan counts."""

import copy
import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from deepspeed.runtime.config import DeepSpeedConfig
from peft.optimizers import create_loraplus_optimizer

from toolkit.config.load import LoadedConfig, load
from toolkit.config.native_ops import resolve_optimizer
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import DecayOf, OptimConfig, OptimizerName, RunConfig, ShapeConfig
from toolkit.engine.bf16_adam import Bf16Adam, round_stochastically
from toolkit.engine.build import client_optimizer, parameter_groups
from toolkit.engine.deepspeed_patches import pass_rate_to_second_optimizers
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.engine.lion import Lion
from toolkit.engine.memory import PeakMemory
from toolkit.messages import ConfigError
from toolkit.models.load import random_config
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import BF16_CHUNK, checkpoint_bytes, plan_rank
from toolkit.plan.search import with_bf16_states
from toolkit.train import changes
from toolkit.train.schedule import Schedule

LAYERS = 2


@pytest.fixture(scope="module")
def glm() -> torch.nn.Module:
    shape = ShapeConfig(hidden_size=16, intermediate_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=1)
    return transformers.GlmForCausalLM(random_config(shape, 32))


def by_name(model: torch.nn.Module, optim: OptimConfig) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, optim)
    return {names[id(one)]: group for group in groups for one in group["params"]}  # type: ignore[index,call-overload]


def test_one_group_unless_something_differs(glm: torch.nn.Module) -> None:
    groups = parameter_groups(glm, OptimConfig(weight_decay=0.1))
    assert [type(one) for one in groups] == [torch.nn.Parameter] * len(list(glm.parameters()))


def test_rates_fall_from_layer_to_layer(glm: torch.nn.Module) -> None:
    groups = by_name(glm, OptimConfig(lr=1.0, layer_lr_decay=0.5))
    assert set(groups) == {name for name, _ in glm.named_parameters()}
    rates = {name: group["lr"] for name, group in groups.items()}
    assert rates["model.embed_tokens.weight"] == 0.5**3
    assert rates["model.layers.0.mlp.down_proj.weight"] == rates["model.layers.0.input_layernorm.weight"] == 0.5**2
    assert rates["model.layers.1.self_attn.q_proj.bias"] == 0.5
    assert rates["model.norm.weight"] == rates["lm_head.weight"] == 1.0
    first = parameter_groups(glm, OptimConfig(lr=1.0, layer_lr_decay=0.5))[0]
    assert first["lr"] == 1.0, "what logs show"  # type: ignore[index,call-overload]


def test_lora_plus_has_a_rate_for_each_matrix(glm: torch.nn.Module) -> None:
    """As peft's own optimizer of LoRA+ gives them."""
    tuned = peft.get_peft_model(copy.deepcopy(glm), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    groups = by_name(tuned, OptimConfig(lr=1e-3, lora_plus_ratio=16.0))
    theirs = create_loraplus_optimizer(tuned, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    rates = {id(parameter): group["lr"] for group in theirs.param_groups for parameter in group["params"]}
    wanted = {name: rates[id(one)] for name, one in tuned.named_parameters() if one.requires_grad}
    assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(wanted)
    assert sorted(set(wanted.values())) == [1e-3, 16e-3]


@pytest.mark.parametrize(
    ("decay", "without"),
    [
        (DecayOf.matrices, {"norm", "layernorm", "bias"}),
        (DecayOf.hidden, {"norm", "layernorm", "bias", "embed_tokens", "lm_head"}),
    ],
)
def test_what_decays(glm: torch.nn.Module, decay: DecayOf, without: set[str]) -> None:
    for name, group in by_name(glm, OptimConfig(weight_decay=0.1, decay=decay)).items():
        assert group["weight_decay"] == (0.0 if any(part in name for part in without) else 0.1), name


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("kind", "values", "without"),
    [
        ("cohere", HEADS | {"use_qk_norm": True}, r"norm"),  # a row for each head
        ("gpt_oss", HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1}, r"norm|bias|sinks"),  # a row per expert
        ("mamba", {}, r"norm|bias|A_log|\.D$"),
        ("rwkv", {"attention_hidden_size": 32, "num_hidden_layers": 2}, r"ln|time_"),  # [1, 1, H]
    ],
)
def test_what_decays_by_kind_of_module(kind: str, values: dict[str, Any], without: str) -> None:
    """Norms, biases and the constants of state spaces may have two and more dimensions, and do not decay."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **TINY | values))
    groups = by_name(model, OptimConfig(weight_decay=0.1, decay=DecayOf.matrices))
    assert {name for name, group in groups.items() if not group["weight_decay"]} == {
        name for name in groups if re.search(without, name)
    }


def test_muons_rates(glm: torch.nn.Module) -> None:
    groups = by_name(glm, OptimConfig(name=OptimizerName.muon, lr=0.02, adam_lr=0.001))
    matrices = {name for name, group in groups.items() if group["lr"] == 0.02}
    assert "model.layers.0.mlp.down_proj.weight" in matrices and "lm_head.weight" not in matrices
    assert {groups[name]["lr"] for name in set(groups) - matrices} == {0.001}


def test_frozen_parameters_are_left_out(glm: torch.nn.Module) -> None:
    part = copy.deepcopy(glm)
    part.get_input_embeddings().requires_grad_(False)
    assert "model.embed_tokens.weight" not in by_name(part, OptimConfig(layer_lr_decay=0.5))


def test_the_schedule_keeps_the_shares(glm: torch.nn.Module) -> None:
    optim = OptimConfig(lr=0.1, layer_lr_decay=0.5)
    optimizer = torch.optim.SGD(parameter_groups(glm, optim), lr=optim.lr)  # type: ignore[arg-type]
    schedule = Schedule(optimizer, load(["recipe=zero1", "schedule=linear"]).cfg.schedule, optim.lr, 10, 0)
    for _ in range(5):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025, 0.0125, 0.00625])


@pytest.mark.parametrize("decoupled", [True, False])
def test_what_is_updated_on_the_gpu_beside_offloading_follows_the_schedule(decoupled: bool) -> None:
    """DeepSpeed makes an AdamW for it, with a copy of the first group at the peak rate, and the other groups."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    offloaded = torch.optim.SGD([{"params": [one]} for one in weights[:2]], lr=1.0, weight_decay=0.1)
    offloaded.adam_w_mode = decoupled  # type: ignore[attr-defined]
    backup = torch.optim.AdamW([weights[2]], lr=1.0, weight_decay=0.1)
    backup.add_param_group(offloaded.param_groups[1])
    engine: Any = SimpleNamespace(
        zenflow=False, basic_optimizer=offloaded, optimizer=SimpleNamespace(backup_optimizer=backup)
    )
    for group in offloaded.param_groups:
        group["params"] = []
    pass_rate_to_second_optimizers(engine)
    schedule = Schedule(offloaded, RunConfig().schedule, 1.0, 10, 4)
    schedule.step()
    rates = schedule.get_lr()
    assert [group["lr"] for group in backup.param_groups] == rates and 0 < rates[0] < 1
    expected = torch.optim.Adam([weights[4]], lr=rates[0], weight_decay=0.1, decoupled_weight_decay=decoupled)
    backup.param_groups[0]["params"] = [weights[3]]
    for optimizer, weight in ((backup, weights[3]), (expected, weights[4])):
        weight.grad = torch.full_like(weight, 0.01)
        optimizer.step()
    assert torch.equal(weights[3], weights[4]) and weights[3][0] < 1.0


def test_lion_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    lion = Lion([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in ([2.0, -3.0], [-0.1, 0.1]):
        weight.grad = torch.tensor(gradient)
        lion.step()
    # Second step: 0.9 x momentum 0.02 - 0.1 x 0.1 > 0, so the first number still falls.
    assert weight.tolist() == pytest.approx([(1 * 0.95 - 0.1) * 0.95 - 0.1, (-1 * 0.95 + 0.1) * 0.95 + 0.1])


def test_lion_of_deepspeed_needs_a_gpu_or_offloading() -> None:
    optim = OptimConfig(name=OptimizerName.lion)
    with pytest.raises(ConfigError, match=r"no FusedLion for CPU ranks\. Add optim.torch=true"):
        client_optimizer(optim, is_offloaded=False)
    assert client_optimizer(optim, is_offloaded=True) is None


@pytest.mark.parametrize("kind", ["Adam", "Lion"])
def test_all_parameters_of_a_fused_optimizer_have_its_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel, which is not built here, gets that of the group."""
    counts: list[int] = []
    module = importlib.import_module(f"deepspeed.ops.{kind.lower()}.fused_{kind.lower()}")

    def kernel(chunk: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], *numbers: float) -> None:
        counts.append(int(numbers[4 if kind == "Adam" else 3]))  # after the rate, betas and Adam's epsilon

    ops = SimpleNamespace(load=lambda: SimpleNamespace(**{f"multi_tensor_{kind.lower()}": kernel}))
    monkeypatch.setattr(module, f"Fused{kind}Builder", lambda: ops)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    optimizer = getattr(module, f"Fused{kind}")([{"params": weights[:3]}, {"params": weights[3:4]}])
    for last in (2, 2, 1):  # in the third step the last parameter has no gradient
        for number, weight in enumerate(weights):
            weight.grad = torch.ones(2) if number <= last or number == 3 else None
        optimizer.step()
    assert counts == [1, 1, 2, 2, 3, 3]
    assert [optimizer.state[one]["step"] for one in weights[:4]] == [3, 3, 3, 3] and weights[4] not in optimizer.state


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_in_bf16_is_pytorchs_but_for_rounding(decoupled: bool) -> None:
    """What is stored after a step is a neighbour in bf16 of what PyTorch computes in float32 from the same numbers."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000).bfloat16())
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = Bf16Adam([weight], *options.values(), is_decoupled=decoupled)
    for step in range(1, 4):
        weight.grad = torch.randn(1000).bfloat16()
        exact = torch.nn.Parameter(weight.detach().float())
        exact.grad = weight.grad.float()
        make = torch.optim.AdamW if decoupled else torch.optim.Adam
        reference = make([exact], **options, foreach=False)
        if step > 1:
            states = {name: optimizer.state[weight][name].float() for name in ("exp_avg", "exp_avg_sq")}
            reference.state[exact] = states | {"step": torch.tensor(step - 1.0)}
        reference.step()
        optimizer.step()
        for name in ("exp_avg", "exp_avg_sq"):
            assert is_neighbour(optimizer.state[weight][name], reference.state[exact][name])
        assert is_neighbour(weight.detach(), exact.detach())
        assert {weight.dtype, *(optimizer.state[weight][name].dtype for name in ("exp_avg", "exp_avg_sq"))} == {
            torch.bfloat16
        }


def is_neighbour(rounded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether each number in bf16 is `exact`, or next to it on one side."""
    bits = exact.view(torch.int32)
    below = (bits & -(2**16)).view(torch.float32)
    above = ((bits & -(2**16)) + 2**16).view(torch.float32)
    return bool(((rounded.float() == below) | (rounded.float() == above)).all())


def test_stochastic_rounding_is_exact_on_average() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.tensor([1.0009765625, -3.1e-5, 0.02, 7e30])
    rounded = torch.stack([round_stochastically(exact.clone(), generator) for _ in range(20_000)])
    assert torch.equal(rounded, rounded.bfloat16().float()) and len(rounded[:, 0].unique()) == 2
    # A step between neighbours is at most 2^-7 of a number; the deviation of the mean is below 2^-8 / sqrt(20,000).
    assert ((rounded.double().mean(0) / exact.double() - 1).abs() < 2**-8 * 5 / 20_000**0.5).all()
    kept = torch.tensor([1.0, -0.5, 0.0, math.inf, -math.inf, math.nan])
    assert torch.equal(round_stochastically(kept.clone(), generator).nan_to_num(5), kept.nan_to_num(5))
    nan_of_cuda = torch.full((100,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan_of_cuda, generator).isnan().all()


def test_small_updates_are_not_lost_in_bf16() -> None:
    """Adam moves each weight by the rate: 200 times 1e-4 of a weight of 1, of which bf16 has none below 1/256."""
    weight = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    optimizer = Bf16Adam([weight], 1e-4, (0.9, 0.95), 1e-8, 0.0, is_decoupled=True)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach().double().mean()) == pytest.approx(0.98, abs=5e-4)
    plain = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain.grad = torch.ones_like(plain)
    nearest = torch.optim.AdamW([plain], lr=1e-4)
    for _ in range(200):
        nearest.step()
    assert float(plain.detach()) == 1.0


def test_an_update_in_bf16_takes_what_is_planned() -> None:
    weight = torch.nn.Parameter(torch.ones(2 * BF16_CHUNK + 1, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = Bf16Adam([weight], 1e-4, (0.9, 0.95), 1e-8, 0.0, is_decoupled=True)
    with PeakMemory(torch.device("cpu"), only_new=True) as memory:
        optimizer.step()
        peak = memory.peak()
    # Weight, gradient and two moments, which it reads, and a chunk.
    assert peak == pytest.approx(4 * 2 * weight.numel() + 5 * 4 * BF16_CHUNK, rel=0.02)


def test_the_plan_counts_states_in_bf16() -> None:
    cfg = load(["recipe=zero1", "model=glm_tiny", "zero=stage2", "batch.global_size=2"]).cfg
    outline = outline_of(cfg)
    half = with_bf16_states(cfg)
    assert half is not None
    full, halves = (plan_rank(outline, one, 2).device["step"] for one in (cfg, half))
    assert halves["optimizer"] == 6 * -(-outline.num_trained // 2) == full["optimizer"] / 2
    assert checkpoint_bytes(outline, half) == 6 * outline.num_trained
    assert with_bf16_states(half) is None and with_bf16_states(load(["recipe=zero1", "precision=fp32"]).cfg) is None


def silent() -> LoadedConfig:
    """A config in which nobody has said anything."""
    return LoadedConfig(cfg=RunConfig(), where={}, explicit=set())


@pytest.mark.parametrize("name", [one for one in OptimizerName if OPTIMIZERS[one].ds_type])
def test_json_there_and_back(name: OptimizerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's parser takes what is written, and importing it gives the same config again."""
    import deepspeed.comm

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: 8)
    more = ["optim.adam_lr=1e-4", "train.gradient_clipping=0"] if name is OptimizerName.muon else []
    stage = "zero=stage0" if name in (OptimizerName.adafactor, OptimizerName.adagrad) else "zero=stage3"
    words = ["recipe=zero1", "model=glm_tiny", f"optim={name.value}", stage, "precision=fp32", *more]
    cfg = load(words).cfg
    values = build_ds_config(cfg, 8, 100).values
    assert DeepSpeedConfig(values).optimizer_params == values["optimizer"]["params"]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values))
    again, _ = import_json(str(file), silent(), 8)
    expected = resolve_optimizer(cfg)[0] if OPTIMIZERS[name].takes_adam else cfg  # else the JSON does not say
    assert again.cfg.optim == expected.optim


def test_muon_of_a_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    params = {"lr": 3e-4, "muon_lr": 0.02, "momentum": 0.9, "ns_method": "standard"}
    zero = {"stage": 3, "reduce_scatter": True}
    file.write_text(json.dumps({"optimizer": {"type": "Muon", "params": params}, "zero_optimization": zero}))
    loaded, notes = import_json(str(file), silent(), 8)
    optim = loaded.cfg.optim
    assert (optim.lr, optim.adam_lr, optim.momentum, optim.eps) == (0.02, 3e-4, 0.9, 1e-10)
    assert loaded.cfg.ds_extra == {"optimizer": {"params": {"ns_method": "standard"}}}
    assert "reduce_scatter is off: Muon needs whole gradients under ZeRO-3." in "\n".join(notes)


def test_what_a_json_cannot_say() -> None:
    words = ["recipe=zero1", "model=glm_tiny", "optim=adamw_8bit", "optim.weight_decay=0.1", "optim.decay=matrices"]
    ds = build_ds_config(load(words).cfg, 8, 100)
    assert "optimizer" not in ds.values and ds.values["zero_allow_untested_optimizer"] is True
    assert any("DeepSpeed has no name for adamw_8bit" in sentence for sentence in ds.missing)
    assert any("Parameter groups" in sentence for sentence in ds.missing)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"name": "adam"}, {"name": "adamw"}, False),
        ({"name": "sgd"}, {"name": "adamw"}, True),
        ({"name": "adamw"}, {"name": "adamw", "layer_lr_decay": 1.0}, False),
        ({"name": "adamw", "decay": "all"}, {"name": "adamw", "decay": "hidden"}, True),
    ],
)
def test_states_of_another_optimizer(before: dict[str, Any], now: dict[str, Any], refused: bool) -> None:
    def compare() -> None:
        changes.check_changes({"optim": before}, {"optim": now}, {}, {}, ["optim"])

    if refused:
        with pytest.raises(ConfigError, match="states of another optimizer, or of other parameter groups:\n  optim"):
            compare()
    else:
        compare()


def test_the_plan_counts_states() -> None:
    peaks = {}
    for name in ("adamw", "lion", "adamw_8bit"):
        cfg = load(["recipe=zero1", "model=glm_tiny", f"optim={name}", "batch.global_size=2"]).cfg
        outline = outline_of(cfg)
        peaks[name] = plan_rank(outline, cfg, 2).device["step"]["optimizer"]
        assert peaks[name] == int((4 + OPTIMIZERS[cfg.optim.name].state_bytes) * -(-outline.num_trained // 2))
    assert peaks["adamw_8bit"] < peaks["lion"] < peaks["adamw"]
