"""Feed-forward layers in pieces: the same losses and gradients, with less kept in between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.messages import ConfigError
from toolkit.models.layers import tile_mlp
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import plan_rank

WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 512}
IDS = torch.arange(2 * 37).view(2, 37)
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def build() -> transformers.PreTrainedModel:
    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).train()


def step(model: transformers.PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return loss, gradients, and the bytes that were kept for the backward pass."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("pieces", [2, 5, 100])  # 74 tokens: pieces of unlike size, and empty ones
@pytest.mark.parametrize(
    "is_trained", [lambda name: True, lambda name: ".1.mlp" in name, lambda name: "0.mlp.up" in name or "norm" in name]
)
def test_same_gradients(pieces: int, is_trained: Callable[[str], bool]) -> None:
    whole = build()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(is_trained(name))
    tiled = copy.deepcopy(whole)
    tile_mlp(tiled, pieces)
    expected, found = step(whole), step(tiled)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    assert expected[1]
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    assert found[2] < expected[2]
    with torch.no_grad():
        torch.testing.assert_close(tiled(input_ids=IDS).logits, whole(input_ids=IDS).logits)


def test_experts_stay_as_they_are() -> None:
    config = transformers.Glm4MoeConfig(**SIZES, **EXPERTS, first_k_dense_replace=1)
    model = transformers.Glm4MoeForCausalLM(config)
    tile_mlp(model, 4)
    assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [True, False]
    none = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SIZES, **EXPERTS, first_k_dense_replace=0))
    with pytest.raises(ConfigError, match=r"kernels\.mlp_pieces = 4: Glm4MoeForCausalLM has no feed-forward layers"):
        tile_mlp(none, 4)


def test_plan_keeps_what_goes_in() -> None:
    steps = {}
    for pieces in (1, 8):
        cfg = load(["recipe=quickstart", f"kernels.mlp_pieces={pieces}"]).cfg
        steps[pieces] = plan_rank(outline_of(cfg, 4096), cfg, 1, on_cpu=False).device["step"]
    shape, tokens = cfg.model.shape, cfg.batch.micro_per_gpu * cfg.data.max_length
    assert steps[8]["mlp"] == 4 * tokens * shape.hidden_size * shape.num_layers < steps[1]["mlp"]
    assert steps[8]["backward"] < steps[1]["backward"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compile.enabled=true"], "layers in pieces cannot be compiled"),
        (["tuning=lora", "tuning.dropout=0.1"], "tuning.dropout = 0.1 would drop something else the second time"),
    ],
)
def test_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_rules(load(["recipe=quickstart", "kernels.mlp_pieces=2", *words]))
