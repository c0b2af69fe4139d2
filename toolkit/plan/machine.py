"""The machines that a run is planned for, and what their GPUs can do by datasheet (gpus.yaml). No torch."""

import functools
import os
import re
import subprocess
from dataclasses import dataclass

from toolkit import children
from toolkit.config.schema import Fp8
from toolkit.messages import ConfigError, read_table

GIB = 1 << 30
RESERVE = 0.05
"""Of a card's memory that fragments of what has been freed take."""
CONTEXT_BYTES = GIB
"""What CUDA, cuBLAS and NCCL take of a card; 0.5 to 1.5 GiB by what others report, not measured here."""
_SIZE_OFF = 0.1
"""Of a GPU's memory by which the size in a name may differ: an L40S with its 45 GiB is sold as one of 48 GB."""
_QUALIFIERS = {"d", "laptop", "max", "mig", "super", "ti"}
"""Words that make a name mean another GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's datasheet."""

    name: str
    """The words by which it is found."""
    memory_bytes: int
    """As nvidia-smi shows it."""
    bf16_flops: float
    """FLOP/s; 0: it cannot."""
    fp16_flops: float
    fp32_flops: float
    """FLOP/s, without tensor cores; 0: not known."""
    memory_bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """To the other GPUs of a server, one direction."""
    has_fp8: bool

    def flops(self, dtype: str) -> float:
        """Return the peak of `bf16`, `fp16` or `fp32`, FLOP/s; 0: it cannot, or it is not known."""
        return {"bf16": self.bf16_flops, "fp16": self.fp16_flops, "fp32": self.fp32_flops}[dtype]


@dataclass(frozen=True, slots=True)
class Machine:
    """Machines that are alike, and their GPUs."""

    ranks: int
    """Of each machine: GPUs, or processes on CPUs."""
    memory_bytes: int
    """Of a GPU; on CPUs a rank's share of the machine's."""
    card: Gpu | None
    """The GPU's datasheet, None if it is not known."""
    nodes: int = 1
    host_bytes: int = 0
    """Memory of a machine; 0 is not known."""
    on_cpu: bool = False
    context_bytes: int = CONTEXT_BYTES
    """Of a GPU's memory that is not there for tensors at all."""
    uneven_ranks: int = 0
    """Ranks in all, where machines have different numbers of them; 0 where they are alike."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.uneven_ranks or self.ranks * self.nodes

    @property
    def usable_bytes(self) -> int:
        """What tensors may take of a rank's memory."""
        if self.on_cpu:
            return self.memory_bytes
        return int(self.memory_bytes * (1 - RESERVE)) - self.context_bytes

    @property
    def name(self) -> str:
        """For people."""
        gpu = "CPU" if self.on_cpu else self.card.name if self.card else ""
        memory = "" if gpu.endswith("GB") or "GB " in gpu else f"{self.memory_bytes / GIB:.0f} GiB"
        return " ".join(filter(None, [f"{self.nodes} x {self.ranks} x", gpu, memory]))


def parse_bytes(text: str, key: str) -> int:
    """Return the bytes of `80GB`, `1.5TB`; a K is 1024, as memory is sold."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError("{key} = {value} is no size: write 80GB or 1TB.", key=key, value=text)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def parse_machine(gpus: str, nodes: int, host_memory: str) -> Machine:
    """Return the machines of `gpus` per node (8x80GB, 8xA100-80GB, 4xH100, 2xcpu); a `host_memory` of "" is unknown."""
    host = parse_bytes(host_memory, "host_memory") if host_memory else 0
    found = re.fullmatch(r"(\d+)\s*[xX*×]\s*(.+)", gpus)
    if not found or not int(found[1]):
        raise ConfigError(
            "gpus = {value} should be the GPUs of one machine: 8x80GB, 8xA100-80GB, 4xH100 or 2xcpu.", value=gpus
        )
    ranks, what = int(found[1]), found[2].strip()
    if what.lower() == "cpu":
        host = host or own_memory()
        return Machine(ranks, host // ranks, None, nodes, host, on_cpu=True)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B?", what, re.IGNORECASE):
        return Machine(ranks, parse_bytes(what, "gpus"), None, nodes, host)
    if card := find_gpu(what):
        return Machine(ranks, card.memory_bytes, card, nodes, host)
    names = [gpu.name for gpu in known_gpus()]
    similar = [name for name in names if _words(what) <= _words(name)]  # "A100" without its memory
    raise ConfigError(
        "gpus: no datasheet of '{card}' is known. Write its memory, 8x80GB, or one of: {known}.",
        card=what,
        known=", ".join(similar or names),
    )


def this_machine(nodes: int = 1) -> Machine | None:
    """Return this machine as nvidia-smi describes it; None without an NVIDIA GPU."""
    try:
        ran = children.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines()]
    cards = [(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdecimal()]
    if not cards:
        return None
    least = min(mib for _, mib in cards)
    names = {name for name, _ in cards}
    return Machine(len(cards), least << 20, find_gpu(names.pop()) if len(names) == 1 else None, nodes, own_memory())


def check_fp8(card: Gpu | None, fp8: Fp8) -> None:
    """Raise ConfigError if it is known that a GPU has no FP8; others are tried on the ranks (models/fp8.py)."""
    if fp8 is not Fp8.none and card and not card.has_fp8:
        raise ConfigError(
            "precision.fp8 = {value} needs GPUs of compute capability 8.9 or higher (L40S, RTX 4090, H100, H200, "
            "B200), and {card} is older. Use precision=bf16.",
            value=fp8.value,
            card=card.name,
        )


@functools.cache
def known_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of gpus.yaml."""
    return tuple(
        Gpu(
            name=name,
            memory_bytes=int(row["memory_gib"] * GIB),
            bf16_flops=row["half_tflops"] * 1e12 if row.get("bf16", True) else 0.0,
            fp16_flops=row["half_tflops"] * 1e12,
            fp32_flops=row["fp32_tflops"] * 1e12,
            memory_bytes_per_s=row["memory_gb_s"] * 1e9,
            link_bytes_per_s=row["link_gb_s"] * 1e9,
            has_fp8=row.get("fp8", True),
        )
        for name, row in read_table("plan/gpus.yaml").items()
    )


def find_gpu(name: str) -> Gpu | None:
    """Return a GPU by the name that torch or nvidia-smi gives it, such as "NVIDIA A100-SXM4-80GB"; None if unknown.

    A part of a GPU (MIG, vGPU), a notebook's and the like are unknown: they are slower than what they are named after.
    So is one with another size of memory.
    """
    words = _words(name)
    if any(re.fullmatch(r"\d+[qcab]", word) for word in words):  # a vGPU: A10-24Q
        return None
    found = [gpu for gpu in known_gpus() if _words(gpu.name) <= words and not (words & _QUALIFIERS) - _words(gpu.name)]
    best = max(found, key=lambda gpu: len(_words(gpu.name)), default=None)
    sizes = [int(word[:-2]) * GIB for word in words - _words(best.name if best else "") if re.fullmatch(r"\d+gb", word)]
    return None if best and any(abs(size / best.memory_bytes - 1) > _SIZE_OFF for size in sizes) else best


def _words(name: str) -> set[str]:
    return {*re.findall(r"[a-z0-9]+", name.lower())} - {"rtx"}


def own_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
