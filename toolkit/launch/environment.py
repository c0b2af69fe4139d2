"""Who this process is, by the variables of the launcher that started it, and what it reports to `toolkit launch`.

These are the process group's, see variables.py for others. Of MPI only mpirun is used: it starts the ranks, and they
meet as under any other launcher.

What ranks report to `toolkit launch` past their launcher, which drops it (exit code, run directory, first step), is a
file of JSON lines in `run.dir`, which all nodes see. Its name is in a variable that begins with PYTHON, as DeepSpeed's
launcher passes nothing else of ours to other nodes (deepspeed 0.19.8, runner.py, EXPORT_ENVS). To an mpirun it passes
values with a space, and others, between quotes that no shell removes (multinode_runner.py, add_export).
"""

import json
import os
import random
import socket
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit.config.schema import INTERFACES
from toolkit.messages import LaunchError, set_main_rank, tr

# Launcher -> its variables for rank, local rank, world size, ranks on this machine. The first whose rank is set wins.
VARIABLES = {
    "torch": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
}
MPI_LAUNCHERS = ("openmpi", "mpich")
"""As DeepSpeed calls them."""
_MOST_DIGITS = 9
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below those that the system gives to outgoing connections."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all."""

    rank: int
    """Number over all machines, from 0."""
    local_rank: int
    """Number on this machine, from 0."""
    world_size: int
    """Processes over all machines."""
    local_world_size: int
    """Processes on this machine; 0 where the launcher does not say."""
    launcher: str
    """deepspeed, torchrun, openmpi, mpich, slurm or single."""


def detect(environ: Mapping[str, str]) -> Ranks:
    """Return rank, world size and launcher of this process, by the first launcher in `VARIABLES` whose rank is set."""
    for setter, (rank_name, local_name, size_name, local_size_name) in VARIABLES.items():
        if rank_name not in environ:
            continue
        if setter == "mpich" and local_name not in environ and "SLURM_PROCID" in environ:
            continue  # Slurm's PMI-2 sets PMI_RANK for all that srun starts; MPICH's launcher numbers local ranks, too
        if setter == "slurm" and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
            continue  # inside an allocation, such as in a batch script, but not started by srun for several tasks
        launcher = _who_set_rank(environ) if setter == "torch" else setter
        if launcher in MPI_LAUNCHERS:  # whoever sets RANK for its ranks does not set LOCAL_WORLD_SIZE
            *_, local_size_name = VARIABLES[launcher]
        ranks = Ranks(
            rank=_number(environ, rank_name),
            local_rank=_number(environ, local_name, "0"),
            world_size=_number(environ, size_name),
            local_world_size=_number(environ, local_size_name, "0"),
            launcher=launcher,
        )
        if not (0 <= ranks.rank < ranks.world_size and 0 <= ranks.local_rank < ranks.world_size):
            raise LaunchError(
                "the launcher's variables do not fit together: {rank_name}={rank}, {size_name}={size}. "
                "Unset them, or start with deepspeed or torchrun.",
                rank_name=rank_name,
                rank=ranks.rank,
                size_name=size_name,
                size=ranks.world_size,
            )
        return ranks
    return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")


def _who_set_rank(environ: Mapping[str, str]) -> str:
    """Return the launcher that set RANK: torchrun, deepspeed, openmpi, mpich, or "environment" for none of these."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_SIZE" in environ:  # which DeepSpeed's launcher alone sets
        return "deepspeed"
    # Between MPICH's mpirun and its ranks DeepSpeed sets RANK; for the others `set_rank_variables` does.
    return next((name for name in MPI_LAUNCHERS if environ.get(VARIABLES[name][0]) == environ["RANK"]), "environment")


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return a variable, or `default`, as a number from 0 on; LaunchError if it is none, or there is neither."""
    text = environ.get(name, default)
    if text is None:
        raise LaunchError("{name} is not set although this process was started as one of several ranks.", name=name)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise LaunchError("{name}={text} is not a number.", name=name, text=text[:40])
    return int(text)


def reject_if_rank() -> None:
    """Raise a LaunchError if this process is a rank already: the command that calls this starts the ranks itself."""
    launcher = detect(os.environ).launcher
    if launcher != "single":
        raise LaunchError("this command starts the ranks itself: type it once, without {launcher}.", launcher=launcher)


