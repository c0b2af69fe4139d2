"""Who this process is, by the variables of the launcher that started it, and the variables of the ranks.

These are the process group's; those of `launch.env`; and `.deepspeed_env`, which DeepSpeed sets on all nodes. Every
rank composes the same recipe, so it sets the variables with a value itself: no launcher and no shell changes them on
the way. Secrets are in the environment where the command was typed. Launchers of several nodes get them from `toolkit
launch` in ways in which no command line, log or file has them. Of MPI only mpirun is used: it starts the ranks, and
they meet as under any other launcher.

What ranks report to `toolkit launch` past their launcher, which drops it (exit code, run directory, first step), is a
file of JSON lines in `run.dir`, which all nodes see. Its name is in a variable that begins with PYTHON, as DeepSpeed's
launcher passes nothing else of ours to other nodes (deepspeed 0.19.8, runner.py, EXPORT_ENVS). To an mpirun it passes
values with a space, and others, between quotes that no shell removes (multinode_runner.py, add_export).
"""

import json
import os
import random
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit import secrets
from toolkit.config.schema import INTERFACES, LaunchConfig
from toolkit.messages import LaunchError, file_bytes, reading, set_main_rank, tr

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
_LARGEST_FILE_BYTES = 1 << 20
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
    """Return who this process is."""
    for launcher, (rank, local_rank, world_size, local_world_size) in VARIABLES.items():
        if rank not in environ:
            continue
        if launcher == "mpich" and local_rank not in environ and "SLURM_PROCID" in environ:
            continue  # Slurm's PMI-2 sets PMI_RANK for all that srun starts; MPICH's launcher numbers local ranks, too
        if launcher == "slurm" and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
            continue  # inside an allocation, such as in a batch script, but not started by srun for several tasks
        if launcher == "torch":
            # Between MPICH's mpirun and its ranks DeepSpeed sets RANK; for the others `apply` does.
            set_by = (name for name in MPI_LAUNCHERS if environ.get(VARIABLES[name][0]) == environ["RANK"])
            launcher = next(set_by, "environment")
            if "TORCHELASTIC_RUN_ID" in environ:
                launcher = "torchrun"
            elif "CROSS_SIZE" in environ:
                launcher = "deepspeed"
            elif launcher in VARIABLES:
                local_world_size = VARIABLES[launcher][3]
        found = Ranks(
            rank=_number(environ, rank),
            local_rank=_number(environ, local_rank, "0"),
            world_size=_number(environ, world_size),
            local_world_size=_number(environ, local_world_size, "0"),
            launcher=launcher,
        )
        if not (0 <= found.rank < found.world_size and 0 <= found.local_rank < found.world_size):
            raise LaunchError(
                "the launcher's variables do not fit together: {rank_name}={rank}, {size_name}={size}. "
                "Unset them, or start with deepspeed or torchrun.",
                rank_name=rank,
                rank=found.rank,
                size_name=world_size,
                size=found.world_size,
            )
        return found
    return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise LaunchError("{name} is not set although this process was started as one of several ranks.", name=name)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise LaunchError("{name}={text} is not a number.", name=name, text=text[:40])
    return int(text)


def refuse_ranks() -> None:
    """Reject a command that starts ranks itself in a process that is a rank already."""
    launcher = detect(os.environ).launcher
    if launcher != "single":
        raise LaunchError("this command starts the ranks itself: type it once, without {launcher}.", launcher=launcher)


local_rank = 0
"""As the launcher has numbered this process; LOCAL_RANK becomes 0 where a rank sees one GPU alone."""


def apply(ranks: Ranks, environ: MutableMapping[str, str]) -> None:
    """Set what the process group reads: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; threads, PATH.

    From here on rank 0 alone tells its user anything.
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
    environ["RANK"] = str(ranks.rank)
    environ["LOCAL_RANK"] = str(ranks.local_rank)
    environ["WORLD_SIZE"] = str(ranks.world_size)
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
    scripts, found = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    if scripts not in found.split(os.pathsep):
        environ["PATH"] = f"{scripts}{os.pathsep}{found}"
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
    """Return a port that all ranks of this machine choose alike without a message: by the process that started them.

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


