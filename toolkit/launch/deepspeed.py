"""DeepSpeed's launcher: its options, what was typed, what it needs to start ranks, and who restarts a run.

Its command line is read from the process table: it forgets a missing hostfile in silence, and a rank sees only the
words that its launcher left for it.
"""

import base64
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import LaunchError
from toolkit.launch import env_vars, hostfile, mpi, rank_status
from toolkit.launch.environment import Ranks, strip_launcher_arguments
from toolkit.launch.hostfile import SELECTING, Resources, is_here
from toolkit.launch.processes import DEEPSPEED, LAUNCHERS, TYPED_LAUNCHERS
from toolkit.messages import tr
from toolkit.secrets import MASK, hide_all, is_under_secret_name

PROC = Path("/proc")
# Options of `deepspeed` that take a value; needed to tell its own words from the training program's.
WITH_VALUE = re.compile(
    r"--?(?:H|i|e|hostfile|include|exclude|num_nodes|num_gpus|num_accelerators|master_port|master_addr|node_rank|launcher"
    r"|launcher_args|ssh_port|save_pid|enable_each_rank_log|autotuning|bind_core_list|elastic_training"
    r"|min_elastic_nodes|max_elastic_nodes|venv_script|log_level)"
)

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
    is_here: Callable[[str], bool] = hostfile.is_here,
) -> None:
    """Compare what was asked for with what was started.

    An error if the hostfile that was asked for is missing or malformed; if other nodes take part than it says, or than
    `launch.num_nodes` (0: any); if ranks are not bound to cores as asked.
    """
    chain = list(ancestors(proc, pid))
    nodes = _nodes_started(chain, ranks)
    if num_nodes and nodes and num_nodes != nodes:
        raise LaunchError(
            "launch.num_nodes = {asked}, but {nodes} machines were started. Check the hostfile and the launcher's "
            "options, or set launch.num_nodes={nodes}.",
            asked=num_nodes,
            nodes=nodes,
        )
    for process in chain:
        options = deepspeed_options(process.words)
        path = hostfile_of(options)
        if path is None:
            check_binding({}, options)
            continue
        folder = _working_folder(proc, process.pid)
        hosts = hostfile.select_gpus(hostfile.read_hostfile(folder / path), options)
        if nodes and len(hosts) != nodes:
            raise LaunchError(
                "the hostfile {path} names {expected} machines ({hosts}), but {nodes} were started.",
                path=path,
                expected=len(hosts),
                hosts=", ".join(hosts),
                nodes=nodes,
            )
        check_machines(hosts, options, is_here)
        check_binding(hosts, options)
        if len(hosts) > 1:
            env_vars.variables_of_files(folder)
        return


def check_machines(hosts: hostfile.Resources, options: Mapping[str, str], is_here: Callable[[str], bool]) -> None:
    """Refuse what DeepSpeed would do in silence: train here although another machine was named."""
    only = next(iter(hosts)) if len(hosts) == 1 else ""
    if only and "--force_multi" not in options and "--no_ssh" not in options and not is_here(only):
        raise LaunchError(
            "the hostfile leaves {host} alone, which is not this machine ({here}): DeepSpeed would train here all "
            "the same. Add --force_multi to train there, or type the command on {host}.",
            host=only,
            here=socket.gethostname(),
        )


def deepspeed_options(words: list[str]) -> dict[str, str]:
    """Return the options of a `deepspeed` command line, without those of the program that it starts; {} for others."""
    return split_words(_after_front_end(words))[0]


def launcher_options(proc: Path = PROC, pid: str = "self") -> list[str]:
    """Return the options of the `deepspeed` command that started this process, as they were typed; [] without one."""
    for process in ancestors(proc, pid):
        if words := _after_front_end(process.words):
            return words[: len(words) - len(split_words(words)[1])]
    return []


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
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


