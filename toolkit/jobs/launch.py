"""Starts DeepSpeed's launcher, supervises its ranks, and starts a run that crashed again."""

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from toolkit import secrets
from toolkit.config.schema import RunConfig
from toolkit.distributed import presence, watchdog
from toolkit.jobs.nodes import LOOK_EVERY_S, Nodes
from toolkit.launch import ancestors, deepspeed, environment, processes, variables
from toolkit.messages import CheckpointError, Diverged, Stopped, ToolkitError, say, tr
from toolkit.train import existing_run, run_dir

SCRIPT = Path(__file__).parents[2] / "run.py"
"""There in a checkout, not in an installed package."""
HANG = watchdog.EXIT_CODE
MISTAKE, DIVERGED, IO, STOPPED = (kind.exit_code for kind in (ToolkitError, Diverged, CheckpointError, Stopped))
_KILLED = 128
"""Launchers add it to the number of the signal that killed a rank."""


def launch(typed: Sequence[str], words: Sequence[str], cfg: RunConfig) -> int:
    """Launch a run, and again after a crash up to `run.max_restarts` times; return its exit code.
    `typed` are the arguments of `deepspeed`, `words` recipe and overrides of `cfg`.
    """
    folder, nodes = run_dir.make_parent(cfg), Nodes(typed, words, cfg)
    command, environ = _command(nodes)
    requests, most_restarts = processes.SignalRequests(), cfg.run.max_restarts
    timeout_s = float(cfg.distributed.timeout_s)
    num_restarts, restart, previous_end = 0, 0, 0.0  # restarts so far; the rest: of the next `Attempt`
    while True:
        attempt = Attempt(folder, environ, nodes, restart, most_restarts, previous_end)
        try:
            launcher_code = processes.run_launcher(
                command, attempt.environ, nodes.words, requests, attempt.poll, timeout_s
            )
            is_stopped_elsewhere = bool(requests.last) and len(nodes.hosts) > 1
            status = attempt.final_status(timeout_s if is_stopped_elsewhere else 0.0)
        finally:
            attempt.end()
        code, run = exit_code_of_run(status, launcher_code, bool(requests.last)), Path(status.get("folder", ""))
        restart, previous_end = 0, status.get("died", time.time())
        # The file that this process made stopped the run, to resume on other nodes: that is no death, and not counted.
        is_change_of_nodes = attempt.stop and code == STOPPED and not requests.last
        if not is_change_of_nodes:
            num_restarts += 1
            restart = num_restarts
            may_restart = bool(most_restarts) and should_restart(code, status, bool(requests.last))
            if not may_restart or not _announce_death(run, code, restart, most_restarts):
                if len(nodes.hosts) > 1 and "folder" in status:
                    _say_first_error(run)
                return code
        nodes.choose_again(lambda: bool(requests.last))
        if requests.last:
            return STOPPED
        if nodes.is_elastic:
            command, environ = _command(nodes)


def _say_first_error(run: Path) -> None:
    """Print the error of the rank that failed first, as the run directory has it; several nodes print in any order."""
    if (run / "FAILED").is_file():
        text = (run / "FAILED").read_text(encoding="utf-8", errors="replace").strip()
        say("The first error:  {text}", text=text)


def _announce_death(run: Path, code: int, restart: int, most: int) -> bool:
    """Print that the run in directory `run` died with exit code `code`; return whether it is restarted: not if the next
    restart, number `restart`, is more than `most`. RepeatedDeath if another start would end where this one did.
    """
    saved = existing_run.newest_step(run)
    existing_run.check_repeated_death(run, saved)
    facts = {"step": existing_run.reached_step(run), "code": code, "most": most, "saved": saved}
    if restart > most:
        say(
            "The run died at step {step} (exit code {code}), after {most} restarts: no more are allowed "
            "(run.max_restarts). The same command resumes it from the checkpoint of step {saved}.",
            **facts,
        )
        return False
    say(
        "The run died at step {step} (exit code {code}). Restart {restart} of {most}, from the checkpoint of step "
        "{saved}.",
        restart=restart,
        **facts,
    )
    return True


