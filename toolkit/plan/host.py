"""Memory of a machine and bytes on its disk. No torch."""

from collections import Counter
from dataclasses import dataclass

from toolkit.config.schema import Device, Init, RunConfig
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.memory import WIDTHS, Parts, RankMemory
from toolkit.plan.parameters import Outline

PROCESS_BYTES = int(0.6 * GIB)
"""Private memory of a rank with torch, DeepSpeed and transformers imported."""
CUDA_BYTES = 2 * GIB
"""What CUDA adds to it in host memory; by what others report, not measured here."""
HEAP_SHARE = 0.5
"""Of what comes and goes within a step, what the heap of a CPU rank keeps beyond it: glibc takes blocks of up to 32 MiB
from one heap, whose holes fit no larger block. Measured: 0.45 on packed rows of 1,024 tokens, and nothing of it with
MALLOC_MMAP_THRESHOLD_=262144."""
_RESIDENT = ("weights", "second weights", "optimizer")
WORKER_BYTES = int(0.3 * GIB)
"""Of a data-loader process."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What one machine holds; without the pages of the tokenised data, which give way to anything else."""

    phases: dict[str, Parts]
    """Bytes by kind while weights load, while steps are done, and while is exported."""

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(sum(parts.values()) for parts in self.phases.values())


def heap_bytes(memory: RankMemory) -> int:
    """Return what the heap of a rank on processors keeps beyond its tensors."""
    return int(HEAP_SHARE * sum(size for kind, size in memory.device["step"].items() if kind not in _RESIDENT))


def process_bytes(memory: RankMemory) -> int:
    """Return the memory of a rank on processors: the process, its tensors, and what the heap keeps."""
    return PROCESS_BYTES + memory.peak(memory.worst) + heap_bytes(memory)


def plan_host(outline: Outline, cfg: RunConfig, machine: Machine, memory: RankMemory) -> HostMemory:
    """Return the memory of one machine.

    Args:
        outline: the model and what is trained in it.
        cfg: checked config.
        machine: how many ranks it has.
        memory: of one of its ranks.
    """
    ranks = machine.ranks
    always: Parts = {"processes": ranks * (PROCESS_BYTES + (0 if machine.on_cpu else CUDA_BYTES))}
    if cfg.data.num_workers:
        always["loaders"] = ranks * cfg.data.num_workers * WORKER_BYTES
    offloaded = {kind: ranks * size for kind, size in memory.host.items()}
    steps = Counter(always) + Counter(offloaded)
    if machine.on_cpu:
        steps.update({"tensors": ranks * memory.peak("step"), "heap": ranks * heap_bytes(memory)})
    if cfg.checkpoint.asynchronous:
        steps["copies"] = ranks * checkpoint_bytes(outline, cfg) // machine.world_size
    loading = Counter(always) + Counter({"weights": ranks * _loaded(outline, cfg, machine.world_size)})
    if machine.on_cpu:
        loading["read"] = ranks * memory.device["load"].get("read", 0)
    exporting = Counter(steps)
    if cfg.checkpoint.export:
        exporting["exported"] = export_bytes(outline, cfg)  # on the first rank
        if cfg.checkpoint.verify_export:  # an adapter, or a layer of a model at a time
            layer = WIDTHS[cfg.precision.dtype] * outline.largest_layer()
            exporting["read again"] = min(layer, exporting["exported"])
    return HostMemory({"load": dict(loading), "step": dict(steps), "export": dict(exporting)})


def _loaded(outline: Outline, cfg: RunConfig, world_size: int) -> int:
    """Return the bytes of weights that a rank has in host memory before they go to its device."""
    width = WIDTHS[cfg.precision.dtype]
    if cfg.model.init is Init.random:
        return 4 * outline.num_parameters
    if cfg.zero.stage == 3:
        return width * max(outline.vocabulary[0] * outline.vocabulary[1], outline.num_parameters // world_size)
    return width * outline.num_parameters


def checkpoint_bytes(outline: Outline, cfg: RunConfig) -> int:
    """Return the bytes of one checkpoint, of all ranks: trained weights, and states in float32."""
    states = 12 if cfg.zero.stage or WIDTHS[cfg.precision.dtype] == 2 else 8
    weights = WIDTHS[cfg.precision.dtype] if cfg.zero.stage < 3 else 0
    return (states + weights) * outline.num_trained


def export_bytes(outline: Outline, cfg: RunConfig) -> int:
    """Return the bytes of what is exported: the model, or what was added to it."""
    whole = all(name in outline.trained for name in outline.shapes) or cfg.tuning.method.value == "freeze"
    return WIDTHS[cfg.precision.dtype] * (outline.num_parameters if whole else outline.num_trained)


def offloads_to_disk(cfg: RunConfig) -> bool:
    """Whether DeepSpeed's states lie on an NVMe disk."""
    return Device.nvme in (cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device)
