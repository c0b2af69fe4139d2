"""From the facts of all machines to what would break or slow a run, each with what to type. Asks no machine.

Also what machines found out about each other: connections, packets, speeds, the all-reduce.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.doctor.facts import FORWARDED
from toolkit.launch.env_vars import PACKED
from toolkit.launch.hostfile import Resources
from toolkit.messages import tr

ERROR, WARNING, NOTE = "error", "warning", "note"
Facts = Mapping[str, Mapping[str, Any]]
"""Host -> what `facts` says of it."""
GIB = 1 << 30
_BREAKING = ("torch", "deepspeed", "transformers", "nccl")
_TRAINING_BYTES = 7
"""A checkpoint with Adam holds 14 bytes for each parameter, of which 2 are the weights in half precision."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a user should know."""

    check: str
    """Name of the check, in English."""
    level: str
    """error: would break the run; warning: may, or slows it; note: good to know."""
    text: str
    """What, where, and what to do."""


def outliers(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a host with what most have (the first in a tie), and what the others have."""
    if not values:
        return "", {}
    counted = Counter(map(str, values.values()))
    most = max(counted.values())
    usual = next(host for host, value in values.items() if counted[str(value)] == most)
    return usual, {host: value for host, value in values.items() if value != values[usual]}


def findings(facts: Facts, resources: Resources, here: Mapping[str, str]) -> list[Finding]:
    """Judge what machines say of themselves.

    Args:
        resources: host -> its GPUs that take part.
        here: variables of this shell by which runs differ, as hashes, without those that the launcher or the recipe
            hands on; {} where ranks are started from this shell itself.
    """
    rules: list[Callable[[], Iterable[Finding]]] = [
        lambda: _code(facts),
        lambda: _recipe(facts),
        lambda: _versions(facts),
        lambda: _gpus(facts, resources),
        lambda: _ops(facts),
        lambda: _files(facts),
        lambda: _stores(facts),
        lambda: _disks(facts),
        lambda: _limits(facts),
        lambda: _environment(facts, here),
    ]
    return [finding for rule in rules for finding in rule()]


def _code(facts: Facts) -> Iterable[Finding]:
    usual, others = outliers({host: one["code"]["files"] for host, one in facts.items()})
    for host, files in others.items():
        expected = facts[usual]["code"]["files"]
        differing = sorted(name for name in expected.keys() | files.keys() if expected.get(name) != files.get(name))
        yield Finding(
            "code",
            ERROR,
            tr(
                "{host} has other code than {usual} (commit {commit}, not {expected}): {files}. Bring it to the same "
                "commit.",
                host=host,
                usual=usual,
                commit=facts[host]["code"]["commit"] or "?",
                expected=facts[usual]["code"]["commit"] or "?",
                files=_few(differing),
            ),
        )


def _recipe(facts: Facts) -> Iterable[Finding]:
    for host, one in facts.items():
        if "wrong" in one:
            yield Finding("recipe", ERROR, f"{host}: {one['wrong']}")
    usual, others = outliers({host: one["recipe"] for host, one in facts.items() if "recipe" in one})
    for host, values in others.items():
        expected = facts[usual]["recipe"]
        keys = sorted(key for key in expected.keys() | values.keys() if expected.get(key) != values.get(key))
        yield Finding(
            "recipe",
            ERROR,
            tr(
                "the recipe means something else on {host} than on {usual}: {keys}.",
                host=host,
                usual=usual,
                keys=_few([f"{key} = {values.get(key)} ({expected.get(key)})" for key in keys]),
            ),
        )


def _versions(facts: Facts) -> Iterable[Finding]:
    names = {"python", "nccl", "driver", *(name for one in facts.values() for name in one["packages"])}
    for name in sorted(names):
        found = {host: _version(one, name) for host, one in facts.items()}
        usual, others = outliers(found)
        for host, version in others.items():
            yield Finding(
                "versions",
                ERROR if _breaks(name, version, found[usual]) else WARNING,
                tr(
                    "{host} has {name} {version}, {usual} has {expected}. Install the same.",
                    host=host,
                    name=name,
                    version=version or tr("not at all"),
                    usual=usual,
                    expected=found[usual] or tr("not at all"),
                ),
            )


def _breaks(name: str, version: str, other: str) -> bool:
    """Whether ranks of these versions cannot be expected to understand each other; of Python all 3.11 do."""
    if name == "python":
        return version.split(".")[:2] != other.split(".")[:2]
    return name in _BREAKING


def _version(one: Mapping[str, Any], name: str) -> str:
    if name == "driver":
        return str(one["gpus"]["driver"])
    return str(one[name] if name in ("python", "nccl") else one["packages"].get(name, ""))


def _gpus(facts: Facts, resources: Resources) -> Iterable[Finding]:
    if not any(one["gpus"]["cards"] or one["gpus"]["late"] for one in facts.values()):
        for host, one in facts.items():
            if len(resources[host]) > one["cores"]:
                yield Finding(
                    "GPUs",
                    WARNING,
                    tr(
                        "{host}: {slots} slots on {cores} CPU cores, and no GPU: ranks would wait for each other.",
                        host=host,
                        slots=len(resources[host]),
                        cores=one["cores"],
                    ),
                )
        return
    for host, one in facts.items():
        cards = one["gpus"]["cards"]
        if one["gpus"]["late"]:
            yield Finding(
                "GPUs", WARNING, tr("{host}: nvidia-smi gave no answer.  nvidia-smi -pm 1  may help.", host=host)
            )
            continue
        if max(resources[host], default=-1) >= len(cards):
            yield Finding(
                "GPUs",
                ERROR,
                tr(
                    "{host}: the hostfile gives it {slots} slots, nvidia-smi shows {count} GPUs there. Correct slots=, "
                    "or look at  nvidia-smi  there.",
                    host=host,
                    slots=max(resources[host]) + 1,
                    count=len(cards),
                ),
            )
        for card in (card for number, card in enumerate(cards) if number in resources[host]):
            if card["used_by"] or (card["mib"] and card["free_mib"] < 0.9 * card["mib"]):
                yield Finding(
                    "GPUs",
                    ERROR if card["free_mib"] < 0.5 * card["mib"] else WARNING,
                    tr(
                        "{host}: GPU {index} has {free} of {all} MiB free; {count} other processes use it. See "
                        "nvidia-smi  there.",
                        host=host,
                        index=card["index"],
                        free=card["free_mib"],
                        all=card["mib"],
                        count=card["used_by"],
                    ),
                )
    kinds = {card["name"] for one in facts.values() for card in one["gpus"]["cards"]}
    if len(kinds) > 1:
        yield Finding(
            "GPUs", WARNING, tr("different GPUs take part: {kinds}. All wait for the slowest.", kinds=_few(kinds))
        )


def _ops(facts: Facts) -> Iterable[Finding]:
    for host, one in facts.items():
        for lock in one["locks"]:
            yield Finding(
                "ops",
                ERROR,
                tr(
                    "{host}: {lock} was left by a build that died; a run would wait for it for ever. On {host}:  rm "
                    "{lock}",
                    host=host,
                    lock=lock,
                ),
            )
        ops = one.get("ops", {"needed": [], "built": [], "lacking": []})
        missing = [name for name in ops["needed"] if name not in ops["built"]]
        if missing and ops["lacking"]:
            text = tr(
                "{host} has to build DeepSpeed's {ops} and lacks {lacking}. Install that there, or set "
                "optim.torch=true.",
                host=host,
                ops=", ".join(missing),
                lacking=", ".join(ops["lacking"]),
            )
            yield Finding("ops", ERROR, text)
        elif missing:
            text = tr(
                "{host} will build DeepSpeed's {ops} at the first start: 1-3 minutes.", host=host, ops=_few(missing)
            )
            yield Finding("ops", NOTE, text)


def _files(facts: Facts) -> Iterable[Finding]:
    labels = {label: None for one in facts.values() for label in one.get("files", {})}
    for label in labels:
        found = {host: one["files"][label] for host, one in facts.items() if label in one.get("files", {})}
        for host, file in found.items():
            if "error" in file:
                text = f"{host}: {label} {file['path']}: {file['error']}"
                yield Finding("files", ERROR, text)
        usual, others = outliers({host: file["hash"] for host, file in found.items() if "hash" in file})
        for host in others:
            yield Finding(
                "files",
                ERROR,
                tr(
                    "{host}: {label} {path} holds something else than on {usual}. Copy it again.",
                    host=host,
                    label=label,
                    path=found[host]["path"],
                    usual=usual,
                ),
            )


def _stores(facts: Facts) -> Iterable[Finding]:
    """A store's name is a fingerprint of all that it is made of: equal names, equal contents."""
    found = {host: set(one.get("stores", [])) for host, one in facts.items()}
    everywhere = set[str]().union(*found.values())
    lacking = [host for host, names in found.items() if names < everywhere]
    if lacking:
        text = tr(
            "not all prepared data of prepare.dir is on {hosts}: what the run needs and lacks is prepared first. "
            "`toolkit prepare` there does it beforehand.",
            hosts=_few(lacking),
        )
        yield Finding("files", NOTE, text)


def _disks(facts: Facts) -> Iterable[Finding]:
    for host, one in facts.items():
        weights = one.get("files", {}).get("model.path", {}).get("bytes", 0)
        for name, disk in one.get("disks", {}).items():
            place = {"host": host, "name": name, "path": disk["path"], "gib": f"{disk['free'] / GIB:.1f}"}
            level = WARNING if name == "prepare.dir" else ERROR  # nothing is written where all is prepared
            if disk["error"]:
                yield Finding("disks", level, f"{host}: {name} {disk['path']}: {disk['error']}.")
            elif disk["free"] < (GIB >> 4 if name == "shm" else GIB):
                yield Finding("disks", level, tr("{host}: {name} {path} has {gib} GiB free.", **place))
            elif name == "run.dir" and disk["free"] < _TRAINING_BYTES * weights:
                need = f"{_TRAINING_BYTES * weights / GIB:.1f}"
                text = tr("{host}: {name} {path} has {gib} GiB free; a checkpoint may take {need}.", need=need, **place)
                yield Finding("disks", WARNING, text)
        for folder, found in one.get("nvme", {}).items():
            if "error" in found:
                text = f"{host}: nvme {folder}: {found['error']}."
                yield Finding("disks", ERROR, text)
            elif min(found.values()) < 1000:
                text = tr(
                    "{host}: {path} writes {write} and reads {read} MB/s: offloading to it will hold the GPUs up.",
                    host=host,
                    path=folder,
                    write=f"{found['write_mb_s']:.0f}",
                    read=f"{found['read_mb_s']:.0f}",
                )
                yield Finding("disks", WARNING, text)


def _limits(facts: Facts) -> Iterable[Finding]:
    for host, one in facts.items():
        for name, least, option in (("open files", 4096, "-n 65536"), ("processes", 4096, "-u unlimited")):
            limit = one["limits"][name]
            if 0 <= limit < least:
                text = tr(
                    "{host}: the limit of {name} is {limit}. Raise it:  ulimit {option}  (for good: "
                    "/etc/security/limits.conf)",
                    host=host,
                    name=name,
                    limit=limit,
                    option=option,
                )
                yield Finding("limits", WARNING, text)


def _environment(facts: Facts, here: Mapping[str, str]) -> Iterable[Finding]:
    lost: dict[str, list[str]] = {}
    for host, one in facts.items():
        for name, value in here.items():
            if not name.startswith(FORWARDED) and one["environment"].get(name) != value:
                lost.setdefault(name, []).append(host)
    if lost:
        text = tr(
            "set in this shell, but not handed on by the launcher, and not so on the machines: {names}. If the run "
            "needs them, put them into launch.env.",
            names=_few([f"{name} ({_few(hosts)})" for name, hosts in sorted(lost.items())], 12),
        )
        yield Finding("environment", WARNING, text)


def secrets(facts: Facts, names: Sequence[str]) -> list[Finding]:
    """Judge whether the secrets of launch.env would arrive."""
    deaf = [host for host, one in facts.items() if names and not one["takes_secrets"]]
    if not deaf:
        return []
    text = tr(
        "the sshd of {hosts} does not take {variable}, so {names} would not arrive. Add to /etc/ssh/sshd_config there: "
        "AcceptEnv {variable}   or write NAME=value into ~/.deepspeed_env.",
        hosts=_few(deaf),
        variable=PACKED,
        names=", ".join(names),
    )
    return [Finding("environment", ERROR, text)]


def clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """Judge how far clocks are from the middle one."""
    middle = statistics.median_low(offsets.values())
    return [
        Finding(
            "clocks",
            ERROR if abs(offset - middle) > 60 else WARNING,
            tr(
                "{host}'s clock is {seconds} s off: locks, logs and certificates go by it. Set it, for example with "
                "chrony.",
                host=host,
                seconds=f"{offset - middle:+.0f}",
            ),
        )
        for host, offset in offsets.items()
        if abs(offset - middle) > 5
    ]


def _few(names: Iterable[str], most: int = 6) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f", … ({len(listed)})" if len(listed) > most else "")


SLOW_MB_S = 12.5
"""100 Mbit/s: a step's gradients of a billion parameters would take minutes."""
_SHOWN = 8
Pairs = Mapping[tuple[str, str], Any]


def interfaces(
    chosen: Mapping[str, tuple[str, Mapping[str, Any]]], facts: Facts, interface: str, backend: str
) -> list[Finding]:
    """Judge the network card that each machine would use."""
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


def connections(results: Pairs, port: int) -> list[Finding]:
    """Judge connections.

    Args:
        results: (from, to) -> `error`, `meet`, `mtu` of `network.reach`.
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
    """Judge the all-reduce; return findings, and its speed in words."""
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
