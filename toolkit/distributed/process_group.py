"""The process group, collectives of small values, and parameters that ranks have parts of."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from toolkit import children, messages
from toolkit.config import schema
from toolkit.messages import system_text

T = TypeVar("T")


def check_alike(
    config: schema.DistributedConfig, values: Mapping[str, str], error: type[messages.ToolkitError]
) -> None:
    """Raise `error` on every rank unless `values`, by name, are the same on all: see meeting.py. A collective."""
    if world_size() > 1:
        from toolkit.distributed import meeting

        meeting.check_alike(config, values, error)


def start(config: schema.DistributedConfig) -> torch.device:
    """Join the process group by the launcher's variables (RANK, ..., MASTER_PORT); return this rank's device."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()
    _tie_builds()
    on_cpu = chosen.device_name() == "cpu"
    if on_cpu and not config.cpu_shared_memory:
        # TorchBackend compiles its shared-memory all-reduce (1-3 minutes) whenever this table says that it could
        # (deepspeed 0.19.8, comm/torch.py, build_shm_op); plain gloo serves without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = config.backend.value
    if config.backend is schema.Backend.auto:
        # DeepSpeed's CPU accelerator would ask for oneCCL, which plain PyTorch builds do not have.
        backend = "gloo" if on_cpu else chosen.communication_backend_name()
    timeout = timedelta(seconds=config.timeout_s)
    if not on_cpu:
        from toolkit.distributed import own_gpu

        chosen.set_device(own_gpu.gpu_number(chosen.device_count(), os.environ))
    device = torch.device(chosen.current_device_name())
    try:
        init_method = None
        if world_size() > 1:
            from toolkit.distributed import meeting

            init_method = meeting.init_method(timeout)
            if not on_cpu and backend != "gloo":  # gloo alone allows several ranks per GPU
                own_gpu.check_alone(device, meeting.meet(timeout)[0])
        deepspeed.init_distributed(
            dist_backend=backend, timeout=timeout, init_method=init_method, auto_mpi_discovery=False, verbose=False
        )
    except (RuntimeError, ValueError) as error:
        from toolkit.distributed import meeting

        raise meeting.not_together(config, error) from error
    return device


def _tie_builds() -> None:
    """Let builds of DeepSpeed's ops end with this process: PyTorch starts ninja, which ends its compilers."""
    from torch.utils import cpp_extension

    vars(cpp_extension)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "run": children.run})


def stop() -> None:
    """Leave the process group and remove what DeepSpeed's CPU collectives leave in /dev/shm."""
    if dist.is_initialized():
        rank, port, has_met = dist.get_rank(), os.environ.get("MASTER_PORT", ""), dist.get_world_size() > 1
        barrier()
        dist.destroy_process_group()
        if has_met:
            from toolkit.distributed import meeting

            meeting.leave()
        remove_shared_memory(rank, port)


def remove_shared_memory(rank: int, port: str) -> None:
    """Unlink a rank's segment, 66 MiB that DeepSpeed 0.19.8 never unlinks (csrc/cpu/comm/shm.cpp names them)."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_{rank}"):  # noqa: S108
        if path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)


def rank() -> int:
    """Return this process's rank; 0 before the process group exists in a single process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def sum_over_ranks(values: list[float] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the elementwise sum of `values` over all ranks, float64 on `device`, the same on each. A collective."""
    total = torch.as_tensor(values, dtype=torch.float64).clone()
    if total.device != device:  # from page-locked memory, so that the host does not wait for the device
        total = (total if device.type == "cpu" else total.pin_memory()).to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_backend() == "hccl":  # reduces no float64 (CANN 8.5, HcclAllReduce), but gathers it
            parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, total)
            return torch.stack(parts).sum(0)
        dist.all_reduce(total)
    return total


