"""The start of a training process: config, environment, first lines and logs; only `start_logs` imports torch."""

import io
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import IO

from toolkit.arguments import Arguments, parse, parse_checked
from toolkit.config import devices, files, load, mesh, native_ops, requirements, schema
from toolkit.launch import allocator, environment
from toolkit.messages import ConfigError, Problems, say, tr
from toolkit.models.directory import has_runnable_code
from toolkit.secrets import HidingFilter, hide

_NCCL_WARNING = re.compile(r"NCCL (WARN|ERROR)")
_LOOK_S = 1.0


def warn_remote_code(model: schema.ModelConfig) -> None:
    """Say, in red on a terminal, that the Python files of a model run, if they do."""
    if not model.trust_remote_code or not has_runnable_code(model.path):
        return
    from rich.console import Console
    from rich.text import Text

    line = tr("model.trust_remote_code = true: the Python files of {path} run with all your rights.", path=model.path)
    Console().print(Text(line, style="bold red"), soft_wrap=True)


def make_ready(typed: list[str], *, custom: bool = False) -> tuple[Arguments, environment.Ranks] | None:
    """Check the config, set the environment; return the config and which rank this process is, None if `--cfg job` only
    printed the config. `typed`: overrides and --cfg, without what launchers add; `custom`: a program trains a custom
    model. Raises ConfigError, and LaunchError if the processes were not started as the config says.
    """
    inherited = dict(os.environ)
    ranks = environment.detect(os.environ)
    environment.set_rank_variables(ranks, os.environ)  # from here on an error knows which rank it speaks for
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(native_ops.extensions_dir()))
    if "--cfg" in typed:
        _print_config(typed, ranks.world_size)
        return None
    problems = Problems()
    arguments = parse_checked(typed, world_size=ranks.world_size, custom=custom, problems=problems)
    problems.attempt(requirements.check_packages)
    problems.attempt(native_ops.check_compiler, arguments.loaded)
    if ranks.rank == 0:
        problems.attempt(requirements.check_tracker_packages, arguments.loaded)
    cfg = arguments.loaded.cfg
    if ranks.local_rank == 0 and devices.on_nvidia():
        from toolkit.plan.planned_machine import check_precision, this_machine

        if here := this_machine():
            problems.attempt(check_precision, here.card, cfg.precision)
    problems.raise_all()
    if ranks.launcher != "single" or cfg.launch.num_nodes or cfg.launch.min_nodes or cfg.run.max_restarts:
        from toolkit.launch import deepspeed

        deepspeed.check_launcher(cfg.launch.num_nodes, ranks)
        deepspeed.check_restarts(cfg.run.max_restarts, ranks, typed, least_nodes=cfg.launch.min_nodes)
    set_environment(cfg, ranks, inherited)
    return arguments, ranks


def _print_config(typed: list[str], world_size: int) -> None:
    """Print the resolved config of a command with `--cfg job`; ConfigError if another word follows `--cfg`."""
    index = typed.index("--cfg")
    if typed[index + 1 : index + 2] not in (["job"], ["all"]):  # Hydra's values; a third shows its own config
        raise ConfigError(tr("write --cfg job: it prints the resolved config and stops."))
    overrides = typed[:index] + typed[index + 2 :]
    say(load.to_yaml(parse(overrides, world_size=world_size).loaded.cfg).rstrip("\n"))


def set_environment(cfg: schema.RunConfig, ranks: environment.Ranks, inherited: dict[str, str]) -> None:
    """Set variables by the config; check that the ranks can meet. `inherited`: what this process was started with."""
    if cfg.launch.env:
        from toolkit.launch import variables

        variables.apply_env(cfg.launch.env, ranks, os.environ, inherited)
    if cfg.distributed.interface:
        environment.set_interface(cfg.distributed.interface, os.environ)
    allocator.set_allocator(os.environ)
    environment.check_port(os.environ)
    native_ops.check_build_locks(os.environ)


