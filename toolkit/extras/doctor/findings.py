"""Judge the facts of all nodes, and what they measured between them, by findings.yaml. Asks no node."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from toolkit import messages
from toolkit.config import native_ops
from toolkit.extras.doctor.facts import FORWARDED
from toolkit.launch import hostfile, variables
from toolkit.messages import read_table, tr

ERROR, WARNING, NOTE = "error", "warning", "note"
Facts = Mapping[str, Mapping[str, Any]]
"""Host -> what `facts` says of it."""
GIB = 1 << 30
_BREAKING = ("torch", "deepspeed", "transformers", "nccl")
_LEAST_NVME_MB_S = 1000
_TRAINING_BYTES = 6
"""Free bytes that a run needs for each byte of the model's weights: a checkpoint with Adam holds 12 bytes for each
parameter, and weights in half precision 2.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a user should know."""

    check: str
    """Name of the check, in English."""
    level: str
    text: str
    """What, where, and what to do."""


_table = cache(partial(read_table, "extras/doctor/findings.yaml"))


def finding(name: str, /, *, level: str = "", **values: object) -> Finding:
    """Return a finding of findings.yaml, its placeholders filled in; a level replaces the table's."""
    check, usual, text = _table()[name]
    return Finding(check, level or usual, messages.tr(text, **values))


def checks() -> list[str]:
    """Return the names of all checks, in the order in which they are shown."""
    return ["ssh", *dict.fromkeys(check for check, *_ in _table().values())]


