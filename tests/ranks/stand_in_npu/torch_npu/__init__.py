"""A stand-in for torch_npu where there is no NPU: PyTorch's device `npu`, its module torch.npu and the backend hccl.

Tensors are in host memory and computed by the kernels for CPUs (backend.cpp), collectives go through gloo; what HCCL
does not reduce is refused, as by HCCL. DeepSpeed finds it on the path and takes its own accelerator for NPUs. What a
real NPU computes, how fast and in how much memory, nothing here says.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

COUNT = 2
_REDUCED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16)
"""HcclAllReduce on Atlas A2 and A3, CANN 8.5."""

load("stand_in_npu", [str(Path(__file__).with_name("backend.cpp"))], extra_cflags=["-O1"], is_python_module=False)
_ops = torch.ops.stand_in_npu
TOTAL = _ops.total()


def autoload() -> None:
    """What PyTorch calls as it is imported; importing this module has done it."""


def npu_fusion_attention(*arguments: Any, **options: Any) -> Any:
    """What transformers imports of torch_npu for `flash_attention_2`, and computes nothing with here."""
    raise NotImplementedError("the stand-in has no fused attention")


class Stream:
    """A stream on which everything is done when it is queued."""

    def wait_stream(self, stream: "Stream") -> None: ...
    def synchronize(self) -> None: ...


class Event:
    """A mark in time."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...


class _Device:
    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _ops.set_device(self.index)

    def __exit__(self, *raised: Any) -> None:
        _ops.set_device(self.before)


def _index(device: Any) -> int:
    index = torch.device(device).index if isinstance(device, str | torch.device) else device
    return _ops.set_device(-1) if index is None else int(index)


def _set_device(device: Any) -> None:
    assert 0 <= _index(device) < COUNT, f"Invalid NPU device: {device}"
    _ops.set_device(_index(device))


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="Ascend stand-in", total_memory=TOTAL)


def _module() -> ModuleType:
    module = ModuleType("torch.npu")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_call=lambda callback: callback(),
        device_count=lambda: COUNT,
        current_device=lambda: _ops.set_device(-1),
        set_device=_set_device,
        device=_Device,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
        initial_seed=torch.default_generator.initial_seed,
        get_rng_state=lambda device=None: torch.default_generator.get_state(),
        set_rng_state=lambda state, device=None: torch.default_generator.set_state(state),
        default_generators=(torch.default_generator,) * COUNT,
        Stream=Stream,
        Event=Event,
        stream=lambda stream: nullcontext(),
        current_stream=lambda device=None: Stream(),
        default_stream=lambda device=None: Stream(),
        memory_allocated=lambda device=None: _ops.allocated(),
        max_memory_allocated=lambda device=None: _ops.peak(False),
        reset_peak_memory_stats=lambda device=None: _ops.peak(True) and None,
        memory_reserved=lambda device=None: _ops.allocated(),
        max_memory_reserved=lambda device=None: _ops.peak(False),
        memory_stats=lambda device=None: {"allocated_bytes.all.peak": _ops.peak(False), "num_alloc_retries": 0},
        mem_get_info=lambda device=None: (TOTAL - _ops.allocated(), TOTAL),
        set_per_process_memory_fraction=lambda fraction, device=None: None,
        get_device_name=lambda device=None: _properties().name,
        get_device_properties=_properties,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
    )
    return module


class Hccl(dist.ProcessGroup):
    """The collectives of NPUs, through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "hccl"

    @property
    def _device_types(self) -> list[torch.device]:
        """Where PyTorch puts pickled objects before it sends them."""
        return [torch.device("npu")]


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.device.type == "npu", f"HCCL: no backend for tensors on {value.device}"
        return _ops.host(value.detach())
    return [_host(item) for item in value] if isinstance(value, list | tuple) else value


def _collective(name: str) -> Any:
    def call(self: Hccl, *args: Any, **kwargs: Any) -> Any:
        if "reduce" in name:
            sent = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            assert sent.dtype in _REDUCED, f"HCCL: {name} of {sent.dtype} is not supported"
        return getattr(self.gloo, name)(*map(_host, args), **kwargs)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "broadcast", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "alltoall_base", "alltoall", "gather", "scatter", "send", "recv", "barrier"),
):
    setattr(Hccl, _name, _collective(_name))
for _name, _of_gloo in {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}.items():
    setattr(Hccl, _name, getattr(Hccl, _of_gloo))

torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("hccl", Hccl, devices=["npu"])
