"""The examination: asks every machine, lets them try each other, and collects what is wrong."""

import itertools
import os
import re
import shlex
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config import devices
from toolkit.config.schema import INTERFACES, Backend, RunConfig
from toolkit.extras.doctor import agents, findings
from toolkit.extras.doctor.facts import FORWARDED, MATTERING, chosen_card, hashed
from toolkit.extras.doctor.findings import ERROR, WARNING, Finding, finding
from toolkit.launch import deepspeed, environment, hostfile, variables
from toolkit.messages import LaunchError, current_language, joined, tr

_COLLECTIVE_S, _ENDING_S = 60.0, 10.0

Cards = Mapping[str, tuple[str, dict[str, Any]]]
"""Host -> the network card that its collectives would use: its name, and `address`, `mtu` and others."""


@dataclass(kw_only=True)
class Examination:
    """One look at the nodes of a run; `run` fills it."""

    resources: hostfile.Resources
    words: Sequence[str]
    """Recipe and overrides; [] looks at the nodes alone."""
    cfg: RunConfig
    ssh: agents.SshOptions
    environ: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    master_addr: str = ""
    """Where ranks meet; "" takes the first node's first address, as DeepSpeed does."""
    master_port: int = int(deepspeed.DEFAULT_PORT)
    limit_s: float = 30.0
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the machines that answered."""
    summaries: dict[str, str] = field(default_factory=dict)
    """Check -> what is usual, or was measured."""

    def run(self, quick: bool) -> None:
        """Examine; `quick` asks each machine about itself only, and lets one that is late be a warning. What an earlier
        check has found broken is not tried: the all-reduce would only fail again, after minutes.
        """
        with agents.Hosts(list(self.resources), self.ssh) as hosts:
            self._ask(hosts, ERROR if not quick else WARNING)
            if quick or not self.facts:
                return
            backend, interface = self.backend, self.cfg.distributed.interface
            cards = {host: chosen_card(answer["network"], interface, backend) for host, answer in self.facts.items()}
            if len(cards) > 1:
                self._examine_network(hosts, cards)
            ranks = sum(len(gpus) for gpus in self.resources.values())
            if ranks > 1 and not self.has_errors("ssh", "network", "versions", "GPUs"):
                self._all_reduce(hosts)

    def _examine_network(self, hosts: agents.Hosts, cards: Cards) -> None:
        """Judge the network cards that collectives would use, and try the links between them if all nodes have one."""
        self.findings += findings.interfaces(cards, self.facts, self.cfg.distributed.interface, self.backend)
        name, card = next(iter(cards.values()))
        self.summaries["network"] = f"{name} {card.get('address', '')}, MTU {card.get('mtu', '')}"
        if all(card for _, card in cards.values()) and not self.has_errors("network"):
            self._try_each_other(hosts, cards)

    def has_errors(self, *checks: str) -> bool:
        """Whether anything would break the run; of these checks, or of all."""
        return any(finding.level == ERROR and (not checks or finding.check in checks) for finding in self.findings)

    def lines(self, level: str) -> list[str]:
        """Return the findings of one level as text."""
        return [f"  {finding.check}: {finding.text}" for finding in self.findings if finding.level == level]

    @property
    def backend(self) -> str:
        """Return nccl, hccl or gloo."""
        chosen = self.cfg.distributed.backend
        if chosen is not Backend.auto:
            return chosen.value
        kinds = {answer["accelerator"] for answer in self.facts.values()}
        if devices.CUDA in kinds or any(answer["gpus"]["cards"] for answer in self.facts.values()):
            return "nccl"
        return "hccl" if "npu" in kinds else "gloo"

    def _ask(self, hosts: agents.Hosts, late: str) -> None:
        """Ask every node about itself; judge answers and clocks. `late`: level of the finding about a node that does
        not answer in time, but may still do so.
        """
        request = {"words": list(self.words), "language": current_language(), "environ": dict(self.environ)}
        for host, answer in hosts.ask("facts", self.limit_s, dict.fromkeys(self.resources, request)).items():
            if "error" in answer:
                level = late if "late" in answer else ERROR
                self.findings.append(Finding("ssh", level, _explained(host, answer["error"])))
            else:
                self.facts[host] = answer
        handed_on = {*self.environ, *self.cfg.launch.env}
        here = {  # this shell's variables that are not forwarded: ranks on other nodes would not have them
            name: hashed(value)
            for name, value in os.environ.items()
            if self.ssh.through_ssh and name.startswith(MATTERING) and name not in handed_on
        }
        self.findings += findings.findings(self.facts, self.resources, here)
        if self.ssh.through_ssh and self.facts:
            self.findings += findings.secrets(self.facts, self.secrets)
            self.summaries["environment"] = tr("forwarded: {names}", names=", ".join(sorted(handed_on)) or "-")
            self.findings += findings.clocks(self._clock_offsets(hosts))
        if self.facts:
            self._summarise()

    def _clock_offsets(self, hosts: agents.Hosts) -> dict[str, float]:
        """Return host -> how many seconds its clock is ahead of this one's, of the hosts that answer. As in NTP, a host
        is taken to have read its clock in the middle between question and answer.
        """
        offsets = {}
        for host in self.facts:
            before = time.time()
            answer = hosts.hosts[host].ask("clock", self.limit_s)
            middle = (before + time.time()) / 2
            if "time" in answer:  # else the host has not answered in time
                offsets[host] = float(answer["time"]) - middle
        return offsets

    def _summarise(self) -> None:
        """Write down one line for each check: what the first node has, and the least free space of all nodes."""
        first = next(iter(self.facts.values()))
        cards = [card["name"] for card in first["gpus"]["cards"]]
        free: dict[str, int] = {}  # name of a disk -> bytes
        for answer in self.facts.values():
            for name, disk in answer.get("disks", {}).items():
                free[name] = min(disk["free"], free.get(name, disk["free"]))
        self.summaries |= {
            "code": tr("commit {commit}", commit=first["code"]["commit"] or "?"),
            "versions": "Python {}, torch {}, deepspeed {}, transformers {}".format(
                first["python"], *(first["packages"][name] or "-" for name in ("torch", "deepspeed", "transformers"))
            ),
            "GPUs": f"{len(cards)} x {cards[0]}, {first['gpus']['driver']}" if cards else _without_nvidia(first),
            "ops": ", ".join(first.get("ops", {}).get("built", [])),
            "disks": ", ".join(f"{name} {least / findings.GIB:.0f} GiB" for name, least in free.items()),
        }

    def _try_each_other(self, hosts: agents.Hosts, cards: Cards) -> None:
        """Let the nodes connect to each other and look for the first one's files; then measure their links."""
        peers, marks = self._listen(hosts, cards)
        self._reach(hosts, cards, peers, marks)
        if not self.has_errors("network"):
            self._measure(hosts, list(cards), peers, cards)

    @property
    def _shared_folders(self) -> dict[str, str]:
        """Return the directories that the nodes of a recipe's run must share, by their settings."""
        return {"run.dir": self.cfg.run.dir, "prepare.dir": self.cfg.prepare.dir} if self.words else {}

    def _listen(self, hosts: agents.Hosts, cards: Cards) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Make every node listen, the first one also at the port where ranks will meet. Return host -> the address and
        the ports at which it listens (a `peer` of `facts.can_connect`), without hosts that cannot; and by setting the
        files that the first node has put into the shared directories.
        """
        first = next(iter(cards))
        requests: dict[str, dict[str, Any]] = {
            host: {"address": card["address"], "port": 0, "folders": {}} for host, (_, card) in cards.items()
        }
        requests[first] |= {"port": self.master_port, "folders": self._shared_folders}
        answers = hosts.ask("listen", self.limit_s, requests)
        for host, answer in answers.items():
            if "error" in answer:
                self.findings.append(finding("cannot listen", host=host, reason=answer["error"], port=self.master_port))
        peers = {host: answer for host, answer in answers.items() if "error" not in answer}
        marks = peers.get(first, {}).pop("marks", {})
        if first in peers:
            peers[first]["meet"] = [self._master(), self.master_port]
        return peers, marks

    def _reach(
        self, hosts: agents.Hosts, cards: Cards, peers: Mapping[str, Mapping[str, Any]], marks: Mapping[str, str]
    ) -> None:
        """Make every node connect to all others and look for the first one's files. `peers` and `marks`: as returned by
        `_listen`.
        """
        first = next(iter(cards))
        requests = {
            host: {
                "address": card["address"],
                "mtu": card["mtu"],
                "peers": {other: peer for other, peer in peers.items() if other != host},
                "marks": {} if host == first else marks,
            }
            for host, (_, card) in cards.items()
        }
        answers = hosts.ask("reach", self.limit_s, requests)
        # (from, to) -> what `facts.can_connect` says of that connection
        results = {(a, b): peer for a, answer in answers.items() for b, peer in answer.get("peers", {}).items()}
        for host, answer in answers.items():
            if "error" in answer:
                self.findings.append(Finding("network", ERROR, f"{host}: {answer['error']}"))
        self.findings += findings.connections(results, self.master_port)
        for key, folder in self._shared_folders.items():
            # True where it was not asked for: of the first node, and of a file that it could not make.
            shared = {host: answer["shared"].get(key, True) for host, answer in answers.items() if "shared" in answer}
            if apart := [host for host, is_shared in shared.items() if host != first and not is_shared]:
                self.findings.append(finding(f"{key} not shared", dir=folder, hosts=", ".join(apart)))

    def _measure(self, hosts: agents.Hosts, names: list[str], peers: Mapping[str, Any], cards: Cards) -> None:
        """Measure links in a ring of all machines: each receives from the one before it, all at once, then from the one
        after it, so that it takes two rounds however many machines there are. `names`: the hosts in order; `peers`: as
        returned by `_listen`.
        """
        rates: dict[tuple[str, str], float | str] = {}  # (sender, receiver) -> 10^6 bytes/s, or the error
        for step in (1, -1) if len(names) > 2 else (1,):  # of two machines both rounds would be the same
            senders = {host: names[(index - step) % len(names)] for index, host in enumerate(names)}
            requests = {host: {"address": cards[host][1]["address"], "peer": peers[senders[host]]} for host in names}
            for host, answer in hosts.ask("speed", self.limit_s, requests).items():
                rates[senders[host], host] = answer.get("mb_s", answer.get("error", "?"))
        self.findings += findings.speeds(rates)
        numbers = [rate for rate in rates.values() if not isinstance(rate, str)]
        if numbers:
            self.summaries["network"] += tr(", at least {rate} MB/s", rate=f"{min(numbers):.0f}")

    def _master(self) -> str:
        """Return the address at which ranks meet, as DeepSpeed's launcher chooses it."""
        first = self.facts[next(iter(self.facts))]["network"]
        return self.master_addr or (first["first"] if self.ssh.through_ssh else "127.0.0.1")

    def _all_reduce(self, hosts: agents.Hosts) -> None:
        """Start a rank for each GPU of the nodes that answered, and let all of them sum up a tensor."""
        slots = [  # of each rank: host, the host's GPUs, and the number of its own among them
            (host, gpus, local)
            for host, gpus in self.resources.items()
            if host in self.facts
            for local in range(len(gpus))
        ]
        limit_s = max(_COLLECTIVE_S, 2 * self.limit_s)
        requests: dict[str, dict[str, Any]] = {}
        for (host, _, _), environ in zip(slots, self._rank_environments(slots), strict=True):
            request = requests.setdefault(host, {"environments": [], "backend": self.backend, "seconds": limit_s})
            request["environments"].append(environ)
        answers = hosts.ask("collective", limit_s + _ENDING_S, requests)
        ranks: dict[int, dict[str, Any]] = {}
        for rank, (host, _, local) in enumerate(slots):
            answers_of_ranks = answers[host].get("ranks")  # missing where the whole node gave no answer
            ranks[rank] = answers_of_ranks[local] if answers_of_ranks else {"error": answers[host].get("error", "?")}
        host_of_rank = {rank: host for rank, (host, *_) in enumerate(slots)}
        problems, self.summaries["all-reduce"] = findings.collective(ranks, host_of_rank)
        self.findings += problems

    def _rank_environments(self, slots: Sequence[tuple[str, list[int], int]]) -> list[dict[str, str]]:
        """Return the variables of each rank, as a launcher sets them. `slots`: by rank its host, the host's GPUs, and
        the local rank. Each rank sees all GPUs of its host, as with DeepSpeed's launcher.
        """
        # On this machine alone any port does.
        port = self.master_port if self.ssh.through_ssh else environment.free_port()
        shared = {"WORLD_SIZE": str(len(slots)), "MASTER_ADDR": self._master(), "MASTER_PORT": str(port)}
        if interface := self.cfg.distributed.interface:
            shared |= dict.fromkeys(INTERFACES, interface)
        environments = []
        for rank, (_, gpus, local) in enumerate(slots):
            environ = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local), "OMP_NUM_THREADS": "1"}
            if self.backend != "gloo":
                environ[devices.visible_variable()] = ",".join(map(str, gpus))
            environments.append(environ)
        return environments


