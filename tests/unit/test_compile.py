"""torch.compile: what it reaches, and what is computed beside it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import transformers
from deepspeed.runtime import utils
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from tests.architectures import CONFIGS
from toolkit.config.load import load
from toolkit.config.schema import ActivationCheckpointingConfig, Attention, CompileConfig
from toolkit.data.loader import collate
from toolkit.engine import compiling, deepspeed_patches
from toolkit.engine.recompute import checkpoint_activations
from toolkit.launch.environment import Ranks
from toolkit.models import probe
from toolkit.models.attention import attention_arguments, choose_attention
from toolkit.train import compile_check
from toolkit.train.hooks import hooks_of
from toolkit.train.step import StepResult

RECOMPUTE = ActivationCheckpointingConfig(enabled=True)


def create(name: str) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


class Counting:
    """A backend that computes graphs as they are, and counts their matrix products."""

    def __init__(self) -> None:
        self.linears: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        self.linears.append(sum("linear" in str(node.target) for part in parts for node in part.graph.nodes))
        return graph.forward


def gradients(model: torch.nn.Module, compiled: Callable[..., Any]) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6) % 50
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return grads_of(model)


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take a model's gradients."""
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch.compile looks at after a break
def test_layers_that_are_computed_again_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's checkpoint function is looked into, DeepSpeed's is not (0.19.8)."""
    monkeypatch.setattr(deepspeed.checkpointing, "configure", lambda *given, **named: None)  # a collective
    model = create("llama").train()
    plain = gradients(model, model)
    every = sum(isinstance(one, torch.nn.Linear) for one in model.modules())
    for compiled, reached in ((True, every), (False, 1)):
        checkpoint_activations(model, RECOMPUTE, 2, compiled=compiled)
        torch._dynamo.reset()
        backend = Counting()
        found = gradients(model, torch.compile(model, backend=backend))
        assert sum(backend.linears) == reached
        assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in plain.items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch.compile looks at after a break
@pytest.mark.parametrize("name", ["glm", "gemma3"])
@torch._dynamo.config.patch(recompile_limit=8)
def test_layers_of_a_kind_are_compiled_once(name: str) -> None:
    """28 layers in one graph take minutes; ZeRO 3 compiles the whole model, whose graphs its hooks end."""
    made = {}
    for stage, layers in ((2, 2), (2, 10), (3, 2), (3, 10)):
        config = CONFIGS[name]()
        config.num_hidden_layers = layers
        if types := getattr(config, "layer_types", None):
            config.layer_types = [types[number % len(types)] for number in range(layers)]
        model, backend = transformers.AutoModelForCausalLM.from_config(config).train(), Counting()
        plain = gradients(model, model)
        checkpoint_activations(model, RECOMPUTE, 2, compiled=True)
        torch._dynamo.reset()
        torch._dynamo.register_backend(backend, name="counting")
        whole = lambda backend, options, model=model: model.compile(backend=backend, **options)  # noqa: E731
        engine: Any = SimpleNamespace(zero_optimization_stage=lambda stage=stage: stage, compile=whole)
        compiling.compile_layers(engine, model, CompileConfig(enabled=True, backend="counting"))
        found = gradients(model, model)
        assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in plain.items())
        made[stage, layers] = sum(backend.linears)
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")
    linears = made[2, 2]
    assert made == {(2, 2): linears, (2, 10): linears, (3, 2): 2 * linears + 1, (3, 10): 10 * linears + 1}  # the head


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch.compile looks at after a break
@pytest.mark.parametrize("attention", [Attention.varlen, Attention.sdpa])
def test_rows_of_any_division_are_compiled_once(attention: Attention) -> None:
    """Packed rows of one length hold other samples in every step. One compiled model must serve them all."""
    draw = np.random.default_rng(1)
    rows = []
    for count in (3, 5, 2, 7, 4, 6, 9, 1):
        ends = [0, *np.sort(draw.choice(np.arange(1, 63), count - 1, replace=False)), 64]
        rows.append([(draw.integers(2, 90, size).astype(np.uint32), np.arange(size) > 0) for size in np.diff(ends)])
    batches = [collate([row], 0, packed=True) for row in rows]
    model, backend = create("llama").train(), Counting()
    choose_attention(model, attention, True, torch.float32)

    def train(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        arguments = {"position_ids": batch["position_ids"], "use_cache": False} | attention_arguments(model, batch)
        model(input_ids=batch["input_ids"], **arguments).logits.norm().backward()
        return grads_of(model)

    plain = [train(batch) for batch in batches]
    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="counting")
    engine: Any = SimpleNamespace(zero_optimization_stage=lambda: 2)
    compiling.compile_layers(engine, model, CompileConfig(enabled=True, backend="counting"))
    graphs = []
    for batch, expected in zip(batches, plain, strict=True):
        found = train(batch)
        graphs.append(len(backend.linears))
        assert all(torch.allclose(found[name], one, atol=1e-5) for name, one in expected.items())
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")
    assert graphs[0] and graphs[2] == graphs[-1], graphs


@pytest.mark.parametrize(
    ("settings", "stage", "deepcompile", "expected"),
    [
        ({}, 2, False, True),
        ({}, 3, False, False),
        ({}, 3, True, True),
        ({"cpu_checkpointing": True}, 2, False, False),
    ],
)
def test_what_is_reached(settings: dict[str, Any], stage: int, deepcompile: bool, expected: bool) -> None:
    recompute = ActivationCheckpointingConfig(**{"enabled": True, **settings})
    config = CompileConfig(enabled=True, deepcompile=deepcompile)
    assert compiling.reaches_recomputed_layers(config, recompute, stage) == expected


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does (2.13)
def test_gradients_of_compiled_functions() -> None:
    """DeepSpeed's linear layer of ZeRO-3 adds its bias in place; torch 2.11 would lose all its gradients."""
    compiling.keep_gradients_of_compiled_functions()
    torch._dynamo.reset()
    layers = [torch.nn.Linear(4, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, wrap in zip(layers, (zero3_linear_wrap, torch.compile(zero3_linear_wrap, backend="eager")), strict=True):
        states = torch.arange(24.0).view(2, 3, 4).requires_grad_()
        wrap(states, layer.weight, layer.bias).square().sum().backward()
        layer.found = [states.grad, layer.weight.grad, layer.bias.grad]
    assert all(map(torch.equal, layers[0].found, layers[1].found))


def test_a_probe_compiles_nothing() -> None:
    """Its rows would count among the sizes that graphs are made for."""
    model, backend = create("llama"), Counting()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    probe.capture(compiled, torch.arange(6).view(1, 6))
    assert backend.linears == []


@pytest.mark.parametrize("norm", [3.0, float("inf"), float("nan")])
def test_a_norm_is_checked_as_deepspeed_does(norm: float) -> None:
    theirs, mine = torch.tensor(norm), torch.tensor(norm)
    original = utils.mask_nan_or_inf_with_val_inplace
    deepspeed_patches.patch_norm_masking()
    for module in (utils, stage3, stage_1_and_2):
        assert module.mask_nan_or_inf_with_val_inplace is deepspeed_patches._mask_invalid
    utils.mask_nan_or_inf_with_val_inplace(mine, device="cpu")
    if original is not deepspeed_patches._mask_invalid:
        original(theirs, device="cpu")
        assert theirs == mine
    assert mine == (norm if norm == 3.0 else -1.0)


def test_a_run_whose_layers_are_not_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(compile_check, "warn", warnings.append)
    cfg = load(["recipe=quickstart", "compile=inductor", "report.enabled=false"]).cfg
    for graphs in (0, 2):
        monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", graphs)
        hooks = hooks_of(cfg, Ranks(0, 0, 1, 1, "deepspeed"), Path())
        (hook,) = (hook for hook in hooks if isinstance(hook, compile_check.CompileCheck))
        for _ in range(3):
            hook.after_step(StepResult.__new__(StepResult), 1.0)
        assert len(warnings) == 1 and warnings[0].startswith("compile.enabled = true has compiled nothing")
