"""Starts DeepSpeed's launcher, supervises its ranks, and starts a run that crashed again."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import secrets
from toolkit.config.schema import RunConfig
from toolkit.doctor import examine, findings
from toolkit.launch import deepspeed, environment, hostfile, processes
from toolkit.messages import CheckpointError, Diverged, LaunchError, Stopped, ToolkitError, say, tr
from toolkit.train import run_dir

SCRIPT = Path(__file__).parents[2] / "run.py"
"""There in a checkout, not in an installed package."""
HANG = 124
MISTAKE, DIVERGED, IO, STOPPED = (kind.exit_code for kind in (ToolkitError, Diverged, CheckpointError, Stopped))
_KILLED = 128
"""Launchers add it to the number of the signal that killed a rank."""


def launch(typed: Sequence[str], options: Mapping[str, str], words: Sequence[str], cfg: RunConfig) -> int:
    """Launch a run, and again after a crash up to `run.max_restarts` times; return its exit code.

    `typed` are the arguments of `deepspeed`, `options` the same by name, `words` recipe and overrides of `cfg`.
    """
    folder, hosts = run_dir.make_parent(cfg), _machines(options, words, cfg)
    command, environ = _command(typed, options, words, hosts, cfg)
    say("Starts:  {command}", command=shlex.join(["deepspeed", *command[3:]]))
    requests, most, timeout_s = processes.SignalRequests(), cfg.run.max_restarts, float(cfg.distributed.timeout_s)
    restart, died = 0, 0.0
    while True:
        attempt = Attempt(folder, environ, restart, most, died)
        try:
            child = processes.run_launcher(command, attempt.environ, words, requests, attempt.look, timeout_s)
            status = attempt.final_status(timeout_s if requests.last and len(hosts) > 1 else 0.0)
        finally:
            attempt.path.unlink(missing_ok=True)
        code = exit_code_of_run(status, child, asked=bool(requests.last))
        restart += 1
        run = Path(status.get("folder", ""))
        if not should_restart(code, status, asked=bool(requests.last)) or restart > most:
            if len(hosts) > 1 and "folder" in status and (run / "FAILED").is_file():
                # That of the rank that failed first: what other nodes print comes in any order.
                text = (run / "FAILED").read_text(encoding="utf-8", errors="replace").strip()
                say("The first error:  {text}", text=text)
            return code
        died = status.get("died", time.time())
        step = run_dir.newest_step(run)
        run_dir.check_repeated_death(run, step)
        say(
            "The run died at step {step} (exit code {code}). Restart {restart} of {most}, from the checkpoint of step "
            "{saved}.",
            step=run_dir.reached_step(run),
            code=code,
            restart=restart,
            most=most,
            saved=step,
        )


def exit_code_of_run(status: Mapping[str, Any], child: int, asked: bool) -> int:
    """Return the exit code of a run, from what the ranks reported.

    `child` is the exit code of their launcher, negative if a signal killed it; `asked`: whether this process was asked
    to stop, and has passed that on.
    """
    if "folder" in status and (Path(status["folder"]) / "DONE").exists():
        return 0
    code = status.get("code")
    if asked and (code == 130 or (code is None and "folder" not in status)):
        return STOPPED  # before the ranks could report it
    if code == STOPPED and not asked:
        # Ranks are stopped as well when one of them was killed, or their launcher was: nobody asked for that.
        is_stop = 0 < child <= _KILLED or child in (-signal.SIGINT, -signal.SIGTERM)
        return STOPPED if is_stop else 1
    if code is None and child == MISTAKE:
        return MISTAKE  # options that the launcher does not know
    return code if code in (MISTAKE, DIVERGED, IO, STOPPED, HANG) else 1


def should_restart(code: int, status: Mapping[str, Any], asked: bool) -> bool:
    """Whether a run that ended like this may resume by itself: after a crash, a kill, a hang, a lost launcher.

    Not after a disk error (74): the next checkpoint would fail too, and the steps up to it be lost again. Not when it
    ended before it had a run directory: there is nothing to resume.
    """
    return code in (1, HANG) and "folder" in status and not asked


def _machines(options: Mapping[str, str], words: Sequence[str], cfg: RunConfig) -> hostfile.Resources:
    """Check the nodes of a hostfile, print which rank runs where, and return them; {} without one."""
    path = deepspeed.hostfile_of(options)
    if path is None:
        deepspeed.check_binding({}, options)
        return {}
    hosts = hostfile.select_gpus(hostfile.read_hostfile(Path(path)), options)
    hostfile.check_visible_devices(hosts)
    deepspeed.check_machines(hosts, options)
    deepspeed.check_backend_program(hosts, options)
    deepspeed.check_binding(hosts, options)
    if deepspeed.logs_in(hosts, options) and "--no_ssh_check" not in options:
        machines = examine.plan_examination(options, words, cfg, hosts)
        machines.run(quick=True)
        if wrong := machines.lines(findings.ERROR):
            raise LaunchError(
                "this would break the run:\n{lines}\n`toolkit doctor` looks closer; --no_ssh_check launches all the "
                "same.",
                lines="\n".join(wrong),
            )
        for line in machines.lines(findings.WARNING):
            say("Note: {line}", line=line.strip())
    rows = hostfile.rank_table(hosts)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        host, gpus, ranks = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say(tr("{host}  GPUs {gpus}  ranks {ranks}", host=host, gpus=gpus, ranks=ranks).rstrip())
    if len({len(gpus) for gpus in hosts.values()}) > 1:
        say("Note: the nodes take part with different numbers of GPUs.")
    for file, names in environment.variables_of_files(Path.cwd()).items() if len(hosts) > 1 else ():
        say("{file} sets on all nodes: {names}", file=file, names=", ".join(names))
    return hosts


def _command(
    typed: Sequence[str], options: Mapping[str, str], words: Sequence[str], hosts: hostfile.Resources, cfg: RunConfig
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command and its environment; print which variables of `launch.env` the ranks get."""
    backend, env = deepspeed.backend(hosts, options), cfg.launch.env
    if "--launcher" in options and not backend:
        say(
            "Note: --launcher {launcher} has no effect on this machine alone: DeepSpeed's own launcher starts the "
            "ranks. With a hostfile, --force_multi uses it here too.",
            launcher=options["--launcher"],
        )
    names = cfg.launch.forwarded
    files = environment.variables_of_files(Path.cwd()) if backend and names else {}
    here = [name for name in names if os.environ.get(name)]
    for name in here:
        secrets.learn(os.environ[name])
    if missing := sorted(set(names).difference(here, *files.values())):
        raise environment.without_value(missing)
    if env:
        say("Variables of the ranks: {names}", names=", ".join(env))
    environ, exported = environment.for_launcher(here, backend, os.environ) if backend else (dict(os.environ), [])
    # Unless asked, the launcher shall not write whole command lines, with what is in them, into logs.
    quiet = [] if {"--log_level", "-q", "--quiet"} & set(options) else ["--log_level", "critical"]
    port = deepspeed.port_of_one_node(hosts, options)
    options = {**options, **port}
    command = [sys.executable, "-m", processes.FRONT_END, *quiet]
    command += [*deepspeed.options_without_ssh(hosts, options), *(word for pair in port.items() for word in pair)]
    command += typed
    command += deepspeed.mpi_launcher_args(hosts, options, exported) if backend == "openmpi" else []
    # Outside a checkout the installed package's command, without --local_rank, which would come before its `train`; the
    # variable says the same.
    program = [str(SCRIPT)] if SCRIPT.is_file() else ["--module", "--no_local_rank", "toolkit", "train"]
    return [*command, *program, *deepspeed.quoted_words(hosts, options, words)], environ