def without_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a process of this package that is no rank, and reports nothing to `toolkit launch`."""
    names = {
        STATUS_VARIABLE,
        "MASTER_ADDR",
        "MASTER_PORT",
        *(name for names in VARIABLES.values() for name in names),
    }
    here = str(Path(__file__).resolve().parents[2])  # run.py of a checkout serves from any working directory
    path = os.pathsep.join([here, *filter(None, [environ.get("PYTHONPATH")])])
    return {**{name: value for name, value in environ.items() if name not in names}, "PYTHONPATH": path}


def strip_launcher_arguments(words: Sequence[str]) -> list[str]:
    """Drop --local_rank, which DeepSpeed's and older torch launchers put in front of the user's words."""
    kept = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not equals:
                next(rest, None)
        elif name in ("--deepspeed", "--deepspeed_config", "--deepspeed-config"):
            file = value if equals else next((other for other in rest if other.endswith(".json")), "ds_config.json")
            raise LaunchError(
                "{word}: DeepSpeed is always on here. Take your JSON with deepspeed_json={file}.",
                word=name,
                file=file,
            )
        else:
            kept.append(word)
    return kept


def set_interface(name: str, environ: MutableMapping[str, str]) -> None:
    """Let NCCL and gloo use one network interface."""
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
    """On rank 0, see that nobody listens on the port where the ranks are to meet."""
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
        "port {port} on {address} is taken, probably by another run. Choose another: `toolkit launch --master_port N "
        "…`, `deepspeed --master_port N run.py …`, `torchrun --master-port N run.py …` or `MASTER_PORT=N mpirun …`. On "
        "one node `toolkit launch` chooses a free one by itself.",
        port=port,
        address=address,
    )


def mpi_notes(launcher: str, local_world_size: int, environ: Mapping[str, str]) -> list[str]:
    """Return what a user of Open MPI's mpirun should know; `toolkit launch` takes care of it."""
    if launcher != "openmpi" or read_status(environ):
        return []
    # It would be asked in vain for more time: Open MPI 4.1 waits its odls_base_sigkill_timeout out whatever happens.
    said = [
        tr(
            "Note: Open MPI kills the ranks 1 s after a Ctrl-C or SIGTERM, too soon for most checkpoints. To save and "
            "stop, send mpirun a SIGUSR1."
        )
    ]
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if "OMPI_MCA_hwloc_base_binding_policy" not in environ and allowed < cores // max(1, local_world_size):
        said.append(
            tr(
                "Note: Open MPI lets this rank use {allowed} of {cores} cores, data loading and tokenizing included. "
                "`mpirun --bind-to none` lets it use all.",
                allowed=allowed,
                cores=cores,
            )
        )
    return said


PACKED = "LC_TOOLKIT_ENV"
"""Secrets as JSON, name -> value. Debian's and Ubuntu's sshd take variables LC_* from a client, Red Hat's a few."""
_ANEW = "PYTHON_TOOLKIT_STARTED_ANEW"
_READ_AT_START = re.compile(r"(?:LD_|PYTHON|MALLOC_|LC_)\w*|GLIBC_TUNABLES|LANG|LANGUAGE|TZ")
"""Variables that the loader, the C library or Python read when a process starts, and not again."""
EXPORTED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""Beginnings of the variables that DeepSpeed hands on to other nodes, whatever they have (0.19.8, EXPORT_ENVS)."""
_ON_COMMAND_LINES = (
    *(*EXPORTED_PREFIXES, "PATH", "LD_LIBRARY"),
    *("NCCL", "HCCL", "CNCL", "BKCL", "BCCL", "ASCEND", "BIREN", "SUPA", "XPU", "XMLIR", "NEUWARE_HOME"),
)
"""Beginnings of names that DeepSpeed writes with their values into the command of several machines (0.19.8: runner.py,
EXPORT_ENVS, and its accelerators' export_envs)."""


def apply_env(
    env: Mapping[str, Any],
    ranks: Ranks,
    environ: MutableMapping[str, str],
    inherited: Mapping[str, str],
    replace_process: Callable[[str, list[str], dict[str, str]], object] = os.execve,
) -> None:
    """Set the variables of this rank; start this process anew where some of them are read at its start only.

    `inherited` is the environment that this process was started with; `replace_process` keeps the process id.
    """
    sent = json.loads(environ.pop(PACKED, "{}"))
    found = {name: environ.get(name) or sent.get(name, "") for name in LaunchConfig(env=dict(env)).forwarded}
    if missing := [name for name, value in found.items() if not value]:
        mend = ""  # it is enough to set them, unless somebody else started this rank
        if ranks.launcher == "deepspeed" and environ.get("CROSS_SIZE", "1") != "1":
            mend = tr(
                "`toolkit launch` sends it through ssh, if sshd_config there has the line `AcceptEnv "
                "LC_*`; `deepspeed` alone does not. Or write NAME=value into ~/.deepspeed_env, which "
                "all nodes are sent."
            )
        elif ranks.launcher == "openmpi":
            mend = tr("Set it where you type the command, and add `-x NAME` to mpirun, or use `toolkit launch`.")
        elif ranks.launcher in ("torchrun", "slurm"):
            mend = tr("Set it on each node where you type torchrun, or where you type srun or sbatch.")
        raise without_value(missing, mend)
    for value in found.values():
        secrets.learn(value)
    wanted = {**found, **LaunchConfig(env=dict(env)).values}
    changed = {name for name, value in wanted.items() if environ.get(name) != value}
    environ.update(wanted)
    is_new = environ.pop(_ANEW, "")  # what does not stay as it is set must not start the process for ever
    if any(map(_READ_AT_START.fullmatch, changed)) and not is_new:
        sys.stdout.flush()
        kept = {name: value for name, value in inherited.items() if name != PACKED}
        replace_process(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**kept, **wanted, _ANEW: "1"})


