"""Files on their way to the disk and back: what caches, checkpoints and metrics need."""

import errno
import fcntl
import hashlib
import json
import os
import pickle
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from toolkit.messages import ToolkitError, tr, user_name, warn

STALE_S = 90.0
"""Seconds for which a file that another node has just made may be missing here: NFS caches absence for up to 60 s."""
_BLOCK_BYTES = 1 << 22
TENSOR_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of types in safetensors -> in PyTorch, of what models are trained with."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PASSING = (
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),
)
"""Of a file server that does not answer for a while, and of a system without room."""


def pickled_code(file: Path, error: pickle.UnpicklingError) -> str:
    """Return the message about a file that torch has refused (`error`), as unpickling it would run code."""
    # Of torch's long text, which advises to run the code, only the sentence that names it: "Unsupported global: …".
    lines = str(error).strip().splitlines()
    line = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
    sentence = line[max(line.find("Unsupported"), 0) :].strip().split(". ")[0]
    return tr(
        "{file} is a pickle that wants to run code, which is rejected: {reason}. Nothing was executed. Get the weights "
        "from a source you trust, as safetensors if there are any.",
        file=file,
        reason=sentence.rstrip("."),
    )


def proves_nothing(error: OSError) -> bool:
    """Whether an error of reading a file leaves open what is in it: it is another user's, or it may pass."""
    return isinstance(error, PermissionError) or error.errno in _PASSING


def flush(path: Path) -> None:
    """Flush a file or directory to disk (fsync), so that it survives a crash of the system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically; on an OSError the file is as it was before."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        set_permissions(Path(name))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def unused_path(path: Path) -> Path:
    """Return the path if nothing has it, else the first free one of name-2.json, name-3.json and so on."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def set_permissions(path: Path) -> None:
    """Give a file or directory the mode that the umask leaves: temporary ones, and safetensors, come out private."""
    mode = path.stat().st_mode
    widest = 0o777 if stat.S_ISDIR(mode) else 0o666
    path.chmod(widest & ~umask() | mode & stat.S_ISGID)  # a folder keeps handing its group on


def umask() -> int:
    """Return the umask of this process."""
    with suppress(OSError):
        # Asking the system means changing it for a moment, in which another thread may make a file.
        match = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return int(match[1], 8)
    mask = os.umask(0)
    os.umask(mask)
    return mask


def try_lock(file: IO[str] | IO[bytes]) -> tuple[bool, bool]:
    """Return whether the lock on a file was granted, and whether its file system has locks at all. If it has none, the
    lock counts as granted. It ends when the file is closed, or this process ends. OSError if the file system fails.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, True
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True, False
        raise
    return True, True


def lock_or_warn(file: IO[str] | IO[bytes], path: Path) -> bool:
    """Return whether the lock on a file was granted; where the disk has none, warn about other users of `path`."""
    is_granted, means_anything = try_lock(file)
    if is_granted and not means_anything:
        warn("the disk of {path} has no locks: make sure that no other process uses it.", path=path)
    return is_granted


def check_no_symlinks(folder: Path, error: type[ToolkitError], names: Sequence[str] | None = None) -> None:
    """Raise `error` if a folder (which need not exist), something in it (of these `names`; None: any) or in its folders
    is a symbolic link of another user (but root), as writing would follow it to wherever it leads.
    """

    def check(path: Path) -> None:
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.getuid()):
                sentence = tr(
                    "{path} is a symbolic link that belongs to {owner}, and writing through it would "
                    "change {target}. Remove it, or choose another directory.",
                    path=path,
                    owner=user_name(status.st_uid),
                    target=path.resolve(),
                )
                raise error(sentence)

    check(folder)  # before what is in it, so that no link is followed that has not been looked at
    for path in sorted(folder.glob("*")) if names is None else [folder / name for name in names]:
        check(path)
        for inner in sorted(path.glob("*")):
            check(inner)


LONGEST_LINE = 1 << 20
"""Bytes: no row of a run is as long, so more is another file's."""


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a JSONL file one at a time; None for a line that is not a JSON object."""
    with open_regular_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (piece := file.readline(LONGEST_LINE)) and not piece.endswith(b"\n"):
                    pass  # all of the line is skipped
                yield None
            elif line.strip():
                value = None
                with suppress(ValueError, RecursionError):
                    value = json.loads(line)
                yield value if isinstance(value, dict) else None


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file to read; an OSError if it is none, such as a FIFO, which would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, tr("it is no file"), str(path))
    return path.open("rb")
