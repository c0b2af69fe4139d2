"""How the engine's own files are written and read: errors are kept for all ranks to see, and nothing in them is run."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from toolkit.errors import CheckpointError
from toolkit.messages import tr
from toolkit.secrets import hide_all

# Everything beside tensors and plain values that DeepSpeed's files name (deepspeed 0.19.8, measured).
SAFE = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
# For the whole process, not in a context: leaving one would take them from DeepSpeed's other readers as well.
torch.serialization.add_safe_globals(SAFE)


class EngineFiles(CheckpointEngine):
    """Writes and reads for `DeepSpeedEngine.save_checkpoint` and `load_checkpoint`.

    A rank that raised inside `save_checkpoint` would leave the others waiting at its barrier, so an error is kept in
    `failure` instead, and all ranks ask for it afterwards. DeepSpeed's own reader unpickles whatever a file says; this
    one reads tensors, plain values and four known classes.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        super().__init__()
        self.name = "EngineFiles"
        self.asynchronous = asynchronous
        """Whether `save` copies only, and `write` does the rest."""
        self.copies: dict[str, _HostCopies] = {}
        """By the name of the file."""
        self.copied: list[tuple[Any, str]] = []
        """What is to be written, and where."""
        self.written: list[Path] = []
        """Files of the save in progress."""
        self.failure = ""
        """Why the save in progress cannot be completed."""

    def begin(self) -> None:
        """Forget the save before."""
        self.written, self.copied, self.failure = [], [], ""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Called by DeepSpeed before the first file."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._fail(error)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or copy what will be in it to host memory; DeepSpeed puts its config into each."""
        if "ds_config" in state_dict:
            state_dict = {**state_dict, "ds_config": hide_all(state_dict["ds_config"])}
        if self.asynchronous:
            copies = self.copies.setdefault(Path(path).name, _HostCopies())
            self.copied.append((copies.copy(state_dict), path))
        else:
            self._write(state_dict, path)

    def write(self) -> None:
        """Write what was copied. May run beside training: it touches no tensor of the model."""
        while self.copied:
            self._write(*self.copied.pop(0))

    def _write(self, state_dict: Any, path: str) -> None:
        if self.failure:
            return
        try:
            torch.save(state_dict, path)
            self.written.append(Path(path))
        except Exception as error:  # torch.save reports a full disk as RuntimeError, others as they like
            self._fail(error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file.

        Raises:
            CheckpointError: it holds something else than tensors and plain values, or cannot be read.
        """
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except Exception as error:  # pickle and zip raise whatever they like on damaged files
            raise unreadable(path, error) from None

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called by DeepSpeed after the last file."""
        return True

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or (getattr(error, "strerror", None) or str(error).splitlines()[0])


class _HostCopies:
    """Copies of what one file holds, in memory that is used again at the next save: new memory costs as much as the
    copying.
    """

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.used = 0
        self.copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy that later steps do not change; tensors that are one stay one."""
        self.used, self.copies = 0, {}
        return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if not value.numel():
                return value.detach().to("cpu", copy=True)
            if key not in self.copies:
                self.copies[key] = self._kept_like(value).copy_(value.detach())
            return self.copies[key]
        if isinstance(value, dict):
            return type(value)((name, self._copy(item)) for name, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(item) for item in value)
        return copy.deepcopy(value)

    def _kept_like(self, value: torch.Tensor) -> torch.Tensor:
        place, self.used = self.used, self.used + 1
        if place == len(self.kept):
            self.kept.append(torch.empty_like(value, device="cpu"))
        elif self.kept[place].shape != value.shape or self.kept[place].dtype != value.dtype:
            self.kept[place] = torch.empty_like(value, device="cpu")
        return self.kept[place]


def unreadable(path: str | Path, error: Exception) -> CheckpointError:
    """Return what to say of a file that cannot be read."""
    text = str(error)
    if "Unsupported global" in text or "WeightsUnpickler" in text or "weights_only" in text.lower():
        reason = next((line.strip() for line in text.splitlines() if "GLOBAL" in line or "global" in line), text)
        return CheckpointError(
            tr(
                "{file} is a pickle that wants to run code, which is refused: {reason}. Nothing was executed.",
                file=path,
                reason=reason[:300],
            )
        )
    return CheckpointError(tr("{file} cannot be read: {reason}.", file=path, reason=text.splitlines()[0][:300]))


def install(engine: DeepSpeedEngine, asynchronous: bool = False) -> EngineFiles:
    """Make the engine write and read through `EngineFiles`."""
    files = EngineFiles(asynchronous)
    engine.checkpoint_engine = files
    # DeepSpeed puts executable scripts beside every checkpoint (0.19.8, engine._copy_recovery_script).
    engine._copy_recovery_script = lambda save_path: None
    # Its converters and universal loaders call torch.load themselves; PyTorch heeds this over their arguments.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    return files
