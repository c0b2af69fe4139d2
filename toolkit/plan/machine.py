"""The machines that a run is planned for, and datasheets of their GPUs (gpus.yaml). No torch."""

import functools
import os
import re
from dataclasses import dataclass

from toolkit.messages import read_table

GIB = 1 << 30
RESERVE = 0.05
"""Fraction of a GPU's memory that is lost to fragmentation."""
CONTEXT_BYTES = GIB
"""GPU memory of CUDA, cuBLAS and NCCL; 0.5 to 1.5 GiB by others' reports, not measured here."""
_SIZE_TOLERANCE = 0.1
"""Relative difference allowed between the size in a name and the memory: an L40S with 45 GiB is sold as 48 GB."""
_QUALIFIERS = {"d", "laptop", "max", "mig", "super", "ti"}
"""Words in a name that make it another GPU."""
_BF16 = 8.0
"""Smallest compute capability with bf16."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Datasheet of a GPU; 0 is unknown."""

    name: str
    """Name in gpus.yaml, whose words `find_gpu` searches."""
    memory_bytes: int
    """As nvidia-smi shows it."""
    capability: float = 0.0
    """Compute capability; an NPU has none."""
    half_flops: float = 0.0
    """FLOP/s, of bf16 and fp16."""
    fp32_flops: float = 0.0
    """FLOP/s, without tensor cores."""
    memory_bytes_per_s: float = 0.0
    """Bandwidth of its memory."""
    link_bytes_per_s: float = 0.0
    """Bandwidth to the other GPUs of a node, in one direction."""

    @property
    def lacks_bf16(self) -> bool:
        """Whether it is known to have no bf16."""
        return 0 < self.capability < _BF16

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of `bf16`, `fp16` or `fp32`; 0 if unsupported or unknown."""
        bf16_flops = 0.0 if self.lacks_bf16 else self.half_flops
        return {"bf16": bf16_flops, "fp16": self.half_flops, "fp32": self.fp32_flops}[dtype]


@dataclass(frozen=True, slots=True)
class Machine:
    """The nodes of a run, which are alike, and their GPUs."""

    ranks: int
    """Ranks of a node: GPUs, or processes on CPUs."""
    memory_bytes: int
    """Memory of a GPU; on CPUs a rank's share of the node's."""
    card: Gpu | None
    """The GPU's datasheet, None if it is not known."""
    nodes: int = 1
    host_bytes: int = 0
    """Host memory of a node; 0: unknown."""
    on_cpu: bool = False
    context_bytes: int = CONTEXT_BYTES
    """Part of a GPU's memory that is never available for tensors."""
    uneven_ranks: int = 0
    """Total number of ranks if nodes have different numbers of them, else 0."""

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.uneven_ranks or self.ranks * self.nodes

    @property
    def usable_bytes(self) -> int:
        """Part of a rank's memory that is available for tensors."""
        if self.on_cpu:
            return self.memory_bytes
        return int(self.memory_bytes * (1 - RESERVE)) - self.context_bytes

    @property
    def name(self) -> str:
        """Description for users, such as `2 x 8 x A100 80GB`."""
        card = self.card.name if self.card else ""
        gpu = "CPU" if self.on_cpu else card
        names_memory = gpu.endswith("GB") or "GB " in gpu
        memory = "" if names_memory else f"{self.memory_bytes / GIB:.0f} GiB"
        return " ".join(filter(None, [f"{self.nodes} x {self.ranks} x", gpu, memory]))


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of gpus.yaml."""
    return tuple(
        Gpu(
            name=name,
            memory_bytes=int(row["memory_gib"] * GIB),
            capability=row.get("capability", 0.0),
            half_flops=row.get("half_tflops", 0) * 1e12,
            fp32_flops=row.get("fp32_tflops", 0) * 1e12,
            memory_bytes_per_s=row.get("memory_gb_s", 0) * 1e9,
            link_bytes_per_s=row.get("link_gb_s", 0) * 1e9,
        )
        for name, row in read_table("plan/gpus.yaml").items()
    )


def gpu_by_driver(memory_bytes: int, name: str, capability: str = "") -> Gpu:
    """Return a GPU by what its driver reports, with its datasheet if there is one."""
    number = float(capability) if re.fullmatch(r"\d+\.\d+", capability) else 0.0
    return find_gpu(name) or Gpu(name, memory_bytes, number)


def find_gpu(name: str) -> Gpu | None:
    """Return a GPU by the name that torch or nvidia-smi gives it, such as "NVIDIA A100-SXM4-80GB"; None if unknown.

    Parts of a GPU (MIG, vGPU), notebooks' GPUs and the like are unknown, as they are slower than the GPU of that name;
    so are GPUs with another size of memory.
    """
    words = identifying_words(name)
    words_and_sizes = words | {f"{word}b" for word in words if re.fullmatch(r"\d+g", word)}  # A100-80G
    named = [gpu for gpu in known_gpus() if identifying_words(gpu.name) <= words_and_sizes]
    best = max(named, key=lambda gpu: len(identifying_words(gpu.name)), default=None)
    if best is None:
        return None
    more_words = words - identifying_words(best.name)
    is_part = any(re.fullmatch(r"\d+[qcab]", word) for word in more_words)  # a vGPU: A10-24Q
    sizes = [int(word.removesuffix("gb")) * GIB for word in more_words if re.fullmatch(r"\d+gb", word)]
    has_other_size = any(abs(size / best.memory_bytes - 1) > _SIZE_TOLERANCE for size in sizes)
    return None if is_part or has_other_size or more_words & _QUALIFIERS else best


def identifying_words(name: str) -> set[str]:
    """Return the words that identify a GPU, the same for `RTX4090`, `rtx 4090` and `NVIDIA GeForce RTX 4090`."""
    name = re.sub(r"nvidia|geforce|rtx|ascend", " ", name.lower()).replace(" gb", "gb")
    # A space before what follows a number: 4090d, pro6000, 100sxm.
    name = re.sub(r"(?<=\d{4})(?=[a-z])|(?<=pro)(?=\d)|(?<=\d)(?=sxm|pcie|nvl)", " ", name)
    return set(re.findall(r"[a-z0-9]+", name))


def host_memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
