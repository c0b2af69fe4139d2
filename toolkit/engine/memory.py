"""Peak memory of this rank's device: torch's own count on a GPU, the bytes of all live tensors on a CPU."""

import weakref
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, as operations make them and as they are dropped.

    What an operation allocates and frees inside itself is not seen. Threads other than the one that entered are not
    either; on CPUs the backward pass runs in the same thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if tensor.device.type == "meta":
            return
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        if known != size:
            self._sizes[key] = size
            self.now += size - (known or 0)
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return result
