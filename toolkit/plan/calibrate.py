"""Rates that are measured on this machine by a program per rank, and kept next to the tokenized data. No torch."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from toolkit import children
from toolkit.config.load import to_yaml
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.launch.environment import free_port
from toolkit.messages import tr
from toolkit.plan.machine import Machine, this_machine
from toolkit.plan.outline import cache_file, write_cache
from toolkit.plan.parameters import Outline
from toolkit.plan.speed import Rates, assumed

_PATIENCE_S = 300
_POLL_S = 0.1


def _cache_of(cfg: RunConfig, machine: Machine, outline: Outline) -> Path:
    """Return where the rates of this host are kept: they depend on its processors, on the model and on its rows."""
    gpu = machine.card.name if machine.card else ""
    inputs = [
        "cpu" if machine.on_cpu else [gpu, machine.memory_bytes >> 30],
        machine.ranks,
        outline.sizes,
        outline.vocabulary,
        cfg.precision.dtype.value,
        cfg.data.max_length,
    ]
    return cache_file(cfg, f"rates-{os.uname().nodename}", inputs)


def rates_of(cfg: RunConfig, machine: Machine, outline: Outline) -> Rates:
    """Return what has been measured on this machine for this model, else what is assumed."""
    file = _cache_of(cfg, machine, outline)
    if machine.nodes == 1 and file.is_file():
        with suppress(ValueError, TypeError, OSError):  # cut off, or of another version: as if it were not there
            return Rates(**json.loads(file.read_text(encoding="utf-8")))
    return assumed(machine, cfg.precision.dtype.value)


def calibrate(cfg: RunConfig, machine: Machine, outline: Outline) -> None:
    """Measure this machine's rates and keep them."""
    if machine.nodes > 1:
        raise ConfigError(tr("calibrate=true measures one machine, this one: leave nodes= out."))
    if not machine.on_cpu:
        here = this_machine()
        if not here or machine.ranks > here.ranks or abs(machine.memory_bytes / here.memory_bytes - 1) >= 0.1:
            raise ConfigError(
                "calibrate=true measures this machine, which is not {machine}: it has {here}. Leave gpus= out, or "
                "write gpus=2xcpu.",
                machine=machine.name,
                here=here.name if here else tr("no NVIDIA GPU"),
            )
    with tempfile.TemporaryDirectory() as folder:
        measured = _measure(cfg, machine, Path(folder))
    # All wait for the slowest: its rates are the machine's.
    slowest = {
        name: (max if name in ("micro_s", "latency_s") else min)(rates[name] for rates in measured)
        for name in measured[0]
    }
    write_cache(_cache_of(cfg, machine, outline), slowest)


def _measure(cfg: RunConfig, machine: Machine, folder: Path) -> list[dict[str, float]]:
    """Run `toolkit.train.calibration` on every rank at the same time; return the rates that each has measured."""
    config = folder / "config.yaml"
    config.write_text(to_yaml(cfg), encoding="utf-8")
    environ = os.environ | {
        "WORLD_SIZE": str(machine.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu" if machine.on_cpu else "cuda",
    }
    answers = [folder / f"rank_{rank}.json" for rank in range(machine.ranks)]
    logs = [answer.with_suffix(".log") for answer in answers]
    with ExitStack() as stack:
        programs = []
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            command = [sys.executable, "-m", "toolkit.train.calibration", str(config), str(answer)]
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = stack.enter_context(log.open("wb"))
            program = children.start(command, env=environ | ids, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            stack.callback(program.wait)
            stack.callback(program.kill)
            programs.append(program)
        until = time.monotonic() + _PATIENCE_S
        while None in (codes := [program.poll() for program in programs]) and not any(codes):
            if time.monotonic() > until:
                raise ConfigError("calibrate=true: no answer within {seconds} s.", seconds=_PATIENCE_S)
            time.sleep(_POLL_S)
    for log, code in zip(logs, codes, strict=True):
        if code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {code}"
            raise ConfigError("calibrate=true: the machine could not be measured: {reason}", reason=reason)
    return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]
