"""The tokenized data as flat files, shared by all processes of a machine; the index is mapped, 22 bytes a sample.

Tokens are read when asked for: they count as no process's memory, and a damaged file is an error, not a SIGBUS. ids.bin
holds all tokens (two or four bytes each), trained.bin a bit for each; offsets.npy [samples + 1] where each sample
begins, files.npy, lines.npy, rows.npy and maybe items.npy (see `items_of`) [samples] its origin, values.npy what rows
say of them, if anything, train.npy and validation.npy the split's samples; bad_rows.jsonl what could not be used;
manifest.json (written last) size and checksum of every file.
"""

import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.readers import Block, place_of
from toolkit.data.tokenize_workers import Part
from toolkit.messages import DataError, file_bytes, parsed_json, reading, tr

if TYPE_CHECKING:
    import datasets

IDS, TRAINED, ITEMS, MANIFEST, BAD_ROWS = "ids.bin", "trained.bin", "items.npy", "manifest.json", "bad_rows.jsonl"
OFFSETS, FILES, LINES, ROWS, VALUES = "offsets.npy", "files.npy", "lines.npy", "rows.npy", "values.npy"
_COLUMNS = {
    "lengths": np.uint32,
    "trained": np.uint32,
    "files": np.uint16,
    "lines": np.uint32,
    "items": np.uint32,
    "rows": np.int64,
    "hashes": np.uint64,
    "values": np.float32,
}
_SAMPLES_AT_ONCE = 1 << 12
"""Of which trained tokens are counted: ten bytes of memory for each of their tokens."""

Sample = tuple[NDArray[Any], NDArray[np.bool_]]
"""Ids (unsigned integers) and mask of one sample."""


