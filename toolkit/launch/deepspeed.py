"""DeepSpeed's launcher: its options, what was typed, what it needs to start ranks, and who restarts a run.

Its command line is read from the process table: it ignores a missing hostfile without a message, and a rank sees only
the arguments that its launcher left for it.
"""

import base64
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil

from toolkit import children
from toolkit.launch import environment, variables
from toolkit.launch.ancestors import DEEPSPEED, processes_above
from toolkit.launch.hostfile import SELECTION_OPTIONS, Resources, asked_gpus, is_here, read_hostfile, select_gpus
from toolkit.messages import LaunchError, tr

_VALUE_OPTIONS = (
    *("H", "i", "e", "hostfile", "include", "exclude", "num_nodes", "num_gpus", "num_accelerators", "master_port"),
    *("master_addr", "node_rank", "launcher", "launcher_args", "ssh_port", "save_pid", "enable_each_rank_log"),
    *("autotuning", "bind_core_list", "elastic_training", "min_elastic_nodes", "max_elastic_nodes", "venv_script"),
    "log_level",
)
"""Options of `deepspeed` that take a value; needed to tell its own words from the training program's."""
_FLAG_OPTIONS = (
    *("q", "quiet", "u", "m", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi"),
    "bind_cores_to_rank",
)
"""Its other options."""
WITH_VALUE = re.compile(rf"--?(?:{'|'.join(_VALUE_OPTIONS)})")
_FLAGS = re.compile(rf"--?(?:{'|'.join(_FLAG_OPTIONS)})")
OPTIONS = tuple(f"--{name}" for name in (*_VALUE_OPTIONS, *_FLAG_OPTIONS) if len(name) > 1)
"""All of them by their long names, for messages."""
OTHER_NAMES = {
    **dict.fromkeys(("gpus", "ngpus", "n_gpus", "nproc_per_node", "num_processes", "nproc"), "--num_gpus"),
    **dict.fromkeys(("nodes", "nnodes", "num_machines"), "--num_nodes"),
    **dict.fromkeys(("machine_rank",), "--node_rank"),
    **dict.fromkeys(("main_process_port", "port"), "--master_port"),
    **dict.fromkeys(("main_process_ip",), "--master_addr"),
}
"""What torchrun, accelerate and people call some of them -> the option."""

TOOLKIT_OPTIONS = {"--config-dir": True, "-cd": True, "--cfg": True, "--explain": False, "--help": False, "-h": False}
"""Option of `toolkit` commands -> whether it takes a value."""


def check_launcher(num_nodes: int, ranks: environment.Ranks) -> None:
    """Check that the launcher above this rank has started what was asked for.

    Args:
        num_nodes: `launch.num_nodes`; 0: any number.
        ranks: who this process is.

    Raises:
        LaunchError: the hostfile that was asked for is missing or malformed; other nodes take part than it, or
            `num_nodes`, says; or ranks are not bound to cores as asked.
    """
    chain = list(processes_above())
    # DeepSpeed's node launcher is told all nodes: host -> its GPUs, as JSON in base64.
    world_info = next((word for _, words in chain for word in words if word.startswith("--world_info=")), "")
    if world_info:
        nodes = len(json.loads(base64.urlsafe_b64decode(world_info.partition("=")[2])))
    elif ranks.local_world_size:  # the same on all nodes, as far as is known here
        nodes = max(1, ranks.world_size // ranks.local_world_size)
    else:
        nodes = 0  # unknown
    hostfile: str | None = None
    for process, words in chain:
        options, _ = split_words(launcher_options(words))  # {} unless this is the `deepspeed` that was typed
        hostfile = hostfile_of(options)
        if hostfile is not None:
            nodes = _check_hostfile(hostfile, options, process, nodes, 0 if world_info else ranks.world_size)
            break
        check_binding({}, options)  # {}: without a hostfile
    if hostfile is None and ranks.launcher == "openmpi" and ranks.rank:
        return  # on another node than mpirun: of unequal nodes each would tell another number
    if ranks.launcher == "slurm" and not nodes:  # srun without --ntasks-per-node
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "0"))
    if num_nodes and not nodes:
        *_, variable = environment.VARIABLES.get(ranks.launcher, environment.VARIABLES["torch"])  # of ranks on a node
        raise LaunchError(
            "launch.num_nodes = {asked} cannot be checked: {launcher} does not say how many ranks a node has. Set "
            "{variable} for each rank, or remove it.",
            asked=num_nodes,
            launcher=ranks.launcher,
            variable=variable,
        )
    if num_nodes and num_nodes != nodes:
        raise LaunchError(
            "launch.num_nodes = {asked}, but {nodes} nodes were started. Check the hostfile and the "
            "launcher's options, or set launch.num_nodes={nodes}.",
            asked=num_nodes,
            nodes=nodes,
        )


