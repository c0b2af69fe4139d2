"""Hostfiles, read strictly: what DeepSpeed would misread in silence is an error with its line.

Also Slurm's list of nodes, which GPUs take part as DeepSpeed's launcher chooses them, and which rank runs where.
"""

import ipaddress
import itertools
import math
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from toolkit.config import devices
from toolkit.messages import LaunchError, did_you_mean, joined, shortened, tr

HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")  # as long as names in DNS may be
_SLOTS = re.compile(r"[1-9][0-9]{0,3}")
_MOST_HOSTS = 100_000
_LONGEST_SHOWN, _MOST_DIGITS = 80, 9
_LARGEST_FILE_BYTES = 16 << 20
LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\S+)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Return host -> slots of a hostfile, in its order; LaunchError if it cannot be read, see `parse_hostfile`."""
    try:
        with path.open("rb") as file:  # which may be a pipe: hostfile=<(command)
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise ValueError(tr("it has more than {most} bytes", most=f"{_LARGEST_FILE_BYTES:,}"))
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(
            "the hostfile {path} cannot be read: {reason}. DeepSpeed alone would train on this machine only. "
            "hostfile.example shows the form.",
            path=path,
            reason=reason,
        ) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, path: str) -> dict[str, int]:
    """Return host -> slots of lines `HOST slots=N`; blank lines and `#` comments are skipped, as by DeepSpeed 0.19.8.
    LaunchError with the line for anything else; `path`: the file, for the message.
    """
    hosts: dict[str, int] = {}
    if text.startswith("\ufeff"):
        raise LaunchError("{path}:1: begins with a byte-order mark: save it as plain UTF-8.", path=path)
    for number, line in enumerate(text.split("\n"), start=1):
        content, location = line.partition("#")[0].strip(), f"{path}:{number}"
        if line.endswith("\r"):
            raise LaunchError(
                "{place}: Windows line end: convert the file with `dos2unix {path}`.", place=location, path=path
            )
        if not content:
            continue
        match = LINE.fullmatch(content)
        if not match:
            raise LaunchError(
                "{place}: '{content}': write `HOST slots=N`, for example `node1 slots=8`.",
                place=location,
                content=shortened(content, _LONGEST_SHOWN),
            )
        host, slots = match["host"], match["slots"]
        if not HOST.fullmatch(host):
            raise LaunchError(
                "{place}: '{host}' is no host name: up to 253 letters, digits, '.', '_' and '-', and no '-' in front.",
                place=location,
                host=shortened(host, _LONGEST_SHOWN),
            )
        if not _SLOTS.fullmatch(slots):
            raise LaunchError(
                "{place}: slots={slots} is no number of GPUs from 1 to 9999.",
                place=location,
                slots=shortened(slots, _LONGEST_SHOWN),
            )
        if host in hosts:
            raise LaunchError(
                "{place}: {host} is listed twice: give all its slots in one line.", place=location, host=host
            )
        hosts[host] = int(slots)
    if not hosts:
        raise LaunchError("{path} lists no host: write lines like `node1 slots=8`.", path=path)
    return hosts


Resources = dict[str, list[int]]
"""Host -> its GPUs that take part, in the order of the hostfile; ranks are counted in this order."""

SELECTION_OPTIONS = ("--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--num_accelerators")
"""Options of `deepspeed` that choose among the nodes and GPUs of a hostfile."""


def select_gpus(hosts: Mapping[str, int], options: Mapping[str, str]) -> Resources:
    """Return the GPUs that --include, --exclude, --num_nodes and --num_gpus leave, as DeepSpeed 0.19.8 reads them.

    Args:
        hosts: host -> slots, of the hostfile.
        options: the launcher's, by name.

    Raises:
        LaunchError: the options name what is not there, contradict each other, or leave nothing; or DeepSpeed would
            silently take fewer nodes, or more GPUs, than were asked for.
    """
    include = options.get("--include") or options.get("-i") or ""
    exclude = options.get("--exclude") or options.get("-e") or ""
    num_nodes = whole_number(options, "--num_nodes")
    num_gpus = asked_gpus(options)
    if [bool(include), bool(exclude), bool(num_nodes or num_gpus)].count(True) > 1:
        raise LaunchError(tr("give one of --include, --exclude, or --num_nodes and --num_gpus, not several."))
    selected: Resources = {host: list(range(slots)) for host, slots in hosts.items()}
    if include:
        named = _named_gpus(include, selected, "--include")
        selected = {host: named[host] or selected[host] for host in selected if host in named}
    elif exclude:
        named = _named_gpus(exclude, selected, "--exclude")
        excluded = {host: gpus or selected[host] for host, gpus in named.items()}
        selected = {host: [gpu for gpu in gpus if gpu not in excluded.get(host, [])] for host, gpus in selected.items()}
        selected = {host: gpus for host, gpus in selected.items() if gpus}
    if num_nodes and num_nodes > len(selected):
        raise LaunchError(
            "--num_nodes {asked}, but the hostfile names {there}: {hosts}.",
            asked=num_nodes,
            there=len(selected),
            hosts=", ".join(selected),
        )
    selected = dict(list(selected.items())[:num_nodes])  # all of them for None
    small = [host for host in selected if num_gpus and num_gpus > hosts[host]]
    if small:
        raise LaunchError(
            "--num_gpus {asked}, but {host} has {slots} slots.", asked=num_gpus, host=small[0], slots=hosts[small[0]]
        )
    if num_gpus:
        selected = {host: list(range(num_gpus)) for host in selected}
    if not selected:
        raise LaunchError(tr("the launcher's options leave no machine of the hostfile."))
    return selected


def asked_gpus(options: Mapping[str, str]) -> int | None:
    """Return how many GPUs of each node --num_gpus asks for, None without it; LaunchError if it is no such number."""
    return whole_number(options, "--num_accelerators" if "--num_accelerators" in options else "--num_gpus")


def whole_number(options: Mapping[str, str], name: str) -> int | None:
    """Return an option that is a positive whole number, None without it, or for -1, as DeepSpeed's parser has it."""
    value = options.get(name, "-1")
    if value == "-1":
        return None
    if not value.isdecimal() or len(value) > _MOST_DIGITS or not int(value):
        raise LaunchError(
            "{name} {value}: write a positive whole number.", name=name, value=shortened(value, _LONGEST_SHOWN)
        )
    return int(value)


