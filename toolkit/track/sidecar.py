"""The process that feeds the trackers, beside rank 0: whatever a tracker does, training does not wait for it.

python -m toolkit.track.sidecar RUN_FOLDER

Reads messages from stdin, one JSON object per line, and answers on stdout with what the user is to be told. Each
tracker has a thread and a queue of its own. It ends when stdin does, whatever became of rank 0, and soon.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from toolkit.messages import set_language
from toolkit.secrets import hide
from toolkit.track.clients.base import FAILED, Run
from toolkit.track.lane import Lane

KILLED_PATIENCE_S = 5.0
"""Time to end in when rank 0 is gone without a word: its run may be started again at once."""


def main() -> None:
    """Serve one session, to its end."""
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the end of stdin is the word that counts
    os.nice(5)
    lanes = _serve(folder, _own_stdout())
    with suppress(OSError):
        sys.stderr.flush()
    # Not sys.exit: a library may wait at exit for a server that does not answer.
    os._exit(0 if all(lane.is_done for lane in lanes) else 1)


def _own_stdout() -> TextIO:
    """Return a file for answers; whatever else is printed, by libraries and their processes, goes where stderr goes."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr = cast("TextIO", _Hiding(sys.stderr))
    return replies


class _Hiding:
    """A stream that leaves out secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without them."""
        return self._stream.write(hide(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _serve(folder: Path, replies: TextIO) -> list[Lane]:
    lock = threading.Lock()

    def reply(message: Mapping[str, Any]) -> None:
        with lock, suppress(OSError):
            replies.write(json.dumps(message) + "\n")
            replies.flush()

    lanes: list[Lane] = []
    status, patience_s = FAILED, KILLED_PATIENCE_S
    for line in sys.stdin:
        try:
            message = json.loads(line)
        except ValueError:  # half a line: rank 0 died while it wrote
            break
        kind = message.pop("kind")
        if kind == "begin":
            lanes = _begin(folder, message, reply)
        elif kind == "end":
            status, patience_s = message["status"], message["patience_s"]
            break
        else:
            for lane in lanes:
                lane.put(kind, message)
    until = time.monotonic() + patience_s
    for lane in lanes:
        lane.close(status)
    for lane in lanes:
        lane.wait(until)
    return lanes


def _begin(folder: Path, message: dict[str, Any], reply: Callable[[Mapping[str, Any]], None]) -> list[Lane]:
    set_language(message["language"])
    lanes = []
    rows = _rows_so_far(folder, message["metrics_bytes"])
    for name, settings in message["trackers"].items():
        run = Run(
            name=folder.name,
            id="",
            folder=folder,
            settings=settings,
            hyperparameters=message["hyperparameters"],
            texts=message["texts"],
            step=message["step"],
        )
        lanes.append(Lane(name, run, rows, reply))
    return lanes


def _rows_so_far(folder: Path, length: int) -> list[dict[str, Any]]:
    """Return the rows that metrics.jsonl had when the session began."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            return [json.loads(line) for line in file.read(length).splitlines()]
    except (OSError, ValueError):
        return []


if __name__ == "__main__":
    main()
