"""Ranks, sums and agreement: everything that all ranks do together outside the engine."""

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from toolkit import errors
from toolkit.config.schema import Backend, DistributedConfig
from toolkit.distributed import alike, orphans, rendezvous
from toolkit.messages import tr
from toolkit.outside import system_text

T = TypeVar("T")
_comparisons = count()
"""Each has a place of its own in the store; all ranks compare the same in the same order."""


def check_alike(config: DistributedConfig, mine: Mapping[str, str], error: type[errors.ToolkitError]) -> None:
    """See that all ranks have the same; before the process group exists or after. A collective.

    Ranks with different settings would train something that none of them was asked for, or wait for each other for
    ever in collectives that do not fit together.

    Args:
        config: how long ranks are waited for.
        mine: what this rank has, by name, as it may be shown.
        error: what is raised on every rank where they differ.

    Raises:
        LaunchError: not all ranks have come.
    """
    if world_size() == 1:
        return
    store, rank, size = _met(config)
    told = alike.differences(
        store, rank, size, f"alike/{next(_comparisons)}", mine, timedelta(seconds=config.timeout_s)
    )
    if told:
        raise error(told)


def _met(config: DistributedConfig) -> tuple[Store, int, int]:
    try:
        return rendezvous.meet(timedelta(seconds=config.timeout_s))
    except (RuntimeError, ValueError) as error:
        raise _not_together(config, error) from error


def _not_together(config: DistributedConfig, error: Exception) -> errors.LaunchError:
    return errors.LaunchError(
        tr(
            "the ranks did not come together (backend {backend}, {address}:{port}): {reason}. Check that the "
            "address is reachable from every machine and the port is free, and distributed.backend.",
            backend=config.backend.value,
            address=os.environ.get("MASTER_ADDR", "?"),
            port=os.environ.get("MASTER_PORT", "?"),
            reason=str(error).splitlines()[0],
        )
    )


def start(config: DistributedConfig) -> torch.device:
    """Join the process group through DeepSpeed and return this rank's device.

    Expects RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

    Raises:
        LaunchError: the backend is not there, or the ranks did not find each other.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    orphans.tie_builds()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu and not config.cpu_shared_memory:
        # TorchBackend compiles its shared-memory all-reduce (1-3 minutes) whenever this table says that it could
        # (deepspeed 0.19.8, comm/torch.py, build_shm_op); plain gloo serves without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = config.backend.value
    if config.backend is Backend.auto:
        # DeepSpeed's CPU accelerator would ask for oneCCL, which plain PyTorch builds do not have.
        backend = "gloo" if on_cpu else accelerator.communication_backend_name()
    if not on_cpu:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=config.timeout_s)
    try:
        deepspeed.init_distributed(
            dist_backend=backend,
            timeout=timeout,
            init_method=rendezvous.init_method(timeout),
            auto_mpi_discovery=False,
            verbose=False,
        )
    except (RuntimeError, ValueError) as error:
        raise _not_together(config, error) from error
    return torch.device(accelerator.current_device_name())


def stop() -> None:
    """Leave the process group and remove what DeepSpeed's CPU collectives leave in /dev/shm."""
    if dist.is_initialized():
        rank, port = dist.get_rank(), os.environ.get("MASTER_PORT", "")
        dist.barrier()
        dist.destroy_process_group()
        rendezvous.leave()
        remove_shared_memory(rank, port)


def remove_shared_memory(rank: int, port: str) -> None:
    """Unlink a rank's segment, 66 MiB that DeepSpeed 0.19.8 never unlinks (csrc/cpu/comm/shm.cpp names them)."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_{rank}"):  # noqa: S108
        if re.search(rf"_{port}_{rank}$", path.name) and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)


def rank() -> int:
    """Return this process's rank; 0 before the process group exists in a single process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def sum_over_ranks(values: list[float] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the sum over all ranks.

    Args:
        values: one-dimensional; the same length on every rank.
        device: where the backend needs its tensors.

    Returns:
        float64 tensor of the same length on `device`, the same on every rank.
    """
    total = torch.as_tensor(values, dtype=torch.float64).clone()
    if total.device != device:  # from page-locked memory, so that the host does not wait for the device
        total = (total.pin_memory() if device.type == "cuda" else total).to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in their order, on every rank. For small things: they travel pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def on_rank0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 alone; every rank gets its result, or the same error.

    Without the second half, an error on rank 0 leaves the other ranks waiting in their next collective.
    """
    outcome: list[tuple[T | None, str, str]] = [(None, "", "")]
    if rank() == 0:
        try:
            outcome = [(function(), "", "")]
        except errors.ToolkitError as error:
            outcome = [(None, type(error).__name__, str(error))]
        except OSError as error:
            outcome = [(None, type(error).__name__, system_text(error))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, kind, message = outcome[0]
    if kind:
        raise getattr(errors, kind, errors.CheckpointError)(message)  # the system's own: input or output has failed
    return result  # type: ignore[return-value]