def typed_options(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
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
    return mine, split_words(mine)[0], others


def _after_front_end(words: list[str]) -> list[str]:
    start = next((i for i, word in enumerate(words[:4]) if Path(word).name in DEEPSPEED), None)
    return [] if start is None else words[start + 1 :]


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
            if _program(parent.words) not in LAUNCHERS:
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


def typed_command(argv: Sequence[str] | None = None, proc: Path = PROC, pid: str = "self") -> list[str]:
    """Return the words of the command that a person, or a script, started this process with, without secrets.

    `argv` None takes this process's own. Returns the outermost launcher's words where one is among this node's
    processes.
    """
    words: list[str] = []
    for process in ancestors(proc, pid):
        words = _launcher_words(process.words) or words
    if not words:
        words = ["python", *strip_launcher_arguments(sys.argv if argv is None else argv)]
    return [_masked(word) for word in words]


def _launcher_words(words: list[str]) -> list[str]:
    """Return a launcher's words, begun with its name alone; [] for other programs."""
    for place, word in enumerate(words[:4]):
        name = Path(word).name
        if name in TYPED_LAUNCHERS:
            is_module = words[place - 1 : place] == ["-m"]
            return [*(["python", "-m"] if is_module else []), name, *words[place + 1 :]]
        if name == "toolkit" and words[place + 1 : place + 2] in (["launch"], ["train"]):
            return [name, *words[place + 1 :]]
    return []


def _masked(word: str) -> str:
    name, equals, value = word.partition("=")
    if not equals:
        return str(hide_all(word))
    section, _, last = name.lstrip("+").rpartition(".")
    if section == "launch.env" and is_under_secret_name(last, value):
        return f"{name}={MASK}"
    found: dict[str, Any] = hide_all({last: value, "": word})
    return str(found[""])  # what is a secret by its key's name has been learned meanwhile


_BACKENDS = {
    "pdsh": ("pdsh", "apt install pdsh"),
    "openmpi": ("ompi_info", "apt install openmpi-bin"),
    "mpich": ("mpirun", "apt install mpich"),
}
"""Of DeepSpeed's --launcher: the program that it looks for (0.19.8), and where it comes from."""


def options_without_ssh(hosts: Resources, options: Mapping[str, str]) -> list[str]:
    """Return options by which DeepSpeed's launcher needs no ssh to this machine, if a hostfile leaves it alone.

    One host alone is this node, see `check_machines`; {} without a hostfile.
    """
    if not hosts or logs_in(hosts, options) or "--no_ssh" in options:
        return []
    more = [] if "--no_ssh_check" in options else ["--no_ssh_check"]
    return more if "--master_addr" in options else [*more, "--master_addr", "127.0.0.1"]


def quoted_words(hosts: Resources, options: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the program's words in the form in which they arrive as they are.

    pdsh hands them to a shell on each machine, bare, or between double quotes if there is a space in them (DeepSpeed
    0.19.8, PDSHRunner.parse_user_args): braces, `$`, globs and quotes would not survive.
    """
    if backend(hosts, options) != "pdsh":
        return list(words)
    return [re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word) for word in words]


def ssh_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what lets pdsh notice that a machine is gone: ssh alone waits for it for hours.

    The environment's own arguments for ssh come first, as the first counts.
    """
    alive = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"
    return {"PDSH_SSH_ARGS_APPEND": f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {alive}".strip()}


def backend(hosts: Resources, options: Mapping[str, str]) -> str:
    """Return the --launcher through which DeepSpeed starts the ranks, "" where it starts them itself, on this node."""
    is_used = (len(hosts) > 1 or "--force_multi" in options) and "--no_ssh" not in options
    return options.get("--launcher", "pdsh").lower() if is_used else ""


def logs_in(hosts: Resources, options: Mapping[str, str]) -> bool:
    """Return whether ssh is needed. An mpirun starts ranks on its own machine without."""
    used = backend(hosts, options)
    return bool(used) and not (used in mpi.LAUNCHERS and all(map(is_here, hosts)))


def check_backend_program(hosts: Resources, options: Mapping[str, str]) -> None:
    """Look for the program by which DeepSpeed's launcher starts ranks on several machines."""
    used, folder = backend(hosts, options), os.getcwd()
    if used == "pdsh" and shlex.quote(folder) != folder:
        raise LaunchError(
            "DeepSpeed's launcher gives the folder {folder} to the machines' shells unquoted. Type this in a "
            "folder without spaces and special characters (a link to this one will do).",
            folder=folder,
        )
    chosen = set(SELECTING) & set(options)
    if chosen and used in ("openmpi", "mpich", "impi"):
        raise LaunchError(
            "--launcher {launcher} takes all machines and slots of the hostfile (DeepSpeed 0.19.8): leave out "
            "{options}, and write a hostfile of what takes part.",
            launcher=used,
            options=", ".join(sorted(chosen)),
        )
    program, source = _BACKENDS.get(used, ("", ""))
    if program and not shutil.which(program):
        raise LaunchError(
            "several machines need {program}, which is not installed here:  {source}  (or choose another --launcher).",
            program=program,
            source=source,
        )
    if used in mpi.LAUNCHERS:
        mpi.check_program(used)


def check_binding(hosts: Resources, options: Mapping[str, str]) -> None:
    """Refuse to bind ranks to cores where DeepSpeed's launcher would not do it in silence, or fail (0.19.8)."""
    asked = [name for name in options if name.startswith("--bind_core")]
    if not asked:
        return
    if asked == ["--bind_core_list"]:
        raise LaunchError(tr("--bind_core_list does nothing alone: add --bind_cores_to_rank."))
    used = backend(hosts, options)
    if used not in ("", "impi"):
        raise LaunchError(
            "{option}: DeepSpeed does not hand this on to machines that it starts through {launcher}; their ranks "
            "would not be bound. Leave it out, or type the command on every machine with --no_ssh --node_rank=N "
            "--master_addr=HOST, N from 0 in the order of the hostfile.",
            option=asked[0],
            launcher=used,
        )
    if not shutil.which("numactl"):
        raise LaunchError("{option} needs numactl, which is not installed here:  apt install numactl", option=asked[0])


def restart_number(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often these ranks have been started again by whoever starts them; 0 the first time."""
    told = rank_status.read_status(environ)
    return int(told["restart"] if told else environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def check_restarts(most: int, ranks: Ranks, words: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what would not be started again, or more often than was asked for."""
    if rank_status.read_status(environ):
        return
    if ranks.launcher == "torchrun":
        given = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if given != most:
            raise LaunchError(
                "run.max_restarts = {most}, but torchrun starts again {given} times. Type `torchrun "
                "--max-restarts={most} …`, or set run.max_restarts={given}.",
                most=most,
                given=given,
            )
    elif most:
        command = shlex.join(["toolkit", "launch", *launcher_options(), *words])
        raise LaunchError(
            "run.max_restarts = {most}, but nobody here would start the run again ({launcher}). Type: {command}",
            most=most,
            launcher=ranks.launcher,
            command=command,
        )
