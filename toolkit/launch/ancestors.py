"""What DeepSpeed's launcher was asked for, read from its command line: it forgets a missing hostfile in silence."""

import base64
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import LaunchError
from toolkit.launch import env_files, hostfile, reach, resources
from toolkit.launch.environment import Ranks
from toolkit.messages import tr

PROC = Path("/proc")
# Options of `deepspeed` that take a value; needed to tell its own words from the training program's.
WITH_VALUE = re.compile(
    r"--?(?:H|i|e|hostfile|include|exclude|num_nodes|num_gpus|num_accelerators|master_port|master_addr|node_rank|launcher"
    r"|launcher_args|ssh_port|save_pid|enable_each_rank_log|autotuning|bind_core_list|elastic_training"
    r"|min_elastic_nodes|max_elastic_nodes|venv_script|log_level)"
)

_LAUNCHERS = {
    *("deepspeed", "ds", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "orterun", "orted", "prterun", "prted"),
}


OURS = {"--config-dir": True, "-cd": True, "--cfg": True, "--explain": False, "--help": False, "-h": False}
"""Options of our commands, and whether they take a value: all others in front of a recipe or behind it are the
launcher's."""


@dataclass(frozen=True, slots=True)
class Process:
    """An ancestor."""

    pid: int
    words: list[str]


def check_launcher(
    num_nodes: int,
    ranks: Ranks,
    proc: Path = PROC,
    pid: str = "self",
    is_here: Callable[[str], bool] = resources.is_here,
) -> None:
    """Compare what was asked for with what was started.

    Args:
        num_nodes: `launch.num_nodes`; 0 expects nothing.
        ranks: who this process is.
        proc: the process file system (for tests).
        pid: this process in it.
        is_here: whether a name means this machine (for tests).

    Raises:
        LaunchError: the hostfile that was asked for is missing or malformed, or other machines take part than it says,
            or than `launch.num_nodes` says, or ranks are not bound to cores as asked.
    """
    chain = list(ancestors(proc, pid))
    nodes = _nodes_started(chain, ranks)
    if num_nodes and nodes and num_nodes != nodes:
        raise LaunchError(
            tr(
                "launch.num_nodes = {asked}, but {nodes} machines were started. Check the hostfile and the launcher's "
                "options, or set launch.num_nodes={nodes}.",
                asked=num_nodes,
                nodes=nodes,
            )
        )
    for process in chain:
        options = deepspeed_options(process.words)
        path = hostfile_of(options)
        if path is None:
            reach.check_binding({}, options)
            continue
        folder = _working_folder(proc, process.pid)
        hosts = resources.used(hostfile.read(folder / path), options)
        if nodes and len(hosts) != nodes:
            raise LaunchError(
                tr(
                    "the hostfile {path} names {expected} machines ({hosts}), but {nodes} were started.",
                    path=path,
                    expected=len(hosts),
                    hosts=", ".join(hosts),
                    nodes=nodes,
                )
            )
        check_machines(hosts, options, is_here)
        reach.check_binding(hosts, options)
        if len(hosts) > 1:
            env_files.passed_on(folder)
        return


def check_machines(hosts: resources.Resources, options: Mapping[str, str], is_here: Callable[[str], bool]) -> None:
    """Refuse what DeepSpeed would do in silence: train here although another machine was named.

    Args:
        hosts: those that take part.
        options: of `deepspeed`.
        is_here: whether a name means this machine.

    Raises:
        LaunchError: it would.
    """
    only = next(iter(hosts)) if len(hosts) == 1 else ""
    if only and "--force_multi" not in options and "--no_ssh" not in options and not is_here(only):
        raise LaunchError(
            tr(
                "the hostfile leaves {host} alone, which is not this machine ({here}): DeepSpeed would train here all "
                "the same. Add --force_multi to train there, or type the command on {host}.",
                host=only,
                here=socket.gethostname(),
            )
        )


def deepspeed_options(words: list[str]) -> dict[str, str]:
    """Return the options of a `deepspeed` command line, without those of the program that it starts; {} for others."""
    return split(_after_front_end(words))[0]


def launcher_options(proc: Path = PROC, pid: str = "self") -> list[str]:
    """Return the options of the `deepspeed` command that started this process, as they were typed; [] without one."""
    for process in ancestors(proc, pid):
        if words := _after_front_end(process.words):
            return words[: len(words) - len(split(words)[1])]
    return []


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that the words begin with, "" where they have no value, and the words after them."""
    options: dict[str, str] = {}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        name, equals, value = words[place].partition("=")
        place += 1
        if not equals and WITH_VALUE.fullmatch(name):
            value = "".join(words[place : place + 1])
            place += 1
        options[name] = value
    return options, list(words[place:])


def hostfile_of(options: Mapping[str, str]) -> str | None:
    """Return the hostfile that was asked for, None without one. An empty name asks for one too, which is not there."""
    return options.get("--hostfile", options.get("-H"))


def typed(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the arguments of `toolkit launch` and `toolkit doctor` as the launcher's, its options by name, the rest.

    The launcher's options may stand anywhere; `hostfile=FILE` is --hostfile FILE.
    """
    mine: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "hostfile" and equals:
            mine += ["--hostfile", value]
        elif not word.startswith("-") or name in OURS:
            others.append(word)
            if name in OURS and not equals and OURS[name]:
                others += [value for value in (next(rest, None),) if value is not None]
        else:
            mine.append(word)
            if not equals and WITH_VALUE.fullmatch(name):
                mine += [value for value in (next(rest, None),) if value is not None]
    return mine, split(mine)[0], others


def _after_front_end(words: list[str]) -> list[str]:
    start = next((i for i, word in enumerate(words[:4]) if _is_front_end(word)), None)
    return [] if start is None else words[start + 1 :]


def _is_front_end(word: str) -> bool:
    return Path(word).name in ("deepspeed", "ds") or word == "deepspeed.launcher.runner"


def ancestors(proc: Path, pid: str) -> Iterator[Process]:
    """Yield the parents upwards; nothing where there is no /proc."""
    for _ in range(64):
        try:
            status = (proc / pid / "status").read_text()
            pid = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)[1]  # type: ignore[index]
            words = (proc / pid / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except (OSError, TypeError):
            return
        yield Process(int(pid), words)


def age_s(proc: Path = PROC, pid: str = "self") -> float:
    """Return how many seconds ago this process began, or its launcher on this machine; 0 where there is no /proc.

    `toolkit launch` does not count, nor does an agent that starts its ranks again: their age is that of all attempts.
    """
    oldest = pid
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        for parent in ancestors(proc, pid):
            if _program(parent.words) not in _LAUNCHERS:
                break
            oldest = str(parent.pid)
    try:
        fields = (proc / oldest / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def _program(words: Sequence[str]) -> str:
    """Return the name of what a command line runs: a module, a script or a program."""
    if not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name
    for place, word in enumerate(words[1:], 1):
        if word == "-m":
            return "".join(words[place + 1 : place + 2])
        if not word.startswith("-"):
            return Path(word).name
    return ""


def _working_folder(proc: Path, pid: int) -> Path:
    try:
        return (proc / str(pid) / "cwd").readlink()
    except OSError:
        return Path.cwd()


def _nodes_started(chain: list[Process], ranks: Ranks) -> int:
    """Return how many machines take part; 0 where it cannot be told."""
    for process in chain:
        for word in process.words:
            if word.startswith("--world_info="):
                world = json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))
                return len(world)
    if ranks.local_world_size:
        return max(1, ranks.world_size // ranks.local_world_size)
    return 0
