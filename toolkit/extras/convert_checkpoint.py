"""Converts checkpoints to this toolkit's fragments: those in DeepSpeed's own files, of its format 1 and of other
programs, and those of transformers' Trainer without DeepSpeed.

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
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from toolkit import disk
from toolkit.checkpoint import directory, engine_state, fragment_reader, fragments, intact, state_files
from toolkit.config import tensor_split
from toolkit.extras import trainer_checkpoint
from toolkit.messages import CheckpointError, ConfigError, clauses

# All classes that these files name besides tensors and plain values (measured); only their fields are set.
_SAFE = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_(?P<kind>model|optim)_states\.pt"
)
_Files = Mapping[tuple[str, int, int], Path]
"""(kind: model or optim, tensor-parallel part or pipeline stage, data-parallel rank) -> file."""
_STATES = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
"""Elementwise states of Adam, Lion, SGD and Adagrad; other optimizers' states depend on how ranks divide parameters."""
_MOST_BYTES = 4 << 30
"""Most bytes of a written file, unless one tensor has more."""


def find(source: Path) -> Path:
    """Return the directory with the states: the source, or what its `latest` names; ConfigError if neither has any."""
    if trainer_checkpoint.is_checkpoint(source):
        return source
    latest = source / "latest"
    named = source / latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else source
    for folder in (source, named):
        if folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    if any(source.glob("pytorch_model_fsdp_[0-9]*")):
        raise ConfigError(
            "{path} is a checkpoint of FSDP, of which only the weights can be used: write them to a directory by "
            "accelerate merge-weights {path}/pytorch_model_fsdp_0 DIR,\n"
            "copy the model's config.json and tokenizer files to it, and train with model.path=DIR.",
            path=source,
        )
    raise ConfigError(
        "{path} holds neither files of a DeepSpeed checkpoint (*_model_states.pt) nor optimizer.pt and "
        "trainer_state.json of the Trainer. Name a directory such as checkpoint-500 or checkpoint-500/global_step500.",
        path=source,
    )


def convert(source: Path, target: Path, base: str = "") -> directory.RunState:
    """Convert the files in `source`, a directory of `find`, to fragments in the empty directory `target`, all but the
    manifest; return the run's state, which has no config if another program saved it. `base`: directory of the base
    model where `trainer_checkpoint.is_of_adapter`; "": what the adapter names.
    """
    is_ours = (source / directory.MANIFEST).is_file()
    if is_ours and (wrong := intact.manifest_problems(source, 1)):
        raise CheckpointError("the checkpoint {folder} is damaged: {reason}.", folder=source, reason=clauses(wrong[:3]))
    try:
        if trainer_checkpoint.is_checkpoint(source):
            saved = trainer_checkpoint.read(source, _load_file, base)
            counts = _counts_in(saved, saved["optimizer"])
            _write_fragments(_module_fragments(saved), target)
        else:
            counts = _engine_counts(source)
            _write_fragments(_fragments(source), target)
        if is_ours:
            for path in source.iterdir():
                if path.suffix != ".pt" and path.name != directory.MANIFEST:
                    (shutil.copytree if path.is_dir() else shutil.copyfile)(path, target / path.name)
        else:
            # Its schedule is not ours: this toolkit's continues at the same step. Steps whose gradients overflowed (in
            # fp16) did not move it. A scheduler counts from -1.
            counts["schedule"] = {"last_batch_iteration": counts["global_steps"] - counts["skipped_steps"] - 1}
            directory.RunState(step=counts["global_steps"]).write(target)
            written = fragment_reader.Fragments(target)
            if other := {key for name in written.names for key in written.states(name)} - {"exp_avg", "exp_avg_sq"}:
                raise ValueError(f"optimizer states {', '.join(sorted(other))}")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:  # of another layout
        raise _unsupported_error(source, f"{type(error).__name__}: {error}") from error
    (target / engine_state.COUNTS).write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return intact.read_run_state(target)


