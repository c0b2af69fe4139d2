"""Routers: their loss and its gradient in every pass that has one, the loads of experts, and the moving bias."""

import math
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.architectures import CONFIGS, built
from toolkit.config.load import load
from toolkit.config.mesh import Mesh
from toolkit.config.rules import check_rules
from toolkit.data.loader import collate
from toolkit.messages import ConfigError
from toolkit.models.loss import loss_head, token_loss_sum
from toolkit.models.record import record_of
from toolkit.models.router_loss import (
    Routers,
    balance_loss,
    expert_load_metrics,
    expert_loads,
    routers_of,
    within_capacity,
)
from toolkit.sample_types import with_targets
from toolkit.tasks.language import LanguageTask
from toolkit.train.step import train_step

SCALE = 0.5
CPU = torch.device("cpu")


def configured(*words: str) -> Any:
    return load(["recipe=quickstart", *words]).cfg


def build(name: str) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").train()


def a_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 900, (2, 12), generator=torch.Generator().manual_seed(2))
    segments = torch.ones_like(ids)
    segments[1, 7:] = 0
    labels = ids.masked_fill(segments == 0, -100)
    return with_targets(
        {
            "input_ids": ids,
            "labels": labels,
            "segment_ids": segments,
            "position_ids": torch.arange(12).repeat(2, 1),
        }
    )


def by_transformers(model: Any, batch: dict[str, torch.Tensor], coefficient: float) -> torch.Tensor:
    """Back-propagate the same from the logits that transformers records, and return the loss of the routers."""
    mask = (batch["segment_ids"] > 0).long()
    output = model(batch["input_ids"], attention_mask=mask, output_router_logits=True, use_cache=False)
    losses = [
        load_balancing_loss_func((logits,), logits.size(-1), model.config.num_experts_per_tok, mask)
        for logits in output.router_logits
    ]
    mean = sum(losses) / len(losses)
    target = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2).float(), target, reduction="sum")
    (SCALE * (loss + coefficient * mean)).backward()
    return mean.detach()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_value_and_gradients_are_those_of_the_formula(name: str, recomputed: bool) -> None:
    batch = a_batch()
    plain, model = build(name), build(name)
    wanted = by_transformers(plain, batch, 0.7)
    losses = routers_of(model, configured("model=hf", "model.router_loss=0.7"))
    assert isinstance(losses, Routers)
    assert (losses.coefficient, losses.num_layers) == (0.7, 2)
    if recomputed:
        function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
        model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    losses.begin(batch, CPU, SCALE)
    (SCALE * token_loss_sum(model, batch)).backward()
    assert float(losses.collect(CPU)[0]) == pytest.approx(float(wanted), abs=1e-5)
    expected = dict(plain.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, atol=1e-5, rtol=1e-4, msg=key)
    without = build(name)
    (SCALE * token_loss_sum(without, batch)).backward()
    routers = [key for key in expected if "router" in key or "gate.weight" in key]
    differences = [(without.get_parameter(key).grad - expected[key].grad).abs().max() for key in routers]
    assert min(differences) > 1e-4  # or the comparison above would not notice that it is missing


def test_a_filler_trains_no_router() -> None:
    """It balances nothing: a rank has it where an epoch has no row left for it."""
    model, filler = build("qwen3_moe"), collate([], 0)
    routers = routers_of(model, configured("model=hf", "model.router_loss=0.7"))
    assert routers is not None
    routers.begin(filler, CPU, SCALE)
    token_loss_sum(model, filler).backward()
    assert not any(one.grad.any() for one in model.parameters() if one.grad is not None)
    assert not routers.collect(CPU).any()


def test_balanced_is_the_number_of_choices() -> None:
    def value(logits: torch.Tensor, chosen: torch.Tensor, samples: torch.Tensor) -> float:
        return float(balance_loss(logits, expert_loads(chosen, samples, 4), samples))

    chosen, all_of_them = torch.arange(8).view(4, 2) % 4, torch.ones(4, dtype=torch.bool)
    assert value(torch.zeros(4, 4), chosen, all_of_them) == pytest.approx(2)
    one_sided = torch.tensor([[9.0, 9, -9, -9]]).repeat(4, 1)
    assert value(one_sided, torch.tensor([[0, 1]] * 4), all_of_them) == pytest.approx(4)
    assert value(one_sided, chosen, ~all_of_them) == 0


