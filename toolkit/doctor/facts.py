"""What one machine is like: versions, code, recipe, GPUs, disks, network interfaces, limits. `findings` compares.

Disks are measured past the memory that the system lends them.
"""

import hashlib
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from toolkit import children
from toolkit.config import ops
from toolkit.config.load import to_dict
from toolkit.config.schema import Device, Init, RunConfig, leaves
from toolkit.launch.environment import EXPORTED_PREFIXES
from toolkit.messages import ToolkitError

_DISK_BLOCK = 1 << 22
_DISK_BLOCKS = 64


def disk_speed(folder: Path) -> dict[str, float | str]:
    """Write and read 256 MiB, around the page cache where that is possible: `write_mb_s`, `read_mb_s`, or `error`."""
    block = mmap.mmap(-1, _DISK_BLOCK)  # direct access needs memory that begins with a page
    block.write(os.urandom(_DISK_BLOCK))
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
        os.close(handle)
        try:
            return {
                "write_mb_s": _measure_pass(name, os.O_WRONLY, block),
                "read_mb_s": _measure_pass(name, os.O_RDONLY, block),
            }
        finally:
            os.unlink(name)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _measure_pass(name: str, mode: int, block: mmap.mmap) -> float:
    try:
        handle = os.open(name, mode | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems have no direct access
        handle = os.open(name, mode)
    try:
        started = time.perf_counter()
        for _ in range(_DISK_BLOCKS):
            if mode == os.O_WRONLY:
                os.write(handle, block)
            else:
                os.readv(handle, [block])
        if mode == os.O_WRONLY:
            os.fsync(handle)
        return _DISK_BLOCK * _DISK_BLOCKS / 1e6 / (time.perf_counter() - started)
    finally:
        os.close(handle)


PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "hydra-core", "numpy", "tokenizers", "safetensors")
FORWARDED = (*EXPORTED_PREFIXES, "NCCL")
"""Beginnings of the variables that DeepSpeed 0.19.8 hands on to other machines that have NVIDIA GPUs."""
MATTERING = (
    *("CUDA_", "DS_", "GLOO_", "HF_", "LD_", "MODELSCOPE_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_"),
    *("WANDB_", "XDG_CACHE_HOME", "http_proxy", "https_proxy"),
)
"""Beginnings of the variables by which runs differ."""
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
ROOT = Path(__file__).parents[2]
_COMMAND_S = 20.0
_BLOCK, _BLOCKS, _BLOCKS_OF_ALL = 1 << 16, 16, 4096


