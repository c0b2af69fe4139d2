"""Host memory of a rank whose optimizer states, weights or layers' inputs are offloaded. No torch."""

import math
from collections import Counter

from toolkit.config import schema
from toolkit.plan.memory import Parts, RankPlanner


def offloaded_bytes(rank: RankPlanner) -> Parts:
    """Return the bytes that a rank keeps in host memory: optimizer, gradients, zenflow, weights, layer inputs."""
    zero, part = rank.cfg.zero, rank.own_trained
    parts: Counter[str] = Counter()
    if zero.offload_optimizer.device is schema.Device.cpu:  # master weights and states
        parts["optimizer"] = int((rank.master + rank.states) * part)
    elif zero.offload_optimizer.device is schema.Device.nvme:  # buffers for what is read of them
        parts["optimizer"] = 4 * rank.tile * zero.offload_optimizer.buffer_count
    if rank.offloads:
        # Gradients in float32 and accumulated ones; below stage 3 these and a copy of the weights in the weights' type.
        parts["gradients"] = part * (4 + rank.grad if zero.stage == 3 else 4 + 2 * rank.weight)
        if zero.offload_optimizer.super_offload:  # the process that updates has its own copy of a tile's gradients
            parts["gradients"] += 4 * rank.tile
        if zero.zenflow.enabled and zero.zenflow.offload:  # two states of the chosen columns
            parts["zenflow"] += 2 * rank.weight * int(rank.trained * zero.zenflow.topk_ratio)
        if zero.zenflow.enabled and zero.zenflow.overlap_step:  # a second gradient and the old weights, in float32
            parts["zenflow"] += 8 * part
    if zero.offload_param.device is schema.Device.cpu:
        parts["weights"] = rank.weight * rank.own_all
    elif zero.offload_param.device is schema.Device.nvme:
        parts["weights"] = rank.weight * zero.offload_param.buffer_size * zero.offload_param.buffer_count
    if rank.offloads_inputs:  # each in a page-locked block
        block = rank.layer_input() + _rounding_bytes(1, rank.layer_input())
        parts["layer inputs"] = block * rank.outline.sizes["layers"] * rank.in_flight
    if not rank.on_cpu:
        parts.update(_rounding_by_kind(rank))
    return {kind: count for kind, count in parts.items() if count}


def _rounding_by_kind(rank: RankPlanner) -> Parts:
    """Return the bytes that page-locked blocks take besides what `offloaded_bytes` counts: torch 2.13 rounds each up to
    a power of two, and keeps freed ones (ATen/core/CachingHostAllocator.h: allocate, maybe_cache_block). DeepSpeed
    0.19.8 pins, below stage 3, for each parameter group (one is assumed) master weights, their gradients and a copy
    in the model's type, and each accumulated gradient (stage_1_and_2.py); in stage 3 all gradients, those of a
    tile, each offloaded weight, and then all trained ones (stage3.py).
    """
    zero, weight, own_numbers = rank.cfg.zero, rank.weight, rank.own_trained
    sizes = {name: math.prod(shape) for name, shape in rank.outline.shapes.items()}
    trained, parts = [size for name, size in sizes.items() if name in rank.outline.trained], Counter[str]()
    if rank.offloads and zero.offload_optimizer.pin_memory and zero.stage < 3:
        parts["optimizer"] = _rounding_bytes(4, *rank.own_groups)
        # A rank's share of them; 1 in the place of 0, of a part that trains nothing.
        accumulated = _rounding_bytes(weight, *trained) * own_numbers // max(rank.trained, 1)
        parts["gradients"] = parts["optimizer"] + _rounding_bytes(weight, *rank.own_groups) + accumulated
    elif rank.offloads and zero.offload_optimizer.pin_memory:
        tiles = [0]  # a tile is closed by the parameter with which it reaches its size
        for size in map(rank.part, trained):
            if tiles[-1] >= zero.sub_group_size:
                tiles.append(0)
            tiles[-1] += size
        tiles += [max(tiles)] if zero.offload_optimizer.super_offload else []  # the copy of the process that updates
        parts["gradients"] = _rounding_bytes(rank.grad, own_numbers)
        if zero.offload_optimizer.device is schema.Device.cpu:
            parts["gradients"] += _rounding_bytes(4, *tiles)
    if zero.offload_param.device is schema.Device.cpu and zero.offload_param.pin_memory:
        of_each_weight = _rounding_bytes(weight, own_numbers, *map(rank.part, sizes.values()))
        parts["weights"] = weight * own_numbers + of_each_weight  # trained ones are pinned a second time, together
    return parts


def _rounding_bytes(width: int, *sizes: int) -> int:
    """Return the bytes by which blocks grow, each of so many elements of `width` bytes, as powers of two."""
    return sum((1 << (width * size - 1).bit_length()) - width * size for size in sizes if size)
