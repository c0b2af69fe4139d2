"""The state of every random generator of a process, as plain tensors: nothing in the file can be executed."""

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

from toolkit.disk import set_permissions


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"random-rank-{rank:05d}.safetensors"


def capture() -> dict[str, torch.Tensor]:
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


def restore_state(found: Mapping[str, torch.Tensor]) -> None:
    """Set all generators as they were."""
    gauss = found["python_gauss"].tolist()
    random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
    place, has_gauss = found["numpy_place"].tolist()
    words = found["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, place, has_gauss, found["numpy_gauss"].item()))
    torch.set_rng_state(found["torch"])
    if "device" in found and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(found["device"])


def save(path: Path) -> None:
    """Write the state of all generators."""
    save_file(capture(), path)
    set_permissions(path)


def restore(path: Path) -> None:
    """Set all generators as they were saved; OSError if the file is missing or damaged."""
    restore_state(load_file(path))


def seed_all(seed: int) -> None:
    """Seed all generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