def gather(value: T) -> list[T]:
    """Return [value of rank 0, of rank 1, …] on every rank. A collective for small values, which are pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Block until every rank has called this. A collective. One rank calls no barrier of PyTorch's: DeepSpeed tells
    NCCL its GPU only where there are several (0.19.8, comm/torch.py), and PyTorch 2.11 would warn that it guesses it.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def on_rank0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 only; every rank returns its result or raises its error, instead of waiting for it."""
    outcome: list[tuple[T | None, str, str]] = [(None, "", "")]  # result; class and message of an error
    if rank() == 0:
        try:
            outcome = [(function(), "", "")]
        except messages.ToolkitError as error:
            outcome = [(None, type(error).__name__, str(error))]
        except OSError as error:
            outcome = [(None, type(error).__name__, system_text(error))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    result, error_class, message = outcome[0]
    if error_class:
        raise getattr(messages, error_class, messages.CheckpointError)(message)  # an OSError is none of `messages`
    return result  # type: ignore[return-value]


_SLICE_S = 20.0
"""So long ranks wait at most for rank 0 before they meet again, however long its work takes."""


def patiently_on_rank0(function: Callable[[], T]) -> T:
    """Do what `on_rank0` does for a function that may outlast a collective's timeout: it runs in a thread of rank 0,
    and until it is done, all ranks meet in a short collective every _SLICE_S.
    """
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(function) if rank() == 0 else None
        while on_rank0(lambda: bool(work and wait([work], _SLICE_S).not_done)):
            pass
        return on_rank0(lambda: cast("Future[T]", work).result())


def is_tensor_part(parameter: torch.Tensor) -> bool:
    """Whether this rank has a part of a parameter, as DeepSpeed's AutoTP marks it."""
    return getattr(parameter, "tensor_model_parallel", False)


def is_expert_part(parameter: torch.Tensor) -> bool:
    """Whether this rank has some of a layer's experts, as DeepSpeed marks it (0.19.8, moe/utils.py, is_moe_param)."""
    return not getattr(parameter, "allreduce", True)


def is_part(parameter: torch.Tensor) -> bool:
    """Whether this rank holds only a part of a parameter, whether by tensor or by expert parallelism."""
    return is_tensor_part(parameter) or is_expert_part(parameter)


def part_group(parameter: torch.Tensor) -> torch.distributed.ProcessGroup:
    """Return the ranks that share a parameter of which this one has a part."""
    from deepspeed.utils import groups

    if is_tensor_part(parameter):
        return tensor_group()
    return groups._get_expert_parallel_group(parameter.group_name)  # type: ignore[attr-defined]


def tensor_group() -> torch.distributed.ProcessGroup:
    """Return this rank's tensor-parallel process group; only to be called with tensor parallelism."""
    from deepspeed.utils import groups  # takes seconds, which those who have whole models need not wait

    return groups.get_tensor_model_parallel_group()


def tensor_rank() -> int:
    """Return this rank's number in its tensor group; 0 without tensor parallelism."""
    from deepspeed.utils import groups

    return 0 if groups._TENSOR_MODEL_PARALLEL_GROUP is None else dist.get_rank(tensor_group())


def tensor_group_size() -> int:
    """Return the number of ranks in a tensor group; 1 without tensor parallelism."""
    from deepspeed.utils import groups

    return 1 if groups._TENSOR_MODEL_PARALLEL_GROUP is None else dist.get_world_size(tensor_group())


def part_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return (number, count) of the part of a parameter that this rank has; (0, 1) if the parameter is not split."""
    if not is_part(parameter):
        return 0, 1
    group = part_group(parameter)
    return dist.get_rank(group), dist.get_world_size(group)


def full_shape(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the complete parameter, even if this rank has a part of it or it is packed in 4 bits."""
    packed = getattr(parameter, "quant_state", None)
    shape = tuple(packed.shape if packed is not None else getattr(parameter, "ds_shape", parameter.shape))
    count = part_of(parameter)[1]
    if count == 1:
        return shape
    from toolkit.config.tensor_split import part_shape

    return part_shape(name, shape, count, back=True)


def gather_parts(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole of a parameter, which may be this rank's alone; a collective of the ranks that share it."""
    part = parameter.detach()
    if not is_part(parameter):
        return part
    group = part_group(parameter)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    torch.distributed.all_gather(parts, part.contiguous(), group)
    return join_parts(name, parts)


def join_parts(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a parameter, or a stored buffer, from what the ranks of a tensor group have of it, in their order."""
    if len(parts) == 1:  # it is not copied: it may be a view of a mapped file
        return parts[0]
    from toolkit.config.tensor_split import AXES, Split, split_of

    split = split_of(name)
    if split is None:  # every rank has all of it
        return parts[0]
    if split is Split.pairs:  # two matrices in one, each of which is divided
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(above for above, _ in halves), *(below for _, below in halves)])
    return torch.cat(list(parts), dim=AXES.get(split, 0))


def take_part(name: str, tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """Return what rank `number` of a tensor group of `count` has of a parameter: `join_parts` backwards."""
    if count == 1:
        return tensor
    from toolkit.config.tensor_split import AXES, Split, split_of

    split = split_of(name)
    if split is None:
        return tensor
    if split is Split.pairs:
        return torch.cat([half.chunk(count)[number] for half in tensor.chunk(2)])
    return tensor.chunk(count, dim=AXES.get(split, 0))[number]
