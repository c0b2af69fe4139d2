"""The parity tests can fail: each subtle point, done wrong on purpose, is caught by them."""

from collections.abc import Callable

import pytest
import torch
from golden import distance, is_right, load
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.models.chatglm import modeling
from toolkit.models.chatglm.modeling import GlmLayout

Patch = Callable[[pytest.MonkeyPatch, PreTrainedModel], None]


def unrounded_frequencies(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    def tables(position_ids: torch.Tensor, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = 1.0 / 10000 ** (torch.arange(0, head_size // 2, 2) / (head_size // 2))
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 1, 2)
        angles = torch.cat((angles[:, 0], angles[:, 1]), dim=-1)[:, None]
        return angles.cos(), angles.sin()

    patch.setattr(modeling, "rotary_tables", tables)


def exact_gelu(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    real = functional.gelu
    patch.setattr(modeling.functional, "gelu", lambda states, approximate: real(states))


def residual_scale_of_the_depth(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    patch.setattr(modeling, "_RESIDUAL_SCALE", (2 * model.config.num_layers) ** 0.5)


def residual_before_the_norm(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    def forward(block, hidden_states, rotary, attention_mask, past_key_values=None, **options):
        normed = block.input_layernorm(hidden_states)
        attended = block.attention(normed, rotary, attention_mask, past_key_values, **options)
        hidden_states = hidden_states * modeling._RESIDUAL_SCALE + attended
        return hidden_states * modeling._RESIDUAL_SCALE + block.mlp(block.post_attention_layernorm(hidden_states))

    patch.setattr(modeling.ChatGLMBlock, "forward", forward)


def causal_context(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    def mask(input_ids: torch.Tensor, *_: object) -> torch.Tensor:
        size = input_ids.size(1)
        return torch.ones(size, size, dtype=torch.bool).triu(1).expand(len(input_ids), 1, -1, -1)

    patch.setattr(modeling, "build_mask", mask)


def one_channel(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    patch.setattr(modeling, "build_positions", lambda ids, *_: torch.arange(ids.size(1)).expand(len(ids), 2, -1))


def mask_token_after_gmask(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """The place of the mask token where it is [MASK], not the context's end."""
    real = modeling.build_positions

    def positions(ids: torch.Tensor, config: object, padded: object) -> torch.Tensor:
        return real(ids.masked_fill(ids == model.config.mask_token_id, 7), model.config, None)

    patch.setattr(modeling, "build_positions", positions)


def joint_query_key_value(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """All queries, then all keys, then all values, instead of head by head."""
    heads, size = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    for block in model.transformer.layers:
        joint = block.attention.query_key_value
        for parameter in (joint.weight, joint.bias):
            by_kind = parameter.data.view(3, heads, size, *parameter.shape[1:])
            parameter.data = by_kind.transpose(0, 1).reshape(parameter.shape).contiguous()


def other_epsilon(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6


def up_before_gate(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_up_proj.weight.data.chunk(2)
        layer.mlp.gate_up_proj.weight.data = torch.cat((up, gate))


def rotary_on_the_whole_head(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    model.config.rope_parameters["partial_rotary_factor"] = 1.0
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def no_rope_ratio(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    model.config.rope_parameters["rope_theta"] = 10000.0
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def keys_and_values_swapped(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


V1: list[tuple[Patch, str]] = [
    (unrounded_frequencies, "far"),
    (exact_gelu, "plain"),
    (residual_scale_of_the_depth, "plain"),
    (residual_before_the_norm, "plain"),
    (causal_context, "plain"),
    (one_channel, "plain"),
    (mask_token_after_gmask, "mask"),
    (joint_query_key_value, "plain"),
]
GLM: list[tuple[Patch, str]] = [
    (up_before_gate, "plain"),
    (rotary_on_the_whole_head, "plain"),
    (no_rope_ratio, "far"),
    (keys_and_values_swapped, "plain"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [*(("v1", *variant) for variant in V1), *(("glm4", *variant) for variant in GLM)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_done_wrong_is_caught(name: str, wrong: Patch, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(name)
    assert is_right(distance(model, name, case))
    wrong(monkeypatch, model)
    found = distance(model, name, case)
    assert not is_right(found), found


@pytest.mark.parametrize("name", ["v2", "v3", "glm4"])
def test_another_epsilon_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(name)
    wrong = 1e-6 if model.config.rms_norm_eps != 1e-6 else 1e-5
    assert model.config.rms_norm_eps != wrong
    other_epsilon(monkeypatch, model)
    assert not is_right(distance(model, name, "plain")), "the embeddings are small enough for epsilon to matter"


def test_the_wrong_layout_of_query_key_value_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GlmLayout.split

    def swapped(self: GlmLayout, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        parts = real(self, name, value)
        return [parts[0], parts[2], parts[1]] if len(parts) == 3 else parts

    monkeypatch.setattr(GlmLayout, "split", swapped)
    assert not is_right(distance(load("v3"), "v3", "plain"))
