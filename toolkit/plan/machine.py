"""The machines that a run is planned for. No torch."""

import os
import re
import subprocess
from dataclasses import dataclass

from toolkit import children
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.plan.cards import GIB, Card, find_card, similar

_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": GIB, "TB": 1 << 40}
RESERVE = 0.05
"""Of a card's memory that fragments of what has been freed take."""
CONTEXT_BYTES = GIB
"""What CUDA, cuBLAS and NCCL take of a card; 0.5 to 1.5 GiB by what others report, not measured here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Machines that are alike, and their GPUs."""

    ranks: int
    """Of each machine: GPUs, or processes on CPUs."""
    memory_bytes: int
    """Of a GPU; on CPUs a rank's share of the machine's."""
    card: Card | None
    """The GPU's datasheet, None if it is not known."""
    nodes: int = 1
    """Machines."""
    host_bytes: int = 0
    """Memory of a machine; 0 is not known."""
    on_cpu: bool = False
    """Whether ranks run on CPUs."""
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
        size = f"{self.memory_bytes / GIB:.0f} GiB"
        return f"{self.nodes} x {self.ranks} x {gpu} {size}".replace("  ", " ")


def parse_bytes(text: str, key: str) -> int:
    """Return the bytes of `80GB`, `1.5TB`; a K is 1024, as memory is sold.

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(tr("{key} = {value} is no size: write 80GB or 1TB.", key=key, value=text))
    unit = found[2].upper()
    return int(float(found[1]) * _UNITS[unit + "B" if unit else ""])


def parse_machine(gpus: str, nodes: int, host_memory: str) -> Machine:
    """Return the machines that the words of the command describe.

    Args:
        gpus: of one machine: 8x80GB, 8xA100-80GB, 4xH100, 2xcpu.
        nodes: machines.
        host_memory: of one machine, such as 1TB; "" is not known.

    Raises:
        ConfigError: a word says nothing that is known.
    """
    host = parse_bytes(host_memory, "host_memory") if host_memory else 0
    found = re.fullmatch(r"(\d+)\s*[xX*×]\s*(.+)", gpus)
    if not found or not int(found[1]):
        raise ConfigError(
            tr("gpus = {value} should be the GPUs of one machine: 8x80GB, 8xA100-80GB, 4xH100 or 2xcpu.", value=gpus)
        )
    ranks, what = int(found[1]), found[2].strip()
    if what.lower() == "cpu":
        host = host or own_memory()
        return Machine(ranks, host // ranks, None, nodes, host, on_cpu=True)
    if re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B?", what, re.IGNORECASE):
        return Machine(ranks, parse_bytes(what, "gpus"), None, nodes, host)
    card = find_card(what)
    if card is None:
        known = ", ".join(similar(what))
        raise ConfigError(
            tr(
                "gpus: no datasheet of '{card}' is known. Write its memory, 8x80GB, or one of: {known}.",
                card=what,
                known=known,
            )
        )
    return Machine(ranks, card.memory_bytes, card, nodes, host)


def this_machine(nodes: int = 1) -> Machine | None:
    """Return the machine at hand by what nvidia-smi says; None without an NVIDIA GPU."""
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
    return Machine(len(cards), least << 20, find_card(cards[0][0]), nodes, own_memory())


def own_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
