"""About how many samples and sequences a pass over the training data has, without a tokenizer: `toolkit check`."""

import math
import time
from typing import Any

from toolkit.config.schema import DataConfig, Packing, RowFormat
from toolkit.data.readers import Block, blocks, files_of, rows_of
from toolkit.errors import ToolkitError

_BYTES_PER_TOKEN = 4
"""Of a row as it is in its file, roughly, in English and in Chinese."""
_BLOCK_BYTES = 1 << 20
_MOST_S = 1.0


def estimate(data: DataConfig, most: int) -> tuple[int, int] | None:
    """Return about how many samples and sequences an epoch has; None if there are more than `most`, or unknown."""
    until = time.monotonic() + _MOST_S
    kept = 1.0 if data.validation else 1.0 - data.validation_fraction
    rows = size = 0.0
    for source in data.sources:
        if source.hub or source.format is RowFormat.docstrings:
            return None
        weight = kept * (source.mean_weight if source.weights else source.weight)
        try:
            for path in files_of(source):
                for block in blocks(path, _BLOCK_BYTES, source.columns.values()):
                    count, length = _measure(block)
                    rows, size = rows + weight * count, size + weight * length
                    if _sequences(data, rows, size) > most or time.monotonic() > until:
                        return None
        except ToolkitError:
            return None  # told by the check of the files
    if data.max_samples:
        rows, size = (value * min(1.0, data.max_samples * kept / max(rows, 1.0)) for value in (rows, size))
    return round(rows), _sequences(data, rows, size)


def _sequences(data: DataConfig, rows: float, size: float) -> int:
    if data.packing is Packing.none:
        return math.ceil(rows)
    return math.ceil(min(rows, size / _BYTES_PER_TOKEN / data.max_length))


def _measure(block: Block) -> tuple[int, int]:
    """Return the rows of a block and their bytes."""
    found: list[tuple[int, Any]] = list(rows_of(block))
    if isinstance(block.content, bytes):
        return len(found), len(block.content)
    return len(found), sum(len(str(row)) for _, row in found)
