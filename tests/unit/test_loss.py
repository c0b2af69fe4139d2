"""Losses without logits: values and gradients are those of plain cross entropy over all logits, in every model."""

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.tiny_model import SIZES
from toolkit.config.schema import LossKernel
from toolkit.engine.memory import PeakMemory
from toolkit.models import loss_kernels
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.loss import LossHead, LossPath, loss_head, num_trained_tokens, token_loss_sum, token_losses
from toolkit.models.prompt_tuning import SoftPrompt, attach_prompt
from toolkit.models.record import record_of
from toolkit.plan import memory
from toolkit.sample_types import with_targets

SOP, PAD = 120, 3


def glm(**options: Any) -> Any:
    return transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES, attention_bias=True, **options))


def with_bias() -> Any:
    model = glm()
    model.lm_head = torch.nn.Linear(32, 128)
    return model


def chatglm() -> Any:
    config = ChatGLMConfig(
        hidden_size=32,
        inner_hidden_size=48,
        num_layers=2,
        num_attention_heads=4,
        vocab_size=128,
        bos_token_id=SOP,
        eos_token_id=121,
        pad_token_id=PAD,
    )
    return ChatGLMForConditionalGeneration(config)


def lora(target: str, **options: Any) -> Any:
    model = glm()
    inject_adapter_in_model(LoraConfig(target_modules=[target], init_lora_weights=False, **options), model)
    return model


def prompted() -> Any:
    model = glm()
    attach_prompt(model, SoftPrompt(torch.randn(5, 32)))
    return model


class Halved(transformers.GlmForCausalLM):
    """Changes its logits in place."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        output = super().forward(*arguments, **options)
        output.logits.mul_(0.5)
        return output


MODELS: dict[str, tuple[Any, LossPath]] = {
    "glm": (glm, LossPath.losses),
    "glm4": (lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**SIZES)), LossPath.losses),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), LossPath.losses),
    "qwen2-tied": (
        lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        LossPath.losses,
    ),
    "bias": (with_bias, LossPath.losses),
    "chatglm": (chatglm, LossPath.losses),
    "lora": (lambda: lora("q_proj"), LossPath.losses),
    "prompt": (prompted, LossPath.losses),
    "gemma2": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
        LossPath.picked,
    ),
    "cohere": (lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES)), LossPath.picked),
    "in-place": (lambda: Halved(transformers.GlmConfig(**SIZES, attention_bias=True)), LossPath.picked),
    "lora-head": (lambda: lora("lm_head"), LossPath.picked),
    "saved-head": (lambda: lora("q_proj", modules_to_save=["lm_head"]), LossPath.picked),
}


def build(name: str) -> Any:
    torch.manual_seed(5)
    model = MODELS[name][0]().train()
    for parameter in model.parameters():  # a sharp distribution, so that mistakes are large
        parameter.data.mul_(3)
    return model


def make_batch(trained: bool = True) -> dict[str, torch.Tensor]:
    """Three rows: trained from a place on, with gaps, and padded; the first token of one is marked as trained too."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 119, (3, 16), generator=generator)
    ids[:, 4] = SOP
    labels = torch.where(torch.rand(3, 16, generator=generator) < 0.6, ids, -100)
    labels[0, 0] = ids[0, 0]
    labels[1, :6] = -100
    segments = torch.ones_like(ids)
    segments[2, 11:], ids[2, 11:], labels[2, 11:] = 0, PAD, -100
    if not trained:
        labels[:] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.arange(16).repeat(3, 1),
        "segment_ids": segments,
    }


def reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return each token's loss at the position before it, from all logits."""
    given = {"input_ids": batch["input_ids"], "attention_mask": (batch["segment_ids"] > 0).long()}
    logits = model(**given, use_cache=False).logits.float()
    targets = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm() + 1e-12, name


@pytest.mark.parametrize("name", MODELS)
def test_every_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * 128 * 7)  # seven tokens a chunk
    model, batch = build(name), make_batch()
    expected = reference(model, batch)
    (expected.sum() * 0.25).backward()
    wanted = gradients(model)
    loss = token_loss_sum(model, batch)
    assert loss_head(model).path(model) is MODELS[name][1]
    assert loss.shape == () and loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected.sum().detach(), rtol=1e-6, atol=0, check_dtype=True)
    (loss * 0.25).backward()
    assert_equal(gradients(model), wanted, 3e-6)
    found = token_losses(model, batch)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    assert model.training
    assert "forward" not in model.get_output_embeddings().__dict__
    assert num_trained_tokens(with_targets(batch)) == int((expected != 0).sum())


