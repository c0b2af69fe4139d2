"""Checkpoints in DeepSpeed's own files, made into fragments: those of format 1, and those of any other program.

The layout is that of DeepSpeed 0.19.8 (engine.save_checkpoint, utils/zero_to_fp32.py), whose own converters are not
used: they unpickle anything. Files are mapped into memory, and what a rank had of a parameter is written with its place
in the whole, so that no tensor is put together.
"""

import json
import math
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from toolkit import disk
from toolkit.checkpoint import directory, engine_state, fragments, state_files
from toolkit.config import mesh
from toolkit.messages import CheckpointError, ConfigError, clauses

# All that these files name beside tensors and plain values (measured); their fields are filled in, nothing is called.
_SAFE = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_Files = Mapping[tuple[str, int, int], Path]
"""Kind (model or optim), part of a divided model, rank -> file."""
_STATES = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
"""What Adam, Lion, SGD and Adagrad keep of each number; other optimizers' states depend on how ranks divide them."""
_MOST_BYTES = 4 << 30
"""Of a file, unless one tensor has more."""


def find(source: Path) -> Path:
    """Return the directory with DeepSpeed's files: the source, or what its `latest` names; ConfigError if neither."""
    latest = source / "latest"
    named = source / latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else source
    for folder in (source, named):
        if folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    raise ConfigError(
        "{path} holds no files of a DeepSpeed checkpoint (*_model_states.pt). Name a directory such as "
        "checkpoint-500/global_step500, or the one above it.",
        path=source,
    )


def convert(source: Path, target: Path) -> directory.RunState:
    """Write what a directory of `find` holds into an empty one, all but the manifest; return the state of its run,
    which of another program has no config.
    """
    is_ours = (source / directory.MANIFEST).is_file()
    if is_ours and (wrong := directory.manifest_problems(source, 1)):
        raise CheckpointError("the checkpoint {folder} is damaged: {reason}.", folder=source, reason=clauses(wrong[:3]))
    try:
        counts = _counts(source)
        _write(_fragments(source), target)
        if is_ours:
            for path in source.iterdir():
                if path.suffix != ".pt" and path.name != directory.MANIFEST:
                    (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target / path.name)
        else:  # its schedule is not ours; steps that overflowed did not move it
            counts["schedule"] = {"last_batch_iteration": counts["global_steps"] - counts["skipped_steps"] - 1}
            directory.RunState(step=counts["global_steps"]).write(target)
            written = fragments.Fragments(target)
            if other := {key for name in written.names for key in written.states(name)} - {"exp_avg", "exp_avg_sq"}:
                raise ValueError(f"optimizer states {', '.join(sorted(other))}")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise _unknown(source, f"{type(error).__name__}: {error}") from error
    (target / engine_state.COUNTS).write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return directory.read_run_state(target)


def _unknown(folder: Path, reason: object) -> CheckpointError:
    return CheckpointError(
        "{folder} cannot be converted: {reason}. What can be: ZeRO 0 to 3, not on NVMe, with Adam (of "
        "format 1 also with Lion, SGD and Adagrad), as DeepSpeed 0.19 writes it.",
        folder=folder,
        reason=reason,
    )


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds: tensors, mapped into memory, and plain values."""
    try:
        with torch.serialization.safe_globals(_SAFE):
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(disk.pickled_code(path, error)) from None
    except Exception as error:  # torch.load and zip raise whatever they like on damaged files
        raise state_files.unreadable_error(path, error) from None
    return content


def _files(folder: Path) -> _Files:
    files = {}
    for path in folder.iterdir():
        if match := _FILE.fullmatch(path.name):
            files[match[3], int(match[2]), int(match[1] or 0)] = path
        elif re.search(r"expert_|expp_rank|offloaded_tensors", path.name):
            raise _unknown(folder, path.name)
    return files


def _optimizer(files: _Files, saved: dict[str, Any], part: int, rank: int) -> dict[str, Any]:
    """Return what a rank saved of its optimizer; without ZeRO that is in the model's file."""
    state: dict[str, Any] = saved["optimizer"] or _read(files["optim", part, rank])["optimizer_state_dict"]
    return state