class TokenizedCache:
    """One split ("train" or "validation") of a finished cache; pickled as a path, so that workers open it again."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        with _reading(folder / MANIFEST):
            manifest = read_manifest(folder)
        self.fingerprint: str = manifest["fingerprint"]
        """Name of the cache; changes with everything that it is made of, versions of the code included."""
        self.content: str = manifest["content"]
        """Changes with the samples alone: their ids, masks, values, files and splits. The order of training follows
        from it, so that data that are tokenized again to the same samples are trained in the same order.
        """
        self._file_facts: list[dict[str, Any]] = manifest["files"]
        """Kept, as what is open outlives a cache that is removed, and its manifest does not."""
        self.dtype = np.dtype(manifest["dtype"])
        self._ids, self._trained = _open_file(self, folder / IDS), _open_file(self, folder / TRAINED)
        self.offsets: NDArray[np.int64] = _map_array(folder / OFFSETS)
        """Where each sample of all splits begins in `ids`, and the end, [samples + 1]."""
        self.files: NDArray[np.uint16] = _map_array(folder / FILES)
        """File that each sample of all splits comes from, an index of the manifest's `files`, [samples]."""
        self.lines: NDArray[np.uint32] = _map_array(folder / LINES)
        """Line of that file, [samples]."""
        self._items = _map_array(folder / ITEMS) if ITEMS in manifest["sizes_bytes"] else None
        self.rows: NDArray[np.uint32] = _map_array(folder / ROWS)
        """Row of all files; samples of one row stand next to each other, [samples]."""
        self.members: NDArray[np.uint32] = _map_array(folder / f"{split}.npy")
        """Which samples belong to this split, ascending, [len(self)]."""
        self.num_tokens: int = manifest["splits"][split]["tokens"]
        self.num_trained_tokens: int = manifest["splits"][split]["trained_tokens"]
        """Tokens of this split that the loss covers."""
        self._values = _map_array(folder / VALUES) if VALUES in manifest["sizes_bytes"] else None

    @property
    def has_values(self) -> bool:
        """Whether samples have values: labels of a classifier, good or bad (KTO), or reward margins."""
        return self._values is not None

    @property
    def num_numbers(self) -> int:
        """How many indices `__getitem__` takes: here the samples of the split, in a `MismatchedCache` twice as many."""
        return len(self)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> Sample:
        """Return ids and mask of the sample at `index` of this split, [length] each."""
        member = self.members[index]
        begin, end = int(self.offsets[member]), int(self.offsets[member + 1])
        return self.read_ids(begin, end), self.read_trained(begin, end)

    def read_ids(self, begin: int, end: int) -> NDArray[Any]:
        """Return the token ids from `begin` to `end` in the concatenation of all samples, [end - begin]."""
        size = self.dtype.itemsize
        return np.frombuffer(self._read(self._ids, IDS, begin * size, end * size), self.dtype)

    def read_trained(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return the loss mask from `begin` to `end`, as `read_ids`; on disk a byte holds eight (np.packbits)."""
        first = begin // 8
        bits = np.unpackbits(np.frombuffer(self._read(self._trained, TRAINED, first, -(-end // 8)), np.uint8))
        return bits[begin - 8 * first : end - 8 * first].view(np.bool_)

    def _read(self, file: int, name: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end` of the file with descriptor `file`; a DataError if it is shorter."""
        with reading(self.folder / name, DataError):
            content = os.pread(file, end - begin, begin)
            while len(content) < end - begin:  # one call reads at most 2 GiB
                more = os.pread(file, end - begin - len(content), begin + len(content))
                if not more:
                    raise OSError(tr("it is shorter than when it was written"))
                content += more
            return content

    def lengths(self, indices: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return how many tokens each sample of this split has, or each of `indices`."""
        members = self.members if indices is None else self.members[indices]
        return self.offsets[members.astype(np.int64) + 1] - self.offsets[members]

    def predicted_counts(self) -> NDArray[np.int64]:
        """Return how many tokens of each sample the loss covers, [len(self)], by reading all masks. A sample's first
        token is never among them: no token before it predicts it.
        """
        counts = np.zeros(len(self.offsets) - 1, np.int64)
        for first in range(0, len(counts), _SAMPLES_AT_ONCE):
            offsets = self.offsets[first : first + _SAMPLES_AT_ONCE + 1]
            trained = self.read_trained(int(offsets[0]), int(offsets[-1])).copy()
            begins = offsets[:-1] - offsets[0]
            trained[begins] = False
            counts[first : first + len(begins)] = np.add.reduceat(trained, begins, dtype=np.int64)
        return counts[self.members]

    def values(self, indices: Sequence[int]) -> NDArray[np.float32] | None:
        """Return the values (see `has_values`) of the samples `indices`, [len(indices)]; None if samples have none."""
        if self._values is None:
            return None
        samples = np.asarray(indices, np.int64) % len(self)  # of a `MismatchedCache`, sample i also has i + len(self)
        return self._values[self.members[samples]]

    def where(self, index: int, paths: Sequence[Path] = ()) -> str:
        """Return "file:line" of a sample of this split. `paths`: of all files now, else those of the build."""
        member = self.members[index]
        number = self.files[member]
        path = paths[number] if paths else self._file_facts[number]["path"]
        return place_of(path, self.lines[member], 0 if self._items is None else self._items[member])

    def sources(self) -> NDArray[np.int64]:
        """Return the number of each sample's source, [len(self)]; validation sources count on after training's."""
        of_file = np.array([file["source"] for file in self._file_facts], np.int64)
        return of_file[self.files[self.members]]

    def to_dataset(self) -> "datasets.Dataset":
        """Return this split as `input_ids` and `labels` (-100 untrained), mapped from a copy in `datasets`' cache."""
        import datasets

        def samples() -> Iterator[dict[str, NDArray[np.int32]]]:
            for ids, trained in map(self.__getitem__, range(len(self))):
                signed = ids.astype(np.int32)
                yield {"input_ids": signed, "labels": np.where(trained, signed, np.int32(-100))}

        column = datasets.List(datasets.Value("int32"))
        return datasets.Dataset.from_generator(
            samples,
            features=datasets.Features({"input_ids": column, "labels": column}),
            split=self.split,
            fingerprint=f"{self.fingerprint}-{self.split}",
        )

    def __reduce__(self) -> tuple[type["TokenizedCache"], tuple[Path, str]]:
        return TokenizedCache, (self.folder, self.split)


class CacheWriter:
    """Joins parts in an empty folder: `append` each, `finish` once, `close` in any case."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder, self.dtype = folder, dtype
        self._num_rows = 0
        self._columns: dict[str, list[NDArray[Any]]] = {name: [np.empty(0, type_)] for name, type_ in _COLUMNS.items()}
        self._checksums: dict[str, int] = {IDS: 0, TRAINED: 0}
        self._rest = np.empty(0, np.bool_)  # of the mask, fewer than the eight tokens of a byte, not written yet
        self._out: dict[str, IO[bytes]] = {name: open(folder / name, "wb") for name in (IDS, TRAINED)}

    def append(self, part: Part, file: int, block: Block) -> None:
        """Append the samples of a part, which was made of this block of file number `file`."""
        self._write(IDS, part.ids.astype(self.dtype, copy=False))
        trained = np.concatenate((self._rest, part.trained))
        full_bytes = len(trained) // 8 * 8
        self._write(TRAINED, np.packbits(trained[:full_bytes]))
        self._rest = trained[full_bytes:].copy()
        starts = np.concatenate(([0], np.cumsum(part.lengths, dtype=np.int64)))
        trained_before = np.concatenate(([0], np.cumsum(part.trained, dtype=np.uint32)))  # before each token
        of_part = {
            "lengths": part.lengths,
            "trained": np.diff(trained_before[starts]),
            "files": np.full(len(part.lengths), file),
            "lines": part.lines + np.uint32(block.first),
            "items": items_of(part, block),
            "rows": part.rows + np.int64(self._num_rows),
            "hashes": part.hashes,
            "values": part.values,
        }
        for name, values in of_part.items():
            self._columns[name].append(values.astype(_COLUMNS[name], copy=False))
        self._num_rows += part.counts.rows

    def number_labels(self, numbers: NDArray[np.float32]) -> None:
        """Replace each sample's label number n by `numbers[n]`; numbers: [labels]."""
        self._columns["values"] = [numbers[values.astype(np.int64)] for values in self._columns["values"]]

    def index(self) -> "CacheIndex":
        """Return the per-sample columns of all parts that were appended."""
        return CacheIndex(**{name: np.concatenate(parts) for name, parts in self._columns.items()})

    def finish(self, splits: dict[str, NDArray[np.int64]], manifest: dict[str, Any]) -> None:
        """Write the index files and, last, the manifest. `splits`: name -> its samples; `manifest`: further entries."""
        self._write(TRAINED, np.packbits(self._rest))
        self.close()
        index = self.index()
        offsets = np.concatenate(([0], np.cumsum(index.lengths, dtype=np.int64)))
        rows = index.used_rows().astype(np.uint32)
        arrays: dict[str, NDArray[Any]] = {OFFSETS: offsets, FILES: index.files, LINES: index.lines, ROWS: rows}
        arrays |= {ITEMS: index.items} if index.items.any() else {}
        arrays |= {VALUES: index.values} if len(index.values) else {}
        for split, members in splits.items():
            arrays[f"{split}.npy"] = members.astype(np.uint32)
        for name, values in arrays.items():
            np.save(self.folder / name, values)
        counts = {
            split: {
                "samples": len(members),
                "tokens": int(index.lengths[members].sum()),
                "trained_tokens": int(index.trained[members].sum()),
            }
            for split, members in splits.items()
        }
        paths = sorted(self.folder.iterdir())
        for path in paths:
            self._checksums[path.name] = self._checksums.get(path.name) or checksum(path)
        # Of "content": what is trained, so not the lines that it stood in.
        samples: list[NDArray[Any]] = [index.hashes, index.lengths, index.values, index.files, rows]
        contents = {
            **manifest,
            "content": _digest(samples + [arrays[f"{split}.npy"] for split in sorted(splits)]),
            "dtype": self.dtype.name,
            "splits": counts,
            "sizes_bytes": {path.name: path.stat().st_size for path in paths},
            "crc32": self._checksums,
        }
        # A file's name need not be UTF-8; such bytes become escapes, which JSON reads back.
        text = json.dumps(contents, indent=2, ensure_ascii=False)
        (self.folder / MANIFEST).write_text(text, encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Close the files."""
        for file in self._out.values():
            file.close()

    def _write(self, name: str, values: NDArray[Any]) -> None:
        """Append an array's bytes to the file `name`, and continue its checksum."""
        content = values.tobytes()
        self._checksums[name] = zlib.crc32(content, self._checksums[name])
        self._out[name].write(content)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheIndex:
    """The columns of a cache's samples, [samples] each, and the hashes of the rows that gave one."""

    lengths: NDArray[np.uint32]
    trained: NDArray[np.uint32]
    files: NDArray[np.uint16]
    lines: NDArray[np.uint32]
    items: NDArray[np.uint32]
    """See `items_of`."""
    rows: NDArray[np.int64]
    """Number of the row over all files; rows that gave no sample are counted too."""
    hashes: NDArray[np.uint64]
    """Of the rows that gave a sample, see `tokenize_workers.row_hashes`, [used rows]."""
    values: NDArray[np.float32]
    """What rows say of their answers; nothing where they do not, [0]."""

    def used_rows(self) -> NDArray[np.int64]:
        """Return the number of the row that each sample comes from, counting only rows that gave one, [samples]."""
        if not len(self.rows):
            return np.empty(0, np.int64)
        return np.concatenate(([0], np.cumsum(self.rows[1:] != self.rows[:-1])))


def items_of(part: Part, block: Block) -> NDArray[np.uint32]:
    """Return the number of each sample's row among the items of a JSON array that share lines, else 0, [samples]."""
    return part.rows + np.uint32(block.first_item) if block.shares_lines else np.zeros_like(part.rows)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the parsed manifest.json of a cache."""
    manifest: dict[str, Any] = parsed_json(file_bytes(folder / MANIFEST))
    return manifest


def is_complete(folder: Path) -> bool:
    """Whether a directory holds a finished cache: named by its fingerprint, files of the sizes in its manifest."""
    try:
        manifest = read_manifest(folder)
        sizes = manifest["sizes_bytes"]
        return manifest["fingerprint"] == folder.name and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def damaged_files(folder: Path) -> list[str]:
    """Return the names of a cache's files whose checksum is not the manifest's; reads all of them."""
    checksums: dict[str, int] = read_manifest(folder)["crc32"]
    return [name for name, expected in checksums.items() if checksum(folder / name) != expected]


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return a hash of the arrays' bytes, one after another."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


def _reading(path: Path) -> AbstractContextManager[None]:
    """Turn what fails while a cache is opened into a DataError."""
    hint = tr("If the tokenized cache was removed while a run uses it, start the run again, which makes it again.")
    return reading(path, DataError, hint)


def _map_array(path: Path) -> NDArray[Any]:
    """Return a .npy file as a memory-mapped array, of the plain array type."""
    with _reading(path):
        array: NDArray[Any] = np.load(path, mmap_mode="r").view(np.ndarray)
    return array


def _open_file(owner: object, path: Path) -> int:
    """Open a file for reading and return its descriptor, closed when `owner` is garbage-collected."""
    with _reading(path):
        descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, descriptor)
    return descriptor