def _unsupported_error(folder: Path, reason: object) -> CheckpointError:
    """Return the error for a checkpoint that cannot be converted."""
    return CheckpointError(
        "{folder} cannot be converted: {reason}. What can be: ZeRO 0 to 3, not on NVMe, with Adam (of "
        "format 1 also with Lion, SGD and Adagrad), as DeepSpeed 0.19 writes it; and the Trainer's optimizer.pt of "
        "PyTorch's AdamW.",
        folder=folder,
        reason=reason,
    )


def _load_file(path: Path) -> dict[str, Any]:
    """Return the content of a .pt file: tensors, memory-mapped, and plain values. CheckpointError if it holds code."""
    try:
        with torch.serialization.safe_globals(_SAFE):
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(disk.pickled_code(path, error)) from None
    except Exception as error:  # torch.load and zip raise whatever they like on damaged files
        raise state_files.unreadable_error(path, error) from None
    return content


def _state_files(folder: Path) -> _Files:
    """Return (kind, part, rank) -> file of model or optimizer states; CheckpointError for an unsupported kind."""
    files = {}
    for path in folder.iterdir():
        if match := _FILE.fullmatch(path.name):
            files[match["kind"], int(match["part"]), int(match["rank"] or 0)] = path
        elif re.search(r"expert_|expp_rank|offloaded_tensors", path.name):
            raise _unsupported_error(folder, path.name)
    return files


def _optimizer_state(files: _Files, saved: dict[str, Any], part: int, rank: int) -> dict[str, Any]:
    """Return a rank's saved optimizer state dict; without ZeRO it is in the model's file `saved`."""
    state: dict[str, Any] = saved["optimizer"] or _load_file(files["optim", part, rank])["optimizer_state_dict"]
    return state


