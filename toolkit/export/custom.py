"""Exports of custom models (`toolkit.custom.train`): their weights, which only the program that built them can use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.checkpoint import fragment_reader
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.export.write import ExportOptions, atomic_directory, save_checked, trial_directory
from toolkit.messages import ConfigError
from toolkit.models.save import MODEL_DIR

WEIGHTS, CUSTOM_CARD = "model.safetensors", "own.json"


def is_custom(folder: Path) -> bool:
    """Whether a checkpoint or an export is of a custom model."""
    return (folder / CUSTOM_CARD).is_file() or (folder / MODEL_DIR / CUSTOM_CARD).is_file()


def check_custom_exportable(module: torch.nn.Module, folder: Path) -> None:
    """Raise ModelError unless tensors of these names and types can be written to `folder`. For rank 0 only."""
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    with trial_directory(folder) as trial:
        save_checked(
            {name: torch.empty(0, dtype=value.dtype) for name, value in tensors.items()}, trial / WEIGHTS, folder
        )


def export_custom(engine: DeepSpeedEngine, card: Mapping[str, Any], folder: Path) -> None:
    """Write a custom model's parameters and stored buffers in the precision of the training. A collective."""
    state = dict(gathered_parameters(engine.module))
    on_rank0(lambda: write_custom(state, card, folder))


def export_custom_checkpoint(checkpoint: Path, folder: Path, options: ExportOptions) -> None:
    """Write what `export_custom` would write, out of a verified checkpoint; ConfigError for any option."""
    if options != ExportOptions():
        raise ConfigError(
            "{folder} holds a custom model: its weights alone are written, as they are.", folder=checkpoint
        )
    card = json.loads((checkpoint / MODEL_DIR / CUSTOM_CARD).read_text(encoding="utf-8"))
    names = {*card["names"]}  # of tied ones the first, as in the model
    state = {name: value for name, value in fragment_reader.iter_weights(checkpoint) if name in names}
    write_custom(state, card, folder)


def write_custom(state: Mapping[str, torch.Tensor], card: Mapping[str, Any], folder: Path) -> None:
    """Write a directory of weights and the model's card atomically, and read it back."""
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        (temporary / CUSTOM_CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        save_checked(state, temporary / WEIGHTS, folder)
