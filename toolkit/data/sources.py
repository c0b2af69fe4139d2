"""The sources of a recipe: which files they mean, and that no two of them read the same one."""

import hashlib
import json
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.config.files import is_remote
from toolkit.config.schema import DataConfig, RowFormat, SourceConfig
from toolkit.data.formats import Conversation
from toolkit.data.readers import DataFile, usable_rows
from toolkit.disk import sha256, write_atomically
from toolkit.messages import DataError, reading, tr

_SETTLED_S = 2.0


def locate_source(source: SourceConfig, number: int, cache_dir: Path, *, streaming: bool = False) -> list[DataFile]:
    """Return the files of a source; docstrings are extracted first, hub datasets downloaded unless for `streaming`."""
    row_format = source.format
    if row_format is RowFormat.docstrings:
        from toolkit.data.docstrings import pairs_file

        paths, row_format = [pairs_file(cache_dir)], RowFormat.prompt_response
    elif source.hub:
        from toolkit.data.hub_datasets import files_of_dataset

        paths = files_of_dataset(source, streaming)
    elif is_remote(source.path):
        from toolkit.data.remote import files_of_url

        paths = files_of_url(source.path)
    else:
        from toolkit.data.data_paths import files_of

        paths = files_of(source)
    return [DataFile(path, number, row_format, dict(source.columns), source.max_samples) for path in paths]


def locate_all(data: DataConfig, cache_dir: Path) -> list[DataFile]:
    """Return the files of all sources, training before validation; a DataError if there are no sources or files."""
    if not data.sources:
        raise DataError(tr("data.sources is empty: name at least one file under data.sources."))
    return [
        file
        for source, number in _numbered_sources(data)
        for file in locate_source(source, number, cache_dir, streaming=data.streaming and number < len(data.sources))
    ]


def local_files(data: DataConfig) -> list[DataFile]:
    """Return the files of the sources that have a path; downloads and derives nothing."""
    sources = _numbered_sources(data)
    with_path = [(source, number) for source, number in sources if source.path and not is_remote(source.path)]
    return [file for source, number in with_path for file in locate_source(source, number, Path())]


def _numbered_sources(data: DataConfig) -> list[tuple[SourceConfig, int]]:
    """Return (source, its number) of all sources, validation after training."""
    return [(source, number) for number, source in enumerate([*data.sources, *data.validation])]


def read_conversations(data: DataConfig, cache_dir: Path) -> Iterator[Conversation]:
    """Yield the training sources' conversations, for a tokenizer; unusable rows are skipped, and reported later."""
    files = [file for file in locate_all(data, cache_dir) if file.source < len(data.sources)]
    return (conversation for _, conversation in usable_rows(files, row_limits(data, files)))


def row_limits(data: DataConfig, files: Sequence[DataFile]) -> list[int]:
    """Return the limits of `read_blocks` for the files of all sources: `data.max_samples` counts rows of training."""
    return [data.max_samples if file.source < len(data.sources) else 0 for file in files]


def content_hash(path: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of a file's bytes, cached below `cache_dir` while size, times and inode stay the same. As in
    git, it is not cached for a file changed just now: a change within the clock's resolution would not be seen.
    """
    with reading(path, DataError):
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        # Nodes that share both folders may number the device differently: each number has its own cache file.
        name = hashlib.sha256(f"{status.st_dev} {path.absolute()}".encode(errors="surrogateescape")).hexdigest()[:32]
        hash_file = cache_dir / "hashes" / f"{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            remembered = json.loads(hash_file.read_text(encoding="utf-8"))
            if remembered["stamp"] == stamp:
                return str(remembered["sha256"])
        digest = sha256(path)
    if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_S:
        with suppress(OSError):  # a hash that cannot be cached is no error
            hash_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(hash_file, json.dumps({"path": str(path), "stamp": stamp, "sha256": digest}).encode())
    return digest


def _inode_of(path: Path) -> Hashable:
    """Return (device, inode) of a file; of one behind a URL (`RemotePath`), which has no inode, the URL."""
    status = path.stat()
    return status.st_dev, status.st_ino or str(path)


def check_distinct(data: DataConfig, files: Sequence[DataFile], hashes: Sequence[str] | None = None) -> None:
    """Raise a DataError if two sources read the same file (by inode, so links count), or, with `hashes` of the files,
    the same content. The same file with other `columns` or another format is allowed.
    """
    identities: Sequence[Hashable] = hashes or [_inode_of(file.path) for file in files]
    seen: dict[Hashable, list[DataFile]] = {}  # by identity and columns: the first file of each source
    num_training = len(data.sources)

    def source_key(file: DataFile) -> str:
        in_training, in_validation = f"data.sources[{file.source}]", f"data.validation[{file.source - num_training}]"
        return in_training if file.source < num_training else in_validation

    for file, identity in zip(files, identities, strict=True):
        # Other columns or another format make other samples of the same rows, such as a translation in both directions.
        earlier_files = seen.setdefault((identity, tuple(sorted(file.columns.items()))), [])
        for earlier in earlier_files:
            formats = {earlier.row_format, file.row_format}
            has_other_format = len(formats) > 1 and RowFormat.auto not in formats  # auto may detect the same
            if earlier.source == file.source or has_other_format:
                continue
            first, second = source_key(earlier), source_key(file)
            paths = f"{file.path}" if earlier.path == file.path else f"{earlier.path} = {file.path}"
            if earlier.source < num_training <= file.source:
                raise DataError(
                    "{second} is also training data ({first}): {files}. A validation loss on trained rows says "
                    "nothing. Use other rows for validation, or remove data.validation: data.validation_fraction then "
                    "holds out some rows.",
                    first=first,
                    second=second,
                    files=paths,
                )
            raise DataError(
                "{first} and {second} read the same file: {files}. Remove one of them. To train its rows more often, "
                "set `weight` (weight: 2 takes each row twice per epoch).",
                first=first,
                second=second,
                files=paths,
            )
        if all(earlier.source != file.source for earlier in earlier_files):
            earlier_files.append(file)
