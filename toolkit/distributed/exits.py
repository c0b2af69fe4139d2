"""How a command ends: whatever it raises is reported once over all ranks, and becomes an exit code."""

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

from toolkit import secrets
from toolkit.distributed import failure, signals
from toolkit.launch import environment
from toolkit.messages import ConfigError, LaunchError, Stopped, ToolkitError, is_failure, system_text, tr

# A launcher ends every rank as soon as one has failed, so a rank that fails a moment before rank 0 must not deprive it
# of its word. After this long without having been ended, the error is this rank's own and it speaks.
OTHER_RANKS_WAIT_S = 5.0
_MACHINE, _READER_GONE = 74, 141
"""Exit codes: a disk or stream that fails; a reader of our output that has ended, as shells report SIGPIPE."""
_OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    errno.EPIPE,
)


def run_guarded(function: Callable[[], int]) -> int:
    """Run a command and return the exit code; what it raises is reported by one of the ranks only."""
    _prepare_process()
    if reason_to_end := _tie_to_launcher():
        _say(reason_to_end)
        return 1
    try:
        try:
            code = function()
        except BaseException:
            # A signal must not keep the failure from being told: launchers end the ranks that are left at once.
            signals.defer_signals()
            raise
        sys.stdout.flush()  # here, where a full disk behind it can still be told
        failure.end_watch()  # the exit status does not tell other ranks: its launcher may have taken it already
        signals.release_signals()
        return code
    except ToolkitError as error:
        code = error.exit_code
        _report(f"{type(error).__name__}: {error}", code, agreed=isinstance(error, Stopped))
    except KeyboardInterrupt:
        code = 130
        _report(tr("interrupted."), code)
    except BaseException as error:  # the last resort: whatever it is, it is reported once, with its traceback
        machine_text = _machine_error_text(error) if isinstance(error, OSError) else None
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of a path that somebody gave
            code = ConfigError.exit_code
            _report(f"ConfigError: {system_text(error)}", code)
        elif machine_text:
            code = _MACHINE
            _report(machine_text, code)
        elif machine_text == "":  # as in `toolkit … | head`: an end, not an error
            code = _READER_GONE
        elif is_failure(error):
            code = 1
            where = tr("rank {rank} on {host}", rank=os.environ.get("RANK", "0"), host=socket.gethostname())
            _report(f"{type(error).__name__} ({where}): {error}", code, trace=traceback.format_exc())
        else:
            raise
    failure.end_watch()
    if _number("WORLD_SIZE", 1) > 1 and "torch" in sys.modules:
        # The other ranks may be gone, and leaving the process group in order would wait for them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _local_rank() -> int:
    """Return this rank's number on its node: by the launcher's variables, once they were read, as that changes one."""
    return environment.local_rank or _number("LOCAL_RANK", 0)


def _number(name: str, default: int) -> int:
    """Return an integer variable that a launcher sets; the default if it is none, which the command reports."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default  # longer ones number no rank


def _prepare_process() -> None:
    """Keep encoding errors, closed streams and warnings from ending this process."""
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


def _machine_error_text(error: OSError) -> str | None:
    """Return the message about an error of a disk or of stdout; "" if stdout's reader closed it; None for others."""
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
        folders = (str(Path.cwd()), tempfile.gettempdir(), "/dev/shm")  # noqa: S108
        full = [folder for folder in folders if _free_mib(folder) < 1]
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


def _free_mib(folder: str) -> float:
    with suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize / (1 << 20)
    return math.inf


def end_with_launcher() -> None:
    """End with the launcher from now on, while a program imports before `run_guarded`; SystemExit if it has ended. Not
    in processes that multiprocessing starts, which read the program too: the rank ends them.
    """
    if multiprocessing.parent_process() is not None:
        return
    if reason_to_end := _tie_to_launcher():
        _say(reason_to_end)
        raise SystemExit(1)


def _tie_to_launcher() -> str:
    """Let a rank end with its launcher from now on; return why it must end now if the launcher has ended, else ""."""
    with suppress(LaunchError):  # the command finds that out again, and reports it then
        ranks = environment.detect(os.environ)
        if ranks.launcher != "single":
            from toolkit.launch.orphans import exit_with_launcher

            return exit_with_launcher(ranks)
    return ""


def _report(message: str, code: int, trace: str = "", agreed: bool = False) -> None:
    """Print an error and tell the launcher's parent the exit code, unless another rank has reported first. `trace`: the
    traceback, "" for a user's mistake; `agreed`: all ranks raise the same error, and rank 0 prints it.
    """
    message, trace = secrets.hide(message), secrets.hide(trace)
    rank = _number("RANK", 0)
    if failure.has_reported_peer():
        return
    if agreed:
        # A launcher signals the ranks that are left when one has failed: that one has the last word.
        if not failure.another_has_failed():
            if _local_rank() == 0:
                environment.report_status(code=code)
            if rank == 0:
                _say(message, trace)
        return
    if trace:
        cause = failure.blame_peers()  # a rank that was killed breaks the collectives of the others
        if failure.has_reported_peer():  # now it may have: it was looked for
            return
        if cause:
            message, trace = cause, ""
    # Claims the run's marker FAILED and reports the exit code; False if another rank was first.
    if not failure.announce_failure(rank, message + ("\n" + trace if trace else ""), code):
        return
    if failure.run_folder() is None and _local_rank() != 0:
        # There is no marker yet: the first rank of the node gets time to report, and its launcher ends this one then.
        signals.die_of_signals()
        time.sleep(OTHER_RANKS_WAIT_S)
        message = f"[rank {rank}] {message}"
    _say(message, trace)


def _say(message: str, trace: str = "") -> None:
    """Write a message to stderr, behind the traceback if there is one."""
    with suppress(OSError):  # a terminal that is gone must not keep this process from ending
        sys.stdout.flush()
    with suppress(OSError):
        if trace:
            sys.stderr.write(trace)
        sys.stderr.write(message + "\n")
        if trace:
            run = f" {folder}" if (folder := failure.run_folder()) else ""
            help_line = tr(
                "What to do: docs/debugging.md. To ask for help, attach what this writes: toolkit doctor --report{run}",
                run=run,
            )
            sys.stderr.write(help_line + "\n")
        sys.stderr.flush()
