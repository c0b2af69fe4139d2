"""An adapter as a folder: what was trained, what it stands on, its tokenizer, all checked before it gets its name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from safetensors.torch import save_file

from toolkit.distributed.process_group import on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.errors import CheckpointError
from toolkit.export.folder import whole_or_absent, write_files
from toolkit.messages import tr
from toolkit.models import probe
from toolkit.models.adapters import (
    CONFIG,
    WEIGHTS,
    AdapterState,
    base_numbers,
    check_numbers,
    read_adapter_weights,
    read_base,
    read_settings,
    stored_names,
)
from toolkit.models.adapters import FILE as BASE_FILE
from toolkit.models.directory import read_object
from toolkit.models.probe import Probe
from toolkit.models.save import ORIGIN_DIR
from toolkit.models.weights import read_tensors

_OF_MODELS = ("config.json", "generation_config.json")
"""Files by which a folder is a model of its own."""


def export_adapter(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write what was trained of a tuned model, and nothing else. A collective.

    Args:
        engine: its module has `tuned`.
        files: of `toolkit.models.save.describe` and `Tuned.describe`; rank 0 alone needs them.
        probe_ids: of `toolkit.models.probe`.
        folder: must not exist.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    taken = probe.take(engine.module, probe_ids, engine.device)
    names = stored_names(engine.module)
    state = {names[name]: value for name, value in gathered_parameters(engine.module, names)}
    on_rank0(lambda: write_adapter(state, files, folder, taken))


def write_adapter(
    state: dict[str, torch.Tensor], files: Mapping[str, bytes], folder: Path, taken: Probe | None
) -> None:
    """Write an adapter's folder: it is whole or absent.

    Args:
        state: by stored name.
        files: as above.
        folder: must not exist.
        taken: what the model with it makes of a few ids.

    Raises:
        CheckpointError: the disk is full, a tensor is empty, or what was written is not what was in memory.
    """
    with whole_or_absent(folder) as temporary:
        temporary.mkdir()
        empty = [name for name, value in state.items() if not value.numel()]
        save_file({name: value.contiguous() for name, value in state.items()}, temporary / WEIGHTS, {"format": "pt"})
        own = {name: content for name, content in files.items() if not _is_of_models(name)}
        write_files(own, temporary)
        if taken is not None:
            probe.write(taken, temporary)
        read = read_tensors(temporary / WEIGHTS)
        wrong = empty + [name for name, value in state.items() if name not in read or not value.equal(read[name])]
        if wrong or not state:
            raise CheckpointError(
                tr("the export in {folder} does not hold what was trained: {names}", folder=folder, names=wrong[:5])
            )


def prove_adapter(engine: DeepSpeedEngine, folder: Path) -> None:
    """Compare an adapter's folder with the adapter and the base that are in memory. A collective.

    No model is loaded, and the engine's is only read: what has the same numbers, settings and base bit for bit gives
    the logits that the engine's model gave for the folder's probe.

    Args:
        engine: as for `export_adapter`.
        folder: what that has written.

    Raises:
        CheckpointError: on every rank, if the folder holds another adapter.
        ModelError: on every rank, if it names another base than the one in memory.
    """
    model = engine.module
    names = stored_names(model)
    state = {names[name]: value for name, value in gathered_parameters(model, names)}
    numbers = base_numbers(model)
    on_rank0(lambda: _compare(folder, model.tuned, state, numbers))


def _compare(
    folder: Path, tuned: AdapterState, state: dict[str, torch.Tensor], numbers: dict[str, list[float]]
) -> None:
    values, base = read_adapter_weights(folder), read_base(folder)
    wrong = sorted({*values} ^ {*state})
    wrong += [name for name, value in state.items() if name in values and not _is_same(value, values[name])]
    wrong += [CONFIG] * (read_settings(folder) != tuned.settings) + [BASE_FILE] * (base != tuned.base)
    if wrong or base is None:
        raise CheckpointError(
            tr("the export in {folder} does not hold what was trained: {names}", folder=folder, names=wrong[:5])
        )
    for name, found in numbers.items():
        check_numbers(base, name, found, base.path, folder)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def write_original_prefix(
    state: dict[str, torch.Tensor], settings: Mapping[str, Any], base: Path, folder: Path
) -> None:
    """Write a P-Tuning v2 prefix as the ChatGLM repositories' training leaves it, for programs that are theirs.

    Args:
        state: by stored name, which is the original's.
        settings: content of adapter_config.json.
        base: the model's folder, whose config.json is taken.
        folder: must not exist.

    Raises:
        CheckpointError: it cannot be written.
    """
    with whole_or_absent(folder) as temporary:
        temporary.mkdir()
        torch.save({name: value.clone() for name, value in state.items()}, temporary / "pytorch_model.bin")
        own = {key: settings[key] for key in ("pre_seq_len", "prefix_projection")}
        config = json.dumps(read_object(base / "config.json") | own, indent=2, ensure_ascii=False)
        (temporary / "config.json").write_text(config + "\n", encoding="utf-8")


def _is_of_models(name: str) -> bool:
    return name in _OF_MODELS or name.startswith(f"{ORIGIN_DIR}/")
