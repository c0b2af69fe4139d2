"""The plan of mixtures of experts: what it says of them, and what a rank has where ranks divide the experts."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from tests import architectures
from toolkit.config.load import load
from toolkit.config.schema import RunConfig, TuningConfig, TuningMethod
from toolkit.jobs.check import check_recipe
from toolkit.messages import ConfigError
from toolkit.models.adapter_settings import taken_for_experts
from toolkit.models.outline import outline as measured
from toolkit.plan.layouts import evaluate_layout, plan_json, plan_lines
from toolkit.plan.machine import parse_machine
from toolkit.plan.memory import plan_host, plan_rank
from toolkit.plan.outline import Outline, dispatched_bytes, expert_part, is_routed, outline_of, tuned
from toolkit.plan.speed import Rates, formula, step_time

MACHINE = parse_machine("8xA100-80GB", 1, "1TB")
RATES = Rates(flops=1e12, link=1e9, memory=1e12)
WORDS = ("recipe=chatglm", "batch.global_size=16", "zero.overlap_comm=false")


def mixture(name: str, folder: Path, tuning: TuningConfig) -> Outline:
    """Return the outline of a tiny model, measured."""
    architectures.CONFIGS[name]().save_pretrained(folder)
    found = measured(folder)
    return tuned({one: tuple(shape) for one, shape in found["shapes"].items()}, found["sizes"], tuning)


def config(*words: str) -> RunConfig:
    """Return a config, whose own model is not read."""
    return load([*WORDS, *words]).cfg


def routed_of(outline: Outline, names: frozenset[str]) -> int:
    """Return how many parameters these are, of routed experts alone."""
    return sum(math.prod(outline.shapes[name]) for name in names if is_routed(name))


@pytest.mark.parametrize("name", ["glm4_moe_lite", "gpt_oss"])
def test_a_rank_has_a_part_of_the_experts_and_all_else(name: str, tmp_path: Path) -> None:
    outline = mixture(name, tmp_path, TuningConfig())
    for size in (1, 2, 4):
        part = expert_part(outline, size)
        for one, shape in outline.shapes.items():
            assert part.shapes[one] == ((shape[0] // size, *shape[1:]) if ".experts." in one else shape)
        # A rank's tokens cost the same, whichever ranks compute them.
        assert formula(part.shapes, part.sizes) == formula(outline.shapes, outline.sizes)
    with pytest.raises(ConfigError, match=r"parallel\.expert = 3 cannot divide the 4 routed experts"):
        expert_part(outline, 3)
    dense = Outline({"model.embed_tokens.weight": (8, 8)}, frozenset(), {})
    with pytest.raises(ConfigError, match="or 1 for a model without them"):
        expert_part(dense, 2)


TUNING = {
    "full": TuningConfig(),
    "freeze": TuningConfig(method=TuningMethod.freeze, last_layers=1),
    "lora": TuningConfig(method=TuningMethod.lora),
    "lora of experts": TuningConfig(method=TuningMethod.lora, rank=3, target_modules=["q_proj", "experts.*_proj"]),
}


@pytest.mark.parametrize("way", TUNING)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_divides_experts_over_the_ranks_that_have_the_same(way: str, stage: int, tmp_path: Path) -> None:
    outline, world = mixture("glm4_moe", tmp_path, TUNING[way]), 8
    routed, of_trained = routed_of(outline, frozenset(outline.shapes)), routed_of(outline, outline.trained)
    assert (of_trained > 0) == (way != "lora")
    for size in (1, 2, 4):
        cfg = config(f"zero=stage{stage}", "precision=bf16", f"parallel.expert={size}")
        memory = plan_rank(outline, cfg, world)
        rest, held = memory.device["save"], outline.num_parameters - routed + routed // size
        assert rest["weights"] == 2 * held
        assert plan_host(outline, cfg, MACHINE, memory)["load"]["weights"] == world * 2 * held
        others = outline.num_trained - of_trained
        assert rest["optimizer"] == 12 * (-(-others // world) + -(-of_trained // size // (world // size)))


def test_experts_are_in_4_bits_under_qlora(tmp_path: Path) -> None:
    outline = mixture("qwen3_moe", tmp_path, TuningConfig(method=TuningMethod.qlora))
    routed = routed_of(outline, frozenset(outline.shapes))
    frozen = (shape for name, shape in outline.shapes.items() if ".layers." in name and name not in outline.trained)
    matrices = sum(math.prod(shape) for shape in frozen if len(shape) == 2)
    for size in (1, 2):
        cfg = config("tuning=qlora", "zero=stage2", "precision=bf16", f"parallel.expert={size}")
        small = matrices + routed // size
        rest = 2 * (outline.num_parameters - matrices - routed)
        expanded = 2 * 4 * 2 * 16 * 32 // size  # of one layer's experts, the larger matrices
        weights = plan_rank(outline, cfg, 8).device["save"]["weights"]
        assert weights == rest + small // 2 + small // 64 + expanded


def test_what_is_sent_between_the_ranks_that_divide_experts(tmp_path: Path) -> None:
    outline = mixture("deepseek_v3", tmp_path, TuningConfig())  # one layer of two has experts, two of a token
    assert dispatched_bytes(outline, 1000, recomputes=False) == (0, 0)
    part = expert_part(outline, 4)
    assert dispatched_bytes(part, 1000, recomputes=False) == (4 * 2 * 1000 * 3 / 4, 5)
    assert dispatched_bytes(part, 1000, recomputes=True) == (6 * 2 * 1000 * 3 / 4, 8)
    words = "zero=stage1 precision=bf16 train.activation_checkpointing.enabled=true data.max_length=64"
    cfgs = [config(*words.split(), "batch.micro_per_gpu=1", f"parallel.expert={size}") for size in (4, 1)]
    times, states, routed = 2, 64 * 32 * 2, routed_of(outline, outline.trained)
    apart, together = (step_time(outline, cfg, MACHINE, RATES) for cfg in cfgs)
    sent = times * 6 * 2 * states * 3 / 4
    gradients = 3 * 2 * (routed / 4 * 1 / 2 - routed * 7 / 8)  # of a rank's experts, over the two that have the same
    assert apart.communication - together.communication == pytest.approx((sent + gradients) / RATES.link)
    assert apart.compute == together.compute


def test_answers_cache_what_latent_attention_keeps(tmp_path: Path) -> None:
    cfg = config("zero=stage1", "precision=bf16", "evaluate.metrics=[bleu]", "evaluate.batch_size=64")
    evaluation = plan_rank(mixture("glm4_moe_lite", tmp_path, TuningConfig()), cfg, 8).device["evaluation"]
    # 2 layers x (8 latent numbers and 8 that turn with the position) x 2 bytes, of 64 x (2,048 + 64) tokens
    assert evaluation["cache"] == 2 * (8 + 8) * 2 * 64 * (2048 + 64)


@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe"])
def test_lora_is_added_to_linear_layers(name: str, tmp_path: Path) -> None:
    """Neither to routers nor to the biases of experts, which are matrices, too, nor to what peft takes for experts."""
    lora = TuningConfig(method=TuningMethod.lora, target_modules=["all-linear"])
    model = transformers.AutoModelForCausalLM.from_config(architectures.CONFIGS[name]())
    linear = {one for one, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layers." in one}
    assert mixture(name, tmp_path, lora).targets == linear - taken_for_experts(model, linear)


def test_plan_and_check_name_active_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architectures.write(tmp_path / "model", "qwen3_moe")
    cfg = config("model=hf", f"model.path={tmp_path / 'model'}", f"prepare.dir={tmp_path}", "tuning=full")
    outline = outline_of(cfg)
    mine = evaluate_layout(outline, cfg, MACHINE, RATES)
    text = "\n".join(plan_lines(outline, MACHINE, RATES, mine, [mine]))
    assert "active per token" in text and "(2 of 4 routed experts in each)" in text and "Step, estimated" in text
    experts = 2 * 3 * 4 * 32 * 16
    assert plan_json(outline, MACHINE, mine, [mine])["active_parameters"] == outline.num_parameters - experts // 2
    check_recipe(["recipe=chatglm", "model=hf", f"model.path={tmp_path / 'model'}", f"prepare.dir={tmp_path}"])
    assert "active per token" in capsys.readouterr().out
    unknown = Outline(outline.shapes, outline.trained, {**outline.sizes})
    for size in ("experts", "chosen"):
        del unknown.sizes[size]
    mine = evaluate_layout(unknown, cfg, MACHINE, RATES)
    text = "\n".join(plan_lines(unknown, MACHINE, RATES, mine, [mine]))
    assert "Step: no estimate" in text and "Known are deepseek_v3, glm4_moe," in text and "active" not in text
