"""Runs that `toolkit board` started: they go on when it ends, and it finds them again by what they leave in .board/."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import psutil

from toolkit import children
from toolkit.config import files
from toolkit.disk import write_atomically
from toolkit.messages import ConfigError, RunFolderError, tr
from toolkit.report.run import is_worked_on

_LOG_BYTES = 64 << 10
"""Of the end of a log that is shown."""


class Launches:
    """The `toolkit launch` processes of a directory of runs."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.folder = runs, runs / ".board"
        self._children: list[Any] = []

    def names(self) -> list[str]:
        """Return the names of the runs that were started here."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def start(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Launch `recipe` as the run `name` on `ranks` GPUs (or CPU processes)."""
        name, recipe, ranks = (str(given.get(word, "")).strip() for word in ("name", "recipe", "ranks"))
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ConfigError(tr("a run needs a name of letters, digits, `-`, `_` and `.`."))
        if not re.fullmatch(r"[1-9]\d{0,3}", ranks):
            raise ConfigError("{name} = {text} is not a positive whole number.", name="--num_gpus", text=ranks)
        path = files.known_recipes().get(recipe, Path(recipe))
        if path.suffix not in (".yaml", ".yml") or not path.is_file():
            raise ConfigError("{file} is no recipe: save it first.", file=recipe)
        if self.is_alive(name) or is_worked_on(self.runs / name):
            raise RunFolderError("{name} is running already.", name=name)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "toolkit", "launch", "--num_gpus", ranks, f"recipe={path.resolve()}"]
        command += [f"run.name={name}", f"run.dir={self.runs.resolve()}"]
        with self.log(name).open("ab") as log:
            child = children.start_detached(command, stdout=log, stderr=STDOUT)
        self._children.append(child)
        record = {"pid": child.pid, "created": psutil.Process(child.pid).create_time(), "command": command}
        write_atomically(self.folder / f"{name}.json", json.dumps(record).encode())
        return {"said": tr("Started {name}.", name=name)}

    def stop(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Stop a run as Ctrl-C does: it saves a checkpoint at the next step."""
        name = str(given.get("run", ""))
        if self.is_alive(name):
            os.kill(self._record(name)["pid"], signal.SIGTERM)
        elif is_worked_on(self.runs / name):  # started elsewhere
            (self.runs / name / "stop").touch()
        else:
            raise RunFolderError("{name} is not running.", name=name)
        return {"said": tr("{name} saves a checkpoint and stops.", name=name)}

    def is_alive(self, name: str) -> bool:
        """Whether a run's launcher, as it was started here, is still there."""
        self._children = [child for child in self._children if child.poll() is None]
        try:
            record = self._record(name)
            process = psutil.Process(record["pid"])
            return bool(process.create_time() == record["created"] and process.status() != psutil.STATUS_ZOMBIE)
        except (OSError, ValueError, KeyError, psutil.Error):
            return False

    def log(self, name: str) -> Path:
        """Return the file of what a run's launcher prints."""
        return self.folder / f"{name}.log"

    def started(self, name: str) -> float:
        """Return when a run was last started here."""
        return float(self._record(name)["created"]) if (self.folder / f"{name}.json").is_file() else time.time()

    def _record(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8")))


def end_of(file: Path) -> str:
    """Return the end of a text file."""
    with file.open("rb") as log:
        log.seek(max(file.stat().st_size - _LOG_BYTES, 0))
        return log.read().decode(errors="replace")
