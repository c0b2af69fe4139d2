"""From an exception to one message and an exit code."""

import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from toolkit.distributed import failure, orphans, signals
from toolkit.errors import LaunchError, Stopped, ToolkitError
from toolkit.launch import environment, report
from toolkit.messages import tr
from toolkit.secrets import hide

# A launcher ends every rank as soon as one has failed, so a rank that fails a moment before rank 0 must not deprive it
# of its word. After this long without having been ended, the error is this rank's own and it speaks.
OTHER_RANKS_WAIT_S = 5.0


def guarded(function: Callable[[], int]) -> int:
    """Run a command; report whatever it raises, once over all ranks, and return the exit code."""
    if lost := _lost():
        _say(lost, trace="")
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files need not be UTF-8, and a terminal need not know Chinese: never a reason to end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _deferring(function)
    except ToolkitError as error:
        code = error.exit_code
        _report(f"{_kind(error)}: {error}", trace="", code=code, agreed=isinstance(error, Stopped))
    except KeyboardInterrupt:
        code = 130
        _report(tr("interrupted."), trace="", code=code, agreed=False)
    except Exception as error:  # the last resort: whatever it is, it is told once, with its traceback
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
    failure.end_watch()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "torch" in sys.modules:
        # Other ranks may be gone: leaving the process group in the ordinary way could wait for them for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _lost() -> str:
    """End with the launcher from now on, in the seconds in which this process imports too; "" or why it must end."""
    with suppress(LaunchError):  # the command finds that out again, and it is told then
        return orphans.watch(environment.detect(os.environ))
    return ""


def _deferring(function: Callable[[], int]) -> int:
    """Run a command. Once it has failed a signal only raises the flag: it must not keep the failure from being told.

    That is soon: launchers end the ranks that are left as soon as one has failed, and often they have too.
    """
    try:
        return function()
    except BaseException:
        signals.defer()
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
    rank = int(os.environ.get("RANK", "0"))
    if failure.is_told_of_peer():
        return
    if agreed:
        # A launcher signals the ranks that are left when one has failed: that one has the last word.
        if not failure.another_has_failed():
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                report.note(code=code)
            if rank == 0:
                _say(message, trace)
        return
    if trace and failure.was_killed():
        return
    if not failure.announce(rank, message + ("\n" + trace if trace else ""), code):
        return
    if not failure.is_watching() and int(os.environ.get("LOCAL_RANK", "0")) != 0:
        signals.end_in_silence()
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
