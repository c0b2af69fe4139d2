"""The tokenised data as flat files that every rank maps into memory: nothing is read before it is used, all share it.

Files: ids.bin and trained.bin hold the tokens of all conversations one after another (smallest fitting unsigned
integer; one byte 0/1), offsets.npy [conversations + 1] where each begins, train.npy and validation.npy which of them
belong to the split, manifest.json (written last) what it all is.
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

IDS, TRAINED, OFFSETS, MANIFEST = (
    "ids.bin",
    "trained.bin",
    "offsets.npy",
    "manifest.json",
)

Sample = tuple[NDArray[Any], NDArray[np.bool_]]
"""Ids (unsigned integers) and mask of one conversation, views of the mapped files."""


class Store:
    """One split of a finished store. Costs next to no memory of its own; pickled as a path, so workers map it too.

    Args:
        folder: the store.
        split: "train" or "validation".
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        manifest = read_manifest(folder)
        self.ids: NDArray[Any] = _mapped(folder / IDS, np.dtype(manifest["dtype"]))
        """Tokens of all splits, [total tokens]."""
        self.trained: NDArray[np.bool_] = _mapped(folder / TRAINED, np.dtype(np.bool_))
        """Whether the loss covers each of `ids`; never true for the first token of a conversation."""
        self.offsets: NDArray[np.int64] = np.load(folder / OFFSETS, mmap_mode="r").view(np.ndarray)
        """Where each conversation of all splits begins in `ids`, and the end, [conversations + 1]."""
        self.rows: NDArray[np.int64] = np.load(folder / f"{split}.npy", mmap_mode="r").view(np.ndarray)
        """Which conversations belong to this split, ascending, [len(self)]."""
        self.num_tokens: int = manifest["splits"][split]["tokens"]
        """Tokens of this split."""
        self.num_trained_tokens: int = manifest["splits"][split]["trained_tokens"]
        """Tokens of this split that the loss covers."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Return ids and mask of the conversation at `index` of this split, [length] each."""
        row = self.rows[index]
        begin, end = self.offsets[row], self.offsets[row + 1]
        return self.ids[begin:end], self.trained[begin:end]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation of this split, [len(self)]."""
        return self.offsets[self.rows + 1] - self.offsets[self.rows]

    def trained_positions(self) -> NDArray[np.int64]:
        """Return the positions in `ids` of the tokens of this split that the loss covers, ascending."""
        member = np.zeros(len(self.offsets) - 1, dtype=np.bool_)
        member[self.rows] = True
        positions = np.flatnonzero(self.trained)
        return positions[member[np.searchsorted(self.offsets, positions, side="right") - 1]]

    def __reduce__(self) -> tuple[type["Store"], tuple[Path, str]]:
        return Store, (self.folder, self.split)


class StoreWriter:
    """Writes conversations one after another into an empty folder. Use as a context manager, then `finish`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.offsets = array("q", [0])
        self.trained_counts = array("q")
        self._ids, self._trained = (
            open(folder / IDS, "wb"),
            open(folder / TRAINED, "wb"),
        )

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ids.close()
        self._trained.close()

    def __len__(self) -> int:
        return len(self.trained_counts)

    def append(self, ids: Sequence[int], trained: Sequence[bool]) -> None:
        """Add one conversation."""
        self._ids.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self._trained.write(np.asarray(trained, dtype=np.bool_).tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        self.trained_counts.append(sum(trained))

    def finish(self, splits: dict[str, NDArray[np.int64]], manifest: dict[str, Any]) -> None:
        """Write the index files and, last, the manifest.

        Args:
            splits: ascending conversation numbers of each split.
            manifest: what else to write into manifest.json; the splits' counts are added.
        """
        self._ids.close()
        self._trained.close()
        offsets = np.array(self.offsets, dtype=np.int64)
        np.save(self.folder / OFFSETS, offsets)
        lengths, trained_counts = (
            np.diff(offsets),
            np.array(self.trained_counts, dtype=np.int64),
        )
        counts = {}
        for split, rows in splits.items():
            np.save(self.folder / f"{split}.npy", rows.astype(np.int64))
            counts[split] = {
                "samples": len(rows),
                "tokens": int(lengths[rows].sum()),
                "trained_tokens": int(trained_counts[rows].sum()),
            }
        sizes = {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())}
        whole = {
            **manifest,
            "dtype": self.dtype.name,
            "splits": counts,
            "sizes_bytes": sizes,
        }
        (self.folder / MANIFEST).write_text(json.dumps(whole, indent=2, ensure_ascii=False), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a store."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether a store is there, with files of the sizes its manifest states."""
    try:
        sizes = read_manifest(folder)["sizes_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file; as a plain array, whose slices cost less than numpy.memmap's."""
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
