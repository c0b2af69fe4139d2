"""logs/starts.jsonl: every start of a run, and the rule that a run which dies in one place is not started for ever."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.checkpoint import directory
from toolkit.distributed import watchdog
from toolkit.errors import RepeatedDeath
from toolkit.launch import deepspeed, rank_status
from toolkit.launch.deepspeed import typed_command
from toolkit.launch.environment import detect
from toolkit.messages import tr
from toolkit.report.history import json_lines
from toolkit.train.run_folder import commit

STARTS = "starts.jsonl"


def record(folder: Path, step: int) -> None:
    """Note that a run starts now. For rank 0 only, before anything in the folder is touched.

    Args:
        folder: the run folder.
        step: of the checkpoint from which it goes on; 0 begins anew.

    Raises:
        RepeatedDeath: see `check`.
        OSError: it cannot be written.
    """
    restart = deepspeed.restart_number()
    if restart:
        check(folder, step)
    logs = folder / "logs"
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "restart": restart,
        "by": "toolkit launch" if rank_status.read_status() else detect(os.environ).launcher,
        "reached_step": reached(folder) if (logs / STARTS).exists() else 0,
        "command": typed_command(),
        "world_size": detect(os.environ).world_size,
        "host": socket.gethostname(),
        "commit": commit(),
    }
    logs.mkdir(exist_ok=True)
    with open(logs / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    for path in logs.glob(watchdog.heartbeat_file("*")):  # of the ranks that are gone
        path.unlink(missing_ok=True)
    rank_status.report_status(folder=str(folder))


def check(folder: Path, step: int) -> None:
    """Refuse to start a run again that died twice without a new checkpoint between the two deaths.

    Args:
        folder: the run folder.
        step: of the checkpoint from which it would go on.

    Raises:
        RepeatedDeath: it did, and it would begin where it began the last time.
    """
    rows = _rows(folder / "logs" / STARTS)
    if rows and rows[-1]["restart"] and step <= rows[-1]["from_step"]:
        raise RepeatedDeath(
            tr(
                "the run {folder} died at step {before} and, started again, at step {now}, without a new checkpoint "
                "in between (the last is of step {step}): another start would end there too. The messages above and "
                "{logs} say why. Once that is mended the same command goes on.",
                folder=folder,
                before=rows[-1]["reached_step"],
                now=reached(folder),
                step=step,
                logs=folder / "logs",
            )
        )


def newest_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none; whether it is whole is not looked at."""
    found = directory.published_checkpoints(folder / "checkpoints")
    return (directory.step_of(found[0]) or 0) if found else 0


def reached(folder: Path) -> int:
    """Return the step in which a run ended, as far as it can be told from its rows and its ranks' heartbeats."""
    logged = max((int(row["step"]) for row in _rows(folder / "metrics.jsonl")[-1:]), default=0)
    beats = [row for path in (folder / "logs").glob(watchdog.heartbeat_file("*")) for row in _rows(path)]
    seen = max((int(beat["step"]) for beat in beats), default=0)
    in_step = (watchdog.STEP, watchdog.DATA)
    if seen > logged or any(beat["step"] == logged > 0 and beat["phase"] not in in_step for beat in beats):
        return seen
    return logged + 1


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, [] if it is not there; a line that was cut off is none."""
    with suppress(OSError):
        return [row for row in json_lines(path) if row is not None]
    return []
