"""Restoring of a checkpoint, of whatever layout, into an engine's master weights, optimizer states and counters."""

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import distributed

from toolkit.checkpoint.engine_state import (
    COUNTS,
    ZENFLOW_SUM,
    FlatTensor,
    Piece,
    StoredTensors,
    dynamic_loss_scaler,
    flat_tensors,
    has_factored_states,
)
from toolkit.checkpoint.fragment_reader import Fragments, spread
from toolkit.checkpoint.fragments import BLOCK, WEIGHT
from toolkit.distributed import process_group
from toolkit.messages import CheckpointError


def restore(engine: deepspeed.DeepSpeedEngine, stored: StoredTensors, fragments: Fragments) -> None:
    """Restore an engine's weights and optimizer states; CheckpointError if anything is missing. A collective."""
    names = {id(parameter): name for name, parameter in stored.parameters.items()}
    optimizer, is_factored = engine.optimizer, has_factored_states(engine)
    is_zero3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if is_zero3:
        optimizer.checkpoint_event_prologue()  # frees small parameters that ranks hold in full, with their old values
    for flat in flat_tensors(engine, changes=True):
        for piece in flat.pieces:
            _restore_piece(flat, piece, names[id(piece.parameter)], fragments, is_factored)
        if flat.has_8_bits:
            _restore_8_bits(flat, 1, names, fragments)
            _restore_8_bits(flat, 2, names, fragments)
    # The model's weights follow from the master weights.
    if is_zero3:
        optimizer.checkpoint_event_epilogue()
    elif hasattr(optimizer, "update_lp_params"):  # ZeRO-1 and 2, BF16_Optimizer
        optimizer.update_lp_params()
        if engine.zenflow:
            from toolkit.checkpoint import zenflow_state

            pieces = [piece for flat in flat_tensors(engine) for piece in flat.pieces]
            zenflow_state.restore(optimizer, pieces, names, fragments)
    elif hasattr(optimizer, "fp16_groups"):  # fp16 without ZeRO
        for flat in flat_tensors(engine):
            for piece in flat.pieces:
                weights = flat.tensor.detach().reshape(-1).narrow(0, piece.offset, piece.length)
                piece.parameter.data.copy_(weights.view_as(piece.parameter))
    _restore_unoptimized(stored, fragments)


def _restore_piece(flat: FlatTensor, piece: Piece, name: str, fragments: Fragments, is_factored: bool) -> None:
    """Copy what a checkpoint holds of one parameter's `piece` into this rank's flat tensor and its states; those that
    the optimizer has not created yet are created. `name`: the parameter's in the checkpoint; `is_factored`: states are
    copied whole, as they are not elementwise (Adafactor). CheckpointError for another shape or missing numbers.
    """
    _check_shape(piece, name, fragments)
    _restore_numbers(flat, fragments.numbers(name))
    if is_factored:
        flat.state.update((state, value.to(flat.tensor.device)) for state, value in fragments.bound(name).items())
    # States of 8 bits are read by `_restore_8_bits`, the sum by zenflow_state.restore.
    states = set() if is_factored or flat.has_8_bits else fragments.states(name) - {ZENFLOW_SUM}
    for state in sorted(states):
        if isinstance(flat.state.get(state), torch.Tensor):
            continue
        if flat.full_offsets:  # Muon's momentum, of full parameters, in the type that it was saved in
            size = sum(stored_piece.parameter.numel() for stored_piece in flat.pieces)
            flat.state[state] = flat.tensor.new_zeros(size, dtype=fragments.dtype(name, state))
        else:
            flat.state[state] = torch.zeros_like(flat.tensor, requires_grad=False)
    for state in (WEIGHT, *states):
        is_weight = state == WEIGHT
        target, into = (flat.tensor.data, piece) if is_weight else (flat.state[state], flat.piece_in_states(piece))
        part = process_group.part_of(piece.parameter)
        value = fragments.read(name, state, into.position, into.length, part, flat.turned(piece))
        if target.is_contiguous():
            target.view(-1).narrow(0, into.offset, into.length).copy_(value)
        else:  # a single parameter with another memory order of its axes
            target.copy_(value.view(target.shape))


def _check_shape(piece: Piece, name: str, fragments: Fragments) -> None:
    """Raise a CheckpointError if the checkpoint holds a piece's parameter in another shape."""
    shape = process_group.full_shape(name, piece.parameter)
    if (saved := tuple(fragments.facts.get(name, {}).get("shape", shape))) != shape:
        raise CheckpointError(
            "{folder} holds {name} as {saved}, and the model has {shape}: it is of another model.",
            folder=fragments.folder,
            name=name,
            saved=saved,
            shape=shape,
        )


def _restore_numbers(flat: FlatTensor, numbers: Mapping[str, float]) -> None:
    """Set the states of a flat tensor that are single numbers, such as the count of steps."""
    flat.state.update(numbers)
    if "step" in numbers:  # PyTorch's optimizers have a tensor for it, all others an int
        adam = getattr(flat.optimizer, "aux_optimizer", None) or flat.optimizer  # Muon's second one, which counts steps
        is_torch = type(adam).__module__.startswith("torch.optim")
        # Fused kernels read it on the device without a check where it is (torch 2.13, fused_adam_utils.cuh).
        is_fused = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
        device = flat.tensor.device if is_fused else torch.device("cpu")
        step = torch.tensor(numbers["step"], dtype=torch.float32, device=device)
        flat.state["step"] = step if is_torch else int(numbers["step"])


