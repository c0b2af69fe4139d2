"""Weights of a transformers folder into a partitioned model, one tensor at a time.

transformers' own way (5.23) holds the whole checkpoint on rank 0 while it loads and needs accelerate; here no rank ever
holds more than its part and one tensor.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from toolkit.errors import ModelError
from toolkit.messages import tr


def load_partitioned(path: str, dtype: torch.dtype, ds_config: dict[str, Any]) -> PreTrainedModel:
    """Load a folder under ZeRO-3. A collective: rank 0 reads, every rank keeps its part.

    Args:
        path: folder with config.json and *.safetensors, already checked by `folder.read_config`.
        dtype: parameters are kept in it.
        ds_config: the DeepSpeed dict, stage 3.

    Raises:
        ModelError: the files lack a parameter, or hold one that the architecture has not, or in another shape.
    """
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=ds_config, dtype=dtype):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    _restore_rotary_frequencies(model)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
    files = _files_of_tensors(Path(path))
    _compare(path, model, shapes, files)
    for name, value in _tensors(files, shapes):
        parameter = parameters[name]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if value is not None:
                parameter.data.copy_(value)
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def _restore_rotary_frequencies(model: PreTrainedModel) -> None:
    """Compute the frequencies anew: zero.Init casts whatever a constructor makes, and in half precision they "
    "are noise.
    """
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):
            fresh = type(module)(config=module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer.to(getattr(module, name).device))


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return where each tensor lies, in file order."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in sorted(weight_map.items(), key=lambda item: item[1])}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    return found


def _compare(
    path: str,
    model: PreTrainedModel,
    shapes: dict[str, tuple[int, ...]],
    files: dict[str, Path],
) -> None:
    """Refuse anything but an exact match. Buffers and tied copies may stand in the files; they are not read."""
    extra = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    extra |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(set(shapes) - set(files))
    unexpected = sorted(set(files) - set(shapes) - extra)
    mismatched = []
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as tensors:
            for name in set(tensors.keys()) & set(shapes):
                found = tuple(tensors.get_slice(name).get_shape())
                if found != shapes[name]:
                    mismatched.append(f"{name} {found} instead of {shapes[name]}")
    refuse_other_weights(path, model, missing, unexpected, mismatched)


def refuse_other_weights(
    path: str,
    model: PreTrainedModel,
    missing: list[str],
    unexpected: list[str],
    mismatched: list[str],
) -> None:
    """Raise if files and architecture differ.

    Raises:
        ModelError: any of the lists is not empty.
    """
    if missing or unexpected or mismatched:
        raise ModelError(
            tr(
                "the weights in {path} are not those of {architecture}: missing {missing}, unexpected {unexpected}, of "
                "another shape {mismatched}. Nothing was trained.",
                path=path,
                architecture=type(model).__name__,
                missing=missing[:5],
                unexpected=unexpected[:5],
                mismatched=mismatched[:5],
            )
        )


def _tensors(files: dict[str, Path], wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each wanted tensor: its value on rank 0, None elsewhere, in the same order on every rank.

    The file is opened for each tensor: pages that were read would count as this process's memory until it is closed.
    """
    is_rank0 = torch.distributed.get_rank() == 0
    for name, file in files.items():
        if name not in wanted:
            continue
        if not is_rank0:
            yield name, None
            continue
        with safe_open(file, framework="pt") as tensors:
            yield name, tensors.get_tensor(name)
