"""A model's weights assembled from checkpoints or directories, one tensor in memory at a time."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.export.write import cannot_write
from toolkit.messages import CheckpointError, clauses, tr
from toolkit.models import weights


def assemble_state(
    source: Path,
    model: PreTrainedModel,
    values: Iterable[tuple[str, torch.Tensor]],
    scratch: Path | None,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Return the weights of a model by name, tied ones once, from names and tensors as they are read.

    Args:
        source: the folder that `values` are read from, for messages.
        model: on the meta device.
        values: names and weights. Tied weights may come under both names.
        scratch: an empty directory. Each weight is written to a file there and memory-mapped, so that memory holds one
            at a time. None keeps all in memory.
        dtype: precision of the weights; None leaves them as they are.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape.
    """
    names, tied = weights.shapes_of(model), weights.tied_parameter_names(model)
    buffer_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}  # routers' biases stay in float32
    state: dict[str, torch.Tensor] = {}
    for stored_name, value in values:
        name = stored_name if stored_name in names else tied.get(stored_name, stored_name)
        if name not in state:  # a tied weight may come twice
            is_cast = dtype is not None and value.is_floating_point()
            weight = value.to(buffer_dtypes.get(name, dtype)) if is_cast else value
            state[name] = weight if scratch is None else _to_mapped_file(weight, scratch / f"{len(state)}.pt")
            del weight
        del value  # before the next one is read
        weights.return_memory()
    if wrong := _state_differences(model, state):
        raise CheckpointError("{folder} does not hold its model: {reason}.", folder=source, reason=clauses(wrong[:5]))
    return state


def _to_mapped_file(value: torch.Tensor, file: Path) -> torch.Tensor:
    """Write a tensor to a file and return it memory-mapped from there."""
    try:
        torch.save(value.clone(), file)  # the value alone, not all of its storage
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise cannot_write(file.parent, error) from error
    mapped: torch.Tensor = torch.load(file, weights_only=True, mmap=True)
    return mapped


def with_config_keys(config_file: bytes, keys: Mapping[str, Any], dtype: str) -> bytes:
    """Return config.json with `keys` set, in sections that have them too, and its "dtype" (`dtype` "": unchanged)."""
    config = json.loads(config_file) | keys | ({"dtype": dtype} if dtype else {})
    for section in config.values():
        if isinstance(section, dict):
            section.update({key: value for key, value in keys.items() if key in section})
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _state_differences(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return sentences about tensors that a state lacks, has too many or has in another shape than the model."""
    shapes = weights.shapes_of(model)
    wrong = [tr("{name}: missing", name=name) for name in shapes if name not in state]
    for name, value in state.items():
        expected, shape = shapes.get(name), tuple(value.shape)
        if expected is None:
            wrong.append(tr("{name}: the model has no such tensor", name=name))
        elif shape != expected:
            wrong.append(tr("{name}: {found} instead of {expected}", name=name, found=shape, expected=expected))
    return wrong
