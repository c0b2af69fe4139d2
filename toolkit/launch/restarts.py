"""Who starts a run again that died: `toolkit launch` or torchrun's agent; anybody else is refused."""

import os
import shlex
from collections.abc import Mapping, Sequence

from toolkit.errors import LaunchError
from toolkit.launch import ancestors, report
from toolkit.launch.environment import Ranks
from toolkit.messages import tr


def number(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often these ranks have been started again by whoever starts them; 0 the first time."""
    told = report.read(environ)
    return int(told["restart"] if told else environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def check(most: int, ranks: Ranks, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what would not be started again, or more often than was asked for.

    Args:
        most: `run.max_restarts`.
        ranks: who this process is.
        words: the command line after run.py, for the command that is shown.
        environ: the environment.

    Raises:
        LaunchError: the launcher does something else.
    """
    if report.read(environ):
        return
    if ranks.launcher == "torchrun":
        given = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if given != most:
            raise LaunchError(
                tr(
                    "run.max_restarts = {most}, but torchrun starts again {given} times. Type `torchrun "
                    "--max-restarts={most} …`, or set run.max_restarts={given}.",
                    most=most,
                    given=given,
                )
            )
    elif most:
        command = shlex.join(["toolkit", "launch", *ancestors.launcher_options(), *words])
        raise LaunchError(
            tr(
                "run.max_restarts = {most}, but nobody here would start the run again ({launcher}). Type: {command}",
                most=most,
                launcher=ranks.launcher,
                command=command,
            )
        )
