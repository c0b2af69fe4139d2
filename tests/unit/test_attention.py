"""Packed rows: per-token losses and gradients are those of each sample alone, in every implementation and family."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from tests.unit.tiny_model import SIZES
from toolkit.config.load import load
from toolkit.config.schema import Attention, Init, ModelConfig
from toolkit.data.loader import collate
from toolkit.data.store import Sample
from toolkit.distributed import accelerator
from toolkit.messages import ModelError
from toolkit.models import attention as attention_module, segment_attention
from toolkit.models.attention import attention_arguments, choose_attention
from toolkit.models.isolation import check_isolation
from toolkit.models.packable import reason_not_to_pack

MOE = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, Any] = {
    "glm": lambda: transformers.GlmConfig(**SIZES, attention_bias=True),
    "glm4": lambda: transformers.Glm4Config(**SIZES),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**SIZES, **MOE),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "stablelm": lambda: transformers.StableLmConfig(**SIZES),  # its layers hand on the mask alone
}
# fp32: what is left is the order of additions.
TOLERANCE = 2e-5


def build(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    return model.train()


def samples(count: int = 7) -> list[Sample]:
    draw = np.random.default_rng(3)
    made = []
    for _ in range(count):
        length = int(draw.integers(2, 14))
        trained = draw.random(length) < 0.7
        trained[0] = False
        made.append((draw.integers(2, 128, length).astype(np.uint32), trained))
    return made


def losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss at each token, 0 where untrained, [B, S]."""
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], **attention_arguments(model, batch)
    ).logits
    targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", [Attention.varlen, Attention.sdpa, Attention.eager])
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_equals_alone(family: str, attention: Attention) -> None:
    model, given = build(family), samples()
    alone = []
    for sample in given:
        batch = collate([[sample]], 0)
        token_losses = losses(model, batch)
        token_losses.sum().backward()
        alone.append(token_losses[0, : len(sample[0])].detach())
    expected = gradients(model)
    choose_attention(model, attention, True, torch.float32)
    rows = [given[:3], given[3:4], given[4:]]
    batch = collate(rows, 0, packed=True)
    token_losses = losses(model, batch)
    token_losses.sum().backward()
    found = gradients(model)
    for number, row in enumerate(rows):
        begin = 0
        for sample in row:
            end = begin + len(sample[0])
            torch.testing.assert_close(token_losses[number, begin:end].detach(), alone.pop(0), rtol=0, atol=TOLERANCE)
            begin = end
        assert token_losses[number, begin:].sum() == 0
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=TOLERANCE, msg=name)


