"""Calibration as its starter sees it: a program per rank, whose rates are kept or whose error is shown."""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.messages import ConfigError
from toolkit.plan.calibration import calibrate
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.plan.outline import Outline
from toolkit.plan.planned_machine import parse_machine
from toolkit.plan.speed import Rates, rates_of

BEGIN = f"""#!{sys.executable}
import json, os, sys, time
config, answer = sys.argv[-2:]
rank = int(os.environ["RANK"])
"""


@pytest.fixture
def asked(tmp_path: Path) -> tuple[RunConfig, Machine, Outline]:
    cfg = load(["recipe=quickstart", "model=glm_tiny", f"prepare.dir={tmp_path}/cache"]).cfg
    return cfg, parse_machine("2xcpu", 1, ""), outline_of(cfg)


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let every rank run this program instead of measuring."""
    file = folder / "program"
    file.write_text(BEGIN + text, encoding="utf-8")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_the_slowest_rank_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[RunConfig, Machine, Outline]
) -> None:
    rates = asdict(replace(rates_of(*asked), is_measured=True))
    text = f"rates = {rates!r}\nrates['flops'] *= 1 + rank\nrates['latency_s'] = 1.0 + rank\n"
    program(tmp_path, monkeypatch, text + "assert 'glm' in open(config).read()\njson.dump(rates, open(answer, 'w'))")
    calibrate(*asked)
    assert rates_of(*asked) == Rates(**rates | {"latency_s": 2.0})


def test_an_error_of_one_rank_ends_all_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[RunConfig, Machine, Outline]
) -> None:
    note = tmp_path / "pid"
    text = f"if rank:\n    while not os.path.exists({str(note)!r}): time.sleep(0.01)\n    sys.exit('too busy')\n"
    program(
        tmp_path, monkeypatch, text + f"json.dump(os.getpid(), open('{note}.new', 'w'))\n"
        f"os.replace('{note}.new', '{note}')\ntime.sleep(300)"
    )  # fmt: skip
    started = time.monotonic()
    with pytest.raises(ConfigError, match="the machine could not be measured: too busy"):
        calibrate(*asked)
    assert time.monotonic() - started < 200
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(note.read_text()), 0)
    assert not rates_of(*asked).is_measured
