"""The weight files of a model folder: safetensors and pickled shards, one tensor at a time, nothing executed.

A file is opened for each tensor: pages that were read would count as this process's memory until it is closed.
"""

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.folder import weight_files
from toolkit.outside import reading

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a stored tensor without reading it."""

    file: Path
    """Where it lies."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: torch.dtype
    """Its own precision, which may differ from its neighbours'."""

    @property
    def num_bytes(self) -> int:
        """Return its size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class WeightFiles(Mapping[str, TensorInfo]):
    """All tensors of a folder by name, in file order.

    Args:
        folder: a folder that `folder.read_config` has passed.

    Raises:
        ModelError: a file is damaged, or a pickle holds anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._legacy: tuple[Path, dict[str, torch.Tensor]] | None = None
        for file in weight_files(folder):
            for name, info in self._describe(file):
                self._tensors[name] = info

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @contextmanager
    def open(self, name: str) -> Iterator[torch.Tensor]:
        """Give one tensor, in its own precision, mapped from its file where the format allows it."""
        file = self._tensors[name].file
        if file.suffix == ".safetensors":
            with reading(file, ModelError, tr("Download it again.")):
                opened = safe_open(file, framework="pt")
            with opened as tensors:
                with reading(file, ModelError, tr("Download it again.")):
                    tensor = tensors.get_tensor(name)
                yield tensor
        else:
            yield self._unpickle(file)[name]

    def _describe(self, file: Path) -> Iterator[tuple[str, TensorInfo]]:
        if file.suffix == ".safetensors":
            with reading(file, ModelError, tr("Download it again.")), safe_open(file, framework="pt") as tensors:
                parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 -- not a dict
                found = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
            for name, (shape, dtype) in found.items():
                if dtype not in _DTYPES:
                    raise ModelError(
                        tr(
                            "{file}: '{name}' is of type {dtype}, which cannot be trained. Use the model in bf16.",
                            file=file,
                            name=name,
                            dtype=dtype,
                        )
                    )
                yield name, TensorInfo(file, shape, _DTYPES[dtype])
        else:
            for name, value in self._unpickle(file).items():
                yield name, TensorInfo(file, tuple(value.shape), value.dtype)

    def _unpickle(self, file: Path) -> dict[str, torch.Tensor]:
        """Return a pickled shard, mapped; one of torch's old format (before 1.6) is read whole and kept until the
        next.
        """
        if self._legacy is not None and self._legacy[0] == file:
            return self._legacy[1]
        self._legacy = None
        mapped = zipfile.is_zipfile(file)
        values = unpickle(file, mapped)
        if not mapped:
            self._legacy = (file, values)
        return values


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a small file, safetensors or pickled; nothing in it is executed.

    Raises:
        ModelError: it cannot be read.
    """
    if file.suffix != ".safetensors":
        return unpickle(file, mapped=False)
    with reading(file, ModelError, tr("Download it again.")), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 -- not a dict


def unpickle(file: Path, mapped: bool) -> dict[str, torch.Tensor]:
    """Return the named tensors of a torch file; nothing in it is executed.

    Args:
        file: the file.
        mapped: leave the values in the file until they are used; not for torch's format from before 1.6.

    Raises:
        ModelError: it wants to execute something, is damaged, or holds something else.
    """
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ModelError(
            tr(
                "{file} is a pickle that wants to run code, which is refused: {reason}. Nothing was executed. Get the "
                "weights from a source you trust, as safetensors if there are any.",
                file=file,
                reason=_reason(error),
            )
        ) from error
    except Exception as error:  # whatever a damaged archive makes torch raise
        raise ModelError(
            tr("{file} cannot be read ({reason}): download it again.", file=file, reason=_reason(error))
        ) from error
    if not isinstance(values, dict) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise ModelError(tr("{file} holds something else than named tensors.", file=file))
    return values


def _reason(error: Exception) -> str:
    """Return the first sentence of torch's long advice, which suggests the very thing that must not be done."""
    text = str(error).strip()
    unsupported = text.find("Unsupported")
    line = text[unsupported:] if unsupported >= 0 else text
    return line.splitlines()[0].split(". ")[0].rstrip(".") if line else type(error).__name__


def index_of(folder: Path) -> Path | None:
    """Return the index of the files that are read, None where one file holds everything."""
    files = weight_files(folder)
    if len(files) == 1 and files[0].name in ("model.safetensors", "pytorch_model.bin"):
        return None
    stem = "model.safetensors" if files[0].suffix == ".safetensors" else "pytorch_model.bin"
    return folder / f"{stem}.index.json"
