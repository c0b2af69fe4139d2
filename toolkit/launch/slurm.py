"""Slurm's list of nodes, written out."""

import itertools
import re

from toolkit.errors import LaunchError
from toolkit.messages import tr

# A name with ranges: letters between brackets, and in them numbers or ranges of numbers, separated by commas.
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(nodes: str) -> list[str]:
    """Return the hosts of a list such as gpu[01-03,07],login1, in its order.

    Leading zeros stay; several brackets in a name are multiplied, as `scontrol show hostnames` does.

    Args:
        nodes: as in SLURM_JOB_NODELIST.

    Raises:
        LaunchError: it is none.
    """
    items = _ITEM.findall(nodes)
    if not items or ",".join(items) != nodes.strip():
        raise _wrong(nodes)
    return [host for item in items for host in _hosts(item, nodes)]


def _hosts(item: str, nodes: str) -> list[str]:
    parts = re.split(r"\[([^\[\]]*)\]", item)
    choices = [_numbers(part, nodes) if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str, nodes: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise _wrong(nodes)
        found += [f"{n:0{len(match[1])}}" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return found


def _wrong(nodes: str) -> LaunchError:
    return LaunchError(tr("'{nodes}' is no list of nodes such as gpu[01-03,07],login1.", nodes=nodes))
