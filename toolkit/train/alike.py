"""What must be the same on every rank before the first step: settings, code, package versions, model files, data.

What is compared has names that no language changes: ranks may speak different ones.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from toolkit.config.load import to_dict
from toolkit.config.schema import RunConfig
from toolkit.distributed import process_group
from toolkit.errors import ConfigError, DataError
from toolkit.train import run_dir
from toolkit.train.language_data import LanguageData

MAY_DIFFER = (
    "language",
    "run.display",
    "run.dir",
    "run.name",
    "prepare.dir",
    "prepare.num_workers",
    "data.num_workers",
    "distributed.interface",
)
"""Keys that ranks may have different values of: rank 0 alone chooses the run folder, and the others say how a node
shows things, or where it keeps and how it reads what is compared by its content."""

_FOLDERS = {"model.path": "model.hub_id", "tuning.adapter": ""}
"""Keys that name a folder, compared by its content; and the key that stands for the place of the folder, if any: the
cache of Hugging Face may be elsewhere on another node."""
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".py")
_CODE_FILES = (".py", ".json", ".yaml")  # tables decide too: plan/gpus.yaml chooses layouts
_SAMPLE = 1 << 16
"""Bytes that are read at the beginning, in the middle and at the end of a file."""


def check_settings(cfg: RunConfig) -> None:
    """See that all ranks were started with the same settings, code and model. Before data is prepared. A collective.

    Raises:
        ConfigError: on every rank; the message names what differs, the values and the ranks.
    """
    if process_group.world_size() > 1:
        process_group.check_alike(cfg.distributed, {**_settings(cfg), **_code()}, ConfigError)


def check_data(cfg: RunConfig, prepared: LanguageData) -> None:
    """See that all ranks have prepared the same data: files of one name may differ from node to node. A collective.

    Raises:
        DataError: on every rank.
    """
    if process_group.world_size() == 1:
        return
    plan = prepared.train_plan
    found = {
        "data: training samples": _count(len(prepared.train), prepared.train.fingerprint),
        "data: training sequences": _count(len(plan), plan.folder.name if plan.folder else prepared.packing.value),
    }
    if prepared.validation is not None:
        found["data: validation samples"] = _count(len(prepared.validation), prepared.validation.fingerprint)
    process_group.check_alike(cfg.distributed, found, DataError)


def _count(number: int, fingerprint: str) -> str:
    return f"{number:,} ({fingerprint[:12]})"


def _settings(cfg: RunConfig) -> dict[str, str]:
    """Return the config by key, without secrets, and digests of the folders that it names."""
    values = dict(_leaves(to_dict(cfg), ""))
    found = {
        key: value
        for key, value in values.items()
        if not any(key == name or key.startswith(f"{name}.") for name in MAY_DIFFER)
    }
    for key, stand_in in _FOLDERS.items():
        folder = Path(json.loads(found.get(key, '""')))
        if folder.name and folder.is_dir():
            found[f"{key}: files"] = _folder_digest(folder)
            if json.loads(found.get(stand_in, '""')):
                del found[key]
    return found


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each plain value, also of those in lists, and the value as JSON."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _code() -> dict[str, str]:
    """Return versions, and digests of the program and of this package."""
    versions = {**run_dir.versions(), "python": sys.version.split()[0]}
    found = {f"version: {name}": version for name, version in versions.items()}
    here = Path(__file__).resolve().parents[1]
    files = sorted(file for file in here.rglob("*.*") if file.suffix in _CODE_FILES)
    found["code: toolkit"] = _digest((file, file.read_bytes()) for file in files)
    program = Path(sys.argv[0])
    if program.is_file():
        found[f"code: {program.name}"] = _digest([(program, program.read_bytes())])
    from deepspeed.accelerator import get_accelerator  # which device it takes is decided when it is first asked

    found["device"] = str(get_accelerator().device_name())
    return found


def _folder_digest(folder: Path) -> str:
    """Return a digest of what a model folder holds: of weights, sizes and samples, as all of them take minutes."""
    files = sorted(file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
    return _digest((file, _sampled(file)) for file in files)


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as handle:
        parts = [str(size).encode()]
        for place in (0, size // 2, max(0, size - _SAMPLE)):
            handle.seek(place)
            parts.append(handle.read(_SAMPLE))
    return b"".join(parts)


def _digest(files: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for file, content in files:
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
