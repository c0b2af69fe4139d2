"""A whole model out of the engine that has trained it, or out of its checkpoint alongside training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.distributed.process_group import full_shape, on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.export.write import trial_directory, write_files, write_folder
from toolkit.messages import CheckpointError
from toolkit.models import weights
from toolkit.models.directory import is_trusted
from toolkit.models.load import check_structure
from toolkit.models.save import stored_form
from toolkit.models.stages import capture_probe, unwrap_model


def export_model(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write what was trained, in transformers' layout. A collective; rank 0 holds the whole model in host memory."""
    probed, model = capture_probe(engine, probe_ids), unwrap_model(engine.module)
    state = {name: value for name, value in gathered_parameters(engine.module) if value.numel()}
    on_rank0(lambda: write_folder(model, files, folder, "hf", probed, state))


def check_exportable(model: PreTrainedModel, files: Mapping[str, bytes], folder: Path) -> None:
    """Raise ModelError unless what `export_model` will write to `folder` can be read back, by name and shape, without
    values. For rank 0 only.
    """
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    shapes = {name: full_shape(name, value) for name, value in tensors.items()}
    with trial_directory(folder) as described:
        write_files(files, described, None)
        if is_trusted(described):  # code of a directory may build what cannot be built empty
            return
        check_structure(described, stored_form(model, {name: shapes[name] for name in weights.shapes_of(model)}))


def export_in_background(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export it in transformers' layout in a child process, as writing weights holds Python's
    lock, which training needs; raises CheckpointError.
    """
    from toolkit.launch.processes import run_module

    if reason := run_module("toolkit.export.checkpoint", str(checkpoint), str(folder)):
        raise CheckpointError(reason)
