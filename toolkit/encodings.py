"""What a file that is not UTF-8 is written in, and the command that converts it. Read in errors alone."""

import codecs
import shlex
from pathlib import Path

from toolkit.messages import tr

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def is_utf8(content: bytes) -> bool:
    """Return whether bytes are UTF-8; the last character may be cut off."""
    try:
        codecs.utf_8_decode(content)
    except UnicodeDecodeError:
        return False
    return True


def encoding_of(content: bytes) -> str:
    """Return iconv's name of the likely encoding of bytes that are not UTF-8: UTF-16, else GB18030, else CP1252."""
    if content[:2] in UTF16_MARKS:
        return "UTF-16"
    if 0 in content[:2]:  # UTF-16 without a mark: "a" is 61 00 in little endian, 00 61 in big endian
        return "UTF-16LE" if content[1] == 0 else "UTF-16BE"
    try:
        # Incremental: `content` may end within a character.
        codecs.getincrementaldecoder("gb18030")().decode(content)
    except UnicodeDecodeError:
        return "CP1252"
    return "GB18030"


def conversion(content: bytes, path: Path | None = None) -> str:
    """Return a sentence, without its full stop, that says how to convert a file with such content to UTF-8."""
    encoding = encoding_of(content)
    new = path.with_name(f"{path.stem}_utf8{path.suffix}") if path else "NEW"
    return tr(
        "not UTF-8, but probably {encoding}. Convert it: `iconv -f {name} -t UTF-8 {file} > {new}`",
        encoding="GBK (GB18030)" if encoding == "GB18030" else encoding,
        name=encoding,
        file=shlex.quote(str(path)) if path else "FILE",
        new=shlex.quote(str(new)),
    )
