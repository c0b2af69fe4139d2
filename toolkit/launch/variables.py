"""Variables of the ranks: those of `launch.env`, and `.deepspeed_env`, which DeepSpeed sets on all nodes.

Every rank composes the same recipe, so it sets the variables with a value itself: no launcher and no shell changes them
on the way. Secrets are in the environment where the command was typed. Launchers of several nodes get them from
`toolkit launch` in ways in which no command line, log or file has them.
"""

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import secrets
from toolkit.config.schema import LaunchConfig
from toolkit.launch.environment import Ranks
from toolkit.messages import LaunchError, file_bytes, reading, tr

PACKED = "LC_TOOLKIT_ENV"
"""Secrets as JSON, name -> value. Debian's and Ubuntu's sshd take variables LC_* from a client, Red Hat's a few."""
_RESTARTED = "PYTHON_TOOLKIT_STARTED_ANEW"
"""Set in a process that `apply_env` has restarted."""
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
_LARGEST_FILE_BYTES = 1 << 20


def apply_env(
    env: Mapping[str, Any],
    ranks: Ranks,
    environ: MutableMapping[str, str],
    inherited: Mapping[str, str],
    replace_process: Callable[[str, list[str], dict[str, str]], object] = os.execve,
) -> None:
    """Set the variables of `launch.env` in this rank; restart the process if a changed one is read at its start only.

    Args:
        env: `launch.env`: name -> value; without a value it is a secret that comes from the environment.
        ranks: who this process is.
        environ: the environment to change.
        inherited: the environment that this process was started with.
        replace_process: `os.execve`, by which a restarted process keeps its id.

    Raises:
        LaunchError: a secret has no value here.
    """
    config, sent = LaunchConfig(env=dict(env)), json.loads(environ.pop(PACKED, "{}"))
    forwarded = {name: environ.get(name) or sent.get(name, "") for name in config.forwarded}
    if missing := [name for name, value in forwarded.items() if not value]:
        raise missing_secrets_error(missing, _how_to_send(ranks, environ))
    for value in forwarded.values():
        secrets.learn(value)
    wanted = {**forwarded, **config.values}
    changed = {name for name, value in wanted.items() if environ.get(name) != value}
    environ.update(wanted)
    # Once only: a variable that does not stay as it is set must not restart the process for ever.
    was_restarted = bool(environ.pop(_RESTARTED, ""))
    if any(map(_READ_AT_START.fullmatch, changed)) and not was_restarted:
        sys.stdout.flush()
        start_env = {name: value for name, value in inherited.items() if name != PACKED}
        replace_process(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**start_env, **wanted, _RESTARTED: "1"})


def _how_to_send(ranks: Ranks, environ: Mapping[str, str]) -> str:
    """Return how a secret gets to this rank's node; "" where it is enough to set it here."""
    if ranks.launcher == "deepspeed" and environ.get("CROSS_SIZE", "1") != "1":  # the number of nodes
        return tr(
            "`toolkit launch` sends it through ssh, if sshd_config there has the line `AcceptEnv LC_*`; "
            "`deepspeed` alone does not. Or write NAME=value into ~/.deepspeed_env, which all nodes are sent."
        )
    if ranks.launcher == "openmpi":
        return tr("Set it where you type the command, and add `-x NAME` to mpirun, or use `toolkit launch`.")
    if ranks.launcher in ("torchrun", "slurm"):
        return tr("Set it on each node where you type torchrun, or where you type srun or sbatch.")
    return ""


def missing_secrets_error(names: Collection[str], mend: str = "") -> LaunchError:
    """Return the error about secrets that are not set on this machine; `mend`: what to do, "" to set them here."""
    return LaunchError(
        "launch.env: {names}: no value in the recipe, and none in the environment on {host}. {mend}",
        names=", ".join(names),
        host=socket.gethostname(),
        mend=mend or tr("Set it where you type the command:  export NAME=value"),
    )


def launcher_environment(
    names: Sequence[str], launcher: str, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return how DeepSpeed's launcher hands secrets on to several nodes: (its environment, further options for it).

    Args:
        names: the secrets, which are in `environ`.
        launcher: its --launcher, such as pdsh.
        environ: this process's environment.

    Raises:
        LaunchError: how this launcher hands variables on is not tested.
    """
    if not names:
        return dict(environ), []
    if launcher not in ("pdsh", "openmpi", "mpich", "slurm"):
        raise LaunchError(
            "launch.env: {names}: how --launcher {launcher} hands on variables is not tested. Use pdsh, openmpi, "
            "mpich or slurm.",
            names=", ".join(names),
            launcher=launcher,
        )
    # These would be written into a command with their values, so they go into PACKED; with pdsh all do.
    written = {name for name in names if name.startswith(_ON_COMMAND_LINES)}
    packed = [name for name in names if launcher == "pdsh" or name in written]
    for_launcher = {name: value for name, value in environ.items() if name not in written}
    exported = [name for name in names if name not in packed]
    if packed:
        for_launcher[PACKED] = json.dumps({name: environ[name] for name in packed})
        exported.append(PACKED)
    if launcher == "pdsh":
        ssh_arguments = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -o SendEnv={PACKED}"
        for_launcher["PDSH_SSH_ARGS_APPEND"] = ssh_arguments.strip()
    if launcher != "openmpi":  # mpich and slurm hand the whole environment on
        return for_launcher, []
    return for_launcher, [word for name in exported for word in ("-x", name)]


_COMMAND = re.compile(r"[\"`\\\x00]|\$(?!\{?[A-Za-z_])")
"""What ends a text between double quotes, or runs a command in it (DeepSpeed 0.19.8); $NAME and ${NAME} do not."""


def variables_of_files(folder: Path) -> dict[Path, dict[str, str]]:
    """Return the variables that each `.deepspeed_env` sets, file -> {name: value}: DeepSpeed reads that of the home
    directory and that of `folder` when it starts several nodes, and the last one counts. LaunchError if somebody else
    could have written a file, or DeepSpeed 0.19.8 would fail on a line or run part of it as a command.
    """
    by_file: dict[Path, dict[str, str]] = {}
    for directory in dict.fromkeys((Path.home(), folder)):
        file = directory / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if not file.is_file():
            continue
        status, values = file.stat(), by_file.setdefault(file, {})
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise LaunchError(
                "{file} sets variables on all nodes, and others than you can write it. Look at it, "
                "then:  chmod go-w {file}  (and chown it, if it is not yours), or remove it.",
                file=file,
            )
        # DeepSpeed cuts at newlines alone; `splitlines` at other characters too, so it would check other lines.
        with reading(file, LaunchError):
            lines = file_bytes(file, _LARGEST_FILE_BYTES).decode(errors="replace").removesuffix("\n").split("\n")
        if lines == [""]:  # an empty file
            continue
        for number, line in enumerate(lines, start=1):
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
    return by_file
