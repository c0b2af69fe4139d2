"""A model out of a checkpoint, without the ranks that saved it: as an export, or to be run.

As a program it exports (`python -m toolkit.export.checkpoint FROM TO`): writing weights holds Python's lock, which
training beside it needs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint import manifest
from toolkit.checkpoint.weights import weights
from toolkit.distributed.own_process import run_module
from toolkit.errors import CheckpointError, NotExportable, ToolkitError
from toolkit.export.folder import write_folder
from toolkit.messages import tr
from toolkit.models import fill, probe
from toolkit.models.folder import read_object
from toolkit.models.load import empty
from toolkit.models.save import MODEL_DIR, Format


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a checkpoint holds of the model."""

    model: PreTrainedModel
    """Its architecture, with nothing in the parameters."""
    state: dict[str, torch.Tensor]
    """Its weights by name, tied ones once."""


def rebuild(checkpoint: Path, scratch: Path | None = None) -> Rebuilt:
    """Return the model of a checkpoint.

    Args:
        checkpoint: verified.
        scratch: an empty folder for the weights, so that memory holds one at a time; None holds those of ZeRO-3 in
            memory, and maps others from the checkpoint.

    Raises:
        CheckpointError: the weights cannot be read, or are not those of the model that the checkpoint describes.
        NotExportable: it was saved by an older version, or its weights lie on an NVMe disk.
        ModelError: the model that it describes cannot be built.
    """
    described = checkpoint / MODEL_DIR
    if not described.is_dir():
        raise NotExportable(
            tr(
                "{folder} does not say what its model is: it was saved by an older version. Go on with the run "
                "(resume={folder}) to its end: it writes export/.",
                folder=checkpoint,
            )
        )
    model = empty(described)
    wanted, tied = fill.shapes_of(model), fill.tied_names(model)
    state: dict[str, torch.Tensor] = {}
    for name, value in weights(checkpoint, getattr(torch, read_object(described / "config.json")["dtype"])):
        if name in wanted or name not in tied:
            state[name] = value if scratch is None else _mapped(value, scratch / f"{len(state)}.pt")
        del value
        fill.return_memory()
    if wrong := fill.differences(model, state):
        raise CheckpointError(
            tr("{folder} does not hold its model: {reason}.", folder=checkpoint, reason="; ".join(wrong[:5]))
        )
    return Rebuilt(model, state)


def _mapped(value: torch.Tensor, file: Path) -> torch.Tensor:
    """Put a value into a file and return it mapped from there."""
    try:
        torch.save(value.clone(), file)  # the value alone, not all that lies in memory with it
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(
            tr(
                "cannot write the export to {folder}: {reason}. Nothing else was touched.",
                folder=file.parent,
                reason=error,
            )
        ) from error
    mapped: torch.Tensor = torch.load(file, weights_only=True, mmap=True)
    return mapped


def export_checkpoint(checkpoint: Path, folder: Path, format: Format = "hf") -> None:
    """Write the model of a checkpoint. Bit for bit what the run would have exported at that step.

    Args:
        checkpoint: verified.
        folder: must not exist.
        format: see `toolkit.models.save.save_model`.

    Raises:
        CheckpointError: the weights cannot be read, or the export cannot be written.
        ModelError: there is no official layout to go back to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        rebuilt = rebuild(checkpoint, Path(scratch))
        described = checkpoint / MODEL_DIR
        names = [PurePosixPath(name) for name in manifest.read(checkpoint)["files"]]
        mine = [name.relative_to(MODEL_DIR) for name in names if name.is_relative_to(MODEL_DIR)]
        files = {name.as_posix(): (described / name).read_bytes() for name in mine}
        taken = probe.read(checkpoint)
        write_folder(rebuilt.model, files, folder, format, taken, rebuilt.state)


def export_beside(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export it in transformers' layout, in a process of its own, beside training.

    Raises:
        CheckpointError: it came to nothing; the message says why.
    """
    if reason := run_module("toolkit.export.checkpoint", str(checkpoint), str(folder)):
        raise CheckpointError(reason)


def main() -> None:
    """Export."""
    source, target = map(Path, sys.argv[1:])
    if wrong := manifest.problems(source):
        sys.exit("; ".join(wrong[:3]))
    try:
        export_checkpoint(source, target)
    except (ToolkitError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
