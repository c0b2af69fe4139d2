"""Models to disk."""

from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.official import write_official, write_origin

Format = Literal["hf", "official"]


def save_model(
    model: PreTrainedModel,
    path: str | Path,
    format: Format = "hf",
    *,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save a model that is whole in this process.

    Args:
        model: any transformers model; with format "official" one that came from an official ChatGLM folder.
        path: a folder that does not exist yet.
        format: "hf": safetensors and config that transformers loads (ChatGLM-6B, which transformers does not know:
            `load_model`); "official": the official files, each tensor in its own shard and precision, the other files
            copied.
        state: whole parameters by name, in place of the model's own, which may be partitioned.

    Raises:
        ModelError: the folder exists, the format is unknown, or there is no official layout to go back to.
        CheckpointError: a value has no room in its official precision.
    """
    folder = Path(path)
    if folder.exists():
        raise ModelError(tr("{folder} exists already: nothing was written. Name another folder.", folder=folder))
    if format == "official":
        write_official(model, folder, None if state is None else state.__getitem__)
    elif format == "hf":
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        known = None if state is None else {name: value for name, value in state.items() if name not in tied}
        model.save_pretrained(folder, state_dict=known)
        write_origin(model, folder)
    else:
        raise ModelError(tr("unknown format '{format}'. Known: {known}.", format=format, known="hf, official"))