local_rank = 0
"""As the launcher has numbered this process; LOCAL_RANK becomes 0 where a rank sees one GPU alone."""


def set_rank_variables(ranks: Ranks, environ: MutableMapping[str, str]) -> None:
    """Set the variables that the process group reads (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and
    OMP_NUM_THREADS and PATH. From here on rank 0 alone prints messages. LaunchError if the launcher has not set enough.
    """
    if ranks.launcher == "single" and environ.get("WORLD_SIZE", "") not in ("", "0", "1"):
        raise LaunchError(
            "WORLD_SIZE={size}, but RANK is not set: this process would train alone. Start the ranks with a "
            "launcher (deepspeed run.py …, torchrun … run.py …, toolkit launch …), set RANK and LOCAL_RANK for "
            "each, or unset WORLD_SIZE to train on one rank.",
            size=environ["WORLD_SIZE"],
        )
    global local_rank
    local_rank = ranks.local_rank
    set_main_rank(ranks.rank == 0)
    environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.local_rank), WORLD_SIZE=str(ranks.world_size))
    if ranks.world_size == 1:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in environ:
            environ["MASTER_PORT"] = str(free_port())
    elif ranks.launcher in VARIABLES and ranks.local_world_size == ranks.world_size:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", str(meeting_port(VARIABLES[ranks.launcher][0])))
    elif "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        raise LaunchError(
            "{size} ranks need MASTER_ADDR (the first node) and MASTER_PORT (a free port on it) in the "
            "environment; {launcher} does not set them.",
            size=ranks.world_size,
            launcher=ranks.launcher,
        )
    # What lies beside this Python, such as ninja, which builds DeepSpeed's ops: a shell that ssh starts on another
    # machine knows no virtual environment.
    scripts, path = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    if scripts not in path.split(os.pathsep):
        environ["PATH"] = f"{scripts}{os.pathsep}{path}"
    if ranks.local_world_size > 1:
        # Without this each CPU rank starts a thread per core and they fight; torchrun sets 1 for the same reason.
        # Open MPI holds a rank on one core, Slurm on those that were asked for.
        share = min((os.cpu_count() or 1) // ranks.local_world_size, len(os.sched_getaffinity(0)))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


def free_port() -> int:
    """Return a port of this machine that nobody listens on right now.
    It is below those that Linux gives to outgoing connections (from 32768 on), which could take it before we do.
    """
    ports = random.SystemRandom().sample(range(20_000, 32_768), 100)  # leaves the seeded generator alone
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError("no free port was found among {ports}.", ports=", ".join(map(str, ports[:3])) + " …")


def meeting_port(rank_variable: str) -> int:
    """Return the port at which ranks on one machine meet. All of them compute the same one, from the id of the process
    that started them: the nearest ancestor without `rank_variable`, which mpirun sets for ranks alone.
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


def without_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a process of this package that is no rank, and reports nothing to `toolkit launch`."""
    dropped = {STATUS_VARIABLE, "MASTER_ADDR", "MASTER_PORT", *(name for names in VARIABLES.values() for name in names)}
    package_parent = str(Path(__file__).resolve().parents[2])  # run.py of a checkout serves from any working directory
    path = os.pathsep.join([package_parent, *filter(None, [environ.get("PYTHONPATH")])])
    return {**{name: value for name, value in environ.items() if name not in dropped}, "PYTHONPATH": path}


def strip_launcher_arguments(words: Sequence[str]) -> list[str]:
    """Drop --local_rank, which launchers put before the user's words; LaunchError for --deepspeed, not used here."""
    user_words = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not equals:  # its value is the next word
                next(remaining, None)
        elif name in ("--deepspeed", "--deepspeed_config", "--deepspeed-config"):
            file = value if equals else next((word for word in remaining if word.endswith(".json")), "ds_config.json")
            raise LaunchError(
                "{word}: DeepSpeed is always on here. Take your JSON with deepspeed_json={file}.", word=name, file=file
            )
        else:
            user_words.append(word)
    return user_words


def set_interface(name: str, environ: MutableMapping[str, str]) -> None:
    """Let NCCL and gloo use a network interface, by variables in `environ`; LaunchError if there is no such one."""
    existing = [interface for _, interface in socket.if_nameindex()]
    if name not in existing:
        raise LaunchError(
            "distributed.interface = {name}: {host} has no such network interface, only {existing}.",
            name=name,
            host=socket.gethostname(),
            existing=", ".join(existing),
        )
    environ.update(dict.fromkeys(INTERFACES, name))


def check_port(environ: Mapping[str, str]) -> None:
    """Raise a LaunchError on rank 0 if another process listens on the port at which the ranks are to meet."""
    # torchrun's agent itself holds the store, and with it the port.
    if environ.get("RANK") != "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        with socket.create_connection((address, port), timeout=1):
            pass
    except OSError:
        return  # refused, or not reachable this way: free, as far as can be told
    raise LaunchError(
        "port {port} on {address} is taken, probably by another run. Choose another: --master_port N of `toolkit "
        "launch` and `deepspeed`, --master-port N of torchrun, MASTER_PORT=N for mpirun. On one node `toolkit launch` "
        "chooses a free one.",
        port=port,
        address=address,
    )


def mpi_notes(launcher: str, local_world_size: int, environ: Mapping[str, str]) -> list[str]:
    """Return what a user of Open MPI's mpirun should know; `toolkit launch` takes care of it."""
    if launcher != "openmpi" or read_status(environ):
        return []
    # Nor is its odls_base_sigkill_timeout of use: Open MPI 4.1 then waits so long even if the ranks have ended.
    notes = [
        tr(
            "Note: Open MPI kills the ranks 1 s after a Ctrl-C or SIGTERM, too soon for most checkpoints. To save and "
            "stop, send mpirun a SIGUSR1."
        )
    ]
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if "OMPI_MCA_hwloc_base_binding_policy" not in environ and allowed < cores // max(1, local_world_size):
        notes.append(
            tr(
                "Note: Open MPI lets this rank use {allowed} of {cores} cores, data loading and tokenizing included. "
                "`mpirun --bind-to none` lets it use all.",
                allowed=allowed,
                cores=cores,
            )
        )
    return notes


STATUS_VARIABLE = "PYTHON_TOOLKIT_REPORT"
_LAUNCHED_BY = "PYTHON_TOOLKIT_LAUNCHED_BY"
"""Host and process of `toolkit launch`: in the environment, as the file is gone with it."""


def create_status_file(folder: Path, restart: int) -> Path:
    """Create the file by which ranks report to this process, in `folder`; return it. `restart`: how often they have
    been restarted.
    """
    handle, name = tempfile.mkstemp(prefix=".launch-", suffix=".jsonl", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "restart": restart}) + "\n")
    return Path(name)


