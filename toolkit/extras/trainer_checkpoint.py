"""Reads checkpoints that transformers' Trainer writes without DeepSpeed, alone or through other programs: a model or an
adapter, and optimizer.pt.

optimizer.pt numbers parameters and has no names: they follow from the order in the model, which is built without
weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import files
from toolkit.messages import BaseMissing, CheckpointError, ConfigError, json_object
from toolkit.models import adapters, load
from toolkit.models.base_model import BaseModel

OPTIMIZER, _STATE = "optimizer.pt", "trainer_state.json"


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is such a checkpoint."""
    return (folder / OPTIMIZER).is_file() and (folder / _STATE).is_file()


def is_of_adapter(folder: Path) -> bool:
    """Whether a directory is such a checkpoint, and of an adapter, so that its base model is needed."""
    return is_checkpoint(folder) and adapters.is_adapter(folder)


def read(folder: Path, load_file: Callable[[Path], dict[str, Any]], base: str = "") -> dict[str, Any]:
    """Return a checkpoint as DeepSpeed's file of a model without ZeRO in fp32 would have it: under `module` the trained
    parameters by name in the model's order, under `optimizer` the state dict of an optimizer of torch, and the step.

    Args:
        folder: The checkpoint's directory.
        load_file: Reads a .pt file without executing anything in it.
        base: Directory of an adapter's base model; "": what the adapter names.

    Raises:
        ConfigError: An adapter's base model is not on this disk.
        ModelError: The model or adapter cannot be read.
        CheckpointError: optimizer.pt or trainer_state.json cannot be read.
        KeyError, TypeError, ValueError: Another layout.
    """
    if adapters.is_adapter(folder):
        base_folder = _base_folder(folder, base)
        model, values = load.load_empty(base_folder), adapters.read_adapter_weights(folder)
        adapters.attach_adapter(model, adapters.read_settings(folder), BaseModel(str(base_folder), {}))
        stored_names = adapters.stored_names(model)
        values = {name: values[stored] for name, stored in stored_names.items()}
    else:
        model, stream = load.stream_parameters(folder)
        values = dict(stream)
    module = {name: values[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    step = int(json_object(folder / _STATE, CheckpointError)["global_step"])
    return {
        "module": module,
        "optimizer": load_file(folder / OPTIMIZER),
        "global_steps": step,
        "global_samples": 0,  # a count for DeepSpeed's logs
        "skipped_steps": 0,
        "lr_scheduler": None,
        "param_shapes": [],
        "buffer_names": [],
    }


def _base_folder(folder: Path, override: str) -> Path:
    """Return the directory with the config.json of an adapter's base model: `override`, or what the adapter names, a
    model in Hugging Face's cache too; ConfigError if there is none.
    """
    settings = adapters.read_settings(folder)
    named = str(settings.get("base_model_name_or_path") or "")
    if not override and files.is_hub_name(named):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(named, "config.json", revision=settings.get("revision"))
        override = str(Path(cached).parent) if isinstance(cached, str) else ""
    try:
        return adapters.base_of_adapter(folder, override)
    except BaseMissing as error:
        raise ConfigError(
            "the base model of {folder} was not found: {path}. Add base=DIR, its directory; config.json in it is "
            "enough.",
            folder=folder,
            path=override or named or "?",
        ) from error
