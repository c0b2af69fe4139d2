"""Time the loss of one micro-batch and its memory, with all logits and without: output layer and cross entropy alone.

OMP_NUM_THREADS=1 python -m benchmarks.loss tokens=2048 trained=0.5 hidden=1024 vocab=65024 dtype=float32
On a GPU the memory is what PyTorch held at most, on a CPU what the process grew by. Words: see DEFAULTS.
"""

import resource
import statistics
import sys
import time
from typing import Any

import torch
from torch.nn import functional

from toolkit import children
from toolkit.distributed import accelerator
from toolkit.models import loss_kernels

DEFAULTS: dict[str, Any] = {
    "tokens": 2048,
    "trained": 0.5,
    "hidden": 1024,
    "vocab": 65024,
    "dtype": "float32",
    "frozen": 0,
    "chunk_mib": loss_kernels.CHUNK_BYTES / 2**20,
    "rounds": 5,
}


def measure(way: str, given: dict[str, Any]) -> None:
    """Print seconds per forward and backward pass, and bytes."""
    loss_kernels.CHUNK_BYTES = int(given["chunk_mib"] * 2**20)
    device, dtype = accelerator.device_alone().type, getattr(torch, given["dtype"])
    torch.manual_seed(0)
    hidden = torch.randn(given["tokens"], given["hidden"], device=device).to(dtype).requires_grad_()
    weight = (torch.randn(given["vocab"], given["hidden"], device=device) * 0.02).to(dtype)
    weight.requires_grad_(not given["frozen"])
    places = torch.arange(int(given["tokens"] * (1 - given["trained"])), given["tokens"], device=device)
    targets = torch.randint(given["vocab"], (given["tokens"],), device=device)
    targets[: len(targets) - len(places)] = -100
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(given["rounds"]):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        if way == "logits":
            loss = functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="sum")
        else:
            loss = loss_kernels.chunked_loss_sum(hidden.index_select(0, places), weight, None, targets[places])
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - started)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    most = torch.cuda.max_memory_allocated() if device == "cuda" else grown
    sys.stdout.write(f"{way:8} loss {value:.6g}  {statistics.median(seconds):.3f} s  {most / 2**20:,.0f} MiB\n")
    sys.stdout.flush()


if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    settings = {name: type(value)(words.get(name, value)) for name, value in DEFAULTS.items()}
    for name in ("logits", "chunked"):
        children.process(measure, name, settings).join()
