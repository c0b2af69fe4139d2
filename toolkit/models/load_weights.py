"""Loads the model in a directory with its weights, tensor by tensor to save memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit import terminal
from toolkit.messages import tr
from toolkit.models import directory, load, weights


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    ds_config: dict[str, Any] | None = None,
    needed_rows: Callable[[PreTrainedModel], Mapping[str, slice]] | None = None,
    ready: Callable[[PreTrainedModel, str], None] | None = None,
) -> PreTrainedModel:
    """Load a model from a local directory; nothing in it is executed, nothing is downloaded.

    Args:
        path: an official ChatGLM directory, or any causal language model in transformers' layout.
        dtype: of the parameters, by name too; None or "auto" keeps each tensor's. Rotary frequencies stay float32.
        ds_config: the DeepSpeed dict; with stage 3 a collective: rank 0 reads, every rank keeps its part.
        needed_rows: gets the empty model and returns by name which rows of its parameters and stored buffers this
            process needs, and may leave no more of them in the model; None reads all.
        ready: gets the model and the name of each parameter as soon as it has its values, and may quantize it before
            the next one is read; not called if a directory's own code is trusted.

    Returns:
        The model in evaluation mode, on the CPU: a GlmForCausalLM for ChatGLM2 and later, a
        `chatglm.modeling.ChatGLMForConditionalGeneration` for ChatGLM-6B, what transformers has for anything else.

    Raises:
        ModelError: the directory cannot be loaded; the message says why.
    """
    folder = Path(path)
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype)
    config = directory.read_config(str(folder))
    partitioned = ds_config if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3 else None
    if partitioned is not None and "tensor_parallel" in partitioned:
        partitioned = None  # AutoTP splits whole layers, and the engine partitions what it has split
    # A directory's own code may not support empty parameters: its caller does the work of `ready` afterwards.
    calls_ready = ready is not None and not directory.is_trusted(folder)
    is_streamed = partitioned is not None or needed_rows is not None or calls_ready or load.is_read_in_16_bits(folder)
    if directory.architecture_of(config) is None and not is_streamed:
        return load.load_by_transformers(folder, dtype)
    model, files, layout = load.open_directory(folder, config, dtype, partitioned)
    read_weights(model, files, layout, dtype, needed_rows, ready)
    return model


def read_weights(
    model: PreTrainedModel,
    files: weights.WeightFiles,
    layout: weights.Layout,
    dtype: torch.dtype | None,
    needed_rows: Callable[[PreTrainedModel], Mapping[str, slice]] | None = None,
    ready: Callable[[PreTrainedModel, str], None] | None = None,
) -> None:
    """Fill an empty model with the values of `files`; see `load_model` for `dtype`, `needed_rows` and `ready`.
    A collective if parameters are partitioned: rank 0 reads, and every rank keeps its part.
    """
    tensors = weights.stored_tensors(model)
    is_partitioned = any(hasattr(value, "ds_shape") for value in tensors.values())
    is_rank0 = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    rows = dict.fromkeys(tensors, slice(None)) if needed_rows is None else needed_rows(model)
    groups = weights.names_by_target(files, layout, rows)
    num_bytes = {name: info.dtype.itemsize * torch.Size(info.shape).numel() for name, info in files.items()}
    total = sum(num_bytes[name] for names in groups.values() for name in names)

    def read(name: str, index: Any, targets: tuple[str, ...]) -> None:
        """Write the stored tensor `name` into the parameters that it fills, at `index`."""
        with files.open(name) as stored:
            for target, part in zip(targets, layout.split(name, stored), strict=True):
                if is_partitioned:  # into the gathered parameter, else in place of the empty one
                    tensors[target].data[index].copy_(part)
                else:
                    _fill_target(model, target, index, part, rows[target], dtype)

    with terminal.phase(tr("Loading weights"), total, terminal.BYTES) as advance:
        for targets, names in groups.items():  # parameters, and the stored tensors that fill them
            partitioned = [tensors[target] for target in targets if hasattr(tensors[target], "ds_shape")]
            with weights.full_params(partitioned, modifier_rank=0):  # all ranks keep what rank 0 writes
                for name in names:
                    index = layout.index(name)
                    if (is_rank0 or not partitioned) and _is_within(index, rows[targets[0]]):
                        read(name, index, targets)
                    advance(num_bytes[name])
            if ready is not None:
                for target in targets:
                    ready(model, target)
            if partitioned or ready is not None:
                weights.return_memory()
    if not is_partitioned or needed_rows is not None or ready is not None:
        model.tie_weights()  # a tied head has lost the parameter that `_fill_target` or `ready` replaced
        if not any(parameter.is_meta for parameter in model.parameters()):
            weights.compute_buffers(model)


def _is_within(index: Any, rows: slice) -> bool:
    """Whether the part of a parameter at `index` (see `Layout.index`) is among its `rows`: only a part of one expert,
    whose index begins with the expert's number, may lie outside.
    """
    if index is ... or rows == slice(None):
        return True
    number = index[0] if isinstance(index, tuple) else index
    return isinstance(number, slice) or number in range(rows.start, rows.stop)


def _fill_target(
    model: PreTrainedModel, name: str, index: Any, part: torch.Tensor, rows: slice, dtype: torch.dtype | None
) -> None:
    """Write `part` at `index` (see `Layout.index`) into a parameter or buffer of which this process has `rows`."""
    target = model.get_parameter_or_buffer(name)
    if not isinstance(target, torch.nn.Parameter):
        dtype = target.dtype  # routers' biases are float32 in a model in half precision, too
    elif dtype is not None and weights.stays_in_float32(model, name):
        dtype = torch.float32
    if index is ...:  # the part is the whole parameter
        weights.set_value(model, name, part[rows].to(dtype or part.dtype, copy=True).contiguous())
        return
    if target.is_meta:  # the first of its parts
        weights.set_value(model, name, torch.empty(target.shape, dtype=dtype or part.dtype))
        target = model.get_parameter(name)
    first, *inside = index if isinstance(index, tuple) else (index,)
    if isinstance(first, slice):  # a stretch of a joint matrix, which is all here: experts alone are divided over ranks
        target.data[index].copy_(part)
    else:  # an expert of a stack, or a piece of one: goes to its number among those that this rank has
        target.data[first - (rows.start or 0)][tuple(inside)].copy_(part)


def assign_state(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters and buffers of an empty model to the tensors of `state`, without copying them."""
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    weights.compute_buffers(model)
