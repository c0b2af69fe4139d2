"""`launch.env`: environment variables of the ranks, with a value or by name alone."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.secrets import is_under_secret_name

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED = re.compile(
    r"RANK|(?:LOCAL|GROUP|ROLE|CROSS)_RANK|(?:|LOCAL_|GROUP_|ROLE_|CROSS_)WORLD_SIZE|LOCAL_SIZE|CROSS_SIZE|MASTER_(?:ADDR|PORT)"
    r"|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|(?:OMPI_COMM_WORLD|PMI|PMIX|MPI|SLURM|TORCHELASTIC)_\w+"
    r"|(?:PYTHON|LC)_TOOLKIT_\w+"
)
"""What says which rank a process is, and on which GPU: launchers set it for each one, and we."""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""What `distributed.interface` sets."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def values(env: dict[str, Any]) -> dict[str, str]:
    """Return name -> value of the variables that the recipe sets."""
    return {name: _text(value) for name, value in env.items() if value is not None}


def names(env: dict[str, Any]) -> list[str]:
    """Return the variables whose values come from the environment where the command is typed."""
    return [name for name, value in env.items() if value is None]


def check_variables(loaded: Loaded) -> Iterator[ConfigError]:
    """Refuse variables that cannot be set, that launchers own, and secrets.

    Yields:
        What does not hold.
    """
    for name, value in loaded.cfg.launch.env.items():
        if reason := _reason(name, value, loaded.cfg.distributed.interface):
            yield fail(loaded, f"launch.env.{name}", f"launch.env.{name}: {reason}")


def _reason(name: str, value: Any, interface: str) -> str:
    """Return why a variable is refused, "" if it is not; never with its value, which may be a secret."""
    if not _NAME.fullmatch(name):
        return tr("this is no name of a variable: letters, digits and _ only, and no digit in front.")
    if _OWNED.fullmatch(name):
        return tr("the launcher sets this variable for each rank. Remove it.")
    if name in INTERFACES and interface:
        return tr("distributed.interface = {interface} sets this variable. Keep one of the two.", interface=interface)
    if isinstance(value, (dict, list)):
        return tr("write a text, a number, true or false, or nothing behind the name.")
    if value is not None and is_under_secret_name(name, _text(value)):
        return tr(
            "a secret has no place in a recipe. Write `{name}:` without a value (null), and set the variable where you "
            "type the command.",
            name=name,
        )
    if value is not None and _CONTROL.search(_text(value)):
        return tr("the value holds control characters, such as a line break or a tab.")
    return ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.name if isinstance(value, Enum) else value)
