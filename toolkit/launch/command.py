"""The command that started a run, as it was typed: a rank sees only the words that its launcher left for it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.launch.ancestors import PROC, ancestors
from toolkit.launch.environment import strip_launcher_arguments
from toolkit.secrets import MASK, hide_all, is_under_secret_name

_LAUNCHERS = ("deepspeed", "ds", "torchrun", "mpirun", "mpiexec", "mpiexec.hydra", "srun", "accelerate")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner")


def typed_command(argv: Sequence[str] | None = None, proc: Path = PROC, pid: str = "self") -> list[str]:
    """Return the words of the command that a person, or a script, started this process with, without secrets.

    Args:
        argv: words of this process; None takes its own.
        proc: the process file system (for tests).
        pid: this process in it.

    Returns:
        The outermost launcher's words where one is found among this machine's processes, else those of this process.
    """
    words: list[str] = []
    for process in ancestors(proc, pid):
        words = _launcher(process.words) or words
    if not words:
        words = ["python", *strip_launcher_arguments(sys.argv if argv is None else argv)]
    return [_hidden(word) for word in words]


def _launcher(words: list[str]) -> list[str]:
    """Return a launcher's words, begun with its name alone; [] for other programs."""
    for place, word in enumerate(words[:4]):
        name = Path(word).name
        if name in _LAUNCHERS or word in _MODULES:
            return [*(["python", "-m"] if word in _MODULES else []), name, *words[place + 1 :]]
        if name == "toolkit" and words[place + 1 : place + 2] in (["launch"], ["train"]):
            return [name, *words[place + 1 :]]
    return []


def _hidden(word: str) -> str:
    name, equals, value = word.partition("=")
    if not equals:
        return str(hide_all(word))
    section, _, last = name.lstrip("+").rpartition(".")
    if section == "launch.env" and is_under_secret_name(last, value):
        return f"{name}={MASK}"
    found: dict[str, Any] = hide_all({last: value, "": word})
    return str(found[""])  # what is a secret by its key's name has been learned meanwhile
