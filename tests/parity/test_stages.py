"""A model cut into stages computes what the whole computes, and a stage reads its own weights alone."""

from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from official import write

from toolkit.config.mesh import Mesh
from toolkit.config.tensor_split import FAMILIES
from toolkit.layouts.pipeline import keep_only, part_names, stage_bounds, stage_parameters
from toolkit.messages import ModelError
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.head_outputs import hidden_states
from toolkit.models.load_weights import load_model
from toolkit.models.loss import token_loss_sum

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def built(kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """Return a tiny random model."""
    torch.manual_seed(5)
    if kind == "chatglm":
        return ChatGLMForConditionalGeneration(
            ChatGLMConfig(
                hidden_size=32,
                inner_hidden_size=48,
                num_layers=5,
                num_attention_heads=4,
                vocab_size=128,
                bos_token_id=104,
                eos_token_id=105,
            )
        )
    # Qwen's upper layers see a few tokens only: a kind of layer goes by its place among all.
    if kind == "qwen2":
        changes |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **(SIZES | changes)))


def rows() -> dict[str, torch.Tensor]:
    """Return two rows, of which one is padded; <sop> stands where ChatGLM-6B wants it."""
    ids = torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 4], ids[:, 5] = 101, 104
    labels = torch.where(torch.arange(12) > 5, ids, -100)
    segments = torch.ones_like(ids)
    segments[1, 9:], labels[1, 9:] = 0, -100
    positions = torch.arange(12).repeat(2, 1)
    return {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cut_model_computes_the_same(kind: str, stages: int) -> None:
    whole, batch = built(kind).train(), rows()
    expected = token_loss_sum(whole, batch)
    expected.backward()
    names, bounds, states, leaves, parts = part_names(whole, stages), stage_bounds(whole, stages), None, [], []
    for stage in range(stages):
        part = deepcopy(built(kind)).train()
        keep_only(part, names, names[bounds[stage] : bounds[stage + 1]])
        given = batch if states is None else {**batch, "inputs_embeds": states.detach().requires_grad_()}
        leaves.append(given.get("inputs_embeds"))
        states = (token_loss_sum if stage == stages - 1 else hidden_states)(part, given)
        parts.append((part, states))
    assert states.item() == expected.item()
    gradients = {name: one.grad for name, one in whole.named_parameters()}
    upstream = None
    for (part, output), leaf in zip(reversed(parts), reversed(leaves), strict=True):
        output.backward(upstream)
        upstream = leaf.grad if leaf is not None else None
        for name, one in part.named_parameters():
            torch.testing.assert_close(one.grad, gradients.pop(name))
    assert gradients == {}


def test_parts_are_divided_by_parameters_and_each_stage_has_a_layer() -> None:
    model = built("llama", vocab_size=4096)  # the embedding weighs more than all layers
    names, bounds = part_names(model, 4), stage_bounds(model, 4)
    held = [names[begin:end] for begin, end in pairwise(bounds)]
    assert [name for part in held for name in part] == names
    assert held[0] == ["model.embed_tokens", "model.layers.0"]
    assert held[3] == ["model.layers.4", "model.norm", "lm_head"]
    assert [Mesh(world_size=4, rank=rank, pipeline=2).stage for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["glm", "v2", "tied"])
def test_a_stage_reads_its_own_weights_alone(kind: str, tmp_path: Path) -> None:
    if kind == "v2":
        write(tmp_path / "m", "v2")
    else:
        built("llama" if kind == "tied" else kind, tie_word_embeddings=kind == "tied").save_pretrained(tmp_path / "m")
    expected = dict(load_model(tmp_path / "m", dtype=torch.float32).named_parameters())
    read: list[str] = []
    for stage in range(2):
        model = load_model(
            tmp_path / "m", dtype=torch.float32, needed_rows=partial(stage_parameters, num_stages=2, stage=stage)
        )
        filled = {name: one for name, one in model.named_parameters() if not one.is_meta}
        assert set(filled) == set(stage_parameters(model, 2, stage))
        assert all(torch.equal(one, expected[name]) for name, one in filled.items())
        assert len(filled) < len(expected)
        read += filled
        if kind == "tied" and stage:
            assert torch.equal(model.lm_head.weight, expected["model.embed_tokens.weight"])
    assert sorted(read) == sorted([*expected, *(["model.embed_tokens.weight"] if kind == "tied" else [])])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ModelError, match=r"parallel\.pipeline = 6 is more than the model's 5 layers\. Use at most 5"):
        stage_bounds(built("glm"), 6)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ModelError, match=r"not supported for model type gpt2, .* Use zero=stage3"):
        part_names(gpt2, 2)
