"""Peak memory of this rank's device: PyTorch's own count on a GPU or NPU, the bytes of all live tensors on a CPU."""

import gc
import weakref
from contextlib import ExitStack, suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.plan.machine import GIB

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
"""What errors without a class of their own say: PyTorch on CPUs; CUDA, by itself or through NCCL; cuBLAS, cuDNN."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live tensors, as operations create them and as they are freed.

    What an operation allocates and frees inside itself is not counted, nor what other threads do; on CPUs the backward
    pass runs in the same thread. An operation that exceeds `limit_bytes` (0: no limit) raises OutOfMemoryError.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        """id of a counted storage -> its bytes."""
        self._references: dict[int, Any] = {}
        """id of a counted storage -> the weak reference that tells when it is freed."""

    def count(self, tensor: torch.Tensor) -> None:
        """Add a tensor's storage, or what it has grown since it was counted; it is subtracted when it is freed."""
        if not self._is_counted(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        size_before = self._sizes.get(key)
        if size_before is None:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        if size_before != size:  # new, or resized
            self._sizes[key] = size
            self._add(key, size - (size_before or 0), tensor)

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes memory: not on meta, where also the fake tensors are that torch.compile leaves."""
        return tensor.untyped_storage().device.type != "meta"

    def _forget(self, key: int) -> None:
        """Subtract a storage that is freed."""
        self._add(key, -self._sizes.pop(key), None)
        del self._references[key]

    def _add(self, key: int, num_bytes: int, tensor: torch.Tensor | None) -> None:
        """Add bytes of a storage; `key`, `tensor` (None: freed) are for extras/fake_gpu.py, which records them."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        if self.limit_bytes and self.now > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{func} brings the tensors of this rank to {self.now / GIB:.3f} GiB")
        return result


class PeakMemory:
    """A context that measures this rank's peak memory.

    On CPUs `limit_bytes` is enforced (0: no limit), and `only_new` skips the tensors that exist when it is entered.
    """

    def __init__(self, device: torch.device, limit_bytes: int = 0, only_new: bool = False) -> None:
        self.device, self._only_new = device, only_new
        self._live = LiveBytes(limit_bytes) if device.type == "cpu" else None
        self._before = 0
        self._contexts = ExitStack()

    def __enter__(self) -> "PeakMemory":
        if self._live is not None:
            for candidate in [] if self._only_new else gc.get_objects():
                # Not isinstance, by which some objects of the garbage collector would import packages.
                if issubclass(type(candidate), torch.Tensor):
                    with suppress(NotImplementedError):  # sparse tensors have no storage
                        self._live.count(candidate)
            # torch.compile never again looks at a function that it has met within a mode such as LiveBytes (torch 2.13,
            # _dynamo/convert_frame.py): after a dry run nothing would be compiled.
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
            self._contexts.enter_context(self._live)
        self.restart()
        self._before = 0  # `restart` has taken over the peak before the context, which does not count
        return self

    def __exit__(self, *raised: Any) -> None:
        self._contexts.__exit__(*raised)

    def restart(self) -> int:
        """Return the bytes in use now, and measure the peak from here on."""
        self._before = self.highest()
        if self._live is not None:
            self._live.peak = self._live.now
            return self._live.now
        get_accelerator().reset_peak_memory_stats(self.device)
        return int(get_accelerator().memory_allocated(self.device))

    def peak(self) -> int:
        """Return the most bytes in use at once since `restart`."""
        return self._live.peak if self._live is not None else int(get_accelerator().max_memory_allocated(self.device))

    def highest(self) -> int:
        """Return the most bytes in use at once since the context was entered."""
        return max(self._before, self.peak())


def limit_bytes(device: torch.device, max_gib: float) -> int:
    """Return the bytes that this rank may use: on a GPU what is free, but at most `max_gib` (0: all of it); on a CPU
    `max_gib` in bytes, where 0 stands for no limit.
    """
    wanted = int(max_gib * GIB)
    if device.type == "cpu":
        return wanted
    from toolkit.distributed import own_gpu

    available = own_gpu.available_bytes(device)
    return min(wanted, available) if wanted else available


def set_limit(device: torch.device, max_gib: float) -> None:
    """Limit this process to `max_gib` of its GPU's memory; does nothing if that is 0, or on CPUs."""
    if max_gib and device.type != "cpu":
        from toolkit.distributed import own_gpu

        own_gpu.limit_memory(device, max_gib * GIB)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU or a CPU is out of memory."""
    is_by_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_by_class or any(text in str(error) for text in _OUT_OF_MEMORY)


def shown(num_bytes: float) -> str:
    """Return an amount of memory with its unit: GiB from 0.1 GiB on, else MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
