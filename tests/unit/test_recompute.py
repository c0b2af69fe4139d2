"""Activation checkpointing of layers that take, return or share more than hidden states: the gradients are the same."""

import importlib
from collections import Counter
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.schema import ActivationCheckpointingConfig
from toolkit.engine.recompute import check_recomputes, checkpoint_activations
from toolkit.messages import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
MAMBA = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "chunk_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    # Their layers return a tuple of one tensor; return several, get embeddings by name, and share a block; write keys
    # and values for later layers into a mapping; are called several times.
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
    },
    "zamba2": MAMBA | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "hrm_text": {},
}


def built(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    return transformers.AutoModelForCausalLM.from_config(config).train()


def gradients(model: Any) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the gradients of a loss, and how often each was complete and each norm of the first layer computed."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    layer = next(part for part in model.modules() if isinstance(part, GradientCheckpointingLayer))
    for name, part in layer.named_modules():
        if "norm" in name:
            part.register_forward_hook(lambda *_, name=name: counts.update([f"computed {name}"]))
    ids = torch.arange(24).view(2, 12) % 50
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}, counts


class HostMemory:
    """Stands in for DeepSpeed's engine that moves activations between GPU and host memory."""

    def __init__(self) -> None:
        self.moved: dict[int, torch.Tensor] = {}
        self.restored: list[int] = []

    def offload_input(self, tensor: torch.Tensor) -> int:
        self.moved[len(self.moved)] = tensor.clone()
        return len(self.moved) - 1

    def restore_input(self, token: int) -> torch.Tensor:
        self.restored.append(token)
        return self.moved[token]


@pytest.mark.parametrize("kind", ["gemma4_text", "hrm_text"])
def test_inputs_of_layers_go_to_host_memory_and_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose copies are not made here: by the reentrant function, and by the other one."""
    function = importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
    settings: dict[str, Any] = {}
    monkeypatch.setattr(deepspeed.checkpointing, "configure", lambda *given, **named: settings.update(named))
    expected, _ = gradients(built(kind))
    model, host = built(kind), HostMemory()
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(deepspeed.accelerator.get_accelerator(), "device_name", lambda *_: "cuda")
        checkpoint_activations(model, ActivationCheckpointingConfig(enabled=True, cpu_checkpointing=True), stage=2)
    assert settings["checkpoint_in_cpu"] is True
    monkeypatch.setattr(function, "CPU_CHECKPOINT", True)
    monkeypatch.setattr(function, "_get_cpu_offload_engine", lambda: host)
    result, _ = gradients(model)
    assert len(host.moved) >= SIZES["num_hidden_layers"] and sorted(host.restored) == sorted(host.moved)
    assert all(torch.equal(result[name], gradient) for name, gradient in expected.items())
    with pytest.raises(ConfigError, match="recomputed layers contain others"):
        checkpoint_activations(built("zamba2"), ActivationCheckpointingConfig(cpu_checkpointing=True), stage=2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each is complete once: DeepSpeed's ZeRO-2 takes no second one."""
    monkeypatch.setattr(deepspeed.checkpointing, "configure", lambda *given, **named: None)  # a collective
    expected, plain = gradients(built(kind))
    model = built(kind)
    checkpoint_activations(model, ActivationCheckpointingConfig(enabled=True), stage=2)
    result, counts = gradients(model)
    again = {name for name in counts if counts[name] > plain[name]}
    assert again and again == {name for name in counts if name.startswith("computed")}
    assert result.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "stage", "reason"),
    [
        ("zamba2", 3, "model.layers.1.shared_transformer.*is used several times"),
        ("zamba2", 2, ""),
        ("gemma4_text", 3, ""),
    ],
)
def test_what_cannot_be_is_rejected(kind: str, stage: int, reason: str) -> None:
    with torch.device("meta"):
        model = built(kind)
    if reason:
        with pytest.raises(ConfigError, match=reason):
            check_recomputes(model, stage)
        model.requires_grad_(False)  # as LoRA leaves them
    check_recomputes(model, stage)
