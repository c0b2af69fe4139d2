"""The loss of routers: its value, and its gradient in every pass that has one."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.architectures import CONFIGS
from toolkit.config.load import load
from toolkit.messages import ConfigError
from toolkit.models.loss import RouterLoss, balance, router_loss, token_loss_sum

SCALE = 0.5


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
    return {
        "input_ids": ids,
        "labels": labels,
        "segment_ids": segments,
        "position_ids": torch.arange(12).repeat(2, 1),
    }


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
    losses = router_loss(model, configured("model=hf", "model.router_loss=0.7"))
    assert isinstance(losses, RouterLoss)
    assert (losses.coefficient, losses.num_layers) == (0.7, 2)
    if recomputed:
        function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
        model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    losses.begin(batch, torch.device("cpu"), SCALE)
    (SCALE * token_loss_sum(model, batch)).backward()
    assert float(losses.collect()) == pytest.approx(float(wanted), abs=1e-5)
    expected = dict(plain.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, atol=1e-5, rtol=1e-4, msg=key)
    without = build(name)
    (SCALE * token_loss_sum(without, batch)).backward()
    routers = [key for key in expected if "router" in key or "gate.weight" in key]
    differences = [(without.get_parameter(key).grad - expected[key].grad).abs().max() for key in routers]
    assert min(differences) > 1e-4  # or the comparison above would not notice that it is missing


def test_balanced_is_the_number_of_choices() -> None:
    chosen = torch.arange(8).view(4, 2) % 4
    assert float(balance(torch.zeros(4, 4), chosen, torch.ones(4, dtype=torch.bool))) == pytest.approx(2)
    one_sided = torch.tensor([[9.0, 9, -9, -9]]).repeat(4, 1)
    assert float(balance(one_sided, torch.tensor([[0, 1]] * 4), torch.ones(4, dtype=torch.bool))) == pytest.approx(4)
    assert float(balance(one_sided, chosen, torch.zeros(4, dtype=torch.bool))) == 0


def test_the_coefficient_is_the_models_own_unless_another_is_asked_for() -> None:
    model = build("qwen3_moe")
    found = router_loss(model, configured("model=hf"))
    assert found is not None
    assert found.coefficient == model.config.router_aux_loss_coef == 0.001
    assert router_loss(model, configured("model=hf", "model.router_loss=0")) is None
    assert router_loss(build("llama"), configured("model=hf")) is None
    assert router_loss(build("deepseek_v3"), configured("model=hf")) is None


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_refused_where_the_model_has_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model.router_loss = 0.1, but .* has no routers with such a loss"):
        router_loss(build(name), configured("model=hf", "model.router_loss=0.1"))


@pytest.mark.parametrize("key", ["parallel.tensor", "parallel.pipeline", "compile.enabled"])
def test_refused_together_with(key: str) -> None:
    cfg = configured("model=hf")
    section, name = key.split(".")
    setattr(getattr(cfg, section), name, True if section == "compile" else 2)
    with pytest.raises(ConfigError, match=rf"\(0.001, model.router_loss\) is incompatible with {key}. Remove that"):
        router_loss(build("qwen3_moe"), cfg)


def test_refused_where_routers_give_logits_alone() -> None:
    router = torch.nn.Linear(4, 4)
    losses = RouterLoss(0.1, [router])
    losses.begin({"segment_ids": torch.ones(1, 3)}, torch.device("cpu"), 1.0)
    with pytest.raises(ConfigError, match="give no more than their logits"):
        router(torch.ones(3, 4))


def test_learned_tokens_in_front_count() -> None:
    router = torch.nn.Module()
    router.forward = lambda logits: (logits, logits[:, :1] * 1, torch.zeros(len(logits), 1, dtype=torch.long))  # type: ignore[method-assign]
    losses = RouterLoss(1.0, [router])
    losses.begin({"segment_ids": torch.tensor([[1, 0], [1, 1]])}, torch.device("cpu"), 1.0)
    logits = torch.zeros(6, 2)  # of two rows: one learned token and two others each
    logits[2] = 50.0  # padding, which must not count
    router(logits)
    assert float(losses.collect()) == pytest.approx(1.0)
