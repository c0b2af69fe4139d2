"""The weights of a model of one's own as safetensors: at the end of a run, or out of a checkpoint.

Checkpoints come here from toolkit/export/checkpoint.py, which sees what they are of.
"""

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from safetensors.torch import load_file, save_file

from toolkit.checkpoint import directory
from toolkit.checkpoint.convert import iter_weights
from toolkit.config.schema import Dtype
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.errors import CheckpointError
from toolkit.export.folder import whole_or_absent
from toolkit.messages import tr
from toolkit.models.load import TORCH_DTYPES
from toolkit.models.save import MODEL_DIR

WEIGHTS, CARD = "model.safetensors", "own.json"


def export(engine: DeepSpeedEngine, card: dict[str, Any], folder: Path) -> None:
    """Write parameters and stored buffers, whole, in the precision of the training. A collective.

    Args:
        engine: the engine.
        card: what the model is.
        folder: must not exist.

    Raises:
        CheckpointError: it cannot be written, or is not what was in memory.
    """
    state = dict(gathered_parameters(engine.module))
    on_rank0(lambda: _write(state, card, folder))


def _write(state: dict[str, torch.Tensor], card: dict[str, Any], folder: Path) -> None:
    with whole_or_absent(folder) as temporary:
        temporary.mkdir()
        save_file({name: value.contiguous() for name, value in state.items()}, temporary / WEIGHTS)
        (temporary / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        written = load_file(temporary / WEIGHTS)
        wrong = [name for name, value in state.items() if not _same(written.get(name), value)]
        if wrong:
            raise CheckpointError(
                tr("{folder} does not hold its model: {reason}.", folder=folder, reason="; ".join(wrong[:5]))
            )


def _same(written: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes: nan is nan."""
    if written is None or (written.shape, written.dtype) != (value.shape, value.dtype):
        return False
    return torch.equal(written.reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8))


def is_own(folder: Path) -> bool:
    """Whether a checkpoint or an export is of a model of one's own."""
    return (folder / CARD).is_file() or (folder / MODEL_DIR / CARD).is_file()


def export_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Write the weights in a checkpoint, without the ranks that saved it: those that `export` would have written.

    Args:
        checkpoint: verified; of a model of one's own.
        folder: must not exist.

    Raises:
        CheckpointError: they cannot be read or written.
    """
    dtype = TORCH_DTYPES[Dtype(directory.read_run_state(checkpoint).config["precision"]["dtype"])]
    card = json.loads((checkpoint / MODEL_DIR / CARD).read_text(encoding="utf-8"))
    state: dict[str, torch.Tensor] = {}
    names = set(card["names"])
    for name, value in iter_weights(checkpoint, dtype):
        if name in names:  # of tied ones the first, as in the model
            state[name] = value.clone()
    _write(state, card, folder)