def _check_hostfile(
    hostfile: str, options: Mapping[str, str], launcher: psutil.Process, nodes: int, world_size: int
) -> int:
    """Check a hostfile, in the folder of its `launcher`, as `check_launcher` says; return the number of nodes that were
    started. That is `nodes` if `world_size` is 0; else `nodes` is a guess, and a hostfile of `world_size` ranks knows.
    """
    folder = Path.cwd()
    with suppress(psutil.Error):
        folder = Path(launcher.cwd())
    hosts = select_gpus(read_hostfile(folder / hostfile), options)
    if world_size == sum(map(len, hosts.values())):
        nodes = len(hosts)  # Open MPI may have started unequal numbers of ranks on them
    if nodes and len(hosts) != nodes:
        raise LaunchError(
            "the hostfile {path} names {expected} nodes ({hosts}), but {nodes} were started.",
            path=hostfile,
            expected=len(hosts),
            hosts=", ".join(hosts),
            nodes=nodes,
        )
    check_machines(hosts, options)
    check_binding(hosts, options)
    if len(hosts) > 1:
        variables.variables_of_files(folder)  # raises for those that DeepSpeed would misread
    return nodes


def check_machines(hosts: Resources, options: Mapping[str, str]) -> None:
    """Raise a LaunchError if `hosts` has one machine alone and it is not this one: DeepSpeed would train here."""
    only = next(iter(hosts)) if len(hosts) == 1 else ""
    if only and "--force_multi" not in options and "--no_ssh" not in options and not is_here(only):
        raise LaunchError(
            "the hostfile leaves {host} alone, which is not this machine ({here}): DeepSpeed would train here all "
            "the same. Add --force_multi to train there, or type the command on {host}.",
            host=only,
            here=socket.gethostname(),
        )


def launcher_options(line: list[str]) -> list[str]:
    """Return the options of a `deepspeed` command line as they were typed, without the program's; [] for others."""
    start = next((index for index, word in enumerate(line[:4]) if Path(word).name in DEEPSPEED), len(line))
    words = line[start + 1 :]
    _, of_program = split_words(words)
    return words[: len(words) - len(of_program)]


