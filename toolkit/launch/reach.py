"""Whether the launcher can reach the machines: told for all of them at once, and before it is started."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from toolkit.errors import LaunchError
from toolkit.launch import mpi
from toolkit.launch.resources import Resources, is_here
from toolkit.messages import tr

LIMIT_S = 10
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
    if not hosts or _logs_in(hosts, options) or "--no_ssh" in options:
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


def backend(hosts: Resources, options: Mapping[str, str]) -> str:
    """Return the --launcher through which DeepSpeed starts the ranks, "" where it starts them itself, on this machine.

    Args:
        hosts: those that take part; {} without a hostfile.
        options: of `deepspeed`.
    """
    is_used = (len(hosts) > 1 or "--force_multi" in options) and "--no_ssh" not in options
    return options.get("--launcher", "pdsh").lower() if is_used else ""


def _logs_in(hosts: Resources, options: Mapping[str, str]) -> bool:
    """Whether ssh is needed. An mpirun starts ranks on its own machine without."""
    used = backend(hosts, options)
    return bool(used) and not (used in mpi.LAUNCHERS and all(map(is_here, hosts)))


def check(hosts: Resources, options: Mapping[str, str]) -> None:
    """Try to log in to every machine as DeepSpeed's launcher does, in parallel.

    Args:
        hosts: those that take part.
        options: of `deepspeed`.

    Raises:
        LaunchError: some cannot be reached, with what ssh said, or the launcher's own program is not installed.
    """
    used = backend(hosts, options)
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
    if "--no_ssh_check" in options or not _logs_in(hosts, options):
        return
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = pool.map(lambda host: _try(host, options.get("--ssh_port", "")), hosts)
        refused = [f"  {host}: {answer}" for host, answer in zip(hosts, answers, strict=True) if answer]
    if refused:
        raise LaunchError(
            tr(
                "{count} of {total} machines cannot be reached through ssh without a password:\n{refused}\nTry  ssh "
                "HOST hostname ; ssh-copy-id HOST gives it your key.",
                count=len(refused),
                total=len(hosts),
                refused="\n".join(refused),
            )
        )


def _try(host: str, port: str) -> str:
    """Return what ssh complains of, "" if it got through."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={LIMIT_S}", *(["-p", port] if port else []), host]
    try:
        done = subprocess.run(  # noqa: S603 -- the host has passed hostfile.HOST
            [*command, "hostname"], capture_output=True, text=True, timeout=2 * LIMIT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return tr("ssh is not installed here")
    except subprocess.TimeoutExpired:
        return tr("no answer in {seconds} s", seconds=2 * LIMIT_S)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else tr("ssh ended with code {code}", code=done.returncode)
