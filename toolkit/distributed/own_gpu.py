"""A rank's own GPU or NPU: which of its node it takes, and how much memory is there. Not imported by runs on CPUs."""

import os
import socket
from collections.abc import Mapping, MutableMapping

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from toolkit.config import devices
from toolkit.messages import LaunchError, tr


def gpu_number(visible: int, environ: MutableMapping[str, str]) -> int:
    """Return the number of this rank's GPU among the `visible` ones (how many): its local rank; 0 if it sees one alone,
    as Slurm may show each task its own. LOCAL_RANK is set to 0 then, as DeepSpeed takes it for that number (0.19.8,
    zero/utils.py). LaunchError if no GPU is left for this rank.
    """
    local_rank = int(environ["LOCAL_RANK"])
    if visible == 1:
        # DeepSpeed wants these two equal (0.19.8, engine.py).
        environ.update({name: "0" for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in environ})
        return 0
    if not visible:
        raise LaunchError(
            "no GPU is visible ({variable}={value}): nvidia-smi must list one, and PyTorch be a build for it (here "
            "{version}). To train on CPUs: export DS_ACCELERATOR=cpu",
            version=torch.__version__,
            **_visible(environ),
        )
    if local_rank >= visible:
        raise LaunchError(
            "rank {rank} on {host} is number {local_rank} on its node, counted from 0, and {visible} GPUs are visible "
            "({variable}={value}). Start as many ranks per node as GPUs, or let each rank see its own alone "
            "(srun --gpus-per-task=1).",
            rank=environ.get("RANK", "0"),
            host=socket.gethostname(),
            local_rank=local_rank,
            visible=visible,
            **_visible(environ),
        )
    return local_rank


def _visible(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that chooses GPUs here, and its value, for messages."""
    variable = devices.visible_variable(environ)
    return {"variable": variable, "value": environ.get(variable, tr("not set"))}


def check_alone(device: torch.device, store: Store) -> None:
    """Raise a LaunchError if another rank has taken this rank's GPU: NCCL allows one rank per GPU, HCCL per NPU."""
    # "" where the driver does not say
    gpu = str(getattr(torch.get_device_module(device).get_device_properties(device), "uuid", ""))
    if gpu and store.add(f"gpu/{gpu}", 1) > 1:
        raise LaunchError(
            "rank {rank} on {host} sees the same GPU as another rank ({variable}={value}), and NCCL takes "
            "one rank per GPU. Start as many ranks per node as GPUs, or let each rank see its own alone "
            "(srun --gpus-per-task=1).",
            rank=os.environ.get("RANK", "0"),
            host=socket.gethostname(),
            **_visible(os.environ),
        )


def available_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator that this process has reserved or may reserve. DeepSpeed's `available_memory`
    (0.19.8) does not see what other processes use, or fails if CUDA_VISIBLE_DEVICES holds names.
    """
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))


def limit_memory(device: torch.device, num_bytes: float) -> None:
    """Let this process allocate at most so many bytes of an accelerator."""
    module = torch.get_device_module(device)
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
