"""Ranks under mpirun, of Open MPI or of MPICH: what their launchers need, and what they do to ranks unasked.

Nothing of MPI itself is used: mpirun starts the ranks, and they meet as under any other launcher.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence

import psutil

from toolkit import children
from toolkit.errors import LaunchError
from toolkit.launch import rank_status
from toolkit.launch.hostfile import Resources, is_here
from toolkit.messages import tr

LAUNCHERS = {"openmpi": "hydra", "mpich": "open mpi|openrte|prrte"}
"""DeepSpeed's names of the launchers, and what `mpirun --version` of the other one says of itself."""
DEFAULT_PORT = "29500"
"""DeepSpeed's own."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below those that the system gives to outgoing connections."""
_BINDING = "OMPI_MCA_hwloc_base_binding_policy"
"""Set by mpirun where the user has chosen."""


def check_program(launcher: str) -> None:
    """See that the `mpirun` that DeepSpeed will start is not the other one, which does not know the options."""
    said = children.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    if re.search(LAUNCHERS[launcher], said, re.IGNORECASE):
        found = next((line.strip() for line in said.splitlines() if line.strip()), "?")
        raise LaunchError(
            "--launcher {launcher} starts the `mpirun` that is first on PATH, and that is another one: {found}. "
            "Debian has both as mpirun.openmpi and mpirun.mpich:  update-alternatives --config mpirun",
            launcher=launcher,
            found=found,
        )


def launcher_args(hosts: Resources, options: Mapping[str, str], exported: Sequence[str]) -> list[str]:
    """Return DeepSpeed's --launcher_args for Open MPI: the user's own, and what is missing there.

    DeepSpeed 0.19.8 tells Open MPI's ranks no address to meet at. By itself Open MPI holds each rank on one core, its
    data loading and tokenising too. `exported`: `-x NAME` for each variable that is handed on. (DeepSpeed's own `-x
    NAME="…"` would write the quotes too, as no shell takes them away.)
    """
    typed = options.get("--launcher_args", "")
    first = "127.0.0.1" if all(map(is_here, hosts)) else next(iter(hosts))
    ours = {
        "bind-to|binding_policy|cpu-set": ["--bind-to", "none"],
        "MASTER_ADDR": ["-x", f"MASTER_ADDR={options.get('--master_addr', first)}"],
        "MASTER_PORT": ["-x", f"MASTER_PORT={options.get('--master_port', DEFAULT_PORT)}"],
    }
    missing = [word for theirs, words in ours.items() if not re.search(theirs, typed) for word in words]
    return ["--launcher_args", f"{typed} {shlex.join([*missing, *exported])}".strip()]


def meeting_port(rank_variable: str) -> int:
    """Return a port that all ranks of this machine choose without a word: by the process that started them all.

    `rank_variable`: what mpirun sets for each rank and not for itself.
    """
    starter = os.getppid()
    for parent in psutil.Process().parents():
        starter = parent.pid
        try:
            if rank_variable not in parent.environ():
                break
        except psutil.Error:  # somebody else's: no rank of ours
            break
    return _FIRST_PORT + starter % _PORTS


def notes(launcher: str, local_world_size: int, environ: Mapping[str, str]) -> list[str]:
    """Return what somebody who types Open MPI's mpirun should know; `toolkit launch` sees to it."""
    if launcher != "openmpi" or rank_status.read_status(environ):
        return []
    # It would be asked in vain for more time: Open MPI 4.1 waits its odls_base_sigkill_timeout out whatever happens.
    said = [
        tr(
            "Note: Open MPI kills the ranks 1 s after a Ctrl-C or SIGTERM, too soon for most checkpoints. To save and "
            "stop, send mpirun a SIGUSR1."
        )
    ]
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if _BINDING not in environ and allowed < cores // max(1, local_world_size):
        said.append(
            tr(
                "Note: Open MPI lets this rank use {allowed} of {cores} cores, data loading and tokenising included. "
                "`mpirun --bind-to none` lets it use all.",
                allowed=allowed,
                cores=cores,
            )
        )
    return said
