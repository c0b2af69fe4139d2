"""Copies of what is saved, in host memory, made beside training: until an update, weights stay as they are."""

import copy
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class HostCopies:
    """Copies in memory that is used again at the next save: new memory costs as much as the copying.

    `copy` returns where everything will be, and `complete`, in whatever thread, copies the tensors. Copied at once is
    what may change before the next update: plain values, tensors of one number (steps, scales), and those named.
    """

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.used = 0
        self.waiting: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """What is to be copied, and where to."""
        accelerator = get_accelerator()
        # Of its own, or the copies would stand in line with the passes of the next step.
        self.stream = None if accelerator.is_synchronized_device() else accelerator.Stream()

    def begin(self) -> None:
        """Forget the save before; its copies are not needed any more."""
        self.used, self.waiting = 0, {}
        if self.stream is not None:
            self.stream.wait_stream(get_accelerator().current_stream())

    def copy(self, value: Any, at_once: set[int]) -> Any:
        """Return a copy that is whole after `complete`; tensors that are one stay one.

        Args:
            value: what one file holds.
            at_once: addresses of tensors that a forward pass may change.
        """
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.numel() < 2 or value.data_ptr() in at_once:
                return value.to("cpu", copy=True)
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in self.waiting:
                self.waiting[key] = value, self._kept_like(value)
            return self.waiting[key][1]
        if isinstance(value, dict):
            return type(value)((name, self.copy(item, at_once)) for name, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, at_once) for item in value)
        return copy.deepcopy(value)

    def complete(self) -> None:
        """Copy what is waiting."""
        with get_accelerator().stream(self.stream):
            for source, target in self.waiting.values():
                target.copy_(source)
        self.waiting = {}

    def _kept_like(self, value: torch.Tensor) -> torch.Tensor:
        place, self.used = self.used, self.used + 1
        if place == len(self.kept):
            self.kept.append(torch.empty_like(value, device="cpu"))
        elif self.kept[place].shape != value.shape or self.kept[place].dtype != value.dtype:
            self.kept[place] = torch.empty_like(value, device="cpu")
        return self.kept[place]
