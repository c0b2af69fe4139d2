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
from toolkit.models.adapter_settings import misplaced_by_peft
from toolkit.models.chat import fit_tokenizer
from toolkit.models.outline import outline as measured
from toolkit.plan.activations import Rows, expert_activation_bytes, layer_activation_bytes
from toolkit.plan.division import BUSIEST, expert_parallel_bytes, expert_part
from toolkit.plan.flops import formula
from toolkit.plan.layouts import evaluate_layout
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import plan_host, plan_rank
from toolkit.plan.outline import Outline, is_routed, with_tuning
from toolkit.plan.planned_machine import parse_machine
from toolkit.plan.search import expert_sizes, fastest, layouts, overrides
from toolkit.plan.speed import Rates, assumed, step_time
from toolkit.plan.summary import plan_json, plan_lines

MACHINE = parse_machine("8xA100-80GB", 1, "1TB")
RATES = Rates(flops=1e12, link=1e9, memory=1e12)
WORDS = ("recipe=chatglm", "batch.global_size=16", "zero.overlap_comm=false")


def mixture(name: str, folder: Path, tuning: TuningConfig) -> Outline:
    """Return the outline of a tiny model, measured."""
    architectures.CONFIGS[name]().save_pretrained(folder)
    found = measured(folder)
    return with_tuning({one: tuple(shape) for one, shape in found["shapes"].items()}, found["sizes"], tuning)


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
    assert expert_parallel_bytes(outline, 1000, recomputes=False) == (0, 0)
    part = expert_part(outline, 4)
    assert expert_parallel_bytes(part, 1000, recomputes=False) == (4 * 2 * 1000 * 3 / 4, 5)
    assert expert_parallel_bytes(part, 1000, recomputes=True) == (6 * 2 * 1000 * 3 / 4, 8)
    words = "zero=stage1 precision=bf16 train.activation_checkpointing.enabled=true data.max_length=64"
    cfgs = [config(*words.split(), "batch.micro_per_gpu=1", f"parallel.expert={size}") for size in (4, 1)]
    times, states, routed = 2, 64 * 32 * 2, routed_of(outline, outline.trained)
    apart, together = (step_time(outline, cfg, MACHINE, RATES) for cfg in cfgs)
    sent = times * 6 * 2 * states * 3 / 4
    gradients = 3 * 2 * (routed / 4 * 1 / 2 - routed * 7 / 8)  # of a rank's experts, over the two that have the same
    assert apart.communication - together.communication == pytest.approx((sent + gradients) / RATES.link)
    assert apart.compute == together.compute


@pytest.mark.parametrize("way", ["full", "lora", "lora of experts"])
def test_tokens_of_other_ranks_count(way: str, tmp_path: Path) -> None:
    """What comes is BUSIEST times what is sent: each row with gates, ups and their product, and what is trained."""
    whole, tokens, chosen, hidden, inner = mixture("qwen3_moe", tmp_path, TUNING[way]), 64, 2, 32, 16
    part, rows, width = expert_part(whole, 2), Rows(1, tokens), 2
    more = int(tokens * chosen * (BUSIEST - 1) * (3 * inner + (inner + hidden) * (way == "full")) * width)
    sent, received = tokens * chosen, tokens * chosen * BUSIEST
    assert expert_activation_bytes(whole, rows, width) == (0, sent * hidden * (8 + width))
    assert expert_activation_bytes(part, rows, width) == (more, sent * hidden * (8 + width))
    assert expert_activation_bytes(part, rows, 4)[1] == (sent + 2 * received) * hidden * 4  # both copies of what comes
    apart, together = (layer_activation_bytes(one, rows, width, 0) for one in (part, whole))
    assert apart["experts"] == more and "experts" not in together
    rank = {"full": 0, "lora": 0, "lora of experts": 3}[way]
    for one, times in ((apart, received), (together, sent)):  # both matrices' rows, and their product with a factor
        of_experts = times * (hidden + inner + 2 * rank) if rank else 0
        attention = {"full": 0, "lora": 3 * 8 + hidden, "lora of experts": 3 + hidden}[way]
        assert one.get("lora", 0) == width * (of_experts + tokens * attention)
    assert apart["layers"] == tokens * whole.sizes["saved_2" if way == "full" else "frozen_2"]
    assert whole.sizes["frozen_2"] < whole.sizes["saved_2"]


def test_layouts_of_experts_are_candidates(tmp_path: Path) -> None:
    """Where a layer's weights are much to gather, experts over ranks are the fastest; dense models have none."""
    shapes = {f"model.layers.{n}.mlp.experts.gate_up_proj": (64, 2 * 1500, 4096) for n in range(40)}
    shapes |= {f"model.layers.{n}.mlp.experts.down_proj": (64, 4096, 1500) for n in range(40)}
    shapes |= {f"model.layers.{n}.self_attn.q_proj.weight": (4096, 4096) for n in range(40)}
    shapes["lm_head.weight"] = (1000, 4096)
    sizes = mixture("qwen3_moe", tmp_path, TuningConfig()).sizes
    sizes |= {"layers": 40, "hidden": 4096, "inner": 1500, "expert_inner": 1500, "experts": 64, "chosen": 8}
    outline = with_tuning(shapes, sizes, TuningConfig(method=TuningMethod.lora, target_modules=["q_proj"]))
    cfg, rates = config("tuning=lora", "precision=bf16", "zero=stage3"), assumed(MACHINE, "bf16")
    found = list(layouts(outline, cfg, MACHINE, rates))
    assert {one.cfg.parallel.expert for one in found} == {1, 2, 4, 8}
    assert all(one.cfg.zero.stage in (1, 2) for one in found if one.cfg.parallel.expert > 1)
    best = fastest(found)
    assert best is not None and overrides(cfg, best.cfg)[:2] == ["parallel.expert=2", "zero.stage=1"]
    gathered = [one for one in found if one.cfg.zero.stage == 3 and one.fits]
    assert min(one.time.communication for one in gathered) > best.time.communication
    assert not any(one.time.overlapped for one in gathered)  # one layer's experts are more than may be there at once
    text = "\n".join(plan_lines(outline, MACHINE, rates, found[0], found))
    assert "ZeRO 2, experts over 2 ranks" in text and "ZeRO 2, experts over 4 ranks" not in text
    assert "1.5 times" in text
    dense = with_tuning(shapes, {**sizes} | {"chosen": 0}, TuningConfig())
    del dense.sizes["chosen"]
    assert expert_sizes(dense, 8) == [1]


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
    assert mixture(name, tmp_path, lora).targets == linear - misplaced_by_peft(model, linear)


def test_plan_and_check_name_active_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architectures.write(tmp_path / "model", "qwen3_moe")
    fit_tokenizer(lambda: ["and so on"], 300, tmp_path).save_pretrained(tmp_path / "model")
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


def test_plan_auto_stays_within_divided_experts(tmp_path: Path) -> None:
    cfg = config("plan.auto=true", "zero=stage1", "parallel=expert", f"model.path={tmp_path}")
    found = list(layouts(mixture("qwen3_moe", tmp_path, cfg.tuning), cfg, MACHINE, RATES, [cfg.parallel.expert]))
    assert {one.cfg.parallel.expert for one in found} == {cfg.parallel.expert} != {1}
    assert {one.cfg.zero.stage for one in found} == {1, 2}