def function_of(version: str) -> Any:
    """Return the function for variable lengths of a version of PyTorch (nn/attention/varlen.py); its kernel apart."""

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        return torch.empty_like(query)

    def of_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
    ):
        assert window_size == (-1, 0)
        return torch.empty_like(query)

    def of_2_13(query, key, *others, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa or query.size(1) == key.size(1)
        return torch.empty_like(query)

    return {"2.10": of_2_10, "2.11": of_2_11, "2.13": of_2_13}[version]


def test_older_gpus_have_no_kernel_for_variable_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a T4 or V100 packed rows get a mask, and prefixes are not shared, instead of a refusal."""
    monkeypatch.setattr(attention_module, "trains_on_gpu", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(varlen, "varlen_attn", function_of("2.13"))
    for capability, name in (((7, 5), "sdpa"), ((8, 0), "varlen")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        model = build("glm")
        choose_attention(model, Attention.auto, True, torch.float16)
        assert model.config._attn_implementation == name
        assert attention_module.computes_segments(load(["recipe=fp16"]).cfg) == (name != "sdpa")


@pytest.mark.parametrize(("version", "is_used"), [("2.10", False), ("2.11", True), ("2.13", True)])
def test_each_version_of_the_kernel(version: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer heads of keys, which 2.13 has to be told and 2.11 cannot be; 2.10 cannot be told a scale."""
    monkeypatch.setattr(varlen, "varlen_attn", function_of(version))
    monkeypatch.setattr(attention_module, "trains_on_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "has_ampere_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # or making fake tensors begins with a GPU
    model = build("glm")
    choose_attention(model, Attention.auto, True, torch.bfloat16)
    assert model.config._attn_implementation == ("varlen" if is_used else "sdpa")
    if is_used:
        with FakeTensorMode():
            query, key = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
            bounds = torch.empty(5, dtype=torch.int32, device="cuda")
            mixed = segment_attention.attend_to_segments(query, key, key, bounds, 8, scaling=0.3)
        assert mixed.shape == (2, 8, 4, 16)


def test_generation_is_untouched() -> None:
    model = build("glm").eval()
    ids = torch.randint(2, 128, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    choose_attention(model, Attention.varlen, True, torch.float32)
    assert torch.equal(model.generate(ids, **options), before)


def test_nothing_of_it_is_saved(tmp_path: Any) -> None:
    model = build("glm")
    choose_attention(model, Attention.varlen, True, torch.float32)
    model.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("attention", [Attention.auto, Attention.sdpa])
def test_isolation_is_measured(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("glm")
    choose_attention(model, attention, True, torch.float32)
    check_isolation(model, 128, torch.device("cpu"), "glm")
    assert model.training
    with monkeypatch.context() as patched:
        # Attention over the whole row, as if packing were concatenation.
        everything = {"attention_mask": torch.ones(3, 32, dtype=torch.long)}
        patched.setattr("toolkit.models.isolation.attention_arguments", lambda module, batch: everything)
        with pytest.raises(ModelError, match=r"the samples of a row influence each other .*data\.packing=grouped"):
            check_isolation(model, 128, torch.device("cpu"), "glm")
    original = model.forward
    # Positions that run on over the row.
    model.forward = lambda **given: original(**{**given, "position_ids": torch.arange(32).repeat(3, 1)})
    if attention is Attention.auto:
        check_isolation(model, 128, torch.device("cpu"), "glm")  # rotary attention sees distances only
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )
    choose_attention(gpt2, attention, True, torch.float32)
    check_isolation(gpt2, 128, torch.device("cpu"), "gpt2")
    forward = gpt2.forward
    gpt2.forward = lambda **given: forward(**{**given, "position_ids": torch.arange(32).repeat(3, 1)})
    with pytest.raises(ModelError, match="gpt2 cannot be trained on packed rows"):
        check_isolation(gpt2, 128, torch.device("cpu"), "gpt2")


def deep(layers: int, spread: float) -> transformers.PreTrainedModel:
    """Return a tiny GLM in bf16 that takes packed rows."""
    torch.manual_seed(0)
    config = transformers.GlmConfig(**SIZES | {"num_hidden_layers": layers}, initializer_range=spread)
    model: transformers.PreTrainedModel = transformers.GlmForCausalLM(config).to(torch.bfloat16)
    choose_attention(model, Attention.varlen, True, torch.bfloat16)
    return model


def with_attention(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change(output, layer, query, key, value, scaling)` replace what attention over segments gives."""
    real, calls = segment_attention.attend_to_segments, itertools.count()

    def changed(query: Any, key: Any, value: Any, bounds: Any, *options: Any) -> Any:
        output = real(query, key, value, bounds, *options)
        return change(output, next(calls), query, key, value, options[2])

    patch.setattr(segment_attention, "attend_to_segments", changed)


DEPTHS = pytest.mark.parametrize(("layers", "spread"), [(12, 0.02), (12, 0.1), (28, 0.02), (28, 0.1)])


@DEPTHS
@pytest.mark.parametrize("share", [0.001, 0.1])
def test_rounding_is_no_leak(layers: int, spread: float, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on GPUs round differently from row to row: some attention outputs are off by one ulp of bf16."""
    model, draw = deep(layers, spread), torch.Generator().manual_seed(1)

    def one_ulp(output: torch.Tensor, *_: Any) -> torch.Tensor:
        hit, up = (torch.rand(output.shape, generator=draw) for _ in range(2))
        step = torch.where(up < 0.5, 1, -1) * (hit < share) * (output != 0)  # what is below 0 is no number
        return (output.contiguous().view(torch.int16) + step.to(torch.int16)).view(torch.bfloat16)

    for _ in range(3):
        with monkeypatch.context() as patch:
            with_attention(patch, one_ulp)
            check_isolation(model, 128, torch.device("cpu"), "glm")


@DEPTHS
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seeing", ["the first token", "every token"])
def test_one_token_of_another_sample_in_one_layer_is_caught(
    layers: int, spread: float, place: float, seeing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sample, or its first token alone, sees the last token of the first, as where bounds are one off."""
    model, leaking = deep(layers, spread), round(place * (layers - 1))

    def leak(output: Any, layer: int, query: Any, key: Any, value: Any, scaling: Any) -> Any:
        if layer != leaking:
            return output
        size = query.size(2)
        segments = torch.zeros(3, size, dtype=torch.long)
        segments[:2, 12:], segments[2, 20:] = 1, 1
        mask = (segments[:, :, None] == segments[:, None, :]) & torch.ones(size, size, dtype=torch.bool).tril()
        mask[:2, 12 : 13 if seeing == "the first token" else size, 11] = True
        groups = query.size(1) // key.size(1)
        keys, values = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask[:, None], scale=scaling
        ).transpose(1, 2)

    with_attention(monkeypatch, leak)
    with pytest.raises(ModelError, match="the samples of a row influence each other"):
        check_isolation(model, 128, torch.device("cpu"), "glm")


TWO = {"num_hidden_layers": 2}
SLIDING = {"model_type": "olmo3", "layer_types": ["full_attention", "sliding_attention"], **TWO}
TOO_SHORT = "its attention reaches back 32 tokens only, less than data.max_length = 64"
MIXED = "it has layers that mix a whole row: "
PACKABLE: dict[str, tuple[dict[str, Any], str]] = {
    "attention": ({"model_type": "llama"}, ""),
    "unused window": ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, ""),
    "long window": ({"model_type": "mistral", "sliding_window": 64}, ""),
    "short window": ({"model_type": "mistral", "sliding_window": 32}, TOO_SHORT),
    "short window in some layers": (SLIDING | {"sliding_window": 32}, TOO_SHORT),
    "long window in some layers": (SLIDING | {"sliding_window": 64}, ""),
    "short window of a part": (
        {"model_type": "gemma3", "text_config": {"sliding_window": 32, **TWO}, "vision_config": {}},
        TOO_SHORT,
    ),
    "linear attention": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], **TWO},
        MIXED + "linear_attention",
    ),
    "kinds that the file leaves out": ({"model_type": "falcon_h1", **TWO}, MIXED + "hybrid"),
    "recurrence": ({"model_type": "recurrent_gemma", **TWO}, MIXED + "linear_attention"),
    "older names": ({"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"], **TWO}, ""),
    "positions of its own": ({"model_type": "bart"}, "its positions run on over a whole row"),
    "distances alone": ({"model_type": "mpt"}, ""),
}


@pytest.mark.parametrize("name", PACKABLE)
def test_models_that_cannot(name: str, tmp_path: Path) -> None:
    """By what transformers makes of a config, before anything is packed; a measurement might miss a small leak."""
    config, reason = PACKABLE[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert reason_not_to_pack(ModelConfig(path=str(tmp_path)), 64) == reason


def test_models_that_cannot_of_other_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "position_encoding_2d": True}
    monkeypatch.setattr("toolkit.models.packable.read_config", lambda path, with_weights: config)
    reason = "ChatGLM-6B finds the positions of a whole row from its one <sop>"
    assert reason_not_to_pack(ModelConfig(path="x"), 64) == reason
    assert reason_not_to_pack(ModelConfig(init=Init.random), 64) == ""


def test_a_state_that_runs_on_is_measured_in_float32() -> None:
    """A new Falcon-H1's changes logits by 0.2 % of their spread, less than rounding in bf16 may."""
    torch.manual_seed(5)
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64}
    model = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SIZES, **sizes, mamba_chunk_size=16))
    choose_attention(model, Attention.auto, True, torch.float32)
    with pytest.raises(ModelError, match=r"influence each other .* rounding changes them by less than 0\.0003"):
        check_isolation(model, 128, torch.device("cpu"), "falcon")
    check_isolation(model.to(torch.bfloat16), 128, torch.device("cpu"), "falcon")


def test_attention_that_adds_to_its_mask_gets_one() -> None:
    """Doge's would lose what it adds, and the gradient of its weights."""
    torch.manual_seed(5)
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES)).train()
    choose_attention(model, Attention.auto, True, torch.float32)
    assert model.config._attn_implementation == "sdpa"
    check_isolation(model, 128, torch.device("cpu"), "doge")
    choose_attention(model, Attention.varlen, True, torch.float32)
    with pytest.raises(ModelError, match=r"its attention adds to the mask: set model\.attention=sdpa"):
        check_isolation(model, 128, torch.device("cpu"), "doge")


def test_unknown_attention() -> None:
    class Alone(transformers.GlmForCausalLM):
        _supports_sdpa = False

    model = Alone(CONFIGS["glm"]())
    with pytest.raises(ModelError, match=r"model\.attention = sdpa is not supported by Alone"):
        choose_attention(model, Attention.sdpa, False, None)


@pytest.mark.parametrize("size", [96, 640])
def test_short_segments_in_half_precision(size: int) -> None:
    """They are computed in float32 on CPUs; outputs and gradients are at most as far from float64 as the kernel's."""
    torch.manual_seed(0)
    states = [torch.randn(1, heads, size, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    outer = torch.randn(1, size, 4, 16, dtype=torch.bfloat16)

    def outcome(dtype: torch.dtype, of_kernel: bool = False) -> list[torch.Tensor]:
        given = [one.to(dtype, copy=True).requires_grad_() for one in states]
        if of_kernel:
            mixed = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2)
        else:
            mixed = segment_attention.attend_to_segments(*given, torch.tensor([0, size], dtype=torch.int32), size)
        assert mixed.dtype is dtype
        mixed.backward(outer.to(dtype))
        return [mixed.detach().double(), *(one.grad.double() for one in given)]

    exact = outcome(torch.float64)
    for mine, kernels, right in zip(outcome(torch.bfloat16), outcome(torch.bfloat16, True), exact, strict=True):
        assert (mine - right).norm() <= 1.01 * (kernels - right).norm()