def exit_code_of_run(status: Mapping[str, Any], launcher_code: int, is_stopping: bool) -> int:
    """Return the exit code of a run.

    Args:
        status: what its ranks have reported, see `environment.read_status`.
        launcher_code: exit code of their launcher, negative if a signal killed it.
        is_stopping: whether this process has got a signal to stop, and has passed it on.
    """
    if "folder" in status and (Path(status["folder"]) / "DONE").exists():
        return 0
    code = status.get("code")
    # The signal came before the ranks could report that they stop: 130, 128 + SIGINT, is what Python itself ends with.
    if is_stopping and (code == 130 or (code is None and "folder" not in status)):
        return STOPPED
    if code == STOPPED and not is_stopping:
        # Ranks are stopped as well when one of them was killed (the launcher's code is then 128 + a signal), or their
        # launcher was: the user did not ask for that. But SIGINT or SIGTERM, sent to the launcher itself, does.
        is_stop = 0 < launcher_code <= _KILLED or launcher_code in (-signal.SIGINT, -signal.SIGTERM)
        return STOPPED if is_stop else 1
    if code is None and launcher_code == MISTAKE:
        return MISTAKE  # options that the launcher does not know
    return code if code in (MISTAKE, DIVERGED, IO, STOPPED, HANG) else 1


def should_restart(code: int, status: Mapping[str, Any], is_stopping: bool) -> bool:
    """Whether a run that ended with `code` may be restarted: after a crash, a kill, a hang, a lost launcher. Not after
    a disk error (74), as the next checkpoint would fail too and the steps up to it be lost again; not without a run
    directory in `status`, as there is nothing to resume.
    """
    return code in (1, HANG) and "folder" in status and not is_stopping


def _command(nodes: Nodes) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command and its environment; print the command, and the names of ranks' variables."""
    hosts, options, cfg = nodes.hosts, nodes.options, nodes.cfg
    backend, env = deepspeed.backend(hosts, options), cfg.launch.env
    if "--launcher" in options and not backend:
        say(
            "Note: --launcher {launcher} has no effect on this machine alone: DeepSpeed's own launcher starts the "
            "ranks. With a hostfile, --force_multi uses it here too.",
            launcher=options["--launcher"],
        )
    set_here = _secrets_set_here(cfg.launch.forwarded, backend)
    if env:
        say("Variables of the ranks: {names}", names=", ".join(env))
    environ, exported = dict(os.environ), list[str]()
    if backend:
        environ, exported = variables.launcher_environment(set_here, backend, os.environ)
    # Unless asked, DeepSpeed's launcher shall not write whole command lines, with what is in them, into logs.
    quiet = [] if {"--log_level", "-q", "--quiet"} & set(options) else ["--log_level", "critical"]
    port = deepspeed.port_of_one_node(hosts, options)
    options = {**options, **port}
    command = [sys.executable, "-m", ancestors.FRONT_END, *quiet]
    command += [*deepspeed.options_without_ssh(hosts, options), *chain.from_iterable(port.items())]
    command += nodes.typed
    command += deepspeed.mpi_launcher_args(hosts, options, exported) if backend == "openmpi" else []
    # Outside a checkout the installed package's command, without --local_rank, which would come before its `train`; the
    # variable says the same.
    program = [str(SCRIPT)] if SCRIPT.is_file() else ["--module", "--no_local_rank", "toolkit", "train"]
    command += [*program, *deepspeed.quoted_words(hosts, options, nodes.words)]
    shown = ["deepspeed", *map(secrets.hide_word, command[3:])]  # what `python -m` runs is that program
    say("Starts:  {command}", command=shlex.join(shown))
    return command, environ


def _secrets_set_here(names: Sequence[str], backend: str) -> list[str]:
    """Return those of the variables `names`, which ranks need, that are set here, and hide their values in all output.
    An error if one is set neither here nor, with a `backend` that starts ranks on other nodes, in a file that
    DeepSpeed's launcher reads.
    """
    names_by_file = variables.variables_of_files(Path.cwd()) if backend and names else {}
    set_here = [name for name in names if os.environ.get(name)]
    for name in set_here:
        secrets.learn(os.environ[name])
    if missing := sorted(set(names).difference(set_here, *names_by_file.values())):
        raise variables.missing_secrets_error(missing)
    return set_here