def test_the_coefficient_is_the_models_own_unless_another_is_asked_for() -> None:
    model = build("qwen3_moe")
    found = routers_of(model, configured("model=hf"))
    assert found is not None
    assert found.coefficient == model.config.router_aux_loss_coef == 0.001
    for name, words in (("qwen3_moe", ["model.router_loss=0"]), ("deepseek_v3", [])):
        without = routers_of(build(name), configured("model=hf", *words))
        assert without is not None
        assert not without.coefficient and not without.bias_rate  # experts' loads are counted all the same
    assert routers_of(build("llama"), configured("model=hf")) is None


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_refused_where_the_model_has_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.router_loss = 0.1, but .* has no routers with such a loss"):
        routers_of(build(name), configured("model=hf", "model.router_loss=0.1"))


@pytest.mark.parametrize("key", ["parallel.tensor", "parallel.pipeline", "compile.enabled"])
def test_hidden_routers_are_refused_a_loss_and_a_rate_and_not_observed(key: str) -> None:
    cfg = configured("model=hf")
    section, name = key.split(".")
    setattr(getattr(cfg, section), name, True if section == "compile" else 2)
    with pytest.raises(ConfigError, match=rf"\(0.001, model.router_loss\) is incompatible with {key}. Remove that"):
        routers_of(build("qwen3_moe"), cfg)
    assert routers_of(build("glm4_moe"), cfg) is None
    cfg.model.router_bias_rate = 0.1
    with pytest.raises(ConfigError, match=rf"model.router_bias_rate = 0.1 is incompatible with {key}. Remove one"):
        routers_of(build("glm4_moe"), cfg)


def test_refused_where_routers_give_logits_alone() -> None:
    router = torch.nn.Linear(4, 4)
    batch = {"segment_ids": torch.ones(1, 3), "input_ids": torch.arange(3)[None]}
    silent, losses = Routers({"0": router}), Routers({"0": router}, 0.1)
    silent.begin(batch, CPU, 1.0)
    router(torch.ones(3, 4))
    assert silent.collect(CPU).tolist() == [0]
    losses.begin(batch, CPU, 1.0)
    with pytest.raises(ConfigError, match="give no more than their logits"):
        router(torch.ones(3, 4))


def test_learned_tokens_in_front_count() -> None:
    router = torch.nn.Module()
    router.forward = lambda logits: (logits, logits[:, :1] * 1, torch.zeros(len(logits), 1, dtype=torch.long))  # type: ignore[method-assign]
    losses = Routers({"0": router}, 1.0)
    ids = torch.arange(4).view(2, 2)
    losses.begin({"segment_ids": torch.tensor([[1, 0], [1, 1]]), "input_ids": ids}, CPU, 1.0)
    logits = torch.zeros(6, 2)  # of two rows: one learned token and two others each
    logits[2] = 50.0  # padding, which must not count
    router(logits)
    assert float(losses.collect(CPU)[0]) == pytest.approx(1.0)


