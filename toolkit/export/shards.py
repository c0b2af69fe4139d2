"""Weights in several files, for what transformers does not write: quantized weights in 16 bits, extra tensors."""

from collections.abc import Iterable
from pathlib import Path

import torch

from toolkit.export.write import save_checked


def write_shards(
    values: Iterable[tuple[str, torch.Tensor]], folder: Path, final: Path, most: int, file_name: str
) -> tuple[dict[str, str], int]:
    """Write tensors to safetensors files in `folder`, named by their numbers from 1 (`file_name`, a format), of at most
    `most` bytes or of one tensor. Return tensor -> file, and the bytes of all; errors name the export's folder `final`.
    """
    shards, group = dict[str, str](), dict[str, torch.Tensor]()
    number, total = 1, 0
    for name, value in values:
        if group and sum(each.nbytes for each in group.values()) + value.nbytes > most:
            save_checked(group, folder / file_name.format(number), final)
            group, number = {}, number + 1
        group[name], shards[name] = value, file_name.format(number)
        total += value.nbytes
    save_checked(group, folder / file_name.format(number), final)
    return shards, total