def status_variables(file: Path) -> dict[str, str]:
    """Return what `toolkit launch` adds to its ranks' environment."""
    return {STATUS_VARIABLE: str(file), _LAUNCHED_BY: f"{socket.gethostname()}:{os.getpid()}"}


def front_end() -> int:
    """Return the process of the `toolkit launch` on this machine that started this rank; 0 without one."""
    host, _, pid = os.environ.get(_LAUNCHED_BY, "").rpartition(":")
    return int(pid) if host == socket.gethostname() and pid.isdecimal() else 0


def report_status(environ: Mapping[str, str] = os.environ, **facts: Any) -> None:
    """Report `facts` (name -> JSON value) to the `toolkit launch` that started this rank; without one do nothing."""
    with suppress(OSError):  # the file is gone with the `toolkit launch` that made it
        handle = os.open(_status_file(environ), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def read_status(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return fact -> value of what ranks have reported to `toolkit launch`, {} without one. Of several values of a fact
    the first one counts.
    """
    status: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        for line in Path(_status_file(environ)).read_text(encoding="utf-8").splitlines():
            status = {**json.loads(line), **status}
    return status


def restart_number(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often `toolkit launch` or torchrun has restarted these ranks; 0 at their first start."""
    status = read_status(environ)
    return int(status["restart"] if status else environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _status_file(environ: Mapping[str, str]) -> str:
    """Return the path of the status file, /dev/null without one. Ranks under an mpirun get it with quotes around it."""
    return environ.get(STATUS_VARIABLE, "").strip('"') or os.devnull