def chosen_by_formula(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return each expert's tokens, layer after layer, of the logits that transformers records."""
    mask = batch["segment_ids"] > 0
    with torch.no_grad():
        output = model(batch["input_ids"], attention_mask=mask.long(), output_router_logits=True, use_cache=False)
    found = []
    biases = [one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for number, logits in enumerate(output.router_logits):
        scores = logits.sigmoid() + biases[number] if biases else logits
        found.append(torch.bincount(scores.topk(2).indices[mask.flatten()].flatten(), minlength=4))
    return torch.cat(found)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_loads_are_those_of_the_formula(name: str, recomputed: bool) -> None:
    """Of two micro-batches, and of no other pass: not of the recomputation, an evaluation, padding or a filler."""
    model, batch = build(name), a_batch()
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer += torch.linspace(0.0, 0.1, 4)
    other = {**batch, "input_ids": batch["input_ids"].flip(0)}
    wanted = chosen_by_formula(model, batch) + chosen_by_formula(model, other)
    routers = routers_of(model, configured("model=hf", "model.router_loss=0"))
    assert routers is not None
    passes = []
    for part in model.modules():
        if part in routers._routers:
            part.register_forward_hook(lambda *_: passes.append(1))
    if recomputed:
        function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
        model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    filler = collate([], 0)
    for given in (batch, filler, other):
        routers.begin(given, CPU, SCALE)
        token_loss_sum(model, given).backward()
        token_loss_sum(model.eval(), given)
        model.train()
    assert routers.collect(CPU)[1:].tolist() == wanted.tolist()
    token_loss_sum(model, batch)  # after a step nothing is observed
    assert routers.collect(CPU).tolist() == [0]
    # Three micro-batches, an evaluation after each, the last pass, and the loss head's own look at the model.
    assert len(passes) == (8 + 3 * recomputed) * routers.num_layers
    table = routers.table(wanted.double())
    assert list(table) == [str(2 - routers.num_layers + place) for place in range(routers.num_layers)]
    assert [count for counts in table.values() for count in counts] == wanted.tolist()


def test_biases_move_by_the_rate_towards_an_equal_load() -> None:
    model = build("glm4_moe")
    routers = routers_of(model, configured("model=hf", "model.router_bias_rate=0.25"))
    assert routers is not None
    routers.begin(a_batch(), CPU, SCALE)
    token_loss_sum(model, a_batch())
    routers.collect(CPU)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.fill_(1.0)
    routers.move_biases(torch.tensor([7.0, 2.0, 4.0, 3.0], dtype=torch.float64))
    assert bias.tolist() == [0.75, 1.25, 1.0, 1.25]
    assert bias.dtype is torch.float32
    routers.bias_rate = 0.0
    routers.move_biases(torch.tensor([7.0, 2.0, 4.0, 3.0], dtype=torch.float64))
    assert bias.tolist() == [0.75, 1.25, 1.0, 1.25]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_rate_is_refused_where_no_router_has_a_bias(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.router_bias_rate = 0.1, but .* has no routers with a bias"):
        routers_of(build(name), configured("model=hf", "model.router_bias_rate=0.1"))


def test_a_rate_needs_an_export_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"an adapter alone is exported, and the biases are in the model"):
        check_rules(load(["recipe=quickstart", "model=hf", "model.router_bias_rate=0.1", "tuning=lora"]), 2)


def test_metrics_of_loads() -> None:
    assert expert_load_metrics([[2, 2], [3, 3]]) == {"expert_load_max": 1, "expert_unused": 0, "router_entropy": 1}
    found = expert_load_metrics([[4, 0, 0, 0], [1, 1, 1, 1]])
    assert found == {"expert_load_max": 4, "expert_unused": 3 / 8, "router_entropy": 0.5}
    assert expert_load_metrics([[5]])["router_entropy"] == 1


def kept_by_hand(chosen: Any, weights: Any, is_real: list[bool], size: int, factor: float) -> list[list[bool]]:
    """Ask each expert for those of its tokens that have the largest weights."""
    limit = math.ceil(Fraction(factor) * sum(is_real) * len(chosen[0]) / size)
    kept = [[False] * len(row) for row in chosen]
    for expert in range(size):
        mine = [(t, k) for t, row in enumerate(chosen) for k, one in enumerate(row) if one == expert and is_real[t]]
        for token, place in sorted(mine, key=lambda at: -weights[at[0]][at[1]])[:limit]:
            kept[token][place] = True
    return kept


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.5, 4.0])
def test_an_expert_keeps_the_largest_weights(factor: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(40, 2, generator=generator)
    weights[10:20] = 0.25  # equal ones: the first are kept
    chosen = torch.rand(40, 4, generator=generator).mul(torch.tensor([4.0, 2.0, 1.0, 1.0])).topk(2).indices
    is_real = torch.arange(40) % 7 > 0
    kept = within_capacity(chosen, weights, is_real, 4, factor)
    all_kept = within_capacity(torch.zeros(400, 1).long(), torch.rand(400, 1), torch.ones(400) > 0, 8, 1.2)
    assert all_kept.sum() == 60, "1.2 x 400 / 8 exactly"
    assert kept.tolist() == kept_by_hand(chosen.tolist(), weights.tolist(), is_real.tolist(), 4, factor)
    assert (kept.sum() == 2 * is_real.sum()) == (factor == 4)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_a_capacity_drops_choices_in_training_alone(name: str, recomputed: bool) -> None:
    """Gradients of a model whose routers give the weight 0 to what an expert has no place for; what is dropped."""
    mine, plain, batch = build(name), build(name), a_batch()
    plain.load_state_dict(mine.state_dict())
    samples, dropped = (batch["segment_ids"] > 0).flatten(), []

    def drop(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output
        kept = kept_by_hand(chosen.tolist(), weights.tolist(), samples.tolist(), logits.size(-1), 0.75)
        dropped.append(sum(not one for row, real in zip(kept, samples, strict=True) if real for one in row))
        return logits, weights * torch.tensor(kept), chosen

    routers = routers_of(mine, configured("model=hf", "model.router_loss=0", "model.expert_capacity=0.75"))
    assert routers is not None
    for model in (mine, plain):
        loss_head(model).path(model)  # which looks at the model
    for part in plain.modules():
        if type(part) in {type(one) for one in routers._routers}:
            part.register_forward_hook(drop)
    token_loss_sum(plain, batch).backward()
    if recomputed:
        function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        mine._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
        mine.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    routers.begin(batch, CPU, SCALE)
    token_loss_sum(mine, batch).backward()
    loads = routers.collect(CPU)[1:]
    for (key, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=key)
    assert loads[-1] == sum(dropped[-routers.num_layers :]) > 0
    assert routers.dropped(loads) == {"expert_dropped": pytest.approx(float(loads[-1] / loads[:-1].sum()))}
    assert sum(map(sum, routers.table(loads).values())) == 2 * samples.sum() * routers.num_layers
    untouched = build(name).eval()
    untouched.load_state_dict(mine.state_dict())
    assert token_loss_sum(mine.eval(), batch).item() == pytest.approx(token_loss_sum(untouched, batch).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("llama", [], "model.expert_capacity = 1.0, but LlamaForCausalLM has no routed experts"),
        ("qwen3_moe", ["preference=dpo"], "model.expert_capacity = 1.0 is incompatible with preference.loss"),
        ("qwen3_moe", ["parallel.tensor=2"], "model.expert_capacity = 1.0 is incompatible with parallel.tensor"),
    ],
)
def test_a_capacity_is_refused_where_nothing_could_be_dropped(name: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        routers_of(build(name), configured("model=hf", "model.router_loss=0", "model.expert_capacity=1", *words))


class PlainEngine:
    """What a step needs of an engine, of one process."""

    device, optimizer, skipped_steps, skips = CPU, None, 0, False

    def __init__(self, model: Any) -> None:
        self.module = model

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def fp16_enabled(self) -> bool:
        return False

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.skipped_steps += self.skips


def test_a_step_counts_its_own_passes_and_moves_biases_unless_it_is_skipped() -> None:
    model, batch = build("glm4_moe"), a_batch()
    record_of(model).routers = routers_of(model, configured("model=hf", "model.router_bias_rate=0.25"))
    engine: Any = PlainEngine(model)
    guard: Any = SimpleNamespace(judge_loss=lambda loss: None, gate=SimpleNamespace(grad_norm=1.0))
    wanted, task = chosen_by_formula(model, batch), LanguageTask()
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    loss_head(model).path(model)
    with pytest.raises(IndexError):  # as a step of a dry run fails, after its first micro-batch
        train_step(engine, task, [batch, {**batch, "input_ids": batch["input_ids"] + 10**6}], Mesh(world_size=1), guard)
    engine.skips = True
    found = train_step(engine, task, [batch], Mesh(world_size=1), guard).expert_loads
    assert found is not None
    assert found.tolist() == wanted.tolist()
    assert not bias.any()
    engine.skips = False
    train_step(engine, task, [batch], Mesh(world_size=1), guard)
    assert bias.tolist() == (0.25 * torch.sign(wanted.double().mean() - wanted)).tolist()
    assert bias.any()


def test_the_routers_loss_is_a_mean_over_micro_batches() -> None:
    """Like the loss of tokens: a step of twice the same micro-batch has the gradients of one."""
    guard: Any = SimpleNamespace(judge_loss=lambda loss: None, gate=SimpleNamespace(grad_norm=1.0))
    once, twice = build("qwen3_moe"), build("qwen3_moe")
    for model, times in ((once, 1), (twice, 2)):
        record_of(model).routers = routers_of(model, configured("model=hf", "model.router_loss=0.7"))
        loss_head(model).path(model)
        engine: Any = PlainEngine(model)
        train_step(engine, LanguageTask(), [a_batch()] * times, Mesh(world_size=1), guard)
    for name, parameter in once.named_parameters():
        torch.testing.assert_close(twice.get_parameter(name).grad, parameter.grad, msg=name)


def test_the_coefficient_of_a_multimodal_model_is_that_of_its_text_model() -> None:
    model = built("qwen3_5_moe")
    assert not hasattr(model.config, "router_aux_loss_coef")
    routers = routers_of(model, configured())
    assert routers is not None and routers.coefficient == model.config.text_config.router_aux_loss_coef > 0
