"""Reading of weight files, and the mapping between their tensors and a model's parameters.

One tensor is read at a time, from a newly opened file, whose pages count as this process's memory until it is closed.
Nothing in a file is executed. transformers' own loading (5.23) holds the whole checkpoint on rank 0 under ZeRO-3.
"""

import contextlib
import ctypes
import pickle
import re
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from toolkit import disk
from toolkit.messages import ModelError, reading, reason_of, tr
from toolkit.models.directory import is_quantized, weight_files
from toolkit.models.record import record_of

Shapes = dict[str, tuple[int, ...]]


class Layout:
    """How stored tensors fill a model's parameters; in this base class each fills the parameter of its own name."""

    def parameters(self, name: str) -> list[str]:
        """Return the parameters that a stored tensor fills, [] if it is not read, such as rotary frequencies."""
        return [] if name.endswith(".rotary_emb.inv_freq") else [name]

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a stored tensor, one for each of its `parameters`."""
        return [value]

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the stored tensor of such parts; the inverse of `split`."""
        return parts[0]

    def index(self, name: str) -> Any:
        """Return the index at which the parts go into their parameters; `...` if they fill them."""
        return ...

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the stored tensors that do not belong to the model."""
        return []

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape a tensor must have to fill parameters of these shapes."""
        [parameter] = self.parameters(name)
        return tuple(torch.empty(shapes[parameter], device="meta")[self.index(name)].shape)


def prediction_layer_pattern(config: Any) -> str:
    """Return a pattern of the names of multi-token prediction layers, which follow the decoder layers; without such
    layers it never matches. transformers (5.23) itself knows only those of published sizes.
    """
    config = config.get_text_config()
    count, first = getattr(config, "num_nextn_predict_layers", 0) or 0, getattr(config, "num_hidden_layers", 0)
    numbers = range(first, first + min(count, 16))  # a damaged config.json may name any count
    return "|".join(rf"(?:^|\.)layers\.{number}\." for number in numbers) or r"(?!)"


def zeroes_padding_embedding(model: PreTrainedModel) -> bool:
    """Whether transformers sets the padding token's embedding to 0 when it loads such a model (5.23: Youtu)."""
    if record_of(model).code_files is not None:
        return False  # transformers does not initialize weights of a directory's own code
    row = torch.nn.Embedding(1, 1, padding_idx=0, _weight=torch.ones(1, 1))
    row.weight._is_hf_initialized = True  # type: ignore[attr-defined]  # as transformers marks what it has loaded
    kind: Any = type(model)
    shell = kind.__new__(kind)  # without weights, some of which xLSTM would set
    torch.nn.Module.__init__(shell)
    shell.config = model.config
    with suppress(Exception):  # a class that needs its weights does not zero the row
        shell._init_weights(row)
    return not row.weight.any()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Metadata of a stored tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Precision in the file, which may differ from that of other tensors."""


class WeightFiles(dict[str, TensorInfo]):
    """Metadata of all tensors of a directory, or of the `listed` files, by name in file order."""

    types: ClassVar = {name: getattr(torch, kind) for name, kind in disk.TENSOR_TYPES.items()}

    def __init__(self, folder: Path, listed: Iterable[Path] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self._legacy: tuple[Path, dict[str, torch.Tensor]] | None = None
        for file in weight_files(folder) if listed is None else listed:
            self.update(self._describe(file))

    @property
    def shapes(self) -> Shapes:
        """Return the shape of each tensor."""
        return {name: info.shape for name, info in self.items()}

    @contextmanager
    def open(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor in its precision in the file, memory-mapped if the format allows it."""
        file = self[name].file
        if file.suffix != ".safetensors":
            yield self._unpickle(file)[name]
            return
        with reading(file, ModelError, tr("Download it again.")):
            opened = safe_open(file, framework="pt")
            tensor = opened.get_tensor(name)
        with opened:
            yield tensor

    def _describe(self, file: Path) -> dict[str, TensorInfo]:
        """Return what tensors a file of weights holds; ModelError if one is of a type that cannot be trained."""
        if file.suffix != ".safetensors":
            return {
                name: TensorInfo(file, tuple(value.shape), value.dtype) for name, value in self._unpickle(file).items()
            }
        with reading(file, ModelError, tr("Download it again.")), safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 -- not a dict
            stored = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
        for name, (_, dtype) in stored.items():
            if dtype not in self.types:
                raise ModelError(
                    "{file}: '{name}' is of type {dtype}, which cannot be trained. Use the model in bf16.",
                    file=file,
                    name=name,
                    dtype=dtype,
                )
        return {name: TensorInfo(file, shape, self.types[dtype]) for name, (shape, dtype) in stored.items()}

    def _unpickle(self, file: Path) -> dict[str, torch.Tensor]:
        """Return a pickled shard, memory-mapped; one in the format before torch 1.6 is read and kept until the next."""
        if self._legacy is not None and self._legacy[0] == file:
            return self._legacy[1]
        self._legacy = None
        mapped = zipfile.is_zipfile(file)
        values = unpickle(file, mapped)
        if not mapped:
            self._legacy = (file, values)
        return values