def of_machine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what does not depend on a recipe."""
    return {
        "hostname": socket.gethostname(),
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nccl": next((v for d in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (v := _version(d))), ""),
        "code": _code(),
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().available,
        "network": _network(environ),
        "limits": {name: resource.getrlimit(limit)[0] for name, limit in _LIMITS.items()},
        "locks": [str(path) for path, _ in ops.stale_build_locks(environ)],
        "environment": {name: hashed(value) for name, value in environ.items() if name.startswith(MATTERING)},
    }


def of_recipe(cfg: RunConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what depends on a recipe."""
    offloading = (cfg.zero.offload_optimizer, cfg.zero.offload_param)
    nvme = {section.nvme_path for section in offloading if section.device is Device.nvme}
    shm = {"/dev/shm": "shm"}  # noqa: S108 -- DataLoader workers, NCCL and DeepSpeed share memory through it
    needed = ops.needed(cfg, environ)
    folders = {cfg.run.dir: "run.dir", cfg.prepare.dir: "prepare.dir", **shm, **dict.fromkeys(nvme, "nvme")}
    return {
        "recipe": {key: str(value) for key, value in leaves(to_dict(cfg))},
        "files": _files(cfg),
        "stores": sorted(path.parent.name for path in Path(cfg.prepare.dir).glob("stores/*/manifest.json")),
        "disks": {name: _disk(Path(folder)) for folder, name in folders.items()},
        "nvme": {folder: disk_speed(Path(folder)) for folder in nvme},
        "ops": {"needed": needed, "built": ops.built(needed, environ), "lacking": ops.lacking(needed, environ)},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _run(*command: str) -> str | None:
    """Return what a command prints, "" if it fails or is not there, None if it does not come to its end."""
    try:
        done = children.run(command, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _code() -> dict[str, Any]:
    """Return the commit, and a hash of each file that a run is made of: copies need not be repositories."""
    # A wheel has conf/ and recipes/ inside the package.
    tables = ("toolkit/**/*.yaml", "toolkit/**/*.json", "conf/**/*.yaml", "recipes/*.yaml")
    patterns = ("run.py", "toolkit/**/*.py", *tables)
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    files = {str(path.relative_to(ROOT)): hashed(path.read_bytes()) for path in sorted(found)}
    return {"commit": _run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "", "files": files}


def hashed(content: bytes | str) -> str:
    """Return enough of a hash to compare contents by."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _gpus() -> dict[str, Any]:
    """Return driver, and of each NVIDIA GPU name, MiB (0: unknown), processes; `late` if nvidia-smi gives no answer."""
    fields = "index,uuid,name,driver_version,memory.total,memory.free"
    found = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if found is None:
        return {"driver": "", "cards": [], "late": True}
    using = (
        (_run("nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader") or "").split() if found else []
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in found.splitlines()]
    cards = []
    for index, uuid, name, _, *sizes in (row for row in rows if len(row) == len(fields.split(","))):
        mib, free_mib = (int(size) if size.isdecimal() else 0 for size in sizes)
        cards.append({"index": index, "name": name, "mib": mib, "free_mib": free_mib, "used_by": using.count(uuid)})
    return {"driver": rows[0][3] if cards else "", "cards": cards, "late": False}


def _network(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the cards, and the addresses that the collectives would choose where nothing is set."""
    stats = psutil.net_if_stats()
    cards = {}
    for name, addresses in psutil.net_if_addrs().items():
        own = [one.address for one in addresses if one.family is socket.AF_INET]
        if own and name in stats:
            found = stats[name]
            cards[name] = {"address": own[0], "up": found.isup, "mtu": found.mtu, "mbit_s": found.speed}
    try:
        # gloo takes the address of the machine's own name (torch 2.13, ProcessGroupGloo::createDefaultDevice).
        own_name = socket.gethostbyname(socket.gethostname())
    except OSError:
        own_name = ""
    return {
        "cards": cards,
        "own_name": own_name,
        "first": next(iter((_run("hostname", "-I") or "").split()), ""),
        "asked": {name: environ.get(f"{name.upper()}_SOCKET_IFNAME", "") for name in ("gloo", "nccl")},
    }


def _files(cfg: RunConfig) -> dict[str, Any]:
    """Return of each file or folder that the recipe reads what it holds, or why it cannot be read."""
    from toolkit.data.readers import files_of

    found = {}
    if cfg.model.init is Init.pretrained:
        found["model.path"] = _fingerprint(cfg.model.path, partial(_visible, Path(cfg.model.path)))
    for number, source in enumerate([*cfg.data.sources, *cfg.data.validation]):
        if source.path:
            found[f"data {number}"] = _fingerprint(source.path, partial(files_of, source))
    return found


def _visible(folder: Path) -> list[Path]:
    """Return all that is in a folder but what is hidden: notes of downloads and repositories differ everywhere."""
    found = [(path, path.relative_to(folder).parts) for path in folder.rglob("*")]
    return [path for path, parts in found if not any(part[0] == "." or part == "__pycache__" for part in parts)]


def _fingerprint(path: str, files: Callable[[], Iterable[Path]]) -> dict[str, Any]:
    """Return names, sizes and a hash of samples: reading whole weights on each machine would take minutes."""
    digest, total = hashlib.sha256(), 0
    try:
        names = sorted(file for file in files() if file.is_file())
        blocks = max(1, min(_BLOCKS, _BLOCKS_OF_ALL // max(1, len(names))))
        for file in names:
            size = file.stat().st_size
            total += size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as handle:
                for place in sorted({size * number // blocks for number in range(blocks)}):
                    handle.seek(place)
                    digest.update(handle.read(_BLOCK))
    except (OSError, ToolkitError) as error:
        return {"path": path, "error": str(error)}
    if not names:
        return {"path": path, "error": "No such file or directory"}
    return {"path": path, "hash": digest.hexdigest()[:16], "bytes": total}


def _disk(folder: Path) -> dict[str, Any]:
    """Return free bytes of where a folder is or would be made, and whether it may be written to, found by writing."""
    existing, error = nearest(folder), ""
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as caught:
        error = caught.strerror or str(caught)
    return {"path": str(folder.absolute()), "free": shutil.disk_usage(existing).free, "error": error}


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
