"""Models to disk."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.messages import tr
from toolkit.models.chat import AnyChatEncoder
from toolkit.models.fill import tied_names
from toolkit.models.official import write_official, write_origin

Format = Literal["hf", "official"]
MAX_SHARD_SIZE = "5GB"
_PREDICTING = re.compile(r"num_nextn_predict_layers|num_mtp_(layers|modules)|mtp_num_(hidden_)?layers")
MODEL_DIR = "model"
"""Where a checkpoint keeps what `describe` gives."""


def save_model(
    model: PreTrainedModel,
    path: str | Path,
    format: Format = "hf",
    *,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Save a model that is whole in this process.

    Args:
        model: any transformers model; with format "official" one that came from an official ChatGLM folder.
        path: a folder that does not exist yet.
        format: "hf": safetensors and config that transformers loads (ChatGLM-6B, which transformers does not know:
            `load_model`); "official": the official files, each tensor in its own shard and precision, the other files
            copied.
        state: whole parameters by name, in place of the model's own, which may be partitioned.
        max_shard_size: largest safetensors file, such as 5GB; the official files have the official sizes.

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
        tied = tied_names(model)
        _count_predicting_layers(model)
        known = None if state is None else {name: value for name, value in state.items() if name not in tied}
        model.save_pretrained(folder, state_dict=known, max_shard_size=max_shard_size)
        write_origin(model, folder)
    else:
        raise ModelError(tr("unknown format '{format}'. Known: {known}.", format=format, known="hf, official"))


def describe(model: PreTrainedModel, encoder: AnyChatEncoder | None) -> dict[str, bytes]:
    """Return the files of a folder in transformers' layout that are no weights, by their path in it.

    Config, generation config, tokenizer, and what it takes to go back to the official layout: with the weights all that
    an export needs. Some megabytes, mostly tokenizer.

    Args:
        model: the model; its parameters may be partitioned or empty.
        encoder: its tokenizer; None without one.

    Raises:
        ModelError: the generation config cannot be written.
        OSError: the official folder, or the place for temporary files, cannot be used.
    """
    with TemporaryDirectory() as place:
        folder = Path(place)
        if encoder is not None:
            _add_stops(model, encoder.stop_ids)
            encoder.tokenizer.save_pretrained(folder)
        _count_predicting_layers(model)
        # As `save_pretrained` does before it writes them.
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:  # transformers loads such a file, but does not write it
            raise ModelError(
                tr(
                    "generation_config.json of the model contradicts itself, so transformers would not write it again: "
                    "{reason} Correct it in the model's folder.",
                    reason=" ".join(str(error).split())[:300],
                )
            ) from error
        write_origin(model, folder)
        for name, code in getattr(model, "code_files", {}).items():  # the config names them
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(code)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _add_stops(model: PreTrainedModel, stop_ids: list[int]) -> None:
    """Let programs that know nothing of the chat format stop where answers end (GLM-4#297: they never did)."""
    known = model.generation_config.eos_token_id
    known = [known] if isinstance(known, int) else list(known or [])
    if not set(stop_ids) <= set(known):
        model.generation_config.eos_token_id = [*known, *(index for index in stop_ids if index not in known)]


def _count_predicting_layers(model: PreTrainedModel) -> None:
    """Say in a model's config that it has no layers for predicting several tokens at once, if it has none.

    transformers (5.23) skips those of GLM-4.5, DeepSeek-V3 and others when it loads them, and would still write their
    number: vLLM and llama.cpp then look for weights that are not in the directory.
    """
    names = "\n".join(name for name, _ in model.named_parameters())
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}
    for config in configs.values():
        layers = getattr(config, "num_hidden_layers", 0)
        if re.search(rf"mtp|nextn|(^|\.)layers\.{layers}\.", names, re.MULTILINE):
            continue
        for key, value in config.to_dict().items():
            if _PREDICTING.fullmatch(key) and isinstance(value, int) and value:
                setattr(config, key, 0)
