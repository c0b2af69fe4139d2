"""The machine that a command plans for, as typed (`8xA100-80GB`) or as nvidia-smi describes this one, and whether its
GPUs have a run's precision. No torch.
"""

import difflib
import re
import subprocess

from toolkit import children
from toolkit.config.schema import Dtype, Fp8, PrecisionConfig
from toolkit.messages import ConfigError, joined, listed, tr
from toolkit.plan.machine import Gpu, Machine, find_gpu, gpu_by_driver, host_memory_bytes, identifying_words, known_gpus

_FP8 = 8.9
"""Smallest compute capability with FP8."""


def parse_bytes(text: str, key: str) -> int:
    """Return the bytes of a size such as `80GB` or `1.5TB`, in powers of 1024. `key`: for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise ConfigError("{key} = {value} is no size: write 80GB or 1TB.", key=key, value=text)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def parse_machine(gpus: str, nodes: int, host_memory: str) -> Machine:
    """Return `nodes` nodes with `gpus` each (8x80GB, 8xA100-80GB, 4xH100, 2xcpu); `host_memory` "": unknown, of CPUs
    that of this machine. ConfigError if `gpus` has another form, or names a GPU without datasheet.
    """
    host = parse_bytes(host_memory, "host_memory") if host_memory else 0
    counted = re.fullmatch(r"(\d+)\s*[xX*×]\s*(.+)", gpus)
    ranks, gpu_name = (int(counted[1]), counted[2].strip()) if counted else (1, gpus.strip())
    card = find_gpu(gpu_name)
    has_no_unit = gpu_name.isdecimal() and not card  # 8x80
    if not ranks or not (card or counted) or has_no_unit:
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
    raise ConfigError(
        "gpus: no datasheet of '{card}' is known. Write its memory, 8x80GB, or one of: {known}.",
        card=gpu_name,
        known=listed(*_similar_gpus(gpu_name)),
    )


def _similar_gpus(name: str) -> list[str]:
    """Return the known GPUs that a name may mean: those that have all its words ("A100", with 40GB or 80GB), else the
    five that are spelt most like it, or if none is like it some usual ones.
    """
    names = {gpu.name.lower(): gpu.name for gpu in known_gpus()}
    similar = [name_there for name_there in names if identifying_words(name) <= identifying_words(name_there)]
    nearest = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0)
    if not difflib.get_close_matches(name.lower(), nearest[:1], n=1, cutoff=0.5):
        nearest = ["a100 80gb", "h100", "h20", "l40s", "rtx 4090"]
    return [names[lower] for lower in similar or nearest]


def this_machine(nodes: int = 1) -> Machine | None:
    """Return `nodes` nodes like this one, by nvidia-smi (of unlike GPUs the least memory); None without NVIDIA GPU."""
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
