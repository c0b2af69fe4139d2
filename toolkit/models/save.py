"""Saving of models, in transformers' layout or in the official one: the same files, names, precisions and bits. What
the latter takes besides the weights is the model's `Origin`, which is in `official/` of every saved directory.
"""

import json
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from transformers import PreTrainedModel

from toolkit.messages import ModelError
from toolkit.models import chat, old_names, stored_form, weights
from toolkit.models.record import EXTRA_TENSORS, record_of

Format = Literal["hf", "official"]
MAX_SHARD_SIZE = "5GB"
MODEL_DIR = "model"
"""Directory in a checkpoint with the files of `non_weight_files`."""


def save_model(
    model: PreTrainedModel,
    path: str | Path,
    format: Format = "hf",
    *,
    state: dict[str, torch.Tensor] | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Save a model of which this process has all parameters.

    Args:
        model: any transformers model; with format "official" one that came from an official ChatGLM directory.
        path: a directory that does not exist yet.
        format: "hf": what transformers loads (ChatGLM-6B: `load_model`); "official": each tensor in its own shard.
        state: full parameters by name, in place of the model's own, which may be partitioned.
        max_shard_size: largest safetensors file, such as 5GB; the official files have the official sizes.

    Raises:
        ModelError: the directory exists, the format is unknown, or the model has no official layout.
        CheckpointError: a value overflows its official precision.
    """
    folder = Path(path)
    if folder.exists():
        raise ModelError("{folder} exists already: nothing was written. Name another directory.", folder=folder)
    if format == "official":
        from toolkit.models.official import write_official

        write_official(model, folder, state)
    elif format == "hf":
        _correct_prediction_layers(model)
        _remove_padding_token(model)
        stored_form.publish(model)
        first_named = None if state is None else weights.under_first_names(model, state)
        model.save_pretrained(folder, state_dict=first_named, max_shard_size=max_shard_size)
        write_origin(model, folder)
    else:
        raise ModelError("unknown format '{format}'. Known: {known}.", format=format, known="hf, official")


def non_weight_files(model: PreTrainedModel, encoder: chat.AnyChatEncoder | None) -> dict[str, bytes]:
    """Return path and content of all files but weights of a model's directory in transformers' layout, for programs
    that generate with it: the model's configs get what they need for that. `encoder`: of its tokenizer, None without.
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generates = model.can_generate()  # a classifier gives scores alone
        if encoder is not None and generates:
            # So that programs without the chat format stop at the end of answers too (GLM-4#297: they never did).
            end_ids = model.generation_config.eos_token_id
            end_ids = [end_ids] if isinstance(end_ids, int) else list(end_ids or [])
            if added := [index for index in encoder.stop_ids if index not in end_ids]:
                model.generation_config.eos_token_id = end_ids + added
        if encoder is not None:
            encoder.tokenizer.save_pretrained(folder)
            old_names.add_to_tokenizer(folder)
        if extra := record_of(model).extra_tensors:
            (folder / EXTRA_TENSORS).write_text(json.dumps(extra), encoding="utf-8")
        else:
            _correct_prediction_layers(model)
        if stored := record_of(model).stored_shapes:
            (folder / stored_form.FILE).write_text(json.dumps(stored), encoding="utf-8")
        _remove_padding_token(model)
        # As `save_pretrained` sets them.
        model.config.dtype = model.dtype
        model.config.architectures = [type(model).__name__]
        config = deepcopy(model.config)
        if generates:
            config.use_cache = True  # off in training; custom generation loops rely on it, `generate` does not
        config.save_pretrained(folder)
        old_names.add_to_config(folder / "config.json")
        try:
            if generates:
                model.generation_config.save_pretrained(folder)
        except ValueError as error:  # transformers loads such a file, but does not write it
            raise ModelError(
                "generation_config.json of the model contradicts itself, so transformers would not "
                "write it again: {reason} Correct it in the model's directory.",
                reason=" ".join(str(error).split())[:300],
            ) from error
        write_origin(model, folder)
        record = record_of(model)
        for name, content in (record.processor_files | (record.code_files or {})).items():  # the config names the code
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _remove_padding_token(model: PreTrainedModel) -> None:
    """Remove the config's padding token if transformers would set its trained embedding to 0 at loading."""
    if weights.zeroes_padding_embedding(model):
        model.config.pad_token_id = None


def _correct_prediction_layers(model: PreTrainedModel) -> None:
    """Set the number of multi-token prediction layers in the config to 0 if the model has none."""
    config = str(model.config)
    if "_predict_layers" in config or "mtp_" in config:  # else it has none of the keys for that number
        from toolkit.models import extra_tensors

        extra_tensors.correct_layer_counts(model)


ORIGIN_DIR = "official"
RECORD = "layout.json"


@dataclass(kw_only=True, slots=True)
class Origin:
    """The official directory that a model came from, without its weights."""

    folder: str
    index: str
    """Name of its index file, "" without one."""
    tensors: dict[str, dict[str, str]]
    """File and precision of each tensor, in file order."""
    computed: dict[str, list[float]] = field(default_factory=dict)
    """Tensors that no parameter holds (rotary frequencies), by value."""
    interleaved: bool = False
    """See `GlmLayout`."""


def load_origin(model: PreTrainedModel, folder: Path) -> None:
    """Set `ModelRecord.origin` from a saved model's `official/`, if there is one; ModelError if it is damaged."""
    record = folder / ORIGIN_DIR / RECORD
    if not record.is_file():
        return
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        origin = Origin(**values | {"folder": str(folder / ORIGIN_DIR)})
        for entry in origin.tensors.values():
            # The record may come from elsewhere: its names must stay inside the directory that is written.
            if Path(entry["file"]).name != entry["file"] or not isinstance(getattr(torch, entry["dtype"]), torch.dtype):
                raise ValueError(f"{entry}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            "{file} is damaged ({reason}): without the directory {folder} the model loads, but cannot "
            "go back to the official layout.",
            file=record,
            reason=error,
            folder=record.parent,
        ) from error
    record_of(model).origin = origin


def write_origin(model: PreTrainedModel, folder: Path) -> None:
    """Save a model's origin into `folder`/official, if it has one."""
    origin = record_of(model).origin
    if origin is None:
        return
    from toolkit.models.official import copy_non_weight_files

    target = folder / ORIGIN_DIR
    target.mkdir(parents=True)
    copy_non_weight_files(origin, target)
    record = asdict(origin) | {"folder": ""}
    (target / RECORD).write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
