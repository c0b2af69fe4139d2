"""Which GPUs of a hostfile's machines take part, as DeepSpeed's launcher chooses them, and which rank runs where."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from toolkit.config.suggest import did_you_mean
from toolkit.errors import LaunchError
from toolkit.messages import tr

Resources = dict[str, list[int]]
"""Host -> its GPUs that take part, in the order of the hostfile; ranks are counted in this order."""


def used(hosts: Mapping[str, int], options: Mapping[str, str]) -> Resources:
    """Return what --include, --exclude, --num_nodes and --num_gpus leave, as DeepSpeed 0.19.8 reads them.

    Args:
        hosts: host -> slots, of a hostfile.
        options: of `deepspeed`, see `ancestors.deepspeed_options`.

    Raises:
        LaunchError: they name what is not there, contradict each other, or leave nothing; or DeepSpeed would take
            fewer machines, or more GPUs, than there are without a word.
    """
    include = options.get("--include") or options.get("-i") or ""
    exclude = options.get("--exclude") or options.get("-e") or ""
    nodes = _number(options, "--num_nodes")
    gpus = _number(options, "--num_accelerators" if "--num_accelerators" in options else "--num_gpus")
    if bool(include) + bool(exclude) + (nodes is not None or gpus is not None) > 1:
        raise LaunchError(tr("give one of --include, --exclude, or --num_nodes and --num_gpus, not several."))
    found: Resources = {host: list(range(slots)) for host, slots in hosts.items()}
    if include:
        named = _named(include, found, "--include")
        found = {host: named[host] or found[host] for host in found if host in named}
    elif exclude:
        named = _named(exclude, found, "--exclude")
        taken = {host: gpus or found[host] for host, gpus in named.items()}
        found = {host: [gpu for gpu in gpus if gpu not in taken.get(host, [])] for host, gpus in found.items()}
        found = {host: gpus for host, gpus in found.items() if gpus}
    if nodes and nodes > len(found):
        raise LaunchError(
            tr(
                "--num_nodes {asked}, but the hostfile names {there}: {hosts}.",
                asked=nodes,
                there=len(found),
                hosts=", ".join(found),
            )
        )
    found = dict(list(found.items())[: nodes or None])
    small = [host for host in found if gpus and gpus > hosts[host]]
    if small:
        raise LaunchError(
            tr("--num_gpus {asked}, but {host} has {slots} slots.", asked=gpus, host=small[0], slots=hosts[small[0]])
        )
    if gpus:
        found = {host: list(range(gpus)) for host in found}
    if not found:
        raise LaunchError(tr("the launcher's options leave no machine of the hostfile."))
    return found


def count_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs processes started here see; 1, one CPU rank, without any."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    names = chosen.split(",") if chosen else list(Path("/dev").glob("nvidia[0-9]*"))
    return max(1, len(names))


def _number(options: Mapping[str, str], name: str) -> int | None:
    value = options.get(name, "-1")
    if value == "-1":
        return None
    if not value.isdecimal() or not int(value):
        raise LaunchError(tr("{name} {value}: write a positive whole number.", name=name, value=value))
    return int(value)


def _named(specification: str, there: Resources, option: str) -> Resources:
    """Return host -> GPUs of HOST[:GPU,GPU…]@HOST…; no GPUs stand for all."""
    named: Resources = {}
    for part in specification.split("@"):
        host, colon, gpus = part.partition(":")
        if host not in there:
            raise LaunchError(
                tr("{option} {part}: the hostfile has no {host}.", option=option, part=part, host=host)
                + did_you_mean(host, there)
            )
        numbers = gpus.split(",") if colon else []
        wrong = [number for number in numbers if not number.strip().isdecimal() or int(number) not in there[host]]
        if wrong:
            raise LaunchError(
                tr(
                    "{option} {part}: {host} has no GPU {wrong}; its slots are 0 to {last}. Write HOST or HOST:0,1.",
                    option=option,
                    part=part,
                    host=host,
                    wrong=wrong[0] or "''",
                    last=there[host][-1],
                )
            )
        named[host] = sorted({*named.get(host, []), *map(int, numbers)})
    return named


def check_visible_devices(hosts: Resources, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a choice of GPUs that DeepSpeed's launcher (0.19.8, launch.py) writes over beside a hostfile.

    Args:
        hosts: those that take part.
        environ: where the command was typed.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names other GPUs than those of this machine that take part.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    mine = [gpus for host, gpus in hosts.items() if is_here(host)]
    if chosen and [",".join(map(str, gpus)) for gpus in mine] != [chosen]:
        raise LaunchError(
            tr(
                "CUDA_VISIBLE_DEVICES={chosen} has no effect beside a hostfile: DeepSpeed writes over it on every "
                "machine. Unset it, and choose GPUs with --include {included}.",
                chosen=chosen,
                included="@".join(f"{host}:{chosen}" for host in hosts),
            )
        )


def rank_table(resources: Resources) -> list[tuple[str, str, str]]:
    """Return of each host its name, GPUs and ranks."""
    rows, first = [], 0
    for host, gpus in resources.items():
        rows.append((host, _ranges(gpus), _ranges(list(range(first, first + len(gpus))))))
        first += len(gpus)
    return rows


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as 0-3,5."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ",".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches)


def is_here(host: str) -> bool:
    """Whether a name means this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    mine = {one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found}
    found = _addresses(host)
    return bool(found & mine) or any(ipaddress.ip_address(one).is_loopback for one in found)


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
