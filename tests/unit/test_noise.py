"""Noise on embeddings: of the size that NEFTune says, in training alone."""

import math

import pytest
import torch
import transformers

from tests.unit.test_attention import CONFIGS
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.layers import add_neftune

ALPHA = 5.0


def chatglm() -> torch.nn.Module:
    config = ChatGLMConfig(vocab_size=128, hidden_size=32, num_layers=1, num_attention_heads=4, max_sequence_length=64)
    return ChatGLMForConditionalGeneration(config)


@pytest.mark.parametrize("family", ["chatglm", "glm", "llama"])
def test_noise_of_neftunes_size_while_training(family: str) -> None:
    torch.manual_seed(1)
    model = chatglm() if family == "chatglm" else transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    embedding = model.get_input_embeddings()
    ids = torch.randint(0, 100, (3, 20))
    plain = embedding(ids).detach()
    add_neftune(model, ALPHA)
    most = ALPHA / math.sqrt(20 * plain.size(-1))
    model.train()
    noise = [(embedding(ids) - plain).detach() for _ in range(2)]
    assert 0.9 * most < float(noise[0].abs().max()) <= most * (1 + 1e-3)
    assert abs(float(noise[0].std()) - most / math.sqrt(3)) < 0.05 * most
    assert not torch.equal(*noise)
    model.eval()
    assert torch.equal(embedding(ids), plain)
