"""Saving of an engine's master weights and optimizer states, as fragments of parameters; restore.py restores them.

Each of DeepSpeed's (0.19.8) optimizer wrappers has *flat* tensors, which hold parameters one after another, partitioned
over ranks or not; the states of the basic optimizer have the same form. `flat_tensors` yields them with the offsets of
their parameters, and is the only function that knows the wrappers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.utils import is_optimized_parameter
from torch import distributed

from toolkit.checkpoint.fragments import BLOCK, WEIGHT, Content, Fragment, content_of
from toolkit.distributed import process_group

ZENFLOW_SUM = "zenflow_sum"
"""Name in checkpoints of the gradients that ZenFlow has summed since it last updated all columns."""
SCALES = ("absmax1", "absmax2")
"""States of bitsandbytes that hold the largest absolute value of each block, by which 8-bit codes are scaled."""

_Order = Iterable[tuple[Sequence[torch.nn.Parameter], Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of a parameter in a flat tensor."""

    parameter: torch.nn.Parameter
    position: int
    """Index of its first element in the flattened parameter, or in this rank's part of the parameter."""
    offset: int
    """Index of its first element in the flat tensor."""
    length: int


@dataclass(slots=True)
class FlatTensor:
    """A tensor that the optimizer updates, with its states."""

    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer
    pieces: list[Piece]
    shared: bool = False
    """Whether all data-parallel ranks have a copy."""
    full_offsets: dict[int, int] = field(default_factory=dict)
    """A parameter's id -> its offset in the states, if these have all of it, in place of this rank's piece."""
    is_transposed: bool = False
    """Whether it holds matrices column by column."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's states for this tensor."""
        return self.optimizer.state[self.tensor]

    @property
    def has_8_bits(self) -> bool:
        """Whether the optimizer is of bitsandbytes (0.50), which stores states of large tensors in 8 bits."""
        return type(self.optimizer).__module__.startswith("bitsandbytes")

    def turned(self, piece: Piece) -> bool:
        """Whether a piece is of a matrix that is stored column by column."""
        return self.is_transposed and piece.parameter.dim() == 2

    def piece_in_states(self, piece: Piece) -> Piece:
        """Return what the states hold of a piece's parameter: the same piece, or all of it; see `full_offsets`."""
        offset = self.full_offsets.get(id(piece.parameter))
        return piece if offset is None else Piece(piece.parameter, 0, offset, piece.parameter.numel())


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The parameters and buffers that this rank saves, by the model's names; tied parameters once."""

    parameters: Mapping[str, torch.nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    with_frozen: bool
    """Whether checkpoints hold frozen parameters too."""
    saved_elsewhere: frozenset[str] = frozenset()
    """Names of parameters that another pipeline stage saves."""

    def frozen(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and value of frozen parameters, if checkpoints hold them."""
        for name, parameter in self.parameters.items() if self.with_frozen else ():
            if not is_optimized_parameter(parameter):
                yield name, parameter


def flat_tensors(engine: deepspeed.DeepSpeedEngine, changes: bool = False) -> Iterator[FlatTensor]:
    """Yield this rank's flat tensors. One on NVMe is in memory until the next is yielded. `changes`: whether the caller
    changes their values, which are then written back where they came from.
    """
    optimizer, basic = engine.optimizer, engine.basic_optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO-3
        yield from _zero3_flat_tensors(optimizer, changes)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO-1 and 2
        # Not parameters' `_hp_mapping`, which has the wrong order with round_robin_gradients (0.19.8).
        order: _Order = zip(optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True)
        for flat in _rank_partitions(optimizer.single_partition_of_fp32_groups, optimizer, order):
            parameters = [piece.parameter for piece in flat.pieces]
            # Unless offloaded, Muon's momentum has full parameters, with pieces of other ranks (_muon_momentum_buffer).
            if parameters and getattr(parameters[0], "use_muon", False) and not optimizer.cpu_offload:
                flat.full_offsets = dict(zip(map(id, parameters), _offsets(parameters), strict=True))
            flat.is_transposed = optimizer.zenflow  # it updates columns, and keeps each in one stretch
            yield flat
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        order = ((parameters, _offsets(parameters)) for parameters in optimizer.bf16_groups)
        yield from _rank_partitions(optimizer.fp32_groups_flat_partition, optimizer, order)
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            pieces = _pieces(parameters, _offsets(parameters), 0, flat.numel())
            yield FlatTensor(flat, basic, pieces, shared=True)
    else:  # FP16_UnfusedOptimizer, or no wrapper: the optimizer updates the parameters themselves
        masters = getattr(optimizer, "fp32_groups", None) or [group["params"] for group in basic.param_groups]
        models = getattr(optimizer, "fp16_groups", masters)
        for master, parameter in zip(chain.from_iterable(masters), chain.from_iterable(models), strict=True):
            yield FlatTensor(master, basic, [Piece(parameter, 0, 0, parameter.numel())], shared=True)


def _rank_partitions(flats: Sequence[torch.Tensor], optimizer: Any, order: _Order) -> Iterator[FlatTensor]:
    """Yield this rank's partition, of `flats`, of each parameter group; `order`: the group's parameters, and their
    offsets in the flat tensor that the partitions of all ranks make up.
    """
    for flat, group, (parameters, offsets) in zip(flats, optimizer.real_dp_process_group, order, strict=True):
        begin = distributed.get_rank(group) * flat.numel()
        yield FlatTensor(flat, optimizer.optimizer, _pieces(parameters, offsets, begin, flat.numel()))


def _offsets(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the offset of each parameter if they are stored one after another."""
    return list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]


def _pieces(parameters: Sequence[torch.nn.Parameter], offsets: Iterable[int], begin: int, size: int) -> list[Piece]:
    """Return the pieces of parameters, at `offsets` of a flat tensor, in its partition `begin`:`begin + size`."""
    pieces = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, end = max(offset, begin), min(offset + parameter.numel(), begin + size)
        if first < end:
            pieces.append(Piece(parameter, first - offset, first - begin, end - first))
    return pieces


def _zero3_flat_tensors(optimizer: Any, changes: bool) -> Iterator[FlatTensor]:
    """Yield the flat tensor of each sub-group of ZeRO-3, read from NVMe if it is there. See `flat_tensors`."""
    for number, parameters in enumerate(optimizer.fp16_groups):
        is_swapped = optimizer._swappable_optimizer_subgroup(number)
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        flat, pieces = optimizer.fp32_partitioned_groups_flat[number], []
        for parameter in parameters:
            _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]  # offset and size of the piece
            position = distributed.get_rank(parameter.ds_process_group) * size
            length = min(size, parameter.ds_numel - position)  # the last partitions are padded
            if length > 0:
                pieces.append(Piece(parameter, position, offset, length))
        # Under partial offloading the sub-groups on the GPU belong to a second optimizer.
        on_gpu = hasattr(optimizer, "backup_optimizer") and optimizer.subgroup_to_device[number] != "cpu"
        yield FlatTensor(flat, optimizer.backup_optimizer if on_gpu else optimizer.optimizer, pieces)
        if changes:
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if is_swapped and changes:
            optimizer._optimizer_states_and_gradient_swap_out(number)
        elif is_swapped:
            optimizer._release_swap_buffers(number)