class Attempt:
    """One start of the ranks."""

    def __init__(self, folder: Path, environ: Mapping[str, str], restart: int, most: int, died: float) -> None:
        self.path = environment.create_status_file(folder, restart)
        # ssh alone waits for hours for a lost machine; the environment's own arguments come first, as the first counts.
        ssh = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -o ServerAliveInterval=10 -o ServerAliveCountMax=3".strip()
        self.environ = {**environ, "PDSH_SSH_ARGS_APPEND": ssh, **environment.status_variables(self.path)}
        self.restart, self.most, self.died = restart, most, died

    def final_status(self, patience_s: float) -> dict[str, Any]:
        """Return what the ranks have reported when their launcher has ended; other nodes get `patience_s` to do so."""
        until = time.monotonic() + patience_s
        while True:
            status = environment.read_status(self.environ)
            if "folder" not in status or "code" in status or time.monotonic() >= until:
                return status
            time.sleep(0.5)

    def look(self) -> None:
        """Print once how long it took until a restarted run has done a new step."""
        if self.died and (step := environment.read_status(self.environ).get("first_step")):
            say(
                "Restart {restart} of {most}: {seconds} s from the death to the first new step (step {step}).",
                restart=self.restart,
                most=self.most,
                seconds=f"{time.time() - self.died:.1f}",
                step=step,
            )
            self.died = 0.0
