"""DeepSpeed's hostfile, read strictly: what DeepSpeed would misread in silence is an error with its line."""

import re
from pathlib import Path

from toolkit.errors import LaunchError
from toolkit.messages import tr

HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\S+)")


def read(path: Path) -> dict[str, int]:
    """Return host -> slots of a hostfile, in its order.

    Raises:
        LaunchError: missing, unreadable, empty or malformed.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            tr(
                "the hostfile {path} cannot be read: {reason}. DeepSpeed alone would train on this machine only. "
                "hostfile.example shows the form.",
                path=path,
                reason=reason,
            )
        ) from error
    return parse(text, str(path))


def parse(text: str, path: str) -> dict[str, int]:
    """Parse `HOST slots=N` lines; blank lines and `#` comments are passed over, as DeepSpeed 0.19.8 does.

    Args:
        text: the file's content.
        path: the file, for messages.

    Raises:
        LaunchError: the first line that is wrong, with the mend.
    """
    hosts: dict[str, int] = {}
    if text.startswith("\ufeff"):
        raise LaunchError(tr("{path}:1: begins with a byte-order mark: save it as plain UTF-8.", path=path))
    for number, line in enumerate(text.split("\n"), start=1):
        if line.endswith("\r"):
            raise LaunchError(
                tr("{path}:{line}: Windows line end: convert the file with `dos2unix {path}`.", path=path, line=number)
            )
        content = line.partition("#")[0].strip()
        if content:
            host, slots = _host_and_slots(content, path, number)
            if host in hosts:
                raise LaunchError(
                    tr(
                        "{path}:{line}: {host} is listed twice: give all its slots in one line.",
                        path=path,
                        line=number,
                        host=host,
                    )
                )
            hosts[host] = slots
    if not hosts:
        raise LaunchError(tr("{path} lists no host: write lines like `node1 slots=8`.", path=path))
    return hosts


def _host_and_slots(content: str, path: str, number: int) -> tuple[str, int]:
    found = LINE.fullmatch(content)
    if not found:
        raise LaunchError(
            tr(
                "{path}:{line}: '{content}': write `HOST slots=N`, for example `node1 slots=8`.",
                path=path,
                line=number,
                content=content,
            )
        )
    host, slots = found["host"], found["slots"]
    if not HOST.fullmatch(host):
        raise LaunchError(
            tr(
                "{path}:{line}: '{host}' is no host name: letters, digits, '.', '_' and '-' only, and no '-' in front.",
                path=path,
                line=number,
                host=host,
            )
        )
    if not re.fullmatch(r"[1-9][0-9]*", slots):
        raise LaunchError(
            tr("{path}:{line}: slots={slots} is no positive whole number of GPUs.", path=path, line=number, slots=slots)
        )
    return host, int(slots)