def _wrapped_state(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of the optimizer that DeepSpeed's wraps; in fp32 without ZeRO there is no wrapper."""
    return optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or optimizer


def _engine_counts(source: Path) -> dict[str, Any]:
    """Return the engine's counters, schedule and loss scale, as `engine_state.counts_of` does: those of rank 0."""
    files = _state_files(source)
    saved = _load_file(files["model", 0, 0])
    return _counts_in(saved, _optimizer_state(files, saved, 0, 0))


def _counts_in(saved: Mapping[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of `_engine_counts` from a model's file and a rank's optimizer state."""
    # ZeRO saves the loss scaler as an object; DeepSpeed's fp16 optimizer without ZeRO saves its fields among its own.
    scaler = vars(optimizer["loss_scaler"]) if "loss_scaler" in optimizer else optimizer
    changing = engine_state.SCALER if optimizer.get("dynamic_loss_scale") else ()  # a static scale is in the config
    return {
        **{name: int(saved[name]) for name in ("global_steps", "global_samples", "skipped_steps")},
        "schedule": saved["lr_scheduler"] or {},
        "group_step": _wrapped_state(optimizer)["param_groups"][0].get("step"),
        "loss_scaler": {name: scaler[name] for name in changing if name in scaler},
    }


class _Slice(NamedTuple):
    """What a rank saved of a parameter."""

    name: str
    shape: tuple[int, ...]
    position: int
    """Of the first value, in the flattened parameter."""
    values: dict[str, torch.Tensor]
    """State -> its values, weights among them."""
    numbers: dict[str, float]
    """States that are one number."""


_FlatGroup = tuple[torch.Tensor, dict[str, Any], dict[str, torch.Size]]
"""(flat tensor of fp32 weights, its optimizer states, name -> shape of the parameters in it, in order)."""


def _fragments(source: Path) -> Iterator[fragments.Fragment]:
    """Yield the fragments of all parameters and buffers, file by file: first what ranks saved of trained parameters,
    then the others. CheckpointError if a parameter is incomplete.
    """
    files, layers = _state_files(source), sorted(source.glob("layer_*-model_states.pt"))
    is_pipeline = bool(layers)  # pipeline stages have files for their layers; else parts are tensor-parallel
    parts = 1 + max(part for _, part, _ in files)
    # A pipeline's layer numbers begin the names of its parameters; the other prefix is of peft's wrapper.
    prefix = r"(\d+|tied_modules\.\w+)\." if is_pipeline else r"base_model\.model\."
    # Weights in the run's precision by name: of all pipeline stages, else of the first part, which is read below.
    module = {name: value for file in layers for name, value in _load_file(file).items()}
    # Parameter -> its whole shape; the part it is taken from; how many of its numbers were found.
    shapes, owners, lengths = dict[str, tuple[int, ...]](), dict[str, int](), Counter[str]()
    for part in range(parts):
        saved = _without_prefixes(_load_file(files["model", part, 0]), prefix)
        module = module or saved["module"]
        tensors = module if is_pipeline else saved["module"]
        for name, shape, position, values, numbers in _saved_slices(files, part, saved, prefix):
            is_split = not is_pipeline and bool(tensor_split.split_of(name))  # else each part has the whole parameter
            if not is_split and owners.setdefault(name, part) != part:
                continue  # an earlier part had it, too
            index, count = (part, parts) if is_split else (0, 1)
            shapes[name] = tensor_split.part_shape(name, shape, count, back=True)
            lengths[name] += len(values[fragments.WEIGHT])
            dtype = tensors[name].dtype
            yield fragments.Fragment(name, shapes[name], position, dtype, (index, count), values, numbers)
    if lacking := [name for name, shape in shapes.items() if lengths[name] != math.prod(shape)]:
        raise _unsupported_error(source, ", ".join(lacking[:3]))
    yield from _untrained_fragments(module, shapes)


def _module_fragments(saved: dict[str, Any]) -> Iterator[fragments.Fragment]:
    """Yield a fragment for each parameter of a file that has the whole model and its optimizer, without ZeRO."""
    # `saved` holds all: there are no files of ranks, the part 0 alone, and names without DeepSpeed's or peft's prefix.
    for name, shape, position, values, numbers in _saved_slices(files={}, part=0, saved=saved, prefix=""):
        dtype = saved["module"][name].dtype
        yield fragments.Fragment(name, shape, position, dtype, values=values, numbers=numbers)


def _untrained_fragments(module: Mapping[str, torch.Tensor], trained: Collection[str]) -> Iterator[fragments.Fragment]:
    """Yield buffers and untrained parameters, whole. `module`: tensors by name; `trained`: names in it that are left
    out, with what is tied to them.
    """
    tied = {_storage_key(module[name]) for name in trained}
    for name, value in module.items():
        if name not in trained and value.numel() and _storage_key(value) not in tied:
            stored = {fragments.WEIGHT: value.reshape(-1)}
            yield fragments.Fragment(name, tuple(value.shape), 0, value.dtype, values=stored)


def _without_prefixes(saved: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the content of a model's file with parameters under the model's own names."""

    def without_prefix(values: Any) -> Any:
        """Return a dict with the prefix removed from its names; {} for None."""
        return {re.sub(f"^{prefix}", "", name): value for name, value in values.items()} if values else {}

    keys = ("module", "frozen_param_shapes", "frozen_param_fragments")  # dicts by parameter
    # One dict for each of the optimizer's groups; None without ZeRO.
    shapes = [without_prefix(group) for group in saved["param_shapes"] or ()]
    return saved | {key: without_prefix(saved.get(key)) for key in keys} | {"param_shapes": shapes}


def _storage_key(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return a key that tied weights share."""
    return tensor.data_ptr(), tensor.shape


def _saved_slices(files: _Files, part: int, saved: dict[str, Any], prefix: str) -> Iterator[_Slice]:
    """Yield the stretches of parameters that each rank saved of a tensor-parallel part or pipeline stage. `saved`:
    model file of its first rank; `prefix`: what DeepSpeed or peft put before parameters' names.
    """
    sizes: list[int] = []
    ranks = int(saved["dp_world_size"]) if saved["param_shapes"] else 1  # without ZeRO each rank has all
    for rank in range(ranks):
        optimizer = _optimizer_state(files, saved, part, rank)
        groups = list(_flat_groups(optimizer, saved))
        sizes = sizes or [len(flat) for flat, _, _ in groups]  # the first rank's partitions are full
        yield from _trained_slices(optimizer, groups, sizes, rank, ranks)
        if ("model", part, rank) in files:  # each rank has one under ZeRO-3
            yield from _frozen_slices(_without_prefixes(_load_file(files["model", part, rank]), prefix), rank)


def _trained_slices(
    optimizer: dict[str, Any], groups: Sequence[_FlatGroup], sizes: Sequence[int], rank: int, ranks: int
) -> Iterator[_Slice]:
    """Yield what a rank's optimizer state holds of each parameter. `groups`: those of the optimizer state; `sizes`:
    numbers in a full partition of each group. Below stage 3 DeepSpeed divides a whole group among the ranks, in stage 3
    each parameter.
    """
    is_stage3 = "fp32_flat_groups" in optimizer  # DeepSpeed's key in stage 3 alone
    paddings_by_group = optimizer.get("param_alignment_paddings") or [[0] * len(group) for _, _, group in groups]
    for (flat, state, group), size, paddings in zip(groups, sizes, paddings_by_group, strict=True):
        values, numbers = _weights_and_states(flat, state, size)
        if is_stage3:
            stretches = _stretches_in_stage3(group, paddings, rank, ranks, len(flat))
        else:
            stretches = _stretches_below_stage3(group, paddings, rank * size, size)
        for name, position, offset, length in stretches:
            pieces = {key: value.narrow(0, offset, length) for key, value in values.items()}
            yield _Slice(name, tuple(group[name]), position, pieces, numbers)


def _frozen_slices(saved: dict[str, Any], rank: int) -> Iterator[_Slice]:
    """Yield a rank's equal parts of frozen parameters, from its model's file; the last parts are padded."""
    for name, value in saved["frozen_param_fragments"].items():
        shape, position = saved["frozen_param_shapes"][name], rank * value.numel()
        length = max(0, min(value.numel(), shape.numel() - position))
        yield _Slice(name, tuple(shape), position, {fragments.WEIGHT: value.reshape(-1)[:length]}, {})


def _flat_groups(optimizer: dict[str, Any], saved: dict[str, Any]) -> Iterator[_FlatGroup]:
    """Yield the flat tensors that a rank saved, with the parameters in each; without flat tensors, one for each
    parameter. Without ZeRO no names are saved: the order of parameters tells them. `optimizer`: the rank's state dict;
    `saved`: the model's file. ValueError for Muon.
    """
    inner = _wrapped_state(optimizer)
    states = inner["state"]  # number of a parameter, or of a flat tensor -> its states
    members = [group["params"] for group in inner["param_groups"]]  # those numbers, by group
    if any("use_muon" in group for group in inner["param_groups"]):  # its momentum_buffer would be taken for SGD's
        raise ValueError("Muon")
    # Keys of the flat fp32 weights: ZeRO 1 and 2, ZeRO 3, and without ZeRO in 16 bits.
    keys = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat")
    flats = next((optimizer[key] for key in keys if key in optimizer), None)
    if flats is not None:
        groups = saved["param_shapes"] or _guessed_groups(
            saved, [len(flat) for flat in flats], lambda shapes: sum(map(math.prod, shapes))
        )
        for number, (flat, group) in enumerate(zip(flats, groups, strict=True)):
            yield flat, states.get(number, {}), group
        return
    groups = _guessed_groups(saved, list(map(len, members)), len)
    # In 16 bits fp32 weights beside the model's, where DeepSpeed does not know the optimizer; in fp32 the model's own.
    weights = optimizer.get("fp32_groups") or [[saved["module"][name] for name in group] for group in groups]
    for group, group_members, group_weights in zip(groups, members, weights, strict=True):
        for name, member, weight in zip(group, group_members, group_weights, strict=True):
            state = states.get(member, {})
            for value in (weight, *(state[key] for key in _STATES & state.keys())):
                if value.shape != group[name]:
                    raise ValueError(f"{name}: {tuple(value.shape)}")
            yield weight.reshape(-1), state, {name: group[name]}


def _guessed_groups(
    saved: dict[str, Any], sizes: list[int], size_of: Callable[[Collection[torch.Size]], int]
) -> list[dict[str, torch.Size]]:
    """Return name -> shape of the parameters of each optimizer group, where only the groups' `sizes` are saved: the
    numbers in each flat tensor, or how many parameters each has; `size_of` computes the same of a group's shapes. The
    groups of usual programs are tried: one of all parameters, also with an empty second one, or matrices and (without
    weight decay) vectors apart, in either order. ValueError if none of them fits.
    """
    first_names = dict[Any, str]()  # of tied weights the first
    for name, tensor in saved["module"].items():
        if name not in saved["buffer_names"]:
            first_names.setdefault(_storage_key(tensor), name)
    shapes = {name: saved["module"][name].shape for name in first_names.values()}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    vectors = {name: shape for name, shape in shapes.items() if len(shape) < 2}
    for groups in ([shapes], [shapes, {}], [matrices, vectors], [vectors, matrices]):
        if [size_of(group.values()) for group in groups] == sizes:
            return groups
    raise ValueError(f"parameter groups {sizes}")


def _weights_and_states(
    flat: torch.Tensor, state: dict[str, Any], size: int
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return by name what a fragment holds of a flat tensor: `values`, of which each weight has its own (the weights
    `flat` and optimizer states such as exp_avg), and `numbers`, which all share (the step). ValueError for a `state`
    that is of neither kind. `size`: numbers in a full partition, see below.
    """
    values, numbers = {fragments.WEIGHT: flat}, {}
    for key, value in state.items():
        if key == "step":
            numbers[key] = float(value)
        elif key in _STATES and value.numel() in (len(flat), size):  # of a shorter last partition it may be padded
            values[key] = value.reshape(-1)
        elif value is not None:  # a name without a state
            raise ValueError(f"optimizer state {key}")
    return values, numbers


_Stretch = tuple[str, int, int, int]
"""(parameter, position in it flattened, offset in a rank's flat tensor, length)."""


def _stretches_below_stage3(
    group: Mapping[str, torch.Size], paddings: Sequence[int], offset: int, size: int
) -> Iterator[_Stretch]:
    """Yield what a partition, `size` numbers of a group from `offset` on, has of each parameter. In a group, parameters
    follow each other, each with its `paddings` behind it: with partitions of 6, a and b of 4 are aaaabb | bb.
    """
    position = 0  # of the parameter in the group
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        first, end = max(position, offset), min(position + shape.numel(), offset + size)
        if first < end:
            yield name, first - position, first - offset, end - first
        position += shape.numel() + padding


def _stretches_in_stage3(
    group: Mapping[str, torch.Size], paddings: Sequence[int], rank: int, ranks: int, size: int
) -> Iterator[_Stretch]:
    """Yield what a rank has of each parameter in its flat tensor of `size` numbers: an equal part, the last one padded.
    Of 2 ranks with a of 4 and b of 3 numbers the first has aabb, the second aab and a zero.
    """
    offset = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        share = -(-shape.numel() // ranks)  # rounded up
        position = rank * share
        length = min(share, shape.numel() - position)
        if length > 0:
            yield name, position, offset, length
        offset += share + padding
    if offset != size:
        raise ValueError(f"{offset} / {size}")


def _write_fragments(all_fragments: Iterable[fragments.Fragment], target: Path) -> None:
    """Write fragments to files of bounded size; a file holds at most one fragment of a parameter."""
    number, size, pending = 0, 0, dict[str, fragments.Fragment]()
    for fragment in chain(all_fragments, [None]):  # None: write what is left
        if pending and (fragment is None or fragment.name in pending or size > _MOST_BYTES):
            fragments.write(fragments.content_of(pending.values()), target / fragments.file_name(number))
            number, size, pending = number + 1, 0, {}
        if fragment is not None:
            pending[fragment.name] = fragment
            size += sum(value.nbytes for value in fragment.values.values())
