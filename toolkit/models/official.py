"""Saving of a ChatGLM in its official layout: the same files, names, precisions and bits."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit.messages import CheckpointError, ModelError
from toolkit.models import weights
from toolkit.models.chatglm.modeling import official_layout
from toolkit.models.record import record_of
from toolkit.models.save import RECORD, Origin

# The weights themselves, also in formats that were not read, and what trainers leave behind.
_WEIGHTS = re.compile(
    r"(pytorch_model|model)(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?|.+\.(pt|pth|ckpt|h5|msgpack|gguf|onnx)"
)


def write_official(model: PreTrainedModel, folder: Path, state: dict[str, torch.Tensor] | None) -> None:
    """Write a model in the official layout (`ModelRecord.origin`): each tensor in its shard, in its official precision.
    ModelError without an origin, CheckpointError if a value overflows. `state`: as in `save_model`.
    """
    origin = record_of(model).origin
    if origin is None:
        raise ModelError(
            "this {architecture} did not come from an official ChatGLM directory, so there is no "
            "official layout to write it in. Use format=hf.",
            architecture=type(model).__name__,
        )
    values = dict(model.named_parameters()) if state is None else state
    layout = official_layout(model.config, origin.interleaved)
    folder.mkdir(parents=True)
    for file in dict.fromkeys(entry["file"] for entry in origin.tensors.values()):
        tensors = {
            name: _stored_tensor(name, entry["dtype"], origin, layout, values)
            for name, entry in origin.tensors.items()
            if entry["file"] == file
        }
        if file.endswith(".safetensors"):
            save_file(tensors, folder / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / file)
    copy_non_weight_files(origin, folder)


def _stored_tensor(
    name: str, dtype: str, origin: Origin, layout: weights.Layout, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the official tensor `name` in its official precision, made of the parameters `values`."""
    precision: torch.dtype = getattr(torch, dtype)
    if name in origin.computed:
        return torch.tensor(origin.computed[name], dtype=torch.float64).to(precision)
    try:
        value = layout.join(name, [values[parameter].detach().cpu() for parameter in layout.parameters(name)])
    except KeyError as error:
        raise ModelError(
            "the official layout needs {name}, which this model does not have: its record is of another model.",
            name=name,
        ) from error
    stored = value.to(precision).contiguous()
    if stored.isinf().sum() > value.isinf().sum():
        raise CheckpointError(
            "{name} holds values that overflow {dtype}, its precision in the official files. Nothing was lost: save "
            "with format=hf.",
            name=name,
            dtype=dtype,
        )
    return stored


def save_origin(model: PreTrainedModel, files: weights.WeightFiles, layout: weights.Layout, interleaved: bool) -> None:
    """Record the official directory of a model in `ModelRecord.origin`, unless `load_origin` has done so."""
    if record_of(model).origin is not None:  # a saved ChatGLM-6B: its directory has the official keys, too
        return
    computed = {}
    for name in files:
        if not layout.parameters(name):  # such as rotary frequencies: a copy must be written from their values
            with files.open(name) as value:
                computed[name] = value.double().flatten().tolist()
    names = {info.file.name for info in files.values()}
    is_safe = any(name.endswith(".safetensors") for name in names)
    single = "model.safetensors" if is_safe else "pytorch_model.bin"
    record_of(model).origin = Origin(
        folder=str(files.folder),
        index="" if names == {single} else f"{single}.index.json",
        tensors={
            name: {"file": info.file.name, "dtype": str(info.dtype).removeprefix("torch.")}
            for name, info in files.items()
        },
        computed=computed,
        interleaved=interleaved,
    )


def copy_non_weight_files(origin: Origin, target: Path) -> None:
    """Copy the files of the official directory except for weights: index, config, tokenizer, license, *.py."""
    for file in sorted(Path(origin.folder).iterdir()):
        is_skipped = (
            (_WEIGHTS.fullmatch(file.name) and file.name != origin.index)
            or file.name in (RECORD, "manifest.json")  # an export's manifest lists the files of that directory
            or file.name.startswith(".")
        )
        if file.is_file() and not is_skipped:
            shutil.copyfile(file, target / file.name)
