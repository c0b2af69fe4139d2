"""DeepSpeed's compiled ops: which a config needs, which are built, and what this machine lacks to build the others.

They are compiled at first use, in one to three minutes, by a compiler that not every machine has. So `optim.torch =
auto` chooses PyTorch's own Adam where states are not offloaded, and its own Lion where DeepSpeed's cannot be built.
Imports neither torch nor deepspeed. A build that is killed leaves a lock behind, and every later run would wait for it
for ever, in silence.
"""

import dataclasses
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from toolkit.config import schema
from toolkit.config.devices import CUDA, device_here, torch_build, torch_file
from toolkit.config.load import LoadedConfig
from toolkit.config.rule_tables import OPTIMIZERS, has_bf16_states
from toolkit.messages import LaunchError, tr

_KINDS = {schema.OptimizerName.adamw: "adam", schema.OptimizerName.adam: "adam", schema.OptimizerName.muon: "adam"}
_KINDS[schema.OptimizerName.lion] = "lion"
"""Optimizers that DeepSpeed has ops for; for Muon, the Adam of its other parameters."""


def resolve_optimizer(cfg: schema.RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[schema.RunConfig, str]:
    """Return a config whose `optim.torch` is true or false, and the reason for that if it was auto, else ""."""
    if cfg.optim.torch != schema.AUTO:
        return cfg, ""
    accelerator, is_torch = device_here(environ), False
    if has_bf16_states(cfg):
        is_torch, reason = True, tr("its states are in bf16")
    elif cfg.optim.name not in _KINDS:
        reason = tr("{name} is neither's", name=cfg.optim.name.value)
    elif cfg.zero.offload_optimizer.device is not schema.Device.none:
        reason = tr("the optimizer is offloaded")
    elif accelerator == "cpu":
        is_torch, reason = True, tr("no GPU here")
    elif accelerator != CUDA:
        reason = tr("DeepSpeed's accelerator {name} brings its own", name=accelerator)
    elif OPTIMIZERS[cfg.optim.name].is_adam:
        # 6.2 billion parameters in 50 ms of a step of 3.6 s on an H200, 82 % of the speed of a copy (torch 2.11;
        # benchmarks/2026-11-29-gpu.json).
        is_torch, reason = True, tr("DeepSpeed's is not faster")
    else:
        op = _optimizer_op(cfg, accelerator)
        tools = [] if built_ops([op], environ) else lacking_tools([op], environ)
        reason = tr("{tools} not found here", tools=", ".join(tools)) if tools else tr("there is a GPU and a compiler")
        is_torch = bool(tools)
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, torch=is_torch)), reason


def _optimizer_op(cfg: schema.RunConfig, accelerator: str) -> str:
    """Return the op of DeepSpeed's optimizer on an accelerator: "fused_adam", or "cpu_adam" if it is offloaded."""
    on_gpu = cfg.zero.offload_optimizer.device is schema.Device.none and accelerator != "cpu"
    return f"{'fused' if on_gpu else 'cpu'}_{_KINDS[cfg.optim.name]}"


