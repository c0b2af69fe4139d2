"""The nodes of a launch: which take part, and with `launch.min_nodes` which can, each time the ranks are started."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from typing import Any

from toolkit import children
from toolkit.config import mesh
from toolkit.config.schema import AUTO, RunConfig
from toolkit.distributed import presence, watchdog
from toolkit.launch import deepspeed, hostfile, variables
from toolkit.launch.hostfile import Resources
from toolkit.messages import ConfigError, LaunchError, say, tr

LOOK_EVERY_S = 5.0
"""Whether nodes have gone or come."""
_ANSWER_S = 5


class Nodes:
    """The nodes that ranks are started on: all that the user named, or with `launch.min_nodes` those that answer.

    `typed`: arguments of `deepspeed`; `words`: recipe and overrides of the checked `cfg`. LaunchError if there are too
    few nodes, or DeepSpeed's launcher would misread them, or not start.
    """

    def __init__(self, typed: Sequence[str], words: Sequence[str], cfg: RunConfig) -> None:
        self._typed, self._recipe, self.cfg = list(typed), list(words), cfg
        self.typed, self.words = list(typed), list(words)
        """Arguments of `deepspeed`, and recipe and overrides, for the next start of the ranks."""
        self.hosts: Resources = {}
        """Nodes that take part, with their GPUs; {} without a hostfile."""
        self.is_elastic = bool(cfg.launch.min_nodes)
        self._broken: set[str] = set()
        """Nodes that answer but would break the run, and have been named."""
        self._heartbeats: dict[str, tuple[int, float]] = {}
        """The last heartbeat of each node's first rank, and when it was new."""
        options = self.options
        is_listed = deepspeed.hostfile_of(options) is not None
        if self.is_elastic and (not is_listed or deepspeed.backend({}, self._as_several) != "pdsh"):
            raise LaunchError(
                "launch.min_nodes = {least} needs a hostfile, and DeepSpeed's launcher with pdsh: add hostfile=FILE, "
                "and leave out --launcher and --no_ssh.",
                least=cfg.launch.min_nodes,
            )
        named = deepspeed.named_hosts(options) if is_listed else {}
        self._use_hosts(self._keep_reachable(named) if self.is_elastic else named)
        self._check()
        self._show()

    @property
    def options(self) -> dict[str, str]:
        """The launcher's options for the next start, by name."""
        return deepspeed.split_words(self.typed)[0]

    @property
    def _as_several(self) -> dict[str, str]:
        """The launcher's options, with one by which even a single node is reached through ssh."""
        return {**self.options, "--force_multi": ""}

    def choose_again(self, is_stopping: Callable[[], bool]) -> None:
        """Choose nodes again after the ranks have ended; wait until there are enough, or until `is_stopping()`."""
        last_reason = ""
        while self.is_elastic and not is_stopping():
            try:
                reachable = self._keep_reachable(self._named())
                if failing := self._hosts_with_errors(reachable):  # GPUs are free a while after the ranks have ended
                    _pause(is_stopping)
                    failing = self._hosts_with_errors({host: reachable[host] for host in failing})
                before = self.hosts  # to print them again if they change
                self._use_hosts({host: gpus for host, gpus in reachable.items() if host not in failing})
            except LaunchError as error:
                if last_reason != str(error):
                    last_reason = str(error)
                    say("Waiting for nodes: {reason}", reason=last_reason)
                _pause(is_stopping)
                continue
            if self.hosts != before:
                self._show()
            return

    def _named(self) -> Resources:
        """Return the nodes of the hostfile as it is now."""
        return deepspeed.named_hosts(deepspeed.split_words(self._typed)[0])

    def would_change(self) -> bool:
        """Whether a restart would use more ranks, or leave out a node that is no longer in the hostfile."""
        named = self._named()
        newcomers = self._answering({host: gpus for host, gpus in named.items() if host not in self.hosts})
        reachable = {host: gpus for host, gpus in named.items() if host in self.hosts or host in newcomers}

        def is_better(hosts: Resources) -> bool:
            return not set(self.hosts) <= set(named) or ranks_on(hosts) > ranks_on(self.hosts)

        hosts, _ = fitting(self.cfg, reachable)
        if not is_better(hosts):
            return False
        # Newcomers are examined only now, as that takes seconds; those that would break the run do not count.
        failing = self._hosts_with_errors({host: gpus for host, gpus in hosts.items() if host not in self.hosts})
        healthy = {host: gpus for host, gpus in reachable.items() if host not in failing}
        return is_better(fitting(self.cfg, healthy)[0])

    def lost(self, logs: Path) -> dict[str, float]:
        """Return the nodes that are gone, with the seconds since their last sign of life: no heartbeat in `logs` of the
        run directory, and no answer through ssh.
        """
        num_ranks, now = 0, time.monotonic()  # of the nodes before, and so the number of a node's first rank
        for host, gpus in self.hosts.items():
            with suppress(OSError, ValueError, KeyError):  # not begun
                text = (logs / watchdog.heartbeat_file(num_ranks)).read_text(encoding="utf-8")
                beats = json.loads(text)["beats"]  # a count; nodes' clocks may differ, so when it changed is noted here
                if self._heartbeats.get(host, (-1, now))[0] != beats:
                    self._heartbeats[host] = beats, now
            num_ranks += len(gpus)
        seconds = {host: now - since for host, (_, since) in self._heartbeats.items()}
        limit_s = presence.SILENT_S * presence.stretch(num_ranks)
        silent = {host: self.hosts[host] for host in seconds if seconds[host] > limit_s}
        if len(silent) == len(seconds):  # none, or it is the file server that stands still
            return {}
        for _ in range(2):  # one answer may get lost
            silent = {host: silent[host] for host in set(silent).difference(self._answering(silent))}
        return {host: seconds[host] for host in sorted(silent)}

    def _keep_reachable(self, named: Resources) -> Resources:
        """Return the nodes that answer through ssh; LaunchError if they are fewer than `launch.min_nodes`."""
        answering = self._answering(named)
        silent = ", ".join(host for host in named if host not in answering)
        if len(answering) < self.cfg.launch.min_nodes:
            raise LaunchError(
                "launch.min_nodes is {least}, but {count} of {named} nodes answer. No answer through ssh: {silent}.",
                least=self.cfg.launch.min_nodes,
                count=len(answering),
                named=len(named),
                silent=silent,
            )
        if silent:
            say("No answer through ssh, left out: {hosts}", hosts=silent)
        return {host: named[host] for host in answering}

    def _answering(self, hosts: Resources) -> list[str]:
        """Return the nodes on which a command can be run through ssh; this machine needs none."""
        arguments = _examination(self._as_several, [], self.cfg, hosts).ssh.arguments
        # As the launcher reaches them, but without asking for a password, and without waiting long.
        command = ["ssh", *arguments, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER_S}"]

        def does_answer(host: str) -> bool:
            with suppress(OSError, TimeoutExpired):
                quiet = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": DEVNULL, "timeout": 3 * _ANSWER_S}
                return hostfile.is_here(host) or not children.run([*command, host, "true"], **quiet).returncode
            return False

        with ThreadPoolExecutor(64) as pool:
            return [host for host, does in zip(hosts, pool.map(does_answer, hosts), strict=True) if does]

    def _hosts_with_errors(self, hosts: Resources) -> set[str]:
        """Examine each node by itself; return those with an error that would break the run, and print each one once."""
        if "--no_ssh_check" in self.options:
            return set()

        def errors(host: str) -> list[str]:
            examination = _examination(self._as_several, self.words, self.cfg, {host: hosts[host]})
            examination.run(quick=True)
            return examination.lines("error")

        with ThreadPoolExecutor(64) as pool:
            errors_by_host = {host: lines for host, lines in zip(hosts, pool.map(errors, hosts), strict=True) if lines}
        for host in sorted(errors_by_host.keys() - self._broken):
            say("{host} would break the run, left out:\n{lines}", host=host, lines="\n".join(errors_by_host[host]))
        self._broken = {*self._broken.difference(hosts), *errors_by_host}  # a node that is repaired is forgotten
        return set(errors_by_host)

    def _use_hosts(self, hosts: Resources) -> None:
        """Set the nodes of the next start: `hosts`, or with `launch.min_nodes` as many of them as the batch divides
        over.
        """
        self._heartbeats = {}
        if not self.is_elastic:
            self.hosts = hosts
            return
        self.hosts, overrides = fitting(self.cfg, hosts)
        included = "@".join(f"{host}:{','.join(map(str, gpus))}" for host, gpus in self.hosts.items())  # a:0,1@b:0,1
        self.typed = [*deepspeed.without_options(self._typed, hostfile.SELECTION_OPTIONS), "--include", included]
        # DeepSpeed's launcher starts the ranks of a single node on this machine, unless it is told to use ssh.
        if len(self.hosts) == 1 and not any(map(hostfile.is_here, self.hosts)) and "--force_multi" not in self.typed:
            self.typed.append("--force_multi")
        self.words = [*self._recipe, *overrides]

    def _check(self) -> None:
        """Raise a LaunchError if DeepSpeed's launcher would misread or not start the nodes, or one is broken."""
        hosts, options = self.hosts, self.options
        if hosts:
            hostfile.check_visible_devices(hosts)
            deepspeed.check_machines(hosts, options)
            deepspeed.check_backend_program(hosts, options)
        else:
            hostfile.check_visible_devices_here(options)
        deepspeed.check_binding(hosts, options)
        if not deepspeed.needs_ssh(hosts, options) or "--no_ssh_check" in options:
            return
        machines = _examination(options, self.words, self.cfg, hosts)
        machines.run(quick=True)
        if wrong := machines.lines("error"):
            raise LaunchError(
                "this would break the run:\n{lines}\n`toolkit doctor` looks closer; --no_ssh_check launches all the "
                "same.",
                lines="\n".join(wrong),
            )
        for line in machines.lines("warning"):
            say("Note: {line}", line=line.strip())

    def _show(self) -> None:
        """Print which rank runs where."""
        rows = hostfile.rank_table(self.hosts)
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        for row in rows:
            host, gpus, ranks = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            say(tr("{host}  GPUs {gpus}  ranks {ranks}", host=host, gpus=gpus, ranks=ranks).rstrip())
        if len({len(gpus) for gpus in self.hosts.values()}) > 1:
            say("Note: the nodes take part with different numbers of GPUs.")
        if len(self.hosts) > 1:
            for file, names in variables.variables_of_files(Path.cwd()).items():
                say("{file} sets on all nodes: {names}", file=file, names=", ".join(names))


