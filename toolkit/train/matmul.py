"""How fast this machine multiplies matrices: what a step can be measured by where no datasheet is known, or true."""

import statistics
import time

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.distributed.process_group import gather

_GPU_SIZE, _CPU_SIZE = 8192, 768
_GPU_S, _CPU_S = 0.3, 0.1
"""How long products are repeated."""
_AT_ONCE = 5


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of large square matrix products, of the fastest few in a row. Takes less than a second.

    Args:
        device: where they are computed; a GPU needs 0.4 GiB of memory meanwhile.
        dtype: of the matrices.
    """
    is_cpu = device.type == "cpu"
    size, seconds, times = (_CPU_SIZE, _CPU_S, 1) if is_cpu else (_GPU_SIZE, _GPU_S, _AT_ONCE)
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
    """Return the same of the rank in the middle; all measure at once. A collective."""
    found = statistics.median_low(gather(matmul_flops_per_s(device, dtype)))
    get_accelerator().empty_cache()
    return float(found)
