"""Where the libraries' own messages go: into a file of each rank, their warnings to the terminal as well."""

import io
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import IO

import transformers
from torch import distributed

from toolkit.secrets import HidingFilter, hide

_NCCL_WARNING = re.compile(r"NCCL (WARN|ERROR)")
_LOOK_S = 1.0
_is_apart = False


def start_logs(file: Path, rank: int) -> None:
    """Send what libraries say to a file from here on.

    Warnings of DeepSpeed and transformers stay on the terminal of rank 0, errors on those of all ranks, NCCL's warnings
    too. What libraries print by themselves, in C and past `sys.stdout`, goes to the file alone: it would tear the live
    view to pieces, and nobody reads it eight times.

    Args:
        file: the log of this rank; its folder is made.
        rank: of this process.
    """
    file.parent.mkdir(exist_ok=True)
    log = open(file, "a", encoding="utf-8", errors="backslashreplace")
    _take_stdout(log, rank)
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(HidingFilter())
    for name in ("DeepSpeed", "transformers"):
        logger = logging.getLogger(name)
        for existing in logger.handlers:
            existing.setLevel(logging.WARNING if rank == 0 else logging.ERROR)
            existing.addFilter(HidingFilter())
            if isinstance(existing, logging.StreamHandler) and not isinstance(existing, logging.FileHandler):
                existing.setStream(_Stderr())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    # Deprecations inside DeepSpeed and transformers are for developers: into the file, not between the progress lines.
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.addHandler(handler)
    warnings.propagate = False
    transformers.utils.logging.disable_progress_bar()
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        threading.Thread(target=pass_on_warnings, args=(file, _Stderr()), name="nccl", daemon=True).start()


def _take_stdout(log: IO[str], rank: int) -> None:
    """Put the file in the place of the stdout that C code writes to; Python's own stays what it was on rank 0."""
    global _is_apart
    sys.stdout.flush()
    if not rank and not _is_apart:
        shown = os.fdopen(os.dup(1), "wb")
        sys.stdout = LastingStdout(shown, encoding=sys.stdout.encoding, errors="backslashreplace", line_buffering=True)
        _is_apart = True
    os.dup2(log.fileno(), 1)


class LastingStdout(io.TextIOWrapper):
    """A stdout that outlives its reader: who closes the terminal, or ends `tee`, must not keep a run from saving."""

    def write(self, text: str) -> int:
        """Write; into nothing from the first failure on."""
        try:
            return super().write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        """Flush, likewise."""
        try:
            super().flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Stderr:
    """What `sys.stderr` is at the moment: the live view takes its place while it is there."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def pass_on_warnings(file: Path, out: "IO[str] | _Stderr", ended: threading.Event | None = None) -> None:
    """Copy the lines with NCCL's warnings from a log that grows; never returns without `ended`.

    Args:
        file: the log.
        out: where they go.
        ended: set when enough has been seen.
    """
    with open(file, encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        rest = ""
        while True:
            *whole, rest = (rest + lines.read()).split("\n")
            for line in whole:
                if _NCCL_WARNING.search(line):
                    out.write(hide(line) + "\n")
                    out.flush()
            if ended is not None and ended.is_set():
                return
            time.sleep(_LOOK_S)
