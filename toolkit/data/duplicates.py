"""Data that is there twice: a file under two entries, and rows that give the same samples."""

import hashlib
import os
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import DataConfig, RowFormat
from toolkit.data.sources import DataFile
from toolkit.errors import DataError
from toolkit.messages import tr


def check_distinct(data: DataConfig, files: Sequence[DataFile], hashes: Sequence[str] | None = None) -> None:
    """Reject a file that two entries read, under whatever path or link; with hashes also one of the same content.

    Raises:
        DataError: if there is one; names both entries.
    """
    identities: Sequence[Hashable] = hashes or [(found.st_dev, found.st_ino) for found in map(_stat, files)]
    seen: dict[Hashable, list[DataFile]] = {}
    for file, identity in zip(files, identities, strict=True):
        # Other columns or another format make other samples of the same rows, such as a translation in both directions.
        others = seen.setdefault((identity, tuple(sorted(file.columns.items()))), [])
        for other in others:
            if other.source != file.source and _may_be_equal(other.row_format, file.row_format):
                raise DataError(_sentence(data, other, file))
        if all(other.source != file.source for other in others):
            others.append(file)


def _stat(file: DataFile) -> os.stat_result:
    return os.stat(file.path)


def _may_be_equal(one: RowFormat, other: RowFormat) -> bool:
    return one is other or RowFormat.auto in (one, other)


def _sentence(data: DataConfig, first: DataFile, second: DataFile) -> str:
    entries = [_entry(data, file.source) for file in (first, second)]
    named = f"{first.path}" if first.path == second.path else f"{first.path} = {second.path}"
    if first.source < len(data.sources) <= second.source:
        return tr(
            "{second} is also training data ({first}): {files}. A validation loss on trained rows says nothing. Use "
            "other rows for validation, or remove data.validation: data.validation_fraction then holds out some rows.",
            first=entries[0],
            second=entries[1],
            files=named,
        )
    return tr(
        "{first} and {second} read the same file: {files}. Remove one of them. To train its rows more often, set "
        "`weight` (weight: 2 takes each row twice per epoch).",
        first=entries[0],
        second=entries[1],
        files=named,
    )


def _entry(data: DataConfig, source: int) -> str:
    number = source - len(data.sources)
    return f"data.sources[{source}]" if number < 0 else f"data.validation[{number}]"


def row_hashes(
    ids: NDArray[Any], trained: NDArray[np.bool_], lengths: NDArray[np.uint32], rows: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return a hash of what each row gives: ids and mask of all its samples; equal for equal rows of any format.

    Args:
        ids: tokens of all samples one after another, [tokens].
        trained: whether the loss covers each, [tokens].
        lengths: of each sample, [samples].
        rows: the row of each sample, ascending, [samples].

    Returns:
        For each row that has a sample, in order, [rows].
    """
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    bounds = [*starts[begins].tolist(), len(ids)]
    id_bytes, mask_bytes, size = memoryview(ids.tobytes()), memoryview(trained.tobytes()), ids.itemsize
    found = bytearray()
    for start, end in pairwise(bounds):
        digest = hashlib.blake2b(id_bytes[start * size : end * size], digest_size=8)
        digest.update(mask_bytes[start:end])
        found += digest.digest()
    return np.frombuffer(found, np.uint64)


def first_equal(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each row the number of the first row with the same hash, its own if none is before it, [rows]."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    is_new = np.concatenate(([True], ordered[1:] != ordered[:-1])) if len(order) else np.empty(0, np.bool_)
    first = np.empty(len(order), np.int64)
    first[order] = order[is_new][np.cumsum(is_new) - 1]
    return first
