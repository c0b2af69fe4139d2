"""Whether a full model can be exported, checked before training; and exports alongside training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.distributed.process_group import full_shape
from toolkit.export.write import trial_directory, write_files
from toolkit.messages import CheckpointError
from toolkit.models import weights
from toolkit.models.directory import is_trusted
from toolkit.models.load import check_structure
from toolkit.models.save import stored_form


def check_exportable(model: PreTrainedModel, files: Mapping[str, bytes], folder: Path) -> None:
    """Raise ModelError unless what `write_folder` writes could be read back, by names and shapes. For rank 0 only."""
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    shapes = {name: full_shape(name, value) for name, value in tensors.items()}
    with trial_directory(folder) as described:
        write_files(files, described, None)
        if is_trusted(described):  # code of a directory may build what cannot be built empty
            return
        check_structure(described, stored_form(model, {name: shapes[name] for name in weights.shapes_of(model)}))


def export_in_background(checkpoint: Path, folder: Path) -> None:
    """Verify and export a checkpoint in a child process, as writing holds Python's lock; raises CheckpointError."""
    from toolkit.launch.processes import run_module

    if reason := run_module("toolkit.export.checkpoint", str(checkpoint), str(folder)):
        raise CheckpointError(reason)
