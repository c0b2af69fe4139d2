"""A checkpoint's files: fragments, written from copies made next to training, and the random generators'. Nothing in
them is run.
"""

import os
import random
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save

from toolkit.checkpoint import fragments
from toolkit.messages import CheckpointError, reason_of, tr


class Files:
    """Writes a checkpoint's fragments. An error is kept in `failure` for all ranks to ask for: raised, it would leave
    the others at a barrier.
    """

    def __init__(self, asynchronous: bool = False, copies_at_once: bool = False) -> None:
        self.asynchronous = asynchronous
        """Whether `save` only notes what is to be copied to host memory, and `write` does the rest."""
        self.copies_at_once = copies_at_once
        """Whether `save` does the copying too."""
        self.copies = HostCopies()
        self.copied = threading.Event()
        """Set while nothing of the engine is still to be copied."""
        self.copied.set()
        self.waited_s = 0.0
        """Seconds that updates have waited for copies since `begin`."""
        self.unwritten: list[tuple[fragments.Content, Path]] = []
        self.written: list[Path] = []
        self.failure = ""

    def begin(self) -> None:
        """Reset for a new save."""
        self.written, self.unwritten, self.failure, self.waited_s = [], [], "", 0.0
        self.copies.begin()

    def save(self, content: fragments.Content, path: Path) -> None:
        """Write one file; if asynchronous, only queue it for `write`, with copies of its tensors to be made."""
        if not self.asynchronous:
            self._write(content, path)
            return
        self.copied.clear()
        copies = {name: self.copies.copy(tensor) for name, tensor in content.tensors.items()}
        self.unwritten.append((fragments.Content(copies, content.facts), path))
        self.copies.follow()
        if self.copies_at_once:
            self.copies.complete()
            self.copied.set()

    def write(self) -> None:
        """Copy the queued tensors to host memory and write their files; runs in a thread next to training."""
        try:
            self.copies.complete()
        finally:
            self.copied.set()
        while self.unwritten:
            self._write(*self.unwritten.pop(0))

    def wait_for_copies(self) -> None:
        """Block until `write`, in another thread, has copied all tensors: the next optimizer update changes them."""
        started = time.perf_counter()
        self.copied.wait()
        self.waited_s += time.perf_counter() - started

    def _write(self, content: fragments.Content, path: Path) -> None:
        """Write one file, unless an earlier one failed; an error is kept in `failure`, not raised."""
        if self.failure:
            return
        try:
            fragments.write(content, path)
            self.written.append(path)
        except OSError as error:
            self.failure = reason_of(error)
        except Exception as error:  # whatever it is: the other ranks wait
            traceback.print_exc()
            self.failure = tr(
                "{name}: {reason} (an internal error, not one of the directory: the log has its traceback)",
                name=type(error).__name__,
                reason=reason_of(error),
            )


class HostCopies:
    """Copies in memory reused by the next save; `complete` makes them, in whatever thread.

    GPUs copy to page-locked memory at several times the speed, but the system cannot move or lend it: a rank locks no
    more than its part of a quarter of the host's memory.
    """

    def __init__(self) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or get_accelerator().device_count() or 1
        self.left_to_lock = psutil.virtual_memory().total // 4 // ranks  # of a quarter for all ranks here
        self.buffers: list[torch.Tensor] = []
        self.used = 0
        self.waiting: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """Memory, type and layout of a tensor -> it and its buffer: what is saved twice is copied once."""
        accelerator = get_accelerator()
        # Of its own, or the copies would stand in line with the passes of the next step.
        self.stream = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self.device = None if self.stream is None else accelerator.current_device()

    def begin(self) -> None:
        """Reset for a new save, which reuses the buffers of the last one."""
        self.used, self.waiting = 0, {}

    def follow(self) -> None:
        """Let the copy stream wait for what is queued on the current stream: it may still gather what is copied."""
        if self.stream is not None:
            self.stream.wait_stream(get_accelerator().current_stream())

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor that will hold a copy of `value` after `complete`; a scalar, which may change until then,
        is copied at once.
        """
        if value.numel() < 2:
            return value.to("cpu", copy=True)
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in self.waiting:
            if self.used == len(self.buffers):
                self.buffers.append(torch.empty(0))
            buffer = self.buffers[self.used]
            if buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = self.buffers[self.used] = self._buffer(value)
            self.waiting[key] = value, buffer
            self.used += 1
        return self.waiting[key][1]

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty CPU tensor like `like`, page-locked (pinned) as long as this rank's limit allows."""
        buffer = torch.empty_like(like, device="cpu")
        num_bytes = 1 << (like.nbytes - 1).bit_length()  # PyTorch locks powers of two
        if self.stream is None or like.device.type == "cpu" or num_bytes > self.left_to_lock:
            return buffer
        self.left_to_lock -= num_bytes
        return cast(torch.Tensor, get_accelerator().pin_memory(buffer))

    def complete(self) -> None:
        """Copy all waiting tensors to their buffers, on the copy stream, and block until that is done."""
        if self.device is not None:  # a thread begins on GPU 0, and leaving the stream would make a context there
            get_accelerator().set_device(self.device)
        with get_accelerator().stream(self.stream):
            for source, target in self.waiting.values():
                target.copy_(source, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        self.waiting = {}


def generators_file(rank: int) -> str:
    """Return the name of the checkpoint file with a rank's random generator states."""
    return f"random-rank-{rank:05d}.safetensors"


def capture_generators() -> dict[str, torch.Tensor]:
    """Return the states of Python's, NumPy's, PyTorch's and the device's random generators as named tensors."""
    _, python_words, python_gauss = random.getstate()
    _, numpy_words, numpy_place, numpy_has_gauss, numpy_gauss = np.random.get_state()
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
        "numpy": torch.tensor(np.asarray(numpy_words, np.int64)),
        "numpy_place": torch.tensor([numpy_place, numpy_has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_gauss], dtype=torch.float64),
    }
    if get_accelerator().device_name() != "cpu":
        tensors["device"] = get_accelerator().get_rng_state().cpu()
    return tensors


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set all random generators of this process to the states that `capture_generators` returned."""
    gauss = states["python_gauss"].tolist()
    # 3: the version of the format in which Python's `getstate` gives it.
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_place"].tolist()
    words = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    if "device" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["device"])


def save_generators(path: Path) -> None:
    """Write the states of all random generators to a safetensors file; OSError if that fails, which `save_file` of
    safetensors would raise as an error of its own type.
    """
    path.write_bytes(save(capture_generators()))


def load_generators(path: Path) -> None:
    """Set all random generators to the states in a file of `save_generators`; OSError if missing or damaged."""
    restore_generators(load_file(path))


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, NumPy and PyTorch (all devices) in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def unreadable_error(path: Path, error: Exception) -> CheckpointError:
    """Return the CheckpointError for a checkpoint file that cannot be read, with the reason in `error`."""
    return CheckpointError("{file} cannot be read: {reason}.", file=path, reason=reason_of(error))
