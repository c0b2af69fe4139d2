"""What this machine does per second, measured by a program per rank, and kept next to the tokenized data. No torch."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from toolkit import children
from toolkit.config import devices, load, schema
from toolkit.launch.environment import free_port
from toolkit.messages import ConfigError, tr
from toolkit.plan.lookup import write_cache
from toolkit.plan.machine import Machine
from toolkit.plan.outline import Outline
from toolkit.plan.planned_machine import this_machine
from toolkit.plan.speed import rates_file

_PATIENCE_S = 300
_POLL_S = 0.1


def calibrate(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> None:
    """Measure this machine's rates and save them in `rates_file`; ConfigError if `machine` is another one."""
    if machine.nodes > 1:
        raise ConfigError(tr("calibrate=true measures one machine, this one: leave nodes= out."))
    if not machine.on_cpu:
        here = this_machine()
        # The memory may be that in the GPU's name: 48 GB of an L40S, which has 45 GiB.
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
    slowest = {name: min(rates[name] for rates in measured) for name in measured[0]}
    slowest |= {name: max(rates[name] for rates in measured) for name in ("micro_s", "latency_s") if name in slowest}
    write_cache(rates_file(cfg, machine, outline), slowest)


def _measure(cfg: schema.RunConfig, machine: Machine, folder: Path) -> list[dict[str, float]]:
    """Run `toolkit.extras.calibration` on every rank at the same time; return the rates that each has measured."""
    config = folder / "config.yaml"
    config.write_text(load.to_yaml(cfg), encoding="utf-8")
    environ = os.environ | {
        "WORLD_SIZE": str(machine.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu" if machine.on_cpu else devices.CUDA,
    }
    answers = [folder / f"rank_{rank}.json" for rank in range(machine.ranks)]
    logs = [answer.with_suffix(".log") for answer in answers]
    with ExitStack() as stack:
        programs = []
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            command = [sys.executable, "-m", "toolkit.extras.calibration", str(config), str(answer)]
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = stack.enter_context(log.open("wb"))
            program = children.start(command, env=environ | ids, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            stack.callback(program.wait)
            stack.callback(program.kill)  # callbacks run in reverse: it is killed, then waited for
            programs.append(program)
        until = time.monotonic() + _PATIENCE_S  # for all to end, or one of them to fail
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
