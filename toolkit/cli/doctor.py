"""Examine the machines of a run before it: what would break it, and what to type against that.

toolkit doctor [launcher options] [recipe=NAME] [hostfile=FILE] [key=value …]

  hostfile=FILE, --include …, --master_port N   as for `toolkit launch`; without a hostfile this machine alone
  recipe=NAME, key=value   look also at what this recipe needs: files, disks, ops
  quick=true       ask each machine about itself, without trying the network
  timeout_s=30     patience with each answer of a machine
"""

import itertools
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.arguments import parse, positive_int
from toolkit.config.schema import RunConfig
from toolkit.doctor import agents
from toolkit.doctor.agents import SshOptions
from toolkit.doctor.examine import Examination
from toolkit.doctor.facts import FORWARDED
from toolkit.doctor.findings import ERROR, NOTE, WARNING
from toolkit.errors import ConfigError, LaunchError
from toolkit.launch import deepspeed, env_vars, hostfile, mpi
from toolkit.messages import say, tr

CHECKS = (
    "ssh",
    "clocks",
    "code",
    "recipe",
    "versions",
    "GPUs",
    "ops",
    "files",
    "disks",
    "limits",
    "environment",
    "network",
    "all-reduce",
)
_OWN = ("quick", "timeout_s")
_SIGNS = {ERROR: "FAIL", WARNING: "warn", NOTE: "note", "": "ok"}


def run(words: list[str]) -> int:
    """Examine."""
    if words == ["--agent"]:
        agents.serve(lambda asked: parse(asked).loaded.cfg)
        return 0
    started = time.monotonic()
    _, options, rest = deepspeed.typed_options(words)
    own = dict(word.split("=", 1) for word in rest if word.partition("=")[0] in _OWN and "=" in word)
    overrides = [word for word in rest if word.partition("=")[0] not in _OWN]
    if own.get("quick", "true") not in ("true", "false"):
        raise ConfigError(tr("quick = {value}: write true or false.", value=own["quick"]))
    cfg = parse(overrides).loaded.cfg if overrides else RunConfig()
    hosts = _hosts(options)
    found = examination(options, hosts, overrides, cfg)
    found.limit_s = float(positive_int(own, "timeout_s") or found.limit_s)
    quick = own.get("quick") == "true"
    found.run(quick)
    _tell(found, quick, time.monotonic() - started)
    return ConfigError.exit_code if found.has_errors() else 0


def examination(
    options: Mapping[str, str], hosts: hostfile.Resources, words: Sequence[str], cfg: RunConfig
) -> Examination:
    """Return what is to be examined.

    Args:
        options: of `deepspeed`.
        hosts: those that take part.
        words: recipe and overrides; [] for the machines alone.
        cfg: what they mean.
    """
    used = deepspeed.backend(hosts, options)
    through_ssh = deepspeed.logs_in(hosts, options)
    files = env_vars.variables_of_files(Path.cwd()) if through_ssh else {}
    forwarded = {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED) and name != "PYTHONPATH"
    }
    port = options.get("--master_port", mpi.DEFAULT_PORT)
    if not port.isdecimal():
        raise LaunchError(tr("{name} {value}: write a positive whole number.", name="--master_port", value=port))
    return Examination(
        resources=hosts,
        words=words,
        cfg=cfg,
        way=SshOptions(
            through_ssh=through_ssh, arguments=_ssh_arguments(options), script=options.get("--venv_script", "")
        ),
        environ={**forwarded, **env_vars.values_of_files(files)} if through_ssh else {},
        secrets=cfg.launch.forwarded if used == "pdsh" else (),
        master_addr=options.get("--master_addr", ""),
        master_port=int(port),
    )


def _hosts(options: Mapping[str, str]) -> hostfile.Resources:
    """Return the machines that are to be examined.

    Raises:
        LaunchError: not all of them can be asked from here.
    """
    path = deepspeed.hostfile_of(options)
    if path is None:
        return hostfile.select_gpus({"localhost": hostfile.count_here()}, options)
    hosts = hostfile.select_gpus(hostfile.read_hostfile(Path(path)), options)
    if "--no_ssh" in options and len(hosts) > 1:
        raise LaunchError(tr("--no_ssh: other machines are asked through ssh. Type this on each, without a hostfile."))
    deepspeed.check_machines(hosts, options, hostfile.is_here)
    return hosts


def _ssh_arguments(options: Mapping[str, str]) -> list[str]:
    """Return what DeepSpeed's launcher gives to ssh through pdsh."""
    given = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    if port := options.get("--ssh_port"):
        given += ["-p", port]
    words = (
        shlex.split(options.get("--launcher_args", "")) if options.get("--launcher", "pdsh").lower() == "pdsh" else []
    )
    for word, value in itertools.pairwise([*words, ""]):
        if word == "-l":
            given += ["-l", value]
    return given


def lines(found: Examination, level: str) -> list[str]:
    """Return what was found of one level."""
    return [f"  {one.check}: {one.text}" for one in found.findings if one.level == level]


def _tell(found: Examination, quick: bool, seconds: float) -> None:
    """Print a table, and below it what is wrong, the worst first."""
    checks = [check for check in CHECKS if check in _looked_at(found, quick)]
    width = max(map(len, checks))
    for check in checks:
        levels = {one.level for one in found.findings if one.check == check}
        worst = next((level for level in (ERROR, WARNING, NOTE) if level in levels), "")
        say(f"{check:{width}}  {_SIGNS[worst]:4}  {found.summaries.get(check, '')}".rstrip())
    for level, heading in ((ERROR, tr("Would break the run:")), (WARNING, tr("May hurt it:")), (NOTE, tr("Notes:"))):
        if texts := lines(found, level):
            say("\n".join(["", heading, *texts]))
    say("")
    errors = sum(one.level == ERROR for one in found.findings)
    say(
        tr(
            "{hosts} machines, {errors} errors, {warnings} warnings in {seconds} s.",
            hosts=len(found.resources),
            errors=errors,
            warnings=sum(one.level == WARNING for one in found.findings),
            seconds=f"{seconds:.1f}",
        )
    )
    sys.stdout.flush()


def _looked_at(found: Examination, quick: bool) -> set[str]:
    """Return the checks that were made, so that no check is called good that nobody made."""
    checks = {one.check for one in found.findings} | set(found.summaries)
    if found.way.through_ssh:
        checks |= {"ssh", *(("clocks", "environment") if found.facts else ())}
    if found.facts:
        checks |= {"limits", *(("recipe", "files") if found.words else ())}
    without = set() if found.words else {"ops", "disks"}
    return (checks - without) | {one.check for one in found.findings}