def files_of(folder: Path, dtype: torch.dtype | None = None) -> WeightFiles:
    """Return the metadata of a directory's tensors; of quantized matrices as they are read: in `dtype`, or 16 bits."""
    if not is_quantized(folder):
        return WeightFiles(folder)
    from toolkit.models.dequantize import QuantizedFiles

    return QuantizedFiles(folder, dtype)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a small file, safetensors or pickled; nothing in it is executed."""
    if file.suffix != ".safetensors":
        return unpickle(file, mapped=False)
    with reading(file, ModelError, tr("Download it again.")), safe_open(file, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 -- not a dict


def unpickle(file: Path, mapped: bool) -> dict[str, torch.Tensor]:
    """Return the named tensors of a torch file without executing anything; `mapped` memory-maps them (torch 1.6 on)."""
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ModelError(disk.pickled_code(file, error)) from error
    except Exception as error:  # whatever a damaged archive makes torch raise
        raise ModelError(
            "{file} cannot be read ({reason}): download it again.", file=file, reason=reason_of(error).split(". ")[0]
        ) from error
    if not isinstance(values, dict) or not all(isinstance(value, torch.Tensor) for value in values.values()):
        raise ModelError("{file} holds something else than named tensors.", file=file)
    return values


def build_empty(build: Callable[[], PreTrainedModel], ds_config: dict[str, Any] | None) -> PreTrainedModel:
    """Return the model that `build` constructs, without values: on the meta device, or with `ds_config` partitioned
    over ranks by ZeRO-3. Rotary frequencies are computed.
    """
    device: AbstractContextManager[Any] = torch.device("meta")
    if ds_config is not None:
        import deepspeed

        # Its argument dtype is not used: DeepSpeed 0.19.8 makes bfloat16 of any on CPU ranks.
        device = deepspeed.zero.Init(config_dict_or_path=ds_config)
    with no_init_weights(), device:
        model = build()
    model.tie_weights()
    for name, buffer in [*model.named_buffers()]:
        if stays_in_float32(model, name):
            set_value(model, name, buffer.float())
    # Frequencies are computed in float32: the meta device leaves them empty, and zero.Init casts them to the model's
    # precision, in which they are noise beyond a few hundred positions.
    for module in model.modules():
        # By the end of the name, as Gemma 3 has one for each kind of layer.
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            fresh = type(module)(config=module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                old = getattr(module, name).device
                setattr(module, name, buffer if old.type == "meta" else buffer.to(old))
    return model


def stays_in_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether a half-precision model has a parameter or buffer in float32: biases of routers, and from transformers
    5.24 on the routers of DeepSeek-V3 and its relatives. DeepSpeed's engine rounds the parameters of what it trains.
    """
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def stored_values(
    files: WeightFiles, layout: Layout, shapes: Shapes, wanted: Set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the `wanted` parameters and buffers, and of those in the same stored tensors."""
    for targets, names in names_by_target(files, layout, shapes).items():
        if wanted.isdisjoint(targets):
            continue
        if all(layout.index(name) is ... for name in names):  # each tensor fills whole parameters
            for name in names:
                with files.open(name) as value:
                    yield from zip(targets, layout.split(name, value), strict=True)
            continue
        # Parameters of which each tensor is a part.
        joint = {target: torch.empty(shapes[target], dtype=files[names[0]].dtype) for target in targets}
        for name in names:
            with files.open(name) as value:
                for target, part in zip(targets, layout.split(name, value), strict=True):
                    joint[target][layout.index(name)] = part
        yield from joint.items()


def names_by_target(files: WeightFiles, layout: Layout, targets: Container[str]) -> dict[tuple[str, ...], list[str]]:
    """Group stored tensors by the parameters, among `targets`, that they fill; without tensors that fill none."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in files:
        groups.setdefault(tuple(target for target in layout.parameters(name) if target in targets), []).append(name)
    groups.pop((), None)
    return groups


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers of a model that are still on the meta device, as no file holds them."""
    computed = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if computed:  # masks, scales, frequencies by kind of layer, which the constructor computes
        with no_init_weights():  # its parameters are never written to, and so take no memory
            fresh = dict(type(model)(model.config).named_buffers())
        for name in computed:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, fresh[name])


def tied_parameter_names(model: PreTrainedModel) -> dict[str, str]:
    """Return second name -> first name of each tied parameter."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def under_first_names(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state with each tied parameter once, under its first name, even if it has only the second."""
    tied = tied_parameter_names(model)
    return {tied.get(name, name): value for name, value in state.items() if tied.get(name) not in state}


def shapes_of(model: PreTrainedModel) -> Shapes:
    """Return the full shape of every parameter and persistent buffer, also of partitioned ones."""
    return {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in stored_tensors(model).items()}


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a checkpoint must hold, by name: each parameter once, and persistent buffers."""
    tensors, tied = model.state_dict(keep_vars=True), tied_parameter_names(model)
    stored_names = {name for name, _ in model.named_buffers()}
    # If a model holds its head before the embedding that it is tied to, files have it under the embedding's name.
    stored_names |= {tied[name] if tied.get(name) in tensors else name for name, _ in model.named_parameters()}
    return {name: value for name, value in tensors.items() if name in stored_names}


def full_params(parameters: Sequence[torch.Tensor], modifier_rank: int | None = None) -> AbstractContextManager[Any]:
    """Gather partitioned parameters, a collective if there are any; all ranks keep the changes of `modifier_rank`."""
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_shape")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank)
    return gathered


def return_memory() -> None:
    """Return freed memory to the system; glibc would keep that of gathered parameters, about half the model's size."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def set_value(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace an empty parameter or buffer by one with a value."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
        return
    empty, parameter = getattr(module, leaf), torch.nn.Parameter(value, requires_grad=value.is_floating_point())
    parameter.__dict__.update(empty.__dict__)  # its marks, such as of division over ranks
    setattr(module, leaf, parameter)


def check_weights_fit(model: PreTrainedModel, files: WeightFiles, layout: Layout) -> None:
    """Raise ModelError unless the files' names and shapes are the model's. Buffers and tied copies may be there too."""
    shapes = shapes_of(model)
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    all_names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    all_names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    filled = dict.fromkeys(shapes, 0)  # how many numbers of each parameter the files have
    unexpected, mismatched = [], []
    for name, info in files.items():
        targets = layout.parameters(name)
        if not shapes.keys() >= {*targets}:  # a buffer or a tied copy, which need not be there, or no part of the model
            if not all_names.issuperset(targets):
                unexpected.append(name)
        elif targets and info.shape != (expected := layout.stored_shape(name, shapes)):
            mismatched.append(f"{name} {info.shape} instead of {expected}")
            filled |= {target: sizes[target] for target in targets}  # not missing as well
        else:
            for target in targets:
                filled[target] += sizes[target] if layout.index(name) is ... else torch.Size(info.shape).numel()
    missing = [name for name, count in filled.items() if count < sizes[name]]
    reject_differences(files.folder, model, missing=missing, unexpected=unexpected, mismatched=mismatched)


def reject_differences(folder: Path, model: PreTrainedModel, **names: Iterable[str]) -> None:
    """Raise ModelError if names are `missing`, `unexpected` or `mismatched`, with the first five of each."""
    wrong = {kind: sorted(listed) for kind, listed in names.items()}
    if any(wrong.values()):
        counts = {kind: f" … ({len(listed)})" if len(listed) > 5 else "" for kind, listed in wrong.items()}
        raise ModelError(
            "the weights in {path} are not those of {architecture}: missing {missing}, unexpected {unexpected}, of "
            "another shape {mismatched}.",
            path=folder,
            architecture=type(model).__name__,
            **{kind: f"[{', '.join(listed[:5])}{counts[kind]}]" for kind, listed in wrong.items()},
        )
