"""Back to the official layout: the same files, names, precisions and bits that a model was loaded from.

What that takes besides the weights (config.json, the other files, which tensor lies where) is the model's `Origin`. It
travels in the folder `official/` of everything that is saved in transformers' layout.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from toolkit.errors import CheckpointError, ModelError
from toolkit.messages import tr
from toolkit.models.layout import Layout, official_layout
from toolkit.models.weights import WeightFiles, index_of

ORIGIN_DIR = "official"
_RECORD = "layout.json"
# The weights themselves, also in formats that were not read, and what trainers leave behind.
_WEIGHTS = re.compile(
    r"(pytorch_model|model)(-\d+-of-\d+)?\.(bin|safetensors)(\.index\.json)?|.+\.(pt|pth|ckpt|h5|msgpack|gguf|onnx)"
)


@dataclass(kw_only=True, slots=True)
class Origin:
    """The official folder that a model came from, without its weights."""

    folder: str
    """Where its other files lie."""
    index: str
    """Name of its index file, "" without one."""
    tensors: dict[str, dict[str, str]]
    """File and precision of each tensor, in file order."""
    computed: dict[str, list[float]] = field(default_factory=dict)
    """Tensors that no parameter holds (rotary frequencies), by value."""
    interleaved: bool = False
    """See `GlmLayout`."""


def remember_origin(
    model: PreTrainedModel, folder: Path, files: WeightFiles, layout: Layout, interleaved: bool
) -> None:
    """Note on a model where it came from, so that it can go back.

    ChatGLM-6B looks official in either layout: there the record of the folder that it first came from decides.
    """
    if recall_origin(model, folder):
        return
    computed = {}
    for name in files:
        if not layout.parameters(name):
            with files.open(name) as value:
                computed[name] = value.double().flatten().tolist()
    index = index_of(folder)
    model.origin = Origin(
        folder=str(folder),
        index=index.name if index else "",
        tensors={
            name: {"file": info.file.name, "dtype": str(info.dtype).removeprefix("torch.")}
            for name, info in files.items()
        },
        computed=computed,
        interleaved=interleaved,
    )


def recall_origin(model: PreTrainedModel, folder: Path) -> bool:
    """Read the origin that was saved beside a model; return whether there is one.

    Raises:
        ModelError: the record is damaged, or names files outside of its folder.
    """
    record = folder / ORIGIN_DIR / _RECORD
    if not record.is_file():
        return False
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        origin = Origin(**known | {"folder": str(folder / ORIGIN_DIR)})
        for entry in origin.tensors.values():
            # The record may come from elsewhere: its names must stay inside the folder that is written.
            if Path(entry["file"]).name != entry["file"] or not isinstance(getattr(torch, entry["dtype"]), torch.dtype):
                raise ValueError(f"{entry}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            tr(
                "{file} is damaged ({reason}): without the folder {folder} the model loads, but cannot go back to the "
                "official layout.",
                file=record,
                reason=error,
                folder=record.parent,
            )
        ) from error
    model.origin = origin
    return True


def write_origin(model: PreTrainedModel, folder: Path) -> None:
    """Save a model's origin into `folder`/official, if it has one."""
    origin: Origin | None = getattr(model, "origin", None)
    if origin is None:
        return
    target = folder / ORIGIN_DIR
    target.mkdir(parents=True)
    _copy_other_files(origin, target)
    record = asdict(origin) | {"folder": ""}
    (target / _RECORD).write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_official(model: PreTrainedModel, folder: Path, value_of: Callable[[str], torch.Tensor] | None = None) -> None:
    """Write a model in the official layout it came from: each tensor in its shard, in its official precision.

    Args:
        model: loaded from an official folder, or from one that was saved from such a model.
        folder: must not exist.
        value_of: gives a parameter by name; None: the model's own.

    Raises:
        ModelError: the model never was in the official layout.
        CheckpointError: a value has no room in the official precision.
    """
    origin: Origin | None = getattr(model, "origin", None)
    if origin is None:
        raise ModelError(
            tr(
                "this {architecture} did not come from an official ChatGLM folder, so there is no official layout to "
                "write it in. Use format=hf.",
                architecture=type(model).__name__,
            )
        )
    parameters = dict(model.named_parameters())
    get = value_of or (lambda name: parameters[name].detach())
    layout = official_layout(model.config, origin.interleaved)
    folder.mkdir(parents=True)
    for file in dict.fromkeys(entry["file"] for entry in origin.tensors.values()):
        tensors = {
            name: _stored(name, entry["dtype"], origin, layout, get)
            for name, entry in origin.tensors.items()
            if entry["file"] == file
        }
        if file.endswith(".safetensors"):
            save_file(tensors, folder / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, folder / file)
    _copy_other_files(origin, folder)


def _stored(name: str, dtype: str, origin: Origin, layout: Layout, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    precision: torch.dtype = getattr(torch, dtype)
    if name in origin.computed:
        return torch.tensor(origin.computed[name], dtype=torch.float64).to(precision)
    try:
        value = layout.join(name, [get(parameter).cpu() for parameter in layout.parameters(name)])
    except KeyError as error:
        raise ModelError(
            tr("the official layout needs {name}, which this model has not: its record is of another model.", name=name)
        ) from error
    stored = value.to(precision).contiguous()
    if stored.isinf().sum() > value.isinf().sum():
        raise CheckpointError(
            tr(
                "{name} holds values that {dtype}, its precision in the official files, has no room for. Nothing was "
                "lost: save with format=hf.",
                name=name,
                dtype=dtype,
            )
        )
    return stored


def _copy_other_files(origin: Origin, target: Path) -> None:
    """Copy all but weights: index, config, tokenizer, licence, and the *.py that other programs may want."""
    for file in sorted(Path(origin.folder).iterdir()):
        is_left_out = (
            (_WEIGHTS.fullmatch(file.name) and file.name != origin.index)
            or file.name in (_RECORD, "manifest.json")  # of an export: of its own files
            or file.name.startswith(".")
        )
        if file.is_file() and not is_left_out:
            shutil.copyfile(file, target / file.name)
