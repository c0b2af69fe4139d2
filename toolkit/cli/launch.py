"""Train under DeepSpeed's launcher; pass on the ranks' exit code, and start again what died.

toolkit launch recipe=NAME [launcher options] [hostfile=FILE] [key=value …]

  --num_gpus N, --include …   options of `deepspeed`, in front of the recipe or behind it
  hostfile=FILE               several machines, examined as by `toolkit doctor quick=true`; --no_ssh_check leaves that
  recipe=NAME, key=value                       as for `toolkit train`
  run.max_restarts=N                           start again, up to N times, a run that died or hung
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.arguments import parse_checked
from toolkit.cli import doctor
from toolkit.config.schema import RunConfig
from toolkit.doctor.examine import Examination
from toolkit.doctor.findings import ERROR, WARNING
from toolkit.errors import CheckpointError, Diverged, LaunchError, Stopped, ToolkitError
from toolkit.launch import deepspeed, env_vars, environment, hostfile, mpi, processes, rank_status
from toolkit.messages import say, tr
from toolkit.train import run_folder, starts

SCRIPT = Path(__file__).parents[2] / "run.py"
"""There in a checkout, not in an installed package."""
HANG = 124
MISTAKE, DIVERGED, IO, STOPPED = (kind.exit_code for kind in (ToolkitError, Diverged, CheckpointError, Stopped))
_KILLED = 128
"""Launchers add it to the number of the signal that killed a rank."""


def run(words: list[str]) -> int:
    """Launch, and launch again as often as that can help and is asked for."""
    mine, options, rest = deepspeed.typed_options(words)
    cfg = _checked(rest)
    folder, hosts = run_folder.make_parent(cfg), _machines(options, rest, cfg)
    if "--launcher" in options and not deepspeed.backend(hosts, options):
        say(
            tr(
                "Note: --launcher {launcher} has no effect on this machine alone: DeepSpeed's own launcher starts the "
                "ranks. With a hostfile, --force_multi uses it here too.",
                launcher=options["--launcher"],
            )
        )
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        *_quiet(options),
        *deepspeed.options_without_ssh(hosts, options),
    ]
    environ, more = _forwarded(cfg, hosts, options)
    command += [*mine, *more, *program(), *deepspeed.quoted_words(hosts, options, rest)]
    say(tr("Starts:  {command}", command=shlex.join(["deepspeed", *command[3:]])))
    requests, most = processes.SignalRequests(), cfg.run.max_restarts
    restart, died = 0, 0.0
    while True:
        life = _Life(folder, environ, restart, most, died)
        try:
            child = processes.run_launcher(
                command, life.environ, rest, requests, life.look, float(cfg.distributed.timeout_s)
            )
            told = life.last_words(float(cfg.distributed.timeout_s) if requests.last and len(hosts) > 1 else 0.0)
        finally:
            life.path.unlink(missing_ok=True)
        code = verdict(told, child, asked=bool(requests.last))
        restart += 1
        if not is_worth_a_restart(code, told, asked=bool(requests.last)) or restart > most:
            if len(hosts) > 1:
                _say_first_error(told)
            return code
        died = told.get("died", time.time())
        _say_restart(Path(told["folder"]), code, restart, most)


def verdict(told: Mapping[str, Any], child: int, asked: bool) -> int:
    """Return the exit code of a run.

    Args:
        told: what the ranks told.
        child: exit code of their launcher; negative if a signal killed it.
        asked: whether this process was asked to stop, and has passed that on.
    """
    if "folder" in told and (Path(told["folder"]) / "DONE").exists():
        return 0
    code = told.get("code")
    if asked and (code == 130 or (code is None and "folder" not in told)):
        return STOPPED  # before the ranks could say so
    if code == STOPPED and not asked:
        # Ranks are stopped as well when one of them was killed, or their launcher was: nobody asked for that.
        is_stop = 0 < child <= _KILLED or child in (-signal.SIGINT, -signal.SIGTERM)
        return STOPPED if is_stop else 1
    if code is None and child == MISTAKE:
        return MISTAKE  # options that the launcher does not know
    return code if code in (MISTAKE, DIVERGED, IO, STOPPED, HANG) else 1


def is_worth_a_restart(code: int, told: Mapping[str, Any], asked: bool) -> bool:
    """Return whether a run that ended like this may go on by itself: after a crash, a kill, a hang, a lost launcher.

    Not after a disk error (74): the next checkpoint would fail too, and the steps up to it be lost again. Not when it
    died before it had a run folder: nothing can be gone on with.
    """
    return code in (1, HANG) and "folder" in told and not asked


def program() -> list[str]:
    """Return the words by which the launcher starts us: run.py of the checkout, or the installed package's command."""
    if SCRIPT.is_file():
        return [str(SCRIPT)]
    # The launcher would put --local_rank between `toolkit` and `train`; the variable says the same.
    return ["--module", "--no_local_rank", "toolkit", "train"]


def _checked(rest: Sequence[str]) -> RunConfig:
    """Refuse before anything is started what the ranks would refuse within their first second."""
    ranks = environment.detect(os.environ)
    if ranks.launcher != "single":
        raise LaunchError(
            tr("toolkit launch starts the ranks itself: type it once, without {launcher}.", launcher=ranks.launcher)
        )
    return parse_checked(rest, world_size=None, files=False).loaded.cfg