def plan_examination(
    options: Mapping[str, str], words: Sequence[str], cfg: RunConfig, hosts: hostfile.Resources | None = None
) -> Examination:
    """Return what is to be examined. `options`: of the launcher, by name; `words`, `cfg`: the recipe and overrides, []
    for the nodes alone, and the config that they make; `hosts`: host -> GPUs, None for those that the options choose.
    Nodes are to see the variables, and to be asked through the ssh options, that DeepSpeed's launcher would use.
    """
    hosts = _hosts(options) if hosts is None else hosts
    through_ssh = deepspeed.needs_ssh(hosts, options)
    files = variables.variables_of_files(Path.cwd()) if through_ssh else {}
    forwarded = {  # PYTHONPATH is set by `agents.Host`
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED) and name != "PYTHONPATH"
    }
    port = options.get("--master_port", deepspeed.DEFAULT_PORT)
    if not port.isdecimal():
        raise LaunchError("{name} {value}: write a positive whole number.", name="--master_port", value=port)
    script = options.get("--venv_script", "")
    return Examination(
        resources=hosts,
        words=words,
        cfg=cfg,
        ssh=agents.SshOptions(through_ssh=through_ssh, arguments=_ssh_arguments(options), script=script),
        # The first mapping counts: the last .deepspeed_env, then those before it, then this shell.
        environ=ChainMap(*reversed(files.values()), forwarded) if through_ssh else {},
        # With pdsh secrets are sent through ssh, which a node may not accept.
        secrets=cfg.launch.forwarded if deepspeed.backend(hosts, options) == "pdsh" else (),
        master_addr=options.get("--master_addr", ""),
        master_port=int(port),
    )


