"""A checkpoint's files: the engine's, written from copies made next to training, and the random generators'. Nothing in
them is run. Also their other forms: DeepSpeed's universal one for other ranks, and weights read without ranks.
"""

import argparse
import copy
import io
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load_file, save_file

from toolkit import disk, secrets
from toolkit.distributed import file_lock, process_group
from toolkit.launch.processes import run_module
from toolkit.messages import CheckpointError, NotExportable, say

# Everything beside tensors and plain values that DeepSpeed's files name (deepspeed 0.19.8, measured).
SAFE = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
# For the whole process, not in a context: leaving one would take them from DeepSpeed's other readers as well.
torch.serialization.add_safe_globals(SAFE)


class EngineFiles(CheckpointEngine):
    """Writes and reads for DeepSpeed's `save_checkpoint` and `load_checkpoint`; unpickles tensors and known classes
    only. An error is kept in `failure` for all ranks to ask for: raised, it would leave the others at a barrier.
    """

    def __init__(self, asynchronous: bool = False, copies_at_once: bool = False) -> None:
        super().__init__()
        self.name = "EngineFiles"
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
        self.unwritten: list[tuple[Any, str]] = []
        self.written: list[Path] = []
        self.failure = ""

    def begin(self) -> None:
        """Forget the save before."""
        self.written, self.unwritten, self.failure, self.waited_s = [], [], "", 0.0
        self.copies.begin()

    def create(self, info: CheckpointCommitInfo) -> None:
        """Called by DeepSpeed before the first file."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._fail(error)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or note what will be in it; DeepSpeed puts its config into each."""
        if "ds_config" in state_dict:
            state_dict = {**state_dict, "ds_config": secrets.hide_all(state_dict["ds_config"])}
        if not self.asynchronous:
            self._write(state_dict, path)
            return
        self.copied.clear()
        buffers = {state_dict["module"][name].data_ptr() for name in state_dict.get("buffer_names", ())}
        self.unwritten.append((self.copies.copy(state_dict, buffers), path))
        if self.copies_at_once:
            self.copies.complete()

    def write(self) -> None:
        """Copy what was noted, or raise why not, and write it. Runs next to training."""
        try:
            self.copies.complete()
        finally:
            self.copied.set()
        while self.unwritten:
            self._write(*self.unwritten.pop(0))

    def wait_for_copies(self) -> None:
        """Wait until `write`, in another thread, has copied everything: an update changes what it copies."""
        started = time.perf_counter()
        self.copied.wait()
        self.waited_s += time.perf_counter() - started

    def _write(self, state_dict: Any, path: str) -> None:
        if self.failure:
            return
        try:
            torch.save(state_dict, path)
            self.written.append(Path(path))
        except Exception as error:  # torch.save reports a full disk as RuntimeError, others as they like
            self._fail(error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file."""
        return read_file(path, map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called by DeepSpeed after the last file."""
        return True

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or (getattr(error, "strerror", None) or str(error).splitlines()[0])


def read_file(path: str | Path, map_location: Any = "cpu", mmap: bool | None = None) -> Any:
    """Return what a file of the engine holds: tensors, plain values and known classes."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except Exception as error:  # pickle and zip raise whatever they like on damaged files
        raise unreadable_error(path, error) from None


def unreadable_error(path: str | Path, error: Exception) -> CheckpointError:
    """Return the error of a file that cannot be read."""
    text = str(error)
    if "Unsupported global" in text or "WeightsUnpickler" in text or "weights_only" in text.lower():
        reason = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "global" in line), text)
        return CheckpointError(
            "{file} is a pickle that wants to run code, which is rejected: {reason}. Nothing was executed.",
            file=path,
            reason=reason[:300],
        )
    return CheckpointError("{file} cannot be read: {reason}.", file=path, reason=text.splitlines()[0][:300])


def install_engine_files(engine: DeepSpeedEngine, asynchronous: bool = False) -> EngineFiles:
    """Make the engine write and read through `EngineFiles`."""
    # With these, optimizer states are moved or changed outside the optimizer's step as well (deepspeed 0.19.8).
    moves = engine.zero_nvme_offload_optimizer() or engine.zenflow or engine.super_offload()
    files = EngineFiles(asynchronous, copies_at_once=moves)
    engine.checkpoint_engine = files
    engine.basic_optimizer.register_step_pre_hook(lambda *_: files.wait_for_copies())
    # DeepSpeed puts executable scripts beside every checkpoint (0.19.8, engine._copy_recovery_script).
    engine._copy_recovery_script = lambda save_path: None
    # Its converters and universal loaders call torch.load themselves; PyTorch heeds this over their arguments.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    return files


@contextmanager
def gathered_states(optimizer: Any) -> Iterator[None]:
    """Spare a save a collective: ZeRO-3 drops small parameters that every rank holds, to gather them again (0.19.8)."""
    small = getattr(optimizer, "persistent_parameters", ())
    if not small or any(one.ds_status is not ZeroParamStatus.AVAILABLE for one in small):
        yield
        return
    whole = [one.data for one in small]

    def put_back() -> None:
        optimizer.invalidate_secondary_tensor()
        for parameter, data in zip(small, whole, strict=True):
            parameter.data, parameter.ds_status = data, ZeroParamStatus.AVAILABLE

    optimizer.checkpoint_event_epilogue = put_back
    try:
        yield
    finally:
        del optimizer.checkpoint_event_epilogue


class HostCopies:
    """Copies in memory reused by the next save. `copy` copies at once what may change before the next update (plain
    values, tensors of one number, those named), `complete` the rest, in whatever thread.

    GPUs copy to page-locked memory at several times the speed, but the system cannot move or lend it: a rank locks no
    more than its part of a quarter of the host's memory.
    """

    def __init__(self) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or get_accelerator().device_count() or 1
        self.left_to_lock = psutil.virtual_memory().total // 4 // ranks
        self.buffers: list[torch.Tensor] = []
        self.used = 0
        self.waiting: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        accelerator = get_accelerator()
        # Of its own, or the copies would stand in line with the passes of the next step.
        self.stream = None if accelerator.is_synchronized_device() else accelerator.Stream()

    def begin(self) -> None:
        """Forget the save before; its copies are not needed any more."""
        self.used, self.waiting = 0, {}
        if self.stream is not None:
            self.stream.wait_stream(get_accelerator().current_stream())

    def copy(self, value: Any, at_once: set[int]) -> Any:
        """Return a copy that is whole after `complete`; tensors that are one stay one."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.numel() < 2 or value.data_ptr() in at_once:
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
        if isinstance(value, dict):
            return type(value)((name, self.copy(item, at_once)) for name, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, at_once) for item in value)
        return copy.deepcopy(value)

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy, page-locked as long as the limit allows."""
        buffer = torch.empty_like(like, device="cpu")
        num_bytes = 1 << (like.nbytes - 1).bit_length()  # PyTorch locks powers of two
        if self.stream is None or like.device.type == "cpu" or num_bytes > self.left_to_lock:
            return buffer
        self.left_to_lock -= num_bytes
        return cast(torch.Tensor, get_accelerator().pin_memory(buffer))

    def complete(self) -> None:
        """Copy what is waiting."""
        with get_accelerator().stream(self.stream):
            for source, target in self.waiting.values():
                target.copy_(source, non_blocking=True)
        if self.stream is not None:
            self.stream.synchronize()
        self.waiting = {}


SUFFIX = ".universal"


def make_universal(checkpoint: Path, folder: Path) -> Path:
    """Return a checkpoint's universal form, made in `folder` (its own disk may be read-only) by the first process.
    Others wait in no collective, however long it takes. CheckpointError if DeepSpeed cannot convert it.
    """
    made = folder / (checkpoint.name + SUFFIX)

    def convert(target: Path) -> None:
        say("Converting {checkpoint} for other ranks or another ZeRO stage …", checkpoint=checkpoint)
        if reason := run_module("toolkit.checkpoint.state_files", str(checkpoint), str(target)):
            raise CheckpointError("cannot convert {folder}: {reason}.", folder=checkpoint, reason=reason)

    file_lock.build_once(made, convert, lambda target: (target / "zero").is_dir(), setting="run.dir")
    return made


def remove_universal(universal: Path) -> None:
    """Remove what `make_universal` made; the checkpoint itself stays."""
    shutil.rmtree(universal, ignore_errors=True)
    universal.with_name(universal.name + ".lock").unlink(missing_ok=True)


_LAYERS = "layer_*-model_states.pt"
_PARTS, _FIRST_PART = "mp_rank_*_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


def iter_weights(checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each parameter and buffer, in `dtype` if partitioned; tied ones may come twice.
    CheckpointError if a file is missing, damaged or runs code; NotExportable if weights are in an NVMe offload's
    files.
    """
    layers, parts = sorted(checkpoint.glob(_LAYERS)), sorted(checkpoint.glob(_PARTS))
    for file in layers:
        yield from read_file(file, mmap=True).items()
    if parts and not layers:
        modules = [read_file(part, mmap=True)["module"] for part in parts]
        yield from ((name, process_group.join_parts(name, [module[name] for module in modules])) for name in modules[0])
    if layers or parts:
        return
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first = read_file(checkpoint / _FIRST_PART, mmap=True)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # over DeepSpeed's own arguments, which allow anything
    place = checkpoint.resolve()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress, for developers
            found = get_fp32_state_dict_from_zero_checkpoint(str(place.parent), tag=place.name, lazy_mode=True)
    except Exception as error:  # as above; a sum that does not come out is a ValueError
        if (checkpoint / "offloaded_tensors").is_dir():
            raise NotExportable(
                "the weights in {folder} are in the files of an NVMe offload, which only the run itself can read. "
                "Resume the run (resume={folder}) and let it finish: it writes export/.",
                folder=checkpoint,
            ) from error
        raise unreadable_error(checkpoint, error) from None
    for name, value in found.items():
        if name in first["buffer_names"]:  # DeepSpeed makes float32 of them
            yield name, first["module"][name]
        elif isinstance(value, torch.Tensor):  # not trained: kept as it is
            yield name, value
        else:
            yield name, value.contiguous().to(dtype)


def main() -> None:
    """Convert, in a process of its own."""
    from deepspeed.checkpoint import ds_to_universal

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    source, target = sys.argv[1:]
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=2,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    main()


def generators_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"random-rank-{rank:05d}.safetensors"


def capture_generators() -> dict[str, torch.Tensor]:
    """Return the state of Python's, NumPy's, PyTorch's and the device's generators."""
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


def restore_generators(found: Mapping[str, torch.Tensor]) -> None:
    """Set all generators as they were."""
    gauss = found["python_gauss"].tolist()
    random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
    place, has_gauss = found["numpy_place"].tolist()
    words = found["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, place, has_gauss, found["numpy_gauss"].item()))
    torch.set_rng_state(found["torch"])
    if "device" in found and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(found["device"])


def save_generators(path: Path) -> None:
    """Write the state of all generators."""
    save_file(capture_generators(), path)
    disk.set_permissions(path)


def load_generators(path: Path) -> None:
    """Set all generators as they were saved; OSError if the file is missing or damaged."""
    restore_generators(load_file(path))


def seed_all(seed: int) -> None:
    """Seed all generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
