"""How fast this machine multiplies matrices: what a step can be measured by where no datasheet is known, or true."""

import statistics
import time

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.distributed.process_group import gather
from toolkit.engine.memory import is_out_of_memory

_GPU_SIZES = (8192, 4096, 2048)
"""Of the matrices; the later ones where memory is too little for the first."""
_CPU_SIZES = (96, 192, 384, 768)
"""The first that takes long enough to be timed: one of 768 in bf16 takes 2.8 s where the processor has no such unit."""
_LONG_ENOUGH_S = 0.005
_GPU_S, _CPU_S = 0.3, 0.1
"""How long products are repeated."""
_AT_ONCE = 5


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large square matrix products, of the fastest few in a row. Takes less than a second.

    Args:
        device: where they are computed; a GPU needs 0.4 GiB of memory meanwhile, in fp32 0.8 GiB, a 16th of it at
            least; 0 is returned where there is not even that.
        dtype: of the matrices.
    """
    for size in _sizes(device, dtype):
        try:
            return _measured(size, device, dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        get_accelerator().empty_cache()
    return 0.0


def _sizes(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return what to try; on a GPU one after another where memory is too little, on a CPU what takes long enough."""
    if device.type != "cpu":
        return _GPU_SIZES
    for size in _CPU_SIZES:
        square = torch.ones(size, size, dtype=dtype)
        seconds = []
        for _ in range(2):  # the first loads libraries
            started = time.perf_counter()
            square @ square
            seconds.append(time.perf_counter() - started)
        if min(seconds) > _LONG_ENOUGH_S:
            break
    return (size,)


def _measured(size: int, device: torch.device, dtype: torch.dtype) -> float:
    seconds, times = (_CPU_S, 1) if device.type == "cpu" else (_GPU_S, _AT_ONCE)
    # Equal numbers would take less power, so a GPU would be faster. A generator of its own: the run's stays as it is.
    random = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
    out = left @ right  # warms up: libraries are loaded, kernels are chosen
    fastest, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds or fastest == float("inf"):
        get_accelerator().synchronize()
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=out)
        get_accelerator().synchronize()
        fastest = min(fastest, (time.perf_counter() - started) / times)
    return 2.0 * size**3 / fastest


def median_of_ranks(device: torch.device, dtype: torch.dtype) -> float:
    """Return the same of the rank in the middle of those that have it; all measure at once. A collective."""
    found = [speed for speed in gather(matmul_flops_per_s(device, dtype)) if speed]
    get_accelerator().empty_cache()
    return float(statistics.median_low(found)) if found else 0.0
