"""Rates that were measured on a machine, kept beside the tokenised data. No torch."""

import json
import os
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.plan.kept import file_for
from toolkit.plan.machine import Machine
from toolkit.plan.parameters import Outline
from toolkit.plan.speed import Rates, assumed


def file_of(cfg: RunConfig, machine: Machine, outline: Outline) -> Path:
    """Return where the rates of this host are kept: they depend on its processors, on the model and on its rows."""
    inputs = [
        "cpu" if machine.on_cpu else [machine.card.name if machine.card else "", machine.memory_bytes >> 30],
        machine.ranks,
        outline.sizes,
        outline.vocabulary,
        cfg.precision.dtype.value,
        cfg.data.max_length,
    ]
    return file_for(cfg, f"rates-{os.uname().nodename}", inputs)


def rates_of(cfg: RunConfig, machine: Machine, outline: Outline) -> Rates:
    """Return what has been measured on the machine at hand for this model, else what is assumed."""
    file = file_of(cfg, machine, outline)
    if machine.nodes == 1 and file.is_file():
        try:
            return Rates(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, OSError):  # cut off, or of another version: as if it were not there
            pass
    return assumed(machine, cfg.precision.dtype.value)
