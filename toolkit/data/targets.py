"""What is known of trained tokens beside their labels: which have a teacher, and what that was found to say of them.

What a teacher says is kept in a directory: a file for each rank that computed a part, tokens one after another, K ids
(int32) and K + 1 log-probabilities (float32, the last of all other tokens together) each; parts.npy and begins.npy
[samples] say in which file and from which token on a sample's are; manifest.json is written last.
"""

import json
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.data.store import MANIFEST, TokenizedCache
from toolkit.disk import flush
from toolkit.messages import DataError, json_object, reading, tr

PARTS, BEGINS = "parts.npy", "begins.npy"


class TokenTargets:
    """Which samples of a split have a teacher (`is_taught`, bool [samples]), and its outputs, once they are opened."""

    def __init__(self, store: TokenizedCache, is_taught: NDArray[np.bool_]) -> None:
        self.is_taught, self.counts, self._lengths = is_taught, store.predicted_counts(), store.lengths()
        self.folder: Path | None = None

    def samples(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of `members` (samples of the split) that have a teacher and trained tokens, longest first."""
        chosen = members[self.is_taught[members] & (self.counts[members] > 0)]
        return chosen[np.argsort(-self._lengths[chosen], kind="stable")]

    def open(self, folder: Path) -> None:
        """Map the index of a directory of teacher outputs, and open its files, from which `columns` reads."""
        manifest = json_object(folder / MANIFEST, DataError)
        self.folder, self.top_k = folder, int(manifest["top_k"])
        self._parts, self._begins = (np.load(folder / name, mmap_mode="r") for name in (PARTS, BEGINS))
        self._files = [os.open(folder / f"{part}.bin", os.O_RDONLY) for part in range(manifest["parts"])]
        for file in self._files:
            weakref.finalize(self, os.close, file)

    def columns(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return columns for the T trained tokens of some samples, in their order: `taught`, bool [T], whether a token
        has a teacher; and if a directory is open, for the N tokens that have one, the teacher's K likeliest tokens,
        `teacher_ids` int32 [N, K], and log-probabilities, `teacher_logs` float32 [N, K + 1], the last of all others.
        """
        numbers = np.asarray(samples, np.int64)
        columns = {"taught": torch.from_numpy(np.repeat(self.is_taught[numbers], self.counts[numbers]))}
        if self.folder is None:
            return columns
        stored = record(self.top_k)
        taught = numbers[self.is_taught[numbers] & (self.counts[numbers] > 0)]
        parts = [self._read(int(sample), stored) for sample in taught]
        records = np.concatenate(parts) if parts else np.empty(0, stored)
        return columns | {
            "teacher_ids": torch.from_numpy(np.ascontiguousarray(records["ids"])),
            "teacher_logs": torch.from_numpy(np.ascontiguousarray(records["logs"])),
        }

    def _read(self, sample: int, stored: np.dtype[Any]) -> NDArray[Any]:
        """Return the teacher's outputs for all trained tokens of a sample, [tokens] records of dtype `stored`."""
        part, size = int(self._parts[sample]), int(self.counts[sample]) * stored.itemsize
        assert self.folder is not None
        with reading(self.folder / f"{part}.bin", DataError):
            content = os.pread(self._files[part], size, int(self._begins[sample]) * stored.itemsize)
            if len(content) < size:
                raise OSError(tr("it is shorter than when it was written"))
        return np.frombuffer(content, stored)


class TargetWriter:
    """Writes the file of one rank, whose samples come in the order of its share."""

    def __init__(self, folder: Path, part: int, top_k: int) -> None:
        self.record = record(top_k)
        self._file: IO[bytes] = open(folder / f"{part}.bin", "wb")

    def append(self, ids: torch.Tensor, logs: torch.Tensor) -> None:
        """Write the teacher's outputs for N tokens: its K likeliest ids [N, K], and log-probabilities [N, K + 1]."""
        records = np.empty(len(ids), self.record)
        records["ids"], records["logs"] = ids.cpu().numpy(), logs.cpu().numpy()
        self._file.write(records.tobytes())

    def close(self) -> None:
        """Flush the file to disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def is_complete(folder: Path) -> bool:
    """Whether a directory holds all of a teacher's outputs: its manifest is written last."""
    return (folder / MANIFEST).is_file()


def publish(
    building: Path, folder: Path, shares: Sequence[NDArray[np.int64]], targets: TokenTargets, top_k: int
) -> None:
    """Write the index and the manifest of a teacher's outputs, and rename `building` to `folder`. `shares`: the samples
    in the file of each rank, in their order. If another run has published `folder` meanwhile, that one is kept.
    """
    parts, begins = np.zeros(len(targets.counts), np.uint16), np.zeros(len(targets.counts), np.int64)
    for part, share in enumerate(shares):
        parts[share] = part
        begins[share] = np.cumsum(targets.counts[share]) - targets.counts[share]
    np.save(building / PARTS, parts)
    np.save(building / BEGINS, begins)
    manifest = {
        "top_k": top_k,
        "parts": len(shares),
        "tokens": int(sum(targets.counts[samples].sum() for samples in shares)),
    }
    (building / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in [*building.iterdir(), building]:
        flush(path)
    if is_complete(folder):  # another run was faster
        shutil.rmtree(building)
    else:
        building.rename(folder)


def record(top_k: int) -> np.dtype[Any]:
    """Return the dtype of the teacher's output for one token: K ids, K + 1 log-probabilities (last: all other ids)."""
    return np.dtype([("ids", np.int32, (top_k,)), ("logs", np.float32, (top_k + 1,))])