def _ssh_arguments(options: Mapping[str, str]) -> list[str]:
    """Return the arguments that DeepSpeed's launcher passes to ssh too. `options`: of the launcher, by name."""
    arguments = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    arguments += ["-p", options["--ssh_port"]] if options.get("--ssh_port") else []
    is_pdsh = options.get("--launcher", "pdsh").lower() == "pdsh"
    typed = shlex.split(options.get("--launcher_args", "")) if is_pdsh else []
    for word, after in itertools.pairwise([*typed, ""]):
        if word == "-l":  # pdsh's -l USER is ssh's
            arguments += [word, after]
    return arguments


_DEVICES = {"npu": "davinci[0-9]*", "xpu": "dri/renderD*"}
"""Accelerators that the kernel shows under other names than NVIDIA's."""


def _without_nvidia(answer: Mapping[str, Any]) -> str:
    """Return what is known of a node without NVIDIA's GPUs."""
    if answer["accelerator"] == "cpu":
        return tr("none: CPU ranks (gloo)")
    return tr("DeepSpeed's accelerator {name}; number and memory are not known here", name=answer["accelerator"])


def _hosts(options: Mapping[str, str]) -> hostfile.Resources:
    """Return host -> its GPUs for the machines that are to be examined: those of the hostfile, or this one without it;
    an error if not all of them can be asked from here. Options such as --include select among the GPUs.
    """
    path = deepspeed.hostfile_of(options)
    if path is None:
        visible = os.environ.get(devices.visible_variable(), "")
        names_gpus = re.fullmatch(r"\d+(,\d+)*", visible)  # such as "0,2"
        if names_gpus and not {*hostfile.SELECTION_OPTIONS} & options.keys():
            return {"localhost": [int(gpu) for gpu in visible.split(",")]}
        pattern = "dri/renderD*" if devices.is_rocm() else _DEVICES.get(devices.device_here(), "nvidia[0-9]*")
        gpus = list(Path("/dev").glob(pattern))
        return hostfile.select_gpus({"localhost": max(1, len(gpus))}, options)  # 1, a CPU rank, without GPUs
    hosts = hostfile.select_gpus(hostfile.read_hostfile(Path(path)), options)
    if "--no_ssh" in options and len(hosts) > 1:
        raise LaunchError(tr("--no_ssh: other nodes are asked through ssh. Type this on each, without a hostfile."))
    deepspeed.check_machines(hosts, options)
    return hosts


def _explained(host: str, complaint: str) -> str:
    """Return why a machine does not answer, with what helps."""
    text = f"{host}: {complaint.rstrip('.')}."
    if "Permission denied" in complaint:
        return joined(text, tr("Give it your key:  ssh-copy-id {host}", host=host))
    if "Host key verification failed" in complaint:
        return joined(text, tr("Log in once and accept its key:  ssh {host} hostname", host=host))
    if "No module named toolkit" in complaint or "not found" in complaint:
        return joined(text, tr("Install the toolkit there, in the same place."))
    return text