def _restore_8_bits(flat: FlatTensor, number: int, names: Mapping[int, str], fragments: Fragments) -> None:
    """Restore one of bitsandbytes' two states (`number` 1 or 2) of a flat tensor. Its blocks may have other borders
    than when it was saved, and the tensor may have been, or may be now, too small for 8 bits.

    A block's scale becomes the largest of the saved scales of its elements (of elements that were not saved in 8 bits
    the largest absolute value), and each element gets the nearest of the 256 levels. With an unchanged scale the codes
    are unchanged.
    """
    optimizer: Any = flat.optimizer
    tensor, size = flat.tensor, flat.tensor.numel()
    codes, scales = f"state{number}", f"absmax{number}"  # names of bitsandbytes
    if not any(codes in fragments.states(names[id(piece.parameter)]) for piece in flat.pieces):
        return  # saved before the first update
    # Values of the 256 codes: with a sign for the first moment, without for the second.
    levels = optimizer.name2qmap["dynamic" if number == 1 else "udynamic"].to(tensor.device)
    in_8_bits = size >= optimizer.args.min_8bit_size
    if in_8_bits:
        zero = int(levels.abs().argmin())
        flat.state[codes] = torch.full_like(tensor, zero, dtype=torch.uint8, requires_grad=False)
        flat.state[f"qmap{number}"] = levels
        flat.state[scales] = tensor.new_zeros(-(-size // BLOCK), dtype=torch.float32)
    else:
        flat.state[codes] = torch.zeros_like(tensor, requires_grad=False)

    def read(state: str, piece: Piece) -> torch.Tensor:
        part = process_group.part_of(piece.parameter)
        return fragments.read(names[id(piece.parameter)], state, piece.position, piece.length, part).to(tensor.device)

    def scales_of(piece: Piece) -> torch.Tensor:
        has_codes = scales in fragments.states(names[id(piece.parameter)])
        return read(scales, piece) if has_codes else read(codes, piece).abs()

    for piece in flat.pieces if in_8_bits else ():
        block, phase = divmod(piece.offset, BLOCK)
        padding = phase, -(phase + piece.length) % BLOCK  # in front and behind, up to whole blocks
        block_scales = torch.nn.functional.pad(scales_of(piece), padding).view(-1, BLOCK).amax(1)
        target = flat.state[scales][block : block + len(block_scales)]
        torch.maximum(target, block_scales, out=target)
    for piece in flat.pieces:
        value, scale = read(codes, piece), scales_of(piece)
        # What was not saved in 8 bits has its absolute value as scale.
        value = levels[value.long()] if value.dtype is torch.uint8 else value.sign()
        target = flat.state[codes].view(-1)[piece.offset : piece.offset + piece.length]
        if not in_8_bits:
            target.copy_(value * scale)
            continue
        block, phase = divmod(piece.offset, BLOCK)
        new_scales = spread(flat.state[scales][block : (piece.offset + piece.length) // BLOCK + 1], phase, piece.length)
        value *= (scale / new_scales).nan_to_num(1.0)  # 0 / 0: a block of zeros
        target.copy_(torch.bucketize(value, (levels[1:] + levels[:-1]) / 2, out_int32=True))


def _restore_unoptimized(stored: StoredTensors, fragments: Fragments) -> None:
    """Restore buffers, if they were saved, and frozen parameters."""
    for name, buffer in stored.buffers.items():
        if name in fragments.facts:
            buffer.data.copy_(fragments.whole(name))
    for name, parameter in stored.frozen():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if not hasattr(parameter, "ds_id") or distributed.get_rank() == 0:  # ZeRO-3 takes it from rank 0
                value = fragments.read(name, WEIGHT, 0, parameter.numel(), process_group.part_of(parameter))
                parameter.data.copy_(value.view(parameter.shape))


def restore_counts(engine: deepspeed.DeepSpeedEngine, counts: Mapping[str, Any]) -> None:
    """Set an engine's counters; CheckpointError if a value is missing."""
    try:
        engine.global_steps = int(counts["global_steps"])
        engine.global_samples = int(counts["global_samples"])
        engine.skipped_steps = int(counts["skipped_steps"])
        if engine.lr_scheduler:
            engine.lr_scheduler.load_state_dict(counts["schedule"])
        scaler = dynamic_loss_scaler(engine)
        for name, value in counts["loss_scaler"].items() if scaler is not None else ():
            setattr(scaler, name, value)
        if counts["group_step"] is not None:
            for group in engine.basic_optimizer.param_groups:
                group["step"] = int(counts["group_step"])
        if engine.zenflow:
            from toolkit.checkpoint import zenflow_state

            zenflow_state.restore_counts(engine, counts.get("zenflow", {}))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("{file} cannot be read: {reason}.", file=COUNTS, reason=error) from None
