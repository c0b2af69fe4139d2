"""What a CPU rank's tensors take, and what it may take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from toolkit.engine.memory import GIB, LiveBytes, PeakMemory, is_out_of_memory, limit_bytes

CPU = torch.device("cpu")
MIB = 2**20


def test_peak_counts_what_was_there_and_what_came_and_went() -> None:
    there = torch.zeros(MIB)
    with PeakMemory(CPU) as memory:
        before = memory.restart()
        assert before >= there.nbytes
        gone = torch.zeros(2 * MIB)
        view, del_later = gone[:10], torch.zeros(MIB)
        del gone
        assert memory.peak() == before + 12 * MIB, "a view keeps its storage"
        del view
        assert memory.restart() == before + 4 * MIB
        assert memory.peak() == before + 4 * MIB
        assert memory.highest() == before + 12 * MIB
        del del_later
        assert memory.restart() == before


def test_gradients_are_seen() -> None:
    weight = torch.zeros(MIB, requires_grad=True)
    with PeakMemory(CPU) as memory:
        before = memory.restart()
        (weight * 2).sum().backward()
        assert memory.restart() - before >= weight.nbytes
        weight.grad = None
        assert memory.restart() - before < MIB


def test_tensors_that_hold_nothing_are_not_counted() -> None:
    """torch.compile leaves fake tensors behind, whose sizes are symbols."""
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        left = fake.from_tensor(torch.ones(MIB), static_shapes=False)
    with LiveBytes() as live:
        live.count(left)
        live.count(torch.empty(MIB, device="meta"))
        assert live.now == 0


def test_a_limit_is_out_of_memory() -> None:
    with LiveBytes(limit_bytes=8 * MIB):
        torch.zeros(MIB)
        torch.zeros(MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(3 * MIB)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    for text in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert limit_bytes(CPU, 0.5) == GIB // 2
    assert limit_bytes(CPU, 0.0) == 0


def test_what_runs_while_memory_is_measured_can_be_compiled_later() -> None:
    """torch.compile would skip for ever what it meets within a TorchDispatchMode: after a dry run on CPUs nothing."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    with PeakMemory(CPU):
        double(torch.zeros(2, 4))
    assert not graphs
    double(torch.zeros(2, 4))
    assert len(graphs) == 1
