"""DeepSpeed's compiled ops: which a config needs, which are built, and what this machine lacks to build the others.

They are compiled at first use, in one to three minutes, by a compiler that not every machine has. So
`optim.torch = auto` chooses PyTorch's own Adam where DeepSpeed's would gain nothing or cannot be built. Imports
neither torch nor deepspeed.

A build that is killed leaves a lock behind, and every later run would wait for it for ever, in silence.
"""

import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import AUTO, Device, OptimizerName, RunConfig
from toolkit.messages import LaunchError, tr

_KINDS = {OptimizerName.adamw: "adam", OptimizerName.adam: "adam", OptimizerName.muon: "adam"}
_KINDS[OptimizerName.lion] = "lion"
"""Optimizers that DeepSpeed has ops for; of Muon the Adam beside it."""


def device(environ: Mapping[str, str] = os.environ) -> str:
    """Return what DeepSpeed will train on here, found without torch: DS_ACCELERATOR, or cuda, or cpu."""
    if named := environ.get("DS_ACCELERATOR"):
        return named
    is_hidden = environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    has_gpu = bool(shutil.which("nvidia-smi")) or any(Path("/dev").glob("nvidia[0-9]*"))
    return "cuda" if has_gpu and not is_hidden else "cpu"


def with_optimizer(cfg: RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[RunConfig, str]:
    """Return a config whose `optim.torch` is true or false, and why auto is that here; "" where it was given."""
    if cfg.optim.torch != AUTO:
        return cfg, ""
    kind, is_torch = device(environ), False
    if cfg.optim.name not in _KINDS:
        reason = tr("{name} is neither's", name=cfg.optim.name.value)
    elif cfg.zero.offload_optimizer.device is not Device.none:
        reason = tr("the optimizer is offloaded")
    elif kind == "cpu":
        is_torch, reason = True, tr("no GPU here")
    else:
        op = _optimizer_op(cfg, kind)
        tools = lacking([op], environ) if kind == "cuda" and not built([op], environ) else []
        reason = tr("{tools} not found here", tools=", ".join(tools)) if tools else tr("there is a GPU and a compiler")
        is_torch = bool(tools)
    return replace(cfg, optim=replace(cfg.optim, torch=is_torch)), reason


def _optimizer_op(cfg: RunConfig, kind: str) -> str:
    on_gpu = cfg.zero.offload_optimizer.device is Device.none and kind != "cpu"
    return f"{'fused' if on_gpu else 'cpu'}_{_KINDS[cfg.optim.name]}"


def needed(cfg: RunConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ops that DeepSpeed uses for a recipe, by the names under which it builds them."""
    cfg, _ = with_optimizer(cfg, environ)
    offloads = {cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device}
    kind, found = device(environ), []
    if not cfg.optim.torch and cfg.optim.name in _KINDS:
        found.append(_optimizer_op(cfg, kind))
    if Device.nvme in offloads:
        found.append("async_io")
    if cfg.distributed.cpu_shared_memory and kind == "cpu":
        found.append("deepspeed_shm_comm")
    return found


def built(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return those that are compiled already, with DeepSpeed's installation or by an earlier run."""
    shipped, folders = set[str](), roots(environ)
    with suppress(OSError, metadata.PackageNotFoundError):  # importing DeepSpeed, which knows it, takes seconds
        file = metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")
        shipped.update(re.findall(r"'(\w+)': True", Path(str(file)).read_text(encoding="utf-8")))
    return [name for name in names if name in shipped or any((root / name / f"{name}.so").exists() for root in folders)]


def roots(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories in which PyTorch builds ops, one directory each."""
    named = environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(named)] if named else sorted((cache / "torch_extensions").glob("py*"))


def lacking(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what building some ops needs and this machine does not have."""
    has = {
        "g++": shutil.which(environ.get("CXX", "g++")),
        "ninja": shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists(),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    if "async_io" in names:
        has["libaio.h"] = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    if any(name.startswith("fused_") for name in names):
        has["nvcc"] = shutil.which("nvcc") or Path(environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc").exists()
    return [name for name, found in has.items() if not found] if names else []


def how_to_install(tools: Sequence[str]) -> str:
    """Return what to type, or to get, for tools of `lacking`."""
    commands = {
        "g++": "apt install g++",
        "ninja": "pip install ninja",
        "Python.h": "apt install python3-dev",
        "libaio.h": "apt install libaio-dev",
        "nvcc": tr("the CUDA toolkit of torch.version.cuda, with CUDA_HOME set"),
    }
    return "; ".join(commands[tool] for tool in tools)


def check_compiler(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check that what DeepSpeed has to compile for a recipe can be compiled here; if not, say what to install."""
    names = needed(loaded.cfg, environ)
    missing = [name for name in names if name not in built(names, environ)]
    tools = lacking(missing, environ)
    if not tools:
        return
    instead = {"async_io": "zero=stage3_offload", "deepspeed_shm_comm": "distributed.cpu_shared_memory=false"}
    key = {"async_io": "zero.offload_optimizer.device", "deepspeed_shm_comm": "distributed.cpu_shared_memory"}
    raise loaded.error(
        key.get(missing[0], "optim.torch"),
        "DeepSpeed has to compile {ops} for this recipe, and {tools} is missing on this machine. Install it "
        "({commands}), or set {other}.",
        ops=", ".join(missing),
        tools=", ".join(tools),
        commands=how_to_install(tools),
        other=instead.get(missing[0], "optim.torch=true"),
    )


OPS = ("fused_adam", "cpu_adam", "async_io", "gds", "deepspeed_shm_comm", "deepspeed_ccl_comm", "utils")
"""Names under which DeepSpeed 0.19.8 builds what a run may use."""
YOUNG_S = 120.0
"""Where something was written so recently somebody may be building: here, or on a machine that shares the folder."""


def check_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> None:
    """Refuse to start beside a lock that nobody holds.

    PyTorch's builder makes a file `lock` and polls for its end without a limit (torch 2.13, utils/file_baton.py). While
    it works, ninja and the compiler have the build's folder as their working folder.
    """
    for lock, age_s in stale_build_locks(environ, proc):
        raise LaunchError(
            "{lock} was left {minutes} minutes ago by a build that did not come to its end, and no "
            "process on this machine is building there now: this run would wait for it for ever. "
            "Remove it:  rm {lock}",
            lock=lock,
            minutes=f"{age_s / 60:,.0f}",
        )


def stale_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Iterator[tuple[Path, float]]:
    """Yield the locks that nobody holds, and the seconds since anything happened beside them."""
    for root in roots(environ):
        for lock in (root / name / "lock" for name in OPS):
            try:
                # Another machine may be building in a folder that is shared: then something in it is new.
                age_s = time.time() - max(path.stat().st_mtime for path in (lock, *lock.parent.iterdir()))
            except OSError:  # there is none, or it has just been released
                continue
            if age_s <= YOUNG_S:
                continue
            builds = set[Path]()
            for process in proc.glob("[0-9]*"):
                with suppress(OSError):  # gone, or somebody else's
                    builds.add((process / "cwd").readlink())
            if lock.parent.resolve() not in builds:
                yield lock, age_s
