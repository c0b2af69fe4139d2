"""`.deepspeed_env`, from which DeepSpeed sets variables on all machines: in the home folder, and in the working one."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from toolkit.errors import LaunchError
from toolkit.messages import tr

_COMMAND = re.compile(r"[\"`\\\x00]|\$(?!\{?[A-Za-z_])")
"""What ends a text between double quotes, or runs a command in it (DeepSpeed 0.19.8); $NAME and ${NAME} do not."""


def passed_on(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[Path, list[str]]:
    """Return the files that DeepSpeed reads when it starts several machines, and the variables that each sets.

    Args:
        folder: the folder where the command was typed.
        environ: the environment; DS_ENV_FILE names the file.

    Raises:
        LaunchError: somebody else could have written it (whoever clones a repository gets its files), or DeepSpeed
            0.19.8 would fail on a line of it.
    """
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    found = {}
    for place in dict.fromkeys((Path.home(), folder)):
        file = place / name
        if file.is_file():
            _check_owner(file)
            found[file] = _names(file)
    return found


def values(files: Iterable[Path]) -> dict[str, str]:
    """Return what files of `passed_on` set, the last one winning."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}


def _check_owner(file: Path) -> None:
    status = file.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LaunchError(
            tr(
                "{file} sets variables on all machines, and others than you can write it. Look at it, then:  chmod "
                "go-w {file}  (and chown it, if it is not yours), or remove it.",
                file=file,
            )
        )


def _names(file: Path) -> list[str]:
    names = []
    # DeepSpeed cuts at newlines alone; `splitlines` at other characters too, which would be looked at as other lines.
    lines = file.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        name, equals, value = line.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(
                tr(
                    "{file}:{line}: DeepSpeed wants NAME=value in every line, without blank lines and comments.",
                    file=file,
                    line=number,
                )
            )
        if _COMMAND.search(value):
            raise LaunchError(
                tr(
                    "{file}:{line}: the shells of all machines would run a part of this value: DeepSpeed puts it "
                    'between double quotes as it is. Write it without ", `, \\ and $(.',
                    file=file,
                    line=number,
                )
            )
        names.append(name)
    return names