def _named_gpus(specification: str, available: Resources, option: str) -> Resources:
    """Return host -> GPUs that HOST[:GPU,GPU…]@HOST… names, [] for all of a host; LaunchError for what is not in
    `available`. `option`: --include or --exclude, for the message.
    """
    named: Resources = {}
    for part in specification.split("@"):
        host, colon, gpus = part.partition(":")
        if host not in available:
            raise LaunchError(
                joined(
                    tr("{option} {part}: the hostfile has no {host}.", option=option, part=part, host=host),
                    did_you_mean(host, available),
                )
            )
        numbers = gpus.split(",") if colon else []
        slots = {str(gpu) for gpu in available[host]}
        # DeepSpeed reads them with int(): " 02" is 2, and "00" is 0.
        without_zeros = [number.strip().lstrip("0") or number.strip()[-1:] for number in numbers]
        wrong = [number for number, plain in zip(numbers, without_zeros, strict=True) if plain not in slots]
        if wrong:
            raise LaunchError(
                "{option} {part}: {host} has no GPU {wrong}; its slots are 0 to {last}. Write HOST or HOST:0,1.",
                option=option,
                part=part,
                host=host,
                wrong=wrong[0] or "''",
                last=available[host][-1],
            )
        named[host] = sorted({*named.get(host, []), *map(int, numbers)})
    return named


def check_visible_devices(hosts: Resources, environ: Mapping[str, str] = os.environ) -> None:
    """Raise a LaunchError if a variable chooses other GPUs of this machine than `hosts`, of a hostfile: DeepSpeed's
    launcher (0.19.8, launch.py) would overwrite it.
    """
    variable = devices.visible_variable(environ)
    chosen = environ.get(variable)
    gpus_here = [gpus for host, gpus in hosts.items() if is_here(host)]
    if chosen and [",".join(map(str, gpus)) for gpus in gpus_here] != [chosen]:
        raise LaunchError(
            "{variable}={chosen} has no effect with a hostfile: DeepSpeed writes over it on "
            "every node. Unset it, and choose GPUs with --include {included}.",
            variable=variable,
            chosen=chosen,
            included="@".join(f"{host}:{chosen}" for host in hosts),
        )