def _examination(
    options: Mapping[str, str], words: Sequence[str], cfg: RunConfig, hosts: Mapping[str, Sequence[int]]
) -> Any:
    """Return what `toolkit doctor` would ask these nodes, not asked yet."""
    return import_module("toolkit.extras.doctor.examine").plan_examination(options, words, cfg, hosts)


def _pause(is_stopping: Callable[[], bool]) -> None:
    """Wait for LOOK_EVERY_S, or until `is_stopping()`."""
    until = time.monotonic() + LOOK_EVERY_S
    while time.monotonic() < until and not is_stopping():
        time.sleep(0.2)


def ranks_on(hosts: Mapping[str, Sequence[int]]) -> int:
    """Return how many ranks run on nodes."""
    return sum(map(len, hosts.values()))


def fitting(cfg: RunConfig, hosts: Resources) -> tuple[Resources, list[str]]:
    """Return as many of the nodes, first ones first, as the global batch divides over, and the overrides for that.
    No fewer than `launch.min_nodes` and no more than `launch.max_nodes`; LaunchError if there is no such number. The
    micro-batch becomes smaller where it does not divide a rank's share: the step computes the same all the same.
    """
    least, most = cfg.launch.min_nodes, cfg.launch.max_nodes or len(hosts)
    for count in range(min(most, len(hosts)), max(1, least) - 1, -1):
        chosen = dict(islice(hosts.items(), count))
        try:
            sizes = mesh.micro_sizes(cfg, ranks_on(chosen))
        except ConfigError:  # these ranks cannot be divided into groups that share a model
            continue
        if not sizes:
            continue
        if cfg.batch.micro_per_gpu == AUTO:
            return chosen, []
        rows = max(size for size in sizes if size <= mesh.micro_rows(cfg))
        return chosen, [] if rows == mesh.micro_rows(cfg) else [f"batch.micro_per_gpu={rows}"]
    raise LaunchError(
        "batch.global_size = {size} cannot be divided over {least} to {most} of these nodes (ranks of each: {ranks}), "
        "with parallel.* as set. Choose a size that can: nodes may come and go then.",
        size=cfg.batch.global_size,
        least=least,
        most=min(most, len(hosts)),
        ranks=", ".join(str(len(gpus)) for gpus in hosts.values()),
    )
