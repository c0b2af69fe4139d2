"""Which data files a source with a path means: a file, those below a directory, or those of a pattern."""

import os
from pathlib import Path

from toolkit.config.files import DATA_SUFFIXES, PACKED_SUFFIXES, TABLE_SUFFIXES, located
from toolkit.config.schema import SourceConfig
from toolkit.data.readers import uncompressed_name
from toolkit.file_patterns import matching, walk
from toolkit.messages import DataError, listed, reason_of, tr


def files_of(source: SourceConfig) -> list[Path]:
    """Return the files of a source with a path, sorted: the file itself, those below a directory, or the matches of a
    pattern. Empty ones are left out with a warning. DataError if none is left, or one is no data file.
    """
    path = Path(located(source.path))
    if os.path.isdir(path):
        from toolkit.data.hub_datasets import files_saved_by_datasets

        files = files_saved_by_datasets(path, source.split) or _data_files_below(path)
        if not files:
            raise DataError(
                "The directory '{path}' holds no data file. Known are {suffixes}, also with .gz or .zst.",
                path=path,
                suffixes=listed(*DATA_SUFFIXES),
            )
    elif os.path.isfile(path):  # not the method of paths, which raises of a name that is too long
        files = [path]
    else:
        files = sorted(matching(source.path))
        if not files or not source.path:
            raise DataError(
                "There is no data file '{path}' (looked in {folder}). Correct `path` under data.sources or "
                "data.validation.",
                path=source.path,
                folder=Path.cwd(),
            )
    for file in files:
        suffixes = file.suffixes[-2:]
        if len(suffixes) == 2 and suffixes[0].lower() in TABLE_SUFFIXES and suffixes[1].lower() in PACKED_SUFFIXES:
            raise DataError("'{path}' is packed twice: Parquet and Arrow compress by themselves. Unpack it.", path=file)
    known_suffixes = (*DATA_SUFFIXES, *PACKED_SUFFIXES)
    odd_files = [file for file in files if not file.stat().st_size or file.suffix.lower() not in known_suffixes]
    if not odd_files:
        return files
    from toolkit.data import foreign_files

    for file in odd_files:
        foreign_files.check_is_json(file)  # its suffix does not say so; an empty file passes
    return foreign_files.without_empty(files)


def _data_files_below(folder: Path) -> list[Path]:
    """Return the files with a data suffix below a directory, sorted; links are followed, hidden files skipped."""

    def raise_error(error: OSError) -> None:
        raise DataError("Cannot read '{path}': {reason}.", path=error.filename, reason=reason_of(error)) from error

    def is_visible(path: Path) -> bool:
        return not path.name.startswith(".")

    walked = walk(folder, str(folder), is_visible, raise_error)
    paths = (directory / name for directory, names in walked for name in names)
    files = [path for path in paths if is_visible(path) and uncompressed_name(path.name).endswith(DATA_SUFFIXES)]
    for path in files:
        if not os.path.exists(path):
            raise DataError("Cannot read '{path}': {reason}.", path=path, reason=tr("the link leads nowhere"))
    return sorted(path for path in files if os.path.isfile(path))