def split_words(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that the words begin with, --name -> value, "" where they have none; and the words after them:
    `--num_gpus 2 run.py recipe=lora` gives {"--num_gpus": "2"} and [run.py, recipe=lora].
    """
    options: dict[str, str] = {}
    count = 0
    for word, *value_words in _with_values(words):
        if not word.startswith("-"):
            break
        name, _, value = word.partition("=")
        options[name] = "".join(value_words) or value
        count += 1 + len(value_words)
    return options, list(words[count:])


def _with_values(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each word as a list, together with the next word if it is an option that takes that as its value."""
    remaining = iter(words)
    for word in remaining:
        takes_value = WITH_VALUE.fullmatch(word) or TOOLKIT_OPTIONS.get(word)
        yield [word, *islice(remaining, 1)] if takes_value else [word]


def hostfile_of(options: Mapping[str, str]) -> str | None:
    """Return the hostfile that was asked for, None without one. An empty name asks for one too, which is not there."""
    return options.get("--hostfile", options.get("-H"))


def named_hosts(options: Mapping[str, str]) -> Resources:
    """Return the nodes and GPUs that a launch's options name; none where they depend on this machine's GPUs."""
    if path := hostfile_of(options):
        return select_gpus(read_hostfile(Path(path)), options)
    number = asked_gpus(options)
    return {"localhost": list(range(number))} if number else {}


def hosts_of(options: Mapping[str, str]) -> Resources:
    """Return the nodes and GPUs that a launch's options name; without any, those of this machine."""
    if named := named_hosts(options):
        return named
    from deepspeed.accelerator import get_accelerator

    return select_gpus({"localhost": get_accelerator().device_count()}, options)


def ranks_of(options: Mapping[str, str]) -> int:
    """Return how many ranks a launch starts; 0 where that depends on this machine's GPUs."""
    return sum(map(len, named_hosts(options).values()))


def typed_options(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the launcher's options among the words (hostfile=FILE: --hostfile FILE), these by name, and the others."""
    launcher_words: list[str] = []
    other_words: list[str] = []
    for option_words in _with_values(words):
        name, equals, value = option_words[0].partition("=")
        if name == "hostfile" and equals:
            launcher_words += ["--hostfile", value]
        elif WITH_VALUE.fullmatch(name) or _FLAGS.fullmatch(name):
            launcher_words += option_words
        else:
            other_words += option_words
    return launcher_words, split_words(launcher_words)[0], other_words


def without_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a launcher's options without some of them and their values."""
    return [
        word
        for option_words in _with_values(words)
        if option_words[0].partition("=")[0] not in names
        for word in option_words
    ]


_BACKENDS = {
    "pdsh": ("pdsh", "apt install pdsh"),
    "openmpi": ("ompi_info", "apt install openmpi-bin"),
    "mpich": ("mpirun", "apt install mpich"),
}
"""Of DeepSpeed's --launcher: the program that it looks for (0.19.8), and where it comes from."""
DEFAULT_PORT = "29500"
"""DeepSpeed's own."""


def port_of_one_node(hosts: Resources, options: Mapping[str, str]) -> dict[str, str]:
    """Return {"--master_port": a free one} for ranks on this node alone, as another run may use DeepSpeed's own; {} on
    several nodes, or if the user has chosen one.
    """
    is_single = len(hosts) < 2 and "--force_multi" not in options
    return {"--master_port": str(environment.free_port())} if is_single and "--master_port" not in options else {}


def options_without_ssh(hosts: Resources, options: Mapping[str, str]) -> list[str]:
    """Return options by which DeepSpeed's launcher needs no ssh to this machine, if it is the only one of `hosts`. A
    single host is this node, see `check_machines`. `hosts`: {} without a hostfile.
    """
    if not hosts or needs_ssh(hosts, options) or "--no_ssh" in options:
        return []
    no_check = [] if "--no_ssh_check" in options else ["--no_ssh_check"]
    address = [] if "--master_addr" in options else ["--master_addr", "127.0.0.1"]  # else it is asked for through ssh
    return [*no_check, *address]


def quoted_words(hosts: Resources, options: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the program's words in the form in which they arrive as they are.

    pdsh hands them to a shell on each machine, bare, or between double quotes if there is a space in them (DeepSpeed
    0.19.8, PDSHRunner.parse_user_args): braces, `$`, globs and quotes would not survive.
    """
    if backend(hosts, options) != "pdsh":
        return list(words)
    return [re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word) for word in words]


def backend(hosts: Resources, options: Mapping[str, str]) -> str:
    """Return the --launcher through which DeepSpeed starts the ranks, "" where it starts them itself, on this node."""
    is_used = (len(hosts) > 1 or "--force_multi" in options) and "--no_ssh" not in options
    return options.get("--launcher", "pdsh").lower() if is_used else ""


def needs_ssh(hosts: Resources, options: Mapping[str, str]) -> bool:
    """Return whether DeepSpeed's launcher needs ssh; an mpirun starts ranks on its own machine without."""
    launcher = backend(hosts, options)
    return bool(launcher) and not (launcher in environment.MPI_LAUNCHERS and all(map(is_here, hosts)))


def check_backend_program(hosts: Resources, options: Mapping[str, str]) -> None:
    """Raise a LaunchError if the program by which DeepSpeed's launcher would start ranks on `hosts` is not installed,
    or could not start them.
    """
    used, folder = backend(hosts, options), os.getcwd()
    if used == "pdsh" and shlex.quote(folder) != folder:
        raise LaunchError(
            "DeepSpeed's launcher gives the directory {folder} to the nodes' shells unquoted. Type "
            "this in a directory without spaces and special characters (a link to this one will do).",
            folder=folder,
        )
    chosen = set(SELECTION_OPTIONS) & set(options)
    if chosen and used in ("openmpi", "mpich", "impi"):
        raise LaunchError(
            "--launcher {launcher} takes all nodes and slots of the hostfile (DeepSpeed 0.19.8): leave "
            "out {options}, and write a hostfile of what takes part.",
            launcher=used,
            options=", ".join(sorted(chosen)),
        )
    program, source = _BACKENDS.get(used, ("", ""))
    if program and not shutil.which(program):
        raise LaunchError(
            "several nodes need {program}, which is not installed here:  {source}  (or choose another --launcher).",
            program=program,
            source=source,
        )
    if used in environment.MPI_LAUNCHERS:
        check_mpirun(used)


def check_mpirun(launcher: str) -> None:
    """Raise a LaunchError if the `mpirun` on PATH is not of the MPI that DeepSpeed's options are for."""
    printed = children.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    other_mpi = {"openmpi": "hydra", "mpich": "open mpi|openrte|prrte"}[launcher]  # as the other's mpirun names itself
    if re.search(other_mpi, printed, re.IGNORECASE):
        raise LaunchError(
            "--launcher {launcher} starts the `mpirun` that is first on PATH, and that is another one: {found}. "
            "Debian has both as mpirun.openmpi and mpirun.mpich:  update-alternatives --config mpirun",
            launcher=launcher,
            found=printed.strip().partition("\n")[0].strip(),
        )


def mpi_launcher_args(hosts: Resources, options: Mapping[str, str], exported: Sequence[str]) -> list[str]:
    """Return DeepSpeed's --launcher_args for Open MPI: the user's own, and what is missing there. DeepSpeed 0.19.8
    gives Open MPI's ranks no address to meet at, and by itself Open MPI holds each rank on one core, its data loading
    and tokenizing too. `exported`: `-x NAME` for each variable that is passed on; DeepSpeed's own `-x NAME="…"` would
    write the quotes too, as no shell removes them.
    """
    typed = options.get("--launcher_args", "")
    first_host = "127.0.0.1" if all(map(is_here, hosts)) else next(iter(hosts))
    # Pattern of what a user types to settle something -> the words that settle it where this is not typed.
    defaults = {
        "bind-to|binding_policy|cpu-set": ["--bind-to", "none"],
        "MASTER_ADDR": ["-x", f"MASTER_ADDR={options.get('--master_addr', first_host)}"],
        "MASTER_PORT": ["-x", f"MASTER_PORT={options.get('--master_port', DEFAULT_PORT)}"],
    }
    missing = [word for pattern, words in defaults.items() if not re.search(pattern, typed) for word in words]
    return ["--launcher_args", f"{typed} {shlex.join([*missing, *exported])}".strip()]


def check_binding(hosts: Resources, options: Mapping[str, str]) -> None:
    """Raise a LaunchError if ranks are to be bound to cores (--bind_…) where DeepSpeed's launcher (0.19.8) would fail,
    or would silently not do it.
    """
    asked = [name for name in options if name.startswith("--bind_core")]
    if not asked:
        return
    if asked == ["--bind_core_list"]:
        raise LaunchError(tr("--bind_core_list does nothing alone: add --bind_cores_to_rank."))
    used = backend(hosts, options)
    if used not in ("", "impi"):
        raise LaunchError(
            "{option}: DeepSpeed does not hand this on to nodes that it starts through {launcher}; their ranks would "
            "not be bound. Leave it out, or type the command on every node with --no_ssh --node_rank=N "
            "--master_addr=HOST (N as in the hostfile, from 0).",
            option=asked[0],
            launcher=used,
        )
    if not shutil.which("numactl"):
        raise LaunchError("{option} needs numactl, which is not installed here:  apt install numactl", option=asked[0])


def check_restarts(
    most: int,
    ranks: environment.Ranks,
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    least_nodes: int = 0,
) -> None:
    """Raise a LaunchError if the launcher would not restart a run that crashes as often as the config says.

    Args:
        most: `run.max_restarts`.
        ranks: who this process is.
        words: the overrides, for the command in the message.
        environ: this process's environment.
        least_nodes: `launch.min_nodes`.
    """
    if environment.read_status(environ):  # started by `toolkit launch`, which restarts as often
        return
    if ranks.launcher == "torchrun" and not least_nodes:
        most_by_torchrun = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if most_by_torchrun != most:
            raise LaunchError(
                "run.max_restarts = {most}, but torchrun starts again {given} times. Type `torchrun "
                "--max-restarts={most} …`, or set run.max_restarts={given}.",
                most=most,
                given=most_by_torchrun,
            )
    elif most:
        # The options of the nearest `deepspeed` above this rank, [] under other launchers.
        typed = next(filter(None, (launcher_options(line) for _, line in processes_above())), [])
        command = shlex.join(["toolkit", "launch", *typed, *words])
        if least_nodes:
            raise LaunchError(
                "launch.min_nodes = {least}: only `toolkit launch` starts a run again on other nodes, not {launcher}. "
                "Type: {command}",
                least=least_nodes,
                launcher=ranks.launcher,
                command=command,
            )
        raise LaunchError(
            "run.max_restarts = {most}, but nothing here would restart the run ({launcher}). Type: {command}",
            most=most,
            launcher=ranks.launcher,
            command=command,
        )
