"""The compilers and headers that DeepSpeed's ops are built with. Imported only if an op has to be built."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from toolkit.config.devices import is_rocm
from toolkit.messages import tr


def _cuda_home(environ: Mapping[str, str]) -> Path:
    """Return where PyTorch expects nvcc and its headers (torch 2.13, cpp_extension.py, _find_cuda_home)."""
    nvcc = shutil.which("nvcc")
    usual = Path(nvcc).parent.parent if nvcc else "/usr/local/cuda"
    return Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or usual)


_CUDA_HEADERS = ("cuda_runtime.h", "cusparse.h", "cublas_v2.h", "cublasLt.h", "cusolverDn.h")
"""Those that ATen/cuda/CUDAContext.h includes (torch 2.13)."""
_HEADERS = {
    **dict.fromkeys(("fused_adam", "fused_lion", "quantizer"), _CUDA_HEADERS),
    "dc": (*_CUDA_HEADERS, "nccl.h"),
    "gds": ("cuda_runtime.h", "cufile.h"),
}
"""Op for GPUs -> headers outside of DeepSpeed and PyTorch that its sources include (0.19.8)."""


def _include_folders(environ: Mapping[str, str]) -> list[str]:
    """Return where any C++ compiler looks for headers."""
    named = ":".join(environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")).split(":")
    return [*filter(None, named), "/usr/local/include", "/usr/include"]


def _cuda_include_folders(ops: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return where a build of ops for GPUs looks for headers, in its order (torch 2.13, cpp_extension.py,
    include_paths); the folders of NVIDIA's wheels are not among them.
    """
    home = _cuda_home(environ)
    beside_nvcc: list[Path] = []
    if all(op.startswith("fused_") for op in ops):  # nvcc alone reads their headers: it looks beside itself, too
        nvcc_root = (home / "bin/nvcc").resolve().parent.parent
        beside_nvcc = [nvcc_root / "include", *nvcc_root.glob("targets/*/include")]  # nvcc.profile
    folders = [home / "include", *beside_nvcc, *filter(None, [environ.get("CUDA_INC_PATH")])]
    return list(dict.fromkeys([*map(str, folders), *_include_folders(environ)]))


def tools_for(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Return tool or header -> whether it is here, of all that building ops needs; missing CUDA headers are one key."""
    has = {
        "g++": shutil.which(environ.get("CXX", "g++")),
        "ninja": shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists(),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    if "async_io" in names:
        has["libaio.h"] = any(Path(folder, "libaio.h").exists() for folder in _include_folders(environ))
    if (on_gpu := [name for name in names if name in _HEADERS]) and is_rocm():
        # Headers come with it; PyTorch looks there (torch 2.13, cpp_extension.py, _find_rocm_home).
        home = environ.get("ROCM_HOME") or environ.get("ROCM_PATH") or "/opt/rocm"
        has["hipcc"] = shutil.which("hipcc") or Path(home, "bin/hipcc").exists()
    elif on_gpu:
        has["nvcc"] = (_cuda_home(environ) / "bin/nvcc").exists()
        headers = dict.fromkeys(header for op in on_gpu for header in _HEADERS[op])
        folders = _cuda_include_folders(on_gpu, environ)
        missing = [header for header in headers if not any(Path(folder, header).exists() for folder in folders)]
        if has["nvcc"] and missing:
            has[tr("{headers} (looked in {folders})", headers=", ".join(missing), folders=", ".join(folders))] = False
    return {name: bool(is_there) for name, is_there in has.items()}


def how_to_install(tools: Iterable[str]) -> str:
    """Return what to type, or to get, for tools and headers by their names in `tools_for`."""
    commands = {
        "g++": "apt install g++",
        "ninja": "pip install ninja",
        "Python.h": "apt install python3-dev",
        "libaio.h": "apt install libaio-dev",
        "hipcc": tr("ROCm's development packages, with ROCM_HOME set"),
        "nvcc": tr("the CUDA toolkit of torch.version.cuda, with CUDA_HOME set"),
    }
    for_cuda_headers = tr("all of nvcc's CUDA toolkit, or CPATH=DIRECTORY of these headers")
    return "; ".join(commands.get(tool, for_cuda_headers) for tool in tools)
