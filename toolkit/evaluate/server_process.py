"""A server as a process of this machine, which ends with this one."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from toolkit import children
from toolkit.launch.environment import without_ranks
from toolkit.launch.processes import last_line

READY_S = 1800
"""A large model takes minutes to load."""
_ASK_S = 60
_POLL_S = 0.5
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine


class NotStarted(Exception):
    """A server that ended before it was ready; the message is its last line."""


@contextmanager
def running_server(
    command: Sequence[str], address: str, ready: str, log: Path, environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Run a server until the context ends.

    Args:
        command: what starts it, and may start further processes.
        address: where it will listen, such as http://127.0.0.1:8000.
        ready: the path that it answers once it is ready, such as /health.
        log: what it prints is added to this file.
        environ: its environment; it is no rank, and nothing is looked up on Hugging Face.

    Raises:
        NotStarted: it ended, or was not ready within READY_S.
    """
    with log.open("ab") as output:
        process = children.start_tree(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=without_ranks(environ) | {"HF_HUB_OFFLINE": "1"},
        )
        until = time.monotonic() + READY_S
        try:
            while not _is_ready(f"{address}{ready}"):
                if process.poll() is not None or time.monotonic() > until:
                    raise NotStarted(last_line(log.read_text("utf-8", "replace"))[:300])
                time.sleep(_POLL_S)
            yield
        finally:
            process.terminate()
            process.wait()


def _is_ready(url: str) -> bool:
    """Whether a server answers a request with success."""
    with suppress(OSError, HTTPException), _OPENER.open(url, timeout=_ASK_S) as response:
        return bool(response.status == 200)
    return False
