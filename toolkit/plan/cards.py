"""What usual GPUs can do by their datasheets. No torch.

Sources: NVIDIA's datasheets and architecture whitepapers of each product (nvidia.com, "Tensor Core GPU Datasheet" and
"GPU Architecture" whitepapers). Peaks are dense, without sparsity, summed in fp32, at boost clock. Of GeForce cards the
whitepapers' "FP16 Tensor TFLOPS with FP32 accumulate". fp32 is TF32 where the card has it. Memory is what nvidia-smi
shows, which ECC makes less on cards with GDDR. A link is what one card can send at once while it receives as much:
NVLink if every card of a server has it, else PCIe.
"""

import re
from dataclasses import dataclass

_GIB = 1 << 30
_PCIE3, _PCIE4, _PCIE5 = 16, 32, 64
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
    """FLOP/s, in TF32 where it has that."""
    memory_bytes_per_s: float
    """Bandwidth of its memory."""
    link_bytes_per_s: float
    """To the other cards of a server, one direction."""

    def flops(self, dtype: str) -> float:
        """Return the peak of `bf16`, `fp16` or `fp32`, FLOP/s."""
        return {"bf16": self.bf16_flops, "fp16": self.fp16_flops, "fp32": self.fp32_flops}[dtype]


def _card(
    name: str, gib: float, half: float, fp32: float, memory_gb_s: float, link_gb_s: float, bf16: bool = True
) -> Card:
    """Return a card; speeds in TFLOP/s and GB/s."""
    peak = half * 1e12
    return Card(name, int(gib * _GIB), peak if bf16 else 0.0, peak, fp32 * 1e12, memory_gb_s * 1e9, link_gb_s * 1e9)


CARDS = (
    # name, GiB, bf16 and fp16 TFLOP/s, fp32 (TF32) TFLOP/s, memory GB/s, link GB/s
    _card("B200", 179, 2250, 1125, 7700, 900),
    _card("GB200", 184, 2500, 1250, 8000, 900),
    _card("H200", 140, 989.5, 494.7, 4800, 450),
    _card("H200 NVL", 140, 835.5, 417.5, 4800, 450),
    _card("GH200", 95, 989.5, 494.7, 4000, 450),
    _card("H100", 79.6, 989.5, 494.7, 3350, 450),  # SXM: "H100 80GB HBM3"
    _card("H100 NVL", 93.6, 835.5, 417.5, 3900, 300),
    _card("H100 PCIe", 79.6, 756.5, 378, 2000, _PCIE5),
    _card("H800", 79.6, 989.5, 494.7, 3350, 200),
    _card("H800 PCIe", 79.6, 756.5, 378, 2000, _PCIE5),
    _card("H20", 95.6, 148, 74, 4000, 450),
    _card("H20 3e", 140, 148, 74, 4800, 450),
    _card("A100 40GB", 40, 312, 156, 1555, 300),
    _card("A100 40GB PCIe", 40, 312, 156, 1555, _PCIE4),
    _card("A100 80GB", 80, 312, 156, 2039, 300),
    _card("A100 80GB PCIe", 80, 312, 156, 1935, _PCIE4),
    _card("A800 40GB", 40, 312, 156, 1555, 200),
    _card("A800 80GB", 80, 312, 156, 2039, 200),
    _card("A800 80GB PCIe", 80, 312, 156, 1935, _PCIE4),
    _card("L20", 45, 119.5, 59.8, 864, _PCIE4),
    _card("L40", 45, 181, 90.5, 864, _PCIE4),
    _card("L40S", 45, 362, 183, 864, _PCIE4),
    _card("L4", 22.5, 121, 60, 300, _PCIE4),
    _card("A10", 22.5, 125, 62.5, 600, _PCIE4),
    _card("A10G", 22.5, 70, 35, 600, _PCIE4),
    _card("A30", 24, 165, 82, 933, _PCIE4),
    _card("A40", 45, 149.7, 74.8, 696, _PCIE4),
    _card("V100 16GB", 16, 125, 15.7, 900, 150, bf16=False),
    _card("V100 32GB", 32, 125, 15.7, 900, 150, bf16=False),
    _card("V100 16GB PCIe", 16, 112, 14, 900, _PCIE3, bf16=False),
    _card("V100 32GB PCIe", 32, 112, 14, 900, _PCIE3, bf16=False),
    _card("T4", 15, 65, 8.1, 320, _PCIE3, bf16=False),
    _card("RTX 6000 Ada", 48, 364.2, 182.1, 960, _PCIE4),
    _card("A6000", 48, 154.8, 77.4, 768, _PCIE4),
    _card("RTX 3090", 24, 71, 35.6, 936, _PCIE4),
    _card("RTX 4090", 24, 165.2, 82.6, 1008, _PCIE4),
    _card("RTX 4090 D", 24, 147.1, 73.5, 1008, _PCIE4),
    _card("RTX 5090", 31.8, 209.5, 104.8, 1792, _PCIE5),
)


def find_card(name: str) -> Card | None:
    """Return a card by the name that torch or nvidia-smi gives it, such as "NVIDIA A100-SXM4-80GB"; None if unknown.

    A part of a card (MIG), a notebook's and the like are unknown: they are slower than what they are named after.
    """
    words = _words(name)
    found = [card for card in CARDS if _words(card.name) <= words and not (words & _QUALIFIERS) - _words(card.name)]
    return max(found, key=lambda card: len(_words(card.name)), default=None)


def _words(name: str) -> set[str]:
    return {*re.findall(r"[a-z0-9]+", name.lower())} - {"rtx"}
