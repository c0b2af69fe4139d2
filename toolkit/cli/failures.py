"""From an exception to one message and an exit code."""

import errno
import io
import math
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from toolkit.distributed import failure
from toolkit.errors import LaunchError, Stopped, ToolkitError
from toolkit.launch import environment, processes, rank_status
from toolkit.messages import tr
from toolkit.outside import is_failure, system_text
from toolkit.secrets import hide

# A launcher ends every rank as soon as one has failed, so a rank that fails a moment before rank 0 must not deprive it
# of its word. After this long without having been ended, the error is this rank's own and it speaks.
OTHER_RANKS_WAIT_S = 5.0
_MACHINE, _READER_GONE = 74, 141
"""Exit codes: a disk or stream that fails; a reader of our output that has ended, as shells report SIGPIPE."""
_OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG),
    errno.EPIPE,
)


def guarded(function: Callable[[], int]) -> int:
    """Run a command; report whatever it raises, once over all ranks, and return the exit code."""
    _prepare_process()
    if lost := _lost():
        _say(lost, trace="")
        return 1
    try:
        code = _deferring(function)
        sys.stdout.flush()  # here, where a full disk behind it can still be told
        failure.end_watch()  # the exit status does not tell other ranks: its launcher may have taken it already
        return code
    except ToolkitError as error:
        code = error.exit_code
        _report(f"{_kind(error)}: {error}", trace="", code=code, agreed=isinstance(error, Stopped))
    except KeyboardInterrupt:
        code = 130
        _report(tr("interrupted."), trace="", code=code, agreed=False)
    except BaseException as error:  # the last resort: whatever it is, it is reported once, with its traceback
        if isinstance(error, OSError) and (told := _of_the_machine(error)) is not None:
            if told:
                _report(told, trace="", code=_MACHINE, agreed=False)
            return _leave(_MACHINE if told else _READER_GONE)
        if not is_failure(error):
            raise
        where = tr(
            "rank {rank} on {host}",
            rank=os.environ.get("RANK", "0"),
            host=socket.gethostname(),
        )
        code = 1
        _report(
            f"{type(error).__name__} ({where}): {error}",
            trace=traceback.format_exc(),
            code=code,
            agreed=False,
        )
    return _leave(code)


def _leave(code: int) -> int:
    """End the process if others train with it: they may be gone, and leaving the group in order would wait for them."""
    failure.end_watch()
    if _number("WORLD_SIZE", 1) > 1 and "torch" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _number(name: str, default: int) -> int:
    """Return a launcher's variable; the default where it is no number, which the command itself reports."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default


def _prepare_process() -> None:
    """Make sure that nothing about its streams and warnings ends this process."""
    # What is opened next would take the number of a stream that is closed, and get what libraries print.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files need not be UTF-8, and a terminal need not know Chinese: never a reason to end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.resetwarnings()  # PYTHONWARNINGS=error: torch and deepspeed warn as they are imported
        os.environ.pop("PYTHONWARNINGS", None)  # of the processes that this one starts


def _of_the_machine(error: OSError) -> str | None:
    """Return what to say of a disk or stream that fails; "" of a reader that has read enough; None of other errors."""
    if error.errno not in _OF_DISKS:
        return None
    if error.filename is not None:
        return system_text(error)
    try:  # whatever failed has no name: is it the output?
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as of_stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more as it ends
        if isinstance(of_stdout, BrokenPipeError):
            return ""
        return tr("cannot write to the standard output: {reason}.", reason=of_stdout.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        places = (str(Path.cwd()), tempfile.gettempdir(), "/dev/shm")  # noqa: S108
        full = [place for place in places if _free_mib(place) < 1]
        if full == ["/dev/shm"]:  # noqa: S108
            return tr(
                "{reason}: /dev/shm, the memory that ranks and the workers of data.num_workers share. Remove what old "
                "processes left there, or give containers more (docker run --shm-size=16g), or set data.num_workers=0.",
                reason=error.strerror,
            )
        return tr(
            "{reason}: {places}. Free some, or choose other directories (run.dir, prepare.dir, TMPDIR).",
            reason=error.strerror,
            places=", ".join(full) or "?",
        )
    return None


def _free_mib(place: str) -> float:
    with suppress(OSError):
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize / (1 << 20)
    return math.inf


def end_with_launcher() -> None:
    """End with the launcher from now on, in a program that imports for seconds before it calls `guarded`.

    Processes that multiprocessing starts read the program too, but the rank ends them.

    Raises:
        SystemExit: the launcher has ended already.
    """
    if multiprocessing.parent_process() is None and (lost := _lost()):
        _say(lost, trace="")
        raise SystemExit(1)


def _lost() -> str:
    """End with the launcher from now on, in the seconds in which this process imports too; "" or why it must end."""
    with suppress(LaunchError):  # the command finds that out again, and reports it then
        return processes.exit_with_launcher(environment.detect(os.environ))
    return ""


def _deferring(function: Callable[[], int]) -> int:
    """Run a command. Once it has failed a signal only raises the flag: it must not keep the failure from being told.

    That is soon: launchers end the ranks that are left as soon as one has failed, and often they have too.
    """
    try:
        return function()
    except BaseException:
        failure.defer_signals()
        raise


def _kind(error: ToolkitError) -> str:
    return type(error).__name__


def _report(message: str, trace: str, code: int, agreed: bool) -> None:
    """Say it, unless another rank has said it already.

    Args:
        message: one message.
        trace: the traceback of what is not the user's mistake, else "".
        code: exit code of this process.
        agreed: every rank knows the same (a stop by signal): rank 0 speaks, and nothing has failed.
    """
    message, trace = hide(message), hide(trace)
    rank = _number("RANK", 0)
    if failure.has_reported_peer():
        return
    if agreed:
        # A launcher signals the ranks that are left when one has failed: that one has the last word.
        if not failure.another_has_failed():
            if _number("LOCAL_RANK", 0) == 0:
                rank_status.report_status(code=code)
            if rank == 0:
                _say(message, trace)
        return
    if trace and failure.was_killed():
        return
    if not failure.announce_failure(rank, message + ("\n" + trace if trace else ""), code):
        return
    if not failure.is_watching() and _number("LOCAL_RANK", 0) != 0:
        failure.exit_silently()
        time.sleep(OTHER_RANKS_WAIT_S)
        message = f"[rank {rank}] {message}"
    _say(message, trace)


def _say(message: str, trace: str) -> None:
    with suppress(OSError):  # a terminal that is gone must not keep this process from ending
        sys.stdout.flush()
    with suppress(OSError):
        if trace:
            sys.stderr.write(trace)
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
