"""Layers that compute some tokens only: what they do is what the model does with those tokens alone."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from tests.unit.test_attention import CONFIGS, samples
from tests.unit.tiny_model import SIZES
from toolkit.config.schema import Attention, RandomLtdConfig
from toolkit.data.loader import collate
from toolkit.messages import ModelError
from toolkit.models.attention import attention_arguments, choose_attention
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.layers import TokenDropping, begin_step, dropping_metrics

FAMILIES = ["glm", "glm4", "llama", "qwen3"]
WAYS = [(False, "sdpa"), (True, "sdpa"), (True, "eager"), (True, "varlen")]
ALL = RandomLtdConfig(steps=8, start_share=0.5, first_layers=0, last_layers=0)


def built(family: str, num_layers: int, config: RandomLtdConfig = ALL, attention: str = "sdpa") -> Any:
    torch.manual_seed(5)
    model_config = CONFIGS[family]()
    model_config.num_hidden_layers = num_layers
    if getattr(model_config, "layer_types", None):
        model_config.layer_types = model_config.layer_types[:1] * num_layers
    model = transformers.AutoModelForCausalLM.from_config(model_config).train()
    choose_attention(model, Attention(attention), True, torch.float32)
    model.token_dropping = TokenDropping(model, config, 3, 0)
    return model


def a_batch(packed: bool) -> dict[str, torch.Tensor]:
    """Return two rows of several samples, or seven of one."""
    rows = [samples()[:4], samples()[4:]] if packed else [[sample] for sample in samples()]
    return collate(rows, 0, packed=packed)


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    given = attention_arguments(model, batch)
    found: torch.Tensor = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **given
    ).logits
    return found


def without(batch: dict[str, torch.Tensor], row: int, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one row of a batch with the kept tokens only, at their own positions, by a mask of blocks."""
    return {
        "input_ids": batch["input_ids"][row, kept][None],
        "position_ids": batch["position_ids"][row, kept][None],
        "segment_ids": batch["segment_ids"][row, kept][None],
        "cu_seq_lens": torch.zeros(1, dtype=torch.int32),  # of no use to sdpa, which gets a mask
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("packed", "attention"), WAYS)
def test_one_layer_computes_the_kept_tokens_as_if_there_were_no_others(
    family: str, packed: bool, attention: str
) -> None:
    model, plain = built(family, 1, attention=attention), built(family, 1)
    batch = a_batch(packed)
    begin_step(model, 1)
    found = logits(model, batch)
    [kept] = model.token_dropping.positions
    assert kept.shape == (len(batch["input_ids"]), 8 if not packed else kept.size(1))
    assert 0 < kept.size(1) < batch["input_ids"].size(1)
    assert torch.equal(kept, kept.sort(dim=1).values)
    passed_by = plain.lm_head(plain.model.norm(plain.model.embed_tokens(batch["input_ids"])))
    for row, mine in enumerate(kept):
        real = batch["segment_ids"][row, mine] > 0
        alone = logits(plain, without(batch, row, mine))[0]
        assert torch.allclose(found[row, mine][real], alone[real], atol=2e-5)
        others = torch.ones(found.size(1), dtype=torch.bool)
        others[mine] = False
        assert torch.allclose(found[row, others], passed_by[row, others], atol=1e-6)


def test_gradients_with_recomputed_layers_are_the_same() -> None:
    gradients = []
    for recomputes in (False, True):
        model = built("glm", 3)
        if recomputes:
            again = partial(checkpoint, use_reentrant=False)
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)
        begin_step(model, 2)
        logits(model, a_batch(True)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(grad is not None and grad.isfinite().all() for grad in gradients[0])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_only_middle_layers_only_while_it_lasts_and_never_in_evaluation() -> None:
    model, plain = built("glm", 4, RandomLtdConfig(steps=4, start_share=0.2)), built("glm", 4)
    batch, seen = a_batch(True), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["hidden_states"].size(1)), with_kwargs=True
        )
    size, expected = batch["input_ids"].size(1), logits(plain, batch)
    for step, share in ((0, 1), (1, 0.2), (3, 0.6), (4, 0.8), (5, 1)):
        seen.clear()
        begin_step(model, step)
        found, kept = logits(model, batch), -(-int(share * size) // 8) * 8
        assert seen == [size, kept, kept, size]
        assert dropping_metrics(model) == {"ltd_share": share}
        assert torch.equal(found, expected) == (kept == size)
    begin_step(model, 1)
    assert torch.equal(logits(model.eval(), batch), expected)
    assert dropping_metrics(torch.nn.Linear(1, 1)) == {}


def test_what_is_dropped_follows_from_seed_step_micro_batch_and_rank() -> None:
    model, batch = built("glm", 3, ALL), a_batch(True)

    def drawn(step: int, key: str = "3 0") -> list[list[list[int]]]:
        model.token_dropping.key = key
        begin_step(model, step)
        found = []
        for _ in range(2):
            logits(model, batch)
            found += [kept.tolist() for kept in model.token_dropping.positions]
        return found

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = drawn(1)
    assert torch.equal(torch.get_rng_state(), state), "dropout goes on as it would"
    assert len({str(kept) for kept in first}) == 6
    assert drawn(1) == first
    assert drawn(1, "3 1") != first != drawn(1, "4 0")


def test_models_that_cannot() -> None:
    def refused(model: Any, config: RandomLtdConfig = ALL) -> str:
        with pytest.raises(ModelError) as caught:
            TokenDropping(model, config, 1, 0)
        return str(caught.value)

    start = "train.random_ltd cannot be used with this model: "
    glm = transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES))
    assert refused(glm, RandomLtdConfig(steps=1)) == (
        start + "no layer is left between train.random_ltd.first_layers and last_layers."
    )
    moe = transformers.AutoModelForCausalLM.from_config(CONFIGS["glm4_moe"]())
    assert refused(moe) == start + "its experts are balanced over all tokens of all layers."
    sizes = {"hidden_size": 32, "inner_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "vocab_size": 200}
    chatglm = ChatGLMForConditionalGeneration(ChatGLMConfig(**sizes, bos_token_id=180, eos_token_id=181))
    assert refused(chatglm) == start + "its layers find positions in another way than transformers' rotary ones."
