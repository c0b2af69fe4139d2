"""The processes above this one: which launchers they are, when the first began, and what was typed."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from toolkit import secrets
from toolkit.launch import environment

FRONT_END, NODE_LAUNCHER = "deepspeed.launcher.runner", "deepspeed.launcher.launch"
DEEPSPEED = ("deepspeed", "ds", FRONT_END)
"""The programs, or the module, by which a person starts DeepSpeed's launcher."""
TYPED_LAUNCHERS = (
    *DEEPSPEED,
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "srun"),
)
LAUNCHERS = (*TYPED_LAUNCHERS, NODE_LAUNCHER, "hydra_pmi_proxy", "orterun", "orted", "prte", "prterun", "prted")
"""Programs and modules that start ranks: those that a person types, and those that they start."""


def processes_above() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield the processes above this one with their command lines, parent first, up to one that is hidden."""
    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):
        while process and (process := process.parent()):
            yield process, process.cmdline()


def age_s() -> float:
    """Return how many seconds ago this process, or its outermost launcher on this machine, was started; of a rank that
    torchrun has restarted, this process.
    """
    oldest = psutil.Process()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        for parent, words in processes_above():
            if _program(words) not in LAUNCHERS:
                break
            oldest = parent
    since_boot_s = oldest.create_time() - psutil.boot_time()  # no clock that may be set takes part
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def _program(line: Sequence[str]) -> str:
    """Return the name of what a command line runs: a module, a script or a program; "" for Python alone."""
    program, *words = [Path(word).name for word in line] or [""]
    if not program.startswith("python"):
        return program
    for index, word in enumerate(words):
        if word == "-m":
            return words[index + 1] if index + 1 < len(words) else ""
        if not word.startswith("-"):
            return word
    return ""


def typed_command(argv: Sequence[str] | None = None) -> list[str]:
    """Return the command, without secrets, that this process or the outermost launcher above it was started with."""
    words: list[str] = []
    for _, line in processes_above():
        words = _launcher_words(line) or words
    if not words:
        words = ["python", *environment.strip_launcher_arguments(sys.argv if argv is None else argv)]
    return [secrets.hide_word(word) for word in words]


def _launcher_words(words: list[str]) -> list[str]:
    """Return a launcher's command line as one types it, with its name in place of its path; [] for other programs."""
    for index, word in enumerate(words[:4]):  # as in `python -u -m torch.distributed.run …`
        name = Path(word).name
        if name in TYPED_LAUNCHERS:
            is_module = index > 0 and words[index - 1] == "-m"
            return [*(["python", "-m"] if is_module else []), name, *words[index + 1 :]]
        if name == "toolkit" and words[index + 1 : index + 2] in (["launch"], ["train"]):
            return [name, *words[index + 1 :]]
    return []