def needed_ops(cfg: schema.RunConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ops that DeepSpeed uses for a recipe, by the names under which it builds them."""
    cfg, _ = resolve_optimizer(cfg, environ)
    offload_devices = {cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device}
    accelerator, ops = device_here(environ), []
    if not cfg.optim.torch and cfg.optim.name in _KINDS:
        op = _optimizer_op(cfg, accelerator)
        ops += [op] if accelerator == CUDA or op.startswith("cpu_") else []  # for NPUs and others they are Python
    if schema.Device.nvme in offload_devices:
        ops.append("async_io")
    if cfg.distributed.cpu_shared_memory and accelerator == "cpu":
        ops.append("deepspeed_shm_comm")
    if accelerator == CUDA:
        if schema.Device.nvme in offload_devices and cfg.zero.aio.use_gds:
            ops.append("gds")
        if cfg.zero.zero_quantized_weights or cfg.zero.zero_quantized_gradients:
            ops.append("quantizer")
        if cfg.compile.deepcompile:
            ops.append("dc")
    return ops


def built_ops(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the ops among `names` that are compiled already, when DeepSpeed was installed or by an earlier run."""
    shipped, root = set[str](), extensions_dir(environ)
    with suppress(OSError, metadata.PackageNotFoundError):  # importing DeepSpeed, which knows it, takes seconds
        file = metadata.distribution("deepspeed").locate_file("deepspeed/git_version_info_installed.py")
        shipped.update(re.findall(r"'(\w+)': True", Path(str(file)).read_text(encoding="utf-8")))
    return [name for name in names if name in shipped or (root / name / f"{name}.so").exists()]


def extensions_dir(environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> Path:
    """Return where ops are built, one directory each: TORCH_EXTENSIONS_DIR, or one in the user's cache for this Python,
    PyTorch, CUDA, C library, CPU and GPUs. Nodes share home directories, and ops are compiled for one node's CPU and
    GPU; PyTorch's default tells Python and CUDA alone apart (torch 2.13, cpp_extension.py, _get_build_directory).
    """
    if named := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    torch, cuda = torch_build("__version__"), torch_build("(?:cuda|hip)")
    traits = [platform.machine(), *platform.libc_ver()]  # what of this machine goes into the name, as a digest
    with suppress(OSError):  # Linux alone has it; flags on x86, Features on ARM
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        traits.append(next((line for line in lines if line.startswith(("flags", "Features"))), ""))
    for file in sorted((proc / "driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            model = re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8", errors="replace"))
            traits += [model[1]] if model and model[1] not in traits else []
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("\n".join(traits).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return cache / "torch_extensions" / f"{python}-torch{torch}-cuda{cuda or 'none'}-{digest}"


def lacking_tools(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what building some ops needs and this machine does not have."""
    if not names:
        return []
    from toolkit.config.compilers import tools_for

    return [name for name, is_found in tools_for(names, environ).items() if not is_found]


def check_compiler(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if DeepSpeed has to compile an op for a recipe, and a tool for that is missing here."""
    names = needed_ops(loaded.cfg, environ)
    built = built_ops(names, environ)
    missing = [name for name in names if name not in built and lacking_tools([name], environ)]
    if not missing:
        return
    from toolkit.config.compilers import how_to_install

    tools = lacking_tools(missing, environ)
    raise loaded.error(
        _WITHOUT.get(missing[0], _WITHOUT_OPTIMIZER)[0],
        "DeepSpeed has to compile {ops} for this recipe, and {tools} is missing on this machine. Install it "
        "({commands}), or set {other}.",
        ops=", ".join(missing),
        tools=", ".join(tools),
        commands=how_to_install(tools),
        other=without_ops(missing),
    )


_WITHOUT_OPTIMIZER = ("optim.torch", "optim.torch=true")
_WITHOUT = {
    "async_io": ("zero.offload_optimizer.device", "zero=stage3_offload"),
    "deepspeed_shm_comm": ("distributed.cpu_shared_memory", "distributed.cpu_shared_memory=false"),
    "quantizer": (
        "zero.zero_quantized_weights",
        "zero.zero_quantized_weights=false zero.zero_quantized_gradients=false",
    ),
    "dc": ("compile.deepcompile", "compile.deepcompile=false"),
    "gds": ("zero.aio.use_gds", "zero.aio.use_gds=false"),
}
"""Op -> (the key that needs it, what to set in order to do without); of all others _WITHOUT_OPTIMIZER."""


def without_ops(names: Iterable[str]) -> str:
    """Return what to set in order to do without some ops."""
    return " ".join(dict.fromkeys(_WITHOUT.get(name, _WITHOUT_OPTIMIZER)[1] for name in names))


OPS = (
    *("fused_adam", "fused_lion", "cpu_adam", "cpu_lion", "async_io", "gds", "quantizer", "dc"),
    *("deepspeed_shm_comm", "deepspeed_ccl_comm", "utils"),
)
"""Names under which DeepSpeed 0.19.8 builds what a run may use."""
YOUNG_S = 120.0
"""Seconds after the last write in a folder for which a build there, perhaps on another machine, may still run."""


def check_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> None:
    """Raise LaunchError if an op's build lock is left that no process holds.

    PyTorch's builder makes a file `lock` and polls for its end without a limit (torch 2.13, file_baton.py). While
    it works, ninja and the compiler have the build's folder as their working folder. Newer ones lock that file by the
    system, which frees it when its holder ends, and leave it there after each build (torch 2.14.1, cpp_extension.py).
    """
    for lock, age_s in stale_build_locks(environ, proc):
        raise LaunchError(
            "{lock} was left {minutes} minutes ago by a build that did not come to its end, and no process on this "
            "machine is building there now: this run would wait for it for ever. Remove it:  rm {lock}",
            lock=lock,
            minutes=f"{age_s / 60:,.0f}",
        )


def stale_build_locks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Iterator[tuple[Path, float]]:
    """Yield the build locks that no process holds and PyTorch waits for, and seconds since their folders changed."""
    if "FileBaton(" not in torch_file("torch/utils/cpp_extension.py"):  # newer ones lock by the system, see above
        return
    for lock in (extensions_dir(environ) / name / "lock" for name in OPS):
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