class Attempt:
    """One start of the ranks on some nodes. `folder`: `run.dir`; `environ`: the launcher's environment; `restart`: the
    number of this start among those after a death, 0 for the first one and after a change of nodes; `previous_end`:
    time.time() at which the ranks of the start before ended, 0 for the first one.
    """

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        nodes: Nodes,
        restart: int,
        max_restarts: int,
        previous_end: float,
    ) -> None:
        self.path = environment.create_status_file(folder, restart)
        # ssh alone waits for hours for a lost machine; the environment's own arguments come first, as the first counts.
        ssh = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} -o ServerAliveInterval=10 -o ServerAliveCountMax=3".strip()
        self.environ = {**environ, "PDSH_SSH_ARGS_APPEND": ssh, **environment.status_variables(self.path)}
        self.nodes, self.restart, self.max_restarts, self.previous_end = nodes, restart, max_restarts, previous_end
        self.stop: Path | None = None
        """The file by which the run was asked to stop, and to resume on other nodes."""
        self._lost_at = 0.0  # time.monotonic() when a node was found to be lost
        self._over = threading.Event()
        if nodes.is_elastic:
            threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()

    def final_status(self, patience_s: float) -> dict[str, Any]:
        """Return what the ranks have reported when their launcher has ended; other nodes get `patience_s` to do so: a
        run that has a directory is to report its exit code, too.
        """
        until = time.monotonic() + patience_s
        while True:
            status = environment.read_status(self.environ)
            if "folder" not in status or "code" in status or time.monotonic() >= until:
                return status
            time.sleep(0.5)

    def poll(self) -> bool:
        """Print once how long it took from the end of earlier ranks to the first new step. Return whether all that is
        left may be killed: a node was lost so long ago that the ranks on other nodes have had the time to end.
        """
        if self.previous_end and (step := environment.read_status(self.environ).get("first_step")):
            seconds = f"{time.time() - self.previous_end:.1f}"
            if self.restart:
                say(
                    "Restart {restart} of {most}: {seconds} s from the death to the first new step (step {step}).",
                    restart=self.restart,
                    most=self.max_restarts,
                    seconds=seconds,
                    step=step,
                )
            else:
                say("{seconds} s from the stop to the first new step (step {step}).", seconds=seconds, step=step)
            self.previous_end = 0.0
        return bool(self._lost_at) and time.monotonic() - self._lost_at > presence.SILENT_S

    def end(self) -> None:
        """Stop watching, and remove the files by which ranks report, and by which they were asked to stop."""
        self._over.set()
        self.path.unlink(missing_ok=True)
        if self.stop:
            self.stop.unlink(missing_ok=True)

    def _watch_nodes(self) -> None:
        """End the run when a node is lost; stop it, once it has done a step, when it is to resume on others."""
        while not self._over.wait(LOOK_EVERY_S):
            status = environment.read_status(self.environ)
            if "folder" not in status or "code" in status:
                continue
            folder = Path(status["folder"])
            with suppress(ToolkitError, OSError):  # a hostfile that is being written
                if lost := self.nodes.lost(folder / "logs"):
                    self._end_without(lost, folder)
                    return
                if self.stop is None and "first_step" in status and self.nodes.would_change():
                    say(
                        "The nodes have changed: the run saves a checkpoint, stops and resumes on those that are "
                        "available."
                    )
                    stop = folder / run_dir.STOP
                    stop.touch()
                    self.stop = stop

    def _end_without(self, lost: Mapping[str, float], folder: Path) -> None:
        """Write the file FAILED into the run directory, for which all ranks look, so that those end that wait for ranks
        of a lost node. `lost`: node -> seconds since its last sign of life.
        """
        seconds = max(lost.values())
        environment.report_status(self.environ, code=HANG, died=time.time() - seconds)
        text = tr(
            "{hosts}: no heartbeat for {seconds} s, and no answer through ssh.",
            hosts=", ".join(lost),
            seconds=f"{seconds:.0f}",
        )
        say("Lost: {text}", text=text)
        with suppress(FileExistsError), open(folder / "FAILED", "x", encoding="utf-8") as file:
            file.write(f"toolkit launch on {socket.gethostname()}, exit code {HANG}\n{text}\n")
        self._lost_at = time.monotonic()