def _inner(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer that DeepSpeed's wraps; in fp32 without ZeRO there is no other."""
    return optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or optimizer


def _counts(source: Path) -> dict[str, Any]:
    """Return what the engine counted, as `engine_state.counts_of` does."""
    files = _files(source)
    saved = _read(files["model", 0, 0])
    optimizer = _optimizer(files, saved, 0, 0)
    scaler = vars(optimizer["loss_scaler"]) if "loss_scaler" in optimizer else optimizer
    changing = engine_state.SCALER if optimizer.get("dynamic_loss_scale") else ()
    return {
        **{name: int(saved[name]) for name in ("global_steps", "global_samples", "skipped_steps")},
        "schedule": saved["lr_scheduler"] or {},
        "group_step": _inner(optimizer)["param_groups"][0].get("step"),
        "loss_scaler": {name: scaler[name] for name in changing if name in scaler},
    }


_Stretch = tuple[str, tuple[int, ...], int, dict[str, torch.Tensor], dict[str, float]]
"""Name of a parameter, its shape, place in it, values by state, states that are one number."""
_Group = tuple[torch.Tensor, dict[str, Any], dict[str, torch.Size]]
"""A flat tensor of fp32 weights, the optimizer's states of it, and the shapes of all parameters that lie in it."""


def _fragments(source: Path) -> Iterator[fragments.Fragment]:
    """Yield all that a checkpoint holds, file by file; CheckpointError if a parameter is not there in full."""
    files, layers = _files(source), sorted(source.glob("layer_*-model_states.pt"))
    parts = 1 + max(part for _, part, _ in files)
    # Pipeline stages have files for their layers, whose numbers begin the names of parameters; the other prefix is of
    # peft's wrapper.
    prefix = r"(\d+|tied_modules\.\w+)\." if layers else r"base_model\.model\."
    module = {name: value for file in layers for name, value in _read(file).items()}
    shapes, owners, lengths = dict[str, tuple[int, ...]](), dict[str, int](), Counter[str]()
    for part in range(parts):
        saved = _named(_read(files["model", part, 0]), prefix)
        module = module or saved["module"]
        tensors = module if layers else saved["module"]
        for name, shape, position, values, numbers in _stretches(files, part, saved, prefix):
            count = parts if not layers and mesh.split_of(name) else 1
            if count == 1 and owners.setdefault(name, part) != part:
                continue  # what all parts have, the first has saved
            shapes[name] = mesh.part_shape(name, shape, count, back=True)
            lengths[name] += len(values[fragments.WEIGHT])
            which = (part, count) if count > 1 else (0, 1)
            yield fragments.Fragment(name, shapes[name], position, tensors[name].dtype, which, values, numbers)
    if lacking := [name for name, shape in shapes.items() if lengths[name] != math.prod(shape)]:
        raise _unknown(source, ", ".join(lacking[:3]))
    seen = {_memory(module[name]) for name in shapes}
    for name, value in module.items():  # buffers, and what is not trained, but not tied weights a second time
        if name not in shapes and value.numel() and _memory(value) not in seen:
            stored = {fragments.WEIGHT: value.reshape(-1)}
            yield fragments.Fragment(name, tuple(value.shape), 0, value.dtype, values=stored)


def _named(saved: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return what a model's file holds with the model's own names."""

    def without_prefix(values: Any) -> Any:
        return {re.sub(f"^{prefix}", "", name): value for name, value in values.items()} if values else {}

    keys = ("module", "frozen_param_shapes", "frozen_param_fragments")
    shapes = [without_prefix(group) for group in saved["param_shapes"] or ()]
    return saved | {key: without_prefix(saved.get(key)) for key in keys} | {"param_shapes": shapes}


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _stretches(files: _Files, part: int, saved: dict[str, Any], prefix: str) -> Iterator[_Stretch]:
    """Yield the stretches of parameters that each rank saved of a tensor-parallel part or pipeline stage. `saved`:
    model file of its first rank; `prefix`: what DeepSpeed or peft put before parameters' names.
    """
    sizes: list[int] = []
    ranks = int(saved["dp_world_size"]) if saved["param_shapes"] else 1
    for rank in range(ranks):
        optimizer = _optimizer(files, saved, part, rank)
        groups = list(_groups(optimizer, saved))
        if (
            not sizes
        ):  # of each group's partitions: that of the first rank, which is full; 0 under ZeRO-3, see `_pieces`
            sizes = [0 if "fp32_flat_groups" in optimizer else len(flat) for flat, _, _ in groups]
        padded = optimizer.get("param_alignment_paddings") or [[0] * len(group) for _, _, group in groups]
        for (flat, state, group), size, paddings in zip(groups, sizes, padded, strict=True):
            values, numbers = _states(flat, state, size)
            for name, position, offset, length in _pieces(group, paddings, rank, ranks, size, len(flat)):
                pieces = {key: value.narrow(0, offset, length) for key, value in values.items()}
                yield name, tuple(group[name]), position, pieces, numbers
        if ("model", part, rank) in files:  # each rank has one under ZeRO-3
            frozen = _named(_read(files["model", part, rank]), prefix)
            for name, value in frozen["frozen_param_fragments"].items():
                shape, position = frozen["frozen_param_shapes"][name], rank * value.numel()
                length = max(0, min(value.numel(), shape.numel() - position))
                yield name, tuple(shape), position, {fragments.WEIGHT: value.reshape(-1)[:length]}, {}


def _groups(optimizer: dict[str, Any], saved: dict[str, Any]) -> Iterator[_Group]:
    """Yield the flat tensors that a rank saved. Without ZeRO no names are saved: parameters are told by their order."""
    inner = _inner(optimizer)
    states, members = inner["state"], [group["params"] for group in inner["param_groups"]]
    if any("use_muon" in group for group in inner["param_groups"]):
        raise ValueError("Muon")
    keys = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat")
    flats = next((optimizer[key] for key in keys if key in optimizer), None)
    named = saved["param_shapes"]
    if flats is not None:
        named = named or _divided(saved, [len(flat) for flat in flats], lambda group: sum(map(math.prod, group)))
        for number, (flat, group) in enumerate(zip(flats, named, strict=True)):
            yield flat, states.get(number, {}), group
        return
    masters = optimizer.get("fp32_groups")  # in 16 bits, where DeepSpeed does not know the optimizer
    for number, group in enumerate(_divided(saved, list(map(len, members)), len)):
        weights = masters[number] if masters else [saved["module"][name] for name in group]
        for name, member, master in zip(group, members[number], weights, strict=True):
            if master.shape != group[name]:
                raise ValueError(f"{name}: {tuple(master.shape)}")
            yield master.reshape(-1), states.get(member, {}), {name: group[name]}


def _divided(
    saved: dict[str, Any], counts: list[int], count: Callable[[Collection[torch.Size]], int]
) -> list[dict[str, torch.Size]]:
    """Return name -> shape of the parameters of each optimizer group. Only `counts`, what `count` says of each group,
    are saved: of one group of all, or of two, matrices and (without weight decay) vectors, they tell which it was.
    """
    once = dict[Any, str]()
    for name, tensor in saved["module"].items():
        if name not in saved["buffer_names"]:
            once.setdefault(_memory(tensor), name)  # a tied weight has its first name
    shapes = {name: saved["module"][name].shape for name in once.values()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    vectors = {name: shape for name, shape in shapes.items() if len(shape) < 2}
    for groups in ([shapes], [matrices, vectors], [vectors, matrices]):
        if [count(group.values()) for group in groups] == counts:
            return groups
    raise ValueError(f"parameter groups {counts}")


def _states(flat: torch.Tensor, state: dict[str, Any], size: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return a flat tensor's weights and states in two dicts by name: those with a number for each weight, and those
    that are one number for all. ValueError for other states.
    """
    values, numbers = {fragments.WEIGHT: flat}, {}
    for key, value in state.items():
        if key == "step":
            numbers[key] = float(value)
        elif key in _STATES and value.numel() in (len(flat), size):
            values[key] = value.reshape(-1)
        elif value is not None:
            raise ValueError(f"optimizer state {key}")
    return values, numbers


def _pieces(
    group: Mapping[str, torch.Size], paddings: Sequence[int], rank: int, ranks: int, size: int, length: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, position in the parameter, offset in the flat tensor and length of what a rank has of each parameter.
    Below ZeRO-3 a group is divided into partitions of `size` numbers; under it (`size` 0) each of its parameters is.
    """
    begin, offset = rank * size, 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        share = shape.numel() if size else -(-shape.numel() // ranks)
        position = 0 if size else rank * share
        first = max(offset, begin)
        end = min(offset + share, begin + size if size else offset + shape.numel() - position)
        if first < end:
            yield name, position + first - offset, first - begin, end - first
        offset += share + padding
    if not size and offset != length:
        raise ValueError(f"{offset} / {length}")


def _write(some: Iterable[fragments.Fragment], target: Path) -> None:
    """Write files of bounded size; in each a parameter can stand once."""
    number, size, pending = 0, 0, dict[str, fragments.Fragment]()
    for fragment in chain(some, [None]):
        if pending and (fragment is None or fragment.name in pending or size > _MOST_BYTES):
            fragments.write(fragments.content_of(pending.values()), target / fragments.file_name(number))
            number, size, pending = number + 1, 0, {}
        if fragment is not None:
            pending[fragment.name] = fragment
            size += sum(value.nbytes for value in fragment.values.values())
