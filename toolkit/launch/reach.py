"""Whether the launcher can do what it is asked on all machines: told for all at once, and before it is started."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from toolkit.errors import LaunchError
from toolkit.launch.resources import Resources
from toolkit.messages import tr

LIMIT_S = 10
_BACKENDS = {"pdsh": ("pdsh", "apt install pdsh"), "openmpi": ("ompi_info", "apt install openmpi-bin")}
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
    if not _logs_in(hosts, options) or _launcher(options) != "pdsh":
        return list(words)
    return [re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word) for word in words]


def _logs_in(hosts: Resources, options: Mapping[str, str]) -> bool:
    """Whether DeepSpeed's launcher starts ranks through other machines' shells."""
    return (len(hosts) > 1 or "--force_multi" in options) and "--no_ssh" not in options


def _launcher(options: Mapping[str, str]) -> str:
    return options.get("--launcher", "pdsh").lower()


def check(hosts: Resources, options: Mapping[str, str]) -> None:
    """Try to log in to every machine as DeepSpeed's launcher does, in parallel.

    Args:
        hosts: those that take part.
        options: of `deepspeed`.

    Raises:
        LaunchError: some cannot be reached, with what ssh said, or the launcher's own program is not installed.
    """
    if not _logs_in(hosts, options):
        return
    program, source = _BACKENDS.get(_launcher(options), ("", ""))
    if program and not shutil.which(program):
        raise LaunchError(
            tr(
                "several machines need {program}, which is not installed here:  {source}  (or choose another "
                "--launcher).",
                program=program,
                source=source,
            )
        )
    if "--no_ssh_check" in options:
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
    if _logs_in(hosts, options) and _launcher(options) != "impi":
        raise LaunchError(
            tr(
                "{option}: DeepSpeed does not hand this on to machines that it starts through {launcher}; their ranks "
                "would not be bound. Leave it out, or type the command on every machine with --no_ssh --node_rank=N "
                "--master_addr=HOST, N from 0 in the order of the hostfile.",
                option=asked[0],
                launcher=_launcher(options),
            )
        )
    if not shutil.which("numactl"):
        raise LaunchError(
            tr("{option} needs numactl, which is not installed here:  apt install numactl", option=asked[0])
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
