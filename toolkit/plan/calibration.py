"""Rates that were measured on a machine, kept beside the tokenised data. No torch."""

import json
import os
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.plan.machine import Machine
from toolkit.plan.speed import Rates, assumed


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