def _machines(options: Mapping[str, str], words: Sequence[str], cfg: RunConfig) -> hostfile.Resources:
    """Check the machines of a hostfile, say which rank runs where, and return them; {} without one."""
    path = deepspeed.hostfile_of(options)
    if path is None:
        deepspeed.check_binding({}, options)
        return {}
    hosts = hostfile.select_gpus(hostfile.read_hostfile(Path(path)), options)
    hostfile.check_visible_devices(hosts)
    deepspeed.check_machines(hosts, options, hostfile.is_here)
    deepspeed.check_backend_program(hosts, options)
    deepspeed.check_binding(hosts, options)
    if deepspeed.logs_in(hosts, options) and "--no_ssh_check" not in options:
        _examine(doctor.examination(options, hosts, words, cfg))
    rows = hostfile.rank_table(hosts)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        host, gpus, ranks = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say(tr("{host}  GPUs {gpus}  ranks {ranks}", host=host, gpus=gpus, ranks=ranks).rstrip())
    if len({len(gpus) for gpus in hosts.values()}) > 1:
        say(tr("Note: the machines take part with different numbers of GPUs."))
    for file, names in env_vars.variables_of_files(Path.cwd()).items() if len(hosts) > 1 else ():
        say(tr("{file} sets on all machines: {names}", file=file, names=", ".join(names)))
    return hosts


def _examine(machines: Examination) -> None:
    """Ask all machines about themselves, and say what may hurt the run.

    Raises:
        LaunchError: something would break it.
    """
    machines.run(quick=True)
    wrong = doctor.lines(machines, ERROR)
    if wrong:
        raise LaunchError(
            tr(
                "this would break the run:\n{lines}\n`toolkit doctor` looks closer; --no_ssh_check launches all the "
                "same.",
                lines="\n".join(wrong),
            )
        )
    for line in doctor.lines(machines, WARNING):
        say(tr("Note: {line}", line=line.strip()))


def _forwarded(
    cfg: RunConfig, hosts: hostfile.Resources, options: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Say which variables of `launch.env` the ranks get; return the launcher's environment and options for that.

    Raises:
        LaunchError: a secret is not set here.
    """
    backend, env = deepspeed.backend(hosts, options), cfg.launch.env
    names = cfg.launch.forwarded
    files = env_vars.variables_of_files(Path.cwd()) if backend and names else {}
    here = [name for name in names if os.environ.get(name)]
    env_vars.mask_values([os.environ[name] for name in here])
    if missing := sorted(set(names).difference(here, *files.values())):
        raise env_vars.without_value(missing)
    if env:
        say(tr("Variables of the ranks: {names}", names=", ".join(env)))
    environ, exported = env_vars.for_launcher(here, backend, os.environ) if backend else (dict(os.environ), [])
    return environ, mpi.launcher_args(hosts, options, exported) if backend == "openmpi" else []


def _quiet(options: Mapping[str, str]) -> list[str]:
    """Return what keeps the launcher from writing whole command lines, with what is in them, into logs."""
    chosen = {"--log_level", "-q", "--quiet"} & set(options)
    return [] if chosen else ["--log_level", "critical"]


class _Life:
    """One start of the ranks."""

    def __init__(self, folder: Path, environ: Mapping[str, str], restart: int, most: int, died: float) -> None:
        self.path = rank_status.create_status_file(folder, restart)
        self.environ = {**environ, **deepspeed.ssh_variables(environ), **rank_status.status_variables(self.path)}
        self.restart, self.most, self.died = restart, most, died

    def read(self) -> dict[str, Any]:
        """Return what the ranks have told."""
        return rank_status.read_status(self.environ)

    def last_words(self, patience_s: float) -> dict[str, Any]:
        """Return what the ranks have told when their launcher has ended.

        Args:
            patience_s: how long ranks of other machines, which may still be saving, are given to tell their code.
        """
        until = time.monotonic() + patience_s
        while "folder" in (told := self.read()) and "code" not in told and time.monotonic() < until:
            time.sleep(0.5)
        return told

    def look(self) -> None:
        """Say once how long it took until a run that was started again has done a new step."""
        if self.died and (step := self.read().get("first_step")):
            say(
                tr(
                    "Restart {restart} of {most}: {seconds} s from the death to the first new step (step {step}).",
                    restart=self.restart,
                    most=self.most,
                    seconds=f"{time.time() - self.died:.1f}",
                    step=step,
                )
            )
            self.died = 0.0


def _say_first_error(told: Mapping[str, Any]) -> None:
    """Repeat the error of the rank that failed first: what other machines print comes in any order."""
    marker = Path(told.get("folder", "")) / "FAILED"
    if "folder" in told and marker.is_file():
        say(tr("The first error:  {text}", text=marker.read_text(encoding="utf-8", errors="replace").strip()))


def _say_restart(folder: Path, code: int, restart: int, most: int) -> None:
    """Say that a run is started again, or raise if that would be for ever the same."""
    step = starts.newest_step(folder)
    starts.check(folder, step)
    say(
        tr(
            "The run died at step {step} (exit code {code}). Restart {restart} of {most}, from the checkpoint of step "
            "{saved}.",
            step=starts.reached(folder),
            code=code,
            restart=restart,
            most=most,
            saved=step,
        )
    )
