"""What DeepSpeed's `get_accelerator` does not tell. No other file names torch.cuda or torch.accelerator.

PyTorch calls NVIDIA's GPUs and AMD's (ROCm) cuda; `torch.get_device_module` is torch.cuda for them, torch.npu for
Ascend's NPUs. What is known of NVIDIA's GPUs alone, such as compute capabilities, is unknown on all others.
"""

import os

import torch

from toolkit.config.devices import CUDA


def device_alone() -> torch.device:
    """Return where a process that is no rank computes: on an accelerator that PyTorch sees, unless DS_ACCELERATOR,
    which decides for ranks, names something else. Without DeepSpeed, whose import takes seconds and speaks on stdout.
    """
    named = os.environ.get("DS_ACCELERATOR")
    device = torch.accelerator.current_accelerator(check_available=True)
    return device if device and named in (None, "", device.type) else torch.device("cpu")


def trains_on_gpu() -> bool:
    """Whether a run's device is no CPU; a machine with a GPU may train on CPUs."""
    from deepspeed.accelerator import get_accelerator  # its detection may print to stdout, so not before it is needed

    return bool(get_accelerator().device_name() != "cpu")


def trains_on_cuda() -> bool:
    """Whether a run computes on GPUs of NVIDIA or AMD, as far as DeepSpeed decides it."""
    from deepspeed.accelerator import get_accelerator  # as in `trains_on_gpu`

    return bool(get_accelerator().device_name() == CUDA)


def device_name(device: torch.device) -> str:
    """Return the driver's name of an accelerator; "" for a CPU."""
    return "" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def has_bf16(device: torch.device) -> bool:
    """Whether an accelerator computes in bf16 itself; True if its module of PyTorch does not tell."""
    if device.type == CUDA:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(getattr(torch.get_device_module(device), "is_bf16_supported", lambda: True)())


def has_ampere_kernels() -> bool:
    """Whether the kernels that PyTorch has for GPUs from Ampere on may run: not on older GPUs, nor other accelerators.
    True without any: tensors without numbers are asked what a GPU would compute.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is None or (device.type == CUDA and torch.cuda.get_device_capability() >= (8, 0))


def set_tf32(is_allowed: bool) -> None:
    """Let this process multiply fp32 matrices in TF32, or not, on GPUs; PyTorch's own default differs by operation."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed


def uses_tf32(device: torch.device) -> bool:
    """Whether a device multiplies fp32 matrices in TF32."""
    return device.type == CUDA and torch.backends.cuda.matmul.allow_tf32
