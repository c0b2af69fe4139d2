"""What must be the same on all ranks: settings, code and model, compared under names that no language changes."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import toolkit
from toolkit.config import load, schema
from toolkit.distributed import process_group
from toolkit.messages import ConfigError
from toolkit.train import run_dir

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
"""Keys that ranks may have different values of: rank 0 alone chooses the run directory, and the others say how a node
shows things, or where it keeps and how it reads what is compared by its content."""
_FOLDERS = {"model.path": "model.hub_id", "tuning.adapter": ""}
"""Keys that name a directory, compared by its content; and the key that stands for its path, if any: the cache of
Hugging Face may be elsewhere on another node."""
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".py")
_CODE_FILES = (".py", ".json", ".yaml")  # tables decide too: plan/gpus.yaml chooses layouts
_SAMPLED_BYTES = 1 << 16
"""Bytes that are read at the beginning, in the middle and at the end of a model's file: all would take minutes."""


def check_settings(cfg: schema.RunConfig) -> None:
    """Raise ConfigError on every rank where settings, code or model differ. Before data is prepared. A collective."""
    process_group.check_alike(cfg.distributed, {**_setting_facts(cfg), **_code_facts()}, ConfigError)


def _setting_facts(cfg: schema.RunConfig) -> dict[str, str]:
    """Return dotted key -> JSON of what ranks must agree on, and "KEY: files" -> digest of a model directory."""
    values = {key: value for key, value in _leaf_values(load.to_dict(cfg), "") if not is_below(key, MAY_DIFFER)}
    for key, hub_key in _FOLDERS.items():
        folder = Path(json.loads(values.get(key, '""')))
        if folder.name and folder.is_dir():  # not Path(""), the current directory, where the key is not set
            files = sorted(file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
            values[f"{key}: files"] = _files_digest((file, _sampled_bytes(file)) for file in files)
            if json.loads(values.get(hub_key, '""')):  # stands for the path, which may be another one on each node
                del values[key]
    return values


def _leaf_values(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as JSON) of each leaf below `value`, whose own key is `key`; lists of sections too."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaf_values(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaf_values(item, f"{key}[{number}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _code_facts() -> dict[str, str]:
    """Return by name, as text: versions of packages, the device, and digests of the program and of toolkit's files."""
    facts = {f"version: {name}": version for name, version in run_dir.versions().items()}
    facts["version: python"] = sys.version.split()[0]
    files = sorted(file for file in Path(toolkit.__file__).parent.rglob("*.*") if file.suffix in _CODE_FILES)
    facts["code: toolkit"] = _files_digest((file, file.read_bytes()) for file in files)
    program = Path(sys.argv[0])
    if program.is_file():
        facts[f"code: {program.name}"] = _files_digest([(program, program.read_bytes())])
    from deepspeed.accelerator import get_accelerator  # which device it takes is decided when it is first asked

    facts["device"] = str(get_accelerator().device_name())
    return facts


def _sampled_bytes(file: Path) -> bytes:
    """Return a file's size and its bytes at the beginning, in the middle and at the end (`_SAMPLED_BYTES` each)."""
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as handle:
        for offset in (0, size // 2, max(0, size - _SAMPLED_BYTES)):
            handle.seek(offset)
            parts.append(handle.read(_SAMPLED_BYTES))
    return b"".join(parts)


def _files_digest(files: Iterable[tuple[Path, bytes]]) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of files' names and contents, in their order."""
    digest = hashlib.sha256()
    for file, content in files:
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def is_below(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of the names, or in a section of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
