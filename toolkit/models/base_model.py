"""The base model of an adapter or checkpoint, recognised by a few values of its parameters.

They have transformers' names, so that they are equal, but for rounding, for an official directory and its conversion.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from toolkit import secrets
from toolkit.distributed import process_group
from toolkit.messages import BaseMissing, ModelError, json_object, reading
from toolkit.models import directory, weights
from toolkit.models.record import tuning_state
from toolkit.plan.tuning_targets import SCORE

RUN_BASE = "base"
"""Directory in a run's that holds its base model if that was random, and so is nowhere else."""
_PARAMETERS, _NUMBERS = 8, 8
_SPOTS, _SPOT_BYTES = 64, 2**16
"""Number and size of the parts of a weight file that go into its digest."""
_ROUNDING = 0.02
"""Largest difference as a fraction of the number; bfloat16 rounds by 0.004."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Path and fingerprint of a base model."""

    path: str
    """Absolute path of its directory, with secrets masked: a path that contains one has to be given again."""
    numbers: dict[str, list[float]]
    """Parameter -> eight of its values, `fingerprint_of`; of eight parameters."""

    def write(self) -> bytes:
        """Return the content of base.json."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def base_of(model: PreTrainedModel, path: Path) -> BaseModel:
    """Return what identifies a model that was loaded from `path`. A collective under ZeRO-3 and for pipeline stages."""
    # Without the head of a classifier, which is new.
    parameters = {name: parameter for name, parameter in model.named_parameters() if name != SCORE}
    names = sorted(parameters)
    # Evenly spaced from the first to the last name.
    indices = torch.linspace(0, len(names) - 1, min(_PARAMETERS, len(names))).round().long().tolist()
    numbers = {names[index]: fingerprint_of(parameters[names[index]]) for index in dict.fromkeys(indices)}
    if any(parameter.is_meta for parameter in parameters.values()):  # which another stage holds
        for part in process_group.gather(numbers):
            numbers |= {name: fingerprint for name, fingerprint in part.items() if fingerprint}
    return BaseModel(secrets.hide(str(path.absolute())), numbers)


def fingerprint_of(parameter: torch.Tensor) -> list[float]:
    """Return eight evenly spaced values of a parameter, [] on the meta device. A collective if ranks have its parts."""
    if parameter.is_meta:
        return []
    if fingerprint := getattr(parameter, "fingerprint", None):  # taken before it was quantized
        return list(fingerprint)
    part, count = process_group.part_of(parameter)  # which of how many parts of divided experts this rank has
    with weights.full_params([parameter]):
        flat = parameter.detach().flatten()
        size = flat.numel()
        indices = torch.linspace(0, size * count - 1, _NUMBERS, dtype=torch.float64).long().tolist()
        numbers = {index: float(flat[index % size]) for index in indices if index // size == part}
    if count > 1:  # of experts, some on each rank
        for numbers_of_rank in process_group.gather(numbers):
            numbers |= numbers_of_rank
    return [numbers[index] for index in indices]


def read_base(folder: Path) -> BaseModel | None:
    """Return the base model that an adapter's or a checkpoint's base.json names, None without that file."""
    file = folder / directory.BASE_FILE
    if not file.is_file():
        return None
    with reading(file, ModelError):
        return BaseModel(**json_object(file, ModelError))


def check_base(expected: BaseModel, actual: BaseModel, folder: object) -> None:
    """Raise ModelError if `actual` is not `expected`, on which the adapter or checkpoint in `folder` was trained."""
    for name in expected.numbers:
        check_numbers(expected, name, actual.numbers.get(name, []), actual.path, folder)


def check_numbers(expected: BaseModel, name: str, numbers: list[float], path: object, folder: object) -> None:
    """Raise ModelError if the parameter `name` differs from the expected base's; `numbers`: its `fingerprint_of`. For
    the message: `path` of its model, and `folder` of the adapter or checkpoint.
    """
    expected_numbers = expected.numbers[name]
    if len(numbers) != len(expected_numbers) or any(
        not abs(wanted - number) <= _ROUNDING * max(abs(wanted), abs(number)) + 1e-6  # True for NaN
        for wanted, number in zip(expected_numbers, numbers, strict=True)
    ):
        raise ModelError(
            "{folder} was trained on another model than {path}: {name} differs. It was trained on {known}; set "
            "model.path to that model.",
            folder=folder,
            path=path,
            name=name,
            known=expected.path,
        )


def find_base(folder: Path, override: str = "") -> Path:
    """Return the directory of an adapter's or checkpoint's base model: `override`, or if that is "", the recorded path,
    or that in its run's directory. BaseMissing if no model is there.
    """
    base = read_base(folder)
    path = override or ("" if base is None else base.path)
    candidates = [Path(path)] if path else []
    if not override:  # a checkpoint or export is in its run's directory, or some levels below it
        candidates += [parent / RUN_BASE for parent in folder.absolute().parents[:4]]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise BaseMissing(
        "the base model of {folder} was not found: {path}. Name its directory: toolkit export-model PATH base=DIR "
        "output=OUT writes an adapter that records it; toolkit generate, chat and eval take model.path=DIR "
        "adapter={folder}.",
        folder=folder,
        path=path or "?",
    )


def base_numbers(model: PreTrainedModel) -> dict[str, list[float]]:
    """Return fingerprints of the base model's frozen, not quantised parameters, by name. A collective under ZeRO-3."""
    recorded, numbers = tuning_state(model).base.numbers, {}
    for name, parameter in model.named_parameters():
        # Its name in the base, without peft's wrappers.
        base_name = name.replace(".base_layer", "").replace(".original_module", "").replace(".token_adapter", "")
        is_comparable = parameter.is_floating_point() and not process_group.is_part(parameter)
        if base_name in recorded and is_comparable and not parameter.requires_grad:
            numbers[base_name] = fingerprint_of(parameter)
    return numbers


def weights_digest(folder: Path) -> str:
    """Return a digest of a model or adapter: its config, and the size and `_SPOTS` parts of each weight file."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "adapter_config.json"):
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".pt"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for offset in np.linspace(0, max(0, size - _SPOT_BYTES), _SPOTS).astype(int).tolist():
                    digest.update(os.pread(file.fileno(), _SPOT_BYTES, offset))
    return digest.hexdigest()