def has_factored_states(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether the optimizer's states are not elementwise: Adafactor's are of rows and columns."""
    return type(engine.basic_optimizer).__name__ == "Adafactor"


def contents(engine: deepspeed.DeepSpeedEngine, stored: StoredTensors) -> Iterator[Content]:
    """Yield the content of each file that this rank writes, as views of its memory: one file, or with states on NVMe
    one for each sub-group, as host memory may not hold them all. A collective if partitioned frozen parameters are
    saved.
    """
    names = {id(parameter): name for name, parameter in stored.parameters.items()}
    group = engine.seq_data_parallel_group
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    saves_buffers = process_group.tensor_rank() == 0 and rank == 0  # all ranks have the same
    fragments = list(_buffer_fragments(stored)) if saves_buffers else []
    is_factored = has_factored_states(engine)
    for flat in flat_tensors(engine):
        states = _classify_states(flat, is_factored)
        for piece in flat.pieces:
            name = names[id(piece.parameter)]
            if _is_saved_here(stored, name, piece.parameter):
                share = _rank_share(piece, rank, size) if flat.shared else piece
                fragments.append(_trained_fragment(engine, flat, share, name, states))
                if is_factored and rank == 0:  # states of the whole parameter, which all ranks have: written once
                    fragments[-1].bound = states.others
        if engine.zero_nvme_offload_optimizer():
            yield content_of(fragments)
            fragments = []
    fragments += _frozen_fragments(engine, stored)
    if fragments:
        yield content_of(fragments)


def _is_saved_here(stored: StoredTensors, name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether this rank saves its part of a parameter. A tensor group's first rank saves what all have."""
    is_first = process_group.tensor_rank() == 0
    return name not in stored.saved_elsewhere and (is_first or process_group.is_part(parameter))


def _trained_fragment(
    engine: deepspeed.DeepSpeedEngine, flat: FlatTensor, piece: Piece, name: str, states: "_States"
) -> Fragment:
    """Return the fragment of a trained parameter's piece: its weights in `flat`, and the optimizer's states of them."""
    piece_in_states = flat.piece_in_states(piece)  # which may hold more of the parameter in front of the piece
    begin = piece_in_states.offset + piece.position - piece_in_states.position
    values = {WEIGHT: stretch(flat.tensor, piece.offset, piece.length)}
    values |= {state: stretch(tensor, begin, piece.length) for state, tensor in states.elementwise.items()}
    fragment = _fragment(name, piece.parameter, piece.position, values, states.numbers)
    if flat.is_transposed:
        from toolkit.checkpoint.zenflow_state import add_to_fragment

        fragment.turned = flat.turned(piece)
        add_to_fragment(engine.optimizer, fragment, piece)
    if flat.has_8_bits:  # the scales of all blocks in which the piece lies
        first_block, fragment.phase = divmod(piece.offset, BLOCK)
        end_block = -(-(piece.offset + piece.length) // BLOCK)
        fragment.scales = {key: states.others[key][first_block:end_block] for key in SCALES if key in states.others}
    return fragment


def _frozen_fragments(engine: deepspeed.DeepSpeedEngine, stored: StoredTensors) -> Iterator[Fragment]:
    """Yield this rank's share of each frozen parameter. A collective if they are partitioned."""
    for name, parameter in stored.frozen():
        if not _is_saved_here(stored, name, parameter):
            continue
        group = _ranks_with_copies(engine, parameter)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=None):
            full_piece = Piece(parameter, 0, 0, parameter.numel())
            share = _rank_share(full_piece, distributed.get_rank(group), distributed.get_world_size(group))
            value = stretch(parameter, share.offset, share.length)
            # ZeRO-3 frees the gathered values at the end of this block.
            value = value.clone() if hasattr(parameter, "ds_id") else value
        yield _fragment(name, parameter, share.position, {WEIGHT: value}, {})


def _ranks_with_copies(engine: deepspeed.DeepSpeedEngine, parameter: torch.nn.Parameter) -> distributed.ProcessGroup:
    """Return the group of ranks that have copies of a frozen parameter."""
    if process_group.is_expert_part(parameter):
        return engine.expert_data_parallel_group[parameter.group_name]  # type: ignore[attr-defined]
    return engine.seq_data_parallel_group


def _rank_share(piece: Piece, rank: int, size: int) -> Piece:
    """Return the part of a piece, of which `size` ranks have copies, that rank `rank` writes."""
    begin, end = piece.length * rank // size, piece.length * (rank + 1) // size
    return Piece(piece.parameter, piece.position + begin, piece.offset + begin, end - begin)


def stretch(tensor: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    """Return a view of the elements `begin`:`begin + length` of a flattened tensor."""
    return tensor.detach().reshape(-1).narrow(0, begin, length)


class _States(NamedTuple):
    """An optimizer's states of a flat tensor, by name."""

    elementwise: dict[str, torch.Tensor]
    numbers: dict[str, float]
    others: dict[str, torch.Tensor]
    """Such as the scales of 8-bit blocks, or an Adafactor's of rows and columns."""


def _classify_states(flat: FlatTensor, is_factored: bool) -> _States:
    """Return the optimizer's states by kind. If they are factored (see `has_factored_states`) none is elementwise."""
    states = _States({}, {}, {})
    for state, value in sorted(flat.state.items()):
        if not isinstance(value, torch.Tensor):
            if isinstance(value, int | float):
                states.numbers[state] = float(value)
        elif state == "step" or (not is_factored and value.numel() == 1 < flat.tensor.numel()):
            states.numbers[state] = float(value)  # one number for all elements of the flat tensor
        else:
            has_all_elements = flat.full_offsets or value.numel() == flat.tensor.numel()
            kind = states.elementwise if has_all_elements and not is_factored else states.others
            kind[state] = value
    return states


def _fragment(
    name: str, parameter: torch.nn.Parameter, position: int, values: dict[str, torch.Tensor], numbers: dict[str, float]
) -> Fragment:
    """Return the fragment of a parameter: `values` (state -> numbers) from `position` of it on, flattened."""
    shape = process_group.full_shape(name, parameter)
    return Fragment(name, shape, position, parameter.dtype, process_group.part_of(parameter), values, numbers)


def _buffer_fragments(stored: StoredTensors) -> Iterator[Fragment]:
    """Yield a fragment with a copy of each buffer of the model."""
    for name, buffer in stored.buffers.items():
        value = buffer.detach().reshape(-1).to("cpu", copy=True)  # it changes in forward passes
        yield Fragment(name, tuple(buffer.shape), 0, buffer.dtype, values={WEIGHT: value})


COUNTS = "engine.json"
"""File with the engine's counters: steps, the schedule's state, the loss scaler's."""
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic loss scaler that change during training."""


def dynamic_loss_scaler(engine: deepspeed.DeepSpeedEngine) -> Any:
    """Return the engine's dynamic loss scaler, None if it has none."""
    # ZeRO's optimizers say it themselves; those of fp16 without ZeRO have a config, which may be the scaler (0.19.8).
    config = getattr(engine.optimizer, "loss_scale_config", engine.optimizer)
    if not getattr(config, "dynamic_loss_scale", False):
        return None
    return getattr(engine.optimizer, "loss_scaler", config)


def counts_of(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
    """Return an engine's counters as plain values, for `restore.restore_counts`."""
    scaler, first_group = dynamic_loss_scaler(engine), engine.basic_optimizer.param_groups[0]
    counts = {
        # ZenFlow's global_steps are its updates of all columns.
        "global_steps": engine.micro_steps if engine.zenflow else engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler else {},
        "group_step": first_group.get("step"),  # of DeepSpeed's fused optimizers, which count by group
        "loss_scaler": {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)},
    }
    if engine.zenflow:
        from toolkit.checkpoint import zenflow_state

        counts["zenflow"] = zenflow_state.counts_of(engine)
    return counts
