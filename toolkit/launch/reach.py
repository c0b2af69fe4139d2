"""What DeepSpeed's launcher needs to start ranks: its program, options, words quoted for other machines' shells."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence

from toolkit.errors import LaunchError
from toolkit.launch import mpi
from toolkit.launch.resources import Resources, is_here
from toolkit.messages import tr

_BACKENDS = {
    "pdsh": ("pdsh", "apt install pdsh"),
    "openmpi": ("ompi_info", "apt install openmpi-bin"),
    "mpich": ("mpirun", "apt install mpich"),
}
"""Of DeepSpeed's --launcher: the program that it looks for (0.19.8), and where it comes from."""


def options_for(hosts: Resources, options: Mapping[str, str]) -> list[str]:
    """Return options by which DeepSpeed's launcher needs no ssh to this machine, if a hostfile leaves it alone.

    Args:
        hosts: those that take part; one alone is this machine, see `ancestors.check_machines`; {} without a hostfile.
        options: of `deepspeed`.
    """
    if not hosts or logs_in(hosts, options) or "--no_ssh" in options:
        return []
    more = [] if "--no_ssh_check" in options else ["--no_ssh_check"]
    return more if "--master_addr" in options else [*more, "--master_addr", "127.0.0.1"]


def words_for(hosts: Resources, options: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the program's words in the form in which they arrive as they are.

    pdsh hands them to a shell on each machine, bare, or between double quotes if there is a space in them (DeepSpeed
    0.19.8, PDSHRunner.parse_user_args): braces, `$`, globs and quotes would not survive.

    Args:
        hosts: those that take part; {} without a hostfile.
        options: of `deepspeed`.
        words: recipe and overrides.
    """
    if backend(hosts, options) != "pdsh":
        return list(words)
    return [re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word) for word in words]


def ssh_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what lets pdsh notice that a machine is gone: ssh alone waits for it for hours.

    Args:
        environ: the environment, whose own arguments for ssh come first, as the first counts.
    """
    alive = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"
    return {"PDSH_SSH_ARGS_APPEND": f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {alive}".strip()}


def backend(hosts: Resources, options: Mapping[str, str]) -> str:
    """Return the --launcher through which DeepSpeed starts the ranks, "" where it starts them itself, on this machine.

    Args:
        hosts: those that take part; {} without a hostfile.
        options: of `deepspeed`.
    """
    is_used = (len(hosts) > 1 or "--force_multi" in options) and "--no_ssh" not in options
    return options.get("--launcher", "pdsh").lower() if is_used else ""


def logs_in(hosts: Resources, options: Mapping[str, str]) -> bool:
    """Return whether ssh is needed. An mpirun starts ranks on its own machine without."""
    used = backend(hosts, options)
    return bool(used) and not (used in mpi.LAUNCHERS and all(map(is_here, hosts)))


def check_program(hosts: Resources, options: Mapping[str, str]) -> None:
    """Look for the program by which DeepSpeed's launcher starts ranks on several machines.

    Args:
        hosts: those that take part.
        options: of `deepspeed`.

    Raises:
        LaunchError: it is not installed, could not go into this folder, or cannot choose among machines.
    """
    used, folder = backend(hosts, options), os.getcwd()
    if used == "pdsh" and shlex.quote(folder) != folder:
        raise LaunchError(
            tr(
                "DeepSpeed's launcher gives the folder {folder} to the machines' shells unquoted. Type this in a "
                "folder without spaces and special characters (a link to this one will do).",
                folder=folder,
            )
        )
    chosen = {"--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--num_accelerators"} & set(options)
    if chosen and used in ("openmpi", "mpich", "impi"):
        raise LaunchError(
            tr(
                "--launcher {launcher} takes all machines and slots of the hostfile (DeepSpeed 0.19.8): leave out "
                "{options}, and write a hostfile of what takes part.",
                launcher=used,
                options=", ".join(sorted(chosen)),
            )
        )
    program, source = _BACKENDS.get(used, ("", ""))
    if program and not shutil.which(program):
        raise LaunchError(
            tr(
                "several machines need {program}, which is not installed here:  {source}  (or choose another "
                "--launcher).",
                program=program,
                source=source,
            )
        )
    if used in mpi.LAUNCHERS:
        mpi.check_program(used)


def check_binding(hosts: Resources, options: Mapping[str, str]) -> None:
    """Refuse to bind ranks to cores where DeepSpeed's launcher would not do it in silence, or fail (0.19.8).

    Args:
        hosts: those that take part; {} without a hostfile.
        options: of `deepspeed`.

    Raises:
        LaunchError: it would.
    """
    asked = [name for name in options if name.startswith("--bind_core")]
    if not asked:
        return
    if asked == ["--bind_core_list"]:
        raise LaunchError(tr("--bind_core_list does nothing alone: add --bind_cores_to_rank."))
    used = backend(hosts, options)
    if used not in ("", "impi"):
        raise LaunchError(
            tr(
                "{option}: DeepSpeed does not hand this on to machines that it starts through {launcher}; their ranks "
                "would not be bound. Leave it out, or type the command on every machine with --no_ssh --node_rank=N "
                "--master_addr=HOST, N from 0 in the order of the hostfile.",
                option=asked[0],
                launcher=used,
            )
        )
    if not shutil.which("numactl"):
        raise LaunchError(
            tr("{option} needs numactl, which is not installed here:  apt install numactl", option=asked[0])
        )
