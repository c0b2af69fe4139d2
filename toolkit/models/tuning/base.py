"""Which model an adapter, or a checkpoint without frozen weights, stands on; told again by a few of its numbers.

The numbers are taken from parameters under transformers' names, so they are the same for an official folder and for one
that was converted from it, and but for rounding in any precision.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.errors import BaseMissing, ModelError
from toolkit.messages import tr
from toolkit.models.fill import whole
from toolkit.outside import json_object, reading
from toolkit.secrets import hide

FILE = "base.json"
RUN_BASE = "base"
"""Folder of a run that holds its base where that was random and so is nowhere else."""
_PARAMETERS, _NUMBERS = 8, 8
_ROUNDING = 0.02
"""Largest difference as a fraction of the number; bfloat16 rounds by 0.004."""


@dataclass(frozen=True, slots=True)
class Base:
    """A model that something was trained on."""

    path: str
    """Absolute path of its directory; without secrets, so that a base below one has to be named again."""
    numbers: dict[str, list[float]]
    """By name of a parameter, eight of its numbers."""

    def write(self) -> bytes:
        """Return the content of base.json."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()


def base_of(model: PreTrainedModel, path: Path) -> Base:
    """Return what tells a model again. A collective under ZeRO-3.

    Args:
        model: as loaded, before anything is added to it.
        path: its folder.
    """
    parameters = sorted(model.named_parameters(), key=lambda one: one[0])
    chosen = _spread(parameters, _PARAMETERS)
    return Base(hide(str(path.absolute())), {name: numbers_of(parameter) for name, parameter in chosen})


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    """Return some of a sequence, from the first to the last."""
    places = torch.linspace(0, len(values) - 1, min(count, len(values))).round().long().tolist()
    return [values[place] for place in dict.fromkeys(places)]


def numbers_of(parameter: torch.Tensor) -> list[float]:
    """Return some of a parameter's numbers, from all over it."""
    with whole([parameter]):
        flat = parameter.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, _NUMBERS, dtype=torch.float64).long()
        return [float(value) for value in flat[places.to(flat.device)].float()]


def read_base(folder: Path) -> Base | None:
    """Return what an adapter or a checkpoint says of its base, None if it says nothing.

    Raises:
        ModelError: it is damaged.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    with reading(file, ModelError):
        return Base(**json_object(file, ModelError))


def check_base(known: Base, found: Base, folder: object) -> None:
    """Refuse a model that is not the one that was trained on.

    Args:
        known: what was trained on.
        found: what is to be used now.
        folder: what was trained, for the message.

    Raises:
        ModelError: they differ.
    """
    for name in known.numbers:
        check_numbers(known, name, found.numbers.get(name, []), found.path, folder)


def check_numbers(known: Base, name: str, found: list[float], path: object, folder: object) -> None:
    """Refuse a model of which one parameter differs; see `check_base`.

    Args:
        known: what was trained on.
        name: of the parameter.
        found: of `numbers_of`.
        path: the model's folder.
        folder: what was trained, for the message.

    Raises:
        ModelError: it differs.
    """
    numbers = known.numbers[name]
    if len(found) != len(numbers) or not all(map(_close, numbers, found)):
        raise ModelError(
            tr(
                "{folder} was trained on another model than {path}: {name} differs. It was trained on {known}; set "
                "model.path to that model.",
                folder=folder,
                path=path,
                name=name,
                known=known.path,
            )
        )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other)) + 1e-6


def find_base(folder: Path, given: str = "") -> Path:
    """Return the folder of the model that something was trained on.

    Args:
        folder: an adapter or a checkpoint's description, with base.json.
        given: where the user says that it is; "" looks where it was, and in the run folder.

    Raises:
        BaseMissing: it is nowhere.
    """
    known = read_base(folder)
    recorded = given or ("" if known is None else known.path)
    near = [] if given else [parent / RUN_BASE for parent in folder.absolute().parents[:4]]
    for path in [*([Path(recorded)] if recorded else []), *near]:
        if (path / "config.json").is_file():
            return path
    raise BaseMissing(
        tr(
            "{folder} is to be added to a model that is not there: {path}. Say where it is: toolkit export-model PATH "
            "base=DIR output=OUT writes an adapter that knows; toolkit generate, chat and eval take model.path=DIR "
            "adapter={folder}.",
            folder=folder,
            path=recorded or "?",
        )
    )
