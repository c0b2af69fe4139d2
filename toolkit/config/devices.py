"""What ranks on this machine will compute on, told by variables, drivers and their programs.

Imports nothing that takes long: ranks ask before they watch their launcher.
"""

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

CUDA = "cuda"
"""What PyTorch and DeepSpeed call GPUs of NVIDIA, and of AMD (ROCm)."""
_PACKAGES = {"npu": "torch_npu", "sdaa": "torch_sdaa", "hpu": "habana_frameworks", "mlu": "torch_mlu"}
_PACKAGES |= {"supa": "torch_supa", "klxpu": "torch_xmlir"}
"""Accelerators that DeepSpeed 0.19.8 takes where a package is installed, in its order (real_accelerator.py)."""
_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "mlu": "MLU_VISIBLE_DEVICES"}
_VISIBLE |= {"sdaa": "SDAA_VISIBLE_DEVICES", "supa": "SUPA_VISIBLE_DEVICES"}
"""Their `visible_devices_envs`; of the others CUDA_VISIBLE_DEVICES."""


def device_here(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of DeepSpeed's accelerator here (cuda, cpu, xpu, npu …): DS_ACCELERATOR, else by what is
    installed, in DeepSpeed's order. Neither torch nor deepspeed is imported.
    """
    if named := environ.get("DS_ACCELERATOR"):
        return named
    if torch_build("xpu") and any(Path("/dev/dri").glob("renderD*")):  # a GPU that renders, as Intel's do
        return "xpu"
    for name, package in _PACKAGES.items():
        if importlib.util.find_spec(package):
            return name
    is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    has_gpu = bool(shutil.which("nvidia-smi")) or any(Path("/dev").glob("nvidia[0-9]*"))
    has_gpu |= is_rocm() and Path("/dev/kfd").exists()  # the device file of AMD's driver
    return CUDA if has_gpu and not is_hidden else "cpu"


def torch_build(name: str) -> str:
    """Return a version from torch/version.py by its name there, such as `cuda` (a pattern); "" if there is none."""
    return "".join(re.findall(rf"^{name}\b.*= '(.+)'", torch_file("torch/version.py"), re.MULTILINE))


def torch_file(name: str) -> str:
    """Return the text of a file of PyTorch, which is not imported; "" if it is not installed or has no such file."""
    with suppress(OSError, metadata.PackageNotFoundError):
        return Path(str(metadata.distribution("torch").locate_file(name))).read_text(encoding="utf-8")
    return ""


def is_rocm() -> bool:
    """Whether PyTorch's build is for AMD's GPUs."""
    return bool(torch_build("hip"))


def on_nvidia(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether DeepSpeed trains on NVIDIA's GPUs here, about which this toolkit knows more than about others."""
    return device_here(environ) == CUDA and not is_rocm()


def visible_variable(environ: Mapping[str, str] = os.environ) -> str:
    """Return the variable by which DeepSpeed's launcher shows each rank its accelerator."""
    return _VISIBLE.get(device_here(environ), "CUDA_VISIBLE_DEVICES")


def is_cpu_by_default(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks here compute on processors only because no accelerator is found, and not by DS_ACCELERATOR."""
    return not environ.get("DS_ACCELERATOR") and device_here(environ) == "cpu"


_OTHER_TOOLS = ("rocm-smi", "amd-smi", "npu-smi", "hl-smi", "xpu-smi", "cnmon", "mthreads-gmi")
"""Programs that come with the drivers of AMD, Ascend, Gaudi, Intel, Cambricon and Moore Threads."""


def is_cpu() -> bool:
    """Return whether ranks on this machine compute on its processors: DeepSpeed was told so, or finds nothing else."""
    is_told = bool(os.environ.get("DS_ACCELERATOR"))
    return device_here() == "cpu" and (is_told or not any(map(shutil.which, _OTHER_TOOLS)))
