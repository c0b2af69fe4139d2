"""Judges what machines found out about each other: connections, packets, speeds, the all-reduce."""

import statistics
from collections.abc import Mapping
from typing import Any

from toolkit.doctor.judge import ERROR, NOTE, WARNING, Facts, Finding
from toolkit.messages import tr

SLOW_MB_S = 12.5
"""100 Mbit/s: a step's gradients of a billion parameters would take minutes."""
_SHOWN = 8
Pairs = Mapping[tuple[str, str], Any]


def cards(
    chosen: Mapping[str, tuple[str, Mapping[str, Any]]], facts: Facts, interface: str, backend: str
) -> list[Finding]:
    """Judge the network card that each machine would use.

    Args:
        chosen: host -> name and facts of the card, see `network.chosen`.
        facts: of the machines.
        interface: `distributed.interface`.
        backend: nccl or gloo.
    """
    found = []
    for host, (name, card) in chosen.items():
        own = facts[host]["network"]["own_name"]
        names = ", ".join(one for one in facts[host]["network"]["cards"] if one != "lo")
        asked = interface or facts[host]["network"]["asked"][backend]
        if not name and not names:
            found.append(
                Finding("network", NOTE, tr("{host} has no IPv4 address: its network was not examined.", host=host))
            )
        elif not name and asked:
            text = tr(
                "{host} has no network card {asked}, only {names}. Correct distributed.interface.",
                host=host,
                asked=asked,
                names=names,
            )
            found.append(Finding("network", ERROR, text))
        elif not name or card["address"].startswith("127."):
            text = tr(
                "{host}: its own name means {address}, where no other machine can reach it, and {backend} would use "
                "that. Set distributed.interface to one of {names}, or correct /etc/hosts there.",
                host=host,
                address=own or "?",
                backend=backend,
                names=names,
            )
            found.append(Finding("network", ERROR, text))
        elif not card["up"]:
            text = tr("{host}: the network card {name} is down.  ip link set {name} up", host=host, name=name)
            found.append(Finding("network", ERROR, text))
    sizes = {host: card.get("mtu") for host, (_, card) in chosen.items()}
    if not found and len(set(sizes.values())) > 1:
        listed = ", ".join(f"{host} {mtu}" for host, mtu in sizes.items())
        text = tr(
            "the network cards' largest packets (MTU) differ: {listed}. Give all the same:  ip link set CARD mtu N",
            listed=listed,
        )
        found.append(Finding("network", WARNING, text))
    return found


def reached(results: Pairs, port: int) -> list[Finding]:
    """Judge connections.

    Args:
        results: (from, to) -> `error`, `meet`, `mtu` of `network.reach`.
        port: where the ranks meet.
    """
    found = []
    broken = [f"{a} -> {b}: {one['error']}" for (a, b), one in results.items() if one["error"]]
    if broken:
        text = tr(
            "machines do not reach each other on the addresses that the collectives use; look at routes and "
            "firewalls (all ports have to be open between them):\n{lines}",
            lines=_lines(broken),
        )
        found.append(Finding("network", ERROR, text))
    closed = [f"{a} -> {b}: {one['meet']}" for (a, b), one in results.items() if one["meet"] and not one["error"]]
    if closed:
        text = tr(
            "port {port}, where the ranks meet, is closed. Open it in the firewall, or choose another with "
            "--master_port N:\n{lines}",
            port=port,
            lines=_lines(closed),
        )
        found.append(Finding("network", ERROR, text))
    lost = [f"{a} -> {b}" for (a, b), one in results.items() if one["mtu"] is False]
    if lost:
        text = tr(
            "packets of full size get lost, so connections would stop in the middle of a transfer. Lower the card's "
            "MTU, or raise the switch's:\n{lines}",
            lines=_lines(lost),
        )
        found.append(Finding("network", ERROR, text))
    return found


def speeds(rates: Pairs) -> list[Finding]:
    """Judge how fast machines send to each other, and say which machine it is where the links tell.

    Args:
        rates: (sender, receiver) -> 10^6 bytes per second, or an error.
    """
    broken = [f"{a} -> {b}: {rate}" for (a, b), rate in rates.items() if isinstance(rate, str)]
    numbers = {pair: rate for pair, rate in rates.items() if not isinstance(rate, str)}
    usual = statistics.median(numbers.values()) if numbers else 0.0
    slow = {pair: rate for pair, rate in numbers.items() if rate < max(SLOW_MB_S, usual / 8)}
    found = []
    if broken:
        found.append(Finding("network", ERROR, tr("transfers broke off:\n{lines}", lines=_lines(broken))))
    if slow:
        text = tr(
            "slow links (the fastest carries {best} MB/s).{blame} Look at cables, switch ports and  ethtool CARD "
            ":\n{lines}",
            best=f"{max(numbers.values()):.0f}",
            blame=_blame(slow, numbers),
            lines=_lines([f"{a} -> {b}: {rate:.2f} MB/s" for (a, b), rate in slow.items()]),
        )
        level = ERROR if min(slow.values()) < SLOW_MB_S else WARNING
        found.append(Finding("network", level, text))
    return found


def _blame(slow: Pairs, all_links: Pairs) -> str:
    """Name the machine whose links are slow, all of them and no others; of two machines neither can be told."""
    hosts = set.intersection(*(set(pair) for pair in slow))
    for host in hosts if len(hosts) == 1 else ():
        if all(pair in slow for pair in all_links if host in pair):
            return tr(" All links of {host} are slow, no others.", host=host)
    return ""


def collective(ranks: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[list[Finding], str]:
    """Judge the all-reduce; return findings, and its speed in words.

    Args:
        ranks: rank -> what it told.
        hosts: rank -> its host.
    """
    broken = [f"{rank} ({hosts[rank]}): {one['error']}" for rank, one in ranks.items() if "error" in one]
    if broken:
        text = tr("the ranks' all-reduce failed:\n{lines}", lines=_lines(broken))
        return [Finding("all-reduce", ERROR, text)], ""
    wrong = [f"{rank} ({hosts[rank]})" for rank, one in ranks.items() if not one["right"]]
    if wrong:
        text = tr(
            "the all-reduce has a wrong sum on ranks {ranks}: a card, or its memory, is broken.", ranks=", ".join(wrong)
        )
        return [Finding("all-reduce", ERROR, text)], ""
    size, one = len(ranks), next(iter(ranks.values()))
    # Each byte crosses each link 2(n-1)/n times in a ring (https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    rate = 2 * (size - 1) / size * one["bytes"] / 1e6 / one["seconds"] if size > 1 else 0.0
    told = tr(
        "{ranks} ranks, {mib} MiB, {rate} MB/s on each link", ranks=size, mib=one["bytes"] >> 20, rate=f"{rate:.0f}"
    )
    if size == 1 or rate > SLOW_MB_S:
        return [], told
    pairs = {((rank - 1) % size, rank): other["pair_bytes"] / 1e6 / other["pair_s"] for rank, other in ranks.items()}
    slowest = sorted(pairs, key=lambda pair: pairs[pair])[:_SHOWN]
    lines = [f"{a} ({hosts[a]}) -> {b} ({hosts[b]}): {pairs[a, b]:.2f} MB/s" for a, b in slowest]
    text = tr("the all-reduce is slow ({told}). Its slowest pairs of ranks:\n{lines}", told=told, lines=_lines(lines))
    return [Finding("all-reduce", WARNING, text)], told


def _lines(lines: list[str]) -> str:
    shown = [f"    {line}" for line in lines[:_SHOWN]]
    return "\n".join([*shown, *([f"    … ({len(lines)})"] if len(lines) > _SHOWN else [])])
