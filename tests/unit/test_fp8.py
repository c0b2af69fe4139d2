"""Linear layers in FP8: their numbers by definition and as torchao's, what they keep, and which layers become one."""

import contextlib
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from tests.architectures import CONFIGS
from toolkit.cli import main
from toolkit.config.load import load
from toolkit.config.schema import Fp8
from toolkit.layouts import fp8
from toolkit.messages import ConfigError
from toolkit.plan import planned_machine
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import plan_rank
from toolkit.train import startup

KINDS = [Fp8.tensorwise, Fp8.rowwise, Fp8.rowwise_with_gw_hp]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PARTS = [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def layer_of(kind: Fp8, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return fp8._converted(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16), kind)


def drawn(tokens: int, width: int) -> torch.Tensor:
    """Numbers of very different sizes: rows that a scale of their own helps."""
    draw = torch.Generator().manual_seed(tokens + width)
    sizes = torch.logspace(-2, 1, tokens)[:, None]
    return (torch.randn(tokens, width, generator=draw) * sizes).bfloat16()


def rounded(matrix: torch.Tensor, axis: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is left of a matrix in 8 bits, in float64: scaled to fill the type, by powers of two along an axis."""
    matrix = matrix.double()
    largest = matrix.abs().amax() if axis is None else matrix.abs().amax(axis, keepdim=True)
    scale = torch.finfo(dtype).max / largest
    scale = scale.float().double() if axis is None else 2 ** torch.floor(torch.log2(scale))
    return (matrix * scale).float().to(dtype).double() / scale


def by_definition(
    kind: Fp8, states: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the states and of the weight, in float64 from numbers of 8 bits."""
    if kind is Fp8.tensorwise:
        states, weight, gradient = (
            rounded(states, None, E4M3),
            rounded(weight, None, E4M3),
            rounded(gradient, None, E5M2),
        )
        return states @ weight.t(), gradient @ weight, gradient.t() @ states
    output = rounded(states, -1, E4M3) @ rounded(weight, -1, E4M3).t()
    if kind is Fp8.rowwise:
        of_states = rounded(gradient, -1, E4M3) @ rounded(weight, 0, E4M3)
        return output, of_states, rounded(gradient, 0, E4M3).t() @ rounded(states, 0, E4M3)
    one = weight.double().abs().amax()
    whole = 2 ** torch.floor(torch.log2(448 / one))
    weight = (weight.double() * whole).float().to(E4M3).double() / whole
    return output, rounded(gradient, -1, E4M3) @ weight, gradient.double().t() @ states.double()


@pytest.mark.parametrize("tokens", [32, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_definition(kind: Fp8, tokens: int) -> None:
    layer, states, gradient = layer_of(kind), drawn(tokens, 64).requires_grad_(), drawn(tokens, 48)
    found = layer(states[None])
    found.backward(gradient[None])
    output, of_states, of_weight = by_definition(kind, states.detach(), layer.weight.detach(), gradient)
    assert found.shape == (1, tokens, 48) and found.dtype is torch.bfloat16
    for mine, wanted in (
        (found[0].detach() - layer.bias.detach(), output),
        (states.grad, of_states),
        (layer.weight.grad, of_weight),
        (layer.bias.grad, gradient.double().sum(0)),
    ):
        assert float((mine.double() - wanted).norm() / wanted.norm()) < 0.005  # of bf16; FP8 itself loses 0.02 and more
    exact = states.detach().double() @ layer.weight.detach().double().t()
    assert 0.01 < float((output - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("tokens", [32, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_torchao(kind: Fp8, tokens: int) -> None:
    """Bit by bit. torchao is no dependency: peft would import it in every process."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed (pip install torchao==0.18.0)")
    config = float8.Float8LinearConfig.from_recipe_name(kind.value)
    object.__setattr__(config, "pad_inner_dim", tokens % 16 > 0)
    mine, theirs = layer_of(kind), nn.Sequential(nn.Linear(64, 48, dtype=torch.bfloat16))
    theirs[0].load_state_dict(mine.state_dict())
    float8.convert_to_float8_training(theirs, config=config)
    found = []
    for module in (mine, theirs):
        states = drawn(tokens, 64).requires_grad_()
        output = module(states)
        output.backward(drawn(tokens, 48))
        found.append([output, states.grad, *(one.grad for one in module.parameters())])
    assert all(map(torch.equal, *found))


def saved(output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return what the product that an output comes from keeps for the backward pass."""
    node = output.grad_fn
    while node is not None and not hasattr(node, "fp8"):
        [[node, _], *_] = node.next_functions
    assert node is not None
    return node.saved_tensors


def test_weights_are_let_go_between_forward_and_backward() -> None:
    """As ZeRO-3 does: the layer keeps the parameter, not its numbers. A frozen one keeps no states."""
    layer, states = layer_of(Fp8.tensorwise), drawn(32, 64).requires_grad_()
    output, numbers = layer(states), layer.weight.data
    layer.weight.data = torch.empty(0, dtype=torch.bfloat16)
    assert [one.numel() for one in saved(output)] == [32 * 64, 0]
    layer.weight.data = numbers
    layer.weight.requires_grad_(False)
    assert saved(layer(states))[0] is None


def test_evaluation_is_that_of_bf16() -> None:
    layer, states = layer_of(Fp8.tensorwise), drawn(32, 64)
    plain = nn.Linear(64, 48, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(states), plain(states))
    assert torch.equal(layer.eval()(states), plain(states))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_or_infinity_stays_visible(kind: Fp8) -> None:
    """A step with one must not reach the weights, so it must not get lost here."""
    for wrong in (float("nan"), float("inf")):
        states = drawn(32, 64)
        states[3, 5] = wrong
        assert not torch.isfinite(layer_of(kind)(states)).all()
    assert torch.equal(layer_of(kind, bias=False)(torch.zeros(16, 64).bfloat16()), torch.zeros(16, 48).bfloat16())


# torch 2.13's compiler makes an instance of each autograd.Function, which torch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_numbers_are_the_same(kind: Fp8) -> None:
    layer = layer_of(kind)
    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        states = drawn(37, 64).requires_grad_()
        layer.zero_grad()
        output = call(states)
        output.backward(drawn(37, 48))
        found.append([output.detach(), states.grad, layer.weight.grad.clone()])
    assert all(map(torch.equal, *found))


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, fp8.Fp8Linear)]


def converted(kind: str, capsys: pytest.CaptureFixture[str], **changes: int) -> tuple[nn.Module, str]:
    """Return a tiny model whose layers became FP8's, and what was said of them; names and types of weights are kept."""
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    before = {name: (id(one), one.dtype) for name, one in model.state_dict(keep_vars=True).items()}
    fp8.convert(model, Fp8.rowwise)
    assert before == {name: (id(one), one.dtype) for name, one in model.state_dict(keep_vars=True).items()}
    return model, capsys.readouterr().out


def test_layers_of_a_dense_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, said = converted("qwen3", capsys)
    layers = [f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS]
    assert in_fp8(model) == layers
    assert said.splitlines() == [
        "FP8 (rowwise): 14 linear layers multiply in it while training. In bf16 stay embedding, output layer.",
        "FP8 on CPUs is for trying it out: it is much slower than bf16.",
    ]


def test_layers_whose_sizes_do_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    model, said = converted("qwen3", capsys, intermediate_size=40)
    assert [name.rpartition(".")[2] for name in in_fp8(model)] == [*ATTENTION, *ATTENTION]
    assert "8 linear layers" in said and "output layer, sizes that are no multiples of 16 (6)." in said
    with pytest.raises(ConfigError, match=r"^precision\.fp8: no linear layer of this model can .* precision=bf16\.$"):
        converted("qwen3", capsys, intermediate_size=40, hidden_size=24)


def test_layers_of_a_mixture_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    model, said = converted("glm4_moe", capsys)
    assert in_fp8(model) and not any("experts." in name and "shared" not in name for name in in_fp8(model))
    assert not any(name.endswith(".gate") for name in in_fp8(model))
    assert "routers and experts (" in said


@pytest.mark.parametrize(
    ("kind", "part", "what"),
    [("jetmoe", "router", "routers and experts ("), ("glm_moe_dsa", "indexer", "indexers of sparse attention (")],
)
def test_what_chooses_stays_as_it_is(kind: str, part: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert any(part in name.split(".") for name, one in model.named_modules() if type(one) is nn.Linear)
    fp8.convert(model, Fp8.rowwise)
    assert in_fp8(model) and not any(part in name.split(".") for name in in_fp8(model))
    assert what in capsys.readouterr().out


def test_layers_beside_lora(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS["qwen3"]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["q_proj", "v_proj"]), model)
    fp8.convert(model, Fp8.tensorwise)
    assert len(in_fp8(model)) == 14 and not any("lora_" in name for name in in_fp8(model))
    assert "LoRA's matrices (8)" in capsys.readouterr().out
    model.train()
    loss = model(torch.arange(32)[None]).logits.float().square().mean()
    loss.backward()
    assert {name for name, one in model.named_parameters() if one.grad is not None} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_a_device_without_such_products_is_refused_before_a_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8.check_device(Fp8.rowwise)

    def lacking(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", lacking)
    fp8.check_device(Fp8.none)
    with pytest.raises(ConfigError) as caught:
        fp8.check_device(Fp8.tensorwise)
    assert str(caught.value) == (
        "precision.fp8 = tensorwise needs GPUs that multiply so, of compute capability 8.9 or higher (L40S, RTX 4090, "
        "H100, H200, B200), and PyTorch says: torch._scaled_mm is only supported on CUDA devices with compute "
        "capability >= 9.0 or 8.9. Use precision=bf16."
    )
    with pytest.raises(ConfigError, match=r"Use precision\.fp8=tensorwise, precision=bf16\.$"):
        fp8.check_device(Fp8.rowwise)


@pytest.mark.parametrize("gpus", ["8xA100-80GB", "8xH100", "8x80GB"])
def test_older_gpus_are_refused_before_data_are_prepared(
    gpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a plan, and on the ranks themselves, as nvidia-smi names their GPUs."""
    monkeypatch.setattr(planned_machine, "this_machine", lambda: planned_machine.parse_machine(gpus, 1, ""))
    monkeypatch.setattr(startup, "set_environment", lambda *_: None)
    is_old, words = "A100" in gpus, ["recipe=chatglm", "precision=fp8"]
    assert (main(["plan", *words, f"gpus={gpus}"]) == 2) is is_old
    said = capsys.readouterr().err
    sentence = (
        "precision.fp8 = tensorwise needs GPUs of compute capability 8.9 or higher (L40S, RTX 4090, H100, H200, B200), "
        "and A100 80GB is older. Use precision=bf16."
    )
    assert (sentence in said) is is_old
    assert startup.make_ready(["recipe=quickstart", "precision=fp8"]), "CPU ranks compute it beside any GPU"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with contextlib.suppress(ConfigError):  # a compiler is lacking, perhaps
        startup.make_ready(["recipe=quickstart", "precision=fp8", "optim.torch=true"])
        assert not is_old
        return
    with pytest.raises(ConfigError) as caught:
        startup.make_ready(["recipe=quickstart", "precision=fp8", "optim.torch=true"])
    assert (sentence in str(caught.value)) is is_old


def test_gpus_without_compiling_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fp8, "trains_on_gpu", lambda: True)
    for compiles in (True, False):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.bfloat16)
        fp8.convert(model, Fp8.tensorwise, compiles)
        said = "".join(capsys.readouterr())
        assert ("Set compile=inductor." in said) is not compiles and "CPUs" not in said


def test_the_plan_counts_the_copies_of_the_largest_product() -> None:
    words = ["recipe=chatglm", "batch.micro_per_gpu=1"]
    plain, planned = (
        plan_rank(outline_of(cfg), cfg, 8) for cfg in (load([*words, *more]).cfg for more in ([], ["precision=fp8"]))
    )
    for phase in ("load", "evaluation", "save", "export"):
        assert planned.device[phase] == plain.device[phase]
    assert planned.peak("step") > plain.peak("step")


def test_the_plan_claims_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["precision=fp8"]):
        main(["plan", "recipe=chatglm", "gpus=8xH100", *more])
        said = capsys.readouterr().out
        assert ("FP8: times are those of bf16." in said) is ("matrices of one product in FP8" in said) is bool(more)
