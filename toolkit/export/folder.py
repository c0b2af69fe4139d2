"""A model as a folder that other programs load: weights, config, tokenizer, all checked before it gets its name."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.disk import grant
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.gather import gathered_parameters
from toolkit.errors import CheckpointError
from toolkit.messages import tr
from toolkit.models.chat import AnyChatEncoder
from toolkit.models.save import Format, save_model
from toolkit.models.weights import WeightFiles


def export(engine: DeepSpeedEngine, encoder: AnyChatEncoder, folder: Path) -> None:
    """Write what was trained, in transformers' layout. A collective; rank 0 holds the whole model in host memory.

    Args:
        engine: the engine whose module is exported, in its training precision.
        encoder: its tokenizer is saved beside the weights.
        folder: must not exist.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: write_folder(engine.module, encoder, folder, "hf", state))


def write_folder(
    model: PreTrainedModel,
    encoder: AnyChatEncoder | None,
    folder: Path,
    format: Format,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a folder and check what was written: beside its place first, so that `folder` is whole or absent.

    Args:
        model: the model.
        encoder: its tokenizer is saved too; None without one. The official layout brings its own.
        folder: must not exist.
        format: see `save_model`.
        state: whole parameters by name, where the model's own are partitioned.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A name that nobody else has: whatever stands beside the folder is the user's.
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            temporary = Path(parent) / folder.name
            if encoder is not None:
                _add_stops(model, encoder.stop_ids)
            save_model(model, temporary, format, state=state)
            if format == "hf" and encoder is not None:
                encoder.tokenizer.save_pretrained(temporary)
            _verify(model, temporary, format, state)
            for path in temporary.rglob("*"):
                grant(path)
            temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. Nothing else was touched.",
                folder=folder,
                reason=error,
            )
        ) from error


def _add_stops(model: PreTrainedModel, stop_ids: list[int]) -> None:
    """Let programs that know nothing of the chat format stop where answers end (GLM-4#297: they never did)."""
    known = model.generation_config.eos_token_id
    known = [known] if isinstance(known, int) else list(known or [])
    if not set(stop_ids) <= set(known):
        model.generation_config.eos_token_id = [*known, *(index for index in stop_ids if index not in known)]


def _verify(model: PreTrainedModel, folder: Path, format: Format, state: dict[str, torch.Tensor] | None) -> None:
    """Read back every header: nothing missing, nothing empty (a known fate under ZeRO-3), every shape whole."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    held = state if state is not None else model.state_dict()
    held = {name: value for name, value in held.items() if name not in tied}
    written = {name: info.shape for name, info in WeightFiles(folder).items()}
    if format == "official":
        wrong = sorted(set(written) ^ set(model.origin.tensors))
    else:
        wrong = [name for name, shape in written.items() if name in held and tuple(held[name].shape) != shape]
        # transformers may store parameters under other names (experts one by one), but never fewer numbers.
        expected = sum(value.numel() for value in held.values())
        found = sum(torch.Size(shape).numel() for shape in written.values())
        if expected != found:
            wrong += sorted(set(held) - set(written)) or [json.dumps({"expected": expected, "found": found})]
    wrong += [name for name, shape in written.items() if 0 in shape]
    if wrong or not written:
        raise CheckpointError(
            tr(
                "the export in {folder} does not hold what was trained: {names}",
                folder=folder,
                names=wrong[:5],
            )
        )
