"""The trained model as a folder that plain transformers loads: safetensors, config, tokenizer."""

import json
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedTokenizerBase

from toolkit.distributed.process_group import on_rank0
from toolkit.engine.gather import gathered_parameters
from toolkit.errors import CheckpointError
from toolkit.messages import tr


def export(engine: DeepSpeedEngine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model and check what was written. A collective; rank 0 holds the whole model in host memory.

    Written beside its place and renamed, so that `folder` is whole or absent.

    Args:
        engine: the engine whose module is exported, in its training precision.
        tokenizer: saved beside the weights.
        folder: must not exist.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: _write(engine, tokenizer, folder, state))


def _write(
    engine: DeepSpeedEngine,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: dict[str, torch.Tensor],
) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    model = engine.module
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    try:
        model.save_pretrained(temporary, state_dict={k: v for k, v in state.items() if k not in tied})
        tokenizer.save_pretrained(temporary)
        _verify(temporary, state)
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. The checkpoints are untouched.",
                folder=folder,
                reason=error,
            )
        ) from error


def _verify(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Read back every file's header: each tensor once, in its full shape, none empty (a known fate under ZeRO-3)."""
    written: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        written.update({name: entry["shape"] for name, entry in header.items() if name != "__metadata__"})
    wrong = [name for name, shape in written.items() if name not in state or list(state[name].shape) != shape]
    if wrong or not written:
        raise CheckpointError(
            tr(
                "the export in {folder} does not hold what was trained: {names}",
                folder=folder,
                names=wrong[:5],
            )
        )
