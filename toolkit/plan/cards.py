"""What usual GPUs can do by their datasheets. No torch.

Sources: NVIDIA's datasheets and architecture whitepapers of each product (nvidia.com, "Tensor Core GPU Datasheet" and
"GPU Architecture" whitepapers). Peaks are dense, without sparsity, summed in fp32, at boost clock. Of GeForce cards the
whitepapers' "FP16 Tensor TFLOPS with FP32 accumulate". fp32 is plain fp32, as PyTorch leaves TF32 off unless told
otherwise. Memory is what nvidia-smi shows, which ECC makes less on cards with GDDR. A link is what one card can send at
once while it receives as much: NVLink if every card of a server has it, else PCIe.
"""

import re
from dataclasses import dataclass

GIB = 1 << 30
_PCIE3, _PCIE4, _PCIE5 = 16, 32, 64
_SIZE_OFF = 0.1
"""Of a card's memory by which the size in a name may differ: an L40S with its 45 GiB is sold as one of 48 GB."""
_QUALIFIERS = {"d", "laptop", "max", "mig", "super", "ti"}
"""Words that make a name mean another card."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU's datasheet."""

    name: str
    """The words by which it is found."""
    memory_bytes: int
    """As nvidia-smi shows it."""
    bf16_flops: float
    """FLOP/s; 0: it cannot."""
    fp16_flops: float
    """FLOP/s."""
    fp32_flops: float
    """FLOP/s, without tensor cores; 0: not known."""
    memory_bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """To the other cards of a server, one direction."""

    def flops(self, dtype: str) -> float:
        """Return the peak of `bf16`, `fp16` or `fp32`, FLOP/s; 0: it cannot, or it is not known."""
        return {"bf16": self.bf16_flops, "fp16": self.fp16_flops, "fp32": self.fp32_flops}[dtype]


def _card(
    name: str, gib: float, half: float, fp32: float, memory_gb_s: float, link_gb_s: float, bf16: bool = True
) -> Card:
    """Return a card; speeds in TFLOP/s and GB/s."""
    peak = half * 1e12
    return Card(name, int(gib * GIB), peak if bf16 else 0.0, peak, fp32 * 1e12, memory_gb_s * 1e9, link_gb_s * 1e9)


CARDS = (
    # name, GiB, bf16 and fp16 TFLOP/s, fp32 TFLOP/s, memory GB/s, link GB/s
    _card("B200", 179, 2250, 75, 7700, 900),
    _card("GB200", 184, 2500, 80, 8000, 900),
    _card("H200", 140, 989.5, 67, 4800, 450),
    _card("H200 NVL", 140, 835.5, 60, 4800, 450),
    _card("GH200", 95, 989.5, 67, 4000, 450),
    _card("H100", 79.6, 989.5, 67, 3350, 450),  # SXM: "H100 80GB HBM3"
    _card("H100 NVL", 93.6, 835.5, 60, 3900, 300),
    _card("H100 PCIe", 79.6, 756.5, 51, 2000, _PCIE5),
    _card("H800", 79.6, 989.5, 67, 3350, 200),
    _card("H800 PCIe", 79.6, 756.5, 51, 2000, _PCIE5),
    _card("H20", 95.6, 148, 44, 4000, 450),
    _card("H20 3e", 140, 148, 44, 4800, 450),
    _card("A100 40GB", 40, 312, 19.5, 1555, 300),
    _card("A100 40GB PCIe", 40, 312, 19.5, 1555, _PCIE4),
    _card("A100 80GB", 80, 312, 19.5, 2039, 300),
    _card("A100 80GB PCIe", 80, 312, 19.5, 1935, _PCIE4),
    _card("A800 40GB", 40, 312, 19.5, 1555, 200),
    _card("A800 80GB", 80, 312, 19.5, 2039, 200),
    _card("A800 80GB PCIe", 80, 312, 19.5, 1935, _PCIE4),
    _card("L20", 45, 119.5, 59.8, 864, _PCIE4),
    _card("L40", 45, 181, 90.5, 864, _PCIE4),
    _card("L40S", 45, 362, 91.6, 864, _PCIE4),
    _card("L4", 22.5, 121, 30.3, 300, _PCIE4),
    _card("A10", 22.5, 125, 31.2, 600, _PCIE4),
    _card("A10G", 22.5, 70, 0, 600, _PCIE4),
    _card("A30", 24, 165, 10.3, 933, _PCIE4),
    _card("A40", 45, 149.7, 37.4, 696, _PCIE4),
    _card("V100 16GB", 16, 125, 15.7, 900, 150, bf16=False),
    _card("V100 32GB", 32, 125, 15.7, 900, 150, bf16=False),
    _card("V100 16GB PCIe", 16, 112, 14, 900, _PCIE3, bf16=False),
    _card("V100 32GB PCIe", 32, 112, 14, 900, _PCIE3, bf16=False),
    _card("T4", 15, 65, 8.1, 320, _PCIE3, bf16=False),
    _card("RTX 6000 Ada", 48, 364.2, 91.1, 960, _PCIE4),
    _card("A6000", 48, 154.8, 38.7, 768, _PCIE4),
    _card("RTX 3090", 24, 71, 35.6, 936, _PCIE4),
    _card("RTX 4090", 24, 165.2, 82.6, 1008, _PCIE4),
    _card("RTX 4090 D", 24, 147.1, 73.5, 1008, _PCIE4),
    _card("RTX 5090", 31.8, 209.5, 104.8, 1792, _PCIE5),
)


def find_card(name: str) -> Card | None:
    """Return a card by the name that torch or nvidia-smi gives it, such as "NVIDIA A100-SXM4-80GB"; None if unknown.

    A part of a card (MIG, vGPU), a notebook's and the like are unknown: they are slower than what they are named after.
    So is one with another size of memory.
    """
    words = _words(name)
    if any(re.fullmatch(r"\d+[qcab]", word) for word in words):  # a vGPU: A10-24Q
        return None
    found = [card for card in CARDS if _words(card.name) <= words and not (words & _QUALIFIERS) - _words(card.name)]
    best = max(found, key=lambda card: len(_words(card.name)), default=None)
    sizes = [int(word[:-2]) * GIB for word in words if re.fullmatch(r"\d+gb", word)]
    if best and any(abs(size / best.memory_bytes - 1) > _SIZE_OFF for size in sizes):
        return None
    return best


def similar(name: str) -> list[str]:
    """Return the names of the cards that a name could mean, as "A100" without its memory; of all if there are none."""
    return [card.name for card in CARDS if _words(name) <= _words(card.name)] or [card.name for card in CARDS]


def _words(name: str) -> set[str]:
    return {*re.findall(r"[a-z0-9]+", name.lower())} - {"rtx"}
