"""A model as a folder that other programs load: weights, config, tokenizer, all checked before it gets its name.

Beside them lie manifest.json, with size and SHA-256 of every file, and a probe; `toolkit verify` reads both.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError
from transformers import PreTrainedModel

from toolkit.checkpoint import directory
from toolkit.disk import flush, grant
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.errors import CheckpointError
from toolkit.messages import tr
from toolkit.models import probe
from toolkit.models.pipeline import take_probe, unwrap_model
from toolkit.models.probe import Probe
from toolkit.models.save import MAX_SHARD_SIZE, Format, save_model
from toolkit.models.weights import WeightFiles, tied_names


def export(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write what was trained, in transformers' layout. A collective; rank 0 holds the whole model in host memory.

    Args:
        engine: the engine whose module is exported, in its training precision.
        files: of `toolkit.models.save.describe`; rank 0 alone needs them.
        probe_ids: of `toolkit.models.probe`.
        folder: must not exist.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    taken, model = take_probe(engine, probe_ids), unwrap_model(engine.module)
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: write_folder(model, files, folder, "hf", taken, state))


def write_folder(
    model: PreTrainedModel,
    files: Mapping[str, bytes],
    folder: Path,
    format: Format,
    taken: Probe | None,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write a model folder and check what was written: `folder` is whole or absent.

    Args:
        model: the model.
        files: of `toolkit.models.save.describe`. The official layout brings its own.
        folder: must not exist.
        format: see `save_model`.
        taken: what this model makes of a few ids; None where that is not known.
        state: whole parameters by name, where the model's own are partitioned or empty.
        max_shard_size: see `save_model`.

    Raises:
        CheckpointError: the disk is full, or what was written is not what was in memory.
    """
    with whole_or_absent(folder) as temporary:
        save_model(model, temporary, format, state=state, max_shard_size=max_shard_size)
        write_files(files if format == "hf" else {}, temporary)
        if taken is not None:
            probe.write(taken, temporary)
        _verify(model, temporary, format, state)


@contextmanager
def whole_or_absent(folder: Path) -> Iterator[Path]:
    """Give a place beside a folder to write to; sealed, it gets the folder's name.

    Args:
        folder: must not exist.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A name that nobody else has: whatever stands beside the folder is the user's.
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            temporary = Path(parent) / folder.name
            yield temporary
            _seal(temporary)
            for path in temporary.rglob("*"):
                grant(path)
            temporary.rename(folder)
            flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. Nothing else was touched.",
                folder=folder,
                reason=error,
            )
        ) from error


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files by their path in a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _seal(folder: Path) -> None:
    """Write the manifest of what is on the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        flush(path)
    directory.write_manifest(
        folder, {path.relative_to(folder).as_posix(): directory.record_file(path) for path in paths}, {}
    )
    flush(folder)


def _verify(model: PreTrainedModel, folder: Path, format: Format, state: dict[str, torch.Tensor] | None) -> None:
    """Read back every header: nothing missing, nothing empty (a known fate under ZeRO-3), every shape whole."""
    tied = tied_names(model)
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