@pytest.mark.parametrize("name", ["glm", "chatglm", "prompt", "gemma2", "lora-head"])
def test_nothing_trained(name: str) -> None:
    """A loss of zero with a graph, as all ranks must go backward alike."""
    model, batch = build(name), make_batch(trained=False)
    expected = {parameter for parameter, value in model.named_parameters() if value.requires_grad}
    loss = token_loss_sum(model, batch)
    assert loss == 0
    loss.backward()
    found = gradients(model)
    assert set(found) == expected
    assert not any(gradient.any() for gradient in found.values())
    assert not token_losses(model, batch).any()


def test_full_is_the_same() -> None:
    model, batch = build("glm"), make_batch()
    chunked = token_loss_sum(model, batch)
    record_of(model).loss_head = LossHead(LossKernel.full)
    torch.testing.assert_close(token_loss_sum(model, batch), chunked, rtol=1e-6, atol=0)
    assert loss_head(model).path(model) is LossPath.all_logits


def test_no_logits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as the trained tokens' logits is made, in the forward or the backward pass."""
    model = build("glm")
    batch = make_batch()
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * 128 * 7)
    token_loss_sum(model, batch)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            # All of the vocabulary's width but the weight, which is transposed.
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (128,) and result.shape != (32, 128):
                made.append(result.numel() // 128)
            return result

    with Watch():
        token_loss_sum(model, batch).backward()
    # Seven tokens a chunk, and their gradients in a buffer of half the bytes of the weight's gradient.
    assert num_trained_tokens(with_targets(batch)) > 16
    assert sorted(set(made))[-2:] == [7, 16], made


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 512.0])
def test_precision(dtype: torch.dtype, factor: float, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary whose probabilities fp16 cannot hold; what is compared with is fp64 on the same numbers."""
    vocab, width, tokens = 20_000, 16, 50
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * vocab * 8)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator) * 0.05).to(dtype).requires_grad_(trained)
    bias = (torch.randn(vocab, generator=generator) * 0.05).to(dtype).requires_grad_(trained)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    loss = loss_kernels.chunked_loss_sum(hidden, weight, bias, targets)
    (loss * factor).backward()
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight, bias)]
    logits = functional.linear(*exact)
    expected = functional.cross_entropy(logits, targets, reduction="sum")
    (expected * factor).backward()
    # Rounding of the type, of logits and of gradients.
    unit = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert abs(loss.item() - expected.item()) <= unit * expected.item()
    for found, wanted in zip((hidden, weight, bias) if trained else (hidden,), exact, strict=False):
        assert found.grad is not None and found.grad.dtype is dtype and wanted.grad is not None
        error = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert error <= unit, float(error)
    assert trained or (weight.grad is None and bias.grad is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "most"), [(64, 2), (160, 6)])
def test_the_weights_gradient_is_not_rewritten_for_each_chunk(
    dtype: torch.dtype, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of V x H x 4 bytes each time, it would be a tenth of a step of GLM-4-9B; here 8 or 20 chunks of 8 tokens."""
    vocab, width, written = 1000, 64, [0]
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", 4 * vocab * 8)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ in ("add_", "addmm_") and result.size(-1) == width:
                written[0] += result.numel()
            return result

    with Watch():
        loss_kernels.chunked_loss_sum(hidden, weight, None, torch.randint(vocab, (tokens,))).backward()
    assert 0 < written[0] <= most * vocab * width


@pytest.mark.parametrize("trained", [True, False])
def test_a_chunk_is_dropped_before_the_next(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most its logits, these in float32 and their log-probabilities are held: what plan/memory.py counts."""
    monkeypatch.setattr(loss_kernels, "CHUNK_BYTES", chunk := 2**20)
    vocabulary = 4096
    hidden = torch.randn(256, 4).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, 4).bfloat16().requires_grad_(trained)
    targets = torch.randint(vocabulary, (256,))
    with PeakMemory(torch.device("cpu"), only_new=True) as measured:
        loss_kernels.chunked_loss_sum(hidden, weight, None, targets)
    assert 2.4 * chunk < measured.highest() < 2.7 * chunk


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = loss_kernels.chunked_loss_sum(hidden, weight, None, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()


def test_right_padding_needs_no_mask() -> None:
    """Padding on the right, on which no mask is made, changes nothing that is trained; left padding keeps its mask."""
    model, batch = build("llama"), make_batch()
    alone = {name: tensor[2:, :11] for name, tensor in batch.items()}
    expected = copy.deepcopy(model)
    loss, shorter = token_loss_sum(model, {n: t[2:] for n, t in batch.items()}), token_loss_sum(expected, alone)
    torch.testing.assert_close(loss, shorter, rtol=1e-6, atol=0)
    loss.backward()
    shorter.backward()
    assert_equal(gradients(model), gradients(expected), 3e-6)


def test_the_memory_estimate_counts_the_same_chunks() -> None:
    assert loss_kernels.CHUNK_BYTES == memory.CHUNK_BYTES