def without_value(names: Collection[str], mend: str = "") -> LaunchError:
    """Return the error about secrets that are not set on this machine; `mend`: what to do, "" to set them here."""
    return LaunchError(
        "launch.env: {names}: no value in the recipe, and none in the environment on {host}. {mend}",
        names=", ".join(names),
        host=socket.gethostname(),
        mend=mend or tr("Set it where you type the command:  export NAME=value"),
    )


def for_launcher(names: Sequence[str], launcher: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment of DeepSpeed's launcher for several machines, and options that it gets for secrets."""
    if not names:
        return dict(environ), []
    if launcher not in ("pdsh", "openmpi", "mpich", "slurm"):
        raise LaunchError(
            "launch.env: {names}: how --launcher {launcher} hands on variables is not tested. Use pdsh, openmpi, "
            "mpich or slurm.",
            names=", ".join(names),
            launcher=launcher,
        )
    written = {name for name in names if name.startswith(_ON_COMMAND_LINES)}
    packed = [name for name in names if launcher == "pdsh" or name in written]
    changed = {name: value for name, value in environ.items() if name not in written}
    by_name = [name for name in names if name not in packed]
    if packed:
        changed[PACKED] = json.dumps({name: environ[name] for name in packed})
        by_name.append(PACKED)
    if launcher == "pdsh":
        changed["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -o SendEnv={PACKED}".strip()
    # mpich and slurm hand the whole environment on.
    return changed, [word for name in by_name for word in ("-x", name)] if launcher == "openmpi" else []


_COMMAND = re.compile(r"[\"`\\\x00]|\$(?!\{?[A-Za-z_])")
"""What ends a text between double quotes, or runs a command in it (DeepSpeed 0.19.8); $NAME and ${NAME} do not."""


def variables_of_files(folder: Path) -> dict[Path, dict[str, str]]:
    """Return what the files set that DeepSpeed reads when it starts several machines; the last file wins.

    A file that somebody else could have written is an error (whoever clones a repository gets its files), and so is a
    line on which DeepSpeed 0.19.8 would fail.
    """
    found: dict[Path, dict[str, str]] = {}
    for place in dict.fromkeys((Path.home(), folder)):
        file = place / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if not file.is_file():
            continue
        status, values = file.stat(), found.setdefault(file, {})
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise LaunchError(
                "{file} sets variables on all nodes, and others than you can write it. Look at it, "
                "then:  chmod go-w {file}  (and chown it, if it is not yours), or remove it.",
                file=file,
            )
        # DeepSpeed cuts at newlines alone; `splitlines` at other characters too, so it would check other lines.
        with reading(file, LaunchError):
            lines = file_bytes(file, _LARGEST_FILE_BYTES).decode(errors="replace").removesuffix("\n").split("\n")
        for number, line in enumerate(lines if lines != [""] else [], start=1):
            name, equals, value = line.partition("=")
            if not equals or not name.isidentifier():
                raise LaunchError(
                    "{file}:{line}: DeepSpeed wants NAME=value in every line, without blank lines and comments.",
                    file=file,
                    line=number,
                )
            if _COMMAND.search(value):
                raise LaunchError(
                    "{file}:{line}: the shells of all nodes would run a part of this value: DeepSpeed "
                    'puts it between double quotes as it is. Write it without ", `, \\ and $(.',
                    file=file,
                    line=number,
                )
            values[name] = value.strip()
    return found


STATUS_VARIABLE = "PYTHON_TOOLKIT_REPORT"
_LAUNCHED_BY = "PYTHON_TOOLKIT_LAUNCHED_BY"
"""Host and process of `toolkit launch`: in the environment, as the file is gone with it."""


def create_status_file(folder: Path, restart: int) -> Path:
    """Make the file for one start of the ranks, with who reads it; `restart`: how often they were started before."""
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
    """Tell something; nothing happens where no `toolkit launch` listens."""
    with suppress(OSError):  # it is gone with its reader
        handle = os.open(_status_file(environ), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def read_status(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what has been told, {} where no `toolkit launch` listens. Of several words on a thing the first counts."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        for line in Path(_status_file(environ)).read_text(encoding="utf-8").splitlines():
            found = {**json.loads(line), **found}
    return found


def _status_file(environ: Mapping[str, str]) -> str:
    return environ.get(STATUS_VARIABLE, "").strip('"') or os.devnull
