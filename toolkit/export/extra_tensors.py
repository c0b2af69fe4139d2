"""Tensors that are in a model's files, but are none of the model's, copied into its whole exports.

Where the directory that held them is gone, they are left out, and config.json says that there are none.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import convert_file_size_to_int

from toolkit.export.shards import write_shards
from toolkit.messages import ModelError, warn
from toolkit.models import directory, weights
from toolkit.models.extra_tensors import FILE, dtype_and_shape, predicting_keys

_MOST_BYTES = 1 << 30
"""Of one file that they are written to, as this much, and one tensor more, is held in memory."""


def as_tensors_of(base: Path, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the `files` that describe a model with extra tensors, with `base` as the directory that has these now."""
    record = json.loads(files[FILE]) | {"folder": str(base.absolute())}
    return {**files, FILE: json.dumps(record).encode()}


def write(files: Mapping[str, bytes], folder: Path, max_shard_size: str) -> dict[str, bytes]:
    """Copy the extra tensors that `files` record next to a model's weights in `folder`, and read them back. Return the
    files without the record, and where the tensors are gone with a config.json that counts no layers made of them.
    """
    record, other_files = json.loads(files[FILE]), {name: files[name] for name in files if name != FILE}
    try:
        source = weights.files_of(Path(record["folder"]))
    except (ModelError, OSError):
        source = None
    if source is None or any(dtype_and_shape(source, name) != tensor for name, tensor in record["tensors"].items()):
        warn(
            "The export lacks {count} tensors that were in {folder} beside the model when training began, as they are "
            "not there now: config.json says that there are no layers for multi-token prediction.",
            count=len(record["tensors"]),
            folder=record["folder"],
        )
        config = json.loads(other_files["config.json"])
        for section in directory.sections_of(config):
            section.update(dict.fromkeys(predicting_keys(section), 0))
        return other_files | {"config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}
    _add_weights(source, list(record["tensors"]), folder, min(_MOST_BYTES, convert_file_size_to_int(max_shard_size)))
    return other_files


def _add_weights(source: weights.WeightFiles, names: Sequence[str], folder: Path, most: int) -> None:
    """Write tensors to files of at most `most` bytes, or of one tensor, and list them in the index."""
    index_file, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # with this name transformers would not look for an index
        first = single.rename(folder / "model-00001-of-00001.safetensors")
        stored = weights.WeightFiles(folder, [first])
        total = sum(info.dtype.itemsize * torch.Size(info.shape).numel() for info in stored.values())
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(stored, first.name)}
    else:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    values = ((name, _read(source, name)) for name in names)
    shards, num_bytes = write_shards(values, folder, folder, most, "model-extra-{:05}.safetensors")
    index["weight_map"] |= shards
    index["metadata"]["total_size"] += num_bytes
    index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read(source: weights.WeightFiles, name: str) -> torch.Tensor:
    """Return a copy of a tensor in memory."""
    with source.open(name) as value:
        return value.clone()
