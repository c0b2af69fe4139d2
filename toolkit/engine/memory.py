"""Peak memory of this rank's device: torch's own count on a GPU, the bytes of all live tensors on a CPU."""

import gc
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.plan.machine import GIB

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
"""What errors without a class of their own say: PyTorch on CPUs; CUDA, by itself or through NCCL; cuBLAS, cuDNN."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, as operations make them and as they are dropped.

    It does not see what an operation allocates and frees inside itself, nor other threads than the one that entered; on
    CPUs the backward pass runs in the same thread. An operation beyond `limit_bytes` (0: no limit) runs out of memory.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before, or that has just been made."""
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        counted = self._sizes.get(key)
        if counted is None:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        if counted != size:
            self._sizes[key] = size
            self._change(key, size - (counted or 0), tensor)

    def _counts(self, tensor: torch.Tensor) -> bool:
        # Meta storages are also those of the fake tensors that torch.compile leaves behind.
        return tensor.untyped_storage().device.type != "meta"

    def _forget(self, key: int) -> None:
        self._change(key, -self._sizes.pop(key))
        del self._references[key]

    def _change(self, key: int, change: int, tensor: torch.Tensor | None = None) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        if self.limit_bytes and self.now > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{func} brings the tensors of this rank to {self.now / GIB:.3f} GiB")
        return result


class PeakMemory:
    """A context that watches this rank's memory; CPUs have `limit_bytes` (0: none) and may leave out old tensors."""

    def __init__(self, device: torch.device, limit_bytes: int = 0, only_new: bool = False) -> None:
        self.device, self._only_new = device, only_new
        self._live = LiveBytes(limit_bytes) if device.type == "cpu" else None
        self._before = 0

    def __enter__(self) -> "PeakMemory":
        if self._live is not None:
            for candidate in [] if self._only_new else gc.get_objects():
                if issubclass(
                    type(candidate), torch.Tensor
                ):  # the type: asking some objects for it would import packages
                    with suppress(NotImplementedError):  # sparse tensors have no storage
                        self._live.see(candidate)
            self._live.__enter__()
        self.restart()
        self._before = 0  # what was before the context
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*raised)

    def restart(self) -> int:
        """Return the bytes in use now, and begin anew to look for the peak."""
        self._before = self.highest()
        if self._live is not None:
            self._live.peak = self._live.now
            return self._live.now
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes in use at once since `restart`."""
        return self._live.peak if self._live is not None else torch.cuda.max_memory_allocated(self.device)

    def highest(self) -> int:
        """Return the most bytes in use at once since the context was entered."""
        return max(self._before, self.peak())


def limit_bytes(device: torch.device, max_gib: float) -> int:
    """Return how many bytes this rank may use: `max_gib` and what others leave; 0 where nothing limits a CPU."""
    asked = int(max_gib * GIB)
    if device.type == "cpu":
        return asked
    free, _ = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)
    return min(asked, available) if asked else available


def set_limit(device: torch.device, max_gib: float) -> None:
    """Let this process have no more than `plan.max_gpu_gib` of its GPU; 0, and CPUs, are left alone."""
    if max_gib and device.type != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_gib * GIB / total), device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on a GPU or on a CPU."""
    is_by_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_by_class or any(text in str(error) for text in _OUT_OF_MEMORY)


def shown(num_bytes: float) -> str:
    """Return an amount of memory as one reads it."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