def check_visible_devices_here(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Raise a LaunchError for a variable's choice of this node's GPUs that DeepSpeed's launcher (0.19.8, runner.py)
    misreads or ignores without a hostfile. `options`: the launcher's, by name.
    """
    variable = devices.visible_variable(environ)
    chosen = environ.get(variable, "")
    gpus, count = chosen.split(","), options.get("--num_gpus", options.get("--num_accelerators", ""))
    are_typed = bool({"--include", "-i", "--exclude", "-e"} & options.keys())
    if not chosen or devices.device_here(environ) == "cpu" or are_typed:
        return
    if not all(gpu.strip().isdecimal() for gpu in gpus):
        raise LaunchError(
            "{variable}={chosen}: DeepSpeed's launcher takes numbers of GPUs alone. Write their numbers, or "
            "start with `torchrun --nproc-per-node {count} run.py …`.",
            variable=variable,
            chosen=chosen,
            count=len(gpus),
        )
    # With a number DeepSpeed takes the first so many GPUs of the machine, whichever the variable names.
    if count.isdecimal() and {*map(int, gpus[: int(count)])} != {*range(int(count))}:
        raise LaunchError(
            "{variable}={chosen} has no effect with --num_gpus: DeepSpeed would take GPUs 0 to {last}. Write "
            "--include localhost:{chosen}, or leave --num_gpus out.",
            variable=variable,
            chosen=chosen,
            last=int(count) - 1,
        )


def rank_table(resources: Resources) -> list[tuple[str, str, str]]:
    """Return (host, its GPUs, its ranks) of each host, numbers as ranges such as 0-3,5."""
    rows, first = [], 0
    for host, gpus in resources.items():
        rows.append((host, _as_ranges(gpus), _as_ranges(list(range(first, first + len(gpus))))))
        first += len(gpus)
    return rows


def _as_ranges(numbers: list[int]) -> str:
    """Return ascending numbers as 0-3,5."""
    # Within a range of consecutive numbers the difference between number and index is the same.
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in groups]
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges)


def is_here(host: str) -> bool:
    """Whether a host name is one of this machine's, by name or by address."""
    if host in ("localhost", socket.gethostname()):
        return True
    our_addresses = {
        address.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses
    }
    host_addresses: set[str] = set()
    with suppress(OSError):
        host_addresses = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    return bool(host_addresses & our_addresses) or any(
        ipaddress.ip_address(address).is_loopback for address in host_addresses
    )


# A name with ranges: letters between brackets, and in them numbers or ranges of numbers, separated by commas.
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")


def expand_nodes(nodes: str) -> list[str]:
    """Return the hosts of a list such as gpu[01-03,07],login1, as `scontrol show hostnames` does; or a LaunchError."""
    wrong = LaunchError(
        "'{nodes}' is no list of nodes such as gpu[01-03,07],login1.", nodes=shortened(nodes, _LONGEST_SHOWN)
    )
    items = _ITEM.findall(nodes)
    if not items or ",".join(items) != nodes.strip():
        raise wrong
    hosts: list[str] = []
    for item in items:
        choices: list[list[str]] = []  # what each part of a name may be: of gpu[1-2]a ["gpu"], ["1", "2"], ["a"]
        # Text, what is in brackets, text, …: gpu[1-2]a is "gpu", "1-2", "a".
        for index, part in enumerate(re.split(r"\[([^\[\]]*)\]", item)):
            if index % 2 == 0:
                choices.append([part])
                continue
            choices.append([])
            for numbers in part.split(","):
                match = _RANGE.fullmatch(numbers)
                if not match:
                    raise wrong
                first, last, num_digits = int(match[1]), int(match[2] or match[1]), len(match[1])
                if not 0 <= last - first < _MOST_HOSTS:
                    raise wrong
                choices[-1] += [f"{number:0{num_digits}}" for number in range(first, last + 1)]  # 08, 09, 10
        if len(hosts) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise wrong
        hosts += map("".join, itertools.product(*choices))
    return hosts
