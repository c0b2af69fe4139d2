"""Rates that were measured on a machine, kept beside the tokenised data. No torch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.launch.environment import free_port
from toolkit.messages import tr
from toolkit.plan.machine import Machine
from toolkit.plan.speed import Rates, assumed

_PATIENCE_S = 300


def file_of(cfg: RunConfig, machine: Machine) -> Path:
    """Return where the rates of this host are kept: they depend on the model, its rows and the number of ranks."""
    name = cfg.model.name or Path(cfg.model.path).name
    what = f"{name}-{cfg.precision.dtype.value}-{cfg.data.max_length}-{machine.ranks}"
    return Path(cfg.prepare.dir) / "plan" / f"rates-{os.uname().nodename}-{what}.json"


def rates_of(cfg: RunConfig, machine: Machine) -> Rates:
    """Return what has been measured on the machine at hand for this model, else what is assumed."""
    file = file_of(cfg, machine)
    if machine.nodes == 1 and file.is_file():
        return Rates(**json.loads(file.read_text(encoding="utf-8")))
    return assumed(machine, cfg.precision.dtype.value)


def calibrate(words: Sequence[str], cfg: RunConfig, machine: Machine) -> None:
    """Measure this machine's rates and keep them, in processes of their own, one per rank.

    Args:
        words: the config's overrides.
        cfg: what they make.
        machine: how many ranks.

    Raises:
        ConfigError: it is not this machine, or the measuring fails.
    """
    if machine.nodes > 1:
        raise ConfigError(tr("calibrate=true measures one machine, this one: leave nodes= out."))
    command = [sys.executable, "-m", "toolkit.bench.calibrate"]
    port = free_port()
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if machine.on_cpu else {})}
    ranks = [
        subprocess.Popen(  # noqa: S603
            [*command, str(rank), str(machine.ranks), str(port), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(machine.ranks)
    ]
    try:
        ended = [rank.communicate(timeout=_PATIENCE_S) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise ConfigError(tr("calibrate=true: no answer within {seconds} s.", seconds=_PATIENCE_S)) from error
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        reason = next((line for _, text in ended for line in reversed(text.strip().splitlines())), "?")
        raise ConfigError(tr("calibrate=true: the machine could not be measured: {reason}", reason=reason))
    file = file_of(cfg, machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(ended[0][0].strip().splitlines()[-1] + "\n", encoding="utf-8")
