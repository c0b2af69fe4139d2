"""Files of a source that are no data: empty ones, other programs' documents, texts that are not JSON or not UTF-8."""

import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from toolkit.config.files import DATA_SUFFIXES
from toolkit.data.readers import open_data_file, uncompressed_name
from toolkit.encodings import UTF16_MARKS, conversion, is_utf8
from toolkit.messages import DataError, joined, listed, reading, tr, warn

_LOOKED_AT_BYTES = 1 << 16
_ZIP, _OLE, _PDF = b"PK\x03\x04", b"\xd0\xcf\x11\xe0", b"%PDF"  # .xlsx and .docx are ZIP, .xls and .doc OLE
_TABLES = {b"PAR1": ".parquet", b"ARRO": ".arrow"}


def without_empty(files: Sequence[Path]) -> list[Path]:
    """Return the files that are not empty, and warn of the others; a DataError if all are empty."""
    sizes = {file: file.stat().st_size for file in files}
    if not any(sizes.values()):
        raise DataError("The data file '{path}' is empty.", path=files[0])
    for file, size in sizes.items():
        if not size:
            _warn_of_empty(file)
    return [file for file, size in sizes.items() if size]


@cache
def _warn_of_empty(file: Path) -> None:
    """Print once for each file, though files are looked for several times."""
    warn("The data file '{path}' is empty: it is skipped.", path=file)


def check_is_json(file: Path) -> None:
    """Raise a DataError for a file of an unknown kind that does not begin as JSON does, such as a plain text."""
    with reading(file, DataError), file.open("rb") as opened:
        start = opened.read(_LOOKED_AT_BYTES)
    _reject_documents(file, start)
    content = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if content and content[:1] not in b"{[" and content[:2] not in UTF16_MARKS:  # `check_encoding` tells of UTF-16
        raise DataError(
            '\'{path}\' is no data file: plain text is not a format. Write each text as a line {{"text": "…"}} of a '
            ".jsonl file. Known are {suffixes}, also with .gz or .zst.",
            path=file,
            suffixes=listed(*DATA_SUFFIXES),
        )


def check_encoding(file: Path) -> None:
    """Raise a DataError for another program's document, or if a file's beginning shows another encoding than UTF-8: it
    is UTF-16; column names of a table are not UTF-8; or most lines are not, and the others have no character beyond
    ASCII, so that none is evidently UTF-8. Fewer lines that are not UTF-8 are errors of their rows.
    """
    with open_data_file(file) as (content, _):
        start = content.read(_LOOKED_AT_BYTES)
    _reject_documents(file, start)
    is_table = uncompressed_name(file.name).endswith((".csv", ".tsv"))
    lines = start.split(b"\n")
    lines = lines[:-1] or lines  # the last one may be cut off
    broken = [line for line in lines if not is_utf8(line)]
    has_utf8_beyond_ascii = any(not line.isascii() and is_utf8(line) for line in lines)
    are_most_broken = len(broken) > max(1, len(lines) // 2)  # a single line shows no encoding
    are_names_broken = is_table and lines[0] in broken
    is_utf16 = 0 in start[:2] or start[:2] in UTF16_MARKS  # a letter of ASCII has a zero byte in UTF-16
    is_in_other_encoding = are_names_broken or (are_most_broken and not has_utf8_beyond_ascii)
    has_zero_bytes = 0 in start  # outside of UTF-16: damaged or binary, and no conversion would help
    if is_utf16 or (is_in_other_encoding and not has_zero_bytes):
        hint = tr('Excel does it with "Save as", "CSV UTF-8".') if is_table else ""
        raise DataError(joined(tr("{place}: {reason}.", place=file, reason=conversion(start, file)), hint))


def _reject_documents(file: Path, start: bytes) -> None:
    """Raise a DataError for a document of another program, whatever its name: Excel, Word, PDF, an archive, or a table
    (Parquet, Arrow) with another suffix. `start`: the first bytes of its content.
    """
    is_zip = start.startswith(_ZIP) and zipfile.is_zipfile(file)
    inside = " ".join(zipfile.ZipFile(file).namelist()) if is_zip else ""
    if suffix := _TABLES.get(start[:4]):
        raise DataError("'{path}' is a {suffix} file by its content. Rename it.", path=file, suffix=suffix)
    if "xl/" in inside or (start.startswith(_OLE) and file.suffix.lower() != ".doc"):
        raise DataError(
            "'{path}' is an Excel file. Save it in Excel as \"CSV UTF-8\", and give that file instead.", path=file
        )
    if "word/" in inside or start.startswith((_OLE, _PDF)):
        raise DataError(
            '\'{path}\' is a Word or PDF document. Write its texts as lines {{"text": "…"}} of a .jsonl file.',
            path=file,
        )
    if start.startswith(_ZIP):
        raise DataError("'{path}' is a ZIP archive. Unpack it.", path=file)