def outliers(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the first host that has the most frequent value, and host -> value of those with another."""
    if not values:
        return "", {}
    counted = Counter(map(str, values.values()))  # as text: values may be dicts, which have no hash
    most = max(counted.values())
    usual = next(host for host, value in values.items() if counted[str(value)] == most)
    return usual, {host: value for host, value in values.items() if value != values[usual]}


def findings(facts: Facts, resources: hostfile.Resources, here: Mapping[str, str]) -> list[Finding]:
    """Judge what nodes say of themselves; `resources` are the GPUs of each host that take part.
    `here`: hashes of this shell's variables by which runs differ, without those that the launcher or the recipe hands
    on; {} where ranks are started from this shell itself.
    """
    listed = [
        *_code(facts),
        *_recipe(facts),
        *_versions(facts),
        *_gpus(facts, resources),
        *_ops(facts),
        *_kernels(facts),
        *_files(facts),
    ]
    return [*listed, *_disks(facts), *_limits(facts), *_environment(facts, here)]


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, or that only one of two mappings has."""
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _code(facts: Facts) -> Iterable[Finding]:
    """Yield a finding for each node whose code is another than most nodes'."""
    usual, others = outliers({host: answer["code"]["files"] for host, answer in facts.items()})
    for host, files in others.items():
        commit, expected = facts[host]["code"]["commit"] or "?", facts[usual]["code"]["commit"] or "?"
        names = _few(_differing(facts[usual]["code"]["files"], files))
        yield finding("other code", host=host, usual=usual, commit=commit, expected=expected, files=names)


def _recipe(facts: Facts) -> Iterable[Finding]:
    """Yield a finding for each node that rejects the recipe, or composes another config than most nodes."""
    for host, answer in facts.items():
        if "wrong" in answer:
            yield Finding("recipe", ERROR, f"{host}: {answer['wrong']}")
    usual, others = outliers({host: answer["recipe"] for host, answer in facts.items() if "recipe" in answer})
    for host, values in others.items():
        expected = facts[usual]["recipe"]
        keys = [f"{key} = {values.get(key)} ({expected.get(key)})" for key in _differing(expected, values)]
        yield finding("other recipe", host=host, usual=usual, keys=_few(keys))


def _kernels(facts: Facts) -> Iterable[Finding]:
    """Yield a finding for each node that lacks optional packages that the model would use."""
    for host, answer in facts.items():
        if text := answer.get("kernels"):
            yield finding("kernels missing", host=host, text=text)


def _versions(facts: Facts) -> Iterable[Finding]:
    """Yield a finding for each package, and for Python, NCCL and the driver, in another version than most nodes'. It is
    an error where ranks with different versions do not work together (_BREAKING), else a warning.
    """
    versions = {
        host: {
            **answer["packages"],
            "python": answer["python"],
            "nccl": answer["nccl"],
            "driver": str(answer["gpus"]["driver"]),
        }
        for host, answer in facts.items()
    }
    for name in sorted({name for named in versions.values() for name in named}):
        version_by_host = {host: str(named.get(name, "")) for host, named in versions.items()}
        usual, others = outliers(version_by_host)
        for host, version in others.items():
            # Patch levels do not matter: all 3.11 understand each other.
            is_other_python = name == "python" and version.split(".")[:2] != version_by_host[usual].split(".")[:2]
            yield finding(
                "other version",
                level=ERROR if name in _BREAKING or is_other_python else WARNING,
                host=host,
                name=name,
                version=version or tr("not at all"),
                usual=usual,
                expected=version_by_host[usual] or tr("not at all"),
            )


def _gpus(facts: Facts, resources: hostfile.Resources) -> Iterable[Finding]:
    """Yield findings about GPUs that are missing, in use or of different kinds; without any, about CPU ranks."""
    if not any(answer["gpus"]["cards"] or answer["gpus"]["late"] for answer in facts.values()):
        for host, answer in facts.items():
            if answer["is_cpu_by_default"]:
                yield finding("no GPU", host=host)
            if answer["accelerator"] == "cpu" and len(resources[host]) > answer["cores"]:
                yield finding("too few cores", host=host, slots=len(resources[host]), cores=answer["cores"])
        return
    for host, answer in facts.items():
        gpus = answer["gpus"]["cards"]
        if answer["gpus"]["late"]:
            yield finding("no answer of nvidia-smi", host=host)
            continue
        if max(resources[host], default=-1) >= len(gpus):  # GPUs are numbered from 0
            yield finding("too few GPUs", host=host, slots=max(resources[host]) + 1, count=len(gpus))
        for gpu in (gpu for number, gpu in enumerate(gpus) if number in resources[host]):
            free, total, count = gpu["free_mib"], gpu["mib"], gpu["used_by"]  # count: of processes
            # Memory too: nvidia-smi does not show all processes everywhere, as under WSL 2.
            if count or (total and free < 0.9 * total):
                level = ERROR if free < 0.5 * total else WARNING
                yield finding(
                    "GPU in use", level=level, host=host, index=gpu["index"], free=free, all=total, count=count
                )
    kinds = {gpu["name"] for answer in facts.values() for gpu in answer["gpus"]["cards"]}
    if len(kinds) > 1:
        yield finding("different GPUs", kinds=_few(kinds))


def _ops(facts: Facts) -> Iterable[Finding]:
    """Yield findings about locks of unfinished builds, and ops of DeepSpeed that are not built."""
    for host, answer in facts.items():
        for lock in answer["locks"]:
            yield finding("stale build lock", host=host, lock=lock)
        ops = answer.get("ops", {"needed": [], "built": [], "lacking": []})
        missing = [name for name in ops["needed"] if name not in ops["built"]]
        if missing and ops["lacking"]:
            lacking, other = ", ".join(ops["lacking"]), native_ops.without_ops(missing)
            yield finding("ops cannot be built", host=host, ops=", ".join(missing), lacking=lacking, other=other)
        elif missing:
            yield finding("ops to build", host=host, ops=_few(missing))


def _files(facts: Facts) -> Iterable[Finding]:
    """Yield findings about the recipe's files that are missing or differ, and data that are not prepared everywhere."""
    labels = {label: None for answer in facts.values() for label in answer.get("files", {})}
    for label in labels:
        files = {host: answer["files"][label] for host, answer in facts.items() if label in answer.get("files", {})}
        for host, file in files.items():
            if "error" in file:
                yield Finding("files", ERROR, f"{host}: {label} {file['path']}: {file['error']}")
        if missing := [host for host, file in files.items() if file.get("is_missing")]:
            yield finding("model to download", hosts=_few(missing), path=files[missing[0]]["path"])
        usual, others = outliers({host: file["hash"] for host, file in files.items() if "hash" in file})
        for host in others:
            yield finding("other file", host=host, label=label, path=files[host]["path"], usual=usual)
    # A tokenized cache's name is a fingerprint of all that it is made of: equal names, equal contents.
    caches = {host: set(answer.get("stores", [])) for host, answer in facts.items()}
    all_caches = set[str]().union(*caches.values())
    if lacking := [host for host, names in caches.items() if names < all_caches]:
        yield finding("data to prepare", hosts=_few(lacking))


def _disks(facts: Facts) -> Iterable[Finding]:
    """Yield findings about directories that cannot be written to, and disks that are full, too small or slow."""
    for host, answer in facts.items():
        weights = answer.get("files", {}).get("model.path", {}).get("bytes", 0)
        for name, disk in answer.get("disks", {}).items():
            path, gib = disk["path"], f"{disk['free'] / GIB:.1f}"
            level = WARNING if name == "prepare.dir" else ERROR  # nothing is written where all is prepared
            # /dev/shm is small: Docker gives it 64 MiB by default.
            least = 64 << 20 if name == "shm" else GIB
            if disk["error"]:
                yield Finding("disks", level, f"{host}: {name} {path}: {disk['error']}.")
            elif disk["free"] < least:
                yield finding("disk full", level=level, host=host, name=name, path=path, gib=gib)
            elif name == "run.dir" and disk["free"] < _TRAINING_BYTES * weights:
                need = f"{_TRAINING_BYTES * weights / GIB:.1f}"
                yield finding("disk too small", host=host, name=name, path=path, gib=gib, need=need)
        for folder, rates in answer.get("nvme", {}).items():
            if "error" in rates:
                yield Finding("disks", ERROR, f"{host}: nvme {folder}: {rates['error']}.")
            elif min(rates.values()) < _LEAST_NVME_MB_S:
                write, read = (f"{rates[name]:.0f}" for name in ("write_mb_s", "read_mb_s"))
                yield finding("slow NVMe", host=host, path=folder, write=write, read=read)


def _limits(facts: Facts) -> Iterable[Finding]:
    """Yield a finding for each limit of open files or processes that is too low; a limit below 0 is none. `option`: of
    the shell's ulimit, with which it is raised.
    """
    for host, answer in facts.items():
        for name, least, option in (("open files", 4096, "-n 65536"), ("processes", 4096, "-u unlimited")):
            limit = answer["limits"][name]
            if 0 <= limit < least:
                yield finding("low limit", host=host, name=name, limit=limit, option=option)


def _environment(facts: Facts, here: Mapping[str, str]) -> Iterable[Finding]:
    """Yield a finding about this shell's variables that do not arrive at nodes, but would with one node: neither the
    launcher (FORWARDED) nor the recipe hands them on. `here`: name -> hash of the value, see `findings`.
    """
    lost = {
        name: [host for host, answer in facts.items() if answer["environment"].get(name) != value]
        for name, value in sorted(here.items())
        if not name.startswith(FORWARDED)
    }
    if listed := [f"{name} ({_few(hosts)})" for name, hosts in lost.items() if hosts]:
        yield finding("variables not forwarded", names=_few(listed, 12))


def secrets(facts: Facts, names: Sequence[str]) -> list[Finding]:
    """Judge whether the secrets of launch.env would arrive; `names`: those that are to be sent through ssh."""
    if hosts := [host for host, answer in facts.items() if names and not answer["takes_secrets"]]:
        return [finding("secrets not accepted", hosts=_few(hosts), variable=variables.PACKED, names=", ".join(names))]
    return []


def clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """Judge how far clocks are from the middle one, not from this machine's, which may be the one that is wrong.
    `offsets`: host -> its clock's from this one's, in seconds.
    """
    middle = statistics.median_low(offsets.values() or [0.0])
    off = {host: offset - middle for host, offset in offsets.items() if abs(offset - middle) > 5}
    return [
        finding("clock off", level=ERROR if abs(seconds) > 60 else WARNING, host=host, seconds=f"{seconds:+.0f}")
        for host, seconds in off.items()
    ]


def _few(names: Iterable[str], most: int = 6) -> str:
    """Return the first `most` names as a text, and how many there are if that is more."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f", … ({len(listed)})" if len(listed) > most else "")


SLOW_MB_S = 12.5
"""100 Mbit/s: a step's gradients of a billion parameters would take minutes."""
_SHOWN = 8
Pairs = Mapping[tuple[str, str], Any]
"""(sender, receiver) -> what is known of the link from one to the other."""


def interfaces(
    chosen: Mapping[str, tuple[str, Mapping[str, Any]]], facts: Facts, interface: str, backend: str
) -> list[Finding]:
    """Judge the network card that each node would use. `chosen`: host -> `chosen_card`: (name, its facts), ("", {})
    for none; `interface`: the card that the config names, "" for none; `backend`: nccl, hccl or gloo.
    """
    problems = []
    for host, (name, card) in chosen.items():
        address = facts[host]["network"]["own_name"] or "?"
        names = ", ".join(card_name for card_name in facts[host]["network"]["cards"] if card_name != "lo")
        asked = interface or facts[host]["network"]["asked"].get(backend, "")
        has_card, is_loopback = bool(name), card.get("address", "").startswith("127.")
        if not has_card and not names:
            problems.append(finding("no IPv4 address", host=host))
        elif not has_card and asked:
            problems.append(finding("no such interface", host=host, asked=asked, names=names))
        elif not has_card or is_loopback:  # gloo looks for a card with the address that the host's own name means
            problems.append(finding("own name is loopback", host=host, address=address, backend=backend, names=names))
        elif not card["up"]:
            problems.append(finding("interface down", host=host, name=name))
    sizes = {host: card.get("mtu") for host, (_, card) in chosen.items()}
    if not problems and len(set(sizes.values())) > 1:
        problems.append(finding("different MTU", listed=", ".join(f"{host} {mtu}" for host, mtu in sizes.items())))
    return problems


def connections(results: Pairs, port: int) -> list[Finding]:
    """Judge connections between nodes: at all, to the port where ranks meet, and with packets of full size. `results`:
    (from, to) -> `error`, `meet` and `mtu` as of `facts.can_connect`; `port`: where ranks meet.
    """
    broken = [f"{a} -> {b}: {result['error']}" for (a, b), result in results.items() if result["error"]]
    closed = [
        f"{a} -> {b}: {result['meet']}" for (a, b), result in results.items() if result["meet"] and not result["error"]
    ]
    lost = [f"{a} -> {b}" for (a, b), result in results.items() if result["mtu"] is False]
    return [
        *([finding("no connection", lines=_lines(broken))] if broken else []),
        *([finding("port closed", port=port, lines=_lines(closed))] if closed else []),
        *([finding("full packets lost", lines=_lines(lost))] if lost else []),
    ]


def speeds(rates: Pairs) -> list[Finding]:
    """Judge links, (sender, receiver) -> 10^6 bytes per second or an error. A link is slow below SLOW_MB_S, or below an
    eighth of the median; where the links tell which node is slow, it is named.
    """
    broken = [f"{a} -> {b}: {rate}" for (a, b), rate in rates.items() if isinstance(rate, str)]
    numbers = {pair: rate for pair, rate in rates.items() if not isinstance(rate, str)}
    usual = statistics.median(numbers.values()) if numbers else 0.0
    slow = {pair: rate for pair, rate in numbers.items() if rate < max(SLOW_MB_S, usual / 8)}
    problems = [finding("transfer broken", lines=_lines(broken))] if broken else []
    if slow:
        # A node is blamed if all its links are slow and no others; of two nodes both would be.
        in_all_slow, blame = set.intersection(*map(set, slow)), ""  # nodes at one end of every slow link
        if len(in_all_slow) == 1:
            (host,) = in_all_slow
            if all(pair in slow for pair in numbers if host in pair):
                blame = tr(" All links of {host} are slow, no others.", host=host)
        level = ERROR if min(slow.values()) < SLOW_MB_S else WARNING
        lines = _lines([f"{a} -> {b}: {rate:.2f} MB/s" for (a, b), rate in slow.items()])
        best = f"{max(numbers.values()):.0f}"
        problems.append(finding("slow links", level=level, best=best, blame=blame, lines=lines))
    return problems


def collective(ranks: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[list[Finding], str]:
    """Judge the all-reduce; return findings, and its speed in words, "" if it failed. `ranks`: rank -> `error`, or what
    `toolkit.extras.doctor.collective` has measured: `bytes`, `seconds` and whether the sum was `right`; with several
    ranks also `pair_bytes` and `pair_s`, received from the rank before. `hosts`: rank -> host.
    """
    broken = [f"{rank} ({hosts[rank]}): {answer['error']}" for rank, answer in ranks.items() if "error" in answer]
    if broken:
        return [finding("all-reduce failed", lines=_lines(broken))], ""
    wrong = [f"{rank} ({hosts[rank]})" for rank, answer in ranks.items() if not answer["right"]]
    if wrong:
        return [finding("all-reduce wrong", ranks=", ".join(wrong))], ""
    size, answer = len(ranks), next(iter(ranks.values()))
    # Each byte crosses each link 2(n-1)/n times in a ring (https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    rate = 2 * (size - 1) / size * answer["bytes"] / 1e6 / answer["seconds"] if size > 1 else 0.0
    told = tr(
        "{ranks} ranks, {mib} MiB, {rate} MB/s on each link", ranks=size, mib=answer["bytes"] >> 20, rate=f"{rate:.0f}"
    )
    if size == 1 or rate > SLOW_MB_S:
        return [], told
    # (sender, receiver) -> MB/s; each rank has received from the one before it.
    rates = {((rank - 1) % size, rank): other["pair_bytes"] / 1e6 / other["pair_s"] for rank, other in ranks.items()}
    slowest = sorted(rates, key=lambda pair: rates[pair])[:_SHOWN]
    lines = [f"{a} ({hosts[a]}) -> {b} ({hosts[b]}): {rates[a, b]:.2f} MB/s" for a, b in slowest]
    return [finding("all-reduce slow", told=told, lines=_lines(lines))], told


def _lines(lines: list[str]) -> str:
    """Return the first _SHOWN lines as an indented text, and how many there are if that is more."""
    shown = [f"    {line}" for line in lines[:_SHOWN]]
    return "\n".join([*shown, *([f"    … ({len(lines)})"] if len(lines) > _SHOWN else [])])
