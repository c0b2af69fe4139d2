"""What the tests of this folder run on, what of it is there, and how they start training on it."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Finished, forked, run
from shared import WORKER

from toolkit.config.native_ops import lacking_tools

DEVICE = "cuda" if os.environ.get("DS_ACCELERATOR") == "cuda" else "cpu"
"""Of DS_ACCELERATOR, or of pytest's --device."""
CPU_LIMIT_S = 600.0
LIMIT_S = 420.0 if DEVICE == "cuda" else CPU_LIMIT_S
"""Of a launch; on CPUs, where the controls of a GPU's runs are, too, the machine may be busy."""

# what a test needs -> why it is skipped without it
LACKS = {
    "cuda": "it needs a GPU",
    "gpus": "it needs two GPUs and NCCL",
    "fp8": "it needs a GPU of compute capability 8.9 or higher",
    "fp8-rows": "it needs a GPU of compute capability 8.9 or higher, or torch 2.13 on a CPU",
    "nvcc": "it needs the CUDA toolkit, to build DeepSpeed's ops",
    "libaio": "it needs DeepSpeed's async_io (libaio)",
    "liger_kernel": "it needs a GPU and liger-kernel",
    "bitsandbytes": "it needs a GPU and bitsandbytes",
    "vllm": "it needs a GPU and vLLM",
}


@cache
def lacks(need: str) -> str:
    """Return why a test that needs this is skipped; "" if it is not."""
    if need == "libaio":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        there = AsyncIOBuilder().is_compatible(verbose=False)
    elif need.startswith("fp8"):
        on_cpu = need == "fp8" or torch.__version__ >= (2, 13)
        there = on_cpu if DEVICE == "cpu" else torch.cuda.get_device_capability() >= (8, 9)
    elif need == "nvcc":
        there = DEVICE == "cpu" or not lacking_tools(["fused_adam"])
    elif need == "gpus":
        there = DEVICE == "cuda" and torch.cuda.device_count() > 1
    else:
        there = not need or (DEVICE == "cuda" and (need == "cuda" or importlib.util.find_spec(need) is not None))
    return "" if there else LACKS[need]


def needs(need: str) -> Any:
    """Mark a test, or the cell of one, that is skipped where something is not there."""
    return pytest.mark.skipif(bool(lacks(need)), reason=lacks(need) or "it is here")


def cells_of(table: dict[str, tuple[str, list[str]]]) -> list[Any]:
    """Return the names of cells as parameters of a test, each skipped where what it needs is not there."""
    return [pytest.param(name, marks=needs(need)) if need else name for name, (need, _) in table.items()]


def train(cases: Sequence[dict[str, Any]], folder: Path, name: str, device: str = DEVICE, ranks: int = 1) -> Finished:
    """Run cases of sessions_worker.py in one launch; a rank alone starts under no launcher."""
    listing = folder / f"cases-{device}-{name}.json"
    listing.write_text(json.dumps(list(cases)))
    return launch([WORKER, str(listing)], folder, device, ranks)


def launch(words: Sequence[str], folder: Path, device: str = DEVICE, ranks: int = 1, **extra: str) -> Finished:
    """Run a program on ranks of a device. A process that has used a GPU cannot be forked, so CPU ranks alone are."""
    alone = (
        [sys.executable, "-m", "deepspeed.launcher.runner", f"--num_gpus={ranks}"] if ranks > 1 else [sys.executable]
    )
    command = forked(ranks if ranks > 1 else 0, *words) if device == "cpu" else [*alone, *words]
    limit = CPU_LIMIT_S if device == "cpu" else LIMIT_S
    return run(command, cwd=folder, timeout_s=limit, DS_ACCELERATOR=device, **extra)
