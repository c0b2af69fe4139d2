"""Functions of the package on the device, against float64: packed attention, its isolation, the loss, the stopwatch."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from device import DEVICE, needs
from torch import nn

from toolkit.config.schema import Fp8
from toolkit.layouts import fp8
from toolkit.models.experts import Groups, _grouped_products
from toolkit.models.loss import token_loss_sum
from toolkit.models.segment_attention import attend_to_segments
from toolkit.train.step import Stopwatch

LENGTHS = [5, 64, 1, 130, 56]
HEADS, KEYS, WIDTH = 4, 2, 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = {Fp8.tensorwise: "fp8", Fp8.rowwise: "fp8-rows", Fp8.rowwise_with_gw_hp: "fp8-rows"}


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key and value of one row."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, KEYS, KEYS)]
    return [torch.randn(shape, generator=draw).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def bounds() -> torch.Tensor:
    """Return where the samples begin and end."""
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)


def in_float64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention of each sample to itself, by its definition, on the CPU."""
    groups = HEADS // KEYS
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    visible = (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    scores = (query @ key.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return how far a tensor is from the true one, as a part of that."""
    true = true.detach()
    return float((found.detach().cpu().double() - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_attention_and_its_gradient(dtype: torch.dtype) -> None:
    given = tensors(dtype)
    exact = [one.detach().cpu().double().requires_grad_() for one in given]
    weight = torch.randn(1, sum(LENGTHS), HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    found, wanted = attend_to_segments(*given, bounds(), max(LENGTHS)), in_float64(*exact)
    (found.float() * weight.to(DEVICE)).sum().backward()
    (wanted * weight.double()).sum().backward()
    rough = 1e-5 if dtype is torch.float32 else 0.02
    pairs = [(found, wanted), *((one.grad, other.grad) for one, other in zip(given, exact, strict=True))]
    for mine, true in pairs:
        assert mine is not None and true is not None
        assert distance(mine, true) < rough


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_sample_sees_another(dtype: torch.dtype) -> None:
    """Bit by bit: another second sample changes nothing of the others, forward or backward."""
    outputs, gradients = [], []
    begin, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    for other in (False, True):
        given = tensors(dtype)
        with torch.no_grad():
            for one in given:
                one[:, :, begin:end] += 3.0 * other
        found = attend_to_segments(*given, bounds(), max(LENGTHS))
        found.float().square().sum().backward()
        others = [place for place in range(sum(LENGTHS)) if not begin <= place < end]
        outputs.append(found[:, others])
        gradients.append([one.grad[:, :, others] for one in given if one.grad is not None])
    assert torch.equal(*outputs)
    assert len(gradients[0]) == 3 and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_chunked_loss(dtype: torch.dtype) -> None:
    """Sum and gradients of a model's loss, which never has all logits."""
    import transformers

    from tests.unit.tiny_model import SIZES

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(DEVICE, dtype)
    ids = torch.randint(2, 100, (2, 16), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    batch = {"input_ids": ids, "labels": ids.clone(), "segment_ids": torch.ones_like(ids)}
    batch["position_ids"] = torch.arange(16, device=DEVICE).repeat(2, 1)
    batch["labels"][:, :5] = -100
    found = token_loss_sum(model, batch)
    found.backward()
    gradient = model.lm_head.weight.grad.cpu()
    model.zero_grad()
    exact = model.cpu().double()
    logits = exact(input_ids=ids.cpu()).logits[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, batch["labels"].cpu()[:, 1:].flatten(), reduction="sum")
    wanted.backward()
    rough = 1e-5 if dtype is torch.float32 else 0.02
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=rough)
    assert distance(gradient, exact.lm_head.weight.grad) < rough


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_experts(turned: bool, dtype: torch.dtype) -> None:
    """Of any numbers of rows, also none: in bf16 on a GPU one grouped product; its gradients, too."""
    sizes, draw = [3, 0, 17, 1, 8, 0, 35], torch.Generator().manual_seed(1)
    rows = torch.randn(sum(sizes), 64, generator=draw).to(DEVICE, dtype).requires_grad_()
    shape = (len(sizes), 64, 96) if turned else (len(sizes), 96, 64)
    matrices = torch.randn(shape, generator=draw).to(DEVICE, dtype).requires_grad_()
    true = [one.detach().cpu().double().requires_grad_() for one in (rows, matrices)]
    found = _grouped_products(rows, matrices, Groups(torch.tensor(sizes, device=DEVICE)), turned)
    parts = zip(true[0].split(sizes), true[1].unbind(), strict=True)
    expected = torch.cat([part @ (one if turned else one.T) for part, one in parts])
    for output in (found, expected):
        output.square().mean().backward()
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
    assert distance(found, expected) < bound
    for one, other in zip((rows, matrices), true, strict=True):
        assert distance(one.grad, other.grad) < bound
    assert not matrices.grad[1].any()


def by_hand(first: torch.Tensor, second: torch.Tensor, **given: Any) -> torch.Tensor:
    """Return what `torch._scaled_mm` means; on CPUs it has only one scale for a matrix before torch 2.13."""
    return ((first.double() * given["scale_a"]) @ (second.double() * given["scale_b"])).to(given["out_dtype"])


@pytest.mark.parametrize("kind", [pytest.param(kind.value, marks=needs(need)) for kind, need in FP8.items()])
def test_products_in_fp8(kind: str) -> None:
    """The kernel of the device: forward and both gradients, of any number of tokens, as they are by definition."""
    found = []
    for device, multiply in ((DEVICE, torch._scaled_mm), ("cpu", by_hand)):
        torch.manual_seed(1)
        layer = fp8._converted(nn.Linear(256, 512, dtype=torch.bfloat16), Fp8(kind)).to(device)
        draw = torch.Generator().manual_seed(2)
        states, weight = (torch.randn(3, 67, width, generator=draw).bfloat16() for width in (256, 512))
        states = states.to(device).requires_grad_()
        with mock.patch.object(torch, "_scaled_mm", wraps=multiply) as product:
            output = layer(states)
            (output * weight.to(device)).sum().backward()
        assert product.call_count == (2 if kind == "rowwise_with_gw_hp" else 3)
        found.append([output, states.grad, layer.weight.grad, layer.bias.grad])
    for mine, other in zip(*found, strict=True):
        assert distance(mine, other.cpu().double()) < 0.005


@needs("cuda")
def test_the_stopwatch_measures_the_gpu_and_not_the_host() -> None:
    """Events: the host has long gone on when the queued work ends."""
    watch = Stopwatch(torch.device(DEVICE))
    torch.cuda.synchronize()
    for _ in range(2):
        watch.mark()
        torch.cuda._sleep(50_000_000)
        watch.mark()
        torch.cuda._sleep(100_000_000)  # not between marks
    torch.cuda.synchronize()
    alone = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    alone[0].record()
    torch.cuda._sleep(100_000_000)
    alone[1].record()
    torch.cuda.synchronize()
    assert watch.seconds() == pytest.approx(alone[0].elapsed_time(alone[1]) / 1000, rel=0.5)
