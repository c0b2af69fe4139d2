"""The machines that a run is planned for, and datasheets of their GPUs (gpus.yaml). No torch."""

import difflib
import functools
import os
import re
import subprocess
from dataclasses import dataclass

from toolkit import children
from toolkit.config.schema import Dtype, Fp8, PrecisionConfig
from toolkit.messages import ConfigError, joined, listed, read_table, tr

GIB = 1 << 30
RESERVE = 0.05
"""Fraction of a GPU's memory that is lost to fragmentation."""
CONTEXT_BYTES = GIB
"""GPU memory of CUDA, cuBLAS and NCCL; 0.5 to 1.5 GiB by others' reports, not measured here."""
_SIZE_TOLERANCE = 0.1
"""Relative difference allowed between the size in a name and the memory: an L40S with 45 GiB is sold as 48 GB."""
_QUALIFIERS = {"d", "laptop", "max", "mig", "super", "ti"}
"""Words in a name that make it another GPU."""
_BF16, _FP8 = 8.0, 8.9
"""Smallest compute capability with bf16, with FP8."""


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
        gpu = "CPU" if self.on_cpu else self.card.name if self.card else ""
        memory = "" if gpu.endswith("GB") or "GB " in gpu else f"{self.memory_bytes / GIB:.0f} GiB"
        return " ".join(filter(None, [f"{self.nodes} x {self.ranks} x", gpu, memory]))


def parse_bytes(text: str, key: str) -> int:
    """Return the bytes of a size such as `80GB` or `1.5TB`, in powers of 1024. `key`: for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise ConfigError("{key} = {value} is no size: write 80GB or 1TB.", key=key, value=text)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def parse_machine(gpus: str, nodes: int, host_memory: str) -> Machine:
    """Return `nodes` nodes with `gpus` each (8x80GB, 8xA100-80GB, 4xH100, 2xcpu); `host_memory` "": unknown."""
    host = parse_bytes(host_memory, "host_memory") if host_memory else 0
    counted = re.fullmatch(r"(\d+)\s*[xX*×]\s*(.+)", gpus)
    ranks, gpu_name = (int(counted[1]), counted[2].strip()) if counted else (1, gpus.strip())
    card = find_gpu(gpu_name)
    if not ranks or not (card or counted) or (gpu_name.isdecimal() and not card):
        size = re.fullmatch(r"(\d+)" if counted else r"(\d+)GB?", gpu_name, re.IGNORECASE)
        form = tr("gpus = {value} should be the GPUs of one machine: 8x80GB, 8xA100-80GB, 4xH100 or 2xcpu.", value=gpus)
        guess = tr("Did you mean '{name}'?", name=f"{ranks}x{size[1]}GB") if size and ranks else ""
        raise ConfigError(joined(form, guess))
    if gpu_name.lower() == "cpu":
        host = host or host_memory_bytes()
        return Machine(ranks, host // ranks, None, nodes, host, on_cpu=True)
    if card:
        return Machine(ranks, card.memory_bytes, card, nodes, host)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B?", gpu_name, re.IGNORECASE):
        return Machine(ranks, parse_bytes(gpu_name, "gpus"), None, nodes, host)
    names = {gpu.name.lower(): gpu.name for gpu in known_gpus()}
    similar = [
        name for name in names if _identifying_words(gpu_name) <= _identifying_words(name)
    ]  # "A100" without its memory
    nearest = difflib.get_close_matches(gpu_name.lower(), names, 5, 0)
    if not difflib.get_close_matches(gpu_name.lower(), nearest[:1], 1, 0.5):
        nearest = ["a100 80gb", "h100", "h20", "l40s", "rtx 4090"]  # like none: those that are usual
    raise ConfigError(
        "gpus: no datasheet of '{card}' is known. Write its memory, 8x80GB, or one of: {known}.",
        card=gpu_name,
        known=listed(*(names[name] for name in similar or nearest)),
    )


def this_machine(nodes: int = 1) -> Machine | None:
    """Return this machine as nvidia-smi describes it; None without an NVIDIA GPU."""
    try:
        completed = children.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in completed.stdout.splitlines()]
    cards = [row for row in rows if len(row) == 3 and row[1].isdecimal()]
    if not cards:
        return None
    least = min(int(mib) for _, mib, _ in cards) << 20
    kinds = {(name, capability) for name, _, capability in cards}
    card = gpu_by_driver(least, *kinds.pop()) if len(kinds) == 1 else None
    return Machine(len(cards), least, card, nodes, host_memory_bytes())


def check_precision(card: Gpu | None, precision: PrecisionConfig) -> None:
    """Raise ConfigError if it is known that GPUs lack a run's precision. FP8 is tried on ranks, too (layouts/fp8.py).

    PyTorch emulates bf16 on older GPUs (torch 2.13), but Triton's kernels do not.
    """
    if card and card.lacks_bf16 and precision.dtype is Dtype.bf16:
        raise ConfigError(
            "precision.dtype = bf16 needs GPUs of compute capability 8.0 or higher (A100, RTX 30 and newer), and "
            "{card} is older. Use precision=fp16 or precision=fp32.",
            card=card.name,
        )
    if card and 0 < card.capability < _FP8 and precision.fp8 is not Fp8.none:
        raise ConfigError(
            "precision.fp8 = {value} needs GPUs of compute capability 8.9 or higher (L40S, RTX 4090, H100, H200, "
            "B200), and {card} is older. Use precision=bf16.",
            value=precision.fp8.value,
            card=card.name,
        )


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
    words = _identifying_words(name)
    words_and_sizes = words | {f"{word}b" for word in words if re.fullmatch(r"\d+g", word)}  # A100-80G
    named = [gpu for gpu in known_gpus() if _identifying_words(gpu.name) <= words_and_sizes]
    best = max(named, key=lambda gpu: len(_identifying_words(gpu.name)), default=None)
    rest = words - _identifying_words(best.name) if best else words
    sizes = [int(word[:-2]) * GIB for word in rest if re.fullmatch(r"\d+gb", word)]
    is_part = any(re.fullmatch(r"\d+[qcab]", word) for word in rest)  # a vGPU: A10-24Q
    if best is None or is_part or rest & _QUALIFIERS:
        return None
    return None if any(abs(size / best.memory_bytes - 1) > _SIZE_TOLERANCE for size in sizes) else best


def _identifying_words(name: str) -> set[str]:
    """Return the words that identify a GPU, the same for `RTX4090`, `rtx 4090` and `NVIDIA GeForce RTX 4090`."""
    name = re.sub(r"nvidia|geforce|rtx|ascend", " ", name.lower()).replace(" gb", "gb")
    name = re.sub(r"(?<=\d{4})(?=[a-z])|(?<=pro)(?=\d)|(?<=\d)(?=sxm|pcie|nvl)", " ", name)
    return set(re.findall(r"[a-z0-9]+", name))


def host_memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
