"""How a rank's memory is allocated: variables of PyTorch, and glibc's malloc on CPUs."""

from collections.abc import Mapping, MutableMapping
from ctypes import CDLL

from toolkit.config import devices

PYTORCH = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that say how PyTorch allocates GPU memory; it takes the first that is set."""
_MALLOC = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Beginnings of variables by which a user has settled how memory is allocated, or by what."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt (glibc 2.36, malloc.h): free bytes at the heap's end (-1: no limit), mapped blocks, arenas."""


def set_allocator(environ: MutableMapping[str, str]) -> None:
    """Let PyTorch grow segments of GPU memory, against fragmentation, unless one of its variables in `environ` says
    what it does. The first of their names is set: PyTorch warns of the others (torch 2.13, AllocatorConfig). Without a
    GPU: tensors are in huge pages, and memory that a step frees stays with this process for the next one.
    """
    if devices.on_nvidia(environ) and not any(name in environ for name in PYTORCH):
        environ[PYTORCH[0]] = "expandable_segments:True"
    if devices.device_here(environ) == "cpu":
        environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's: read when it allocates for the first time
        # It maps each large block and unmaps it when it is freed: in each step the kernel zeroes gigabytes again.
        _set_malloc(environ, {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1})


def share_one_arena(environ: Mapping[str, str]) -> None:
    """Let threads that start from now on allocate where the main thread does, in a rank without a GPU. An arena of
    their own holds no block of over 64 MiB and maps it each time, whatever is set (malloc.c, sysmalloc); the largest
    are those of backward passes and of Gloo, whose threads take over an arena that any earlier thread has made.
    """
    if devices.device_here(environ) == "cpu":
        _set_malloc(environ, {_M_ARENA_MAX: 1})


def _set_malloc(environ: Mapping[str, str], parameters: Mapping[int, int]) -> None:
    """Set parameters of glibc's malloc, number -> value (mallopt), unless a variable has settled how it allocates."""
    mallopt = getattr(CDLL(None), "mallopt", None)  # glibc; others have none
    if mallopt is not None and not any(name.startswith(_MALLOC) for name in environ):
        for parameter, value in parameters.items():
            mallopt(parameter, value)