def greet(arguments: Arguments, ranks: environment.Ranks, model: str) -> None:
    """Say what begins: the training of which model (`model`: its name), on which ranks, in which batches."""
    cfg = arguments.loaded.cfg
    requirements.warn_without_gpu(cfg.model)
    if line := files.example_data_notice(cfg.data):
        say(line)
    for note in [*arguments.notes, *environment.mpi_notes(ranks.launcher, ranks.local_world_size, os.environ)]:
        say(note)
    is_searched = cfg.batch.micro_per_gpu == schema.AUTO  # once the engine is built
    say(
        "{recipe}: {model}, ZeRO-{stage}, {dtype}, {world} ({launcher}). Batch: "
        "{micro} x {times} x {parts} = {size} sequences per step (micro-batch x accumulation x data-parallel ranks).",
        recipe=cfg.recipe,
        model=model,
        stage=cfg.zero.stage,
        dtype=cfg.precision.dtype.value,
        launcher=ranks.launcher,
        micro=cfg.batch.micro_per_gpu,
        times=schema.AUTO if is_searched else mesh.accumulation(cfg, ranks.world_size),
        world=tr("1 rank") if ranks.world_size == 1 else tr("{count} ranks", count=ranks.world_size),
        parts=mesh.mesh_of(cfg, ranks.world_size).data_ranks,
        size=cfg.batch.global_size,
    )
    if variables := {name: os.environ[name] for name in allocator.PYTORCH if name in os.environ}:
        shown = " ".join(f"{name}={value}" for name, value in variables.items())
        say("PyTorch's allocator of GPU memory: {settings}. A value of your own takes its place.", settings=shown)
    warn_remote_code(cfg.model)


def start_logs(file: Path, rank: int) -> None:
    """Send libraries' output to this rank's file, what C code prints too: on the terminal it would break the live view.
    Warnings also go to rank 0's terminal, errors and NCCL's warnings to every rank's.
    """
    import transformers
    from torch import distributed

    file.parent.mkdir(exist_ok=True)
    log = open(file, "a", encoding="utf-8", errors="backslashreplace")
    sys.stdout.flush()
    # The file takes the place of the stdout that C code writes to; Python's own stays what it was on rank 0.
    if not rank and not isinstance(sys.stdout, LastingStdout):
        terminal = os.fdopen(os.dup(1), "wb")
        sys.stdout = LastingStdout(
            terminal, encoding=sys.stdout.encoding, errors="backslashreplace", line_buffering=True
        )
    os.dup2(log.fileno(), 1)  # descriptor 1: the stdout of C code
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(HidingFilter())
    for name in ("DeepSpeed", "transformers"):
        logger = logging.getLogger(name)
        for existing in logger.handlers:
            existing.setLevel(logging.WARNING if rank == 0 else logging.ERROR)
            existing.addFilter(HidingFilter())
            if isinstance(existing, logging.StreamHandler) and not isinstance(existing, logging.FileHandler):
                existing.setStream(_Stderr())  # it would keep today's stderr, past the live view
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    # Deprecations inside DeepSpeed and transformers are for developers: into the file, not between the progress lines.
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.addHandler(handler)
    warnings.propagate = False
    transformers.utils.logging.disable_progress_bar()
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        threading.Thread(target=pass_on_warnings, args=(file, _Stderr()), name="nccl", daemon=True).start()


class LastingStdout(io.TextIOWrapper):
    """A stdout that outlives its reader: who closes the terminal, or ends `tee`, must not keep a run from saving."""

    def write(self, text: str) -> int:
        """Write; into nothing from the first failure on."""
        try:
            return super().write(text)
        except OSError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        """Flush, likewise."""
        try:
            super().flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Send what is written from here on to /dev/null."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Stderr:
    """What `sys.stderr` is at the moment: the live view takes its place while it is there."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def pass_on_warnings(file: Path, out: "IO[str] | _Stderr", ended: threading.Event | None = None) -> None:
    """Copy lines with NCCL's warnings from `file`, a log that grows, to `out` until `ended` is set (None: forever)."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        unfinished = ""
        while True:
            *complete, unfinished = (unfinished + lines.read()).split("\n")
            for line in complete:
                if _NCCL_WARNING.search(line):
                    out.write(hide(line) + "\n")
                    out.flush()
            if ended is not None and ended.is_set():
                return
            time.sleep(_LOOK_S)
